//! Files of `torch.save` with the tensors of one module: a zip archive whose entries are stored, with a pickle that
//! says which tensor is where. A pickle is a program; this reader knows the instructions that `torch.save` writes for
//! a state dict of plain tensors, runs nothing, and refuses all others by name.

use std::collections::HashMap;
use std::rc::Rc;

use super::safetensors::Safetensors;
use super::{BlockType, TensorInfo};
use crate::error::Error;

/// Entries of an archive, and bytes of its pickle: far above those of a few tensors.
const MAX_ENTRIES: usize = 64;
const MAX_PICKLE_BYTES: usize = 1 << 16;
const MAX_TENSORS: usize = 16;
/// Values in values.
const MAX_DEPTH: u8 = 8;

/// The tensors of a file, with their places in it.
///
/// # Errors
/// [`Error::Format`] naming the part of the archive, or the pickle's instruction, and its offset; [`Error::Unsupported`] for an
/// instruction, a function or a type of numbers that is not known.
pub(crate) fn parse(bytes: &[u8]) -> Result<Safetensors, Error> {
    let entries = entries(bytes)?;
    let (name, pickle) = entries
        .iter()
        .find(|(name, _)| name.ends_with("/data.pkl"))
        .ok_or_else(|| wrong("entry", 0, "data.pkl", "none of this name"))?;
    let folder = name.strip_suffix("data.pkl").unwrap_or_default();
    let of = |name: &str| entries.get(&format!("{folder}{name}")).map(|range| (range.start, range.end));
    if let Some((start, end)) = of("byteorder")
        && bytes[start..end] != *b"little"
    {
        return Err(wrong("byteorder", start, "little", &bytes[start..end].escape_ascii().to_string()));
    }
    if pickle.len() > MAX_PICKLE_BYTES {
        let expected = format!("up to {MAX_PICKLE_BYTES} bytes");
        return Err(wrong("data.pkl", pickle.start, &expected, &pickle.len().to_string()));
    }
    let tensors = Machine::new(&bytes[pickle.clone()], pickle.start).run()?;
    let tensor = |(name, tensor): (Rc<str>, Tensor)| {
        let at = pickle.start;
        let size = tensor.block_type.block_bytes();
        let n = tensor.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
        let (start, end) =
            of(&format!("data/{}", tensor.key)).ok_or_else(|| wrong("storage", at, "an entry", &tensor.key))?;
        let first = tensor.first.checked_mul(size).and_then(|first| first.checked_add(start as u64));
        let range = first
            .zip(n.and_then(|n| n.checked_mul(size)))
            .filter(|(first, n)| first.checked_add(*n).is_some_and(|last| last <= end as u64));
        let (offset, size_bytes) = range
            .ok_or_else(|| wrong("storage", start, &format!("all of `{name}`"), &format!("{} bytes", end - start)))?;
        Ok::<_, Error>(TensorInfo {
            name: name.to_string(),
            shape: tensor.shape.to_vec(),
            block_type: tensor.block_type,
            offset,
            size_bytes,
        })
    };
    let tensors = tensors.into_iter().map(tensor).collect::<Result<_, _>>()?;
    Safetensors::of_tensors(tensors).ok_or_else(|| wrong("data.pkl", pickle.start, "unique names", "a name twice"))
}

fn wrong(field: &str, offset: usize, expected: &str, found: &str) -> Error {
    Error::Format {
        format: "torch",
        field: field.into(),
        offset: offset as u64,
        expected: expected.into(),
        found: found.escape_debug().to_string(),
    }
}

fn unsupported(field: &str, found: &str, supported: &str) -> Error {
    Error::Unsupported {
        format: "torch",
        field: field.into(),
        found: format!("`{}`", found.escape_debug()),
        supported: supported.into(),
    }
}

/// Little-endian numbers at an offset.
fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok()
}

/// The data of each entry, by name.
fn entries(bytes: &[u8]) -> Result<HashMap<String, std::ops::Range<usize>>, Error> {
    const END: [u8; 4] = *b"PK\x05\x06";
    const CENTRAL: [u8; 4] = *b"PK\x01\x02";
    const LOCAL: [u8; 4] = *b"PK\x03\x04";
    /// A directory's end, with the longest comment.
    const LONGEST_END: usize = 22 + 0xffff;
    let tail = bytes.len().saturating_sub(LONGEST_END);
    let end = bytes[tail..].windows(4).rposition(|window| window == END).map(|at| tail + at);
    let end = end.ok_or_else(|| wrong("archive", bytes.len(), "a zip archive", "no directory"))?;
    let cut = |at: usize| wrong("archive", at, "a whole zip archive", "its end");
    let (n, mut at) = u16_at(bytes, end + 10).zip(u32_at(bytes, end + 16)).ok_or_else(|| cut(end))?;
    if n > MAX_ENTRIES {
        return Err(wrong("entries", end, &format!("up to {MAX_ENTRIES}"), &n.to_string()));
    }
    let mut entries = HashMap::new();
    for _ in 0..n {
        let header = bytes.get(at..).filter(|rest| rest.starts_with(&CENTRAL)).ok_or_else(|| cut(at))?;
        let field = |i: usize| u16_at(header, i).ok_or_else(|| cut(at));
        let (method, lengths) = (field(10)?, [field(28)?, field(30)?, field(32)?]);
        let sizes = u32_at(header, 20).zip(u32_at(header, 24)).zip(u32_at(header, 42)).ok_or_else(|| cut(at))?;
        let ((packed, size), local) = sizes;
        let name = header.get(46..46 + lengths[0]).ok_or_else(|| cut(at))?;
        let name = String::from_utf8_lossy(name).into_owned();
        if method != 0 || packed != size {
            return Err(unsupported(
                &format!("entry {name}"),
                &format!("compressed by method {method}"),
                "stored ones",
            ));
        }
        let of_local = bytes.get(local..).filter(|rest| rest.starts_with(&LOCAL)).ok_or_else(|| cut(local))?;
        let skipped = u16_at(of_local, 26).zip(u16_at(of_local, 28)).ok_or_else(|| cut(local))?;
        let start = local.checked_add(30 + skipped.0 + skipped.1).ok_or_else(|| cut(local))?;
        let end = start.checked_add(size).filter(|&end| end <= bytes.len()).ok_or_else(|| cut(start))?;
        entries.insert(name, start..end);
        at += 46 + lengths.iter().sum::<usize>();
    }
    Ok(entries)
}

/// A value on a pickle's stack.
#[derive(Clone)]
enum Value {
    Mark,
    /// `None` or a bool, which mean nothing here.
    Nothing,
    Number(u64),
    Text(Rc<str>),
    Function(Rc<str>),
    /// With its depth of tuples.
    Tuple(Rc<[Value]>, u8),
    Dict(Vec<(Rc<str>, Tensor)>),
    Storage {
        block_type: BlockType,
        key: Rc<str>,
    },
    Tensor(Tensor),
}

#[derive(Clone)]
struct Tensor {
    block_type: BlockType,
    /// Name of its storage.
    key: Rc<str>,
    /// Its first element there.
    first: u64,
    shape: Rc<[u64]>,
}

/// A pickle being executed.
struct Machine<'a> {
    bytes: &'a [u8],
    /// Offset of the pickle in the file.
    start: usize,
    at: usize,
    stack: Vec<Value>,
    memo: HashMap<usize, Value>,
}

impl<'a> Machine<'a> {
    fn new(bytes: &'a [u8], start: usize) -> Machine<'a> {
        Machine { bytes, start, at: 0, stack: Vec::new(), memo: HashMap::new() }
    }

    fn wrong(&self, expected: &str, found: &str) -> Error {
        wrong("data.pkl", self.start + self.at, expected, found)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..n));
        let taken = taken.ok_or_else(|| self.wrong("a whole pickle", "its end"))?;
        self.at += n;
        Ok(taken)
    }

    /// A little-endian number of `n` bytes, at most 4.
    fn number(&mut self, n: usize) -> Result<usize, Error> {
        Ok(self.take(n)?.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte)))
    }

    fn line(&mut self) -> Result<String, Error> {
        let n = self.bytes[self.at..].iter().position(|&byte| byte == b'\n');
        let n = n.ok_or_else(|| self.wrong("a line", "the pickle's end"))?;
        let line = String::from_utf8_lossy(self.take(n)?).into_owned();
        self.at += 1;
        Ok(line)
    }

    fn pop(&mut self) -> Result<Value, Error> {
        self.stack.pop().ok_or_else(|| self.wrong("a value", "an empty stack"))
    }

    /// The values above the last mark.
    fn marked(&mut self) -> Result<Vec<Value>, Error> {
        let at = self.stack.iter().rposition(|value| matches!(value, Value::Mark));
        let at = at.ok_or_else(|| self.wrong("a mark", "none"))?;
        let values = self.stack.split_off(at + 1);
        self.stack.pop();
        Ok(values)
    }

    fn tuple(&self, values: Vec<Value>) -> Result<Value, Error> {
        let depth = |value: &Value| if let Value::Tuple(_, depth) = value { *depth } else { 0 };
        let depth = values.iter().map(depth).max().unwrap_or(0) + 1;
        match depth <= MAX_DEPTH {
            true => Ok(Value::Tuple(values.into(), depth)),
            false => Err(self.wrong(&format!("up to {MAX_DEPTH} tuples in one another"), "more")),
        }
    }

    /// The tensors in the dict that the pickle makes.
    fn run(mut self) -> Result<Vec<(Rc<str>, Tensor)>, Error> {
        loop {
            let instruction = self.number(1)? as u8;
            let value = match instruction {
                b'\x80' => {
                    let protocol = self.number(1)?;
                    if !(2..=4).contains(&protocol) {
                        return Err(unsupported("pickle protocol", &protocol.to_string(), "2 to 4"));
                    }
                    continue;
                }
                b'.' => break,
                b'(' => Value::Mark,
                b'N' | b'\x88' | b'\x89' => Value::Nothing,
                b'K' => Value::Number(self.number(1)? as u64),
                b'M' => Value::Number(self.number(2)? as u64),
                b'J' => Value::Number(self.number(4)? as u64),
                b'X' => {
                    let n = self.number(4)?;
                    Value::Text(String::from_utf8_lossy(self.take(n)?).into())
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    Value::Function(format!("{module}.{name}").into())
                }
                b')' => self.tuple(Vec::new())?,
                b'}' => Value::Dict(Vec::new()),
                b't' => {
                    let values = self.marked()?;
                    self.tuple(values)?
                }
                b'\x85'..=b'\x87' => {
                    let n = usize::from(instruction - b'\x84');
                    let first = self.stack.len().checked_sub(n).ok_or_else(|| self.wrong("values", "fewer"))?;
                    let values = self.stack.split_off(first);
                    self.tuple(values)?
                }
                b'q' | b'r' => {
                    let i = self.number(if instruction == b'q' { 1 } else { 4 })?;
                    let value = self.pop()?;
                    self.memo.insert(i, value.clone());
                    value
                }
                b'h' | b'j' => {
                    let i = self.number(if instruction == b'h' { 1 } else { 4 })?;
                    let found = self.memo.get(&i).cloned();
                    found.ok_or_else(|| self.wrong("a value that was kept", &i.to_string()))?
                }
                b'Q' => {
                    let id = self.pop()?;
                    self.storage(id)?
                }
                b'R' => {
                    let (arguments, function) = (self.pop()?, self.pop()?);
                    self.called(function, arguments)?
                }
                b's' | b'u' => {
                    let values = match instruction {
                        b'u' => self.marked()?,
                        _ => {
                            let (value, key) = (self.pop()?, self.pop()?);
                            vec![key, value]
                        }
                    };
                    let dict = self.pop()?;
                    self.with_items(dict, &values)?
                }
                // The state of an ordered dict: versions of modules.
                b'b' => {
                    self.pop()?;
                    self.pop()?
                }
                other => {
                    return Err(unsupported(
                        "pickle instruction",
                        &char::from(other).to_string(),
                        "those of a state dict",
                    ));
                }
            };
            self.stack.push(value);
        }
        match self.pop()? {
            Value::Dict(tensors) if self.stack.is_empty() => Ok(tensors),
            _ => Err(self.wrong("a dict of tensors", "another value")),
        }
    }

    /// The storage that a persistent id names: `("storage", type, key, device, n)`.
    fn storage(&self, id: Value) -> Result<Value, Error> {
        if let Value::Tuple(values, _) = &id
            && let [Value::Text(kind), Value::Function(class), Value::Text(key), Value::Text(_), Value::Number(_)] =
                &values[..]
            && &**kind == "storage"
        {
            let block_type = match &**class {
                "torch.FloatStorage" => BlockType::F32,
                "torch.HalfStorage" => BlockType::F16,
                "torch.BFloat16Storage" => BlockType::BF16,
                other => {
                    return Err(unsupported("storage", other, "FloatStorage, HalfStorage, BFloat16Storage of torch"));
                }
            };
            return Ok(Value::Storage { block_type, key: key.clone() });
        }
        Err(self.wrong("a storage", "another persistent id"))
    }

    /// The result of a function.
    fn called(&self, function: Value, arguments: Value) -> Result<Value, Error> {
        const KNOWN: &str = "collections.OrderedDict without arguments, torch._utils._rebuild_tensor_v2";
        let (Value::Function(function), Value::Tuple(arguments, _)) = (function, arguments) else {
            return Err(self.wrong("a function and its arguments", "other values"));
        };
        match (&*function, &arguments[..]) {
            ("collections.OrderedDict", []) => Ok(Value::Dict(Vec::new())),
            (
                "torch._utils._rebuild_tensor_v2",
                [
                    Value::Storage { block_type, key },
                    Value::Number(first),
                    Value::Tuple(shape, _),
                    Value::Tuple(strides, _),
                    Value::Nothing,
                    Value::Dict(hooks),
                ],
            ) if hooks.is_empty() => {
                let numbers = |values: &[Value]| {
                    let number = |value: &Value| if let Value::Number(number) = value { Some(*number) } else { None };
                    values.iter().map(number).collect::<Option<Vec<u64>>>()
                };
                let sizes = numbers(shape).zip(numbers(strides));
                let (shape, strides) =
                    sizes.ok_or_else(|| self.wrong("numbers as a tensor's shape", "other values"))?;
                let usual = shape.iter().rev().scan(1u64, |next, &dim| {
                    let stride = *next;
                    *next = stride.saturating_mul(dim);
                    Some(stride)
                });
                if !usual.eq(strides.iter().rev().copied()) {
                    return Err(unsupported("strides", &format!("{strides:?}"), "those of contiguous rows"));
                }
                Ok(Value::Tensor(Tensor {
                    block_type: *block_type,
                    key: key.clone(),
                    first: *first,
                    shape: shape.into(),
                }))
            }
            (other, _) => Err(unsupported("pickle function", other, KNOWN)),
        }
    }

    /// A dict with further items. Other values than tensors are of a dict that is not read.
    fn with_items(&self, dict: Value, values: &[Value]) -> Result<Value, Error> {
        let Value::Dict(mut tensors) = dict else { return Err(self.wrong("a dict", "another value")) };
        for pair in values.chunks(2) {
            match pair {
                [Value::Text(name), Value::Tensor(tensor)] if tensors.len() < MAX_TENSORS => {
                    tensors.push((name.clone(), tensor.clone()));
                }
                [Value::Text(_), Value::Tensor(_)] => {
                    return Err(self.wrong(&format!("up to {MAX_TENSORS} tensors"), "more"));
                }
                [Value::Text(_), _] => {}
                _ => return Err(self.wrong("names and values", "others")),
            }
        }
        Ok(Value::Dict(tensors))
    }
}
