//! Stop texts in a stream: what might be the beginning of one is held back until it is known.

/// Passes text through up to the first stop text.
#[derive(Debug, Default)]
pub(super) struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    pub fn new(stops: &[String]) -> Self {
        StopFilter { stops: stops.to_vec(), held: String::new() }
    }

    /// Adds text. Returns what can be emitted, and whether a stop text was reached.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).filter(|&at| at > 0 && at <= text.len());
    ends.filter(|&at| text.is_char_boundary(text.len() - at) && text.ends_with(&stop[..at])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut filter = StopFilter::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        let mut out = String::new();
        for piece in pieces {
            let (text, stopped) = filter.push(piece);
            out += &text;
            if stopped {
                return (out, true);
            }
        }
        (out + &filter.finish(), false)
    }

    #[test]
    fn text_is_cut_at_the_first_stop_however_it_is_split() {
        for cut in 0..=11 {
            let text = "one END two";
            assert_eq!(run(&["END", "two"], &[&text[..cut], &text[cut..]]), ("one ".into(), true), "cut at {cut}");
        }
    }

    #[test]
    fn the_beginning_of_a_stop_is_held_back_and_given_out_later() {
        let mut filter = StopFilter::new(&["abc".into()]);
        assert_eq!(filter.push("xab"), ("x".into(), false));
        assert_eq!(filter.push("abd"), ("ababd".into(), false));
        assert_eq!(filter.push("é a"), ("é ".into(), false));
        assert_eq!(filter.finish(), "a");
    }

    #[test]
    fn characters_of_several_bytes_are_not_split() {
        assert_eq!(run(&["é!"], &["caf", "é", " é", "! rest"]), ("café ".into(), true));
    }
}
