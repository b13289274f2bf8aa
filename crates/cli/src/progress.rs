//! Progress of a command with a known total: a bar on a terminal, lines now and then elsewhere if asked for.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on a terminal, hidden elsewhere. The template's placeholders are those of `indicatif`.
pub fn bar(total: u64, template: &str) -> ProgressBar {
    let bar = if io::stderr().is_terminal() { ProgressBar::new(total) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
