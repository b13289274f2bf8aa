//! From the words that the user typed to [`Cli`]: what `clap` parses, flags with a single dash and several letters, and
//! a model in place of a subcommand.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};
use tilewright::Error;
use tilewright::chat::ChatTemplate;
use tilewright::load::ModelFile;

use super::failure::{self, Typed};
use super::model_names::{self, is_model};
use super::{Cli, environment, help, hub};

/// Flags of llama.cpp with several letters behind one dash, which `clap` would read as several flags.
const OF_LLAMA: [(&str, &str); 2] = [("-ngl", "--gpu-layers"), ("-sys", "--system")];

/// The program's command line, for these words.
pub fn command(words: &[OsString]) -> Command {
    let command = help::arranged(Cli::command(), words.iter().any(|word| word == "-h"));
    let command = command.mut_subcommand("serve", |serve| environment::add_variables(serve, words));
    environment::without_links(command)
}

/// Parses the words of this process. Ends it after `--help` and an invalid command line.
///
/// # Errors
/// Those of [`hub::localise`], if the model decides on the command.
pub fn parse() -> Result<Cli, Error> {
    let words = plain(std::env::args_os());
    let command = command(&words);
    let (parsed, model) = match first(&command, &words) {
        First::Command => (Parsed::new(&command, words), Ok(None)),
        First::Model(at) => implied(&command, &words, at),
    };
    let matches = parsed.matches.unwrap_or_else(|error| with_hint(error).exit());
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

/// An unknown subcommand may have been meant as a model.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let word = match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => word.clone(),
        _ => return error,
    };
    if error.get(ContextKind::SuggestedSubcommand).is_none() {
        let known = hub::available().unwrap_or_default();
        let hint = match model_names::address(&word, &known) {
            Some(address) => format!("to run a model: `tilewright {address}`"),
            None => "a model is a file, a folder or hf:OWNER/REPO; `tilewright list --available` lists some".into(),
        };
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
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
