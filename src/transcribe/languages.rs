//! Languages by code or name.

use crate::load::LANGUAGES;

/// The code of a language by its code or its name, in any case.
pub(super) fn code_of(language: &str) -> Option<&'static str> {
    let language = language.trim().to_lowercase();
    LANGUAGES.iter().find(|(code, name)| *code == language || *name == language).map(|(code, _)| *code)
}

/// The name of a language by its code; the code itself where it is unknown.
pub fn language_name(code: &str) -> &str {
    LANGUAGES.iter().find(|(known, _)| *known == code).map_or(code, |(_, name)| name)
}
