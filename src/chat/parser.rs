//! Parses a template's tokens into a tree of Jinja's statements and expressions.

use std::sync::Arc;

use super::lexer::{TemplateToken, tokens};
use super::values::{RenderFault, Result, wrong};

/// Maximum depth of an expression: a chain such as `a + b + c` is as deep as it is long.
const MAX_OPERATORS: u32 = 128;

/// Maximum nesting of brackets, tags and signs.
const MAX_NESTING: u32 = 48;

/// A parsed template.
#[derive(Debug, Default)]
pub struct Template {
    pub body: Vec<Stmt>,
    pub constants: Vec<Constant>,
    pub macros: Vec<Macro>,
}

#[derive(Debug)]
pub enum Constant {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Debug)]
pub struct Macro {
    pub name: Arc<str>,
    /// Each with its default.
    pub params: Vec<(Arc<str>, Option<Expr>)>,
    pub body: Vec<Stmt>,
}

#[derive(Debug)]
pub struct Stmt {
    pub line: u32,
    pub kind: StmtKind,
}

#[derive(Debug)]
pub enum StmtKind {
    /// The index of a constant text.
    Data(usize),
    Print(Expr),
    If(Vec<(Expr, Vec<Stmt>)>, Vec<Stmt>),
    For(Box<For>),
    Set(AssignTarget, Expr),
    /// `{% set x | filter %}...{% endset %}`; the filters apply to [`ExprKind::Captured`].
    SetBlock(AssignTarget, Expr, Vec<Stmt>),
    Macro(usize),
    /// `{% call(params) f() %}`: the index of the macro `caller`, and the call.
    Call(usize, Expr),
    Filter(Expr, Vec<Stmt>),
    With(Vec<(AssignTarget, Expr)>, Vec<Stmt>),
    Do(Expr),
    Break,
    Continue,
}

#[derive(Debug)]
pub struct For {
    pub target: AssignTarget,
    pub iter: Expr,
    pub filter: Option<Expr>,
    pub body: Vec<Stmt>,
    pub otherwise: Vec<Stmt>,
}

/// Target of an assignment.
#[derive(Debug)]
pub enum AssignTarget {
    Name(Arc<str>),
    Attr(Arc<str>, Arc<str>),
    Tuple(Vec<AssignTarget>),
}

#[derive(Debug)]
pub struct Expr {
    pub kind: ExprKind,
    depth: u32,
}

#[derive(Debug)]
pub enum ExprKind {
    Const(usize),
    Name(Arc<str>),
    /// The text of the block that the filters apply to.
    Captured,
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Vec<Arg>),
    Filter(Box<Expr>, Arc<str>, Vec<Arg>),
    Test(Box<Expr>, Arc<str>, Vec<Arg>),
    Unary(&'static str, Box<Expr>),
    Binary(&'static str, Box<Expr>, Box<Expr>),
    /// `a < b <= c`
    Compare(Box<Expr>, Vec<(&'static str, Expr)>),
    If(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}

#[derive(Debug)]
pub enum Arg {
    Value(Expr),
    Named(Arc<str>, Expr),
    /// `*list`
    List(Expr),
    /// `**dict`
    Dict(Expr),
}

impl ExprKind {
    /// Depth of the deepest operand.
    fn depth(&self) -> u32 {
        let all = |exprs: &[Expr]| exprs.iter().map(|expr| expr.depth).max().unwrap_or(0);
        let of_args = |args: &[Arg]| {
            let depth = |arg: &Arg| match arg {
                Arg::Value(expr) | Arg::Named(_, expr) | Arg::List(expr) | Arg::Dict(expr) => expr.depth,
            };
            args.iter().map(depth).max().unwrap_or(0)
        };
        match self {
            ExprKind::Const(_) | ExprKind::Name(_) | ExprKind::Captured => 0,
            ExprKind::List(items) | ExprKind::Tuple(items) => all(items),
            ExprKind::Dict(pairs) => pairs.iter().map(|(key, value)| key.depth.max(value.depth)).max().unwrap_or(0),
            ExprKind::Attr(of, _) | ExprKind::Unary(_, of) => of.depth,
            ExprKind::Item(left, right) | ExprKind::Binary(_, left, right) => left.depth.max(right.depth),
            ExprKind::Slice(of, bounds) => bounds.iter().flatten().map(|bound| bound.depth).fold(of.depth, u32::max),
            ExprKind::Call(of, args) | ExprKind::Filter(of, _, args) | ExprKind::Test(of, _, args) => {
                of.depth.max(of_args(args))
            }
            ExprKind::Compare(first, rest) => rest.iter().map(|(_, expr)| expr.depth).fold(first.depth, u32::max),
            ExprKind::If(condition, then, otherwise) => {
                condition.depth.max(then.depth).max(otherwise.as_ref().map_or(0, |expr| expr.depth))
            }
        }
    }
}

/// Parses a template. On failure, also returns the line.
pub fn parse(source: &str) -> std::result::Result<Template, (RenderFault, u32)> {
    let mut parser = Parser { tokens: tokens(source)?, at: 0, nesting: 0, template: Template::default() };
    match parser.body(&[]) {
        Ok((body, _)) => {
            parser.template.body = body;
            Ok(parser.template)
        }
        Err(fault) => Err((fault, parser.line())),
    }
}

struct Parser {
    tokens: Vec<(TemplateToken, u32)>,
    at: usize,
    nesting: u32,
    template: Template,
}

/// Binary operators with their precedence; 3 is `not`, 4 are comparisons.
const BINARY: [(&str, u32); 10] =
    [("or", 1), ("and", 2), ("+", 5), ("-", 5), ("~", 6), ("*", 7), ("/", 7), ("//", 7), ("%", 7), ("**", 8)];
const COMPARISONS: [&str; 7] = ["==", "!=", "<", "<=", ">", ">=", "in"];
const NOT: u32 = 3;
const COMPARE: u32 = 4;

impl Parser {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    fn peek(&self) -> &TemplateToken {
        self.tokens.get(self.at).map_or(&TemplateToken::End, |(token, _)| token)
    }

    fn next(&mut self) -> TemplateToken {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    /// Skips an operator or word, if it is next.
    fn skip(&mut self, wanted: &str) -> bool {
        let is_there = self.is_next(wanted);
        self.at += usize::from(is_there);
        is_there
    }

    fn is_next(&self, wanted: &str) -> bool {
        match self.peek() {
            TemplateToken::Op(operator) => *operator == wanted,
            TemplateToken::Name(name) => **name == *wanted,
            _ => false,
        }
    }

    fn unexpected<T>(&self, wanted: &str) -> Result<T> {
        let found = match self.peek() {
            TemplateToken::Op(operator) => format!("`{operator}`"),
            TemplateToken::Name(name) => format!("`{name:.40}`"),
            TemplateToken::BlockEnd | TemplateToken::PrintEnd => "the end of the tag".into(),
            TemplateToken::End => "the end".into(),
            _ => "a constant or a text".into(),
        };
        wrong(format!("{found} instead of {wanted}"))
    }

    fn expect(&mut self, wanted: &str) -> Result<()> {
        if self.skip(wanted) { Ok(()) } else { self.unexpected(&format!("`{wanted}`")) }
    }

    fn name(&mut self) -> Result<Arc<str>> {
        match self.peek().clone() {
            TemplateToken::Name(name) => {
                self.at += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn constant(&mut self, constant: Constant) -> usize {
        self.template.constants.push(constant);
        self.template.constants.len() - 1
    }

    /// Parses one level deeper.
    fn nested<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.nesting >= MAX_NESTING {
            return wrong(format!("more than {MAX_NESTING} nested operators, brackets or tags"));
        }
        self.nesting += 1;
        let part = part(self);
        self.nesting -= 1;
        part
    }

    fn expr(&self, kind: ExprKind) -> Result<Expr> {
        let depth = 1 + kind.depth();
        if depth > MAX_OPERATORS {
            return wrong(format!("more than {MAX_OPERATORS} operators in an expression"));
        }
        Ok(Expr { kind, depth })
    }

    // Statements.

    /// Statements up to one of these tags. Consumes the tag's name and returns it.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Stmt>, Arc<str>)> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                TemplateToken::Data(data) => StmtKind::Data(self.constant(Constant::Str(data))),
                TemplateToken::PrintStart => {
                    let expr = self.tuple()?;
                    if !matches!(self.next(), TemplateToken::PrintEnd) {
                        self.at -= 1;
                        return self.unexpected("the end of the tag");
                    }
                    StmtKind::Print(expr)
                }
                TemplateToken::BlockStart => {
                    let name = self.name()?;
                    if ends.contains(&&*name) {
                        return Ok((body, name));
                    }
                    self.nested(|parser| parser.statement(&name))?
                }
                TemplateToken::End if ends.is_empty() => return Ok((body, "".into())),
                _ => {
                    self.at -= 1;
                    return self.unexpected(&format!("`{}`", ends.join("` or `")));
                }
            };
            body.push(Stmt { line, kind });
        }
    }

    /// The rest of a tag, statements up to `end`, and the end tag.
    fn block(&mut self, end: &str) -> Result<Vec<Stmt>> {
        self.tag_end()?;
        let (body, _) = self.body(&[end])?;
        self.tag_end()?;
        Ok(body)
    }

    fn tag_end(&mut self) -> Result<()> {
        match self.peek() {
            TemplateToken::BlockEnd => {
                self.at += 1;
                Ok(())
            }
            _ => self.unexpected("the end of the tag"),
        }
    }

    fn statement(&mut self, name: &str) -> Result<StmtKind> {
        let kind = match name {
            "if" => return self.branches(),
            "for" => return self.for_loop(),
            "set" => return self.set(),
            "macro" => {
                let name = self.name()?;
                let params = self.params()?;
                let body = self.block("endmacro")?;
                return Ok(StmtKind::Macro(self.define(name, params, body)));
            }
            "call" => {
                let params = if self.is_next("(") { self.params()? } else { Vec::new() };
                let call = self.expression()?;
                let body = self.block("endcall")?;
                return Ok(StmtKind::Call(self.define("caller".into(), params, body), call));
            }
            "filter" => {
                let captured = self.expr(ExprKind::Captured)?;
                let first = self.filter(captured)?;
                let filters = self.filters(first)?;
                return Ok(StmtKind::Filter(filters, self.block("endfilter")?));
            }
            "with" => {
                let mut sets = Vec::new();
                while !matches!(self.peek(), TemplateToken::BlockEnd) {
                    if !sets.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target()?;
                    self.expect("=")?;
                    sets.push((target, self.expression()?));
                }
                return Ok(StmtKind::With(sets, self.block("endwith")?));
            }
            // Hugging Face's mark of training text: renders its content.
            "generation" => return Ok(StmtKind::With(Vec::new(), self.block("endgeneration")?)),
            "do" => StmtKind::Do(self.tuple()?),
            "break" => StmtKind::Break,
            "continue" => StmtKind::Continue,
            "include" | "import" | "from" | "extends" => {
                return wrong("chat templates cannot include other templates");
            }
            "block" | "autoescape" | "trans" | "debug" => {
                return wrong(format!("`{name}` is not supported in chat templates"));
            }
            name => return wrong(format!("the tag `{name:.40}` is unknown")),
        };
        self.tag_end()?;
        Ok(kind)
    }

    fn define(&mut self, name: Arc<str>, params: Vec<(Arc<str>, Option<Expr>)>, body: Vec<Stmt>) -> usize {
        self.template.macros.push(Macro { name, params, body });
        self.template.macros.len() - 1
    }

    fn params(&mut self) -> Result<Vec<(Arc<str>, Option<Expr>)>> {
        let mut params = Vec::new();
        self.expect("(")?;
        while !self.skip(")") {
            if !params.is_empty() {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            let name = self.name()?;
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            params.push((name, default));
        }
        Ok(params)
    }

    fn branches(&mut self) -> Result<StmtKind> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple()?;
            self.tag_end()?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            let otherwise = match &*end {
                "elif" => continue,
                "else" => self.block("endif")?,
                _ => {
                    self.tag_end()?;
                    Vec::new()
                }
            };
            return Ok(StmtKind::If(branches, otherwise));
        }
    }

    fn for_loop(&mut self) -> Result<StmtKind> {
        let target = self.target()?;
        self.expect("in")?;
        let iter = self.tuple_of(|parser| parser.binary(1))?;
        let filter = if self.skip("if") { Some(self.expression()?) } else { None };
        if self.is_next("recursive") {
            return wrong("recursive loops are not supported");
        }
        self.tag_end()?;
        let (body, end) = self.body(&["else", "endfor"])?;
        let otherwise = match &*end {
            "else" => self.block("endfor")?,
            _ => {
                self.tag_end()?;
                Vec::new()
            }
        };
        Ok(StmtKind::For(Box::new(For { target, iter, filter, body, otherwise })))
    }

    fn set(&mut self) -> Result<StmtKind> {
        let target = self.target()?;
        if self.skip("=") {
            let value = self.tuple()?;
            self.tag_end()?;
            return Ok(StmtKind::Set(target, value));
        }
        let captured = self.expr(ExprKind::Captured)?;
        let filters = self.filters(captured)?;
        Ok(StmtKind::SetBlock(target, filters, self.block("endset")?))
    }

    fn target(&mut self) -> Result<AssignTarget> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            targets.push(if self.skip("(") {
                let target = self.nested(Self::target)?;
                self.expect(")")?;
                target
            } else {
                let name = self.name()?;
                if self.skip(".") { AssignTarget::Attr(name, self.name()?) } else { AssignTarget::Name(name) }
            });
            if !self.skip(",") {
                break;
            }
            is_tuple = true;
            if !matches!(self.peek(), TemplateToken::Name(_)) || self.is_next("in") {
                break;
            }
        }
        match (is_tuple, targets.pop()) {
            (false, Some(target)) => Ok(target),
            (_, last) => Ok(AssignTarget::Tuple(targets.into_iter().chain(last).collect())),
        }
    }

    // Expressions.

    /// An expression, or a tuple without brackets.
    fn tuple(&mut self) -> Result<Expr> {
        self.tuple_of(Self::expression)
    }

    fn tuple_of(&mut self, item: impl Fn(&mut Self) -> Result<Expr>) -> Result<Expr> {
        let first = item(self)?;
        if !self.is_next(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip(",") {
            if matches!(self.peek(), TemplateToken::PrintEnd | TemplateToken::BlockEnd) || self.is_next(")") {
                break;
            }
            items.push(item(self)?);
        }
        self.expr(ExprKind::Tuple(items))
    }

    fn expression(&mut self) -> Result<Expr> {
        self.nested(|parser| {
            let mut expr = parser.binary(1)?;
            while parser.skip("if") {
                let condition = parser.binary(1)?;
                let otherwise = if parser.skip("else") { Some(Box::new(parser.expression()?)) } else { None };
                expr = parser.expr(ExprKind::If(Box::new(condition), Box::new(expr), otherwise))?;
            }
            Ok(expr)
        })
    }

    /// Operators of at least this precedence.
    fn binary(&mut self, least: u32) -> Result<Expr> {
        let mut left = if least <= NOT && self.skip("not") {
            let operand = self.nested(|parser| parser.binary(NOT))?;
            self.expr(ExprKind::Unary("not", Box::new(operand)))?
        } else {
            self.unary(true)?
        };
        loop {
            let comparisons = if least <= COMPARE { self.comparisons()? } else { Vec::new() };
            if !comparisons.is_empty() {
                left = self.expr(ExprKind::Compare(Box::new(left), comparisons))?;
            }
            let found = BINARY.iter().find(|(operator, binding)| *binding >= least && self.is_next(operator));
            let Some((operator, binding)) = found else { return Ok(left) };
            self.at += 1;
            let right = self.binary(binding + 1)?;
            left = self.expr(ExprKind::Binary(operator, Box::new(left), Box::new(right)))?;
        }
    }

    fn comparisons(&mut self) -> Result<Vec<(&'static str, Expr)>> {
        let mut comparisons = Vec::new();
        loop {
            let is_not_in = self.is_next("not")
                && matches!(self.tokens.get(self.at + 1), Some((TemplateToken::Name(name), _)) if **name == *"in");
            let found = COMPARISONS.iter().find(|operator| self.is_next(operator));
            let operator = match found {
                _ if is_not_in => "not in",
                Some(operator) => operator,
                None => return Ok(comparisons),
            };
            self.at += if is_not_in { 2 } else { 1 };
            comparisons.push((operator, self.binary(COMPARE + 1)?));
        }
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expr> {
        let sign = ["-", "+"].into_iter().find(|sign| self.is_next(sign));
        let operand = match sign {
            Some(sign) => {
                self.at += 1;
                let operand = self.nested(|parser| parser.unary(false))?;
                self.expr(ExprKind::Unary(sign, Box::new(operand)))?
            }
            None => self.primary()?,
        };
        let operand = self.postfix(operand)?;
        if with_filters { self.filters(operand) } else { Ok(operand) }
    }

    fn primary(&mut self) -> Result<Expr> {
        let token = self.next();
        let constant = match token {
            TemplateToken::Name(name) => match &*name {
                "true" | "True" => Constant::Bool(true),
                "false" | "False" => Constant::Bool(false),
                "none" | "None" => Constant::None,
                _ => return self.expr(ExprKind::Name(name)),
            },
            TemplateToken::Str(mut text) => {
                while let TemplateToken::Str(more) = self.peek() {
                    text += more;
                    self.at += 1;
                }
                Constant::Str(text.into())
            }
            TemplateToken::Int(number) => Constant::Int(number),
            TemplateToken::Float(number) => Constant::Float(number),
            TemplateToken::Op("(") => {
                if self.skip(")") {
                    return self.expr(ExprKind::Tuple(Vec::new()));
                }
                let inner = self.tuple()?;
                self.expect(")")?;
                return Ok(inner);
            }
            TemplateToken::Op("[") => {
                let items = self.items("]", Self::expression)?;
                return self.expr(ExprKind::List(items));
            }
            TemplateToken::Op("{") => {
                let pairs = self.items("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect(":")?;
                    Ok((key, parser.expression()?))
                })?;
                return self.expr(ExprKind::Dict(pairs));
            }
            _ => {
                self.at -= 1;
                return self.unexpected("an expression");
            }
        };
        let constant = self.constant(constant);
        self.expr(ExprKind::Const(constant))
    }

    /// Comma-separated items up to a bracket.
    fn items<T>(&mut self, close: &str, item: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        while !self.skip(close) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.skip(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn args(&mut self) -> Result<Vec<Arg>> {
        self.expect("(")?;
        self.items(")", |parser| {
            if parser.skip("*") {
                return Ok(Arg::List(parser.expression()?));
            }
            if parser.skip("**") {
                return Ok(Arg::Dict(parser.expression()?));
            }
            let is_named = matches!(parser.peek(), TemplateToken::Name(_))
                && matches!(parser.tokens.get(parser.at + 1), Some((TemplateToken::Op("="), _)));
            if is_named {
                let name = parser.name()?;
                parser.at += 1;
                return Ok(Arg::Named(name, parser.expression()?));
            }
            Ok(Arg::Value(parser.expression()?))
        })
    }

    /// Parses attributes, items and calls.
    fn postfix(&mut self, mut expr: Expr) -> Result<Expr> {
        loop {
            if self.skip(".") {
                let kind = match self.peek().clone() {
                    TemplateToken::Int(number) => {
                        self.at += 1;
                        let constant = self.constant(Constant::Int(number));
                        ExprKind::Item(Box::new(expr), Box::new(self.expr(ExprKind::Const(constant))?))
                    }
                    _ => ExprKind::Attr(Box::new(expr), self.name()?),
                };
                expr = self.expr(kind)?;
            } else if self.skip("[") {
                let kind = self.subscript(expr)?;
                expr = self.expr(kind)?;
            } else if self.is_next("(") {
                let args = self.args()?;
                expr = self.expr(ExprKind::Call(Box::new(expr), args))?;
            } else {
                return Ok(expr);
            }
        }
    }

    fn subscript(&mut self, of: Expr) -> Result<ExprKind> {
        let mut bounds: [Option<Expr>; 3] = [None, None, None];
        let mut n_colons = 0;
        for bound in &mut bounds {
            if !self.is_next(":") && !self.is_next("]") {
                *bound = Some(self.expression()?);
            }
            if !self.skip(":") {
                break;
            }
            n_colons += 1;
        }
        self.expect("]")?;
        match (n_colons, bounds) {
            (0, [Some(key), ..]) => Ok(ExprKind::Item(Box::new(of), Box::new(key))),
            (0, _) => self.unexpected("an expression"),
            (_, bounds) => Ok(ExprKind::Slice(Box::new(of), Box::new(bounds))),
        }
    }

    /// Parses filters, tests, and calls of their results.
    fn filters(&mut self, mut expr: Expr) -> Result<Expr> {
        loop {
            if self.is_next("|") {
                self.at += 1;
                expr = self.filter(expr)?;
            } else if self.skip("is") {
                expr = self.test(expr)?;
            } else if self.is_next("(") {
                let args = self.args()?;
                expr = self.expr(ExprKind::Call(Box::new(expr), args))?;
            } else {
                return Ok(expr);
            }
        }
    }

    fn filter(&mut self, of: Expr) -> Result<Expr> {
        let name = self.name()?;
        let args = if self.is_next("(") { self.args()? } else { Vec::new() };
        self.expr(ExprKind::Filter(Box::new(of), name, args))
    }

    fn test(&mut self, of: Expr) -> Result<Expr> {
        let is_negated = self.skip("not");
        let name = self.name()?;
        let begins_operand = match self.peek() {
            TemplateToken::Name(name) => !matches!(&**name, "else" | "or" | "and" | "if" | "in" | "is" | "not"),
            TemplateToken::Str(_) | TemplateToken::Int(_) | TemplateToken::Float(_) | TemplateToken::Op("[" | "{") => {
                true
            }
            _ => false,
        };
        let args = if self.is_next("(") {
            self.args()?
        } else if begins_operand {
            let operand = self.primary()?;
            vec![Arg::Value(self.postfix(operand)?)]
        } else {
            Vec::new()
        };
        let test = self.expr(ExprKind::Test(Box::new(of), name, args))?;
        if is_negated { self.expr(ExprKind::Unary("not", Box::new(test))) } else { Ok(test) }
    }
}
