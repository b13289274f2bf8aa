//! Breaks streamed text between words at a terminal's edge.

use unicode_width::UnicodeWidthChar;

/// Columns of a tab stop.
const TAB: usize = 8;

/// The terminal's line so far.
#[derive(Default)]
pub struct WordWrap {
    column: usize,
    /// The last word, which moves to the next line if it does not fit.
    word: String,
    word_width: usize,
}

impl WordWrap {
    /// The text for a terminal of `width` columns. A word that reaches the edge is erased and written again on the
    /// next line, so that every part of it is visible at once. Control characters become visible ones: a model must
    /// not control the terminal.
    pub fn wrap(&mut self, text: &str, width: usize) -> String {
        // A cursor in the last column moves differently from terminal to terminal.
        let width = width.saturating_sub(1).max(1);
        let mut shown = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '\n' => {
                    shown.push('\n');
                    *self = WordWrap::default();
                }
                '\t' => {
                    let n = TAB - self.column % TAB;
                    (0..n).for_each(|_| self.space(&mut shown, width));
                }
                ' ' => self.space(&mut shown, width),
                c => self.letter(visible(c), &mut shown, width),
            }
        }
        shown
    }

    fn space(&mut self, shown: &mut String, width: usize) {
        self.word.clear();
        self.word_width = 0;
        // The break takes the space's place.
        if self.column < width {
            shown.push(' ');
            self.column += 1;
        }
    }

    fn letter(&mut self, c: char, shown: &mut String, width: usize) {
        let n = c.width().unwrap_or(0);
        if self.column + n > width {
            let moves = self.word_width < self.column;
            if moves && self.word_width > 0 {
                *shown += &format!("\x1b[{}D\x1b[K", self.word_width);
            }
            shown.push('\n');
            if moves {
                *shown += &self.word;
            } else {
                // A word that fills its line breaks anywhere.
                self.word.clear();
                self.word_width = 0;
            }
            self.column = self.word_width;
        }
        shown.push(c);
        self.column += n;
        // Between wide characters, such as Chinese ones, a line may break anywhere.
        if n > 1 {
            self.word.clear();
            self.word_width = 0;
        } else {
            self.word.push(c);
            self.word_width += n;
        }
    }
}

/// The character, or the symbol of a control character.
fn visible(c: char) -> char {
    match u32::from(c) {
        code @ 0..0x20 => char::from_u32(0x2400 + code).unwrap_or(' '),
        0x7f => '\u{2421}',
        0x80..0xa0 => char::REPLACEMENT_CHARACTER,
        _ => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A terminal's lines after this output: as much of one as the wrapping needs.
    fn screen(output: &str) -> Vec<String> {
        let mut lines = vec![Vec::new()];
        let mut chars = output.chars();
        while let Some(c) = chars.next() {
            let line: &mut Vec<char> = lines.last_mut().unwrap();
            match c {
                '\n' => lines.push(Vec::new()),
                '\x1b' => {
                    let code: String = chars.by_ref().skip(1).take_while(|c| *c != 'D').collect();
                    line.truncate(line.len() - code.parse::<usize>().unwrap());
                    assert_eq!(chars.by_ref().take(3).collect::<String>(), "\x1b[K");
                }
                c => line.push(c),
            }
        }
        lines.into_iter().map(|line| line.into_iter().collect()).collect()
    }

    /// The lines of a text that arrives in pieces of `n` characters.
    fn lines(text: &str, width: usize, n: usize) -> Vec<String> {
        let (mut wrap, mut output) = (WordWrap::default(), String::new());
        let chars: Vec<char> = text.chars().collect();
        chars.chunks(n).for_each(|piece| output += &wrap.wrap(&piece.iter().collect::<String>(), width));
        screen(&output)
    }

    #[test]
    fn lines_break_between_words() {
        for n in [1, 3, 100] {
            assert_eq!(lines("the quick brown fox", 10, n), ["the quick", "brown fox"]);
            assert_eq!(lines("the quick brown fox", 11, n), ["the quick ", "brown fox"]);
            assert_eq!(lines("a abcdefghijkl b", 6, n), ["a ", "abcde", "fghij", "kl b"]);
            assert_eq!(lines("one\ntwo three", 6, n), ["one", "two ", "three"]);
            assert_eq!(lines("\u{4f60}\u{597d}\u{4e16}\u{754c}", 6, n), ["\u{4f60}\u{597d}", "\u{4e16}\u{754c}"]);
        }
    }

    #[test]
    fn control_characters_are_visible() {
        assert_eq!(lines("a\x1b[31mb\x07\u{9b}c", 40, 1), ["a\u{241b}[31mb\u{2407}\u{fffd}c"]);
    }

    #[test]
    fn all_characters_are_shown_once_at_any_width() {
        let text = "Lily saw \u{1f642}\u{1f642} and e\u{301} in a very-long-hyphenated-word\tthere  \u{65e5}\u{672c}.";
        let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        for width in 1..60 {
            for n in [1, 7] {
                assert_eq!(letters(&lines(text, width, n).concat()), letters(text), "{width}");
            }
        }
    }
}
