//! What a template computes with: text that knows who wrote it, containers of known size, and the budget.
//!
//! The engine tells two kinds of strings apart by the flag it has for HTML, "safe". A string without the flag was
//! written by a user, all of it. A string with the flag is the template's own, but for stretches between [`OPEN`] and
//! [`CLOSE`], which are a user's. So provenance survives whatever a template does, and only the template's own text is
//! searched for control tokens.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Begins a user's text inside a template's. A noncharacter: no text has it, and input that does loses it.
pub const OPEN: char = '\u{FDD0}';
/// Ends it.
pub const CLOSE: char = '\u{FDD1}';

/// Containers may be nested this deep, which is far more than any tool description is.
const MAX_DEPTH: u32 = 64;

/// What a reference to a value takes in memory, roughly.
pub const SLOT_BYTES: u64 = 32;

/// The bytes that a rendering may still read and write. Every operation whose work depends on its operands' size pays,
/// and nothing is paid back, so what is alive at any moment is less.
#[derive(Debug)]
pub struct Budget {
    bytes: u64,
    left: AtomicU64,
}

impl Budget {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Budget { bytes, left: AtomicU64::new(bytes) })
    }

    /// # Errors
    /// An error of the engine if the budget does not cover it; [`Budget::exhausted`] is true from then on.
    pub fn charge(&self, bytes: u64) -> Result<(), Error> {
        let pay = |left: u64| left.checked_sub(bytes);
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay) {
            Ok(_) => Ok(()),
            Err(_) => {
                self.left.store(0, Ordering::Relaxed);
                Err(refused(format!("more than {} bytes of work", self.bytes)))
            }
        }
    }

    pub fn charge_len(&self, len: usize) -> Result<(), Error> {
        self.charge(len as u64)
    }

    pub fn exhausted(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// The bytes in all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// An error of the engine with a message.
pub fn refused(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A string, with the stretches that a user wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text {
    pub text: String,
    /// In order, apart from each other, none empty.
    pub user: Vec<Range<usize>>,
}

impl Text {
    pub fn user(text: impl Into<String>) -> Self {
        let mut user = Text::default();
        user.push(&text.into(), true);
        user
    }

    pub fn template(text: impl Into<String>) -> Self {
        Text { text: text.into(), user: Vec::new() }
    }

    /// Reads the marks of a string that the template and users wrote together.
    pub fn parse(marked: &str) -> Self {
        let mut parsed = Text::default();
        let mut rest = marked;
        let mut is_user = false;
        while !rest.is_empty() {
            let end = rest.find([OPEN, CLOSE]).unwrap_or(rest.len());
            let (piece, after) = rest.split_at(end);
            parsed.push(piece, is_user);
            let mut after = after.chars();
            is_user = after.next() == Some(OPEN);
            rest = after.as_str();
        }
        parsed
    }

    /// The text of a string value; `None` for other values.
    pub fn of_string(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        Some(if value.is_safe() { Text::parse(text) } else { Text::user(text) })
    }

    pub fn push(&mut self, piece: &str, is_user: bool) {
        if is_user && !piece.is_empty() {
            let start = self.text.len();
            let end = start + piece.len();
            match self.user.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => self.user.push(start..end),
            }
        }
        self.text.push_str(piece);
    }

    pub fn push_text(&mut self, other: &Text) {
        other.stretches().for_each(|(piece, is_user)| self.push(piece, is_user));
    }

    /// The text in pieces of one author each.
    pub fn stretches(&self) -> impl Iterator<Item = (&str, bool)> {
        let bounds = self.user.iter().flat_map(|range| [(range.start, false), (range.end, true)]);
        let mut done = 0;
        bounds.chain([(self.text.len(), false)]).filter_map(move |(end, is_user)| {
            let piece = self.text.get(done..end)?;
            done = end;
            (!piece.is_empty()).then_some((piece, is_user))
        })
    }

    /// A part of it.
    pub fn slice(&self, part: Range<usize>) -> Text {
        let mut cut = Text { text: self.text.get(part.clone()).unwrap_or_default().to_owned(), user: Vec::new() };
        let inside = self.user.iter().map(|user| user.start.max(part.start)..user.end.min(part.end));
        let inside = inside.filter(|user| user.start < user.end);
        cut.user.extend(inside.map(|user| user.start - part.start..user.end - part.start));
        cut
    }

    /// The part that `trimmed`, a slice of this text's own string, covers.
    pub fn slice_of(&self, trimmed: &str) -> Text {
        let start = (trimmed.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        self.slice(start..start + trimmed.len())
    }

    /// Changes each stretch on its own.
    pub fn map(&self, change: impl Fn(&str) -> String) -> Text {
        let mut changed = Text::default();
        self.stretches().for_each(|(piece, is_user)| changed.push(&change(piece), is_user));
        changed
    }

    pub fn into_value(self) -> Value {
        match self.user.first() {
            None => Value::from_safe_string(self.text),
            Some(range) if range.start == 0 && range.end == self.text.len() => Value::from(self.text),
            Some(_) => {
                let mut marked = String::with_capacity(self.text.len() + 6 * self.user.len());
                self.stretches().for_each(|(piece, is_user)| push_marked(&mut marked, piece, is_user));
                Value::from_safe_string(marked)
            }
        }
    }
}

fn push_marked(marked: &mut String, piece: &str, is_user: bool) {
    if is_user {
        marked.extend([OPEN]);
        marked.push_str(piece);
        marked.extend([CLOSE]);
    } else {
        marked.push_str(piece);
    }
}

/// A string without the characters that mark.
pub fn without_marks(text: &str) -> Cow<'_, str> {
    match text.contains([OPEN, CLOSE]) {
        true => text.replace([OPEN, CLOSE], "\u{FFFD}").into(),
        false => text.into(),
    }
}

/// What a string says, whoever wrote it; `None` for other values.
pub fn plain(value: &Value) -> Option<Cow<'_, str>> {
    let text = value.as_str()?;
    Some(match value.is_safe() && text.contains(OPEN) {
        true => text.replace([OPEN, CLOSE], "").into(),
        false => text.into(),
    })
}

/// A value as it is printed. Containers are printed as Python does, and count as a user's.
///
/// # Errors
/// If the budget does not cover it.
pub fn to_text(value: &Value, budget: &Budget) -> Result<Text, Error> {
    if let Some(text) = Text::of_string(value) {
        budget.charge_len(text.text.len())?;
        return Ok(text);
    }
    let mut text = String::new();
    write_value(&mut text, value, budget, false)?;
    Ok(match value.as_object() {
        Some(_) => Text::user(text),
        None => Text::template(text),
    })
}

fn write_value(text: &mut String, value: &Value, budget: &Budget, nested: bool) -> Result<(), Error> {
    let before = text.len();
    match value.kind() {
        ValueKind::Undefined if !nested => {}
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => text.push_str(&number(value)),
        ValueKind::String => {
            let string = plain(value).unwrap_or_default();
            budget.charge_len(string.len())?;
            write_python_string(text, &string);
        }
        ValueKind::Map => {
            text.push('{');
            for (at, (key, item)) in pairs(value)?.into_iter().enumerate() {
                text.push_str(if at > 0 { ", " } else { "" });
                write_value(text, &key, budget, true)?;
                text.push_str(": ");
                write_value(text, &item, budget, true)?;
            }
            text.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if Seq::is_tuple(value) { ('(', ")") } else { ('[', "]") };
            text.push(open);
            let items = items(value, budget)?;
            for (at, item) in items.iter().enumerate() {
                text.push_str(if at > 0 { ", " } else { "" });
                write_value(text, item, budget, true)?;
            }
            text.push_str(if Seq::is_tuple(value) && items.len() == 1 { "," } else { "" });
            text.push_str(close);
        }
        other => return Err(refused(format!("a value of type {other} cannot be printed"))),
    }
    budget.charge_len(text.len() - before)
}

/// A number as Python writes it.
pub fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_nan() => "nan".into(),
        Ok(float) if float.is_infinite() => (if float > 0.0 { "inf" } else { "-inf" }).into(),
        Ok(float) if float != 0.0 && !(1e-4..1e16).contains(&float.abs()) => {
            // Python writes at least two digits of an exponent, and its sign.
            let text = format!("{float:e}");
            let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        Ok(float) => format!("{float:?}"),
        Err(_) => value.to_string(),
    }
}

fn write_python_string(text: &mut String, string: &str) {
    let quote = if string.contains('\'') && !string.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in string.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if c == quote => text.extend(['\\', c]),
            c if c.is_control() => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{:02x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// What comparing, printing or searching a value costs: the size of all it holds, counted once for each mention.
pub fn cost(value: &Value) -> u64 {
    if let Some(text) = value.as_str() {
        return text.len() as u64 + 16;
    }
    if let Some(seq) = value.downcast_object_ref::<Seq>() {
        return seq.size.cost;
    }
    value.downcast_object_ref::<Map>().map_or(16, |map| map.size.cost)
}

/// Bounds of a container, kept with it so that they need not be counted.
#[derive(Debug, Clone, Copy)]
struct Size {
    cost: u64,
    depth: u32,
}

impl Size {
    fn of<'v>(values: impl Iterator<Item = &'v Value>) -> Result<Self, Error> {
        let mut size = Size { cost: SLOT_BYTES, depth: 1 };
        for value in values {
            let seq = value.downcast_object_ref::<Seq>().map(|seq| seq.size);
            let inner = seq.or_else(|| value.downcast_object_ref::<Map>().map(|map| map.size));
            if inner.is_none() && value.as_object().is_some() {
                // Namespaces, loops and macros could hold each other in a circle.
                return Err(refused(format!("a list, dict or namespace cannot hold a value of type {}", value.kind())));
            }
            size.depth = size.depth.max(1 + inner.map_or(0, |inner| inner.depth));
            size.cost = size.cost.saturating_add(SLOT_BYTES).saturating_add(cost(value));
        }
        match size.depth > MAX_DEPTH {
            true => Err(refused(format!("more than {MAX_DEPTH} containers inside each other"))),
            false => Ok(size),
        }
    }
}

/// A list or tuple.
#[derive(Debug)]
pub struct Seq {
    items: Vec<Value>,
    is_tuple: bool,
    size: Size,
}

impl Seq {
    /// # Errors
    /// If the budget does not cover it, or an item is no plain value.
    pub fn list(items: Vec<Value>, budget: &Budget) -> Result<Value, Error> {
        Seq::build(items, false, budget)
    }

    /// # Errors
    /// As [`Seq::list`].
    pub fn tuple(items: Vec<Value>, budget: &Budget) -> Result<Value, Error> {
        Seq::build(items, true, budget)
    }

    pub fn build(items: Vec<Value>, is_tuple: bool, budget: &Budget) -> Result<Value, Error> {
        budget.charge(SLOT_BYTES * items.len() as u64)?;
        let size = Size::of(items.iter())?;
        Ok(Value::from_object(Seq { items, is_tuple, size }))
    }

    pub fn is_tuple(value: &Value) -> bool {
        value.downcast_object_ref::<Seq>().is_some_and(|seq| seq.is_tuple)
    }
}

impl Object for Seq {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }
}

/// A dict; it keeps the order of its keys.
#[derive(Debug)]
pub struct Map {
    pairs: Vec<(Value, Value)>,
    at: HashMap<Value, usize>,
    size: Size,
}

impl Map {
    /// # Errors
    /// If the budget does not cover it, or a value is no plain one.
    pub fn build(entries: Vec<(Value, Value)>, budget: &Budget) -> Result<Value, Error> {
        let keys_cost: u64 = entries.iter().map(|(key, _)| cost(key)).fold(0, u64::saturating_add);
        budget.charge(keys_cost.saturating_add(4 * SLOT_BYTES * entries.len() as u64))?;
        let mut map =
            Map { pairs: Vec::new(), at: HashMap::new(), size: Size::of(entries.iter().flat_map(|(k, v)| [k, v]))? };
        for (key, value) in entries {
            // A key is what it says, whoever wrote it.
            let key = plain(&key).map(|text| Value::from(text.as_ref())).unwrap_or(key);
            match map.at.get(&key).and_then(|&at| map.pairs.get_mut(at)) {
                Some(pair) => pair.1 = value,
                None => {
                    map.at.insert(key.clone(), map.pairs.len());
                    map.pairs.push((key, value));
                }
            }
        }
        Ok(Value::from_object(map))
    }
}

impl Object for Map {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let (_, value) = self.pairs.get(*self.at.get(key)?)?;
        Some(value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.pairs.iter().map(|(key, _)| key.clone()).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.pairs.len())
    }
}

/// What `namespace()` makes: attributes that can be set anywhere.
#[derive(Debug, Default)]
pub struct Namespace {
    values: Mutex<HashMap<String, Value>>,
}

impl Namespace {
    /// # Errors
    /// If the budget does not cover it, or the value is no plain one.
    pub fn set(&self, name: &str, value: Value, budget: &Budget) -> Result<(), Error> {
        budget.charge(SLOT_BYTES + name.len() as u64)?;
        Size::of([&value].into_iter())?;
        self.values.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), value);
        Ok(())
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::NonEnumerable
    }
}

/// The items of a list, the characters of a string, the keys of a dict.
///
/// # Errors
/// If the value has none, or the budget does not cover them.
pub fn items(value: &Value, budget: &Budget) -> Result<Vec<Value>, Error> {
    if let Some(seq) = value.downcast_object_ref::<Seq>() {
        budget.charge(SLOT_BYTES * seq.items.len() as u64)?;
        return Ok(seq.items.clone());
    }
    if let Some(text) = Text::of_string(value) {
        budget.charge(2 * SLOT_BYTES * text.text.len() as u64)?;
        let chars = text.text.char_indices();
        return Ok(chars.map(|(at, c)| text.slice(at..at + c.len_utf8()).into_value()).collect());
    }
    if value.is_undefined() {
        return Ok(Vec::new());
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        budget.charge(SLOT_BYTES)?;
        items.push(item);
    }
    Ok(items)
}

/// The keys and values of a dict.
///
/// # Errors
/// If the value is none.
pub fn pairs(value: &Value) -> Result<Vec<(Value, Value)>, Error> {
    if let Some(map) = value.downcast_object_ref::<Map>() {
        return Ok(map.pairs.clone());
    }
    let pairs = value.as_object().filter(|object| object.repr() == ObjectRepr::Map);
    let pairs = pairs.and_then(|object| object.try_iter_pairs());
    Ok(pairs.ok_or_else(|| refused(format!("a dict was expected, not a value of type {}", value.kind())))?.collect())
}

/// JSON from outside as a value; all of its strings are a user's.
///
/// # Errors
/// If it is nested too deep or the budget does not cover it.
pub fn from_json(json: &serde_json::Value, budget: &Budget) -> Result<Value, Error> {
    use serde_json::Value as Json;
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(bool) => Value::from(*bool),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(number), ..) => Value::from(number),
            (_, Some(number), _) => Value::from(number),
            (.., number) => Value::from(number.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(without_marks(text).as_ref()),
        Json::Array(items) => {
            let items: Result<Vec<Value>, Error> = items.iter().map(|item| from_json(item, budget)).collect();
            Seq::list(items?, budget)?
        }
        Json::Object(fields) => {
            let pair =
                |(key, value): (&String, _)| Ok((Value::from(without_marks(key).as_ref()), from_json(value, budget)?));
            let pairs: Result<Vec<_>, Error> = fields.iter().map(pair).collect();
            Map::build(pairs?, budget)?
        }
    })
}
