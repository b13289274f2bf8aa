//! `tilewright completions` and `tilewright man`: shell completions and manual pages.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;
use clap_mangen::Man;
use tilewright::Error;

use super::CommandFailure;
use super::command_line::command;

/// Print a shell completion script.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tilewright completions bash > ~/.local/share/bash-completion/completions/tilewright
  tilewright completions fish > ~/.config/fish/completions/tilewright.fish")]
pub struct CompletionsArgs {
    /// Shell to generate the script for.
    shell: Shell,
}

/// Print the manual page, as troff.
#[derive(Args)]
#[command(after_help = "\
Examples:
  tilewright man | man -l -
  tilewright man --dir ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Write the manual pages of all commands to this folder instead.
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
}

pub fn completions(args: &CompletionsArgs) -> Result<(), CommandFailure> {
    let mut command = command(&[]);
    let name = command.get_name().to_string();
    // In memory first: clap_complete panics if a write fails, such as to a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    print(&script)
}

pub fn man(args: &ManArgs) -> Result<(), CommandFailure> {
    // `help` has no page.
    let command = command(&[]).disable_help_subcommand(true);
    let Some(folder) = &args.dir else {
        let mut page = Vec::new();
        Man::new(command).render(&mut page)?;
        return print(&page);
    };
    let written = fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(command, folder));
    Ok(written.map_err(|source| Error::Io { path: folder.clone(), source })?)
}

fn print(text: &[u8]) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    out.write_all(text)?;
    Ok(out.flush()?)
}
