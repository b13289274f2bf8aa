//! Transcripts as subtitles and as JSON.

use serde_json::{Value, json};

use super::{Segment, Task, Transcript, Word};

/// A transcript with its segments, as OpenAI's `verbose_json` has them; `language` is a code. Words, if it has any, are in
/// their segments, as `whisper` writes them.
pub fn to_json(transcript: &Transcript, task: Task) -> Value {
    let has_words = transcript.segments.iter().any(|segment| !segment.words.is_empty());
    let word = |word: &Word| {
        let (start, end) = (rounded(word.start), rounded(word.end));
        json!({"word": word.text, "start": start, "end": end, "probability": word.probability})
    };
    let segment = |(id, segment): (usize, &Segment)| {
        let mut json = json!({
            "id": id,
            "seek": segment.seek,
            "start": rounded(segment.start),
            "end": rounded(segment.end),
            "text": segment.text,
            "tokens": segment.tokens,
            "temperature": short(segment.temperature),
            "avg_logprob": segment.mean_log_probability,
            "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech,
        });
        if has_words {
            json["words"] = segment.words.iter().map(word).collect();
        }
        json
    };
    json!({
        "task": task.name(),
        "language": transcript.language,
        "duration": rounded(transcript.seconds),
        "text": transcript.text,
        "segments": transcript.segments.iter().enumerate().map(segment).collect::<Vec<_>>(),
    })
}

/// All words of a transcript, as the field `words` of OpenAI's `verbose_json` has them: without spaces around them.
pub fn words_to_json(transcript: &Transcript) -> Value {
    let words = transcript.segments.iter().flat_map(|segment| &segment.words);
    let word = |word: &Word| json!({"word": word.text.trim(), "start": rounded(word.start), "end": rounded(word.end)});
    words.map(word).collect()
}

/// A line for each word of segments, with its times, as whisper.cpp prints them.
pub fn to_timed_words(segments: &[Segment]) -> String {
    let line = |word: &Word| {
        let [start, end] = [word.start, word.end].map(|seconds| clock(seconds, '.'));
        format!("[{start} --> {end}]  {}\n", plain(&word.text))
    };
    segments.iter().flat_map(|segment| &segment.words).map(line).collect()
}

/// Seconds in thousandths.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

/// A number of few digits without those that 32 bits add.
fn short(value: f32) -> f64 {
    (f64::from(value) * 1e4).round() / 1e4
}

/// Subtitles in the format of SubRip (`.srt`).
pub fn to_srt(segments: &[Segment]) -> String {
    let shown = segments.iter().filter(|segment| !segment.text.trim().is_empty()).enumerate();
    let entry = |(i, segment): (usize, &Segment)| {
        let [start, end] = [segment.start, segment.end].map(|seconds| clock(seconds, ','));
        format!("{}\n{start} --> {end}\n{}\n\n", i + 1, plain(&segment.text).replace("-->", "->"))
    };
    shown.map(entry).collect()
}

/// Subtitles in the format [WebVTT](https://www.w3.org/TR/webvtt1/) (`.vtt`).
pub fn to_vtt(segments: &[Segment]) -> String {
    let shown = segments.iter().filter(|segment| !segment.text.trim().is_empty());
    let entry = |segment: &Segment| {
        let [start, end] = [segment.start, segment.end].map(|seconds| clock(seconds, '.'));
        let text = plain(&segment.text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        format!("{start} --> {end}\n{text}\n\n")
    };
    format!("WEBVTT\n\n{}", shown.map(entry).collect::<String>())
}

/// Without lines of its own: an empty one would end an entry.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Hours, minutes, seconds and thousandths.
fn clock(seconds: f64, point: char) -> String {
    let all = (seconds.max(0.0) * 1000.0).round() as u64;
    let (hours, minutes) = (all / 3_600_000, all / 60_000 % 60);
    format!("{hours:02}:{minutes:02}:{:02}{point}{:03}", all / 1000 % 60, all % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments() -> Vec<Segment> {
        let segment = |start, end, text: &str| Segment { start, end, text: text.into(), ..Segment::default() };
        vec![
            segment(0.0, 1.5, " Hello\n\nthere."),
            segment(2.0, 2.5, " "),
            segment(3599.9996, 3661.02, " A <b> & c --> d"),
        ]
    }

    #[test]
    fn srt_numbers_entries_and_has_commas() {
        let want = "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n\
                    2\n01:00:00,000 --> 01:01:01,020\nA <b> & c -> d\n\n";
        assert_eq!(to_srt(&segments()), want);
        assert_eq!(to_srt(&[]), "");
    }

    #[test]
    fn words_have_times_in_json_and_lines() {
        let word = |start, end, text: &str| Word { start, end, text: text.into(), probability: 0.5 };
        let words = vec![word(0.0, 0.30000000000000004, " Hello"), word(0.3, 1.5, " there.")];
        let segments = vec![Segment { words, ..Segment::default() }, Segment::default()];
        assert_eq!(
            to_timed_words(&segments),
            "[00:00:00.000 --> 00:00:00.300]  Hello\n[00:00:00.300 --> 00:00:01.500]  there.\n"
        );
        let transcript = Transcript { segments, ..Transcript::default() };
        let hello = json!({"word": "Hello", "start": 0.0, "end": 0.3});
        assert_eq!(words_to_json(&transcript)[0], hello);
        let json = to_json(&transcript, Task::Transcribe);
        let there = json!({"word": " there.", "start": 0.3, "end": 1.5, "probability": 0.5});
        assert_eq!((&json["segments"][0]["words"][1], &json["segments"][1]["words"]), (&there, &json!([])));
        let json = to_json(&Transcript { segments: vec![Segment::default()], ..transcript }, Task::Transcribe);
        assert!(json["segments"][0].get("words").is_none(), "{json}");
    }

    #[test]
    fn vtt_has_a_head_and_escapes_marks() {
        let want = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n\n\
                    01:00:00.000 --> 01:01:01.020\nA &lt;b&gt; &amp; c --&gt; d\n\n";
        assert_eq!(to_vtt(&segments()), want);
        assert_eq!(to_vtt(&[]), "WEBVTT\n\n");
    }
}
