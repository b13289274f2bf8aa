//! From the words that the user typed to [`Cli`]: what `clap` parses, flags with a single dash and several letters, and
//! a model in place of a subcommand.

use std::error::Error as StdError;
use std::ffi::{OsStr, OsString};
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::path::{Path, PathBuf};

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};
use tilewright::Error;
use tilewright::chat::ChatTemplate;
use tilewright::hub::HubError;
use tilewright::load::ModelFile;

use super::failure::{self, Typed};
use super::model_names::{self, is_model};
use super::{Cli, environment, help, hub};

/// Flags of llama.cpp with several letters behind one dash, which `clap` would read as several flags. For those without a
/// counterpart here, their long names, which errors then have.
const OF_LLAMA: [(&str, &str); 29] = [
    ("-ngl", "--gpu-layers"),
    ("-sys", "--system"),
    ("-np", "--parallel"),
    ("-ctk", "--kv-type"),
    ("-ctv", "--cache-type-v"),
    ("-fa", "--flash-attn"),
    ("-ub", "--ubatch-size"),
    ("-sm", "--split-mode"),
    ("-st", "--single-turn"),
    ("-cnv", "--conversation"),
    ("-no-cnv", "--no-conversation"),
    ("-md", "--draft"),
    ("-ngld", "--gpu-layers-draft"),
    ("-dev", "--device"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-cmoe", "--cpu-moe"),
    ("-ot", "--override-tensor"),
    ("-mu", "--model-url"),
    ("-mg", "--main-gpu"),
    ("-ts", "--tensor-split"),
    ("-cb", "--cont-batching"),
    ("-tb", "--threads-batch"),
    ("-hfr", "--hf-repo"),
    ("-hff", "--hf-file"),
    ("-nkvo", "--no-kv-offload"),
    ("-kvu", "--kv-unified"),
    ("-osrt", "--srt"),
    ("-ovtt", "--vtt"),
    ("-oj", "--json"),
];

/// Flags of llama.cpp and vLLM that commands here lack, and what to do instead.
const INSTEAD: [(&[&str], &str); 36] = [
    (&["--no-mmap", "--mmap", "--mlock", "--swap-space"], "leave it out: weights that do not fit are read from disk"),
    (&["--jinja", "--no-jinja"], "leave it out: the model's chat template is always used"),
    (&["-b", "--batch-size", "--ubatch-size", "--max-num-batched-tokens"], "leave it out: the device decides"),
    (&["--no-warmup", "--enforce-eager"], "leave it out: there is no warm-up"),
    (&["--flash-attn"], "leave it out: attention is always fused"),
    (&["--enable-prefix-caching", "--cont-batching"], "leave it out: `serve` always does it"),
    (&["--trust-remote-code"], "leave it out: code of models is never run"),
    (
        &["--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"],
        "leave it out: the model's format is detected",
    ),
    (&["--dtype", "--quantization"], "leave it out: weights have their file's type"),
    (&["--cache-type-v", "--cache-type-k", "--kv-cache-dtype"], "--kv-type is the type of keys and values"),
    (
        &["--split-mode", "--tensor-split", "--tensor-parallel-size", "--pipeline-parallel-size"],
        "use --layers-on DEVICE=N",
    ),
    (&["--single-turn"], "`tilewright chat MODEL \"a question\"` answers once"),
    (&["--conversation"], "use `tilewright chat`"),
    (&["--no-conversation"], "use `tilewright run`"),
    (&["--max-model-len"], "use --ctx"),
    (&["--max-num-seqs", "--n-parallel"], "use --parallel"),
    (&["--gpu-memory-utilization"], "use --memory-limit"),
    (&["--served-model-name", "--alias"], "`tilewright serve NAME=MODEL` names a model"),
    (&["--speculative-config", "--model-draft"], "use --draft"),
    (&["--enable-lora", "--lora-modules"], "use --lora-adapter"),
    (&["--hf-repo", "--hf-file", "--model-url", "--revision"], "`hf:OWNER/REPO[:QUANTISATION][@REVISION]` is a model"),
    (&["--metrics", "--slots", "--props"], "leave it out: the endpoint is always there"),
    (
        &["--embedding", "--embeddings", "--reranking", "--rerank", "--task", "--runner"],
        "leave it out: the model's kind decides",
    ),
    (&["--chat-template"], "use --template"),
    (&["--chat-template-kwargs", "--reasoning-budget"], "use --template-var, as in enable_thinking=false"),
    (&["--ssl-keyfile", "--ssl-key-file"], "use --tls-key"),
    (&["--ssl-certfile", "--ssl-cert-file"], "use --tls-cert"),
    (&["--disable-log-requests", "--log-disable"], "leave it out: requests are not logged"),
    (&["--cpu-moe", "--n-cpu-moe", "--override-tensor"], "use --memory-limit: experts beyond it are read from disk"),
    (&["--model-id"], "the first argument is the model"),
    (&["--max-concurrent-requests"], "use --queue"),
    (&["--hf-token"], "set the variable HF_TOKEN"),
    (&["--list-devices"], "use `tilewright info`"),
    (&["--color", "-i", "--interactive", "-e", "--escape", "-j"], "leave it out"),
    (&["--initial-prompt"], "use --prompt"),
    (&["--output-format"], "use --srt, --vtt or --json"),
];

/// The program's command line, for these words.
pub fn command(words: &[OsString]) -> Command {
    let command = help::arranged(Cli::command(), words.iter().any(|word| word == "-h"));
    let command = command.mut_subcommand("serve", |serve| environment::add_variables(serve, words));
    with_negative_numbers(environment::without_links(command))
}

/// Lets a negative number be a flag's value, whose error then names the flag.
fn with_negative_numbers(command: Command) -> Command {
    let is_valued = |arg: &Arg| arg.get_long().is_some() && arg.get_action().takes_values();
    let command = command.mut_args(|arg| if is_valued(&arg) { arg.allow_negative_numbers(true) } else { arg });
    command.mut_subcommands(with_negative_numbers)
}

/// Parses the words of this process. Ends it after `--help` and an invalid command line.
///
/// # Errors
/// Those of [`hub::localise`], if the model decides on the command.
pub fn parse() -> Result<Cli, Error> {
    let words = plain(std::env::args_os());
    let command = command(&words);
    let words = subcommand_first(&command, words);
    let (parsed, model) = match first(&command, &words) {
        First::Command => (Parsed::new(&command, words), Ok(None)),
        First::Model(at) => implied(&command, &words, at),
    };
    let matches = parsed.matches.unwrap_or_else(|error| with_hint(error, &command).exit());
    let cli = Cli::from_arg_matches(&matches).map(Cli::joined).unwrap_or_else(|error| error.exit());
    failure::remember(Typed::new(&command, &matches, &parsed.words));
    let mut cli = cli.unwrap_or_else(|conflict| command.clone().error(ErrorKind::ArgumentConflict, conflict).exit());
    cli.messages.apply();
    environment::tell_ignored(&command);
    if let (Some(local), Some(model)) = (model?, cli.model()) {
        *model = local;
    }
    Ok(cli)
}

/// Words as `clap` reads them.
struct Parsed {
    matches: Result<ArgMatches, clap::Error>,
    words: Vec<OsString>,
}

impl Parsed {
    fn new(command: &Command, words: Vec<OsString>) -> Parsed {
        Parsed { matches: command.clone().try_get_matches_from(&words), words }
    }
}

/// The words, with llama.cpp's flags in place of those of [`OF_LLAMA`], and `-hf OWNER/REPO` as `--model
/// hf:OWNER/REPO`.
fn plain(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let (mut plain, mut is_open, mut is_address) = (Vec::new(), true, false);
    for word in words {
        is_open &= word != "--";
        let long = OF_LLAMA.iter().find(|(short, _)| word == *short && is_open);
        plain.push(match (long, word.to_str()) {
            (_, Some(name)) if is_address && !name.starts_with("hf:") => format!("hf:{name}").into(),
            (Some((_, long)), _) => long.into(),
            (None, Some("-hf")) if is_open => "--model".into(),
            (None, _) => word.clone(),
        });
        is_address = is_open && word == "-hf";
    }
    plain
}

/// The words with the subcommand first, where only flags precede it.
fn subcommand_first(command: &Command, mut words: Vec<OsString>) -> Vec<OsString> {
    let is_after_flags = |at: &usize| {
        let below = words[*at].to_str().and_then(|word| command.find_subcommand(word));
        below.is_some_and(|below| are_flags(command, below, &words[1..*at]))
    };
    if let Some(at) = (2..words.len()).find(is_after_flags) {
        words[1..=at].rotate_right(1);
    }
    words
}

/// Whether words are flags, those of `below` or of another command, with their values.
fn are_flags(command: &Command, below: &Command, words: &[OsString]) -> bool {
    let known =
        || [below].into_iter().chain(command.get_subcommands()).chain([command]).flat_map(Command::get_arguments);
    let mut words = words.iter().map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix('-').filter(|name| !["", "-", "V", "-version"].contains(name)) else {
            return false;
        };
        let (arg, has_value) = match name.strip_prefix('-') {
            Some(long) => {
                let (long, value) = long.split_once('=').map_or((long, None), |(long, value)| (long, Some(value)));
                let is_alias = |arg: &Arg| arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&long));
                (known().find(|arg| arg.get_long() == Some(long) || is_alias(arg)), value.is_some())
            }
            None => (known().find(|arg| arg.get_short() == name.chars().next()), name.chars().count() > 1),
        };
        if !has_value && arg.is_some_and(|arg| arg.get_action().takes_values()) && words.next().is_none() {
            return false;
        }
    }
    true
}

/// What the command line begins with.
#[derive(Debug, PartialEq)]
enum First {
    /// A subcommand, or what `clap` answers itself.
    Command,
    /// Neither: a model, or options. The subcommand would be at this index.
    Model(usize),
}

/// `-q` and `-v` may precede a subcommand.
fn first(command: &Command, words: &[OsString]) -> First {
    let is_global = |word: &OsString| {
        let word = word.to_string_lossy();
        let is_v = word.strip_prefix("-v").is_some_and(|others| others.chars().all(|other| other == 'v'));
        is_v || ["--quiet", "--verbose", "-q"].contains(&&*word)
    };
    let at = 1 + words.iter().skip(1).take_while(|word| is_global(word)).count();
    let Some(word) = words.get(at).map(|word| word.to_string_lossy()) else { return First::Model(at) };
    match &*word {
        "-h" | "--help" | "-V" | "--version" | "help" => First::Command,
        name if command.find_subcommand(name).is_some() => First::Command,
        option if option.starts_with('-') => First::Model(at),
        model if is_model(model) => First::Model(at),
        _ => First::Command,
    }
}

/// Parses words without a subcommand as those of `run` or of `chat`: of the one that has the flags; of both, `chat` if
/// the model has a chat template. The model is then already local.
fn implied(command: &Command, words: &[OsString], at: usize) -> (Parsed, Result<Option<PathBuf>, Error>) {
    let with = |name: &str| {
        let mut words = words.to_vec();
        words.insert(at, name.into());
        Parsed::new(command, words)
    };
    let (run, chat) = (with("run"), with("chat"));
    let mut model = match (&run.matches, &chat.matches) {
        (Err(_), Ok(_)) => return (chat, Ok(None)),
        (Ok(matches), Ok(_)) => model_of(matches),
        (_, Err(_)) => None,
    };
    let local = model.as_mut().map(|model| hub::localise(model, &mut |text| notice!("{text}")));
    match (local.transpose(), model) {
        (Err(error), _) => (run, Err(error)),
        (Ok(_), Some(model)) if converses(&model) => (chat, Ok(Some(model))),
        (Ok(_), model) => (run, Ok(model)),
    }
}

/// The model of a parsed command line.
fn model_of(matches: &ArgMatches) -> Option<PathBuf> {
    let mut cli = Cli::from_arg_matches(matches).ok()?.joined().ok()?;
    cli.messages.apply();
    cli.model().cloned()
}

/// Whether a model has a chat template. One that cannot be read has none: `run` says what is wrong with it.
fn converses(model: &Path) -> bool {
    let Ok(file) = ModelFile::open(model) else { return false };
    let header = &file.header;
    header.tokenizer.as_ref().is_ok_and(|tokenizer| ChatTemplate::for_model(&header.chat, tokenizer).is_some())
}

/// An error with what is right, or what to do next.
fn with_hint(error: clap::Error, command: &Command) -> clap::Error {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match (error.kind(), context(ContextKind::InvalidSubcommand), context(ContextKind::InvalidArg)) {
        (ErrorKind::InvalidSubcommand, Some(word), _) => with_model_hint(error, &word),
        (ErrorKind::UnknownArgument, _, Some(flag)) => with_owner(error, &flag, command),
        (ErrorKind::MissingRequiredArgument, ..) => with_missing_model(error),
        (ErrorKind::ValueValidation, _, Some(flag)) => {
            let value = context(ContextKind::InvalidValue).unwrap_or_default();
            let Some(source) = StdError::source(&error) else { return error };
            let mut reason = reason_of(source, &value);
            if source.is::<HubError>()
                && let Some(address) = model_names::address(&value, &hub::available().unwrap_or_default())
            {
                reason += &format!("; did you mean `{address}`?");
            }
            let message =
                format!("invalid value '{value}' for '{flag}': {reason}\n\nFor more information, try '--help'.\n");
            clap::Error::raw(error.kind(), message)
        }
        _ => error,
    }
}

/// Why a value is refused, without the words of Rust's parsers.
fn reason_of(reason: &(dyn StdError + 'static), value: &str) -> String {
    let text = reason.to_string();
    if let Some(Error::Option { expected, .. }) = reason.downcast_ref() {
        return format!("expected {expected}");
    }
    if reason.is::<ParseFloatError>() {
        return "expected a number".into();
    }
    if let Some(error) = reason.downcast_ref::<ParseIntError>() {
        return match error.kind() {
            IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "expected a number nearer to 0".into(),
            IntErrorKind::Zero => "expected 1 or more".into(),
            _ if value.parse::<i128>().is_ok() => "expected 0 or more".into(),
            _ => "expected a whole number".into(),
        };
    }
    let range = text.split_once(" is not in ").and_then(|(_, range)| range.split_once(".."));
    let Some((least, most)) = range.map(|(least, most)| (least, most.trim_start_matches('='))) else {
        return text.strip_prefix(&format!("`{value}`: ")).unwrap_or(&text).to_owned();
    };
    // A type's maximum is a limit only to larger numbers.
    let is_limit = most
        .parse()
        .is_ok_and(|most: i128| most < u32::MAX.into() || value.parse().is_ok_and(|value: i128| value > most));
    if is_limit { format!("expected {least} to {most}") } else { format!("expected {least} or more") }
}

/// Adds a tip, in place of others.
fn suggest(error: &mut clap::Error, tip: impl Into<StyledStr>) {
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
}

/// `transcribe a.wav` lacks its model, not its file.
fn with_missing_model(mut error: clap::Error) -> clap::Error {
    let lacks = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(missing)) => missing.first().map(String::as_str),
        _ => None,
    };
    if lacks == Some("<FILE>...") {
        let hint = "the first argument is the model, such as hf:openai/whisper-tiny";
        suggest(&mut error, hint);
    }
    error
}

/// Names the commands that have a flag which this one does not know, or what to do instead of giving it.
fn with_owner(mut error: clap::Error, flag: &str, command: &Command) -> clap::Error {
    let long = flag.trim_start_matches("--");
    let has =
        |below: &&Command| flag.starts_with("--") && below.get_arguments().any(|arg| arg.get_long() == Some(long));
    let names: Vec<String> =
        command.get_subcommands().filter(has).map(|below| format!("`{}`", below.get_name())).collect();
    let dashed = flag.replace('_', "-");
    let instead = INSTEAD.iter().find(|(flags, _)| flags.contains(&&*dashed));
    let hint = match instead {
        _ if !names.is_empty() => format!("{flag} is a flag of {}", names.join(", ")),
        Some((_, instead)) => (*instead).to_owned(),
        None => {
            // `clap` suggests to pass it as a value.
            error.remove(ContextKind::Suggested);
            return error;
        }
    };
    error.remove(ContextKind::SuggestedArg);
    // It has the flag that `clap` would suggest.
    error.remove(ContextKind::Usage);
    suggest(&mut error, hint);
    error
}

/// Commands of ollama, and what does the same.
const OF_OLLAMA: [(&str, &str); 5] = [
    ("create", "`tilewright serve NAME=MODEL` names a model; system messages and options are part of requests"),
    ("cp", "`tilewright serve NAME=MODEL` names a model"),
    ("stop", "POST /v1/models/NAME/unload unloads a model"),
    ("push", "there is no registry"),
    ("signin", "there is no registry"),
];

/// An unknown subcommand may have been meant as a model, or be one of ollama's.
fn with_model_hint(mut error: clap::Error, word: &str) -> clap::Error {
    if let Some((_, instead)) = OF_OLLAMA.iter().find(|(name, _)| *name == word) {
        error.remove(ContextKind::SuggestedSubcommand);
        suggest(&mut error, *instead);
        return error;
    }
    if error.get(ContextKind::SuggestedSubcommand).is_none() {
        let known = hub::available().unwrap_or_default();
        let hint = match model_names::address(word, &known) {
            Some(address) => format!("to run a model: `tilewright {address}`"),
            None if word.contains(' ') => {
                "a prompt follows the model; for the built-in one: `tilewright -p PROMPT`".into()
            }
            None => "a model is a file, a folder or hf:OWNER/REPO; `tilewright list --available` lists some".into(),
        };
        suggest(&mut error, hint);
    }
    error
}

/// Joins `--model MODEL [PROMPT]` with `MODEL [PROMPT]`: beside `--model`, the only word is the prompt.
///
/// # Errors
/// A message, if there are two models or two prompts.
pub fn join(
    model: &mut Option<PathBuf>,
    named: Option<PathBuf>,
    text: &mut Option<String>,
    has_prompt: bool,
) -> Result<(), String> {
    let Some(named) = named else { return Ok(()) };
    let word = model.replace(named.clone());
    let Some(word) = word.map(PathBuf::into_os_string) else { return Ok(()) };
    let shown = word.display().to_string();
    if text.is_some() || is_model(&shown) {
        return Err(format!("the model is given twice: `{shown}` and --model {}", named.display()));
    }
    if has_prompt {
        return Err(format!("the prompt is given twice: `{shown}` and by a flag"));
    }
    *text = Some(word.into_string().map_err(|word| format!("the prompt `{}` is not UTF-8", OsStr::display(&word)))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        format!("tilewright {text}").split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn flags_of_llama_cpp_are_rewritten() {
        let read = |text: &str| {
            let plain = plain(words(text).into_iter());
            plain[1..].iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(read("run -ngl 99 -sys x -- -ngl"), "run --gpu-layers 99 --system x -- -ngl");
        assert_eq!(read("-hf a/b:Q4_0 -n 3"), "--model hf:a/b:Q4_0 -n 3");
        assert_eq!(read("run -fa on -ctk q8_0"), "run --flash-attn on --kv-type q8_0");
    }

    #[test]
    fn flags_before_a_subcommand_are_moved_after_it() {
        let command = command(&[]);
        for (text, want) in [
            ("--device cpu run a.gguf", "run --device cpu a.gguf"),
            ("-m a.gguf -c 64 chat hello", "chat -m a.gguf -c 64 hello"),
            ("-q --temp=0 --json -n5 run", "run -q --temp=0 --json -n5"),
            ("--ctx-size 9 bench serve", "bench --ctx-size 9 serve"),
            ("--json ls", "ls --json"),
            ("--no-such-flag list", "list --no-such-flag"),
            ("--help run", "run --help"),
            // Not commands: a value, a prompt, the words after `--`.
            ("-p run", "-p run"),
            ("--prompt run --seed 1", "--prompt run --seed 1"),
            ("a.gguf run", "a.gguf run"),
            ("-- run", "-- run"),
            ("-V run", "-V run"),
            ("run --json list", "run --json list"),
        ] {
            assert_eq!(subcommand_first(&command, words(text)), words(want), "{text}");
        }
    }

    #[test]
    fn invalid_command_lines_say_what_is_right() {
        for (text, want) in [
            ("run -c -1", "invalid value '-1' for '--ctx <N|auto>': expected a number of tokens, 0 (the model's) or"),
            ("run --ctx 1.5", "expected a number of tokens"),
            ("run --seed x", "'--seed <N>': expected a whole number, 0 or more, or -1"),
            ("run --top-k -1", "invalid value '-1' for '--top-k <K>': expected 0 or more"),
            ("run --temp hot", "'--temperature <T>': expected a number\n"),
            ("run --kv-type q4", "'--kv-type <TYPE>': expected f32, f16, q8_0"),
            ("run --prompt-ids 1,x", "invalid value 'x' for '--prompt-ids <IDS>': expected a whole number"),
            ("run --layers-on cpu", "'--layers-on <DEVICE=N>': expected a device and a number of layers"),
            ("run --parallel 0", "'--parallel <N>': expected 1 to 64"),
            ("run --count 0", "'--count <N>': expected 1 or more"),
            ("perplexity -f a -c 2", "'--ctx <N>': expected 4 or more"),
            ("perplexity -f a --chunks 0", "'--chunks <N>': expected 1 or more"),
            ("bench -r -2", "invalid value '-2' for '--repetitions <"),
            ("serve --port x", "'--port <PORT>': expected a whole number"),
            ("serve --port 99999", "'--port <PORT>': expected 0 to 65535"),
            ("serve --queue -1", "'--queue <N>': expected 0 or more"),
            ("serve --max-body 0", "expected 1 byte or more"),
            ("serve --max-body 5T", "unknown unit `T`, expected K, M or G"),
            ("serve --cache-tokens 999999999999", "'--cache-tokens <N>': expected 0 to 4294967295"),
            ("run --host a", "--host is a flag of `ps`, `serve`"),
            ("embed a --query b", "--query is a flag of `rerank`"),
            ("run --temprature 1", "a similar argument exists: '--temperature'"),
        ] {
            let words = words(text);
            let command = command(&words);
            let error = with_hint(command.clone().try_get_matches_from(&words).unwrap_err(), &command);
            let told = error.render().to_string();
            assert!(error.exit_code() == 2 && told.starts_with("error: ") && told.contains(want), "{text}: {told}");
            assert!(!told.contains("digit found") && told.ends_with("try '--help'.\n"), "{text}: {told}");
        }
    }

    #[test]
    fn first_word_is_a_subcommand_or_a_model() {
        let command = command(&[]);
        for (text, want) in [
            ("", First::Model(1)),
            ("--seed 7", First::Model(1)),
            ("-q -vv hf:a/b", First::Model(3)),
            ("a.gguf --help", First::Model(1)),
            ("Qwen/Qwen3", First::Model(1)),
            ("-v run", First::Command),
            ("ls", First::Command),
            ("rnu", First::Command),
            ("--help", First::Command),
            ("-V", First::Command),
        ] {
            assert_eq!(first(&command, &words(text)), want, "{text}");
        }
    }

    #[test]
    fn model_flag_leaves_the_word_to_the_prompt() {
        let joined = |model: Option<&str>, named: Option<&str>, text: Option<&str>| {
            let (mut model, mut text) = (model.map(PathBuf::from), text.map(str::to_owned));
            join(&mut model, named.map(PathBuf::from), &mut text, false).map(|()| (model, text))
        };
        assert_eq!(joined(Some("a"), None, Some("b")), Ok((Some("a".into()), Some("b".into()))));
        assert_eq!(joined(Some("hello"), Some("m"), None), Ok((Some("m".into()), Some("hello".into()))));
        assert!(joined(Some("a.gguf"), Some("m"), None).unwrap_err().contains("given twice"));
        assert!(joined(Some("a"), Some("m"), Some("b")).is_err());
    }
}
