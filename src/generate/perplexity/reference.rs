//! Recorded predictions of a model, in the format of llama.cpp's `--kl-divergence-base`, little endian:
//!
//! ```text
//! "_logits_", window length u32, vocabulary size i32, number of windows i32
//! tokens      i32 each, window after window, before BOS replaces the first
//! predictions of each window's second half but the last token, row after row:
//!     scale f32, lowest log probability f32, then for each token of the vocabulary a u16 number of scales above the
//!     lowest; one more u16 if the vocabulary is odd
//! ```
//! Log probabilities reach 16 below the highest; lower ones are stored as the lowest.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::{TextWindows, log_sum_exp};
use crate::cache::Replacement;
use crate::error::Error;

const MAGIC: &[u8; 8] = b"_logits_";
const HEADER_BYTES: u64 = 20;

/// Bytes of a row.
fn row_bytes(vocab_size: usize) -> usize {
    8 + 2 * vocab_size.next_multiple_of(2)
}

/// A row as it is stored.
#[derive(Clone, Debug, Default)]
pub(super) struct Packed {
    bytes: Vec<u8>,
    /// `ln sum e^logit`.
    pub log_sum_exp: f64,
}

impl Packed {
    /// Packs the log probabilities of a row of logits.
    pub fn of(row: &[f32]) -> Packed {
        let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let lowest = row.iter().copied().fold(f32::INFINITY, f32::min).max(highest - 16.0);
        let log_sum_exp = log_sum_exp(row);
        let scale = (highest - lowest) / 65535.0;
        let mut bytes = Vec::with_capacity(row_bytes(row.len()));
        bytes.extend(scale.to_le_bytes());
        bytes.extend(((f64::from(lowest) - log_sum_exp) as f32).to_le_bytes());
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let steps =
            |&logit: &f32| if logit > lowest { (inverse * (logit - lowest)).round_ties_even() as u16 } else { 0 };
        bytes.extend(row.iter().flat_map(|logit| steps(logit).to_le_bytes()));
        bytes.resize(row_bytes(row.len()), 0);
        Packed { bytes, log_sum_exp }
    }
}

/// A file that is being written; at its path once it is finished.
pub(super) struct RecordedLogprobs(Replacement);

impl RecordedLogprobs {
    pub fn create(path: &Path, vocab_size: u32, windows: &TextWindows) -> Result<RecordedLogprobs, Error> {
        let mut file = Replacement::begin(path)?;
        let numbers = [windows.n_ctx() as u32, vocab_size, windows.len() as u32];
        let numbers = numbers.iter().chain(&windows.ids).flat_map(|number| number.to_le_bytes());
        file.write(&MAGIC.iter().copied().chain(numbers).collect::<Vec<u8>>())?;
        Ok(RecordedLogprobs(file))
    }

    pub fn write(&mut self, row: &Packed) -> Result<(), Error> {
        self.0.write(&row.bytes)
    }

    pub fn finish(self) -> Result<(), Error> {
        self.0.finish()
    }
}

/// A reference model's predictions, as [`PerplexityRun::recorded`](super::PerplexityRun::recorded) or llama.cpp's
/// `llama-perplexity --kl-divergence-base` wrote them.
pub struct ReferenceLogprobs {
    path: PathBuf,
    file: BufReader<File>,
    windows: TextWindows,
    vocab_size: usize,
    /// Of the next row.
    offset: u64,
}

impl ReferenceLogprobs {
    /// Opens a file and reads its tokens.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read; [`Error::InFile`] if it is no such file, or not of the length that its
    /// header says.
    pub fn open(path: impl AsRef<Path>) -> Result<ReferenceLogprobs, Error> {
        let path = path.as_ref();
        let io = |source| Error::Io { path: path.into(), source };
        let file = File::open(path).map_err(io)?;
        let file_len = file.metadata().map_err(io)?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; HEADER_BYTES as usize];
        if file_len >= HEADER_BYTES {
            file.read_exact(&mut header).map_err(io)?;
        }
        if !header.starts_with(MAGIC) {
            let found = String::from_utf8_lossy(&header[..8]).escape_debug().to_string();
            return Err(wrong("magic", 0, "`_logits_`, of recorded predictions", format!("`{found}`")).in_file(path));
        }
        let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let [n_ctx, vocab_size, n_windows] = [8, 12, 16].map(|at| u64::from(number(at)));
        let is_valid = n_ctx >= TextWindows::SHORTEST as u64 && vocab_size > 0 && n_windows > 0;
        if !is_valid || [n_ctx, vocab_size, n_windows].iter().any(|&number| number > i32::MAX as u64) {
            let found = format!("{n_windows} windows of {n_ctx} tokens, a vocabulary of {vocab_size}");
            return Err(wrong("header", 8, "windows of 4 tokens or more and a vocabulary", found).in_file(path));
        }
        let n_rows = n_windows * (n_ctx - 1 - n_ctx / 2);
        let tokens_bytes = 4 * n_windows * n_ctx;
        let expected = (row_bytes(vocab_size as usize) as u64).checked_mul(n_rows);
        let expected = expected.and_then(|bytes| bytes.checked_add(HEADER_BYTES + tokens_bytes));
        if expected != Some(file_len) {
            let bytes = expected.map_or_else(|| "more bytes than a file has".into(), |bytes| format!("{bytes} bytes"));
            let what = format!("{bytes} for {n_windows} windows of {n_ctx} tokens");
            return Err(
                wrong("length", 0, &what, format!("{file_len} bytes: the file is cut off or damaged")).in_file(path)
            );
        }
        // The file has as many bytes.
        let mut tokens = vec![0; tokens_bytes as usize];
        file.read_exact(&mut tokens).map_err(io)?;
        let ids: Vec<u32> = tokens.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
        if let Some(at) = ids.iter().position(|&id| u64::from(id) >= vocab_size) {
            let expected = format!("token ids below {vocab_size}");
            return Err(wrong("tokens", HEADER_BYTES + 4 * at as u64, &expected, ids[at].to_string()).in_file(path));
        }
        Ok(ReferenceLogprobs {
            path: path.into(),
            file,
            windows: TextWindows { ids, n_ctx: n_ctx as usize },
            vocab_size: vocab_size as usize,
            offset: HEADER_BYTES + tokens_bytes,
        })
    }

    /// The windows whose predictions are recorded.
    pub fn windows(&self) -> &TextWindows {
        &self.windows
    }

    pub(super) fn check_vocab(&self, vocab_size: u32) -> Result<(), Error> {
        if self.vocab_size == vocab_size as usize {
            return Ok(());
        }
        let error = Error::Config {
            field: "vocabulary of the recorded predictions".into(),
            expected: format!("{vocab_size} tokens, as the model's"),
            found: format!("{}; record them with a model of the same vocabulary", self.vocab_size),
        };
        Err(error.in_file(&self.path))
    }

    /// The next rows.
    pub(super) fn read(&mut self, n_rows: usize) -> Result<RecordedRows, Error> {
        let row_bytes = row_bytes(self.vocab_size);
        let mut bytes = vec![0; n_rows * row_bytes];
        self.file.read_exact(&mut bytes).map_err(|source| Error::Io { path: self.path.clone(), source })?;
        let rows = RecordedRows { bytes, row_bytes, vocab_size: self.vocab_size };
        for i in 0..n_rows {
            let RecordedRow { scale, lowest, .. } = rows.row(i);
            if !(scale.is_finite() && scale >= 0.0 && lowest.is_finite()) {
                let found = format!("{scale} and {lowest}");
                let offset = self.offset + (i * row_bytes) as u64;
                return Err(
                    wrong("scale and lowest log probability", offset, "finite numbers", found).in_file(&self.path)
                );
            }
        }
        self.offset += (n_rows * row_bytes) as u64;
        Ok(rows)
    }
}

fn wrong(field: &str, offset: u64, expected: &str, found: String) -> Error {
    Error::Format { format: "predictions", field: field.into(), offset, expected: expected.into(), found }
}

/// Consecutive rows of a file.
pub(super) struct RecordedRows {
    bytes: Vec<u8>,
    row_bytes: usize,
    vocab_size: usize,
}

impl RecordedRows {
    pub fn row(&self, i: usize) -> RecordedRow<'_> {
        let row = &self.bytes[i * self.row_bytes..][..self.row_bytes];
        let float = |at: usize| f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        RecordedRow { scale: float(0), lowest: float(4), steps: row[8..][..2 * self.vocab_size].as_chunks().0 }
    }
}

/// A row's log probabilities.
#[derive(Clone, Copy)]
pub(super) struct RecordedRow<'a> {
    scale: f32,
    lowest: f32,
    steps: &'a [[u8; 2]],
}

impl<'a> RecordedRow<'a> {
    pub fn logprobs(self) -> impl Iterator<Item = f32> + use<'a> {
        self.steps.iter().map(move |steps| self.scale * f32::from(u16::from_le_bytes(*steps)) + self.lowest)
    }

    pub fn logprob(self, id: usize) -> f32 {
        self.scale * f32::from(u16::from_le_bytes(self.steps[id])) + self.lowest
    }
}
