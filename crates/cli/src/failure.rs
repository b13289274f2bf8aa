//! Why a command fails, in terms of what the user typed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Arg, ArgMatches, Command};
use tilewright::Error;
use tilewright::hub::HubError;
use tilewright::load::{ModelFile, ModelShape, SpeechFile};

/// Why a command ended early.
pub enum CommandFailure {
    /// An error to report.
    Error(Error),
    /// The reader closed stdout. This counts as success.
    StdoutClosed,
}

impl From<Error> for CommandFailure {
    fn from(error: Error) -> Self {
        CommandFailure::Error(error)
    }
}

impl From<io::Error> for CommandFailure {
    fn from(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe => CommandFailure::StdoutClosed,
            _ => CommandFailure::Error(Error::Io { path: "stdout".into(), source }),
        }
    }
}

/// Reports a command's error, if any, and returns the exit code.
pub fn ended(result: Result<(), CommandFailure>) -> ExitCode {
    let Err(CommandFailure::Error(error)) = result else { return ExitCode::SUCCESS };
    say!("error: {}", describe(&error));
    // An invalid value is a usage error, also if the library detects it.
    let is_usage =
        matches!(error.code(), "option" | "constraint") || matches!(error, Error::Hub(HubError::Address { .. }));
    if is_usage { ExitCode::from(2) } else { ExitCode::FAILURE }
}

/// Options of the library whose flags have other names.
const FLAGS: [(&str, &str); 13] = [
    ("context_length", "ctx"),
    ("gbnf", "grammar"),
    ("host_cache_bytes", "host-cache"),
    ("lark", "grammar"),
    ("max_sequences", "parallel"),
    ("models", "model"),
    ("mtp_tokens", "mtp"),
    ("n_ctx", "ctx"),
    ("n_queries", "batch"),
    ("output_tokens", "n-gen"),
    ("prompt_tokens", "n-prompt"),
    ("task", "translate"),
    ("width", "beams"),
];

/// The command line that this process runs.
pub struct Typed {
    command: String,
    words: Vec<String>,
    flags: Vec<Arg>,
    /// The values of each flag, by the flag's name.
    values: Vec<(String, Vec<OsString>)>,
}

static TYPED: OnceLock<Typed> = OnceLock::new();

/// Keeps the command line, for messages.
pub fn remember(typed: Typed) {
    // The first one counts.
    let _ = TYPED.set(typed);
}

impl Typed {
    pub fn new(command: &Command, matches: &ArgMatches, words: &[OsString]) -> Typed {
        let (mut below, mut matches, mut names) = (command, matches, Vec::new());
        while let Some((name, inner)) = matches.subcommand() {
            let Some(found) = below.find_subcommand(name) else { break };
            names.push(name);
            (below, matches) = (found, inner);
        }
        let words = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let values = |arg: &Arg| {
            let values = matches.try_get_raw(arg.get_id().as_str()).ok().flatten()?;
            Some((arg.get_long()?.to_owned(), values.map(OsStr::to_os_string).collect()))
        };
        let values = below.get_arguments().filter_map(values).collect();
        Typed { command: names.join(" "), words, flags: below.get_arguments().cloned().collect(), values }
    }

    /// Whether the command has this flag.
    fn has(&self, long: &str) -> bool {
        self.flags.iter().any(|arg| arg.get_long() == Some(long))
    }

    /// The flag whose value is this path, also with the name before it or the scale behind it.
    fn flag_of(&self, path: &Path) -> Option<String> {
        let path = path.to_str().filter(|path| !path.is_empty())?;
        self.flag_with(|_, value| {
            let is_it = |value: &str| {
                value.strip_prefix(path).is_some_and(|behind| behind.is_empty() || behind.starts_with(':'))
            };
            value
                .to_str()
                .is_some_and(|value| is_it(value) || value.split_once('=').is_some_and(|(_, file)| is_it(file)))
        })
    }

    /// The flag whose name and value satisfy `is_it`, as the user wrote it.
    fn flag_with(&self, is_it: impl Fn(&str, &OsStr) -> bool) -> Option<String> {
        let (long, _) = self.values.iter().find(|(long, values)| values.iter().any(|value| is_it(long, value)))?;
        self.flag(long)
    }

    /// A flag or variable for an option of the library, as the user wrote it; `None` if the command has no such flag.
    fn flag(&self, option: &str) -> Option<String> {
        let named =
            FLAGS.iter().find(|(name, flag)| *name == option && self.has(flag)).map(|(_, flag)| (*flag).to_owned());
        let long = named.unwrap_or_else(|| option.replace('_', "-"));
        let arg = self.flags.iter().find(|arg| arg.get_long() == Some(&long))?;
        let aliases = arg.get_all_aliases().unwrap_or_default();
        let spellings = [&*long].into_iter().chain(aliases).map(|name| format!("--{name}"));
        let mut spellings = spellings.chain(arg.get_short().map(|short| format!("-{short}")));
        let is_typed = |spelling: &String| is_typed(spelling, self.words.iter().map(String::as_str));
        let variable = || {
            let name = arg.get_env().filter(|name| std::env::var_os(name).is_some());
            name.map(|name| name.to_string_lossy().into_owned())
        };
        // Models are usually given without a flag.
        let usual = || if option == "models" { "MODEL".into() } else { format!("--{long}") };
        Some(spellings.find(is_typed).or_else(variable).unwrap_or_else(usual))
    }
}

/// Whether a flag is among the words, as `--flag`, `--flag=VALUE`, `-f` or `-fVALUE`.
pub fn is_typed<'w>(spelling: &str, words: impl IntoIterator<Item = &'w str>) -> bool {
    let is_it = |word: &str| match word.strip_prefix(spelling) {
        // A short flag may be followed by its value.
        Some(rest) => rest.is_empty() || rest.starts_with('=') || !spelling.starts_with("--"),
        None => false,
    };
    words.into_iter().take_while(|word| *word != "--").any(is_it)
}

/// The message of an error, with flags in place of the library's options, and what to do next.
pub fn describe(error: &Error) -> String {
    let typed = TYPED.get();
    describe_for(error, typed)
}

fn describe_for(error: &Error, typed: Option<&Typed>) -> String {
    let command = typed.map_or("", |typed| typed.command.as_str());
    let flag = |name: &str| typed.and_then(|typed| typed.flag(name));
    match error {
        Error::Option { option, expected, found } => {
            let flags: Option<Vec<String>> = option.split(", ").map(flag).collect();
            match flags.as_deref() {
                Some([first @ .., last]) if !first.is_empty() => {
                    format!("{} and {last} are {found}, expected {expected}", first.join(", "))
                }
                Some(flags) => format!("{} is {found}, expected {expected}", flags.concat()),
                // A variable of another program.
                None if option.chars().all(|c| c.is_ascii_uppercase() || c == '_') => {
                    format!("{option} is {found}, expected {expected}")
                }
                None => error.to_string(),
            }
        }
        Error::Constraint { field, expected, found } => {
            let (kind, part) =
                field.split_once(": ").map_or((&**field, String::new()), |(kind, part)| (kind, format!(": {part}")));
            match flag(kind) {
                Some(flag) => format!("{flag}{part} is {found}, expected {expected}"),
                None => error.to_string(),
            }
        }
        Error::Tokenizer { field, expected, found } if field == "prompt" => match flag("prompt_ids") {
            Some(flag) => format!("{flag} has {found}, expected {expected}"),
            None => error.to_string(),
        },
        Error::NoAdapter { wanted, available } => {
            let is_of = |long: &str, value: &OsStr| {
                ["adapter", "device", "layers-on"].contains(&long) && value.to_string_lossy().contains(wanted.as_str())
            };
            let flag = typed.and_then(|typed| typed.flag_with(is_of)).unwrap_or_else(|| "--device".into());
            let apis = ["cuda", "mps", "metal", "vulkan", "rocm", "xpu"];
            let is_api = apis.contains(&wanted.split(':').next().unwrap_or_default());
            let hint = if is_api { "; did you mean `gpu`?" } else { "" };
            format!(
                "{flag} is `{wanted}`, which no adapter matches, expected auto, gpu, cpu, or a number or part of a name \
                 from `tilewright info`; available: {available}{hint}"
            )
        }
        Error::Memory { .. } => match flag("memory_limit") {
            Some(flag) => format!("{error}; {flag} sets the limit"),
            None => error.to_string(),
        },
        Error::Io { path, source } => {
            let has = |long| typed.is_some_and(|typed| typed.has(long));
            let hint = match source.kind() {
                io::ErrorKind::AlreadyExists if has("force") => "; --force overwrites it",
                io::ErrorKind::AddrInUse if has("port") => "; --port chooses another one",
                _ => "",
            };
            format!("{}: {source}{hint}", named_path(path, typed))
        }
        Error::ContextFull { .. } => match command {
            "chat" => format!("{error}; /clear empties it, --slide drops its older half, --ctx sets its length"),
            "run" => format!("{error}; --slide drops its older half, --ctx sets its length"),
            _ => error.to_string(),
        },
        Error::InFile { path, source } => match other_kind(path, source, typed) {
            Some(message) => message,
            None => format!("{}: {}", named_path(path, typed), describe_for(source, typed)),
        },
        other => other.to_string(),
    }
}

/// A path, after the flag whose value it is.
fn named_path(path: &Path, typed: Option<&Typed>) -> String {
    let shown = path.display().to_string();
    match typed.and_then(|typed| typed.flag_of(path)) {
        Some(flag) => format!("{flag} {shown}"),
        None => shown,
    }
}

/// The message for a model of another kind than the command, or the flag, takes.
fn other_kind(path: &Path, error: &Error, typed: Option<&Typed>) -> Option<String> {
    let command = typed.map_or("", |typed| typed.command.as_str());
    if command != "transcribe" && matches!(error, Error::Unsupported { .. }) && SpeechFile::is_of_speech(path) {
        let folder = path.parent().filter(|_| path.ends_with("config.json")).unwrap_or(path);
        return Some(format!("{} is a speech model: use `tilewright transcribe`", folder.display()));
    }
    // The header is read again, but only for the model's own errors.
    let Error::Unsupported { format: "model", .. } = error else { return None };
    let shape = ModelFile::open(path).ok()?.header.shape;
    let kind = match &shape {
        ModelShape::Decoder(_) => "a language model, which continues texts",
        ModelShape::Encoder(shape) if shape.scoring.is_some() => "a cross-encoder, which scores pairs of texts",
        ModelShape::Encoder(shape) if shape.late.is_some() => {
            "a late-interaction model, which scores texts for a query"
        }
        ModelShape::Encoder(_) if command == "rerank" => "an encoder without a head that scores pairs",
        ModelShape::Encoder(_) => "an encoder, which turns texts into vectors",
    };
    let shown = named_path(path, typed);
    if shown.starts_with("--draft ") {
        return Some(format!("{shown} is {kind}, expected a smaller language model with the same vocabulary"));
    }
    let other = match (&shape, command) {
        // It may be an unmarked Qwen3-Reranker: the error says how to mark it.
        (ModelShape::Decoder(config), "rerank") if config.architecture == "qwen3" => return None,
        (ModelShape::Decoder(_), "rerank" | "embed") => "run",
        (ModelShape::Decoder(_), "bench embed") => "bench",
        (ModelShape::Encoder(shape), "run" | "chat" | "bench" | "tune") if shape.ranks() => "rerank",
        (ModelShape::Encoder(shape), "embed") if shape.late.is_some() => "rerank",
        (ModelShape::Encoder(_), "bench") => "bench embed",
        (ModelShape::Encoder(shape), "run" | "chat" | "tune" | "rerank") if !shape.ranks() => "embed",
        _ => return None,
    };
    Some(format!("{shown} is {kind}: use `tilewright {other}`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::command;

    fn typed(text: &str) -> Typed {
        let words: Vec<OsString> = format!("tilewright {text}").split_whitespace().map(OsString::from).collect();
        let command = command(&words);
        let matches = command.clone().try_get_matches_from(&words).unwrap();
        Typed::new(&command, &matches, &words)
    }

    #[test]
    fn options_are_called_as_the_user_wrote_them() {
        for (text, option, want) in [
            ("run -c 0", "context_length", Some("-c")),
            ("run --ctx=0", "context_length", Some("--ctx")),
            ("run", "context_length", Some("--ctx")),
            ("run --temp 3", "temperature", Some("--temp")),
            ("chat --mtp 3", "mtp_tokens", Some("--mtp")),
            ("bench -r 0", "repetitions", Some("-r")),
            ("list", "temperature", None),
        ] {
            assert_eq!(typed(text).flag(option).as_deref(), want, "{text}");
        }
        let error = |option| Error::Option { option, expected: "1 or more".into(), found: "0".into() };
        let told = |text: &str, option| describe_for(&error(option), Some(&typed(text)));
        assert_eq!(told("run -c 0", "context_length"), "-c is 0, expected 1 or more");
        assert_eq!(told("bench", "n_prompt, n_gen"), "--n-prompt and --n-gen are 0, expected 1 or more");
        assert_eq!(told("list", "HF_HOME"), "HF_HOME is 0, expected 1 or more");
        assert_eq!(told("list", "top_k"), "option top_k is 0, expected 1 or more");
        assert_eq!(told("serve a b", "models"), "MODEL is 0, expected 1 or more");
    }

    #[test]
    fn errors_name_the_flag_as_the_user_wrote_it() {
        let constraint =
            |field: &str| Error::Constraint { field: field.into(), expected: "a name".into(), found: "missing".into() };
        let no_adapter = |wanted: &str| Error::NoAdapter { wanted: wanted.into(), available: "none".into() };
        let io = |path: &str, kind: io::ErrorKind| Error::Io { path: path.into(), source: io::Error::new(kind, "odd") };
        let odd = |path: &str| io(path, io::ErrorKind::Other);
        let exists = |path: &str| io(path, io::ErrorKind::AlreadyExists);
        let inside = |path: &str| constraint("gbnf").in_file(path);
        for (text, error, want) in [
            ("run --regex (", constraint("regex"), "--regex is missing, expected a name"),
            ("run --grammar a", constraint("gbnf: line 3"), "--grammar: line 3 is missing, expected a name"),
            ("run --grammar a", constraint("lark"), "--grammar is missing, expected a name"),
            ("run --tools a", constraint("tools: tool 0: name"), "--tools: tool 0: name is missing, expected a name"),
            ("run --tools a --tool-choice b", constraint("tool_choice"), "--tool-choice is missing, expected a name"),
            ("list", constraint("regex"), "constraint: regex is missing, expected a name"),
            ("run --device x7", no_adapter("x7"), "--device is `x7`, which no adapter matches"),
            ("run --adapter x7", no_adapter("x7"), "--adapter is `x7`, which"),
            ("run --layers-on 9=2 --ctx 9", no_adapter("9"), "--layers-on is `9`, which"),
            ("run -f a.txt", odd("a.txt"), "-f a.txt: odd"),
            ("run --file=a.txt", odd("a.txt"), "--file a.txt: odd"),
            ("run --lora a:0.5", odd("a"), "--lora a: odd"),
            ("serve --lora-adapter m:x=a.gguf:2", odd("a.gguf"), "--lora-adapter a.gguf: odd"),
            ("run a.txt", odd("a.txt"), "a.txt: odd"),
            ("run -f a.txt", odd("b.txt"), "b.txt: odd"),
            ("run -f a", inside("a"), "-f a: --grammar is missing, expected a name"),
            ("merge a b", exists("b"), "b: odd; --force overwrites it"),
            ("imatrix a -f b -o c", exists("c"), "-o c: odd; --force overwrites it"),
            ("run --session c", exists("c"), "--session c: odd"),
            ("serve", io("127.0.0.1:8080", io::ErrorKind::AddrInUse), "127.0.0.1:8080: odd; --port chooses another"),
        ] {
            let told = describe_for(&error, Some(&typed(text)));
            assert!(told.starts_with(want), "{text}: {told}");
        }
    }

    #[test]
    #[cfg(feature = "serve")]
    fn every_renamed_option_is_a_flag_of_some_command() {
        let command = command(&[]);
        fn longs(command: &Command) -> Vec<String> {
            let own = command.get_arguments().filter_map(|arg| arg.get_long().map(str::to_owned));
            own.chain(command.get_subcommands().flat_map(longs)).collect()
        }
        let longs = longs(&command);
        for (option, flag) in FLAGS {
            assert!(longs.iter().any(|long| long == flag), "{option}: --{flag}");
        }
    }
}
