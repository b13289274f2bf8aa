//! Progress of a command with a known total, on a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

use super::messages::{self, Level};

/// Whether progress is shown: on a terminal, unless messages are off.
pub fn is_shown() -> bool {
    io::stderr().is_terminal() && messages::are_shown(Level::Info)
}

/// A bar on a terminal, hidden elsewhere. The template's placeholders are those of `indicatif`.
pub fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = if is_shown() { ProgressBar::new(total) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
