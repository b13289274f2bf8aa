//! Streams records from an input through a model to an output. While the device computes a batch, the next one is
//! read and the previous one is written.

use std::fs::File;
use std::io::Write;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use clap::ValueEnum;
use serde_json::json;
use tilewright::Error;

use super::error::{BadRecord, EmbedError, RecordFault};
use super::input::InputRecords;
use super::log::{Log, ProgressLog};
use super::output::RecordOutput;
use super::rows::{EmbeddedRecords, Records};

/// Batches queued between two stages.
const AHEAD: usize = 2;

/// What to do with a record without a valid text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnError {
    /// End with an error.
    Fail,
    /// Report it and continue.
    Skip,
}

/// An embedding job.
pub struct Job<'a> {
    /// Column with the texts.
    pub column: &'a str,
    pub on_error: OnError,
    /// Whether a null text gets a null vector instead of an error.
    pub has_nulls: bool,
    pub log: Log,
    pub progress: ProgressLog,
    pub skipped: Skipped,
}

/// The skipped records.
pub struct Skipped {
    file: Option<(PathBuf, File)>,
    n_records: u64,
}

impl Skipped {
    /// Reports skipped records to a file, as JSON lines, or else to stderr.
    pub fn create(path: Option<&Path>) -> Result<Skipped, EmbedError> {
        let create = |path: &Path| match File::create(path) {
            Ok(file) => Ok((path.to_path_buf(), file)),
            Err(error) => Err(EmbedError::write(path, error)),
        };
        Ok(Skipped { file: path.map(create).transpose()?, n_records: 0 })
    }

    fn push(&mut self, log: Log, bad: &BadRecord) -> Result<(), EmbedError> {
        self.n_records += 1;
        let fields = json!({ "input": bad.input, "record": bad.record, "error": bad.fault.to_string() });
        match &mut self.file {
            Some((path, file)) => {
                file.write_all(format!("{fields}\n").as_bytes()).map_err(|error| EmbedError::write(path, error))
            }
            None => {
                log.say("warning", &format!("skipped {bad}"), fields);
                Ok(())
            }
        }
    }
}

impl Job<'_> {
    /// Embeds all records. `embed` returns the vectors of some texts, `[n, dims]`, and reports how many texts are
    /// done.
    pub fn run(
        mut self,
        input: InputRecords,
        mut output: RecordOutput,
        mut embed: impl FnMut(&[&str], &mut dyn FnMut(usize)) -> Result<Vec<f32>, Error>,
    ) -> Result<(), EmbedError> {
        let (name, batches) = (input.name, input.batches);
        let (to_model, from_input) = mpsc::sync_channel(AHEAD);
        // Not joined if the job ends early: it may be blocked on stdin.
        let read = self.progress.read().clone();
        let reader = thread::spawn(move || {
            for rows in batches {
                read.add_records(rows.as_ref().map_or(0, Records::len));
                let is_last = rows.is_err();
                if to_model.send(rows).is_err() || is_last {
                    break;
                }
            }
        });
        let (to_output, from_model) = mpsc::sync_channel::<EmbeddedRecords>(AHEAD);
        let writer = thread::spawn(move || {
            let written = from_model.into_iter().try_for_each(|batch| output.write(&batch));
            written.map(|()| output)
        });
        let mut n_records = 0;
        let outcome = from_input.into_iter().try_for_each(|rows| {
            let rows = rows?;
            let n_rows = rows.len() as u64;
            let batch = self.embed(&name, rows, n_records, &mut embed)?;
            n_records += n_rows;
            self.progress.show(n_records);
            // The writer's own error is returned below.
            to_output.send(batch).map_err(|_| EmbedError::StdoutClosed)
        });
        drop(to_output);
        let output = writer.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        outcome?;
        // Its channel is closed, so it has ended. A panic must not pass for the end of the input.
        reader.join().unwrap_or_else(|panic| resume_unwind(panic));
        output.finish()?;
        self.progress.finish(n_records, self.skipped.n_records);
        Ok(())
    }

    /// Embeds a batch that follows `n_before` records.
    fn embed(
        &mut self,
        name: &str,
        mut rows: Records,
        n_before: u64,
        embed: &mut impl FnMut(&[&str], &mut dyn FnMut(usize)) -> Result<Vec<f32>, Error>,
    ) -> Result<EmbeddedRecords, EmbedError> {
        let first_record = rows.first_record;
        let bad = |row: usize, fault| BadRecord { input: name.into(), record: first_record + row as u64, fault };
        if !self.has_nulls {
            rows.bad.extend(rows.nulls(self.column).into_iter().map(|row| {
                bad(
                    row,
                    RecordFault::value(self.column, "null", "a string, since this output format cannot hold nulls"),
                )
            }));
        }
        let progress = &mut |n_done| self.progress.show(n_before + n_done as u64);
        let made = of_texts(&mut rows, name, self.column, self.on_error, |texts| match texts {
            [] => Ok(Vec::new()),
            texts => embed(texts, progress),
        });
        let (given, vectors) = made?;
        rows.bad.iter().try_for_each(|bad| self.skipped.push(self.log, bad))?;
        let mut has_vector = vec![false; rows.len()];
        given.into_iter().for_each(|row| has_vector[row] = true);
        Ok(EmbeddedRecords { rows, has_vector, vectors })
    }
}

/// Runs `model` on the texts of a batch; returns the rows that have one, and the result. With [`OnError::Skip`], a
/// text that the model refuses makes its record bad, and the others run again.
pub fn of_texts<T>(
    rows: &mut Records,
    name: &str,
    column: &str,
    on_error: OnError,
    mut model: impl FnMut(&[&str]) -> Result<T, Error>,
) -> Result<(Vec<usize>, T), EmbedError> {
    loop {
        rows.bad.sort_by_key(|bad| bad.record);
        if on_error == OnError::Fail && !rows.bad.is_empty() {
            return Err(rows.bad.swap_remove(0).into());
        }
        let texts = rows.texts(column);
        let (given, texts): (Vec<usize>, Vec<&str>) =
            texts.iter().enumerate().filter_map(|(row, text)| Some((row, (*text)?))).unzip();
        match model(&texts) {
            Ok(made) => return Ok((given, made)),
            Err(Error::InRecord { record, source }) => {
                let record = rows.first_record + given.get(record).map_or(0, |&row| row as u64);
                match *source {
                    // A text, or the file of a picture.
                    source @ (Error::Tokenizer { .. } | Error::InFile { .. } | Error::Io { .. }) => {
                        rows.bad.push(BadRecord { input: name.into(), record, fault: RecordFault::Text(source) });
                    }
                    // Not caused by the text.
                    source => {
                        let (record, source) = (record as usize, Box::new(source));
                        return Err(Error::InRecord { record, source }.in_file(name).into());
                    }
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}
