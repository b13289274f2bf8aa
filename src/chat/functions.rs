//! Functions of templates.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::date;
use super::engine::Args;
use super::values::{Budget, Dict, RenderFault, Result, Seq, TrackedText, Value, set_attribute, wrong};

/// Maximum items of a range.
const MAX_RANGE: i128 = 100_000;

/// A function; its last argument is the time, in seconds since 1970.
pub type BuiltinFn = fn(&Args, &Budget, i64) -> Result<Value>;

/// Finds a function. Templates without a date function use a date of their own.
pub fn find(name: &str, now: Option<i64>) -> Option<BuiltinFn> {
    let function: BuiltinFn = match name {
        "namespace" => |args, budget, _| {
            let namespace = Value::Namespace(Rc::new(RefCell::new(HashMap::new())));
            for (name, value) in entries(args)? {
                set_attribute(&namespace, name.as_str().unwrap_or_default(), value, budget)?;
            }
            Ok(namespace)
        },
        "dict" => |args, budget, _| Dict::build(entries(args)?, budget),
        "range" => |args, budget, _| range(args, budget),
        "raise_exception" => |args, budget, _| Err(RenderFault::Raised(args.need(0)?.to_text(budget)?.text.clone())),
        "strftime_now" if now.is_some() => |args, _, now| {
            let format = args.need(0)?.as_str().map_or_else(|| wrong("strftime_now() needs a string"), Ok)?;
            Ok(TrackedText::template(date::format(format, now)?).into())
        },
        _ => return None,
    };
    Some(function)
}

/// Entries of dicts and named arguments.
fn entries(args: &Args) -> Result<Vec<(Value, Value)>> {
    let mut entries = Vec::new();
    for dict in &args.values {
        entries.extend_from_slice(dict.pairs()?);
    }
    let named = args.named.iter().map(|(name, value)| (TrackedText::template(&**name).into(), value.clone()));
    entries.extend(named);
    Ok(entries)
}

fn range(args: &Args, budget: &Budget) -> Result<Value> {
    let number = |at: usize| match args.values.get(at).map(Value::as_int) {
        Some(None) => wrong("range() needs integers"),
        Some(number) => Ok(number),
        None => Ok(None),
    };
    let (from, to, step) = match (number(0)?, number(1)?, number(2)?) {
        (Some(to), None, _) => (0, to, 1),
        (Some(from), Some(to), step) => (from, to, step.unwrap_or(1)),
        _ => return wrong("range() needs one to three numbers"),
    };
    if step == 0 {
        return wrong("range() cannot have the step 0");
    }
    if (i128::from(to) - i128::from(from)) / i128::from(step) > MAX_RANGE {
        return wrong(format!("range() of more than {MAX_RANGE} numbers"));
    }
    let numbers = std::iter::successors(Some(from), |at| at.checked_add(step));
    let numbers = numbers.take_while(|&at| if step > 0 { at < to } else { at > to });
    Seq::list(numbers.map(Value::Int).collect(), budget)
}
