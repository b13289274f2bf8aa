//! Log of `tilewright embed` and `rerank` on stderr: text or JSON lines.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tilewright::{Device, DeviceInfo, Embedder};

use super::super::messages::{self, Level};
use super::super::{counted, hub, progress};
use super::error::EmbedError;
use super::input::{ReadProgress, TotalRecords};

/// Format of the log.
#[derive(Clone, Copy)]
pub struct Log {
    pub json: bool,
}

impl Log {
    /// Logs one message. JSON lines also get the entries of the object `fields`.
    pub fn say(self, level: &str, message: &str, fields: Value) {
        let needed = match level {
            "error" => Level::Error,
            "warning" => Level::Warn,
            _ => Level::Info,
        };
        if !messages::are_shown(needed) {
            return;
        }
        if !self.json {
            return say!("{level}: {message}");
        }
        let mut line = json!({ "level": level, "message": message });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        say!("{line}");
    }

    /// Replaces a model's address by its local file or folder; other paths are checked when they are loaded.
    pub fn localise(self, model: &mut PathBuf) -> Result<(), EmbedError> {
        hub::download(model, &mut |notice| self.say("notice", notice, json!({}))).map_err(EmbedError::Model)
    }

    /// Logs the notices of opening the device.
    pub fn notices(self, device: &DeviceInfo) {
        for notice in &device.notices {
            self.say("notice", notice, json!({}));
        }
    }

    /// Logs the self-test's notices since the last call.
    pub fn findings(self, device: &Device) {
        for notice in device.take_notices() {
            self.say("notice", &notice, json!({}));
        }
    }

    /// Logs the self-test's notices, and saves what the next process can use.
    pub fn saved(self, embedder: &Embedder) {
        self.findings(embedder.device());
        self.unsaved("pipeline cache", embedder.device().save_pipeline_cache());
        self.unsaved("tuning", embedder.save_places());
    }

    /// Warns if something could not be saved for the next process.
    pub fn unsaved(self, what: &str, saved: Result<(), tilewright::Error>) {
        if let Err(error) = saved {
            self.say("warning", &format!("the {what} was not saved: {error}"), json!({}));
        }
    }

    /// Logs a loaded model, its device and the reason for that device.
    pub fn loaded(self, model: &str, device: &DeviceInfo, mut fields: Value) {
        fields["model"] = model.into();
        fields["device"] = json!(device);
        let message = format!("{model} on {} ({}): {}", device.name, device.backend, device.reason);
        self.say("info", &message, fields);
    }

    /// Logs the command's error, if any, and returns its exit code.
    pub fn ended(self, outcome: Result<(), EmbedError>) -> ExitCode {
        let Err(error) = outcome else { return ExitCode::SUCCESS };
        let code = error.code();
        if code != 0 {
            self.say("error", &error.to_string(), json!({ "exit_code": code }));
        }
        ExitCode::from(code)
    }
}

/// Shows records per second, on a terminal or on request.
pub struct ProgressLog {
    log: Log,
    every: Option<Duration>,
    rewrites: bool,
    start: Instant,
    shown: Instant,
    read: ReadProgress,
}

impl ProgressLog {
    pub fn new(log: Log, is_forced: bool) -> ProgressLog {
        let rewrites = progress::is_shown() && !log.json;
        let every = match (rewrites, is_forced) {
            (true, _) => Some(Duration::from_millis(200)),
            (false, true) => Some(Duration::from_secs(10)),
            (false, false) => None,
        };
        ProgressLog {
            log,
            every,
            rewrites,
            start: Instant::now(),
            shown: Instant::now(),
            read: ReadProgress::default(),
        }
    }

    /// Also shows the share of the input that is done, and the time left.
    pub fn of(self, read: ReadProgress) -> ProgressLog {
        ProgressLog { read, ..self }
    }

    /// What is read of the input.
    pub fn read(&self) -> &ReadProgress {
        &self.read
    }

    /// Shows progress, if an update is due.
    pub fn show(&mut self, n_records: u64) {
        if self.every.is_none_or(|every| self.shown.elapsed() < every) {
            return;
        }
        self.shown = Instant::now();
        let rate = n_records as f64 / self.start.elapsed().as_secs_f64();
        let mut fields = json!({ "records": n_records, "records_per_second": rate });
        let message = match self.read.total() {
            None => format!("{}, {rate:.0} records/s", counted(n_records, "record")),
            Some(total) => {
                let (total, about) = match total {
                    TotalRecords::Known(total) => (total, ""),
                    TotalRecords::Estimated(total) => (total, "about "),
                };
                let percent = 100.0 * n_records as f64 / total.max(n_records).max(1) as f64;
                let seconds = total.saturating_sub(n_records) as f64 / rate.max(1e-9);
                fields["total_records"] = total.into();
                fields["percent"] = percent.into();
                fields["seconds_left"] = seconds.into();
                let left = time_left(seconds);
                format!(
                    "{n_records} of {about}{}, {percent:.0} %, {rate:.0} records/s, {left} left",
                    counted(total, "record")
                )
            }
        };
        match self.rewrites {
            true => say_part!("\r{message}\x1b[K"),
            false => self.log.say("info", &message, fields),
        }
    }

    /// Logs the totals.
    pub fn finish(self, n_records: u64, n_skipped: u64) {
        if self.rewrites {
            say_part!("\r\x1b[K");
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let rate = n_records as f64 / seconds.max(1e-9);
        let records = counted(n_records, "record");
        let message = format!("{records}, {n_skipped} skipped, {seconds:.1} s, {rate:.0} records/s");
        let fields =
            json!({ "records": n_records, "skipped": n_skipped, "seconds": seconds, "records_per_second": rate });
        self.log.say("done", &message, fields);
    }
}

/// A duration in the two largest units, such as `1 h 5 min`.
fn time_left(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}
