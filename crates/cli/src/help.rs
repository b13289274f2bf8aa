//! The order of `--help`: headings, the flags that people use first, and which flags `-h` leaves out.

use clap::{Arg, Command};

/// Subcommands by heading. Those that a build lacks are left out.
const COMMANDS: [(&str, &[&str]); 7] = [
    ("Generate text", &["run", "chat"]),
    ("Serve", &["serve", "ps"]),
    ("Embed and rank", &["embed", "rerank"]),
    ("Speech", &["transcribe"]),
    ("Models", &["pull", "list", "rm", "inspect", "tokenize", "detokenize", "quantize", "imatrix", "split", "merge"]),
    ("Devices, speed and quality", &["info", "bench", "tune", "kernels", "perplexity"]),
    ("This program", &["version", "completions", "man"]),
];

/// Flags of `run` and `chat` by heading, in order: those of `-h`, then those that it leaves out. The first have no
/// heading.
const FLAGS: [(&str, &[&str], &[&str]); 8] = [
    (
        "",
        &[
            "model",
            "prompt",
            "system",
            "max-tokens",
            "ctx",
            "temperature",
            "seed",
            "device",
            "threads",
            "json",
            "quiet",
        ],
        &[],
    ),
    ("Model", &[], &["lora", "template", "template-name", "template-var", "mmproj", "image-max-tokens"]),
    (
        "Prompt",
        &["prompt-file", "session", "lines", "image", "audio"],
        &["prompt-ids", "parse-special", "prefill", "documents", "no-display-prompt"],
    ),
    (
        "Sampling",
        &["top-k", "top-p", "min-p", "stop"],
        &["repeat-penalty", "repeat-last-n", "presence-penalty", "frequency-penalty", "logit-bias", "ignore-eos"],
    ),
    (
        "Output",
        &["json-schema", "regex", "grammar", "tools"],
        &[
            "json-object",
            "tool-choice",
            "tool-format",
            "single-call",
            "no-thinking",
            "count",
            "beams",
            "parallel",
            "logprobs",
        ],
    ),
    (
        "Speed and memory",
        &["gpu-layers", "memory-limit", "kv-type", "slide"],
        &["draft", "draft-tokens", "prompt-lookup", "mtp", "exact", "layers-on", "stream-rows", "tokens-per-submit"],
    ),
    ("Device", &[], &["adapter", "power", "tier", "no-tune"]),
    ("Advanced", &[], &["verbose", "profile"]),
];

/// A note at the end of `-h`.
const MORE: &str = "`--help` explains all flags, `-h` the common ones.";

/// The command line in order. `is_short`: for `-h`, which names no variables and aliases.
pub fn arranged(command: Command, is_short: bool) -> Command {
    let placed = |arg| placed(arg).hide_env(is_short);
    // Without a width, `-h` has a line for each flag. The terminal wraps what is longer.
    let command = command.term_width(0).mut_args(placed);
    let command = ["run", "chat"].into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |below| {
            // The flags of `sampling_numbers!` have no aliases of their own.
            let alias = |arg: Arg| if is_short { arg.alias("temp") } else { arg.visible_alias("temp") };
            below.mut_args(placed).mut_arg("temperature", alias).after_help(MORE).after_long_help("")
        })
    });
    let page = page(&command);
    command.help_template(page)
}

/// A flag under its heading, at its place.
fn placed(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
    for (n_before, (heading, common, rare)) in FLAGS.into_iter().enumerate() {
        let at = common.iter().chain(rare).position(|name| *name == long);
        let Some(at) = at else { continue };
        let arg = arg.display_order(100 * n_before + at).hide_short_help(at >= common.len());
        return if heading.is_empty() { arg } else { arg.help_heading(heading) };
    }
    arg
}

/// The template of `tilewright --help`.
fn page(command: &Command) -> String {
    let listed = |name: &&str| command.find_subcommand(name).is_some();
    let width = command.get_subcommands().map(|below| below.get_name().len()).max().unwrap_or_default();
    let mut page = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (heading, names) in COMMANDS.into_iter().filter(|(_, names)| names.iter().any(listed)) {
        page += &format!("\n{heading}:\n");
        for below in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = below.get_about().map_or(String::new(), ToString::to_string);
            let about = about.lines().next().unwrap_or_default();
            page += &format!("  {:<width$}  {}{}\n", below.get_name(), about, aliases(below));
        }
    }
    page + "\nOptions:\n{options}{after-help}\n"
}

fn aliases(command: &Command) -> String {
    let names: Vec<&str> = command.get_visible_aliases().collect();
    if names.is_empty() { String::new() } else { format!(" [alias: {}]", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::command;

    #[test]
    fn every_flag_of_run_and_chat_has_a_place() {
        let command = command(&[]);
        for name in ["run", "chat"] {
            for arg in command.find_subcommand(name).unwrap().get_arguments() {
                let Some(long) = arg.get_long() else { continue };
                let is_placed =
                    FLAGS.iter().any(|(_, common, rare)| common.iter().chain(*rare).any(|placed| *placed == long));
                assert!(is_placed || long == "help", "--{long} of {name} has no place");
            }
        }
    }

    #[test]
    fn every_subcommand_is_listed_under_a_heading() {
        let mut command = command(&[]);
        let help = command.render_help().to_string();
        for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
            assert!(help.contains(&format!("\n  {} ", below.get_name())), "{} in {help}", below.get_name());
        }
        assert!(!help.contains("Others:"), "{help}");
    }

    #[test]
    fn short_help_of_run_fits_one_screen() {
        let mut command = command(&["-h".into()]);
        // Adds the global flags.
        command.build();
        for name in ["run", "chat"] {
            let help = command.find_subcommand_mut(name).unwrap().render_help().to_string();
            let n_lines: usize = help.lines().map(|line| line.chars().count().div_ceil(100).max(1)).sum();
            assert!(n_lines <= 50, "{n_lines} lines of 100 columns:\n{help}");
        }
    }
}
