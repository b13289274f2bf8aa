//! Runs one template: compiles it, puts its operators under our control, and renders a conversation.
//!
//! The engine has a limit on steps of its own, but one step may double a string. So every instruction that makes or
//! compares values of unbounded size is replaced by a call of a function in [`operators`](super::operators), which pays
//! for its work from a [`Budget`]. The same functions keep track of who wrote a text.

use std::collections::BTreeMap;
use std::sync::Arc;

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};

use super::operators;
use super::values::{Budget, CLOSE, OPEN, Text, to_text, without_marks};
use crate::error::Error;

/// Templates in use have up to 20 KB.
pub const MAX_SOURCE_BYTES: usize = 1 << 18;

/// The compiler recurses once for each operator of a chain such as `a + b + c`, without a limit of its own.
const MAX_OPERATORS: usize = 256;

/// And once for each `elif`.
const MAX_BRANCHES: usize = 256;

/// Steps for a conversation of any length, and more for each message: real templates take 20 to 500 for one.
const STEPS: u64 = 1_000_000;
const STEPS_PER_MESSAGE: u64 = 10_000;

/// Macros may call each other to a depth of a quarter of this.
const MAX_RECURSION: usize = 120;

/// Bytes of work for a conversation of any length, and more for each byte of it.
const WORK_BYTES: u64 = 64 << 20;
const WORK_PER_INPUT_BYTE: u64 = 256;

/// Names in a template's source cannot have a space, so these are out of its reach.
pub const ADD: &str = " add";
pub const CONCAT: &str = " concat";
pub const MULTIPLY: &str = " multiply";
pub const SLICE: &str = " slice";
pub const ITEM: &str = " item";
pub const LIST: &str = " list";
pub const TUPLE: &str = " tuple";
pub const DICT: &str = " dict";
pub const SET: &str = " set";
pub const ITERATE: &str = " iterate";
pub const PAY: &str = " pay";
pub const EQUAL: &str = " equal";
pub const UNEQUAL: &str = " unequal";
pub const LESS: &str = " less";
pub const LESS_OR_EQUAL: &str = " less or equal";
pub const GREATER: &str = " greater";
pub const GREATER_OR_EQUAL: &str = " greater or equal";
pub const IN: &str = " in";

/// The field at fault where a template itself refuses a conversation.
pub const REFUSED: &str = "conversation";

/// A factor that the compiler does not know, so that it multiplies no constants: `"a" * 1000000000`.
const ONE: &str = "__one";

/// The budget for a conversation of so many bytes.
pub fn budget(input_bytes: usize) -> Arc<Budget> {
    Budget::new(WORK_BYTES.saturating_add(WORK_PER_INPUT_BYTE.saturating_mul(input_bytes as u64)))
}

/// The source as it is compiled. Line numbers stay.
///
/// # Errors
/// [`Error::Template`] for a source that is too long or cannot be read.
pub fn prepare(source: &str) -> Result<String, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(Error::Template {
            field: "source".into(),
            expected: format!("at most {MAX_SOURCE_BYTES} bytes"),
            found: format!("{} bytes", source.len()),
        });
    }
    let source = without_generation_tags(&without_marks(source));
    let mut prepared = String::with_capacity(source.len());
    let (mut done, mut after_operand, mut n_branches) = (0, false, 0);
    // Operators of each open bracket, those of closed ones within included: how deep the tree of the expression may be.
    let mut operators = vec![0usize];
    for token in machinery::tokenize(&source, false, syntax()) {
        let (token, span) = token.map_err(|error| failure(&error, None))?;
        let line = Some(u32::from(span.start_line));
        // In `f(*args)` the star comes where an operand would begin.
        if matches!(token, Token::Mul) && after_operand {
            let end = span.end_offset as usize;
            prepared.push_str(source.get(done..end).unwrap_or_default());
            prepared.push_str(ONE);
            prepared.push('*');
            done = end;
        }
        let is_word = |name: &str| matches!(name, "in" | "and" | "or" | "not" | "if" | "else" | "is");
        match token {
            Token::BlockStart | Token::VariableStart => operators = vec![0],
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => operators.push(1),
            Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                let inner = operators.pop().unwrap_or_default();
                match operators.last_mut() {
                    Some(outer) => *outer += inner,
                    None => operators.push(inner),
                }
            }
            Token::Comma => operators.last_mut().into_iter().for_each(|top| *top = 0),
            Token::Ident("elif") => n_branches += 1,
            Token::Ident(name) if !is_word(name) => {}
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => {}
            Token::TemplateData(_) | Token::VariableEnd | Token::BlockEnd => {}
            _ => operators.last_mut().into_iter().for_each(|top| *top += 1),
        }
        let limits = [
            ("operators in an expression", operators.iter().sum(), MAX_OPERATORS),
            ("branches", n_branches, MAX_BRANCHES),
        ];
        if let Some((field, found, limit)) = limits.into_iter().find(|(_, found, limit)| found > limit) {
            return Err(Error::Template {
                field: at_line(field, line),
                expected: format!("at most {limit}"),
                found: format!("{found} and more"),
            });
        }
        after_operand = match token {
            Token::Ident(name) => !is_word(name),
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => true,
            Token::BracketClose | Token::ParenClose | Token::BraceClose => true,
            _ => false,
        };
    }
    prepared.push_str(source.get(done..).unwrap_or_default());
    Ok(prepared)
}

/// `{% generation %}` marks what a model is trained on, and renders its content.
fn without_generation_tags(source: &str) -> String {
    let mut replaced = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        replaced.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match name {
            "generation" => replaced.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => replaced.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => replaced.push_str(tag),
        }
        rest = after;
    }
    replaced.push_str(rest);
    replaced
}

fn syntax() -> SyntaxConfig {
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    // Delimiters are the standard ones, which are valid.
    syntax.build().unwrap_or_default()
}

/// Compiles a prepared source.
///
/// # Errors
/// [`Error::Template`] with the line of what cannot be compiled.
pub fn compile(source: &str) -> Result<Instructions<'_>, Error> {
    let ast = machinery::parse(source, "chat", syntax()).map_err(|error| failure(&error, None))?;
    let mut generator = CodeGenerator::new("chat", source);
    generator.compile_stmt(&ast);
    let (instructions, _) = generator.finish();
    controlled(&instructions)
}

/// The instructions with our functions in place of what could take unbounded memory or time.
fn controlled<'s>(plain: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    // Constants are few and as long as the source, so they need no budget to speak of.
    let budget = Budget::new(WORK_BYTES);
    let mut blocks = Vec::new();
    // Where each instruction begins in the new order; one more for the end.
    let mut starts = vec![0u32];
    for at in 0.. {
        let Some(instruction) = plain.get(at) else { break };
        let line = plain.get_line(at).and_then(|line| u32::try_from(line).ok());
        let block = replacement(instruction, &budget, line)?;
        starts.push(starts.last().copied().unwrap_or(0) + block.len() as u32);
        blocks.push((block, line));
    }
    let target = |old: &mut u32| *old = starts.get(*old as usize).copied().unwrap_or(*old);
    let mut instructions = Instructions::new(plain.name(), plain.source());
    for (mut instruction, line) in
        blocks.into_iter().flat_map(|(block, line)| block.into_iter().map(move |i| (i, line)))
    {
        match &mut instruction {
            Instruction::Iterate(to)
            | Instruction::Jump(to)
            | Instruction::JumpIfFalse(to)
            | Instruction::JumpIfFalseOrPop(to)
            | Instruction::JumpIfTrueOrPop(to)
            | Instruction::BuildMacro(_, to, _) => target(to),
            _ => {}
        }
        instructions.add_with_line(instruction, line.and_then(|line| u16::try_from(line).ok()).unwrap_or(u16::MAX));
    }
    Ok(instructions)
}

fn replacement<'s>(
    instruction: &Instruction<'s>,
    budget: &Budget,
    line: Option<u32>,
) -> Result<Vec<Instruction<'s>>, Error> {
    let unsupported = |what: &str| {
        let (expected, found) = ("what chat templates use".into(), what.into());
        Err(Error::Template { field: at_line("syntax", line), expected, found })
    };
    let call = |name: &'static str, n_args: u16| Ok(vec![Instruction::CallFunction(name, Some(n_args))]);
    // Pays for the operand on top and leaves it there.
    let pay = || [Instruction::DupTop, Instruction::CallFunction(PAY, Some(1)), Instruction::DiscardTop];
    let after_paying = || Ok(pay().into_iter().chain([instruction.clone()]).collect());
    let literal = |name: &'static str, n_items: Option<usize>| match n_items.map(u16::try_from) {
        None => Ok(vec![Instruction::CallFunction(name, None)]),
        Some(Ok(n_items)) => Ok(vec![Instruction::CallFunction(name, Some(n_items))]),
        Some(Err(_)) => unsupported("a list or dict of more than 65535 items"),
    };
    match instruction {
        Instruction::EmitRaw(raw) => {
            Ok(vec![Instruction::LoadConst(Value::from_safe_string((*raw).to_owned())), Instruction::Emit])
        }
        Instruction::LoadConst(value) => {
            Ok(vec![Instruction::LoadConst(operators::constant(value, budget).map_err(|e| failure(&e, None))?)])
        }
        Instruction::Add => call(ADD, 2),
        Instruction::StringConcat => call(CONCAT, 2),
        Instruction::Mul => call(MULTIPLY, 2),
        Instruction::Slice => call(SLICE, 4),
        Instruction::GetItem => call(ITEM, 2),
        Instruction::Eq => call(EQUAL, 2),
        Instruction::Ne => call(UNEQUAL, 2),
        Instruction::Lt => call(LESS, 2),
        Instruction::Lte => call(LESS_OR_EQUAL, 2),
        Instruction::Gt => call(GREATER, 2),
        Instruction::Gte => call(GREATER_OR_EQUAL, 2),
        Instruction::In => call(IN, 2),
        Instruction::BuildList(n_items) => literal(LIST, *n_items),
        Instruction::BuildTuple(n_items) => literal(TUPLE, *n_items),
        Instruction::BuildMap(n_pairs) => literal(DICT, Some(n_pairs.saturating_mul(2))),
        Instruction::SetAttr(name) => Ok(vec![
            Instruction::LoadConst(Value::from_safe_string((*name).to_owned())),
            Instruction::CallFunction(SET, Some(3)),
            Instruction::DiscardTop,
        ]),
        Instruction::CompareAndPreserve(_) | Instruction::UnpackList(_) => after_paying(),
        Instruction::UnpackLists(1) | Instruction::MergeKwargs(1) => after_paying(),
        Instruction::UnpackLists(_) => unsupported("a call with several lists of arguments"),
        Instruction::MergeKwargs(_) => unsupported("a call with several dicts of arguments"),
        // The flag of a loop that calls itself.
        Instruction::PushLoop(flags) if flags & 2 != 0 => unsupported("a recursive loop"),
        Instruction::FastRecurse => unsupported("a recursive loop"),
        Instruction::PushLoop(_) => Ok(vec![Instruction::CallFunction(ITERATE, Some(1)), instruction.clone()]),
        Instruction::PushAutoEscape => unsupported("a block with escapes"),
        Instruction::CallBlock(_) | Instruction::LoadBlocks | Instruction::FastSuper => unsupported("a named block"),
        Instruction::Include(_) | Instruction::ExportLocals => unsupported("another template"),
        _ => Ok(vec![instruction.clone()]),
    }
}

/// Renders a prepared source. `context` is what the template sees.
///
/// # Errors
/// [`Error::Template`] with the line at fault.
pub fn render(
    source: &str,
    context: Value,
    n_messages: usize,
    now: Option<i64>,
    budget: &Arc<Budget>,
) -> Result<Text, Error> {
    let instructions = compile(source)?;
    let steps = STEPS.saturating_add(STEPS_PER_MESSAGE.saturating_mul(n_messages as u64)).min(1 << 30);
    let mut env = Environment::empty();
    env.set_fuel(Some(steps));
    env.set_recursion_limit(MAX_RECURSION);
    env.add_global(ONE, 1);
    operators::register(&mut env, budget, now);
    let paying = Arc::clone(budget);
    env.set_formatter(move |out, _, value| {
        let text = to_text(value, &paying)?;
        paying.charge_len(text.text.len() + 8 * text.user.len())?;
        text.stretches().try_for_each(|(piece, is_user)| match is_user {
            true => write!(out, "{OPEN}{piece}{CLOSE}"),
            false => out.write_str(piece),
        })?;
        Ok(())
    });
    let mut output = String::new();
    let blocks = BTreeMap::new();
    let escape = AutoEscape::Custom("authors".into());
    let mut out = machinery::make_string_output(&mut output);
    let result = machinery::eval(&env, &instructions, context, &blocks, &mut out, escape).map(|_| ());
    result.map_err(|error| failure(&error, Some((budget, steps))))?;
    Ok(Text::parse(&output))
}

fn at_line(field: &str, line: Option<u32>) -> String {
    line.map_or_else(|| field.to_owned(), |line| format!("{field} in line {line}"))
}

/// The engine's error as ours.
fn failure(error: &minijinja::Error, run: Option<(&Budget, u64)>) -> Error {
    /// A message comes from the file, or repeats a whole text.
    const MAX_CHARS: usize = 300;
    let line = error.line().and_then(|line| u32::try_from(line).ok());
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let detail: String = detail.chars().take(MAX_CHARS).collect();
    let fault =
        |field: &str, expected: String, found: String| Error::Template { field: at_line(field, line), expected, found };
    match (error.kind(), run) {
        (ErrorKind::OutOfFuel, Some((_, steps))) => fault("steps", format!("at most {steps}"), "more".into()),
        (_, Some((budget, _))) if budget.exhausted() => {
            fault("work", format!("at most {} bytes read and written", budget.bytes()), "more".into())
        }
        (ErrorKind::SyntaxError, _) => fault("syntax", "a Jinja template".into(), detail),
        (_, None) => fault("syntax", "a Jinja template".into(), detail),
        _ if operators::is_raised(error) => Error::Template {
            field: REFUSED.into(),
            expected: "one that the template accepts".into(),
            found: format!("refused: {detail}"),
        },
        _ => fault("expression", "one that can be computed".into(), detail),
    }
}
