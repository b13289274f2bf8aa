//! Operators with Python's semantics, each paying for its work.

use std::cmp::Ordering;

use super::methods;
use super::values::{Budget, Result, SLOT_BYTES, Seq, SeqKind, TrackedText, Value, cost, wrong};

/// `value.name`. Methods precede the keys of a dict.
pub fn attribute(of: &Value, name: &str) -> Result<Value> {
    let method = || methods::find(of, name).map(|_| Value::Function);
    let found = match of {
        Value::Undefined => return wrong(format!("`{name}` of an undefined value")),
        Value::Dict(dict) => method().or_else(|| dict.get_str(name).cloned()),
        Value::Namespace(namespace) => namespace.borrow().get(name).cloned(),
        Value::Loop(state) => Some(state.attribute(name)),
        _ => method(),
    };
    Ok(found.unwrap_or_default())
}

/// `value[key]`
pub fn item(of: &Value, key: &Value, budget: &Budget) -> Result<Value> {
    budget.charge(cost(key))?;
    let at = |len: usize| {
        let at = key.as_int()?;
        usize::try_from(if at < 0 { at.checked_add(i64::try_from(len).ok()?)? } else { at }).ok()
    };
    let found = match of {
        Value::Dict(dict) => dict.get(key).cloned(),
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
            at(seq.items.len()).and_then(|at| seq.items.get(at)).cloned()
        }
        Value::Str(text) if key.as_int().is_some() => {
            let len = of.len(budget)?;
            at(len).and_then(|at| text.chars().nth(at))
        }
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => attribute(of, name),
        (None, None) if of.is_undefined() => wrong("an item of an undefined value"),
        (None, None) => Ok(Value::Undefined),
    }
}

/// Python's slice: every `step`-th index from `start` to `stop`.
fn places(len: usize, bounds: [Option<i64>; 3]) -> Result<Vec<usize>> {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let [start, stop, step] = bounds;
    let step = step.unwrap_or(1);
    let (low, high) = if step < 0 { (-1, len - 1) } else { (0, len) };
    let bound = |at: i64| (if at < 0 { at.saturating_add(len) } else { at }).clamp(low, high);
    let (first, end) = match step {
        0 => return wrong("a slice cannot have the step 0"),
        ..0 => (start.map_or(high, bound), stop.map_or(low, bound)),
        1.. => (start.map_or(low, bound), stop.map_or(high, bound)),
    };
    let places = std::iter::successors(Some(first), |at| at.checked_add(step));
    let inside = places.take_while(|&at| if step > 0 { at < end } else { at > end });
    Ok(inside.filter_map(|at| usize::try_from(at).ok()).collect())
}

/// `value[start:stop:step]`
pub fn slice(of: &Value, bounds: [Option<i64>; 3], budget: &Budget) -> Result<Value> {
    match of {
        Value::Str(text) => {
            budget.charge(16 * text.size())?;
            let starts: Vec<usize> = text.text.char_indices().map(|(at, _)| at).chain([text.text.len()]).collect();
            let places = places(starts.len() - 1, bounds)?;
            let range = |first: usize, last: usize| Some(*starts.get(first)?..*starts.get(last + 1)?);
            let mut cut = TrackedText::default();
            match (places.first(), places.last()) {
                (Some(&first), Some(&last)) if bounds[2].unwrap_or(1) == 1 => {
                    cut = range(first, last).map_or(cut, |range| text.slice(range));
                }
                _ => {
                    let parts = places.iter().filter_map(|&at| range(at, at));
                    parts.for_each(|range| cut.push_text(&text.slice(range)));
                }
            }
            Ok(cut.into())
        }
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
            let places = places(seq.items.len(), bounds)?;
            Seq::build(places.into_iter().filter_map(|at| seq.items.get(at).cloned()).collect(), seq.kind, budget)
        }
        _ => wrong(format!("a value of type {} cannot be sliced", of.type_name())),
    }
}

pub fn unary(operator: &str, of: &Value) -> Result<Value> {
    match (operator, of) {
        ("not", _) => Ok(Value::Bool(!of.is_true())),
        ("+", Value::Int(_) | Value::Float(_)) => Ok(of.clone()),
        ("-", Value::Float(number)) => Ok(Value::Float(-number)),
        ("-", _) if of.as_int().is_some() => {
            let negative = of.as_int().and_then(i64::checked_neg);
            negative.map_or_else(|| wrong("a number out of range"), |number| Ok(Value::Int(number)))
        }
        _ => wrong(format!("`{operator}` of a value of type {}", of.type_name())),
    }
}

pub fn binary(operator: &str, left: &Value, right: &Value, budget: &Budget) -> Result<Value> {
    match (operator, left, right) {
        ("~", ..) => concatenated(&*left.to_text(budget)?, &*right.to_text(budget)?, false, budget),
        ("+", Value::Str(left), Value::Str(right)) if left.is_html || right.is_html => {
            budget.charge(6 * (left.size() + right.size()))?;
            concatenated(&left.escaped(), &right.escaped(), true, budget)
        }
        ("+", Value::Str(left), Value::Str(right)) => concatenated(left, right, false, budget),
        ("+", Value::Seq(first), Value::Seq(second))
            if first.kind == second.kind && matches!(first.kind, SeqKind::List | SeqKind::Tuple) =>
        {
            let mut both = left.items(budget)?;
            both.extend(right.items(budget)?);
            Seq::build(both, first.kind, budget)
        }
        ("*", Value::Str(_) | Value::Seq(_), times) | ("*", times, Value::Str(_) | Value::Seq(_)) => {
            let repeated = if matches!(left, Value::Str(_) | Value::Seq(_)) { left } else { right };
            match times.as_int() {
                Some(times) => repeat(repeated, times, budget),
                None => impossible(operator, left, right),
            }
        }
        _ => arithmetic(operator, left, right),
    }
}

fn impossible<T>(operator: &str, left: &Value, right: &Value) -> Result<T> {
    wrong(format!("`{operator}` of {} and {}", left.type_name(), right.type_name()))
}

fn concatenated(left: &TrackedText, right: &TrackedText, is_html: bool, budget: &Budget) -> Result<Value> {
    budget.charge(2 * (left.size() + right.size()))?;
    let mut both = left.clone();
    both.push_text(right);
    both.is_html = is_html;
    Ok(both.into())
}

fn repeat(value: &Value, times: i64, budget: &Budget) -> Result<Value> {
    // A negative number repeats zero times.
    let times = usize::try_from(times.max(0)).unwrap_or(usize::MAX);
    budget.charge(times)?;
    match value {
        Value::Str(text) => {
            budget.charge(text.size().saturating_mul(times).saturating_mul(2))?;
            let mut repeated = TrackedText::default();
            (0..times).for_each(|_| repeated.push_text(text));
            Ok(repeated.into())
        }
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => {
            budget.charge((seq.items.len() * SLOT_BYTES).saturating_mul(times))?;
            let repeated = (0..times).flat_map(|_| seq.items.iter().cloned()).collect();
            Seq::build(repeated, seq.kind, budget)
        }
        _ => wrong(format!("`*` of a value of type {}", value.type_name())),
    }
}

fn arithmetic(operator: &str, left: &Value, right: &Value) -> Result<Value> {
    if let (Some(left), Some(right)) = (left.as_int(), right.as_int()) {
        let result = match operator {
            "+" => left.checked_add(right),
            "-" => left.checked_sub(right),
            "*" => left.checked_mul(right),
            "//" if right != 0 => left.checked_div_euclid(right).map(|quotient| match right < 0 && left % right != 0 {
                // Rust keeps the remainder positive; Python rounds down.
                true => quotient - 1,
                false => quotient,
            }),
            "%" if right != 0 => left.checked_rem(right).map(|rest| match rest != 0 && (rest < 0) != (right < 0) {
                true => rest + right,
                false => rest,
            }),
            "**" if right >= 0 => u32::try_from(right).ok().and_then(|right| left.checked_pow(right)),
            "/" | "**" if right != 0 && left != 0 => return float_arithmetic(operator, left as f64, right as f64),
            "/" if right != 0 => return Ok(Value::Float(0.0)),
            "/" | "//" | "%" | "**" => return wrong(format!("`{operator}` by zero")),
            _ => None,
        };
        return result
            .map_or_else(|| wrong(format!("`{operator}` of numbers out of range")), |number| Ok(Value::Int(number)));
    }
    match (left.as_float(), right.as_float()) {
        (Some(left), Some(right)) => float_arithmetic(operator, left, right),
        _ => impossible(operator, left, right),
    }
}

fn float_arithmetic(operator: &str, left: f64, right: f64) -> Result<Value> {
    Ok(Value::Float(match operator {
        "+" => left + right,
        "-" => left - right,
        "*" => left * right,
        "**" => left.powf(right),
        _ if right == 0.0 => return wrong(format!("`{operator}` by zero")),
        "/" => left / right,
        "//" => (left / right).floor(),
        _ => left - (left / right).floor() * right,
    }))
}

pub fn compare(operator: &str, left: &Value, right: &Value, budget: &Budget) -> Result<bool> {
    match operator {
        "==" => left.equals(right, budget),
        "!=" => left.equals(right, budget).map(|equal| !equal),
        "in" => contains(right, left, budget),
        "not in" => contains(right, left, budget).map(|contained| !contained),
        "<" => order(left, right, true, budget).map(Ordering::is_lt),
        "<=" => order(left, right, true, budget).map(Ordering::is_le),
        ">" => order(left, right, true, budget).map(Ordering::is_gt),
        _ => order(left, right, true, budget).map(Ordering::is_ge),
    }
}

/// Compares two values.
pub fn order(left: &Value, right: &Value, case_sensitive: bool, budget: &Budget) -> Result<Ordering> {
    budget.charge(cost(left).min(cost(right)))?;
    match (left, right) {
        (Value::Str(left), Value::Str(right)) if case_sensitive => Ok(left.text.cmp(&right.text)),
        (Value::Str(left), Value::Str(right)) => Ok(left.text.to_lowercase().cmp(&right.text.to_lowercase())),
        (Value::Seq(first), Value::Seq(second)) if first.kind == second.kind => {
            for (left, right) in first.items.iter().zip(&second.items) {
                let order = order(left, right, case_sensitive, budget)?;
                if order.is_ne() {
                    return Ok(order);
                }
            }
            Ok(first.items.len().cmp(&second.items.len()))
        }
        _ => match (left.as_int().zip(right.as_int()), left.as_float().zip(right.as_float())) {
            (Some((left, right)), _) => Ok(left.cmp(&right)),
            (_, Some((left, right))) => Ok(left.partial_cmp(&right).unwrap_or(Ordering::Equal)),
            _ => impossible("<", left, right),
        },
    }
}

pub fn contains(container: &Value, wanted: &Value, budget: &Budget) -> Result<bool> {
    budget.charge(cost(container).saturating_add(cost(wanted)))?;
    match container {
        Value::Str(text) => match wanted.as_str() {
            Some(wanted) => Ok(text.text.contains(wanted)),
            None => impossible("in", wanted, container),
        },
        Value::Dict(dict) => Ok(dict.get(wanted).is_some()),
        Value::Undefined => Ok(false),
        Value::Seq(seq) => {
            for item in &seq.items {
                if item.equals(wanted, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => impossible("in", wanted, container),
    }
}
