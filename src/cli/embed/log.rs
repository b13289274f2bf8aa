//! What `tilewright embed` and `tilewright rerank` say on stderr: sentences, or JSON lines.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tilewright::{Device, DeviceInfo};

use super::super::hub;
use super::error::EmbedError;

/// Where messages go, and how they look.
#[derive(Clone, Copy)]
pub struct Log {
    pub json: bool,
}

impl Log {
    /// One message; `fields` is an object with what a program would want to know, for JSON lines alone.
    pub fn say(self, level: &str, message: &str, fields: Value) {
        if !self.json {
            return eprintln!("{level}: {message}");
        }
        let mut line = json!({ "level": level, "message": message });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        eprintln!("{line}");
    }

    /// Puts a file or folder in the place of a model's address.
    pub fn localise(self, model: &mut PathBuf) -> Result<(), EmbedError> {
        hub::localise(model, &mut |notice| self.say("notice", notice, json!({}))).map_err(EmbedError::Model)
    }

    /// What was not as it should be when the device was opened, and does no harm.
    pub fn notices(self, device: &DeviceInfo) {
        for notice in &device.notices {
            self.say("notice", notice, json!({}));
        }
    }

    /// What the self-test found since this was last called.
    pub fn findings(self, device: &Device) {
        for notice in device.take_notices() {
            self.say("notice", &notice, json!({}));
        }
    }

    /// Warns of what could not be kept for the next process.
    pub fn unsaved(self, what: &str, saved: Result<(), tilewright::Error>) {
        if let Err(error) = saved {
            self.say("warning", &format!("the {what} was not saved: {error}"), json!({}));
        }
    }

    /// A model, where it runs and why there.
    pub fn loaded(self, model: &str, device: &DeviceInfo, mut fields: Value) {
        fields["model"] = model.into();
        fields["device"] = json!(device);
        let message = format!("{model} on {} ({}): {}", device.name, device.backend, device.reason);
        self.say("info", &message, fields);
    }

    /// How the command ended, as its exit code, and why on stderr.
    pub fn ended(self, outcome: Result<(), EmbedError>) -> ExitCode {
        let Err(error) = outcome else { return ExitCode::SUCCESS };
        let code = error.code();
        if code != 0 {
            self.say("error", &error.to_string(), json!({ "exit_code": code }));
        }
        ExitCode::from(code)
    }
}

/// Records per second, on a terminal or where they were asked for.
pub struct Progress {
    log: Log,
    every: Option<Duration>,
    rewrites: bool,
    start: Instant,
    shown: Instant,
}

impl Progress {
    pub fn new(log: Log, is_forced: bool) -> Progress {
        let rewrites = io::stderr().is_terminal() && !log.json;
        let every = match (rewrites, is_forced) {
            (true, _) => Some(Duration::from_millis(200)),
            (false, true) => Some(Duration::from_secs(10)),
            (false, false) => None,
        };
        Progress { log, every, rewrites, start: Instant::now(), shown: Instant::now() }
    }

    /// Shows the number of records that have gone through, if it is time to.
    pub fn show(&mut self, n_records: u64) {
        if self.every.is_none_or(|every| self.shown.elapsed() < every) {
            return;
        }
        self.shown = Instant::now();
        let rate = n_records as f64 / self.start.elapsed().as_secs_f64();
        let message = format!("{n_records} records, {rate:.0} records/s");
        match self.rewrites {
            true => eprint!("\r{message}\x1b[K"),
            false => self.log.say("info", &message, json!({ "records": n_records, "records_per_second": rate })),
        }
    }

    /// The last word.
    pub fn finish(self, n_records: u64, n_skipped: u64) {
        if self.rewrites {
            eprint!("\r\x1b[K");
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let rate = n_records as f64 / seconds.max(1e-9);
        let message = format!("{n_records} records, {n_skipped} skipped, {seconds:.1} s, {rate:.0} records/s");
        let fields =
            json!({ "records": n_records, "skipped": n_skipped, "seconds": seconds, "records_per_second": rate });
        self.log.say("done", &message, fields);
    }
}
