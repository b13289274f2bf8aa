//! Filters and tests, as in Jinja2 and Hugging Face.

use std::cmp::Ordering;

use super::engine::Args;
use super::methods::{capitalized, cased, entries, join, needle, replace, string, strip, titled};
use super::operators::{attribute, binary, compare, item, order};
use super::values::{Budget, Result, Seq, SeqKind, TrackedText, Value, wrong};

/// A filter; its first argument is the value.
type Filter = fn(&Args, &Budget) -> Result<Value>;

const FILTERS: [(&[&str], Filter); 35] = [
    (&["trim"], |args, budget| strip(args, "chars", true, true, budget)),
    (&["upper"], |args, budget| Ok(string(args, budget)?.map(str::to_uppercase).into())),
    (&["lower"], |args, budget| Ok(string(args, budget)?.map(str::to_lowercase).into())),
    (&["capitalize"], |args, budget| Ok(capitalized(&*string(args, budget)?).into())),
    (&["title"], |args, budget| Ok(string(args, budget)?.map(titled).into())),
    (&["string"], |args, budget| Ok(Value::Str(string(args, budget)?))),
    // User text stays user text: only the template's own is trusted.
    (&["safe"], |args, budget| Ok(TrackedText { is_html: true, ..TrackedText::clone(&*string(args, budget)?) }.into())),
    (&["e", "escape", "forceescape"], |args, budget| Ok(string(args, budget)?.escaped().into())),
    (&["replace"], replace),
    (&["length", "count"], |args, budget| args.need(0)?.len(budget).map(Value::from)),
    (&["default", "d"], |args, _| {
        let value = args.need(0)?;
        let also_false = args.get(2, "boolean").is_some_and(Value::is_true);
        let keep = if also_false { value.is_true() } else { !value.is_undefined() };
        let default = args.get(1, "default_value").cloned();
        Ok(if keep { value.clone() } else { default.unwrap_or_else(|| TrackedText::default().into()) })
    }),
    (&["join"], |args, budget| {
        let separator = args.get(1, "d").map(|value| value.to_text(budget)).transpose()?.unwrap_or_default();
        let mut values = args.need(0)?.items(budget)?;
        if let Some(name) = args.get(2, "attribute") {
            values = values.iter().map(|value| path(value, name, budget)).collect::<Result<_>>()?;
        }
        join(&separator, &values, budget)
    }),
    (&["list"], |args, budget| Seq::list(args.need(0)?.items(budget)?, budget)),
    (&["items"], |args, budget| match args.need(0)? {
        Value::Undefined => Seq::build(Vec::new(), SeqKind::Generator, budget),
        value => entries(value, SeqKind::Generator, budget),
    }),
    (&["dictsort"], |args, budget| {
        let by_value = args.get(2, "by").is_some_and(|by| by.as_str() == Some("value"));
        let case_sensitive = args.get(1, "case_sensitive").is_some_and(Value::is_true);
        let mut pairs = sorted(args.need(0)?.pairs()?, &|a: &(Value, Value), b: &(Value, Value)| match by_value {
            true => order(&a.1, &b.1, case_sensitive, budget),
            false => order(&a.0, &b.0, case_sensitive, budget),
        })?;
        if args.get(3, "reverse").is_some_and(Value::is_true) {
            pairs.reverse();
        }
        let tuple = |(key, value)| Seq::build(vec![key, value], SeqKind::Tuple, budget);
        Seq::list(pairs.into_iter().map(tuple).collect::<Result<_>>()?, budget)
    }),
    (&["first"], |args, budget| Ok(args.need(0)?.items(budget)?.into_iter().next().unwrap_or_default())),
    (&["last"], |args, budget| Ok(args.need(0)?.items(budget)?.pop().unwrap_or_default())),
    (&["reverse"], |args, budget| {
        let value = args.need(0)?;
        let reversed: Vec<Value> = value.items(budget)?.into_iter().rev().collect();
        match value {
            Value::Str(_) => join(&TrackedText::default(), &reversed, budget),
            _ => Seq::build(reversed, SeqKind::Generator, budget),
        }
    }),
    (&["sort"], |args, budget| {
        let case_sensitive = args.get(2, "case_sensitive").is_some_and(Value::is_true);
        let mut items = sorted(&args.need(0)?.items(budget)?, &|a: &Value, b: &Value| {
            by_attribute(a, b, args.get(3, "attribute"), case_sensitive, budget)
        })?;
        if args.get(1, "reverse").is_some_and(Value::is_true) {
            items.reverse();
        }
        Seq::list(items, budget)
    }),
    (&["min"], |args, budget| extreme(args, Ordering::Less, budget)),
    (&["max"], |args, budget| extreme(args, Ordering::Greater, budget)),
    (&["sum"], |args, budget| {
        let start = args.get(2, "start").cloned().unwrap_or(Value::Int(0));
        args.need(0)?.items(budget)?.iter().try_fold(start, |sum, value| match args.get(1, "attribute") {
            Some(name) => binary("+", &sum, &path(value, name, budget)?, budget),
            None => binary("+", &sum, value, budget),
        })
    }),
    (&["unique"], |args, budget| {
        let mut seen: Vec<Value> = Vec::new();
        for value in args.need(0)?.items(budget)? {
            let mut is_known = false;
            for other in &seen {
                is_known |= match (other, &value) {
                    (Value::Str(_), Value::Str(_)) => order(other, &value, false, budget)?.is_eq(),
                    _ => value.equals(other, budget)?,
                };
            }
            if !is_known {
                seen.push(value);
            }
        }
        Seq::build(seen, SeqKind::Generator, budget)
    }),
    (&["map"], map),
    (&["select"], |args, budget| select(args, budget, false, true)),
    (&["reject"], |args, budget| select(args, budget, false, false)),
    (&["selectattr"], |args, budget| select(args, budget, true, true)),
    (&["rejectattr"], |args, budget| select(args, budget, true, false)),
    (&["attr"], |args, budget| path(args.need(0)?, args.need(1)?, budget)),
    (&["int"], |args, _| {
        let value = args.need(0)?;
        let parsed = match value.as_str() {
            Some(text) => text.trim().parse::<i64>().ok().or_else(|| float_to_int(text.trim().parse().ok()?)),
            None => value.as_int().or_else(|| float_to_int(value.as_float()?)),
        };
        Ok(parsed.map_or_else(|| args.get(1, "default").cloned().unwrap_or(Value::Int(0)), Value::Int))
    }),
    (&["float"], |args, _| {
        let value = args.need(0)?;
        let parsed = value.as_str().map_or_else(|| value.as_float(), |text| text.trim().parse().ok());
        Ok(parsed.map_or_else(|| args.get(1, "default").cloned().unwrap_or(Value::Float(0.0)), Value::Float))
    }),
    (&["abs"], |args, _| match args.need(0)? {
        Value::Int(number) => {
            number.checked_abs().map_or_else(|| wrong("a number out of range"), |number| Ok(Value::Int(number)))
        }
        value => value.as_float().map_or_else(|| wrong("abs needs a number"), |number| Ok(Value::Float(number.abs()))),
    }),
    (&["round"], |args, _| {
        let Some(number) = args.need(0)?.as_float() else { return wrong("round needs a number") };
        let precision = args.get(1, "precision").and_then(Value::as_int).unwrap_or(0).clamp(-300, 300);
        let scale = 10f64.powi(i32::try_from(precision).unwrap_or(0));
        let rounded = match args.get(2, "method").and_then(Value::as_str) {
            Some("ceil") => (number * scale).ceil(),
            Some("floor") => (number * scale).floor(),
            _ => (number * scale).round_ties_even(),
        };
        Ok(Value::Float(rounded / scale))
    }),
    (&["indent"], indent),
    (&["tojson"], tojson),
];

/// Applies a filter to the first argument.
pub fn apply(name: &str, args: &Args, budget: &Budget) -> Result<Value> {
    match FILTERS.iter().find(|(names, _)| names.contains(&name)) {
        Some((_, filter)) => filter(args, budget),
        None => wrong(format!("the filter {name} is unknown")),
    }
}

/// Whether the first argument passes a test.
pub fn test(name: &str, args: &Args, budget: &Budget) -> Result<bool> {
    let value = args.need(0)?;
    let compared = |operator: &str| compare(operator, value, args.need(1)?, budget);
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => value.is_none(),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => match value {
            Value::Seq(seq) => matches!(seq.kind, SeqKind::List | SeqKind::Tuple),
            _ => matches!(value, Value::Str(_) | Value::Dict(_) | Value::Undefined),
        },
        "iterable" => {
            matches!(value, Value::Seq(_) | Value::Str(_) | Value::Dict(_) | Value::Undefined | Value::Loop(_))
        }
        "callable" => matches!(value, Value::Function | Value::Macro(..)),
        "odd" | "even" | "divisibleby" => {
            let by = if name == "divisibleby" { args.need(1)?.as_int() } else { Some(2) };
            let rest = value.as_int().zip(by).and_then(|(number, by)| number.checked_rem(by));
            match rest {
                Some(rest) => (rest != 0) == (name == "odd"),
                None => return wrong(format!("`{name}` of a value of type {}", value.type_name())),
            }
        }
        "escaped" => false,
        "eq" | "equalto" | "==" => compared("==")?,
        // Python's identity as far as templates use it: for booleans and none.
        "sameas" => value.type_name() == args.need(1)?.type_name() && compared("==")?,
        "ne" | "!=" => compared("!=")?,
        "in" => compared("in")?,
        "lt" | "lessthan" | "<" => compared("<")?,
        "le" | "<=" => compared("<=")?,
        "gt" | "greaterthan" | ">" => compared(">")?,
        "ge" | ">=" => compared(">=")?,
        "lower" => cased(args, budget, char::is_lowercase, char::is_uppercase)?,
        "upper" => cased(args, budget, char::is_uppercase, char::is_lowercase)?,
        _ => return wrong(format!("the test {name} is unknown")),
    })
}

/// A path of attributes: `function.name`.
fn path(value: &Value, name: &Value, budget: &Budget) -> Result<Value> {
    let Some(names) = name.as_str() else { return item(value, name, budget) };
    budget.charge(names.len())?;
    let mut found = value.clone();
    for part in names.split('.') {
        found = match part.parse::<i64>() {
            Ok(at) => item(&found, &Value::Int(at), budget)?,
            // Here keys precede attributes.
            Err(_) => match &found {
                Value::Undefined => Value::Undefined,
                Value::Dict(dict) => dict.get_str(part).cloned().unwrap_or_default(),
                _ => attribute(&found, part)?,
            },
        };
    }
    Ok(found)
}

fn by_attribute(
    left: &Value,
    right: &Value,
    name: Option<&Value>,
    case_sensitive: bool,
    budget: &Budget,
) -> Result<Ordering> {
    match name {
        Some(name) => order(&path(left, name, budget)?, &path(right, name, budget)?, case_sensitive, budget),
        None => order(left, right, case_sensitive, budget),
    }
}

/// Merge sort: the order may fail or be inconsistent, which Rust's own sort does not allow.
fn sorted<T: Clone>(values: &[T], order: &impl Fn(&T, &T) -> Result<Ordering>) -> Result<Vec<T>> {
    if values.len() < 2 {
        return Ok(values.to_vec());
    }
    let (left, right) = values.split_at(values.len() / 2);
    let (left, right) = (sorted(left, order)?, sorted(right, order)?);
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    let mut merged = Vec::with_capacity(values.len());
    while let (Some(first), Some(second)) = (left.peek(), right.peek()) {
        let next = if order(first, second)?.is_le() { left.next() } else { right.next() };
        merged.extend(next);
    }
    merged.extend(left.chain(right));
    Ok(merged)
}

fn extreme(args: &Args, wanted: Ordering, budget: &Budget) -> Result<Value> {
    let case_sensitive = args.get(1, "case_sensitive").is_some_and(Value::is_true);
    let mut best: Option<Value> = None;
    for value in args.need(0)?.items(budget)? {
        let better = match &best {
            None => true,
            Some(best) => by_attribute(&value, best, args.get(2, "attribute"), case_sensitive, budget)? == wanted,
        };
        if better {
            best = Some(value);
        }
    }
    Ok(best.unwrap_or_default())
}

/// Arguments of a filter or test that another one applies to `value`.
fn passed_on(args: &Args, from: usize, value: &Value) -> Args {
    Args { values: [value].into_iter().chain(args.rest(from)).cloned().collect(), named: args.named.clone() }
}

/// The items of a list; empty for a false value, as in Jinja.
fn items_if_true(value: &Value, budget: &Budget) -> Result<Vec<Value>> {
    if value.is_true() { value.items(budget) } else { Ok(Vec::new()) }
}

fn map(args: &Args, budget: &Budget) -> Result<Value> {
    let mut mapped = Vec::new();
    for value in items_if_true(args.need(0)?, budget)? {
        mapped.push(match args.get(usize::MAX, "attribute") {
            Some(name) => match (path(&value, name, budget)?, args.get(usize::MAX, "default")) {
                (Value::Undefined, Some(default)) => default.clone(),
                (found, _) => found,
            },
            None => apply(needle(args, 1)?, &passed_on(args, 2, &value), budget)?,
        });
    }
    Seq::build(mapped, SeqKind::Generator, budget)
}

fn select(args: &Args, budget: &Budget, by_attribute: bool, wanted: bool) -> Result<Value> {
    let test_at = if by_attribute { 2 } else { 1 };
    let mut kept = Vec::new();
    for value in items_if_true(args.need(0)?, budget)? {
        let subject = if by_attribute { path(&value, args.need(1)?, budget)? } else { value.clone() };
        let passes = match args.rest(test_at) {
            [] => subject.is_true(),
            _ => test(needle(args, test_at)?, &passed_on(args, test_at + 1, &subject), budget)?,
        };
        if passes == wanted {
            kept.push(value);
        }
    }
    Seq::build(kept, SeqKind::Generator, budget)
}

fn float_to_int(float: f64) -> Option<i64> {
    // Rust saturates; Python's integers are unbounded.
    (float.is_finite() && float.abs() < 9e18).then_some(float as i64)
}

fn indent(args: &Args, budget: &Budget) -> Result<Value> {
    let text = string(args, budget)?;
    let prefix = match args.get(1, "width") {
        Some(Value::Int(width)) => TrackedText::template(" ".repeat(usize::try_from(*width).unwrap_or(0).min(1 << 10))),
        Some(width) => TrackedText::clone(&*width.to_text(budget)?),
        None => TrackedText::template("    "),
    };
    let with_first = args.get(2, "first").is_some_and(Value::is_true);
    let with_blank = args.get(3, "blank").is_some_and(Value::is_true);
    let mut indented = TrackedText::default();
    for (at, line) in text.text.split_inclusive('\n').enumerate() {
        budget.charge(line.len() + prefix.text.len())?;
        let is_blank = line.trim_end_matches(['\n', '\r']).is_empty();
        if (at > 0 || with_first) && (with_blank || !is_blank) {
            indented.push_text(&prefix);
        }
        indented.push_text(&text.slice_of(line));
    }
    Ok(indented.into())
}

/// JSON as Python writes it, with Hugging Face's arguments of this filter.
fn tojson(args: &Args, budget: &Budget) -> Result<Value> {
    let given = |name: &str| args.get(usize::MAX, name).filter(|value| !value.is_none());
    let indent = match args.get(2, "indent") {
        Some(Value::Int(width)) => Some(" ".repeat(usize::try_from(*width).unwrap_or(0).min(64))),
        Some(Value::Str(indent)) => Some(indent.text.clone()),
        _ => None,
    };
    let separators = given("separators").map(|value| value.items(budget)).transpose()?.unwrap_or_default();
    let separator = |at: usize, default: &str| separators.get(at).and_then(Value::as_str).unwrap_or(default).to_owned();
    let mut json = Json {
        text: String::new(),
        comma: separator(0, if indent.is_some() { "," } else { ", " }),
        colon: separator(1, ": "),
        indent,
        ascii: args.get(1, "ensure_ascii").is_some_and(Value::is_true),
        sorted: given("sort_keys").is_some_and(Value::is_true),
        budget,
    };
    json.write(args.need(0)?, 0)?;
    Ok(TrackedText::user(json.text).into())
}

struct Json<'b> {
    text: String,
    comma: String,
    colon: String,
    indent: Option<String>,
    ascii: bool,
    sorted: bool,
    budget: &'b Budget,
}

impl Json<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<()> {
        let before = self.text.len();
        match value {
            Value::None => self.text.push_str("null"),
            Value::Bool(bool) => self.text.push_str(if *bool { "true" } else { "false" }),
            Value::Int(_) | Value::Float(_) => self.text.push_str(match value.number().as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                number => number,
            }),
            Value::Str(text) => self.string(&text.text)?,
            // Generators too, which Python refuses but llama.cpp's templates use.
            Value::Seq(seq) => {
                self.text.push('[');
                for (at, item) in seq.items.iter().enumerate() {
                    self.next(at, depth)?;
                    self.write(item, depth + 1)?;
                }
                self.close(seq.items.is_empty(), depth)?;
                self.text.push(']');
            }
            Value::Dict(dict) => {
                let by_key =
                    |left: &(Value, Value), right: &(Value, Value)| order(&left.0, &right.0, true, self.budget);
                let pairs = if self.sorted { sorted(&dict.pairs, &by_key)? } else { dict.pairs.clone() };
                self.text.push('{');
                for (at, (key, item)) in pairs.iter().enumerate() {
                    self.next(at, depth)?;
                    match key.as_str() {
                        Some(key) => self.string(key)?,
                        None => {
                            self.text.push('"');
                            self.write(key, depth + 1)?;
                            self.text.push('"');
                        }
                    }
                    self.text.push_str(&self.colon);
                    self.write(item, depth + 1)?;
                }
                self.close(pairs.is_empty(), depth)?;
                self.text.push('}');
            }
            _ => return wrong(format!("a value of type {} cannot be written as JSON", value.type_name())),
        }
        self.budget.charge(self.text.len().saturating_sub(before))
    }

    fn next(&mut self, at: usize, depth: usize) -> Result<()> {
        if at > 0 {
            self.text.push_str(&self.comma);
        }
        self.line(depth + 1)
    }

    fn close(&mut self, is_empty: bool, depth: usize) -> Result<()> {
        if is_empty { Ok(()) } else { self.line(depth) }
    }

    fn line(&mut self, depth: usize) -> Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        self.budget.charge(1 + depth * indent.len())?;
        self.text.push('\n');
        (0..depth).for_each(|_| self.text.push_str(indent));
        Ok(())
    }

    fn string(&mut self, string: &str) -> Result<()> {
        self.budget.charge(6 * string.len())?;
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{C}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }
}
