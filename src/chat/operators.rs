//! Operators and global functions of templates, each paying for its work.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::engine;
use super::values::{Budget, Map, Namespace, SLOT_BYTES, Seq, Text, cost, items, pairs, plain, refused, to_text};
use super::{date, filters};

/// A range has at most as many items.
const MAX_RANGE: i64 = 100_000;

/// What a call passes.
pub struct Args {
    values: Vec<Value>,
    named: Option<Kwargs>,
}

impl Args {
    pub fn new(args: &[Value]) -> Self {
        match args.split_last().map(|(last, values)| (Kwargs::try_from(last.clone()), last, values)) {
            Some((Ok(named), last, values)) if last.is_kwargs() => Args { values: values.to_vec(), named: Some(named) },
            _ => Args { values: args.to_vec(), named: None },
        }
    }

    /// The argument at a place, or of a name.
    pub fn get(&self, at: usize, name: &str) -> Option<Value> {
        let named = || self.named.as_ref().filter(|named| named.has(name))?.get(name).ok();
        self.values.get(at).cloned().or_else(named)
    }

    /// The argument at a place.
    ///
    /// # Errors
    /// If it is missing.
    pub fn need(&self, at: usize) -> Result<&Value, Error> {
        self.values.get(at).ok_or_else(|| refused(format!("argument {} is missing", at + 1)))
    }

    pub fn rest(&self, from: usize) -> &[Value] {
        self.values.get(from..).unwrap_or_default()
    }

    pub fn named(&self) -> Vec<(Value, Value)> {
        let names = self.named.iter().flat_map(|named| named.args().map(move |name| (named, name)));
        names.filter_map(|(named, name)| Some((Value::from(name), named.get(name).ok()?))).collect()
    }
}

/// A function of the template language.
pub type Function = fn(&mut State, &Args, &Budget) -> Result<Value, Error>;

/// `function` in the shape in which the engine takes it.
pub fn bound(
    function: Function,
    budget: &Arc<Budget>,
) -> impl Fn(&mut State, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static + use<> {
    let budget = Arc::clone(budget);
    move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args: Vec<Value> = args.0.into_iter().map(|arg| arg.into_value()).collect();
        function(state, &Args::new(&args), &budget)
    }
}

/// Gives a template all that it can call.
pub fn register(env: &mut Environment<'_>, budget: &Arc<Budget>, now: Option<i64>) {
    let functions: [(&'static str, Function); 21] = [
        (engine::ADD, |_, args, budget| add(args.need(0)?, args.need(1)?, budget)),
        (engine::CONCAT, |_, args, budget| {
            let mut text = to_text(args.need(0)?, budget)?;
            let right = to_text(args.need(1)?, budget)?;
            budget.charge_len(text.text.len() + right.text.len())?;
            text.push_text(&right);
            Ok(text.into_value())
        }),
        (engine::MULTIPLY, |_, args, budget| multiply(args.need(0)?, args.need(1)?, budget)),
        (engine::SLICE, |_, args, budget| slice(args.need(0)?, args.need(1)?, args.need(2)?, args.need(3)?, budget)),
        (engine::ITEM, |_, args, budget| item(args.need(0)?, args.need(1)?, budget)),
        (engine::LIST, |_, args, budget| Seq::list(args.rest(0).to_vec(), budget)),
        (engine::TUPLE, |_, args, budget| Seq::tuple(args.rest(0).to_vec(), budget)),
        (engine::DICT, |_, args, budget| {
            let (entries, _) = args.rest(0).as_chunks();
            let entries = entries.iter().map(|[key, value]| (key.clone(), value.clone()));
            Map::build(entries.collect(), budget)
        }),
        (engine::SET, |_, args, budget| {
            let (value, target, name) = (args.need(0)?, args.need(1)?, args.need(2)?);
            let namespace = target.downcast_object_ref::<Namespace>();
            let namespace = namespace
                .ok_or_else(|| refused(format!("only a namespace has attributes to set, not a {}", target.kind())))?;
            namespace.set(name.as_str().unwrap_or_default(), value.clone(), budget)?;
            Ok(Value::from(()))
        }),
        (engine::ITERATE, |_, args, budget| match args.need(0)? {
            value if value.as_object().is_some() => {
                budget.charge(SLOT_BYTES * value.len().unwrap_or(0) as u64)?;
                Ok(value.clone())
            }
            value => Seq::list(items(value, budget)?, budget),
        }),
        (engine::PAY, |_, args, budget| budget.charge(cost(args.need(0)?)).map(Value::from)),
        (engine::EQUAL, |_, args, budget| equal(args.need(0)?, args.need(1)?, budget).map(Value::from)),
        (engine::UNEQUAL, |_, args, budget| {
            equal(args.need(0)?, args.need(1)?, budget).map(|equal| Value::from(!equal))
        }),
        (engine::LESS, |_, args, budget| ordered(args, budget, |order| order.is_lt())),
        (engine::LESS_OR_EQUAL, |_, args, budget| ordered(args, budget, |order| order.is_le())),
        (engine::GREATER, |_, args, budget| ordered(args, budget, |order| order.is_gt())),
        (engine::GREATER_OR_EQUAL, |_, args, budget| ordered(args, budget, |order| order.is_ge())),
        (engine::IN, |_, args, budget| contains(args.need(1)?, args.need(0)?, budget).map(Value::from)),
        ("namespace", |_, args, budget| {
            let namespace = Namespace::default();
            let given = args.rest(0).iter().map(pairs).collect::<Result<Vec<_>, Error>>()?;
            for (name, value) in given.into_iter().flatten().chain(args.named()) {
                namespace.set(name.as_str().unwrap_or_default(), value, budget)?;
            }
            Ok(Value::from_object(namespace))
        }),
        ("dict", |_, args, budget| {
            let given = args.rest(0).iter().map(pairs).collect::<Result<Vec<_>, Error>>()?;
            Map::build(given.into_iter().flatten().chain(args.named()).collect(), budget)
        }),
        ("range", range),
    ];
    for (name, function) in functions {
        env.add_function(name, bound(function, budget));
    }
    env.add_function("raise_exception", bound(raise, budget));
    if let Some(now) = now {
        env.add_function("strftime_now", move |format: &str| date::format(format, now));
    }
    filters::register(env, budget);
}

/// The mark of an error that the template raised itself.
#[derive(Debug)]
struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

fn raise(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    Err(refused(to_text(args.need(0)?, budget)?.text).with_source(Raised))
}

/// Whether the template refused the conversation.
pub fn is_raised(error: &Error) -> bool {
    let sources = std::iter::successors(std::error::Error::source(error), |error| error.source());
    sources.into_iter().any(|error| error.is::<Raised>())
}

/// A constant of the template's source: its strings are the template's own.
///
/// # Errors
/// If it is nested too deep.
pub fn constant(value: &Value, budget: &Budget) -> Result<Value, Error> {
    Ok(match value.kind() {
        ValueKind::String => {
            Value::from_safe_string(super::values::without_marks(value.as_str().unwrap_or_default()).into_owned())
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Result<Vec<Value>, Error> = value.try_iter()?.map(|item| constant(&item, budget)).collect();
            Seq::build(items?, value.is_tuple(), budget)?
        }
        ValueKind::Map => {
            let pair = |(key, item): (Value, Value)| Ok((key, constant(&item, budget)?));
            let pairs: Vec<(Value, Value)> = pairs(value)?.into_iter().map(pair).collect::<Result<_, Error>>()?;
            match value.is_kwargs() {
                true => pairs
                    .into_iter()
                    .filter_map(|(name, value)| Some((name.as_str()?.to_owned(), value)))
                    .collect::<Kwargs>()
                    .into(),
                false => Map::build(pairs, budget)?,
            }
        }
        _ => value.clone(),
    })
}

/// A number of either kind.
enum Number {
    Int(i128),
    Float(f64),
}

fn number(value: &Value) -> Option<Number> {
    match value.kind() {
        ValueKind::Bool => Some(Number::Int(i128::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
        ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
        _ => None,
    }
}

fn integer(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

fn impossible(operator: &str, left: &Value, right: &Value) -> Error {
    refused(format!("`{operator}` of {} and {}", left.kind(), right.kind()))
}

fn arithmetic(
    operator: &str,
    left: &Value,
    right: &Value,
    int: fn(i128, i128) -> Option<i128>,
    float: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let as_float = |number| match number {
        Number::Int(int) => int as f64,
        Number::Float(float) => float,
    };
    match (number(left), number(right)) {
        (Some(Number::Int(left)), Some(Number::Int(right))) => {
            int(left, right).map(integer).ok_or_else(|| refused(format!("`{operator}` of numbers out of range")))
        }
        (Some(left), Some(right)) => Ok(Value::from(float(as_float(left), as_float(right)))),
        _ => Err(impossible(operator, left, right)),
    }
}

pub fn add(left: &Value, right: &Value, budget: &Budget) -> Result<Value, Error> {
    if let (Some(mut text), Some(right)) = (Text::of_string(left), Text::of_string(right)) {
        budget.charge_len(2 * (text.text.len() + right.text.len()))?;
        text.push_text(&right);
        return Ok(text.into_value());
    }
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(left) && is_list(right) && Seq::is_tuple(left) == Seq::is_tuple(right) {
        let mut both = items(left, budget)?;
        both.extend(items(right, budget)?);
        return Seq::build(both, Seq::is_tuple(left), budget);
    }
    arithmetic("+", left, right, i128::checked_add, |left, right| left + right)
}

fn multiply(left: &Value, right: &Value, budget: &Budget) -> Result<Value, Error> {
    let (times, value) = if left.is_integer() { (left, right) } else { (right, left) };
    if !times.is_integer() || value.is_number() || value.kind() == ValueKind::Bool {
        return arithmetic("*", left, right, i128::checked_mul, |left, right| left * right);
    }
    // A negative number repeats as little as zero does.
    let times = usize::try_from(times.as_i64().unwrap_or(i64::MAX).max(0)).unwrap_or(usize::MAX);
    if let Some(text) = Text::of_string(value) {
        budget.charge((text.text.len() as u64).saturating_mul(2 * times as u64))?;
        budget.charge(times as u64)?;
        let mut repeated = Text::default();
        (0..times).for_each(|_| repeated.push_text(&text));
        return Ok(repeated.into_value());
    }
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    let items = if is_list { items(value, budget)? } else { return Err(impossible("*", left, right)) };
    budget.charge((items.len() as u64 * SLOT_BYTES).saturating_mul(times as u64))?;
    budget.charge(times as u64)?;
    let repeated = (0..times).flat_map(|_| items.iter().cloned()).collect();
    Seq::build(repeated, Seq::is_tuple(value), budget)
}

/// Python's slice: the places from `start` to `stop`, every `step`-th.
fn places(len: usize, start: &Value, stop: &Value, step: &Value) -> Result<Vec<usize>, Error> {
    let number = |value: &Value| match value.is_none() || value.is_undefined() {
        true => Ok(None),
        false => value.as_i64().map(Some).ok_or_else(|| refused("a slice has whole numbers as bounds")),
    };
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    let (low, high) = if step < 0 { (-1, len - 1) } else { (0, len) };
    let bound = |at: i64| (if at < 0 { at.saturating_add(len) } else { at }).clamp(low, high);
    let (first, end) = match step {
        0 => return Err(refused("a slice cannot have the step 0")),
        ..0 => (start.map_or(high, bound), stop.map_or(low, bound)),
        1.. => (start.map_or(low, bound), stop.map_or(high, bound)),
    };
    let places = std::iter::successors(Some(first), |at| at.checked_add(step));
    let inside = places.take_while(|&at| if step > 0 { at < end } else { at > end });
    Ok(inside.filter_map(|at| usize::try_from(at).ok()).collect())
}

fn slice(value: &Value, start: &Value, stop: &Value, step: &Value, budget: &Budget) -> Result<Value, Error> {
    if let Some(text) = Text::of_string(value) {
        budget.charge_len(16 * text.text.len())?;
        let bounds: Vec<usize> = text.text.char_indices().map(|(at, _)| at).chain([text.text.len()]).collect();
        let places = places(bounds.len() - 1, start, stop, step)?;
        let mut cut = Text::default();
        if let (Some(&first), Some(&last), true) = (places.first(), places.last(), step.as_i64().unwrap_or(1) == 1) {
            let range = bounds.get(first).zip(bounds.get(last + 1));
            cut = range.map_or(cut, |(&from, &to)| text.slice(from..to));
        } else {
            let range = |at: usize| Some(*bounds.get(at)?..*bounds.get(at + 1)?);
            places.into_iter().filter_map(range).for_each(|range| cut.push_text(&text.slice(range)));
        }
        return Ok(cut.into_value());
    }
    if value.is_undefined() || !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Err(refused(format!("a value of type {} cannot be sliced", value.kind())));
    }
    let items = items(value, budget)?;
    let places = places(items.len(), start, stop, step)?;
    let cut = places.into_iter().filter_map(|at| items.get(at).cloned()).collect();
    Seq::build(cut, Seq::is_tuple(value), budget)
}

fn item(value: &Value, key: &Value, budget: &Budget) -> Result<Value, Error> {
    budget.charge(cost(key))?;
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    if let Some(text) = Text::of_string(value) {
        budget.charge_len(text.text.len())?;
        let Some(at) = key.as_i64() else { return Ok(Value::UNDEFINED) };
        let mut chars = text.text.char_indices();
        let steps = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        let found = if at < 0 { chars.nth_back(steps - 1) } else { chars.nth(steps) };
        return Ok(found.map_or(Value::UNDEFINED, |(at, c)| text.slice(at..at + c.len_utf8()).into_value()));
    }
    let key = plain(key).map_or_else(|| key.clone(), |text| Value::from(text.as_ref()));
    let len = value.len().and_then(|len| i64::try_from(len).ok());
    let key = match (key.as_i64(), len) {
        (Some(at @ ..0), Some(len)) if value.kind() == ValueKind::Seq => Value::from(at + len),
        _ => key,
    };
    Ok(value.get_item(&key).unwrap_or(Value::UNDEFINED))
}

/// Equality of what is said, whoever said it.
pub fn equal(left: &Value, right: &Value, budget: &Budget) -> Result<bool, Error> {
    budget.charge(cost(left).min(cost(right)))?;
    Ok(match (plain(left), plain(right)) {
        (Some(left), Some(right)) => left == right,
        _ => left == right,
    })
}

fn ordered(args: &Args, budget: &Budget, wanted: fn(std::cmp::Ordering) -> bool) -> Result<Value, Error> {
    let (left, right) = (args.need(0)?, args.need(1)?);
    budget.charge(cost(left).min(cost(right)))?;
    let order = match (plain(left), plain(right)) {
        (Some(left), Some(right)) => left.cmp(&right),
        (None, None) if left.kind() == right.kind() || (left.is_number() && right.is_number()) => left.cmp(right),
        _ => return Err(impossible("<", left, right)),
    };
    Ok(Value::from(wanted(order)))
}

pub fn contains(container: &Value, wanted: &Value, budget: &Budget) -> Result<bool, Error> {
    budget.charge(cost(container).saturating_add(cost(wanted)))?;
    match container.kind() {
        ValueKind::String => match (plain(container), plain(wanted)) {
            (Some(text), Some(part)) => Ok(text.contains(part.as_ref())),
            _ => Err(impossible("in", wanted, container)),
        },
        ValueKind::Map => Ok(!item(container, wanted, budget)?.is_undefined()),
        ValueKind::Undefined => Ok(false),
        _ => items(container, budget)?.iter().try_fold(false, |found, item| Ok(found || equal(item, wanted, budget)?)),
    }
}

fn range(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let number = |at: usize| match args.rest(at).first().map(Value::as_i64) {
        Some(None) => Err(refused("range() takes whole numbers")),
        Some(number) => Ok(number),
        None => Ok(None),
    };
    let (from, to, step) = match (number(0)?, number(1)?, number(2)?) {
        (Some(to), None, _) => (0, to, 1),
        (Some(from), Some(to), step) => (from, to, step.unwrap_or(1)),
        _ => return Err(refused("range() takes one to three numbers")),
    };
    if step == 0 {
        return Err(refused("range() cannot have the step 0"));
    }
    let len = (i128::from(to) - i128::from(from)) / i128::from(step);
    if len > i128::from(MAX_RANGE) {
        return Err(refused(format!("range() of more than {MAX_RANGE} numbers")));
    }
    let numbers = std::iter::successors(Some(from), |at| at.checked_add(step));
    let numbers = numbers.take_while(|&at| if step > 0 { at < to } else { at > to });
    Seq::list(numbers.map(Value::from).collect(), budget)
}
