//! Values of templates: text that tracks its author, containers of known size, and the budget.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::rc::Rc;

/// Maximum nesting of containers, far above any tool description's.
const MAX_DEPTH: u32 = 64;

/// Approximate bytes of a reference to a value.
pub const SLOT_BYTES: usize = 32;

/// Why a rendering failed.
#[derive(Debug)]
pub enum RenderFault {
    /// The template raised an exception.
    Raised(String),
    Steps,
    Work,
    Depth,
    /// The template is invalid for its input.
    Wrong(String),
}

pub type Result<T> = std::result::Result<T, RenderFault>;

pub fn wrong<T>(message: impl Into<String>) -> Result<T> {
    Err(RenderFault::Wrong(message.into()))
}

/// The remaining work of a rendering. Nothing is refunded, so the memory in use is less.
#[derive(Debug)]
pub struct Budget {
    pub steps: u64,
    /// Each operation on values of variable size pays for the bytes it reads and writes.
    pub bytes: u64,
    steps_left: Cell<u64>,
    bytes_left: Cell<u64>,
}

impl Budget {
    pub fn new(steps: u64, bytes: u64) -> Self {
        Budget { steps, bytes, steps_left: Cell::new(steps), bytes_left: Cell::new(bytes) }
    }

    pub fn step(&self) -> Result<()> {
        self.steps_left.set(self.steps_left.get().checked_sub(1).ok_or(RenderFault::Steps)?);
        Ok(())
    }

    pub fn charge(&self, bytes: usize) -> Result<()> {
        self.bytes_left.set(self.bytes_left.get().checked_sub(bytes as u64).ok_or(RenderFault::Work)?);
        Ok(())
    }
}

/// A string with the ranges that a user wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrackedText {
    pub text: String,
    /// Ordered, disjoint, not empty.
    pub user: Vec<Range<usize>>,
    /// Whether it is marked as HTML (`safe`, `escape`): with `+`, Jinja escapes text added to it.
    pub is_html: bool,
}

impl TrackedText {
    pub fn user(text: impl Into<String>) -> Self {
        let mut user = TrackedText::default();
        user.push(&text.into(), true);
        user
    }

    pub fn template(text: impl Into<String>) -> Self {
        TrackedText { text: text.into(), ..TrackedText::default() }
    }

    /// The cost of reading it, in bytes.
    pub fn size(&self) -> usize {
        self.text.len() + 32 * self.user.len()
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

    pub fn push_text(&mut self, other: &TrackedText) {
        other.pieces().for_each(|(piece, is_user)| self.push(piece, is_user));
    }

    /// The text in pieces with one author each.
    pub fn pieces(&self) -> impl Iterator<Item = (&str, bool)> {
        let bounds = self.user.iter().flat_map(|range| [(range.start, false), (range.end, true)]);
        let mut done = 0;
        bounds.chain([(self.text.len(), false)]).filter_map(move |(end, is_user)| {
            let piece = self.text.get(done..end)?;
            done = end;
            (!piece.is_empty()).then_some((piece, is_user))
        })
    }

    /// A part of the text.
    pub fn slice(&self, part: Range<usize>) -> TrackedText {
        let mut cut = TrackedText::template(self.text.get(part.clone()).unwrap_or_default());
        let first = self.user.partition_point(|user| user.end <= part.start);
        let inside = self.user.iter().skip(first).take_while(|user| user.start < part.end);
        let inside = inside.map(|user| user.start.max(part.start)..user.end.min(part.end));
        cut.user.extend(inside.map(|user| user.start - part.start..user.end - part.start));
        cut
    }

    /// The part covered by `trimmed`, a slice of this text's string.
    pub fn slice_of(&self, trimmed: &str) -> TrackedText {
        let start = (trimmed.as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        self.slice(start..start + trimmed.len())
    }

    pub fn chars(&self) -> impl DoubleEndedIterator<Item = Value> {
        self.text.char_indices().map(|(at, c)| self.slice(at..at + c.len_utf8()).into())
    }

    /// Escapes it as HTML, unless it is marked as HTML.
    pub fn escaped(&self) -> TrackedText {
        if self.is_html { self.clone() } else { TrackedText { is_html: true, ..self.map(escape_html) } }
    }

    /// Changes each piece separately.
    pub fn map(&self, change: impl Fn(&str) -> String) -> TrackedText {
        let mut changed = TrackedText::default();
        self.pieces().for_each(|(piece, is_user)| changed.push(&change(piece), is_user));
        changed
    }
}

/// Escapes HTML's special characters.
fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// A template's value.
#[derive(Debug, Clone, Default)]
pub enum Value {
    #[default]
    Undefined,
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Rc<TrackedText>),
    Seq(Rc<Seq>),
    Dict(Rc<Dict>),
    Namespace(Rc<RefCell<HashMap<Rc<str>, Value>>>),
    /// The variable `loop`.
    Loop(Rc<Loop>),
    /// A macro's index, and the scope where it was defined.
    Macro(usize, usize),
    /// A function or method that was not called.
    Function,
}

impl From<TrackedText> for Value {
    fn from(text: TrackedText) -> Value {
        Value::Str(Rc::new(text))
    }
}

impl From<bool> for Value {
    fn from(bool: bool) -> Value {
        Value::Bool(bool)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Value {
        Value::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl Value {
    pub fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined)
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Value::None)
    }

    pub fn is_true(&self) -> bool {
        match self {
            Value::Undefined | Value::None => false,
            Value::Bool(bool) => *bool,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Str(text) => !text.text.is_empty(),
            // Python cannot tell whether a generator is empty.
            Value::Seq(seq) => seq.kind == SeqKind::Generator || !seq.items.is_empty(),
            Value::Dict(dict) => !dict.pairs.is_empty(),
            Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) | Value::Function => true,
        }
    }

    /// A string's text, whoever wrote it.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(&text.text),
            _ => None,
        }
    }

    /// An integer; true is 1, as in Python.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(bool) => Some(i64::from(*bool)),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(*number),
            _ => self.as_int().map(|number| number as f64),
        }
    }

    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined => "undefined",
            Value::None => "none",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "string",
            Value::Seq(seq) => match seq.kind {
                SeqKind::List => "list",
                SeqKind::Tuple => "tuple",
                SeqKind::View => "view",
                SeqKind::Generator => "generator",
            },
            Value::Dict(_) => "dict",
            Value::Namespace(_) => "namespace",
            Value::Loop(_) => "loop",
            Value::Macro(..) => "macro",
            Value::Function => "function",
        }
    }

    /// Equality of content, whoever wrote it.
    pub fn equals(&self, other: &Value, budget: &Budget) -> Result<bool> {
        budget.charge(cost(self).min(cost(other)))?;
        Ok(self.is_same(other))
    }

    fn is_same(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Undefined, Value::Undefined) | (Value::None, Value::None) => true,
            (Value::Str(left), Value::Str(right)) => left.text == right.text,
            (Value::Seq(left), Value::Seq(right)) => {
                let pairs = || left.items.iter().zip(&right.items);
                left.kind == right.kind
                    && left.items.len() == right.items.len()
                    && pairs().all(|(left, right)| left.is_same(right))
            }
            (Value::Dict(left), Value::Dict(right)) => {
                let has = |(key, value): &(Value, Value)| right.get(key).is_some_and(|other| other.is_same(value));
                left.pairs.len() == right.pairs.len() && left.pairs.iter().all(has)
            }
            _ => match (self.as_int(), other.as_int()) {
                (Some(left), Some(right)) => left == right,
                _ => self.as_float().zip(other.as_float()).is_some_and(|(left, right)| left == right),
            },
        }
    }

    /// Items of a list, characters of a string, keys of a dict.
    pub fn items(&self, budget: &Budget) -> Result<Vec<Value>> {
        match self {
            Value::Undefined => Ok(Vec::new()),
            Value::Seq(seq) => {
                budget.charge(SLOT_BYTES * seq.items.len())?;
                Ok(seq.items.clone())
            }
            Value::Str(text) => {
                budget.charge(6 * SLOT_BYTES * text.text.len())?;
                Ok(text.chars().collect())
            }
            Value::Dict(dict) => {
                budget.charge(SLOT_BYTES * dict.pairs.len())?;
                Ok(dict.pairs.iter().map(|(key, _)| key.clone()).collect())
            }
            _ => wrong(format!("a value of type {} cannot be iterated over", self.type_name())),
        }
    }

    /// The number of items or characters.
    pub fn len(&self, budget: &Budget) -> Result<usize> {
        match self {
            Value::Undefined => Ok(0),
            Value::Str(text) => {
                budget.charge(text.text.len())?;
                Ok(text.text.chars().count())
            }
            Value::Seq(seq) if seq.kind != SeqKind::Generator => Ok(seq.items.len()),
            Value::Dict(dict) => Ok(dict.pairs.len()),
            _ => wrong(format!("a value of type {} has no length", self.type_name())),
        }
    }

    /// Keys and values of a dict.
    pub fn pairs(&self) -> Result<&[(Value, Value)]> {
        match self {
            Value::Dict(dict) => Ok(&dict.pairs),
            _ => wrong(format!("expected a dict, not a value of type {}", self.type_name())),
        }
    }

    /// The printed value. Containers are printed as in Python and count as user text.
    pub fn to_text(&self, budget: &Budget) -> Result<Rc<TrackedText>> {
        if let Value::Str(text) = self {
            budget.charge(text.size())?;
            return Ok(Rc::clone(text));
        }
        let mut text = String::new();
        if !self.is_undefined() {
            self.write_python(&mut text, budget)?;
        }
        Ok(Rc::new(match self {
            Value::Seq(_) | Value::Dict(_) => TrackedText::user(text),
            _ => TrackedText::template(text),
        }))
    }

    fn write_python(&self, text: &mut String, budget: &Budget) -> Result<()> {
        let before = text.len();
        match self {
            Value::Undefined => text.push_str("Undefined"),
            Value::None => text.push_str("None"),
            Value::Bool(bool) => text.push_str(if *bool { "True" } else { "False" }),
            Value::Int(_) | Value::Float(_) => text.push_str(&self.number()),
            Value::Str(string) => {
                budget.charge(string.text.len())?;
                write_python_string(text, &string.text);
            }
            Value::Dict(dict) => {
                text.push('{');
                for (at, (key, item)) in dict.pairs.iter().enumerate() {
                    text.push_str(if at > 0 { ", " } else { "" });
                    key.write_python(text, budget)?;
                    text.push_str(": ");
                    item.write_python(text, budget)?;
                }
                text.push('}');
            }
            Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
                let (open, close) = if seq.kind == SeqKind::Tuple { ('(', ')') } else { ('[', ']') };
                text.push(open);
                for (at, item) in seq.items.iter().enumerate() {
                    text.push_str(if at > 0 { ", " } else { "" });
                    item.write_python(text, budget)?;
                }
                text.push_str(if seq.kind == SeqKind::Tuple && seq.items.len() == 1 { "," } else { "" });
                text.push(close);
            }
            _ => return wrong(format!("a value of type {} cannot be printed", self.type_name())),
        }
        budget.charge(text.len() - before)
    }

    /// A number as Python writes it; empty for other values.
    pub fn number(&self) -> String {
        match self {
            Value::Int(number) => number.to_string(),
            Value::Float(float) if float.is_nan() => "nan".into(),
            Value::Float(float) if float.is_infinite() => (if *float > 0.0 { "inf" } else { "-inf" }).into(),
            Value::Float(float) if *float != 0.0 && !(1e-4..1e16).contains(&float.abs()) => {
                // Python writes an exponent's sign and at least two digits.
                let text = format!("{float:e}");
                let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
                let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
                format!("{mantissa}e{sign}{digits:0>2}")
            }
            Value::Float(float) => format!("{float:?}"),
            _ => String::new(),
        }
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
            // Not printable in Python, of those that occur here.
            '\u{AD}' | '\u{A0}' => {
                let _ = write!(text, "\\x{:02x}", u32::from(c));
            }
            '\u{200B}'..='\u{200F}'
            | '\u{2000}'..='\u{200A}'
            | '\u{2028}'..='\u{202F}'
            | '\u{2060}'..='\u{206F}'
            | '\u{3000}'
            | '\u{E000}'..='\u{F8FF}'
            | '\u{FEFF}' => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// Cost of comparing, printing or searching a value: the size of its content, counted at each mention.
pub fn cost(value: &Value) -> usize {
    match value {
        Value::Str(text) => text.size() + 16,
        Value::Seq(seq) => seq.size.cost,
        Value::Dict(dict) => dict.size.cost,
        _ => 16,
    }
}

/// A container's size, stored with it.
#[derive(Debug, Clone, Copy)]
struct Size {
    cost: usize,
    depth: u32,
}

impl Size {
    fn of<'v>(values: impl Iterator<Item = &'v Value>) -> Result<Self> {
        let mut size = Size { cost: SLOT_BYTES, depth: 1 };
        for value in values {
            let inner = match value {
                Value::Seq(seq) => seq.size.depth,
                Value::Dict(dict) => dict.size.depth,
                // These could form a cycle, and a macro is valid only within its scope.
                Value::Namespace(_) | Value::Loop(_) | Value::Macro(..) => {
                    return wrong(format!(
                        "a list, dict or namespace cannot hold a value of type {}",
                        value.type_name()
                    ));
                }
                _ => 0,
            };
            size.depth = size.depth.max(1 + inner);
            size.cost = size.cost.saturating_add(SLOT_BYTES).saturating_add(cost(value));
        }
        match size.depth > MAX_DEPTH {
            true => wrong(format!("more than {MAX_DEPTH} nested containers")),
            false => Ok(size),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeqKind {
    List,
    Tuple,
    /// Keys, values or items of a dict, with a length.
    View,
    /// The result of filters such as `map`: no length, always true.
    Generator,
}

/// A list or similar.
#[derive(Debug)]
pub struct Seq {
    pub items: Vec<Value>,
    pub kind: SeqKind,
    size: Size,
}

impl Seq {
    /// # Errors
    /// If the budget is exceeded or an item is not a plain value.
    pub fn build(items: Vec<Value>, kind: SeqKind, budget: &Budget) -> Result<Value> {
        budget.charge(SLOT_BYTES.saturating_mul(items.len() + 1))?;
        let size = Size::of(items.iter())?;
        Ok(Value::Seq(Rc::new(Seq { items, kind, size })))
    }

    pub fn list(items: Vec<Value>, budget: &Budget) -> Result<Value> {
        Seq::build(items, SeqKind::List, budget)
    }
}

/// A dict, in insertion order.
#[derive(Debug)]
pub struct Dict {
    pub pairs: Vec<(Value, Value)>,
    at: HashMap<String, usize>,
    size: Size,
}

impl Dict {
    /// # Errors
    /// If the budget is exceeded, a value is not plain, or a key is not a string, number, boolean or none.
    pub fn build(entries: Vec<(Value, Value)>, budget: &Budget) -> Result<Value> {
        let keys_cost: usize = entries.iter().map(|(key, _)| cost(key)).fold(0, usize::saturating_add);
        budget.charge(keys_cost.saturating_add(4 * SLOT_BYTES * (entries.len() + 1)))?;
        let size = Size::of(entries.iter().flat_map(|(key, value)| [key, value]))?;
        let mut dict = Dict { pairs: Vec::with_capacity(entries.len()), at: HashMap::new(), size };
        for (key, value) in entries {
            let Some(name) = key_name(&key) else {
                return wrong(format!("a value of type {} cannot be a key", key.type_name()));
            };
            match dict.at.get(&name).and_then(|&at| dict.pairs.get_mut(at)) {
                Some(pair) => pair.1 = value,
                None => {
                    dict.at.insert(name, dict.pairs.len());
                    dict.pairs.push((key, value));
                }
            }
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    pub fn get(&self, key: &Value) -> Option<&Value> {
        Some(&self.pairs.get(*self.at.get(&key_name(key)?)?)?.1)
    }

    pub fn get_str(&self, key: &str) -> Option<&Value> {
        Some(&self.pairs.get(*self.at.get(&format!("s{key}"))?)?.1)
    }
}

/// Equal for equal keys, whoever wrote them; numbers compare as in Python.
fn key_name(key: &Value) -> Option<String> {
    Some(match key {
        Value::Str(text) => format!("s{}", text.text),
        Value::None => "none".into(),
        Value::Float(float) if float.fract() != 0.0 => format!("f{float:?}"),
        Value::Float(float) => format!("i{}", *float as i64),
        _ => format!("i{}", key.as_int()?),
    })
}

/// Sets an attribute of a namespace.
///
/// # Errors
/// If the target is not a namespace, the budget is exceeded, or the value is not plain.
pub fn set_attribute(target: &Value, name: &str, value: Value, budget: &Budget) -> Result<()> {
    let Value::Namespace(namespace) = target else {
        return wrong(format!("cannot set attributes of a value of type {}", target.type_name()));
    };
    budget.charge(SLOT_BYTES + name.len())?;
    Size::of([&value].into_iter())?;
    namespace.borrow_mut().insert(name.into(), value);
    Ok(())
}

/// A loop in progress.
#[derive(Debug)]
pub struct Loop {
    pub items: Rc<Vec<Value>>,
    pub at: usize,
    pub depth: usize,
    /// The last arguments of `loop.changed`.
    pub last: Rc<RefCell<Option<Value>>>,
}

impl Loop {
    pub fn attribute(&self, name: &str) -> Value {
        let n_items = self.items.len();
        let neighbour = |at: Option<usize>| at.and_then(|at| self.items.get(at)).cloned().unwrap_or_default();
        match name {
            "index" => (self.at + 1).into(),
            "index0" => self.at.into(),
            "revindex" => n_items.saturating_sub(self.at).into(),
            "revindex0" => n_items.saturating_sub(self.at + 1).into(),
            "first" => (self.at == 0).into(),
            "last" => (self.at + 1 == n_items).into(),
            "length" => n_items.into(),
            "depth" => self.depth.into(),
            "depth0" => self.depth.saturating_sub(1).into(),
            "previtem" => neighbour(self.at.checked_sub(1)),
            "nextitem" => neighbour(self.at.checked_add(1)),
            "cycle" | "changed" => Value::Function,
            _ => Value::Undefined,
        }
    }
}

/// Converts JSON from outside; all its strings are user text.
///
/// # Errors
/// If it is nested too deep or exceeds the budget.
pub fn from_json(json: &serde_json::Value, budget: &Budget) -> Result<Value> {
    use serde_json::Value as Json;
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(bool) => Value::Bool(*bool),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Value::Int(number),
            (_, number) => Value::Float(number.unwrap_or(f64::NAN)),
        },
        Json::String(text) => TrackedText::user(text).into(),
        Json::Array(items) => {
            let items: Result<Vec<Value>> = items.iter().map(|item| from_json(item, budget)).collect();
            Seq::list(items?, budget)?
        }
        Json::Object(fields) => {
            let pair = |(key, value): (&String, _)| Ok((TrackedText::user(key).into(), from_json(value, budget)?));
            let pairs: Result<Vec<_>> = fields.iter().map(pair).collect();
            Dict::build(pairs?, budget)?
        }
    })
}
