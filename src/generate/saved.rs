//! Sessions as files: safetensors, so that other programs can read them.
//!
//! ```text
//! __metadata__  format "tilewright session", version "1"; model: digest of the weights; name; kv_type
//!               cached: tokens whose keys are here; angles: row of angles of the first; note: whatever its writer put in
//! tokens        U32 [n]                       the sequence, cached tokens first
//! cache.<l>.k   U32 [Hkv, rows, row]          keys of the latest `rows` cached tokens, packed as `kv_type` says; and .v
//! cache.<l>.past, .state   F32                states of a recurrent layer, in turns
//! states        U32 [turns]                   positions after which they are; next to those alone
//! ```

#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;

use super::Session;
use super::sequence::{Cached, N_STATES};
use crate::device::Device;
use crate::error::Error;
use crate::formats::own_file::{OwnFile, shown};
use crate::formats::{BlockType, Safetensors};
use crate::kernels::CachedKeys;
use crate::model::LayerCache;
use crate::tensor::Tensor;

const FORMAT: &str = "session";
const VERSION: &str = "1";

/// A tensor of a file: what it is called, its type and its shape.
type Entry = (String, BlockType, Vec<u64>);

impl Session {
    /// Writes the session to a file, which is replaced only when all is written: its tokens, what the device has computed of
    /// them, and a text that [`Session::load`] gives back, such as the conversation that the tokens are.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; errors of [`Device::read`](crate::Device::read).
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn save(&self, path: impl AsRef<Path>, note: &str) -> Result<(), Error> {
        let mut file = crate::cache::Replacement::begin(path.as_ref())?;
        self.write_to(note, |piece| file.write(piece)).await?;
        file.finish()
    }

    /// Goes on with the session that [`Session::save`] wrote, of the same model on any device, and returns its note. Nothing
    /// of what the file has is computed again, unless layers with a window have room for all positions here and the file has
    /// the latest alone: then all is. After an error the session is as it was.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened; else as [`Session::restore_bytes`], with the file's name.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<String, Error> {
        let path = path.as_ref();
        let bytes = crate::load::FileBytes::map(path)?;
        self.restore_bytes(&bytes).map_err(|error| error.in_file(path))
    }

    /// The session as a file's content, see [`Session::save`].
    ///
    /// # Errors
    /// Errors of [`Device::read`](crate::Device::read).
    pub async fn to_bytes(&self, note: &str) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.write_to(note, |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .await?;
        Ok(bytes)
    }

    /// Goes on with the session of a file's content, see [`Session::load`].
    ///
    /// # Errors
    /// [`Error::Format`] that names what is wrong and where: another model, another type of keys, a file that is cut off;
    /// [`Error::Unsupported`] for another version; [`Error::ContextFull`] if the session has no room for so many tokens;
    /// errors of [`Device::write`](crate::Device::write).
    pub fn restore_bytes(&mut self, bytes: &[u8]) -> Result<String, Error> {
        let file = File::read(self, bytes)?;
        let device = self.model.device().clone();
        self.sequence.forget_cache();
        for part in &file.parts {
            part.write()?;
        }
        // Passes read the tokens before their own position too, to penalise those that repeat.
        device.write(&self.passes.io.tokens, 0, &file.ids)?;
        self.sequence.restore(file.ids, file.cached);
        self.further.forget();
        Ok(file.note)
    }

    /// Hands the file's content to `put`, piece by piece.
    async fn write_to(&self, note: &str, mut put: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let sequence = self.sequence.at_rest();
        let (ids, cached) = (sequence.ids(), sequence.cached());
        let (label, digest, name) = (OwnFile::label(FORMAT), self.model.shown_digest(), self.model.name());
        let [n_cached, angles] = [cached.n.to_string(), cached.angles.to_string()];
        let metadata = [
            ("format", label.as_str()),
            ("version", VERSION),
            ("model", digest.as_str()),
            ("name", name),
            ("kv_type", self.model.kv_type().name()),
            ("cached", n_cached.as_str()),
            ("angles", angles.as_str()),
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
        put(&Safetensors::head(metadata, tensors))?;
        put(bytemuck::cast_slice(ids))?;
        for (layer, device) in kept() {
            for tensor in layer.tensors() {
                let words: Vec<u32> = device.read(tensor).await?;
                match layer {
                    LayerCache::State { .. } => put(bytemuck::cast_slice(&words))?,
                    LayerCache::Keys(keys) => {
                        let rows = rows_of(&cached, keys);
                        let [slots, row] = slots_of(tensor);
                        for head in words.chunks_exact(slots * row) {
                            for position in cached.n - rows..cached.n {
                                put(bytemuck::cast_slice(&head[position % slots * row..][..row]))?;
                            }
                        }
                    }
                }
            }
        }
        states.map_or(Ok(()), |states| put(bytemuck::cast_slice(&states)))
    }
}

/// What each layer keeps, its number, and the device on which it does.
fn kept_by(session: &Session) -> impl Iterator<Item = (usize, &LayerCache, &Device)> {
    session.caches().flat_map(|(cache, device)| cache.kept().map(move |(l, layer)| (l, layer, device)))
}

/// Slots and words of a row of a tensor of keys.
fn slots_of(tensor: &Tensor) -> [usize; 2] {
    match *tensor.shape() {
        [_, slots, row] => [slots as usize, row as usize],
        _ => [1, 1],
    }
}

/// How many of the latest cached positions still have their rows: where later passes took slots of earlier positions, not
/// all of them.
fn rows_of(cached: &Cached, keys: &CachedKeys) -> usize {
    let [slots, _] = slots_of(&keys.k);
    let written = cached.written.min(keys.capacity as usize);
    cached.n - written.saturating_sub(slots).min(cached.n)
}

/// What a file has of a layer, with so many rows of keys.
fn layer_entries(layer: &LayerCache, rows: impl Fn(&CachedKeys) -> usize) -> Vec<Entry> {
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

/// What a tensor of the session gets of a file.
struct Part<'a> {
    tensor: Tensor,
    device: Device,
    words: &'a [[u8; 4]],
    /// The first position whose rows these are, for a tensor of keys.
    first: Option<usize>,
}

impl Part<'_> {
    fn write(&self) -> Result<(), Error> {
        // A file may lie anywhere in memory, and its words are little endian.
        let write =
            |first: usize, words: &[[u8; 4]]| self.device.write(&self.tensor, first, &words_of(words.as_flattened()));
        let Some(first) = self.first else { return write(0, self.words) };
        let [slots, row] = slots_of(&self.tensor);
        let n_heads = self.tensor.shape().first().map_or(1, |&n| n as usize);
        let rows = self.words.len() / (n_heads * row);
        for (head, words) in self.words.chunks_exact((rows * row).max(1)).enumerate() {
            // No more than there are slots for, in pieces that do not go past the last one.
            let skipped = rows.saturating_sub(slots);
            let (mut position, mut rest) = (first + skipped, &words[skipped * row..]);
            while !rest.is_empty() {
                let slot = position % slots;
                let (piece, after) = rest.split_at(rest.len().min((slots - slot) * row));
                write((head * slots + slot) * row, piece)?;
                (position, rest) = (position + piece.len() / row, after);
            }
        }
        Ok(())
    }
}

/// A file's content, checked against the session that is to go on with it.
struct File<'a> {
    ids: Vec<u32>,
    cached: Cached,
    parts: Vec<Part<'a>>,
    note: String,
}

impl<'a> File<'a> {
    fn read(session: &Session, bytes: &'a [u8]) -> Result<File<'a>, Error> {
        let own = OwnFile::parse(bytes, FORMAT, VERSION)?;
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
        let (n, angles) = (number("cached")? as usize, number("angles")?);
        let ids = read_ids(session, &own)?;
        if n > ids.len() {
            return Err(own.wrong("cached", format!("at most the {} tokens", ids.len()), n.to_string()));
        }

        let mut parts = Vec::new();
        let (mut first_of_all, mut slots_of_ring) = (0, 0);
        for (block, layer, device) in kept_by(session).take_while(|_| n > 0) {
            let window = model.config().blocks[block].attention.window;
            let needed = window.map_or(n, |window| n.min(window.saturating_sub(1) as usize)) as u64;
            for (tensor, (name, block_type, shape)) in layer.tensors().zip(layer_entries(layer, |_| n)) {
                let part = read_part(&own, (layer, device), (tensor, &name), (block_type, &shape), needed)?;
                if let Some(first) = part.first {
                    let [slots, _] = slots_of(tensor);
                    let first = first.max(n.saturating_sub(slots));
                    if first > first_of_all {
                        (first_of_all, slots_of_ring) = (first, slots);
                    }
                }
                parts.push(part);
            }
        }
        let states = match (model.config().is_recurrent(), n) {
            (false, _) => None,
            (true, 0) => Some([0; N_STATES]),
            (true, n) => Some(read_states(&own, n)?),
        };
        let n_tensors = 1 + parts.len() + usize::from(states.is_some() && n > 0);
        if own.header.tensors.len() != n_tensors {
            return Err(own.wrong("tensors", n_tensors.to_string(), own.header.tensors.len().to_string()));
        }
        // Keys before the first are nowhere: a pass must not begin where it would see them.
        let written = if first_of_all > 0 { n.max(first_of_all + slots_of_ring) } else { n };
        let note = own.header.text("note").unwrap_or_default().to_string();
        Ok(File { ids, cached: Cached { n, angles, states, written }, parts, note })
    }
}

/// The sequence, which has to be one of the model's and to fit the session.
fn read_ids(session: &Session, own: &OwnFile<'_>) -> Result<Vec<u32>, Error> {
    let one_row = |shape: &[u64]| (shape.len() != 1).then(|| "of one dimension".into());
    let (offset, bytes) = own.tensor("tokens", BlockType::U32, one_row)?;
    let ids = words_of(bytes);
    let vocab_size = session.model.config().vocab_size;
    if let Some(at) = ids.iter().position(|&id| id >= vocab_size) {
        let expected = format!("ids below {vocab_size}");
        return Err(own.broken(format!("token {at}"), offset + 4 * at as u64, expected, ids[at].to_string()));
    }
    let capacity = session.passes.capacity();
    if ids.len() > capacity {
        return Err(Error::ContextFull { needed: ids.len(), capacity });
    }
    Ok(ids)
}

/// What a file has for a tensor of a layer; of keys `needed` rows at least, and at most those of `shape`.
fn read_part<'a>(
    own: &OwnFile<'a>,
    (layer, device): (&LayerCache, &Device),
    (tensor, name): (&Tensor, &str),
    (block_type, shape): (BlockType, &[u64]),
    needed: u64,
) -> Result<Part<'a>, Error> {
    let mut first = None;
    let (_, bytes) = own.tensor(name, block_type, |found| match (layer, found, shape) {
        (LayerCache::Keys(_), &[heads, rows, row], &[n_heads, n, n_words])
            if [heads, row] == [n_heads, n_words] && (needed..=n).contains(&rows) =>
        {
            first = Some((n - rows) as usize);
            None
        }
        (LayerCache::State { .. }, ..) if found == shape => None,
        (LayerCache::Keys(_), _, &[_, n, _]) if needed < n => Some(format!("{shape:?}, or {needed} rows at least")),
        _ => Some(format!("{shape:?}")),
    })?;
    Ok(Part { tensor: tensor.clone(), device: device.clone(), words: bytes.as_chunks().0, first })
}

/// Positions of up to `n` after which there are states.
fn read_states(own: &OwnFile<'_>, n: usize) -> Result<[usize; N_STATES], Error> {
    let all = |shape: &[u64]| (shape != [N_STATES as u64]).then(|| format!("[{N_STATES}]"));
    let (offset, bytes) = own.tensor("states", BlockType::U32, all)?;
    let mut states = [0; N_STATES];
    for (at, (state, position)) in states.iter_mut().zip(words_of(bytes)).enumerate() {
        *state = position as usize;
        // State 0 is none; others lie where their position says.
        if *state > n || (*state != 0 && *state % N_STATES != at) {
            let expected = format!("0, or a position up to {n} that is {at} modulo {N_STATES}");
            return Err(own.broken(format!("state {at}"), offset + 4 * at as u64, expected, position.to_string()));
        }
    }
    Ok(states)
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect()
}
