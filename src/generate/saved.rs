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
use crate::error::Error;
use crate::formats::{BlockType, Safetensors};
use crate::kernels::CachedKeys;
use crate::model::LayerCache;
use crate::tensor::Tensor;

const FORMAT: &str = "session";
const KIND: &str = "tilewright session";
const VERSION: &str = "1";
/// Where a safetensors header begins.
const HEADER_OFFSET: u64 = 8;

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
    /// of what the file has is computed again. After an error the session is as it was, or empty if the device failed.
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
        let capacity = self.passes.capacity();
        if file.ids.len() > capacity {
            return Err(Error::ContextFull { needed: file.ids.len(), capacity });
        }
        let device = self.model.device().clone();
        self.sequence.forget_cache();
        for (tensor, part) in &file.parts {
            match part {
                Part::All(words) => device.write(tensor, 0, words)?,
                Part::Rows { first, words } => write_rows(&device, tensor, *first, words)?,
            }
        }
        // Passes read the tokens before their own position too, to penalise those that repeat.
        device.write(&self.passes.io.tokens, 0, &file.ids)?;
        self.sequence.restore(file.ids, file.cached);
        Ok(file.note)
    }

    /// Hands the file's content to `put`, piece by piece.
    async fn write_to(&self, note: &str, mut put: impl FnMut(&[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let sequence = self.sequence.at_rest();
        let (ids, cached) = (sequence.ids(), sequence.cached());
        let (digest, name) = (shown_digest(self.model.digest()), self.model.name());
        let [n_cached, angles] = [cached.n.to_string(), cached.angles.to_string()];
        let metadata = [
            ("format", KIND),
            ("version", VERSION),
            ("model", digest.as_str()),
            ("name", name),
            ("kv_type", self.model.kv_type().name()),
            ("cached", n_cached.as_str()),
            ("angles", angles.as_str()),
            ("note", note),
        ];
        let mut entries = vec![("tokens".to_string(), BlockType::U32, vec![ids.len() as u64])];
        let kept: Vec<&LayerCache> =
            if cached.n > 0 { self.passes.cache.kept().map(|(_, layer)| layer).collect() } else { Vec::new() };
        for layer in &kept {
            entries.extend(layer_entries(layer, |keys| rows_of(&cached, keys)));
        }
        let states = cached.states.filter(|_| cached.n > 0).map(|states| states.map(|position| position as u32));
        if states.is_some() {
            entries.push(("states".to_string(), BlockType::U32, vec![N_STATES as u64]));
        }
        let tensors = entries.iter().map(|(name, block_type, shape)| (name.as_str(), *block_type, shape.as_slice()));
        put(&Safetensors::head(metadata, tensors))?;
        put(bytemuck::cast_slice(ids))?;
        for layer in kept {
            for tensor in layer.tensors() {
                let words: Vec<u32> = self.model.device().read(tensor).await?;
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

/// Writes rows of positions from `first` on to the slots that are theirs.
fn write_rows(device: &crate::Device, tensor: &Tensor, first: usize, words: &[u32]) -> Result<(), Error> {
    let [slots, row] = slots_of(tensor);
    let n_heads = tensor.shape().first().map_or(1, |&n| n as usize);
    let rows = words.len() / (n_heads * row);
    for (head, words) in words.chunks_exact((rows * row).max(1)).enumerate() {
        // In pieces that do not go past the last slot.
        let (mut position, mut rest) = (first, words);
        while !rest.is_empty() {
            let slot = position % slots;
            let (piece, after) = rest.split_at(rest.len().min((slots - slot) * row));
            device.write(tensor, (head * slots + slot) * row, piece)?;
            (position, rest) = (position + piece.len() / row, after);
        }
    }
    Ok(())
}

/// What a tensor of the session gets.
enum Part {
    /// All of it.
    All(Vec<u32>),
    /// Rows of positions from `first` on.
    Rows { first: usize, words: Vec<u32> },
}

/// A file's content, checked against the session that is to go on with it.
struct File {
    ids: Vec<u32>,
    cached: Cached,
    parts: Vec<(Tensor, Part)>,
    note: String,
}

impl File {
    fn read(session: &Session, bytes: &[u8]) -> Result<File, Error> {
        let header = Safetensors::parse(bytes, bytes.len() as u64)?;
        let get = |key: &str| {
            header.text(key).ok_or_else(|| broken(key, HEADER_OFFSET, "a text in __metadata__", "missing".into()))
        };
        let expect = |key: &str, expected: &str| {
            let found = get(key)?;
            if found == expected { Ok(()) } else { Err(broken(key, HEADER_OFFSET, shown(expected), shown(found))) }
        };
        let number = |key: &str| {
            let text = get(key)?;
            text.parse::<u32>().map_err(|_| broken(key, HEADER_OFFSET, "a number below 2^32", shown(text)))
        };
        expect("format", KIND)?;
        let version = get("version")?;
        if version != VERSION {
            let (found, supported) = (shown(version), format!("version {VERSION} is"));
            return Err(Error::Unsupported { format: FORMAT, field: "version".into(), found, supported });
        }
        let model = &session.model;
        if get("model")? != shown_digest(model.digest()) {
            let found =
                format!("those of `{}`, {}", header.text("name").unwrap_or_default().escape_debug(), get("model")?);
            let expected = format!("the weights of `{}`, {}", model.name(), shown_digest(model.digest()));
            return Err(broken("model", HEADER_OFFSET, expected, found));
        }
        expect("kv_type", model.kv_type().name())?;
        let (n, angles) = (number("cached")? as usize, number("angles")?);

        let mut taken = 0;
        let mut take = |name: &str, expected: &dyn Fn(&[u64]) -> Option<String>| {
            let tensor =
                header.tensor(name).ok_or_else(|| broken(name, HEADER_OFFSET, "a tensor", "missing".into()))?;
            if let Some(expected) = expected(&tensor.shape) {
                return Err(broken(name, tensor.offset, expected, format!("{:?}", tensor.shape)));
            }
            taken += 1;
            let words = tensor.bytes(bytes)?.as_chunks::<4>().0;
            Ok((tensor.offset, words.iter().map(|&word| u32::from_le_bytes(word)).collect::<Vec<u32>>()))
        };
        let one_row = |shape: &[u64]| (shape.len() != 1).then(|| "one dimension".into());
        let (offset, ids) = take("tokens", &one_row)?;
        let vocab_size = model.config().vocab_size;
        if let Some(at) = ids.iter().position(|&id| id >= vocab_size) {
            let expected = format!("ids below {vocab_size}");
            return Err(broken(format!("token {at}"), offset + 4 * at as u64, expected, ids[at].to_string()));
        }
        if n > ids.len() {
            return Err(broken("cached", HEADER_OFFSET, format!("at most the {} tokens", ids.len()), n.to_string()));
        }
        let mut parts = Vec::new();
        let (mut first_of_all, mut slots_of_ring) = (0, 0);
        for (block, layer) in session.passes.cache.kept().take_while(|_| n > 0) {
            let window = model.config().blocks[block].attention.window;
            let needed = window.map_or(n, |window| n.min(window.saturating_sub(1) as usize)) as u64;
            for (tensor, (name, _, shape)) in layer.tensors().zip(layer_entries(layer, |_| n)) {
                let is_right = |found: &[u64]| match layer {
                    LayerCache::State { .. } => found == shape,
                    LayerCache::Keys(_) => {
                        found.len() == 3
                            && [found[0], found[2]] == [shape[0], shape[2]]
                            && (needed..=shape[1]).contains(&found[1])
                    }
                };
                let expected = |found: &[u64]| {
                    (!is_right(found)).then(|| match needed < shape[1] {
                        true => format!("{shape:?}, or {needed} rows at least"),
                        false => format!("{shape:?}"),
                    })
                };
                let (_, words) = take(&name, &expected)?;
                let part = match layer {
                    LayerCache::State { .. } => Part::All(words),
                    LayerCache::Keys(_) => {
                        let ([slots, row], n_heads) = (slots_of(tensor), shape[0] as usize);
                        let rows = words.len() / (n_heads * row);
                        let fits = rows.min(slots);
                        let of_head = |head: &[u32]| head[(rows - fits) * row..].to_vec();
                        let words = words.chunks_exact((rows * row).max(1)).flat_map(of_head).collect();
                        if n - fits > first_of_all {
                            (first_of_all, slots_of_ring) = (n - fits, slots);
                        }
                        Part::Rows { first: n - fits, words }
                    }
                };
                parts.push((tensor.clone(), part));
            }
        }
        let states = match (model.config().is_recurrent(), n) {
            (false, _) => None,
            (true, 0) => Some([0; N_STATES]),
            (true, n) => {
                let all = |shape: &[u64]| (shape != [N_STATES as u64]).then(|| format!("[{N_STATES}]"));
                let (offset, positions) = take("states", &all)?;
                let mut states = [0; N_STATES];
                for (at, (state, &position)) in states.iter_mut().zip(&positions).enumerate() {
                    // State 0 is none; others lie where their position says.
                    if position != 0 && (position as usize > n || position as usize % N_STATES != at) {
                        let expected = format!("0, or a position up to {n} that is {at} modulo {N_STATES}");
                        let field = format!("state {at}");
                        return Err(broken(field, offset + 4 * at as u64, expected, position.to_string()));
                    }
                    *state = position as usize;
                }
                Some(states)
            }
        };
        if header.tensors.len() != taken {
            return Err(broken("tensors", HEADER_OFFSET, format!("{taken}"), header.tensors.len().to_string()));
        }
        // Keys before the first are nowhere: a pass must not begin where it would see them.
        let written = if first_of_all > 0 { n.max(first_of_all + slots_of_ring) } else { n };
        let note = header.text("note").unwrap_or_default().to_string();
        Ok(File { ids, cached: Cached { n, angles, states, written }, parts, note })
    }
}

fn shown_digest(digest: u64) -> String {
    format!("{digest:016x}")
}

/// A text from a file, cut and escaped for a message.
fn shown(text: &str) -> String {
    let cut: String = text.chars().take(40).collect();
    format!("`{}`", cut.escape_debug())
}

fn broken(field: impl Into<String>, offset: u64, expected: impl Into<String>, found: String) -> Error {
    Error::Format { format: FORMAT, field: field.into(), offset, expected: expected.into(), found }
}
