//! Constrains generated text by a JSON schema, a regular expression or a grammar, and computes the bitmask of allowed
//! tokens. The crate `llguidance` matches byte by byte: derivatives of regular expressions for the lexer, an Earley
//! parser for the grammar. This module maps the vocabulary, and only passes it constraints that compile in a short
//! time.
//!
//! ```
//! use tilewright::grammar::Constraint;
//! use tilewright::{Device, GenerateOptions, Model};
//!
//! # pollster::block_on(async {
//! let model = Model::builtin(&Device::cpu())?;
//! let constraint = Constraint::json_schema(r#"{"type": "object", "properties": {"age": {"type": "integer"}}}"#)?;
//! let options = GenerateOptions { constraint: Some(constraint), ..GenerateOptions::default() };
//! let mut session = model.session()?;
//! let mut generation = session.generate("Once upon a time", &options)?;
//! while let Some(piece) = generation.next().await {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), tilewright::Error>(())
//! # }).unwrap();
//! ```

mod formats;
mod gbnf;
mod limits;
mod simplify;
#[cfg(feature = "answer")]
mod tools;

use std::collections::HashMap;
use std::fmt::{self, Debug, Display, Formatter};
use std::sync::Arc;
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{JsonCompileOptions, Matcher, ParserFactory, TokenParser};
use serde_json::{Value, json};
use toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::error::Error;
use crate::kernels::mask_words;
use crate::platform::IS_BROWSER;
use crate::tokenizer::{TokenType, Tokenizer};
#[cfg(feature = "answer")]
pub use tools::{ToolChoice, ToolGrammar, ToolRules};

/// Stack size of the thread that compiles a grammar: llguidance recurses over references. The limits leave room for
/// some thousand levels. Unused stack takes no memory.
const STACK_BYTES: usize = 256 << 20;
/// Timeout for compiling a grammar. The limits keep most far below it; this catches the rest.
const MAX_TIME: Duration = Duration::from_secs(5);
/// Maximum grammars compiled at a time, including timed-out ones still running: nothing can stop those.
const MAX_COMPILERS: usize = 4;
/// White space between parts of a JSON text: a space, or a line break with indentation. Without this limit, a model
/// may generate spaces up to the maximum length.
const WHITE_SPACE: &str = r"\x20|\n\x20{0,40}|\n\t{0,10}";
/// Escapes allowed in JSON. Not `\u`: a name could be written in two ways, and so appear twice.
const ESCAPES: &str = "nrbtf\\\"";

/// A constraint on the whole generated text.
///
/// Known JSON Schema keywords that cannot be enforced (`not`, `if`, `uniqueItems`, `contains`, `propertyNames`,
/// `dependentRequired` and the like) are refused, unless they have no effect: `uniqueItems: false`, `not: false`.
/// Unknown ones are ignored, as in the specification. Alternatives of `oneOf` must be obviously exclusive; integers
/// beyond 2^53 are refused in `const` and `enum`. `minProperties` may require one property not in `required`. `$ref`
/// must point into the same schema, `#/...`. The formats `date`, `date-time`, `duration`, `email`, `hostname`,
/// `ipv4`, `ipv6`, `time`, `uri` and `uuid` are enforced, others ignored. A schema with a dead end, whose text could
/// start but not end, is refused.
/// Properties appear in the schema's order. Parts of unlimited length (a string without `maxLength`, an object with
/// arbitrary properties) end when the model ends them. Details:
/// <https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md>.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by this schema.
    JsonSchema(Value),
    /// A text fully matched by this regular expression, in the crate `regex`'s syntax without assertions.
    Regex(String),
    /// A text matched by this grammar's rule `start`, in llguidance's variant of Lark's syntax. See
    /// <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>.
    Lark(String),
    /// A text matched by this grammar's rule `root`, in llama.cpp's syntax. Left recursion is refused, as there. See
    /// <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>.
    Gbnf(String),
    /// An answer with well-formed tool calls that are valid by the tools' schemas; see [`Constraint::tools`].
    #[cfg(feature = "answer")]
    Tools(ToolGrammar),
    /// A constraint whose errors call it by this name, such as the field of a request, instead of by its kind.
    Named(String, Box<Constraint>),
}

impl Constraint {
    /// The constraint under this name in errors.
    pub fn named(self, name: impl Into<String>) -> Constraint {
        Constraint::Named(name.into(), Box::new(self))
    }

    /// Parses a JSON schema.
    ///
    /// # Errors
    /// [`Error::Constraint`] if it is not valid JSON.
    pub fn json_schema(text: &str) -> Result<Constraint, Error> {
        let parsed = serde_json::from_str(text);
        parsed.map(Constraint::JsonSchema).map_err(|error| unusable("json_schema", "a schema in JSON", error))
    }

    /// A grammar in llama.cpp's syntax if it has a rule `root ::=`, otherwise in Lark's.
    pub fn grammar_of(text: String) -> Constraint {
        match gbnf::is_gbnf(&text) {
            true => Constraint::Gbnf(text),
            false => Constraint::Lark(text),
        }
    }

    /// Its name in errors.
    fn field(&self) -> &str {
        match self {
            Constraint::JsonObject => "json_object",
            Constraint::JsonSchema(_) => "json_schema",
            Constraint::Regex(_) => "regex",
            Constraint::Lark(_) => "lark",
            Constraint::Gbnf(_) => "gbnf",
            #[cfg(feature = "answer")]
            Constraint::Tools(_) => "tools",
            Constraint::Named(name, _) => name,
        }
    }

    /// The schemas it consists of, with their names in errors.
    fn parts(&self) -> Vec<(String, TopLevelGrammar)> {
        match self {
            #[cfg(feature = "answer")]
            Constraint::Tools(grammar) => grammar.parts(),
            Constraint::Named(_, constraint) => constraint.parts(),
            _ => Vec::new(),
        }
    }

    /// The grammar in llguidance's format.
    fn grammar(&self) -> Result<TopLevelGrammar, Error> {
        let of_schema = |schema: &Value| -> Result<TopLevelGrammar, limits::Excess> {
            let mut schema = schema.clone();
            if let Some(keywords) = schema.as_object_mut() {
                // Schemas must not set llguidance's options.
                keywords.shift_remove("x-guidance");
                simplify::simplify(&mut schema)?;
                formats::tighten(&mut schema);
            }
            if schema.is_object() {
                let options = JsonCompileOptions {
                    whitespace_pattern: Some(WHITE_SPACE.into()),
                    json_allowed_escapes: Some(ESCAPES.into()),
                    ..Default::default()
                };
                options.apply_to(&mut schema);
            }
            Ok(TopLevelGrammar::from_json_schema(schema))
        };
        let checked = match self {
            Constraint::JsonObject => of_schema(&json!({"type": "object"})),
            Constraint::JsonSchema(schema) => limits::check_schema(schema).and_then(|()| of_schema(schema)),
            Constraint::Regex(pattern) => limits::check_pattern(pattern).map(|()| TopLevelGrammar::from_regex(pattern)),
            Constraint::Lark(text) => limits::check_lark(text).map(|()| TopLevelGrammar::from_lark(text.clone())),
            Constraint::Gbnf(text) => match limits::check_gbnf(text) {
                Ok(()) => {
                    let lark = gbnf::to_lark(text)?;
                    limits::check_lengths(&lark).map(|()| TopLevelGrammar::from_lark(lark))
                }
                Err(excess) => Err(excess),
            },
            // Checked in [`Constraint::tools`].
            #[cfg(feature = "answer")]
            Constraint::Tools(grammar) => Ok(TopLevelGrammar::from_lark(grammar.lark.clone())),
            Constraint::Named(name, constraint) => return constraint.grammar().map_err(|error| renamed(error, name)),
        };
        checked.map_err(|excess| Error::Constraint {
            field: format!("{}: {}", self.field(), excess.of),
            expected: excess.expected,
            found: excess.found,
        })
    }
}

/// An error of a constraint, with `name` in place of its kind.
fn renamed(error: Error, name: &str) -> Error {
    match error {
        Error::Constraint { field, expected, found } => {
            let part = field.split_once(": ").map_or(String::new(), |(_, part)| format!(": {part}"));
            Error::Constraint { field: name.to_owned() + &part, expected, found }
        }
        other => other,
    }
}

/// [`Error::Constraint`] with a reason.
fn unusable(field: &str, expected: &str, reason: impl Display) -> Error {
    let reason = reason.to_string();
    // Text after an angle bracket is llguidance's internal state.
    let reason = reason.split("\n<").next().unwrap_or_default().trim();
    let reason = of_pattern(reason).unwrap_or_else(|| reason.into());
    // The subject is first, the reason last: keep both.
    let (n, last) = (reason.chars().count(), 200);
    let shown: String = match n > 2 * last {
        true => reason.chars().take(last).chain(" ... ".chars()).chain(reason.chars().skip(n - last)).collect(),
        false => reason,
    };
    Error::Constraint { field: field.into(), expected: expected.into(), found: format!("unusable ({shown})") }
}

/// The reason of an invalid pattern in one line, without the grammar that it was put into.
fn of_pattern(reason: &str) -> Option<String> {
    // Where a pattern is in the grammar made from it alone.
    let reason = reason.strip_prefix("at 1(8): ").unwrap_or(reason);
    let (pattern, lines) = reason.split_once(" (in regex): regex parse error:")?;
    let reason = lines.lines().find_map(|line| line.trim().strip_prefix("error: "))?;
    Some(format!("{pattern}: {reason}"))
}

/// A vocabulary prepared for constraints. For a large vocabulary this takes up to a second and a few dozen MB; a
/// model prepares it at its first constrained generation.
pub struct Grammars {
    factory: ParserFactory,
    vocab_size: u32,
}

impl Debug for Grammars {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl Grammars {
    /// Prepares the vocabulary of a model with `vocab_size` logits, which may differ from the number of tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary is too large.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Result<Grammars, Error> {
        let env: TokEnv = Arc::new(GuidanceTokenizer::new(tokenizer, vocab_size)?);
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| Error::Tokenizer {
            field: "tokens".into(),
            expected: "a vocabulary for constraints".into(),
            found: error.to_string(),
        })?;
        factory.quiet();
        // Half the default takes at most 10 ms.
        let fuel = ParserLimits::default().initial_lexer_fuel / 2;
        *factory.limits_mut() =
            ParserLimits { verbose_errors: false, initial_lexer_fuel: fuel, ..ParserLimits::default() };
        Ok(Grammars { factory, vocab_size })
    }

    /// Compiles a grammar; also returns why it is unusable, if so.
    fn read(&self, grammar: TopLevelGrammar) -> (Matcher, Option<String>) {
        let mut parser = self.factory.create_parser(grammar);
        let reason = parser.as_mut().ok().and_then(dead_end);
        let matcher = Matcher::new(parser);
        let error = matcher.get_error();
        (matcher, error.or(reason))
    }

    /// Starts matching a text against `constraint`. `end_ids` are the tokens that may end it once complete.
    ///
    /// # Errors
    /// [`Error::Constraint`] naming the constraint or its kind, with llguidance's reason, if it is invalid,
    /// contradictory, unenforceable or too large; if no token can start its text or it has a dead end; if too many
    /// complex ones are still compiling.
    pub fn begin(self: &Arc<Self>, constraint: &Constraint, end_ids: &[u32]) -> Result<Guide, Error> {
        let (field, grammar) = (constraint.field().to_owned(), constraint.grammar()?);
        let (parts, kind) = (constraint.parts(), field.clone());
        let this = Arc::clone(self);
        let read = move || {
            let (matcher, reason) = this.read(grammar);
            // Find the part that is unusable.
            let reason = reason.map(|reason| {
                let of_part = |(name, grammar): (String, TopLevelGrammar)| {
                    Some((format!("{kind}: {name}"), this.read(grammar).1?))
                };
                parts.into_iter().find_map(of_part).unwrap_or((kind.clone(), reason))
            });
            (matcher, reason)
        };
        // Without a thread, on stack overflow the module ends, and its owner creates another.
        let (matcher, reason) = if IS_BROWSER { read() } else { COMPILERS.compile_on_thread(&field, read)? };
        if let Some((field, reason)) = reason {
            return Err(unusable(&field, "an enforceable constraint", reason));
        }
        let end_ids = end_ids.iter().copied().filter(|&id| id < self.vocab_size).collect();
        let mut guide = Guide { matcher, field, vocab_size: self.vocab_size, end_ids, allowed: None };
        guide.allowed()?;
        Ok(guide)
    }
}

/// Why a grammar with a dead end is refused: a required part matches no text, such as a pattern of names that are all
/// taken. Every reachable symbol must match some text.
fn dead_end(parser: &mut TokenParser) -> Option<String> {
    let grammar = parser.parser.grammar();
    // Parameters' conditions determine the rules.
    if grammar.parametric() {
        return None;
    }
    // The rules of each symbol, as indices of symbols in order of discovery.
    let mut places: HashMap<usize, usize> = HashMap::from([(grammar.start().as_index(), 0)]);
    let mut found = vec![grammar.start()];
    let mut rules: Vec<Vec<Vec<usize>>> = Vec::new();
    let mut ends: Vec<bool> = Vec::new();
    let mut lexemes = Vec::new();
    while let Some(&symbol) = found.get(rules.len()) {
        let data = grammar.sym_data(symbol);
        let mut of_symbol = Vec::new();
        match data.lexeme {
            Some(lexeme) => {
                let mut alone = grammar.lexer_spec().alloc_lexeme_set();
                alone.add(lexeme);
                lexemes.push((rules.len(), alone));
            }
            None => {
                for &rule in grammar.rules_of(symbol) {
                    let mut parts = Vec::new();
                    for &part in grammar.rule_rhs(rule).0 {
                        let next = found.len();
                        let place = *places.entry(part.as_index()).or_insert(next);
                        if place == next {
                            found.push(part);
                        }
                        parts.push(place);
                    }
                    of_symbol.push(parts);
                }
            }
        }
        ends.push(data.is_nullable || data.lexeme.is_none() && data.is_terminal);
        rules.push(of_symbol);
    }
    let names: Vec<String> = found.iter().map(|&symbol| grammar.sym_name(symbol).to_owned()).collect();
    for (at, alone) in lexemes {
        let is_dead = parser.parser.with_recognizer(|state| state.lexer_mut().start_state(&alone).is_dead());
        if let Some(ends) = ends.get_mut(at) {
            *ends = !is_dead;
        }
    }
    let mut changes = true;
    while changes {
        changes = false;
        // Symbols found last are closest to the terminals.
        for at in (0..rules.len()).rev() {
            let ends_by = |rule: &Vec<usize>| rule.iter().all(|&part| ends.get(part) == Some(&true));
            let ends_now = rules.get(at).is_some_and(|rules| rules.iter().any(ends_by));
            if let Some(ends) = ends.get_mut(at).filter(|ends| !**ends && ends_now) {
                *ends = true;
                changes = true;
            }
        }
    }
    let at = ends.iter().position(|ends| !ends)?;
    Some(format!("its text can reach a dead end, at {}", names.get(at)?))
}

/// Limits concurrent compilations.
struct Compilers {
    n: Mutex<usize>,
    freed: Condvar,
    most: usize,
    most_time: Duration,
}

static COMPILERS: Compilers =
    Compilers { n: Mutex::new(0), freed: Condvar::new(), most: MAX_COMPILERS, most_time: MAX_TIME };

/// A running compilation.
struct CompileSlot(&'static Compilers);

impl Drop for CompileSlot {
    fn drop(&mut self) {
        *self.0.n.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

impl Compilers {
    /// Runs recursive work on a thread with a large stack.
    fn compile_on_thread<T: Send + 'static>(
        &'static self,
        field: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let slot = self.begin(field)?;
        let (sender, receiver) = mpsc::channel();
        let work = move || {
            let done = work();
            drop(slot);
            // After a timeout nothing receives this.
            drop(sender.send(done));
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(work);
        thread.map_err(|error| unusable(field, "a thread to compile it", error))?;
        receiver.recv_timeout(self.most_time).map_err(|_| Error::Constraint {
            field: field.into(),
            expected: format!("a constraint that compiles within {:?}", self.most_time),
            found: "too complex".into(),
        })
    }

    /// Waits for a free slot.
    fn begin(&'static self, field: &str) -> Result<CompileSlot, Error> {
        let n = self.n.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(n, self.most_time, |n| *n >= self.most);
        let (mut n, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(Error::Constraint {
                field: field.into(),
                expected: format!("at most {} compiling at a time", self.most),
                found: format!("all busy for {:?}; constraints that are too complex still compile", self.most_time),
            });
        }
        *n += 1;
        Ok(CompileSlot(self))
    }
}

/// The state after a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Several tokens are allowed.
    Open,
    /// These tokens must follow.
    Forced(Vec<u32>),
    /// The text is complete.
    Complete,
}

/// The state of a text that must match a constraint.
pub struct Guide {
    matcher: Matcher,
    field: String,
    vocab_size: u32,
    end_ids: Vec<u32>,
    /// The allowed tokens, once computed.
    allowed: Option<Vec<u32>>,
}

impl Debug for Guide {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("field", &self.field).finish_non_exhaustive()
    }
}

impl Guide {
    /// The bitmask of allowed tokens: `[ceil(V / 32)]`, lowest bit first.
    ///
    /// # Errors
    /// [`Error::Constraint`] if no token is allowed, or computing the mask takes too long.
    pub fn allowed(&mut self) -> Result<&[u32], Error> {
        if self.allowed.is_none() {
            self.allowed = Some(self.compute_allowed()?);
        }
        Ok(self.allowed.as_deref().unwrap_or_default())
    }

    fn compute_allowed(&mut self) -> Result<Vec<u32>, Error> {
        let expected = "a constraint that this vocabulary can match";
        let is_complete = self.matcher.is_accepting().map_err(|error| unusable(&self.field, expected, error))?;
        let mask = match self.matcher.compute_mask() {
            Ok(mask) => mask.as_slice().to_vec(),
            // No text may follow, but the end may.
            Err(_) if is_complete => Vec::new(),
            Err(error) => return Err(unusable(&self.field, expected, error)),
        };
        let mut allowed = mask;
        allowed.resize(mask_words(self.vocab_size) as usize, 0);
        if let (Some(last), rest @ 1..) = (allowed.last_mut(), self.vocab_size % 32) {
            *last &= (1 << rest) - 1;
        }
        for &id in &self.end_ids {
            let (word, bit) = (&mut allowed[id as usize / 32], 1 << (id % 32));
            *word = if is_complete { *word | bit } else { *word & !bit };
        }
        match allowed.iter().all(|&word| word == 0) {
            false => Ok(allowed),
            true => Err(unusable(&self.field, expected, "no token can follow")),
        }
    }

    /// Appends a token, which must be allowed and must not end the text.
    ///
    /// # Errors
    /// [`Error::Constraint`] if it is not allowed.
    pub fn accept(&mut self, id: u32) -> Result<Next, Error> {
        self.allowed = None;
        let consumed = self.matcher.consume_token(id);
        consumed.map_err(|error| unusable(&self.field, "a constraint that the text matches", error))?;
        if self.matcher.is_stopped() {
            return Ok(Next::Complete);
        }
        let mut forced = self.matcher.compute_ff_tokens();
        if let Some(end) = forced.iter().position(|id| self.end_ids.contains(id) || *id >= self.vocab_size) {
            forced.truncate(end);
        }
        Ok(if forced.is_empty() { Next::Open } else { Next::Forced(forced) })
    }
}

/// A tokenizer for llguidance.
struct GuidanceTokenizer {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl GuidanceTokenizer {
    fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Result<GuidanceTokenizer, Error> {
        /// Maximum bytes of a token, and so depth of the trie.
        const MAX_BYTES: usize = 512;
        /// Maximum bytes of all tokens, and so nodes of the trie.
        const MAX_ALL_BYTES: usize = 1 << 22;
        let mut words = Vec::with_capacity(vocab_size as usize);
        for id in 0..vocab_size {
            words.push(match tokenizer.token_type(id) {
                // Padding logits, and tokens that never occur in text.
                None | Some(TokenType::Unused) => Vec::new(),
                Some(kind) => {
                    let bytes = tokenizer.token_bytes(id)?;
                    let steers = kind.is_special() || tokenizer.eos_ids().contains(&id);
                    // Answer readers recognise marks only by their ids.
                    #[cfg(feature = "answer")]
                    let steers = steers || (kind == TokenType::UserDefined && crate::answer::is_mark(bytes));
                    match bytes.len() {
                        MAX_BYTES.. => Vec::new(),
                        _ if steers => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                        _ => bytes.to_vec(),
                    }
                }
            });
        }
        let all_bytes: usize = words.iter().map(Vec::len).sum();
        if all_bytes >= MAX_ALL_BYTES || vocab_size >= 1 << 21 {
            return Err(Error::Tokenizer {
                field: "tokens".into(),
                expected: format!("less than {MAX_ALL_BYTES} bytes and 2 million tokens, for constraints"),
                found: format!("{all_bytes} bytes in {vocab_size} tokens"),
            });
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, INVALID_TOKEN), &words);
        Ok(GuidanceTokenizer { tokenizer, trie })
    }
}

impl TokenizerEnv for GuidanceTokenizer {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.tokenizer.encode_within(text).filter(|ids| self.trie.decode_raw(ids) == text.as_bytes());
            // Greedy where the tokenizer changes the text: its ids do not match.
            ids.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.encode_within("").is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A timed-out reader keeps its slot until it finishes.
    #[test]
    fn stuck_grammar_compilations_keep_their_slot() {
        static FEW: Compilers =
            Compilers { n: Mutex::new(0), freed: Condvar::new(), most: 2, most_time: Duration::from_millis(20) };
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        for _ in 0..2 {
            let ended = ended.clone();
            let wait = move || drop(ended.lock().map(|ended| ended.recv()));
            let error = FEW.compile_on_thread("regex", wait).unwrap_err().to_string();
            assert!(error.contains("too complex"), "{error}");
        }
        let error = FEW.compile_on_thread("regex", || ()).unwrap_err().to_string();
        assert!(error.contains("at most 2 compiling at a time"), "{error}");
        drop(end);
        // They finish now.
        while *FEW.n.lock().unwrap() > 0 {
            thread::yield_now();
        }
        assert_eq!(FEW.compile_on_thread("regex", || 7).unwrap(), 7);
    }
}
