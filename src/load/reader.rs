//! Reads a model's headers from arriving bytes, as over a network.

use super::gguf::{self, ConfigData};
use super::huggingface::{self, FolderTexts};
use super::speech::{GgmlReader, ScatteredHeaders, SpeechFile};
use super::vision::{ImageEncoderFile, ImageHeader, VisionFile, VisionHeader};
use super::{ModelHeader, Outline};
use crate::error::Error;
use crate::formats::gguf::Gguf;
use crate::formats::safetensors::Safetensors;
use crate::formats::{Parsed, TensorInfo, UNKNOWN_LEN};

/// Limit of a header, which is buffered in full. The largest vocabularies need 20 MiB.
const MAX_HEADER_BYTES: u64 = 256 << 20;

/// A file's name and, if known, size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName {
    /// Path in the model's folder: `config.json`, `1_Pooling/config.json`.
    pub name: String,
    /// Bytes in it.
    pub size: Option<u64>,
}

/// The first bytes of a weight file, fetched with its header.
#[derive(Debug)]
pub struct Head {
    /// The file's number in the list given.
    pub file: usize,
    /// Its first bytes.
    pub bytes: Vec<u8>,
}

/// The fetched part of a file.
struct FetchedPart {
    file: FileName,
    /// Its beginning.
    bytes: Vec<u8>,
    /// Whether `bytes` is the whole file.
    is_whole: bool,
}

impl FetchedPart {
    /// The size that tensors are checked against. For a file of unknown size, truncation shows at its end.
    fn len(&self) -> u64 {
        if self.is_whole { self.bytes.len() as u64 } else { self.file.size.unwrap_or(UNKNOWN_LEN) }
    }
}

/// The reader's state.
enum HeaderStage {
    /// Reads a folder's small files; the number of the current one.
    Texts(usize),
    /// Reads headers of weight files.
    Headers,
    /// Reads the data of configuration tensors: the last of `left`, given with its file, and the bytes of it so far.
    ConfigData { left: Vec<(usize, TensorInfo)>, data: Vec<u8>, read: ConfigData },
    /// All headers are read.
    Ready { config_data: ConfigData },
}

/// Headers read so far, in the order of the weight files.
enum Headers {
    Gguf(Vec<Gguf>),
    Folder {
        texts: Box<FolderTexts>,
        headers: Vec<Safetensors>,
    },
    /// Those of a single file.
    Scattered(Box<dyn ScatteredHeaders>),
}

/// An image encoder without its files, or why it cannot be loaded.
type ImageEncoder = Result<ImageEncoderFile, Error>;

/// Whose headers are read.
enum Wanted {
    Model,
    /// An encoder of texts with the image encoder in its folder, known once all headers are read, if it can be loaded.
    Encoders(Option<Result<Box<ImageHeader>, Error>>),
    /// A vision encoder, known once all headers are read.
    Vision(Option<Box<VisionHeader>>),
    Speech,
}

/// Reads the headers of a model: one GGUF file, all shards of one in order, or a Hugging Face folder. Push the bytes
/// that [`HeaderReader::wanted`] asks for until it returns `None`.
pub struct HeaderReader {
    parts: Vec<FetchedPart>,
    /// Weight files, as indices into `parts`.
    weight_parts: Vec<usize>,
    stage: HeaderStage,
    headers: Headers,
    of: Wanted,
    /// The folder's name.
    folder: String,
    /// Minimum size of the current header: parsing waits for that many bytes.
    needed: u64,
}

impl HeaderReader {
    /// A reader of these files.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none.
    #[inline(never)]
    pub fn new(files: Vec<FileName>) -> Result<HeaderReader, Error> {
        if files.is_empty() {
            return Err(missing("files"));
        }
        let is_published = |file: &FileName| file.name.ends_with(".safetensors") || file.name.ends_with(".json");
        let is_folder = files.iter().any(is_published);
        let folder = "model".into();
        let parts: Vec<_> =
            files.into_iter().map(|file| FetchedPart { file, bytes: Vec::new(), is_whole: false }).collect();
        let mut reader = if is_folder {
            let headers = Headers::Folder { texts: Box::default(), headers: Vec::new() };
            let (weight_parts, stage) = (Vec::new(), HeaderStage::Texts(0));
            HeaderReader { parts, weight_parts, stage, headers, of: Wanted::Model, folder, needed: 0 }
        } else {
            let (weight_parts, stage) = ((0..parts.len()).collect(), HeaderStage::Headers);
            let headers = Headers::Gguf(Vec::new());
            HeaderReader { parts, weight_parts, stage, headers, of: Wanted::Model, folder, needed: 0 }
        };
        reader.skip_unread_texts()?;
        Ok(reader)
    }

    /// A reader of an encoder's files, and those of the image encoder in its folder.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none.
    pub(super) fn of_encoders(files: Vec<FileName>) -> Result<HeaderReader, Error> {
        Ok(HeaderReader { of: Wanted::Encoders(None), ..HeaderReader::new(files)? })
    }

    /// A reader of a vision encoder's files: one GGUF file (`mmproj`), or the folder of a model that has one.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none, or several GGUF files.
    pub(super) fn of_vision(files: Vec<FileName>) -> Result<HeaderReader, Error> {
        let reader = HeaderReader { of: Wanted::Vision(None), ..HeaderReader::new(files)? };
        match (&reader.headers, reader.parts.len()) {
            (Headers::Gguf(_), n @ 2..) => {
                let (expected, found) = ("one GGUF file of a vision encoder (mmproj)".into(), format!("{n} files"));
                Err(Error::Config { field: "files".into(), expected, found })
            }
            _ => Ok(reader),
        }
    }

    /// A reader of a speech model's files: one file of whisper.cpp, or those of a folder.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none, or several files of whisper.cpp.
    pub(super) fn of_speech(files: Vec<FileName>) -> Result<HeaderReader, Error> {
        let reader = HeaderReader { of: Wanted::Speech, ..HeaderReader::new(files)? };
        match (&reader.headers, &reader.parts[..]) {
            (Headers::Gguf(_), [only]) => {
                let headers = Headers::Scattered(Box::new(GgmlReader::new(only.file.size)));
                Ok(HeaderReader { headers, ..reader })
            }
            (Headers::Gguf(_), parts) => {
                let (expected, found) =
                    ("one file of whisper.cpp (ggml-*.bin)".into(), format!("{} files", parts.len()));
                Err(Error::Config { field: "files".into(), expected, found })
            }
            _ => Ok(reader),
        }
    }

    /// Sets the folder's name, which becomes the name of a Hugging Face model (default `model`).
    pub fn set_folder(&mut self, name: &str) {
        self.folder = name.into();
    }

    /// Number and offset of the next bytes wanted.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            HeaderStage::Texts(part) => Some((*part, self.parts.get(*part)?.bytes.len() as u64)),
            HeaderStage::Headers => match &self.headers {
                Headers::Scattered(reader) => Some((0, reader.wanted()?)),
                _ => {
                    let part = self.part_in_progress()?;
                    Some((part, self.parts.get(part)?.bytes.len() as u64))
                }
            },
            HeaderStage::ConfigData { left, data, .. } => {
                let (shard, tensor) = left.last()?;
                Some((*self.weight_parts.get(*shard)?, tensor.offset + data.len() as u64))
            }
            HeaderStage::Ready { .. } => None,
        }
    }

    /// Pushes bytes at the wanted offset, any number.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match &mut self.stage {
            HeaderStage::Texts(part) => {
                let part = &mut self.parts[*part];
                huggingface::check_text_size((part.bytes.len() + bytes.len()) as u64)
                    .map_err(|e| e.in_file(&part.file.name))?;
                part.bytes.extend_from_slice(bytes);
                if part.file.size.is_some_and(|size| part.bytes.len() as u64 >= size) { self.end() } else { Ok(()) }
            }
            HeaderStage::Headers => {
                if let Headers::Scattered(reader) = &mut self.headers {
                    reader.push(bytes).map_err(|error| error.in_file(&self.parts[0].file.name))?;
                    self.end_scattered();
                    return Ok(());
                }
                let Some(part) = self.part_in_progress() else { return Ok(()) };
                self.parts[part].bytes.extend_from_slice(bytes);
                self.read_header(part)
            }
            HeaderStage::ConfigData { left, data, read } => {
                let Some((_, tensor)) = left.last() else { return Ok(()) };
                let missing = tensor.size_bytes as usize - data.len();
                data.extend_from_slice(&bytes[..bytes.len().min(missing)]);
                if data.len() as u64 == tensor.size_bytes {
                    read.push((tensor.name.clone(), std::mem::take(data)));
                    left.pop();
                    self.take_config_data()?;
                }
                Ok(())
            }
            HeaderStage::Ready { .. } => Ok(()),
        }
    }

    /// Marks the end of the wanted file.
    ///
    /// # Errors
    /// As [`HeaderReader::push`]; [`Error::Format`] for a weight file with an incomplete header.
    pub fn end(&mut self) -> Result<(), Error> {
        match &self.stage {
            HeaderStage::Texts(at) => {
                let at = *at;
                let part = &mut self.parts[at];
                part.is_whole = true;
                if let Headers::Folder { texts, .. } = &mut self.headers
                    && let Some(slot) = texts.slot(&part.file.name)
                {
                    *slot = Some(std::mem::take(&mut part.bytes));
                }
                self.stage = HeaderStage::Texts(at + 1);
                self.skip_unread_texts()
            }
            HeaderStage::Headers => {
                if let Headers::Scattered(reader) = &mut self.headers {
                    reader.end().map_err(|error| error.in_file(&self.parts[0].file.name))?;
                    self.end_scattered();
                    return Ok(());
                }
                let Some(part) = self.part_in_progress() else { return Ok(()) };
                self.parts[part].is_whole = true;
                self.read_header(part)?;
                // The file has ended, so an incomplete header is an error.
                if self.part_in_progress() == Some(part) { Err(self.truncated(part)) } else { Ok(()) }
            }
            HeaderStage::ConfigData { left, .. } => match left.last() {
                Some((shard, _)) => Err(self.truncated(self.weight_parts[*shard])),
                None => Ok(()),
            },
            HeaderStage::Ready { .. } => Ok(()),
        }
    }

    /// The architecture-independent outline, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if a key has the wrong type or bytes are still wanted.
    pub fn outline(&self) -> Result<Outline, Error> {
        let HeaderStage::Ready { .. } = &self.stage else { return Err(missing("header")) };
        match &self.headers {
            Headers::Gguf(shards) => Outline::of_gguf(shards),
            Headers::Scattered(_) => Err(missing("outline")),
            Headers::Folder { texts, headers } => {
                Ok(Outline::of_folder(texts, headers.iter().flat_map(|header| &header.tensors)))
            }
        }
    }

    /// The model's header, and the heads of its weight files in the tensor index's order.
    ///
    /// # Errors
    /// [`Error::Format`], [`Error::Unsupported`] or [`Error::Config`]; also if bytes are still wanted.
    pub fn finish(mut self) -> Result<(ModelHeader, Vec<Head>), Error> {
        let HeaderStage::Ready { config_data } = &self.stage else { return Err(missing("header")) };
        let first = self.parts.first().map_or("model", |part| part.file.name.as_str());
        let header = match self.headers {
            Headers::Gguf(shards) => {
                let name = super::shards::stem(first);
                gguf::header(name, shards, config_data).map_err(|e| e.in_file(first))?
            }
            Headers::Folder { texts, headers } => {
                let names = self.weight_parts.iter().map(|&part| self.parts[part].file.name.clone());
                let weights: Vec<_> = names.zip(headers).collect();
                huggingface::check_shards(&texts, &weights)?;
                huggingface::header(&self.folder, &texts, &weights)?
            }
            Headers::Scattered(_) => return Err(missing("header")),
        };
        Ok((header, Self::heads(&self.weight_parts, &mut self.parts)))
    }

    /// As [`HeaderReader::finish`], with the image encoder in the folder, without its files, or why there is none.
    ///
    /// # Errors
    /// As [`HeaderReader::finish`].
    pub(super) fn finish_encoders(mut self) -> Result<(ModelHeader, ImageEncoder, Vec<Head>), Error> {
        let images = match (&self.stage, std::mem::replace(&mut self.of, Wanted::Model)) {
            (HeaderStage::Ready { config_data }, Wanted::Encoders(Some(images))) => {
                images.and_then(|header| header.with_data(config_data))
            }
            _ => Err(missing("image encoder")),
        };
        let (header, heads) = self.finish()?;
        Ok((header, images, heads))
    }

    /// The speech model without its files' bytes, and the heads of its weight files in the tensor indices' order.
    ///
    /// # Errors
    /// As [`HeaderReader::finish`].
    pub(super) fn finish_speech(mut self) -> Result<(SpeechFile, Vec<Head>), Error> {
        let (HeaderStage::Ready { .. }, Wanted::Speech) = (&self.stage, &self.of) else {
            return Err(missing("header"));
        };
        let first = self.parts.first().map_or("model", |part| part.file.name.as_str());
        let file = match self.headers {
            Headers::Folder { texts, headers } => {
                let names = self.weight_parts.iter().map(|&part| self.parts[part].file.name.clone());
                SpeechFile::of_folder(&self.folder, &texts, &names.zip(headers).collect::<Vec<_>>())?
            }
            Headers::Scattered(reader) => {
                let name = first.strip_suffix(".bin").unwrap_or(first);
                let file = reader.finish(name).map_err(|e| e.in_file(first))?;
                SpeechFile { tokenizer: file.tokenizer.map_err(|e| e.in_file(first)), ..file }
            }
            Headers::Gguf(_) => return Err(missing("header")),
        };
        Ok((file, Self::heads(&self.weight_parts, &mut self.parts)))
    }

    /// The vision encoder without its files, and the heads of its weight files in the tensor index's order.
    ///
    /// # Errors
    /// As [`HeaderReader::finish`].
    pub(super) fn finish_vision(mut self) -> Result<(VisionFile, Vec<Head>), Error> {
        let (HeaderStage::Ready { config_data }, Wanted::Vision(Some(header))) = (&self.stage, self.of) else {
            return Err(missing("header"));
        };
        Ok((header.with_data(config_data)?, Self::heads(&self.weight_parts, &mut self.parts)))
    }

    /// Goes on when all scattered headers are read.
    fn end_scattered(&mut self) {
        if matches!(&self.headers, Headers::Scattered(reader) if reader.wanted().is_none()) {
            self.stage = HeaderStage::Ready { config_data: ConfigData::default() };
        }
    }

    fn heads(weight_parts: &[usize], parts: &mut [FetchedPart]) -> Vec<Head> {
        let head = |&file: &usize| Head { file, bytes: std::mem::take(&mut parts[file].bytes) };
        weight_parts.iter().map(head).collect()
    }

    /// The weight file of the current header.
    fn part_in_progress(&self) -> Option<usize> {
        let n_read = match &self.headers {
            Headers::Gguf(shards) => shards.len(),
            Headers::Folder { headers, .. } => headers.len(),
            Headers::Scattered(_) => 0,
        };
        self.weight_parts.get(n_read).copied()
    }

    /// Skips unused small files; continues with the next one, or with the weight files.
    fn skip_unread_texts(&mut self) -> Result<(), Error> {
        let (HeaderStage::Texts(at), Headers::Folder { texts, .. }) = (&self.stage, &mut self.headers) else {
            return Ok(());
        };
        let next = (*at..self.parts.len()).find(|&part| texts.slot(&self.parts[part].file.name).is_some());
        if let Some(next) = next {
            self.stage = HeaderStage::Texts(next);
            return Ok(());
        }
        let only = || {
            // Not those of a sentence-transformers module, in folders of their own.
            let is_weights = |part: &&FetchedPart| {
                part.file.name.ends_with(".safetensors") && !huggingface::DENSE_WEIGHTS.contains(&&*part.file.name)
            };
            let mut weights = self.parts.iter().filter(is_weights);
            weights.next().filter(|_| weights.next().is_none()).map(|part| part.file.name.as_str())
        };
        let chosen = if texts.index.is_none() { only() } else { None };
        for name in huggingface::weight_files(texts, chosen)? {
            let part = self.parts.iter().position(|part| part.file.name == name);
            self.weight_parts.push(part.ok_or_else(|| missing(&name))?);
        }
        self.stage = HeaderStage::Headers;
        Ok(())
    }

    /// Parses the current header again if enough bytes have arrived.
    fn read_header(&mut self, part: usize) -> Result<(), Error> {
        let FetchedPart { bytes, is_whole, file } = &self.parts[part];
        if (bytes.len() as u64) < self.needed && !is_whole {
            return Ok(());
        }
        let len = self.parts[part].len();
        let needed = match &mut self.headers {
            Headers::Gguf(shards) => take(shards, Gguf::parse_prefix(bytes, len).map_err(|e| e.in_file(&file.name))?),
            Headers::Folder { headers, .. } => {
                take(headers, Safetensors::parse_prefix(bytes, len).map_err(|e| e.in_file(&file.name))?)
            }
            Headers::Scattered(_) => return Ok(()),
        };
        if let Some(needed) = needed.filter(|needed| *needed > MAX_HEADER_BYTES) {
            let error = Error::Format {
                format: if matches!(self.headers, Headers::Gguf(_)) { "gguf" } else { "safetensors" },
                field: "header".into(),
                offset: bytes.len() as u64,
                expected: format!("its end within {MAX_HEADER_BYTES} bytes"),
                found: format!("at least {needed} bytes"),
            };
            return Err(error.in_file(&file.name));
        }
        // Parsing restarts each time, so it waits for a quarter more bytes: five attempts in all, with few bytes
        // fetched beyond the header.
        let more = (bytes.len() as u64 / 4 * 5).min(MAX_HEADER_BYTES);
        self.needed = needed.map_or(0, |needed| needed.max(more));
        if self.part_in_progress().is_none() {
            let left = self.config_tensors()?;
            self.stage = HeaderStage::ConfigData { left, data: Vec::new(), read: ConfigData::default() };
            self.take_config_data()?;
        }
        Ok(())
    }

    /// Tensors whose data the header includes, with the numbers of their files.
    fn config_tensors(&mut self) -> Result<Vec<(usize, TensorInfo)>, Error> {
        let first = self.weight_parts.first().map_or("model", |&part| self.parts[part].file.name.as_str());
        let names = || self.weight_parts.iter().map(|&part| self.parts[part].file.name.as_str());
        let header = match (&self.of, &self.headers) {
            (Wanted::Model | Wanted::Encoders(_), Headers::Gguf(shards)) => {
                let found = gguf::config_tensors(shards);
                return Ok(found.map(|(shard, tensor)| (shard, tensor.clone())).collect());
            }
            (Wanted::Model, Headers::Folder { .. }) | (Wanted::Speech, _) | (_, Headers::Scattered(_)) => {
                return Ok(Vec::new());
            }
            (Wanted::Vision(_), Headers::Gguf(shards)) => match shards.first() {
                Some(gguf) => VisionHeader::of_gguf(gguf).map_err(|e| e.in_file(first))?,
                None => return Err(missing("files")),
            },
            (Wanted::Vision(_), Headers::Folder { texts, headers }) => {
                VisionHeader::of_folder(texts, names().zip(headers))?
            }
            (Wanted::Encoders(_), Headers::Folder { texts, headers }) => {
                let images = ImageHeader::of_folder(texts, names().zip(headers));
                let data = images.iter().flat_map(ImageHeader::data).cloned().collect();
                self.of = Wanted::Encoders(Some(images.map(Box::new)));
                return Ok(data);
            }
        };
        let data = header.data().cloned().collect();
        self.of = Wanted::Vision(Some(Box::new(header)));
        Ok(data)
    }

    /// Takes the next configuration tensor from the bytes at hand: it usually follows the header.
    fn take_config_data(&mut self) -> Result<(), Error> {
        let HeaderStage::ConfigData { left, read, .. } = &mut self.stage else { return Ok(()) };
        let Some((shard, tensor)) = left.last() else {
            self.stage = HeaderStage::Ready { config_data: std::mem::take(read) };
            return Ok(());
        };
        let bytes = &self.parts[self.weight_parts[*shard]].bytes;
        let here = usize::try_from(tensor.offset).ok().and_then(|start| bytes.get(start..)).unwrap_or_default();
        let here = here[..here.len().min(tensor.size_bytes as usize)].to_vec();
        self.push(&here)
    }

    fn truncated(&self, part: usize) -> Error {
        let FetchedPart { file, bytes, .. } = &self.parts[part];
        let found_bytes = bytes.len() as u64;
        let (part, needed_bytes) = ("its header".into(), self.needed.max(found_bytes + 1));
        let error = Error::Truncated { part, needed_bytes, found_bytes };
        error.in_file(&file.name)
    }
}

/// Keeps a complete header, else returns the minimum of bytes needed.
fn take<T>(headers: &mut Vec<T>, parsed: Parsed<T>) -> Option<u64> {
    match parsed {
        Parsed::Complete(header) => {
            headers.push(header);
            None
        }
        Parsed::NeedMore(needed) => Some(needed),
    }
}

fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}
