//! Transcripts as subtitles and as JSON.

use serde_json::{Value, json};

use super::{Segment, Task, Transcript};

/// A transcript with its segments, as OpenAI's `verbose_json` has them; `language` is a code.
pub fn to_json(transcript: &Transcript, task: Task) -> Value {
    let segment = |(id, segment): (usize, &Segment)| {
        json!({
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
        })
    };
    json!({
        "task": match task {
            Task::Transcribe => "transcribe",
            Task::Translate => "translate",
        },
        "language": transcript.language,
        "duration": rounded(transcript.seconds),
        "text": transcript.text,
        "segments": transcript.segments.iter().enumerate().map(segment).collect::<Vec<_>>(),
    })
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
    fn vtt_has_a_head_and_escapes_marks() {
        let want = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n\n\
                    01:00:00.000 --> 01:01:01.020\nA &lt;b&gt; &amp; c --&gt; d\n\n";
        assert_eq!(to_vtt(&segments()), want);
        assert_eq!(to_vtt(&[]), "WEBVTT\n\n");
    }
}
