//! Runs a template over a conversation.
//!
//! Rendering has a budget: each statement and operand costs a step, and each operation costs the bytes it touches. The
//! nesting depth is limited. All strings track which of their parts the user wrote, and which the template.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::parser::{Arg, AssignTarget, Constant, Expr, ExprKind, For, Stmt, StmtKind, Template};
use super::values::{
    Budget, Dict, Loop, RenderFault, Result, SLOT_BYTES, Seq, SeqKind, TrackedText, Value, cost, set_attribute, wrong,
};
use super::{filters, functions, methods, operators};

/// Maximum nesting of statements, operands and calls.
const MAX_DEPTH: u32 = 200;

/// Arguments of a call.
#[derive(Default)]
pub struct Args {
    pub values: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// The argument at a position, or with a name.
    pub fn get(&self, at: usize, name: &str) -> Option<&Value> {
        let named = || self.named.iter().find(|(given, _)| **given == *name).map(|(_, value)| value);
        self.values.get(at).or_else(named)
    }

    /// The argument at a position.
    ///
    /// # Errors
    /// If it is missing.
    pub fn need(&self, at: usize) -> Result<&Value> {
        self.values.get(at).map_or_else(|| wrong(format!("argument {} is missing", at + 1)), Ok)
    }

    pub fn rest(&self, from: usize) -> &[Value] {
        self.values.get(from..).unwrap_or_default()
    }
}

/// Variables of a scope.
struct Scope {
    names: HashMap<Arc<str>, Value>,
    parent: Option<usize>,
    /// Number of enclosing loops.
    loops: usize,
}

enum LoopFlow {
    Next,
    Break,
    Continue,
}

/// A rendering in progress.
pub struct Rendering<'t> {
    template: &'t Template,
    constants: Vec<Value>,
    /// Active scopes: a macro's keeps the one where it was defined, which is one of those before it.
    scopes: Vec<Scope>,
    /// Output of the innermost captured block.
    out: TrackedText,
    /// The value of [`ExprKind::Captured`].
    captured: Value,
    depth: u32,
    now: Option<i64>,
    budget: &'t Budget,
    /// The current statement's line.
    line: u32,
}

/// Renders a template. On failure, also returns the line.
pub fn render(
    template: &Template,
    variables: HashMap<Arc<str>, Value>,
    now: Option<i64>,
    budget: &Budget,
) -> std::result::Result<TrackedText, (RenderFault, u32)> {
    let constant = |constant: &Constant| match constant {
        Constant::None => Value::None,
        Constant::Bool(bool) => Value::Bool(*bool),
        Constant::Int(number) => Value::Int(*number),
        Constant::Float(number) => Value::Float(*number),
        Constant::Str(text) => TrackedText::template(&**text).into(),
    };
    let mut run = Rendering {
        template,
        constants: template.constants.iter().map(constant).collect(),
        scopes: vec![Scope { names: variables, parent: None, loops: 0 }],
        out: TrackedText::default(),
        captured: Value::Undefined,
        depth: 0,
        now,
        budget,
        line: 1,
    };
    match run.body(&template.body) {
        Ok(_) => Ok(run.out),
        Err(fault) => Err((fault, run.line)),
    }
}

impl<'t> Rendering<'t> {
    fn deeper<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= MAX_DEPTH {
            return Err(RenderFault::Depth);
        }
        self.budget.step()?;
        self.depth += 1;
        let part = part(self);
        self.depth -= 1;
        part
    }

    fn lookup(&self, name: &str) -> Result<Option<&Value>> {
        let mut scope = self.scopes.last();
        while let Some(inner) = scope {
            self.budget.charge(SLOT_BYTES)?;
            if let Some(value) = inner.names.get(name) {
                return Ok(Some(value));
            }
            scope = inner.parent.and_then(|parent| self.scopes.get(parent));
        }
        Ok(None)
    }

    fn set(&mut self, name: &Arc<str>, value: Value) -> Result<()> {
        self.budget.charge(SLOT_BYTES + name.len())?;
        self.scopes.last_mut().map(|scope| scope.names.insert(Arc::clone(name), value));
        Ok(())
    }

    /// Runs a part in a new scope inside `parent`.
    fn scoped<T>(&mut self, parent: usize, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let loops = self.scopes.get(parent).map_or(0, |scope| scope.loops);
        self.scopes.push(Scope { names: HashMap::new(), parent: Some(parent), loops });
        let part = part(self);
        self.scopes.pop();
        part
    }

    fn innermost(&self) -> usize {
        self.scopes.len().saturating_sub(1)
    }

    /// Runs statements and returns what they print.
    fn capture(&mut self, part: impl FnOnce(&mut Self) -> Result<()>) -> Result<TrackedText> {
        let outer = std::mem::take(&mut self.out);
        let part = part(self);
        let captured = std::mem::replace(&mut self.out, outer);
        part.map(|()| captured)
    }

    fn print(&mut self, value: &Value) -> Result<()> {
        let text = value.to_text(self.budget)?;
        self.budget.charge(text.size())?;
        self.out.push_text(&text);
        Ok(())
    }

    // Statements.

    fn body(&mut self, body: &'t [Stmt]) -> Result<LoopFlow> {
        for statement in body {
            self.line = statement.line;
            match self.deeper(|run| run.statement(&statement.kind))? {
                LoopFlow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(LoopFlow::Next)
    }

    /// Runs a body that `break` and `continue` must not leave.
    fn closed_body(&mut self, body: &'t [Stmt]) -> Result<()> {
        match self.body(body)? {
            LoopFlow::Next => Ok(()),
            _ => wrong("`break` or `continue` outside of a loop"),
        }
    }

    fn statement(&mut self, statement: &'t StmtKind) -> Result<LoopFlow> {
        match statement {
            StmtKind::Data(text) => self.constant(*text).and_then(|text| self.print(&text))?,
            StmtKind::Print(expr) => self.eval(expr).and_then(|value| self.print(&value))?,
            StmtKind::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.eval(condition)?.is_true() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            StmtKind::For(for_loop) => self.for_loop(for_loop)?,
            StmtKind::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            StmtKind::SetBlock(target, filters, body) => {
                let parent = self.innermost();
                let value = self.capture(|run| run.scoped(parent, |run| run.closed_body(body)))?;
                let value = self.filtered(filters, value)?;
                self.assign(target, value)?;
            }
            StmtKind::Macro(number) => {
                let scope = self.innermost();
                let name = self.template.macros.get(*number).map(|definition| Arc::clone(&definition.name));
                name.map_or(Ok(()), |name| self.set(&name, Value::Macro(*number, scope)))?;
            }
            StmtKind::Call(caller, call) => self.call_block(*caller, call)?,
            StmtKind::Filter(filters, body) => {
                let parent = self.innermost();
                let value = self.capture(|run| run.scoped(parent, |run| run.closed_body(body)))?;
                let value = self.filtered(filters, value)?;
                self.print(&value)?;
            }
            StmtKind::With(sets, body) => {
                let parent = self.innermost();
                return self.scoped(parent, |run| {
                    for (target, expr) in sets {
                        let value = run.eval(expr)?;
                        run.assign(target, value)?;
                    }
                    run.body(body)
                });
            }
            StmtKind::Do(expr) => self.eval(expr).map(|_| ())?,
            StmtKind::Break => return Ok(LoopFlow::Break),
            StmtKind::Continue => return Ok(LoopFlow::Continue),
        }
        Ok(LoopFlow::Next)
    }

    fn filtered(&mut self, filters: &'t Expr, text: TrackedText) -> Result<Value> {
        let outer = std::mem::replace(&mut self.captured, text.into());
        let value = self.eval(filters);
        self.captured = outer;
        value
    }

    fn assign(&mut self, target: &'t AssignTarget, value: Value) -> Result<()> {
        match target {
            AssignTarget::Name(name) => self.set(name, value),
            AssignTarget::Attr(namespace, name) => {
                let namespace = self.lookup(namespace)?.cloned().unwrap_or_default();
                set_attribute(&namespace, name, value, self.budget)
            }
            AssignTarget::Tuple(targets) => {
                let values = value.items(self.budget)?;
                if values.len() != targets.len() {
                    return wrong(format!("{} values for {} names", values.len(), targets.len()));
                }
                targets.iter().zip(values).try_for_each(|(target, value)| self.assign(target, value))
            }
        }
    }

    fn for_loop(&mut self, for_loop: &'t For) -> Result<()> {
        let iter = self.eval(&for_loop.iter)?;
        let mut items = iter.items(self.budget)?;
        let parent = self.innermost();
        if let Some(filter) = &for_loop.filter {
            let mut kept = Vec::new();
            for item in items {
                let value = item.clone();
                let keeps = self.scoped(parent, |run| {
                    run.assign(&for_loop.target, value)?;
                    run.eval(filter)
                })?;
                if keeps.is_true() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        if items.is_empty() {
            return self.scoped(parent, |run| run.closed_body(&for_loop.otherwise));
        }
        let items = Rc::new(items);
        let last = Rc::default();
        let depth = self.scopes.last().map_or(0, |scope| scope.loops) + 1;
        for at in 0..items.len() {
            let state = Loop { items: Rc::clone(&items), at, depth, last: Rc::clone(&last) };
            let flow = self.scoped(parent, |run| {
                run.scopes.last_mut().into_iter().for_each(|scope| scope.loops = depth);
                run.set(&"loop".into(), Value::Loop(Rc::new(state)))?;
                run.assign(&for_loop.target, items.get(at).cloned().unwrap_or_default())?;
                run.body(&for_loop.body)
            })?;
            self.budget.step()?;
            if matches!(flow, LoopFlow::Break) {
                break;
            }
        }
        Ok(())
    }

    fn call_block(&mut self, caller: usize, call: &'t Expr) -> Result<()> {
        let ExprKind::Call(callee, args) = &call.kind else { return wrong("`call` needs a call of a macro") };
        let Value::Macro(number, scope) = self.eval(callee)? else { return wrong("`call` needs a macro") };
        let args = self.args(args, None)?;
        let caller = Value::Macro(caller, self.innermost());
        let text = self.call_macro(number, scope, &args, Some(caller))?;
        self.print(&text)
    }

    // Expressions.

    fn constant(&self, number: usize) -> Result<Value> {
        Ok(self.constants.get(number).cloned().unwrap_or_default())
    }

    fn eval(&mut self, expr: &'t Expr) -> Result<Value> {
        self.deeper(|run| match &expr.kind {
            ExprKind::Const(number) => run.constant(*number),
            ExprKind::Name(name) => Ok(match run.lookup(name)? {
                Some(value) => value.clone(),
                None if functions::find(name, run.now).is_some() => Value::Function,
                None => Value::Undefined,
            }),
            ExprKind::Captured => Ok(run.captured.clone()),
            ExprKind::List(items) => run.seq(items, SeqKind::List),
            ExprKind::Tuple(items) => run.seq(items, SeqKind::Tuple),
            ExprKind::Dict(pairs) => run.dict(pairs),
            ExprKind::Attr(of, name) => {
                let of = run.eval(of)?;
                operators::attribute(&of, name)
            }
            ExprKind::Item(of, key) => {
                let (of, key) = (run.eval(of)?, run.eval(key)?);
                operators::item(&of, &key, run.budget)
            }
            ExprKind::Slice(of, bounds) => run.slice(of, bounds),
            ExprKind::Call(callee, args) => run.call(callee, args),
            ExprKind::Filter(of, name, args) => run.filter(of, name, args),
            ExprKind::Test(of, name, args) => run.test(of, name, args),
            ExprKind::Unary(operator, of) => {
                let of = run.eval(of)?;
                operators::unary(operator, &of)
            }
            ExprKind::Binary(operator, left, right) => run.binary(operator, left, right),
            ExprKind::Compare(first, rest) => run.compare(first, rest),
            ExprKind::If(condition, then, otherwise) => match run.eval(condition)?.is_true() {
                true => run.eval(then),
                false => otherwise.as_ref().map_or(Ok(Value::Undefined), |expr| run.eval(expr)),
            },
        })
    }

    fn seq(&mut self, items: &'t [Expr], kind: SeqKind) -> Result<Value> {
        let items: Result<Vec<Value>> = items.iter().map(|item| self.eval(item)).collect();
        Seq::build(items?, kind, self.budget)
    }

    fn dict(&mut self, pairs: &'t [(Expr, Expr)]) -> Result<Value> {
        let pairs: Result<Vec<(Value, Value)>> =
            pairs.iter().map(|(key, value)| Ok((self.eval(key)?, self.eval(value)?))).collect();
        Dict::build(pairs?, self.budget)
    }

    fn slice(&mut self, of: &'t Expr, bounds: &'t [Option<Expr>; 3]) -> Result<Value> {
        let of = self.eval(of)?;
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let value = bound.as_ref().map_or(Ok(Value::None), |bound| self.eval(bound))?;
            *number = match value.as_int() {
                None if !value.is_none() => return wrong("slice bounds must be integers"),
                number => number,
            };
        }
        operators::slice(&of, numbers, self.budget)
    }

    fn binary(&mut self, operator: &str, left: &'t Expr, right: &'t Expr) -> Result<Value> {
        let left = self.eval(left)?;
        match operator {
            "and" if !left.is_true() => return Ok(left),
            "or" if left.is_true() => return Ok(left),
            _ => {}
        }
        let right = self.eval(right)?;
        match operator {
            "and" | "or" => Ok(right),
            _ => operators::binary(operator, &left, &right, self.budget),
        }
    }

    fn compare(&mut self, first: &'t Expr, rest: &'t [(&'static str, Expr)]) -> Result<Value> {
        let mut left = self.eval(first)?;
        for (operator, right) in rest {
            let right = self.eval(right)?;
            if !operators::compare(operator, &left, &right, self.budget)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// The arguments of a call; for filters, tests and methods the value is the first.
    fn args(&mut self, args: &'t [Arg], first: Option<Value>) -> Result<Args> {
        let mut all = Args { values: first.into_iter().collect(), named: Vec::new() };
        for arg in args {
            match arg {
                Arg::Value(expr) => all.values.push(self.eval(expr)?),
                Arg::Named(name, expr) => all.named.push((Arc::clone(name), self.eval(expr)?)),
                Arg::List(expr) => all.values.extend(self.eval(expr)?.items(self.budget)?),
                Arg::Dict(expr) => {
                    let dict = self.eval(expr)?;
                    self.budget.charge(cost(&dict))?;
                    let named =
                        dict.pairs()?.iter().map(|(name, value)| (name.as_str().unwrap_or("").into(), value.clone()));
                    all.named.extend(named);
                }
            }
        }
        Ok(all)
    }

    fn filter(&mut self, of: &'t Expr, name: &str, args: &'t [Arg]) -> Result<Value> {
        let of = self.eval(of)?;
        let args = self.args(args, Some(of))?;
        filters::apply(name, &args, self.budget)
    }

    fn test(&mut self, of: &'t Expr, name: &str, args: &'t [Arg]) -> Result<Value> {
        let of = self.eval(of)?;
        let args = self.args(args, Some(of))?;
        filters::test(name, &args, self.budget).map(Value::Bool)
    }

    fn call(&mut self, callee: &'t Expr, args: &'t [Arg]) -> Result<Value> {
        match &callee.kind {
            ExprKind::Attr(of, name) => {
                let of = self.eval(of)?;
                if of.is_undefined() {
                    return wrong(format!("`{name}` of an undefined value"));
                }
                let args = self.args(args, Some(of))?;
                methods::call(name, &args, self.budget)
            }
            ExprKind::Name(name) => match self.lookup(name)?.cloned() {
                Some(Value::Macro(number, scope)) => {
                    let args = self.args(args, None)?;
                    self.call_macro(number, scope, &args, None)
                }
                Some(Value::Loop(_)) => wrong("recursive loops are not supported"),
                Some(value) => {
                    wrong(format!("`{name}` is a value of type {}, which cannot be called", value.type_name()))
                }
                None => {
                    let Some(function) = functions::find(name, self.now) else {
                        return wrong(format!("the function {name} is unknown"));
                    };
                    let args = self.args(args, None)?;
                    function(&args, self.budget, self.now.unwrap_or_default())
                }
            },
            _ => match self.eval(callee)? {
                Value::Macro(number, scope) => {
                    let args = self.args(args, None)?;
                    self.call_macro(number, scope, &args, None)
                }
                value => wrong(format!("a value of type {} cannot be called", value.type_name())),
            },
        }
    }

    fn call_macro(&mut self, number: usize, scope: usize, args: &Args, caller: Option<Value>) -> Result<Value> {
        let Some(definition) = self.template.macros.get(number) else { return Ok(Value::Undefined) };
        let is_known = |name: &Arc<str>| definition.params.iter().any(|(param, _)| param == name);
        if args.values.len() > definition.params.len() || !args.named.iter().all(|(name, _)| is_known(name)) {
            return wrong(format!("the macro {} has no such argument", definition.name));
        }
        let line = self.line;
        let text = self.capture(|run| {
            run.scoped(scope, |run| {
                for (at, (name, default)) in definition.params.iter().enumerate() {
                    let value = match (args.get(at, name), default) {
                        (Some(value), _) => value.clone(),
                        (None, Some(default)) => run.eval(default)?,
                        (None, None) => Value::Undefined,
                    };
                    run.set(name, value)?;
                }
                if let Some(caller) = caller {
                    run.set(&"caller".into(), caller)?;
                }
                run.closed_body(&definition.body)
            })
        })?;
        self.line = line;
        Ok(text.into())
    }
}
