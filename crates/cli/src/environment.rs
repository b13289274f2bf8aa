//! Environment variables: one for each flag of `serve`, and notices of those that nothing reads.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use clap::builder::{BoolishValueParser, Resettable};
use clap::{Arg, ArgAction, Command};

use super::failure::is_typed;
use super::messages;
use super::nearest::nearest;

const PREFIX: &str = "TILEWRIGHT_";

/// Variables that are not those of a flag, the tests' among them.
const OTHERS: [&str; 18] = [
    "TILEWRIGHT_BENCH",
    "TILEWRIGHT_CACHE_DIR",
    "TILEWRIGHT_CASE",
    "TILEWRIGHT_CHECKED",
    "TILEWRIGHT_DATA",
    "TILEWRIGHT_DIE_AT",
    "TILEWRIGHT_FULL",
    "TILEWRIGHT_FUZZ",
    "TILEWRIGHT_HISTORY",
    "TILEWRIGHT_LINTS",
    messages::VARIABLE,
    "TILEWRIGHT_LOSE_DEVICE",
    "TILEWRIGHT_NO_GPU",
    "TILEWRIGHT_ROUNDS",
    "TILEWRIGHT_SCREENSHOTS",
    "TILEWRIGHT_SEED",
    "TILEWRIGHT_TUNE_SOFTWARE",
    "TILEWRIGHT_WARP",
];

/// Gives each flag of `serve` the variable `TILEWRIGHT_FLAG`, unless it has one. A list is separated by commas.
pub fn add_variables(serve: Command, words: &[OsString]) -> Command {
    serve.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|long| !["help", "version"].contains(long)).map(str::to_owned) else {
            return arg;
        };
        let arg = match arg.get_env() {
            Some(_) => arg,
            // clap keeps names as long as the program runs.
            None => arg.env(&*Box::leak(variable(&long).into_boxed_str())),
        };
        if arg.get_env().and_then(std::env::var_os).is_none() {
            return truth(arg);
        }
        // Only in a variable: values on the command line may contain commas.
        let is_list = matches!(arg.get_action(), ArgAction::Append) && !is_given(words, &arg);
        if is_list { arg.value_delimiter(',') } else { truth(arg) }
    })
}

/// Ignores variables that are addresses of Kubernetes' services.
pub fn without_links(command: Command) -> Command {
    let without_link = |arg: Arg| match arg.get_env().and_then(std::env::var_os) {
        Some(value) if is_link(&value) => arg.env(Resettable::Reset),
        _ => arg,
    };
    command.mut_args(without_link).mut_subcommands(without_links)
}

/// The variable of a flag.
fn variable(long: &str) -> String {
    PREFIX.to_owned() + &long.replace('-', "_").to_uppercase()
}

/// Lets the variable of a switch be `1`, `true`, `yes`, `off` and the like.
fn truth(arg: Arg) -> Arg {
    match arg.get_action() {
        ArgAction::SetTrue => arg.value_parser(BoolishValueParser::new()),
        _ => arg,
    }
}

/// Whether the words have a value of the flag.
fn is_given(words: &[OsString], arg: &Arg) -> bool {
    let spellings = [arg.get_long().map(|long| format!("--{long}")), arg.get_short().map(|short| format!("-{short}"))];
    spellings.iter().flatten().any(|spelling| is_typed(spelling, words.iter().filter_map(|word| word.to_str())))
}

/// Whether a value is what Kubernetes puts into all containers for a service of this name: an address of it.
fn is_link(value: &OsStr) -> bool {
    value.to_str().is_some_and(|value| value.starts_with("tcp://") || value.starts_with("udp://"))
}

/// Reports variables that nothing reads, and malformed ones that `clap` does not read.
pub fn tell_ignored(command: &Command) {
    messages::check_variable();
    let known = known(command);
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        // Other variables of Kubernetes' services.
        let is_foreign = is_link(&value) || name.contains("_SERVICE_") || name.contains("_PORT_");
        if !is_foreign && !known.contains(name) {
            let hint = nearest(name, known.iter().map(String::as_str));
            let hint = hint.map_or(String::new(), |near| format!("; did you mean {near}?"));
            notice!("the environment variable {name} is not known{hint}");
        }
    }
    let threads = std::env::var_os("RAYON_NUM_THREADS").filter(|n| !n.is_empty());
    if let Some(given) = threads.filter(|n| n.to_str().is_none_or(|n| n.parse::<usize>().is_err())) {
        let n = std::thread::available_parallelism().map_or(1, usize::from);
        notice!("RAYON_NUM_THREADS is `{}`, expected a number; there are {n} threads", given.display());
    }
}

/// The variables of all commands, and the others.
fn known(command: &Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str().map(str::to_owned));
    let below = command.get_subcommands().flat_map(known);
    own.chain(below).chain(OTHERS.map(str::to_owned)).filter(|name| name.starts_with(PREFIX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::command;

    #[test]
    #[cfg(feature = "serve")]
    fn every_flag_of_serve_has_one_variable_of_its_own() {
        let command = command(&[]);
        let serve = command.find_subcommand("serve").unwrap();
        let mut seen = BTreeSet::new();
        for arg in serve.get_arguments().filter(|arg| arg.get_long().is_some_and(|long| long != "help")) {
            let name = arg.get_env().unwrap_or_else(|| panic!("{arg} has no variable")).to_str().unwrap();
            assert!(seen.insert(name.to_owned()), "{name} is used twice");
            assert!(!OTHERS.contains(&name), "{name} means something else");
        }
        for name in ["TILEWRIGHT_CTX", "TILEWRIGHT_PARALLEL", "TILEWRIGHT_LAZY", "TILEWRIGHT_CORS", "TILEWRIGHT_TIER"] {
            assert!(seen.contains(name), "{name}");
        }
    }

    #[test]
    fn service_links_are_told_from_ports() {
        assert!(is_link(OsStr::new("tcp://10.0.0.1:8080")) && !is_link(OsStr::new("8080")));
        let cors = Arg::new("cors").long("cors");
        assert!(is_given(&["--cors=a".into()], &cors) && !is_given(&["--cors-x".into(), "cors".into()], &cors));
    }
}
