//! Why a command fails, in terms of what the user typed.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{Arg, ArgMatches, Command};
use tilewright::Error;
use tilewright::hub::HubError;
use tilewright::load::{ModelFile, ModelShape};

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
const FLAGS: [(&str, &str); 8] = [
    ("context_length", "ctx"),
    ("host_cache_bytes", "host-cache"),
    ("max_sequences", "parallel"),
    ("models", "model"),
    ("mtp_tokens", "mtp"),
    ("n_queries", "batch"),
    ("output_tokens", "n-gen"),
    ("prompt_tokens", "n-prompt"),
];

/// The command line that this process runs.
pub struct Typed {
    command: String,
    words: Vec<String>,
    flags: Vec<Arg>,
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
        Typed { command: names.join(" "), words, flags: below.get_arguments().cloned().collect() }
    }

    /// A flag or variable for an option of the library, as the user wrote it; `None` if the command has no such flag.
    fn flag(&self, option: &str) -> Option<String> {
        let named = FLAGS.iter().find(|(name, _)| *name == option).map(|(_, flag)| (*flag).to_owned());
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
        spellings.find(is_typed).or_else(variable).or(Some(format!("--{long}")))
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
    match error {
        Error::Option { option, expected, found } => {
            let flag = |name: &str| typed.and_then(|typed| typed.flag(name));
            let flags: Option<Vec<String>> = option.split(", ").map(flag).collect();
            match flags {
                Some(flags) if flags.len() > 1 => format!("{} are {found}, expected {expected}", flags.join(" and ")),
                Some(flags) => format!("{} is {found}, expected {expected}", flags.concat()),
                // A variable of another program.
                None if option.chars().all(|c| c.is_ascii_uppercase() || c == '_') => {
                    format!("{option} is {found}, expected {expected}")
                }
                None => error.to_string(),
            }
        }
        Error::ContextFull { .. } => match command {
            "chat" => format!("{error}; /clear empties it, --slide drops its older half, --ctx sets its length"),
            "run" => format!("{error}; --slide drops its older half, --ctx sets its length"),
            _ => error.to_string(),
        },
        Error::InFile { path, source } => match other_kind(path, source, command) {
            Some(message) => message,
            None => format!("{}: {}", path.display(), describe_for(source, typed)),
        },
        other => other.to_string(),
    }
}

/// The message for a model of another kind than the command runs.
fn other_kind(path: &Path, error: &Error, command: &str) -> Option<String> {
    // The header is read again, but only for the model's own errors.
    let Error::Unsupported { format: "model", .. } = error else { return None };
    let shape = ModelFile::open(path).ok()?.header.shape;
    let (kind, use_for) = match (shape, command) {
        (ModelShape::Decoder(_), "rerank" | "embed" | "bench embed") => {
            ("a language model, which continues texts", ["run", "chat", "bench"])
        }
        (ModelShape::Encoder(shape), "rerank") if shape.scoring.is_none() => {
            ("an encoder without a head that scores pairs", ["embed", "embed", "embed"])
        }
        (ModelShape::Encoder(shape), "run" | "chat" | "bench" | "tune") => match shape.scoring {
            Some(_) => ("a cross-encoder, which scores pairs of texts", ["rerank", "rerank", "rerank"]),
            None => ("an encoder, which turns texts into vectors", ["embed", "embed", "bench embed"]),
        },
        _ => return None,
    };
    let [other, ..] = use_for;
    let other = if command.starts_with("bench") { use_for[2] } else { other };
    Some(format!("{} is {kind}: use `tilewright {other}`", path.display()))
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
