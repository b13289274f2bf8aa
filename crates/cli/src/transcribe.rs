//! `tilewright transcribe`: speech to text.

use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::{Args, value_parser};
use tilewright::sound::{SAMPLE_RATE, Sound, SoundLimits};
use tilewright::transcribe::{Segment, Task, to_json, to_srt, to_timed_words, to_vtt};
use tilewright::{Error, TranscribeOptions, Transcriber, TranscriberOptions, Transcript, replace_file};

use super::{CommandFailure, DeviceArgs, check_output, progress, save_pipeline_caches, tell_findings};

/// Transcribe speech in sound files: Whisper.
///
/// Prints a line for each segment as soon as it is known. Windows of silence have no text.
#[derive(Args)]
pub struct TranscribeArgs {
    /// Speech model: Hugging Face folder of a Whisper model, ggml-*.bin of whisper.cpp, or hf:OWNER/REPO.
    pub model: PathBuf,
    /// Sound files: WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis); `-` is stdin.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Language that is spoken, by code or English name; `auto` detects it [default: auto].
    #[arg(long, short, value_name = "LANGUAGE")]
    language: Option<String>,
    /// Translate into English.
    #[arg(long)]
    translate: bool,
    /// Text that the model takes for what was said before: names, spelling, style.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Number of windows (of up to 30 s) to decode at once, 1 to 64. Faster for long sounds, but needs more memory. The sound is
    /// cut at pauses, and no window has the text before it as context.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u8).range(1..=64))]
    batch_size: u8,
    /// Print subtitles in the format of SubRip.
    #[arg(long, conflicts_with_all = ["vtt", "json"])]
    srt: bool,
    /// Print subtitles in the format WebVTT.
    #[arg(long, conflicts_with = "json")]
    vtt: bool,
    /// Print a JSON object with the segments; of several files a line each, with the file's name.
    #[arg(long)]
    json: bool,
    /// Print a line for each word with its times; with --json, segments have their words.
    #[arg(long)]
    words: bool,
    /// Write a file for each sound into a folder, by the sound's name, instead of printing; makes the folder.
    #[arg(long, value_name = "FOLDER")]
    output_dir: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn transcribe(args: &TranscribeArgs) -> Result<(), CommandFailure> {
    let outputs = args.outputs()?;
    let device = args.device.open()?;
    let mut transcriber = Transcriber::load(&device, &args.model, TranscriberOptions::default())?;
    for (file, output) in args.files.iter().zip(outputs) {
        args.one(&mut transcriber, file, output.as_deref())?;
    }
    tell_findings(&device);
    save_pipeline_caches([&device]);
    Ok(())
}

impl TranscribeArgs {
    /// Refuses files that do not exist, before a model is downloaded for them.
    ///
    /// # Errors
    /// [`Error::Io`] naming the first one.
    pub fn check_files(&self) -> Result<(), Error> {
        self.files.iter().filter(|file| file.as_os_str() != "-").try_for_each(|file| match std::fs::metadata(file) {
            Ok(_) => Ok(()),
            Err(source) => Err(Error::Io { path: file.clone(), source }),
        })
    }

    /// The file to write for each sound, if any, in a folder that exists.
    fn outputs(&self) -> Result<Vec<Option<PathBuf>>, Error> {
        let extension = match (self.srt, self.vtt, self.json) {
            (true, ..) => "srt",
            (_, true, _) => "vtt",
            (.., true) => "json",
            _ => "txt",
        };
        let Some(folder) = &self.output_dir else {
            let is_subtitles = self.srt || self.vtt;
            return match is_subtitles && self.files.len() > 1 {
                true => Err(Error::Option {
                    option: if self.srt { "srt" } else { "vtt" },
                    expected: "one file, or a folder by --output-dir".into(),
                    found: format!("for {} files", self.files.len()),
                }),
                false => Ok(vec![None; self.files.len()]),
            };
        };
        std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.clone(), source })?;
        let output = |file: &PathBuf| {
            let stem = file.file_stem().filter(|_| file.as_os_str() != "-").unwrap_or("stdin".as_ref());
            let mut name = stem.to_os_string();
            name.push(format!(".{extension}"));
            let path = folder.join(name);
            check_output("output_dir", &path, &[file], true)?;
            Ok(Some(path))
        };
        let outputs: Vec<Option<PathBuf>> = self.files.iter().map(output).collect::<Result<_, Error>>()?;
        for (i, path) in outputs.iter().enumerate() {
            if let (true, Some(path)) = (outputs[..i].contains(path), path) {
                let expected = "files of different names".into();
                let found = format!("for two files that become `{}`", path.display());
                return Err(Error::Option { option: "output_dir", expected, found });
            }
        }
        Ok(outputs)
    }

    fn one(&self, transcriber: &mut Transcriber, file: &Path, output: Option<&Path>) -> Result<(), CommandFailure> {
        let name = if file.as_os_str() == "-" { Path::new("stdin") } else { file };
        let named = |error: Error| match error.code() {
            "option" => error,
            _ => error.in_file(name),
        };
        let sound = read(file).map_err(named)?;
        match sound.n_damaged_packets() {
            0 => {}
            1 => warning!("{}: 1 damaged packet was replaced with silence", name.display()),
            n => warning!("{}: {n} damaged packets were replaced with silence", name.display()),
        }
        let streams = output.is_none() && !(self.srt || self.vtt || self.json);
        if streams && self.files.len() > 1 {
            writeln!(io::stdout(), "{}:", name.display())?;
        }
        let bar = progress::bar(sound.seconds() as u64, "{bar:32} {pos}/{len} s, {eta} left");
        let mut printed = Ok(());
        let mut on_window = |segments: &[Segment]| {
            bar.set_position(segments.last().map_or(bar.position(), |last| last.end as u64));
            if streams {
                printed = bar.suspend(|| {
                    let mut out = io::stdout().lock();
                    out.write_all(self.lines(segments).as_bytes())?;
                    out.flush()
                });
            }
            // Without a reader the rest is of no use.
            if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let options = self.options();
        let transcribing = transcriber.transcribe_with(sound.samples(), &options, &mut on_window);
        let transcript = pollster::block_on(transcribing).map_err(named);
        bar.finish_and_clear();
        let transcript = transcript?;
        printed?;
        match output {
            Some(path) => Ok(replace_file(path, self.text(&transcript).as_bytes())?),
            None if self.json && self.files.len() > 1 => {
                let mut json = to_json(&transcript, options.task);
                json["file"] = name.to_string_lossy().into();
                Ok(writeln!(io::stdout(), "{json}")?)
            }
            None if streams => Ok(()),
            None => {
                let mut out = io::stdout().lock();
                out.write_all(self.text(&transcript).as_bytes())?;
                Ok(out.flush()?)
            }
        }
    }

    fn options(&self) -> TranscribeOptions {
        TranscribeOptions {
            language: self.language.clone(),
            task: if self.translate { Task::Translate } else { Task::Transcribe },
            words: self.words,
            prompt: self.prompt.clone(),
            batch_size: usize::from(self.batch_size),
            ..TranscribeOptions::default()
        }
    }

    /// The transcript in the format asked for.
    fn text(&self, transcript: &Transcript) -> String {
        match (self.srt, self.vtt, self.json) {
            (true, ..) => to_srt(&transcript.segments),
            (_, true, _) => to_vtt(&transcript.segments),
            (.., true) => format!("{:#}\n", to_json(transcript, self.options().task)),
            _ => self.lines(&transcript.segments),
        }
    }

    /// Segments as text.
    fn lines(&self, segments: &[Segment]) -> String {
        match self.words {
            true => to_timed_words(segments),
            false => segments.iter().map(|segment| format!("{}\n", segment.text.trim())).collect(),
        }
    }
}

/// The sound of a file, or of stdin for `-`, as speech models read it.
fn read(file: &Path) -> Result<Sound, Error> {
    let bytes = match file.as_os_str() == "-" {
        true => {
            let mut bytes = Vec::new();
            io::stdin().read_to_end(&mut bytes).map(|_| bytes)
        }
        false => std::fs::read(file),
    };
    let bytes = bytes.map_err(|source| Error::Io { path: file.into(), source })?;
    Sound::decode_at(&bytes, SAMPLE_RATE, &SoundLimits::default())
}
