//! Constraints on generated text: a JSON schema, a regular expression or a grammar, and which tokens may come next in a text
//! that must match it. What a text may look like is decided by the crate `llguidance`, byte by byte: a derivative of regular
//! expressions reads words and an Earley parser what they make. Here it learns the vocabulary, and gets only what it can
//! take in a short time.
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
#[cfg(not(target_arch = "wasm32"))]
use std::sync::{Condvar, Mutex, PoisonError, mpsc};
#[cfg(not(target_arch = "wasm32"))]
use std::thread;
#[cfg(not(target_arch = "wasm32"))]
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{JsonCompileOptions, Matcher, ParserFactory, TokenParser};
use serde_json::{Value, json};
use toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::error::Error;
use crate::kernels::mask_words;
use crate::tokenizer::{TokenType, Tokenizer};
#[cfg(feature = "answer")]
pub use tools::{ToolChoice, ToolGrammar, ToolRules};

/// Stack of the thread that reads a grammar: references that follow each other are read by functions that call each other.
/// The limits leave room for some thousand. What is not used of it takes no memory.
#[cfg(not(target_arch = "wasm32"))]
const STACK_BYTES: usize = 256 << 20;
/// The limits keep reading a grammar within a fraction of this. What they do not foresee ends here.
#[cfg(not(target_arch = "wasm32"))]
const MOST_TIME: Duration = Duration::from_secs(5);
/// Grammars that are read at a time, those included that took too long and are still read: nothing can end them.
#[cfg(not(target_arch = "wasm32"))]
const MOST_READERS: usize = 4;
/// White space between two parts of a JSON text: a space, or a new line with its indentation. Without a limit, a model may go
/// on with spaces until the text is as long as it may be.
const WHITE_SPACE: &str = r"\x20|\n\x20{0,40}|\n\t{0,10}";
/// Letters behind a backslash in JSON. Not `u`: with it a name could be written in two ways, and come twice.
const ESCAPES: &str = "nrbtf\\\"";

/// What a generated text must match, from its first character to its last.
///
/// Keywords of JSON Schema that are known and cannot be enforced (`not`, `if`, `uniqueItems`, `contains`, `propertyNames`,
/// `dependentRequired` and the like) are refused where they say something: `uniqueItems: false` or `not: false` change
/// nothing. Unknown ones are ignored, as the specification has it. Of `oneOf`, the alternatives must plainly exclude each
/// other, and in `const` and `enum` integers beyond 2^53 are refused. `minProperties` may ask for one property that `required`
/// does not name. `$ref` leads to places in the same schema, `#/...`. The formats `date`, `date-time`, `duration`, `email`,
/// `hostname`, `ipv4`, `ipv6`, `time`, `uri` and `uuid` are enforced, others only describe. A schema of which a text could
/// begin and not end is refused.
/// Properties come in the schema's order. What may be of any length (a text without `maxLength`, an object with any further
/// properties) ends when the model ends it. Details: <https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md>.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// A JSON object of any content.
    JsonObject,
    /// A JSON text that is valid by this schema.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole. Syntax of the crate `regex`, without assertions.
    Regex(String),
    /// A text of this grammar, in llguidance's variant of Lark's syntax; its rule `start` is the whole text. See
    /// <https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>.
    Lark(String),
    /// A text of this grammar, in llama.cpp's syntax; its rule `root` is the whole text. Rules must not begin with themselves,
    /// as there. See <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>.
    Gbnf(String),
    /// An answer whose calls of tools can be read and are valid by the tools' schemas; see [`Constraint::tools`].
    #[cfg(feature = "answer")]
    Tools(ToolGrammar),
}

impl Constraint {
    /// The constraint of a schema's text.
    ///
    /// # Errors
    /// [`Error::Constraint`] if it is no JSON.
    pub fn json_schema(text: &str) -> Result<Constraint, Error> {
        let parsed = serde_json::from_str(text);
        parsed.map(Constraint::JsonSchema).map_err(|error| unusable("json_schema", "a schema in JSON", error))
    }

    /// The constraint of a grammar's text: llama.cpp's if it has a rule `root ::=`, or else Lark's.
    pub fn grammar_of(text: String) -> Constraint {
        match gbnf::is_gbnf(&text) {
            true => Constraint::Gbnf(text),
            false => Constraint::Lark(text),
        }
    }

    /// What errors call it.
    fn field(&self) -> &'static str {
        match self {
            Constraint::JsonObject => "json_object",
            Constraint::JsonSchema(_) => "json_schema",
            Constraint::Regex(_) => "regex",
            Constraint::Lark(_) => "lark",
            Constraint::Gbnf(_) => "gbnf",
            #[cfg(feature = "answer")]
            Constraint::Tools(_) => "tools",
        }
    }

    /// Schemas that it is made of, by the names that errors call them.
    fn parts(&self) -> Vec<(String, TopLevelGrammar)> {
        match self {
            #[cfg(feature = "answer")]
            Constraint::Tools(grammar) => grammar.parts(),
            _ => Vec::new(),
        }
    }

    /// The grammar as llguidance takes it.
    fn grammar(&self) -> Result<TopLevelGrammar, Error> {
        let of_schema = |schema: &Value| -> Result<TopLevelGrammar, limits::Excess> {
            let mut schema = schema.clone();
            if let Some(keywords) = schema.as_object_mut() {
                // How a schema is read is not for the schema to say.
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
            // Checked when it was made.
            #[cfg(feature = "answer")]
            Constraint::Tools(grammar) => Ok(TopLevelGrammar::from_lark(grammar.lark.clone())),
        };
        checked.map_err(|excess| Error::Constraint {
            field: format!("{}: {}", self.field(), excess.of),
            expected: excess.expected,
            found: excess.found,
        })
    }
}

/// [`Error::Constraint`] with the reason that was found.
fn unusable(field: &str, expected: &str, reason: impl Display) -> Error {
    let reason = reason.to_string();
    // What follows in angle brackets is llguidance's own state.
    let reason = reason.split("\n<").next().unwrap_or_default().trim();
    // The reason comes last, what it is about first.
    let (n, last) = (reason.chars().count(), 200);
    let shown: String = match n > 2 * last {
        true => reason.chars().take(last).chain(" ... ".chars()).chain(reason.chars().skip(n - last)).collect(),
        false => reason.into(),
    };
    Error::Constraint { field: field.into(), expected: expected.into(), found: format!("unusable ({shown})") }
}

/// A vocabulary that constraints can be applied to. To make one takes up to a second and a few dozen MB for a large
/// vocabulary; a model makes it when its first constrained generation begins.
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
    /// The vocabulary of a model with `vocab_size` logits, which may be more or fewer than the tokenizer has tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the vocabulary is too large.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Result<Grammars, Error> {
        let env: TokEnv = Arc::new(Vocabulary::new(tokenizer, vocab_size)?);
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| Error::Tokenizer {
            field: "tokens".into(),
            expected: "a vocabulary for constraints".into(),
            found: error.to_string(),
        })?;
        factory.quiet();
        // Half of the usual fuel takes 10 ms at most.
        let fuel = ParserLimits::default().initial_lexer_fuel / 2;
        *factory.limits_mut() =
            ParserLimits { verbose_errors: false, initial_lexer_fuel: fuel, ..ParserLimits::default() };
        Ok(Grammars { factory, vocab_size })
    }

    /// Reads a grammar; also why it cannot be used, if so.
    fn read(&self, grammar: TopLevelGrammar) -> (Matcher, Option<String>) {
        let mut parser = self.factory.create_parser(grammar);
        let reason = parser.as_mut().ok().and_then(dead_end);
        let matcher = Matcher::new(parser);
        let error = matcher.get_error();
        (matcher, error.or(reason))
    }

    /// Begins a text that must match `constraint`. `end_ids` are the tokens that may end it where it is complete.
    ///
    /// # Errors
    /// [`Error::Constraint`] naming the kind of constraint, with llguidance's reason, if it is invalid, contradicts itself,
    /// cannot be enforced or is too large, if no token can begin a text of it or one could begin and not end, or if too many
    /// that are too complex are still being read.
    pub fn begin(self: &Arc<Self>, constraint: &Constraint, end_ids: &[u32]) -> Result<Guide, Error> {
        let (field, grammar) = (constraint.field(), constraint.grammar()?);
        let parts = constraint.parts();
        let this = Arc::clone(self);
        let read = move || {
            let (matcher, reason) = this.read(grammar);
            // What it is that cannot be used.
            let reason = reason.map(|reason| {
                let of_part = |(name, grammar): (String, TopLevelGrammar)| {
                    Some((format!("{field}: {name}"), this.read(grammar).1?))
                };
                parts.into_iter().find_map(of_part).unwrap_or((field.into(), reason))
            });
            (matcher, reason)
        };
        #[cfg(not(target_arch = "wasm32"))]
        let (matcher, reason) = READERS.with_stack(field, read)?;
        // There are no threads here: where the stack is too small the module ends, and whoever runs it makes another one.
        #[cfg(target_arch = "wasm32")]
        let (matcher, reason) = read();
        if let Some((field, reason)) = reason {
            return Err(unusable(&field, "one that can be enforced", reason));
        }
        let end_ids = end_ids.iter().copied().filter(|&id| id < self.vocab_size).collect();
        let mut guide = Guide { matcher, field, vocab_size: self.vocab_size, end_ids, allowed: None };
        guide.allowed()?;
        Ok(guide)
    }
}

/// Why a grammar is refused of which a text could begin and not end: a part that follows in it matches no text, such as a
/// pattern of names that are all taken. Every symbol that can be reached has to end in some text.
fn dead_end(parser: &mut TokenParser) -> Option<String> {
    let grammar = parser.parser.grammar();
    // Conditions on parameters decide which rules there are.
    if grammar.parametric() {
        return None;
    }
    // Of each symbol its rules, by the numbers of their symbols, in the order in which they are found.
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
        // Those that were found last end first.
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
    Some(format!("a text of it may come to a place where nothing matches, at {}", names.get(at)?))
}

/// Those who read grammars.
#[cfg(not(target_arch = "wasm32"))]
struct Readers {
    n: Mutex<usize>,
    freed: Condvar,
    most: usize,
    most_time: Duration,
}

#[cfg(not(target_arch = "wasm32"))]
static READERS: Readers = Readers { n: Mutex::new(0), freed: Condvar::new(), most: MOST_READERS, most_time: MOST_TIME };

/// A reader, until it is done.
#[cfg(not(target_arch = "wasm32"))]
struct Reader(&'static Readers);

#[cfg(not(target_arch = "wasm32"))]
impl Drop for Reader {
    fn drop(&mut self) {
        *self.0.n.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Readers {
    /// Does what recurses, in a thread with a stack that suffices.
    fn with_stack<T: Send + 'static>(
        &'static self,
        field: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let reader = self.begin(field)?;
        let (sender, receiver) = mpsc::channel();
        let work = move || {
            let done = work();
            drop(reader);
            // Nobody waits for it any more if it took too long.
            drop(sender.send(done));
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES).spawn(work);
        thread.map_err(|error| unusable(field, "a thread to read it", error))?;
        receiver.recv_timeout(self.most_time).map_err(|_| Error::Constraint {
            field: field.into(),
            expected: format!("one that is read within {:?}", self.most_time),
            found: "too complex".into(),
        })
    }

    /// Waits until one more may be read.
    fn begin(&'static self, field: &str) -> Result<Reader, Error> {
        let n = self.n.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(n, self.most_time, |n| *n >= self.most);
        let (mut n, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(Error::Constraint {
                field: field.into(),
                expected: format!("at most {} that are read at a time", self.most),
                found: format!("as many for {:?}; those that are too complex are read to their end", self.most_time),
            });
        }
        *n += 1;
        Ok(Reader(self))
    }
}

/// Where a text goes after a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Several tokens may come.
    Open,
    /// These must come.
    Forced(Vec<u32>),
    /// None may: the text matches and cannot go on.
    Complete,
}

/// A text in progress that must match a constraint.
pub struct Guide {
    matcher: Matcher,
    field: &'static str,
    vocab_size: u32,
    end_ids: Vec<u32>,
    /// Those that may come next, once that was asked.
    allowed: Option<Vec<u32>>,
}

impl Debug for Guide {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("field", &self.field).finish_non_exhaustive()
    }
}

impl Guide {
    /// The tokens that may come next: a bit for each of the vocabulary, `[ceil(V / 32)]`, the lowest first.
    ///
    /// # Errors
    /// [`Error::Constraint`] if there is none, or if to find them takes too long.
    pub fn allowed(&mut self) -> Result<&[u32], Error> {
        if self.allowed.is_none() {
            self.allowed = Some(self.compute_allowed()?);
        }
        Ok(self.allowed.as_deref().unwrap_or_default())
    }

    fn compute_allowed(&mut self) -> Result<Vec<u32>, Error> {
        let expected = "one that a text can match with this vocabulary";
        let is_complete = self.matcher.is_accepting().map_err(|error| unusable(self.field, expected, error))?;
        let mask = match self.matcher.compute_mask() {
            Ok(mask) => mask.as_slice().to_vec(),
            // No text may follow; an end may.
            Err(_) if is_complete => Vec::new(),
            Err(error) => return Err(unusable(self.field, expected, error)),
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
            true => Err(unusable(self.field, expected, "no token can follow")),
        }
    }

    /// Goes on with a token, which is one of those that may come next and none that ends the text.
    ///
    /// # Errors
    /// [`Error::Constraint`] if it may not come.
    pub fn accept(&mut self, id: u32) -> Result<Next, Error> {
        self.allowed = None;
        let consumed = self.matcher.consume_token(id);
        consumed.map_err(|error| unusable(self.field, "one that the text matches", error))?;
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

/// A tokenizer as llguidance sees it.
struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32) -> Result<Vocabulary, Error> {
        /// Bytes of a token: a trie has so many levels.
        const MOST_BYTES: usize = 512;
        /// Bytes of all tokens: a trie has so many nodes.
        const MOST_ALL_BYTES: usize = 1 << 22;
        let mut words = Vec::with_capacity(vocab_size as usize);
        for id in 0..vocab_size {
            words.push(match tokenizer.token_type(id) {
                // Logits beyond the vocabulary, and tokens that no text has.
                None | Some(TokenType::Unused) => Vec::new(),
                Some(kind) => {
                    let bytes = tokenizer.token_bytes(id)?;
                    let steers = kind.is_special() || tokenizer.eos_ids().contains(&id);
                    // Those who read answers know the marks by their ids alone.
                    #[cfg(feature = "answer")]
                    let steers = steers || (kind == TokenType::UserDefined && crate::answer::is_mark(bytes));
                    match bytes.len() {
                        MOST_BYTES.. => Vec::new(),
                        _ if steers => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                        _ => bytes.to_vec(),
                    }
                }
            });
        }
        let all_bytes: usize = words.iter().map(Vec::len).sum();
        if all_bytes >= MOST_ALL_BYTES || vocab_size >= 1 << 21 {
            return Err(Error::Tokenizer {
                field: "tokens".into(),
                expected: format!("less than {MOST_ALL_BYTES} bytes in all and 2 million tokens, for constraints"),
                found: format!("{all_bytes} bytes in {vocab_size} tokens"),
            });
        }
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, INVALID_TOKEN), &words);
        Ok(Vocabulary { tokenizer, trie })
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.tokenizer.encode_within(text).filter(|ids| self.trie.decode_raw(ids) == text.as_bytes());
            // A tokenizer that changes the text would be told so much later.
            ids.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.encode_within("").is_some()
    }
}

#[cfg(all(test, not(target_arch = "wasm32")))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Who takes too long keeps a place until it is done.
    #[test]
    fn readers_that_do_not_end_are_counted() {
        static FEW: Readers =
            Readers { n: Mutex::new(0), freed: Condvar::new(), most: 2, most_time: Duration::from_millis(20) };
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        for _ in 0..2 {
            let ended = ended.clone();
            let wait = move || drop(ended.lock().map(|ended| ended.recv()));
            let error = FEW.with_stack("regex", wait).unwrap_err().to_string();
            assert!(error.contains("too complex"), "{error}");
        }
        let error = FEW.with_stack("regex", || ()).unwrap_err().to_string();
        assert!(error.contains("at most 2 that are read at a time"), "{error}");
        drop(end);
        // They end now, in their own time.
        while *FEW.n.lock().unwrap() > 0 {
            thread::yield_now();
        }
        assert_eq!(FEW.with_stack("regex", || 7).unwrap(), 7);
    }
}
