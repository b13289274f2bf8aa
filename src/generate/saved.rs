//! Sessions as files: safetensors, so that other programs can read them.
//!
//! ```text
//! __metadata__  format "tilewright session", version "2"; model: digest of weights and vocabulary; name; kv_type
//!               cached: tokens whose keys follow; angles: RoPE table row of position 0; note: the caller's text
//! tokens        U32 [n]                       the sequence, cached tokens first
//! cache.<l>.k   U32 [Hkv, rows, row]          keys of the latest `rows` cached tokens, in `kv_type`; also .v
//! cache.<l>.past, .state   F32                states of a recurrent layer, by slot
//! states        U32 [slots]                   positions after which the states are, for recurrent models
//! ```

use std::collections::HashMap;
use std::path::Path;

use super::Session;
use super::sequence::{CachedTokens, N_STATES};
use crate::device::Device;
use crate::error::Error;
use crate::formats::arriving::{Arriving, Sink};
use crate::formats::own_file::{OwnFile, shown};
use crate::formats::{BlockType, Safetensors, TensorInfo};
use crate::kernels::CachedKeys;
use crate::model::LayerCache;
use crate::saving::{RowSize, Saving};
use crate::tensor::Tensor;

const FORMAT: &str = "session";
/// Version 1 had a digest of the first bytes of each tensor only, which does not identify the model.
const VERSION: &str = "2";

/// A tensor in a file: name, type and shape.
type SavedEntry = (String, BlockType, Vec<u64>);

impl Session {
    /// Saves the session to a file, replaced atomically: its tokens, their cache, and a note that [`Session::load`]
    /// returns, such as the conversation.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; errors of [`Device::read`](crate::Device::read).
    pub async fn save(&self, path: impl AsRef<Path>, note: &str) -> Result<(), Error> {
        self.check_savable()?;
        self.saving(note).write(path.as_ref()).await
    }

    /// Restores a session saved by [`Session::save`], of the same model on any device, and returns its note.
    /// Recomputes nothing, unless sliding-window layers keep all positions here and only the latest in the file:
    /// then everything. An error leaves the session unchanged.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened; else as [`Session::restore_bytes`], naming the file.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<String, Error> {
        let path = path.as_ref();
        let bytes = crate::load::FileBytes::map(path)?;
        self.restore_bytes(&bytes).map_err(|error| error.in_file(path))
    }

    /// The session as the bytes of a file, see [`Session::save`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a sequence with images or sounds; errors of [`Device::read`](crate::Device::read).
    pub async fn to_bytes(&self, note: &str) -> Result<Vec<u8>, Error> {
        self.check_savable()?;
        self.saving(note).to_bytes().await
    }

    /// Refuses a sequence with images or sounds, whose rows a file does not hold.
    pub(crate) fn check_savable(&self) -> Result<(), Error> {
        match self.sequence.images().is_empty() {
            true => Ok(()),
            false => Err(Error::Unsupported {
                format: "session",
                field: "tokens".into(),
                found: "rows of images or sounds".into(),
                supported: "sequences without images and sounds; save the messages instead".into(),
            }),
        }
    }

    /// Restores a session from the bytes of a file, see [`Session::load`].
    ///
    /// # Errors
    /// [`Error::Format`] naming the fault and its offset: another model, another KV type, a truncated file;
    /// [`Error::Unsupported`] for another version; [`Error::ContextFull`] if the tokens do not fit; errors of
    /// [`Device::write`](crate::Device::write).
    pub fn restore_bytes(&mut self, bytes: &[u8]) -> Result<String, Error> {
        let mut restoring = Restoring { session: self, ids: Vec::new(), checked: None };
        Arriving::read(bytes, &mut restoring)?;
        restoring.finish()
    }

    /// The current session as a file to be written, see [`Session::save`]; may include the results of passes that
    /// run meanwhile.
    pub fn saving(&self, note: &str) -> Saving {
        let sequence = self.sequence.at_rest();
        let (ids, cached) = (sequence.ids(), sequence.cached());
        let (label, digest, name) = (OwnFile::label(FORMAT), self.model.shown_digest(), self.model.name());
        let [n_cached, rope_offset] = [cached.n.to_string(), cached.rope_offset.to_string()];
        let metadata = [
            ("format", label.as_str()),
            ("version", VERSION),
            ("model", digest.as_str()),
            ("name", name),
            ("kv_type", self.model.kv_type().name()),
            ("cached", n_cached.as_str()),
            ("rope_offset", rope_offset.as_str()),
            ("note", note),
        ];
        let mut entries = vec![("tokens".to_string(), BlockType::U32, vec![ids.len() as u64])];
        let kept = || kept_by(self).map(|(_, layer, device)| (layer, device)).take_while(|_| cached.n > 0);
        for (layer, _) in kept() {
            entries.extend(layer_entries(layer, |keys| rows_of(&cached, keys)));
        }
        let states = cached.states.filter(|_| cached.n > 0).map(|states| states.map(|position| position as u32));
        if states.is_some() {
            entries.push(("states".to_string(), BlockType::U32, vec![N_STATES as u64]));
        }
        let tensors = entries.iter().map(|(name, block_type, shape)| (name.as_str(), *block_type, shape.as_slice()));
        let mut saving = Saving::new(Safetensors::head(metadata, tensors));
        saving.add(bytemuck::cast_slice(ids).to_vec());
        for (layer, device) in kept() {
            for tensor in layer.tensors() {
                let LayerCache::Keys(keys) = layer else {
                    saving.add_rows(device, tensor, 0, tensor.len(), RowSize::whole(1));
                    continue;
                };
                let [slots, row] = slots_of(tensor);
                let n_heads = tensor.len() / (slots * row);
                for head in 0..n_heads {
                    let mut position = cached.n - rows_of(&cached, keys);
                    while position < cached.n {
                        // Consecutive rows, up to the last slot.
                        let slot = position % slots;
                        let n = (slots - slot).min(cached.n - position);
                        saving.add_rows(device, tensor, (head * slots + slot) * row, n, RowSize::whole(row));
                        position += n;
                    }
                }
            }
        }
        if let Some(states) = states {
            saving.add(bytemuck::cast_slice(&states).to_vec());
        }
        saving
    }
}

/// Each layer's cache, its number and its device.
fn kept_by(session: &Session) -> impl Iterator<Item = (usize, &LayerCache, &Device)> {
    session.caches().flat_map(|(cache, device)| cache.kept().map(move |(l, layer)| (l, layer, device)))
}

/// Slots and words per row of a key tensor.
fn slots_of(tensor: &Tensor) -> [usize; 2] {
    match *tensor.shape() {
        [_, slots, row] => [slots as usize, row as usize],
        _ => [1, 1],
    }
}

/// How many of the latest cached positions still have their rows; later passes may have overwritten earlier slots.
fn rows_of(cached: &CachedTokens, keys: &CachedKeys) -> usize {
    let [slots, _] = slots_of(&keys.k);
    let written = cached.written.min(keys.capacity as usize);
    cached.n - written.saturating_sub(slots).min(cached.n)
}

/// A layer's tensors in a file, with this many rows of keys.
fn layer_entries(layer: &LayerCache, rows: impl Fn(&CachedKeys) -> usize) -> Vec<SavedEntry> {
    let entry = |tensor: &Tensor| {
        let mut shape: Vec<u64> = tensor.shape().iter().map(|&n| n.into()).collect();
        let block_type = match layer {
            LayerCache::State { .. } => BlockType::F32,
            LayerCache::Keys(keys) => {
                shape[1] = rows(keys) as u64;
                BlockType::U32
            }
        };
        (tensor.label().to_string(), block_type, shape)
    };
    layer.tensors().map(entry).collect()
}

/// The destination of a file's tensor in the session.
struct TensorDestination {
    tensor: Tensor,
    device: Device,
    /// For keys: the position of the first row, and the number of rows.
    rows: Option<(usize, usize)>,
}

impl TensorDestination {
    /// Writes bytes of the file's tensor from its byte `at`, and returns how many.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<usize, Error> {
        // Files may be unaligned in memory; their words are little endian.
        let write = |first: usize, bytes: &[u8]| self.device.write(&self.tensor, first, &words_of(bytes));
        let Some((first, n_rows)) = self.rows else {
            let n = bytes.len() / 4 * 4;
            write(at as usize / 4, &bytes[..n])?;
            return Ok(n);
        };
        let [slots, row] = slots_of(&self.tensor);
        let (row_bytes, from) = (4 * row, at as usize / (4 * row));
        let n = bytes.len() / row_bytes;
        // Skip rows beyond the slots.
        let skipped = n_rows.saturating_sub(slots);
        let mut done = 0;
        while done < n {
            let (head, nth) = ((from + done) / n_rows, (from + done) % n_rows);
            let slot = (first + nth) % slots;
            // Rows that are consecutive in both file and cache.
            let together = match skipped.checked_sub(nth) {
                Some(left @ 1..) => left.min(n - done),
                _ => (n_rows - nth).min(slots - slot).min(n - done),
            };
            if nth >= skipped {
                write((head * slots + slot) * row, &bytes[done * row_bytes..][..together * row_bytes])?;
            }
            done += together;
        }
        Ok(n * row_bytes)
    }
}

/// Restores a session from a file that arrives in pieces, see [`Session::restore_bytes`]. If it ends early, the
/// session's cache is empty.
#[cfg(all(target_arch = "wasm32", feature = "web"))]
pub(crate) struct SessionLoader<'s> {
    arriving: Arriving,
    restoring: Restoring<'s>,
    /// Bytes since the last wait for the device.
    in_flight: usize,
}

#[cfg(all(target_arch = "wasm32", feature = "web"))]
impl SessionLoader<'_> {
    pub fn new(session: &mut Session, file_len: u64) -> SessionLoader<'_> {
        let restoring = Restoring { session, ids: Vec::new(), checked: None };
        SessionLoader { arriving: Arriving::new(file_len), restoring, in_flight: 0 }
    }

    /// The offset of the next bytes wanted; `None` once complete.
    pub fn wanted(&self) -> Option<u64> {
        self.arriving.wanted()
    }

    /// Takes bytes from the wanted offset; an empty slice marks the end of the file.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        /// Maximum bytes in flight to the device.
        const MAX_IN_FLIGHT: usize = 32 << 20;
        if bytes.is_empty() {
            return self.arriving.end();
        }
        self.arriving.push(self.wanted().unwrap_or_default(), bytes, &mut self.restoring)?;
        self.in_flight += bytes.len();
        if self.in_flight >= MAX_IN_FLIGHT {
            self.in_flight = 0;
            self.restoring.session.model.device().drained().await?;
        }
        Ok(())
    }

    /// Completes the restore.
    pub fn finish(self) -> Result<(), Error> {
        self.arriving.end()?;
        self.restoring.finish().map(drop)
    }
}

/// A session being restored.
struct Restoring<'s> {
    session: &'s mut Session,
    ids: Vec<u32>,
    /// The header, once read.
    checked: Option<SavedHeader>,
}

/// A file's header, checked against the session.
struct SavedHeader {
    own: OwnFile,
    cached: CachedTokens,
    /// By tensor name.
    parts: HashMap<String, TensorDestination>,
    note: String,
}

impl Restoring<'_> {
    /// Completes the restore and returns the note.
    fn finish(self) -> Result<String, Error> {
        let Restoring { session, ids, checked } = self;
        let Some(SavedHeader { cached, note, .. }) = checked else {
            return Err(Error::Truncated { part: "its header".into(), needed_bytes: 1, found_bytes: 0 });
        };
        // Passes also read earlier tokens, for penalties.
        session.model.device().write(&session.passes.io.tokens, 0, &ids)?;
        session.sequence.restore(ids, cached);
        session.mtp.forget();
        Ok(note)
    }
}

impl Sink for Restoring<'_> {
    /// Orders the tensors: first those that can be invalid, tokens and state positions, then all keys, so that an
    /// error leaves the session unchanged.
    fn begin(&mut self, header: Safetensors) -> Result<Vec<TensorInfo>, Error> {
        let checked = SavedHeader::read(self.session, header)?;
        let mut tensors = checked.own.header.tensors.clone();
        crate::sort::by_key(&mut tensors, |tensor| (checked.parts.contains_key(&tensor.name), tensor.offset));
        self.checked = Some(checked);
        Ok(tensors)
    }

    fn take(&mut self, tensor: &TensorInfo, at: u64, bytes: &[u8]) -> Result<usize, Error> {
        let Some(SavedHeader { own, cached, parts, .. }) = &mut self.checked else { return Ok(bytes.len()) };
        if let Some(part) = parts.get(&tensor.name) {
            self.session.sequence.forget_cache();
            return part.write(at, bytes);
        }
        let words = words_of(bytes);
        let vocab_size = self.session.model.config().vocab_size;
        let end_of_tensor = at as usize / 4 + words.len();
        for (i, &word) in words.iter().enumerate() {
            let (offset, nth) = (tensor.offset + at + 4 * i as u64, at as usize / 4 + i);
            match &mut cached.states {
                // Position 0 marks an empty slot; others must match their slot.
                Some(states) if tensor.name == "states" => {
                    let position = word as usize;
                    if position > cached.n || (position != 0 && position % N_STATES != nth) {
                        let expected = format!("0, or a position up to {} that is {nth} modulo {N_STATES}", cached.n);
                        return Err(own.broken(format!("state {nth}"), offset, expected, word.to_string()));
                    }
                    states[nth] = position;
                }
                _ if word < vocab_size => self.ids.push(word),
                _ => {
                    let expected = format!("ids below {vocab_size}");
                    return Err(own.broken(format!("token {nth}"), offset, expected, word.to_string()));
                }
            }
        }
        // The latest state must be at the end of the cached tokens.
        if let Some(states) = cached.states.filter(|_| tensor.name == "states" && end_of_tensor == N_STATES)
            && !states.contains(&cached.n)
        {
            let found = states.into_iter().max().unwrap_or(0);
            let expected = format!("after {} tokens, as many as are cached", cached.n);
            return Err(own.broken("the latest state", tensor.offset, expected, format!("after {found}")));
        }
        Ok(4 * words.len())
    }
}

impl SavedHeader {
    fn read(session: &Session, header: Safetensors) -> Result<SavedHeader, Error> {
        let own = OwnFile::of(header, FORMAT, VERSION)?;
        let number = |key: &str| {
            let text = own.text(key)?;
            text.parse::<u32>().map_err(|_| own.wrong(key, "a number below 2^32", shown(text)))
        };
        let model = &session.model;
        if own.text("model")? != model.shown_digest() {
            let name = own.header.text("name").unwrap_or_default().escape_debug();
            let found = format!("those of `{name}`, {}", own.text("model")?);
            let expected = format!("the weights of `{}`, {}", model.name(), model.shown_digest());
            return Err(own.wrong("model", expected, found));
        }
        own.expect("kv_type", model.kv_type().name())?;
        let (n, rope_offset) = (number("cached")? as usize, number("rope_offset")?);
        let one_row = |shape: &[u64]| (shape.len() != 1).then(|| "of one dimension".into());
        let n_ids = own.tensor("tokens", BlockType::U32, one_row)?.n_elements() as usize;
        let capacity = session.passes.capacity();
        if n_ids > capacity {
            return Err(Error::ContextFull { needed: n_ids, capacity });
        }
        if n > n_ids {
            return Err(own.wrong("cached", format!("at most the {n_ids} tokens"), n.to_string()));
        }

        let mut parts = HashMap::new();
        let (mut first_of_all, mut slots_of_ring) = (0, 0);
        for (block, layer, device) in kept_by(session).take_while(|_| n > 0) {
            let window = model.config().blocks[block].attention.window;
            let needed = window.map_or(n, |window| n.min(window.saturating_sub(1) as usize)) as u64;
            for (tensor, (name, block_type, shape)) in layer.tensors().zip(layer_entries(layer, |_| n)) {
                let part = part_of(&own, (layer, device), (tensor, &name), (block_type, &shape), needed)?;
                if let Some((first, _)) = part.rows {
                    let [slots, _] = slots_of(tensor);
                    let first = first.max(n.saturating_sub(slots));
                    if first > first_of_all {
                        (first_of_all, slots_of_ring) = (first, slots);
                    }
                }
                parts.insert(name, part);
            }
        }
        // The tensor's data holds the positions.
        let states = model.config().is_recurrent().then_some([0; N_STATES]);
        if states.is_some() && n > 0 {
            let all = |shape: &[u64]| (shape != [N_STATES as u64]).then(|| format!("[{N_STATES}]"));
            own.tensor("states", BlockType::U32, all)?;
        }
        let n_tensors = 1 + parts.len() + usize::from(states.is_some() && n > 0);
        if own.header.tensors.len() != n_tensors {
            return Err(own.wrong("tensors", n_tensors.to_string(), own.header.tensors.len().to_string()));
        }
        // Earlier keys are missing: no pass may start where it would see them.
        let written = if first_of_all > 0 { n.max(first_of_all + slots_of_ring) } else { n };
        let note = own.header.text("note").unwrap_or_default().to_string();
        Ok(SavedHeader { own, cached: CachedTokens { n, rope_offset, states, written }, parts, note })
    }
}

/// The destination of a file's tensor; keys may have `needed` rows up to those of `shape`.
fn part_of(
    own: &OwnFile,
    (layer, device): (&LayerCache, &Device),
    (tensor, name): (&Tensor, &str),
    (block_type, shape): (BlockType, &[u64]),
    needed: u64,
) -> Result<TensorDestination, Error> {
    let mut rows = None;
    own.tensor(name, block_type, |found| match (layer, found, shape) {
        (LayerCache::Keys(_), &[heads, found_rows, row], &[n_heads, n, n_words])
            if [heads, row] == [n_heads, n_words] && (needed..=n).contains(&found_rows) =>
        {
            rows = Some(((n - found_rows) as usize, found_rows as usize));
            None
        }
        (LayerCache::State { .. }, ..) if found == shape => None,
        (LayerCache::Keys(_), _, &[_, n, _]) if needed < n => Some(format!("{shape:?}, or at least {needed} rows")),
        _ => Some(format!("{shape:?}")),
    })?;
    Ok(TensorDestination { tensor: tensor.clone(), device: device.clone(), rows })
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}
