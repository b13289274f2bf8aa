//! Messages on stderr, by level. Results go to stdout, and errors are always printed; everything else goes through this
//! module.

use std::sync::atomic::{AtomicU8, Ordering};

use clap::{ArgAction, Args};
use console::Term;

use super::word_wrap::WordWrap;

/// Prints a line to stderr. Unlike `eprintln!`, does not panic if stderr is gone, such as a closed terminal.
macro_rules! say {
    ($($text:tt)*) => {{
        use ::std::io::Write as _;
        let _ = writeln!(::std::io::stderr().lock(), $($text)*);
    }};
}

/// As `say!`, without the end of the line.
macro_rules! say_part {
    ($($text:tt)*) => {{
        use ::std::io::Write as _;
        let _ = write!(::std::io::stderr().lock(), $($text)*);
    }};
}

/// Prints a warning: something was not done, and the command goes on.
macro_rules! warning {
    ($($text:tt)*) => {
        if $crate::messages::are_shown($crate::messages::Level::Warn) {
            $crate::messages::say_wrapped(format!("warning: {}", format_args!($($text)*)));
        }
    };
}

/// Prints a notice: something that the user may not expect.
macro_rules! notice {
    ($($text:tt)*) => {
        if $crate::messages::are_shown($crate::messages::Level::Info) {
            $crate::messages::say_wrapped(format!("notice: {}", format_args!($($text)*)));
        }
    };
}

/// Prints a line of a summary.
macro_rules! summary {
    ($($text:tt)*) => {
        if $crate::messages::are_shown($crate::messages::Level::Info) {
            say!($($text)*);
        }
    };
}

/// Prints what the program chooses.
macro_rules! debug {
    ($($text:tt)*) => {
        if $crate::messages::are_shown($crate::messages::Level::Debug) {
            say!("debug: {}", format_args!($($text)*));
        }
    };
}

/// Prints a line to stderr, broken between words at a terminal's edge.
pub fn say_wrapped(text: String) {
    let terminal = Term::stderr();
    match terminal.size_checked().filter(|_| terminal.is_term()) {
        Some((_, width)) => say!("{}", WordWrap::default().wrap(&text, width.into())),
        None => say!("{text}"),
    }
}

/// Severity of a message. A level prints its own messages and more severe ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Why the command failed.
    Error,
    /// What was not done, though the command goes on.
    Warn,
    /// What the user may not expect, progress and summaries.
    Info,
    /// What the program chooses, and what GPU drivers print.
    Debug,
}

const LEVELS: [(&str, Level); 4] =
    [("error", Level::Error), ("warn", Level::Warn), ("info", Level::Info), ("debug", Level::Debug)];

/// The environment variable that sets the level.
pub const VARIABLE: &str = "TILEWRIGHT_LOG";

static LEVEL: AtomicU8 = AtomicU8::new(Level::Info as u8);

/// How much is printed beside the result.
#[derive(Args)]
pub struct MessageArgs {
    /// Print the result and errors only.
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print the program's choices and GPU driver output too; as TILEWRIGHT_LOG=debug.
    ///
    /// TILEWRIGHT_LOG is `error` (as --quiet), `warn`, `info` (default: notices, progress and summaries) or `debug`.
    #[arg(long, short, global = true, action = ArgAction::Count)]
    verbose: u8,
}

impl MessageArgs {
    /// Sets the level: that of the flags, else that of the variable.
    pub fn apply(&self) {
        let variable = std::env::var_os(VARIABLE).unwrap_or_default();
        let named = LEVELS.into_iter().find(|(name, _)| variable.eq_ignore_ascii_case(name));
        let level = match (self.quiet, self.verbose, named) {
            (true, ..) => Level::Error,
            (_, 1.., _) => Level::Debug,
            (_, _, Some((_, level))) => level,
            (_, _, None) => Level::Info,
        };
        LEVEL.store(level as u8, Ordering::Relaxed);
    }
}

/// Warns of a variable that is not the name of a level.
pub fn check_variable() {
    let variable = std::env::var_os(VARIABLE).unwrap_or_default();
    if !variable.is_empty() && !LEVELS.iter().any(|(name, _)| variable.eq_ignore_ascii_case(name)) {
        let names = LEVELS.map(|(name, _)| name).join(", ");
        warning!("{VARIABLE} is `{}`, expected one of {names}", variable.display());
    }
}

/// Whether messages of a level are printed.
pub fn are_shown(level: Level) -> bool {
    level as u8 <= LEVEL.load(Ordering::Relaxed)
}
