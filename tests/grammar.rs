//! Constrained output: completions match their constraints, on the CPU and on a GPU, and unusable constraints are
//! refused.

#[path = "grammar/bombs.rs"]
mod bombs;
use crate::common;
#[path = "grammar/gbnf.rs"]
mod gbnf;
#[path = "grammar/schemas.rs"]
pub mod schemas;

use std::sync::Arc;

use common::{Rng, block_on, executors, largest_difference};
use jsonschema::Validator;
use serde::de::IgnoredAny;
use serde_json::Value;
use tilewright::formats::Gguf;
use tilewright::generate::{ContextPolicy, StopReason};
use tilewright::grammar::{Constraint, Grammars, Next};
use tilewright::load::{ModelFile, vocab_from_gguf};
use tilewright::tokenizer::Tokenizer;
use tilewright::{Counters, Device, Error, GenerateOptions, LoadOptions, Model};

/// Prompt for the built-in model.
const PROMPT: &str = "Once upon a time";

fn builtin(device: &Device) -> Model {
    Model::from_file(device, ModelFile::builtin().unwrap(), LoadOptions::default()).unwrap()
}

/// Options with enough tokens to end.
fn options(constraint: Constraint) -> GenerateOptions {
    GenerateOptions {
        max_tokens: 3000,
        context_policy: ContextPolicy::Slide,
        constraint: Some(constraint),
        ..GenerateOptions::greedy(0)
    }
}

/// The same with sampling from all tokens.
fn drawn(constraint: Constraint, seed: u64) -> GenerateOptions {
    GenerateOptions { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(seed), ..options(constraint) }
}

fn schema(text: &str) -> Constraint {
    Constraint::json_schema(text).unwrap()
}

fn regex(pattern: &str) -> Constraint {
    Constraint::Regex(pattern.into())
}

/// Ids, text and stop reason of a generation.
fn run(model: &Model, prompt: &str, options: &GenerateOptions) -> (Vec<u32>, String, StopReason) {
    let mut session = model.session().unwrap();
    common::collect(&mut session.generate(prompt, options).unwrap())
}

/// `None` for a schema with an unresolved reference.
fn validator(schema: &Value) -> Option<Validator> {
    // Formats that are annotations only.
    let described = [
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    ];
    let options = jsonschema::options().should_validate_formats(true);
    described.into_iter().fold(options, |options, name| options.with_format(name, |_: &str| true)).build(schema).ok()
}

/// How a sample of texts ended.
#[derive(Debug, Default, PartialEq)]
struct Tally {
    valid: usize,
    invalid: usize,
    /// Cut by the token limit.
    cut: usize,
    /// JSON with a number too large for the parser.
    too_large: usize,
}

impl Tally {
    fn add(&mut self, schema: &Value, text: &str, is_whole: bool) {
        let parsed = serde_json::from_str::<Value>(text);
        let validator = validator(schema).unwrap();
        match parsed {
            _ if !is_whole => self.cut += 1,
            Ok(value) if validator.is_valid(&value) => self.valid += 1,
            Err(_) if serde_json::from_str::<IgnoredAny>(text).is_ok() => self.too_large += 1,
            found => {
                let reason = found.map(|value| validator.validate(&value).err().map(|error| error.to_string()));
                println!("{schema}\n  {text:?}\n  {reason:?}");
                self.invalid += 1;
            }
        }
    }
}

#[test]
fn output_of_500_schemas_validates() {
    let model = builtin(&common::cpu());
    let mut schemas = schemas::tools();
    let n = if common::is_full() { 500 } else { 100 };
    schemas.extend((0..).map(schemas::generated).take(n - schemas.len()));
    let (mut tally, mut n_tokens, mut n_passes) = (Tally::default(), 0, 0);
    for (seed, schema) in schemas.iter().enumerate() {
        let before = model.device().counters();
        let (ids, text, end) = run(&model, PROMPT, &drawn(Constraint::JsonSchema(schema.clone()), seed as u64));
        n_tokens += ids.len();
        n_passes += (model.device().counters() - before).submits;
        tally.add(schema, &text, matches!(end, StopReason::Complete | StopReason::Eos));
    }
    println!("{} schemas, {n_tokens} tokens, {n_passes} passes: {tally:?}", schemas.len());
    assert_eq!(tally, Tally { valid: schemas.len(), ..Tally::default() });
}

#[test]
fn json_object_constraint_yields_valid_json() {
    let model = builtin(&common::cpu());
    let mut whole = 0;
    for seed in 0..if common::is_full() { 60 } else { 15 } {
        let options = GenerateOptions { max_tokens: 200, ..drawn(Constraint::JsonObject, seed) };
        let (_, text, end) = run(&model, "", &options);
        if end != StopReason::MaxTokens {
            assert!(text.starts_with('{') && serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{text:?}");
            whole += 1;
        }
    }
    println!("{whole} objects ended within 200 tokens");
    assert!(whole > 0);
}

/// Samples from a guide's allowed tokens, uniformly except that ending tokens are more frequent.
fn random_text(
    grammars: &Arc<Grammars>,
    tokenizer: &Tokenizer,
    constraint: &Constraint,
    rng: &mut Rng,
) -> Result<Option<String>, Error> {
    const MOST: usize = 600;
    let mut guide = grammars.begin(constraint, tokenizer.eos_ids())?;
    let mut ids: Vec<u32> = Vec::new();
    let mut forced: Vec<u32> = Vec::new();
    while ids.len() < MOST {
        let words = guide.allowed()?;
        let is_allowed = |&id: &u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
        let id = if forced.is_empty() {
            let allowed: Vec<u32> = (0..32 * words.len() as u32).filter(is_allowed).collect();
            let ends = |&id: &u32| {
                tokenizer.eos_ids().contains(&id) || matches!(tokenizer.token_bytes(id), Ok(b"\"" | b"}" | b"]" | b","))
            };
            let closing: Vec<u32> = allowed.iter().copied().filter(ends).collect();
            let among = if closing.is_empty() || rng.below(4) > 0 { allowed } else { closing };
            among[rng.below(among.len())]
        } else {
            let id = forced.remove(0);
            assert!(is_allowed(&id), "{id} is forced and forbidden");
            id
        };
        if tokenizer.eos_ids().contains(&id) {
            return tokenizer.decode(&ids, true).map(Some);
        }
        ids.push(id);
        match guide.accept(id)? {
            Next::Complete => return tokenizer.decode(&ids, true).map(Some),
            Next::Forced(ids) if forced.is_empty() => forced = ids,
            _ => {}
        }
    }
    Ok(None)
}

/// Vocabularies of models, without the models.
fn vocabularies() -> Vec<(&'static str, Arc<Tokenizer>, Arc<Grammars>)> {
    let kinds =
        ["ggml-vocab-qwen35", "ggml-vocab-llama-spm", "ggml-vocab-gemma-4", "ggml-vocab-gpt-2", "ggml-vocab-phi-3"];
    let load = |name: &'static str| {
        let (tokenizer, grammars) = vocabulary(name)?;
        Some((name, tokenizer, grammars))
    };
    kinds.into_iter().take(if common::is_full() { kinds.len() } else { 2 }).filter_map(load).collect()
}

/// The test data's vocabulary of this name, with its grammars.
fn vocabulary(name: &str) -> Option<(Arc<Tokenizer>, Arc<Grammars>)> {
    let file = format!("vocab/{name}.gguf");
    let bytes = std::fs::read(common::data(&[&file])?.join(&file)).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_vocab(vocab_from_gguf(&gguf.metadata).unwrap()).unwrap());
    let grammars = Grammars::new(Arc::clone(&tokenizer), tokenizer.vocab_size() as u32 + 40).unwrap();
    Some((tokenizer, Arc::new(grammars)))
}

#[test]
fn random_allowed_tokens_satisfy_their_schema() {
    for (name, tokenizer, grammars) in vocabularies() {
        let mut tally = Tally::default();
        let mut schemas = schemas::tools();
        schemas.extend((1000..).map(schemas::generated).take(if common::is_full() { 200 } else { 20 }));
        let mut rng = Rng::new(5);
        for schema in &schemas {
            let text = random_text(&grammars, &tokenizer, &Constraint::JsonSchema(schema.clone()), &mut rng).unwrap();
            tally.add(schema, text.as_deref().unwrap_or_default(), text.is_some());
        }
        println!("{name}: {tally:?}");
        assert_eq!(tally, Tally { valid: schemas.len(), ..Tally::default() });
    }
}

/// Schemas of the official test suite. Schemas with unenforceable keywords are refused; output for the others is
/// valid.
#[test]
fn output_of_the_official_schema_suite_validates() {
    let Some(folder) = common::find_data("json-schema".as_ref()) else {
        return common::skip("no test data `json-schema`");
    };
    let [(name, tokenizer, grammars), ..] = &vocabularies()[..] else { return };
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    // The folder also holds the stamp of `scripts/test-data`.
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let (mut tally, mut refused, mut total, mut n_invalid) = (Tally::default(), 0, 0, 0);
    let mut rng = Rng::new(9);
    let bytes = single_bytes(tokenizer);
    for path in files {
        let suite: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for case in suite {
            let schema = &case["schema"];
            if validator(schema).is_none() {
                continue;
            }
            total += 1;
            let constraint = Constraint::JsonSchema(schema.clone());
            match grammars.begin(&constraint, tokenizer.eos_ids()) {
                Ok(_) => {
                    // A begun text can be completed.
                    let text = random_text(grammars, tokenizer, &constraint, &mut rng);
                    let text = text.unwrap_or_else(|error| panic!("{schema}: {error}"));
                    tally.add(schema, text.as_deref().unwrap_or_default(), text.is_some());
                    for test in case["tests"].as_array().unwrap().iter().filter(|test| test["valid"] == false) {
                        // Formats as annotations reject nothing.
                        let is_valid = validator(schema).unwrap().is_valid(&test["data"]);
                        let text = test["data"].to_string();
                        assert!(is_valid || !accepts(grammars, tokenizer, &bytes, schema, &text), "{schema}: {text}");
                        n_invalid += usize::from(!is_valid);
                    }
                }
                Err(Error::Constraint { .. }) => refused += 1,
                Err(error) => panic!("{schema}: {error}"),
            }
        }
    }
    println!("{name}: {total} schemas, {refused} refused, {tally:?}; {n_invalid} invalid texts are not accepted");
    assert_eq!(tally.invalid, 0);
    assert!(n_invalid > 200, "{n_invalid}");
}

/// Tokens that consist of a single byte, for each byte.
fn single_bytes(tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let mut tokens = vec![Vec::new(); 256];
    for id in 0..tokenizer.vocab_size() as u32 {
        if let Ok(&[byte]) = tokenizer.token_bytes(id) {
            tokens[usize::from(byte)].push(id);
        }
    }
    tokens
}

/// Whether the constraint allows a text, byte by byte.
fn accepts(grammars: &Arc<Grammars>, tokenizer: &Tokenizer, bytes: &[Vec<u32>], schema: &Value, text: &str) -> bool {
    let mut guide = grammars.begin(&Constraint::JsonSchema(schema.clone()), tokenizer.eos_ids()).unwrap();
    let allows = |words: &[u32], id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
    for (at, byte) in text.bytes().enumerate() {
        let words = guide.allowed().unwrap();
        let Some(&id) = bytes[usize::from(byte)].iter().find(|&&id| allows(words, id)) else { return false };
        if guide.accept(id).unwrap() == Next::Complete {
            return at + 1 == text.len();
        }
    }
    let words = guide.allowed().unwrap();
    tokenizer.eos_ids().iter().any(|&id| allows(words, id))
}

/// For any mix of keywords, output is valid, or the schema is refused before the first token.
#[test]
fn schema_of_mixed_keywords_validates_or_is_refused() {
    let model = builtin(&common::cpu());
    let (tokenizer, grammars) = (model.tokenizer().unwrap(), Arc::clone(model.grammars().unwrap()));
    let mut rng = Rng::new(11);
    let (mut tally, mut n_refused) = (Tally::default(), 0);
    let n = if common::is_full() { 20_000 } else { 1500 };
    for seed in 0..n {
        let schema = schemas::mixed(seed);
        assert!(validator(&schema).is_some(), "{schema}");
        let constraint = Constraint::JsonSchema(schema.clone());
        if grammars.begin(&constraint, tokenizer.eos_ids()).is_err() {
            n_refused += 1;
            continue;
        }
        for _ in 0..2 {
            let text = random_text(&grammars, tokenizer, &constraint, &mut rng);
            let text = text.unwrap_or_else(|error| panic!("{schema}: {error}"));
            tally.add(&schema, text.as_deref().unwrap_or_default(), text.is_some());
        }
    }
    println!("{n} schemas, {n_refused} refused, {tally:?}");
    assert_eq!(tally.invalid, 0);
    assert!(tally.valid * 2 > n as usize, "{n_refused} refused, {tally:?}");
}

/// A schema that asks for nothing unenforceable is accepted.
#[test]
fn schema_keywords_without_effect_are_accepted() {
    let model = builtin(&common::cpu());
    let (tokenizer, grammars) = (model.tokenizer().unwrap(), Arc::clone(model.grammars().unwrap()));
    let mut rng = Rng::new(3);
    for schema in schemas::neutral() {
        let text = random_text(&grammars, tokenizer, &Constraint::JsonSchema(schema.clone()), &mut rng);
        let text = text.unwrap_or_else(|error| panic!("{schema}: {error}"));
        if let Some(text) = text {
            let value: Value = serde_json::from_str(&text).unwrap();
            assert!(validator(&schema).unwrap().is_valid(&value), "{schema}: {text}");
        }
    }
}

/// Property names have a single spelling, so escapes cannot repeat one.
#[test]
fn declared_property_names_are_not_repeated() {
    let Some((_, tokenizer, grammars)) = vocabularies().into_iter().next() else { return };
    let bytes = single_bytes(&tokenizer);
    let taken: Value = serde_json::from_str(
        r#"{"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}, "type": "object"}"#,
    )
    .unwrap();
    for (text, is_accepted) in [
        (r#"{"a":1,"b":"x"}"#, true),
        (r#"{"a":1,"a":"x"}"#, false),
        (r#"{"a":1,"\u0061":"x"}"#, false),
        (r#"{"\u0061":"x"}"#, false),
        (r#"{"a":1,"\n":"x"}"#, true),
    ] {
        assert_eq!(accepts(&grammars, &tokenizer, &bytes, &taken, text), is_accepted, "{text}");
    }
}

#[test]
fn output_matches_its_regular_expression() {
    let model = builtin(&common::cpu());
    let patterns = [
        "yes|no",
        "[a-z]{3,20}",
        r"\d{4}-\d{2}-\d{2}",
        r"[A-Z][a-z]{1,9}( [a-z]{1,9}){2,4}\.",
        r"(a|bc)*d",
        r" +x{0,5}",
        r"[äöü]{2,4}ß",
        r"#[0-9a-f]{6}",
        r"(\+|-)?[1-9][0-9]{0,3}(\.[0-9]{1,2})?",
        "The (dog|cat|bird) (ran|sat|sang)(, and the (dog|cat) (ran|sat)){0,2}\\.",
        r"a/b\n[.]{3}",
        "日本(語|人)?",
    ];
    for (seed, pattern) in patterns.into_iter().enumerate() {
        let whole = regex::Regex::new(&format!("^(?:{pattern})$")).unwrap();
        for options in [drawn(regex(pattern), seed as u64), options(regex(pattern))] {
            for prompt in [PROMPT, ""] {
                let (ids, text, end) = run(&model, prompt, &options);
                assert!(matches!(end, StopReason::Complete | StopReason::Eos), "{pattern}: {end:?}");
                assert!(whole.is_match(&text), "{pattern}: {text:?}, {ids:?}");
            }
        }
    }
}

/// Sums and products with parentheses: whether they make up the whole text.
fn is_expression(text: &str) -> bool {
    fn sum(rest: &mut &[u8]) -> bool {
        product(rest)
            && loop {
                match rest.first() {
                    Some(b'+' | b'-') => *rest = &rest[1..],
                    _ => break true,
                }
                if !product(rest) {
                    break false;
                }
            }
    }
    fn product(rest: &mut &[u8]) -> bool {
        let n = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if n > 0 {
            *rest = &rest[n..];
            return n <= 3;
        }
        let Some((b'(', inner)) = rest.split_first() else { return false };
        *rest = inner;
        let is_sum = sum(rest);
        let Some((b')', after)) = rest.split_first() else { return false };
        *rest = after;
        is_sum
    }
    let mut rest = text.as_bytes();
    sum(&mut rest) && rest.is_empty()
}

#[test]
fn output_matches_its_lark_grammar() {
    const GRAMMAR: &str =
        "start: sum\nsum: term ((\"+\" | \"-\") term)*\nterm: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,3}/";
    let model = builtin(&common::cpu());
    let mut whole = 0;
    for seed in 0..30 {
        let options = GenerateOptions { max_tokens: 80, ..drawn(Constraint::Lark(GRAMMAR.into()), seed) };
        let (_, text, end) = run(&model, PROMPT, &options);
        if end != StopReason::MaxTokens {
            assert!(is_expression(&text), "{text:?}");
            whole += 1;
        }
    }
    println!("{whole} of 30 expressions ended within 80 tokens");
    assert!(whole >= 10);
    assert!(is_expression("1+(22-(3))-4") && !is_expression("1+") && !is_expression("(1") && !is_expression("1234"));
}

/// Constraints of each kind, for greedy completions.
fn some_constraints() -> Vec<Constraint> {
    let mut all: Vec<Constraint> = schemas::tools().into_iter().take(4).map(Constraint::JsonSchema).collect();
    all.extend([
        regex("[A-Z][a-z ]{5,60}[.]"),
        regex("(yes|no), because .{0,40}"),
        Constraint::Lark("start: item (\", \" item){2,4}\nitem: /[a-z]{2,8}/ | \"the \" /[a-z]{2,8}/".into()),
    ]);
    all
}

#[test]
fn constrained_output_is_equal_on_gpu_and_cpu() {
    let devices = executors();
    let models: Vec<Model> = devices.iter().map(builtin).collect();
    for constraint in some_constraints() {
        let options = GenerateOptions { max_tokens: 120, ..options(constraint.clone()) };
        let texts: Vec<_> = models.iter().map(|model| run(model, PROMPT, &options)).collect();
        println!("{:?}", texts[0].1);
        for text in &texts[1..] {
            assert_eq!(text, &texts[0], "{constraint:?}");
        }
    }
    devices.iter().for_each(common::assert_tested);
}

/// Each greedy token is the likeliest allowed one, whether a pass chose it or it was forced and computed in a batch.
#[test]
fn each_token_is_the_likeliest_allowed_one() {
    for device in executors() {
        let model = builtin(&device);
        let prompt = model.encode(PROMPT).unwrap();
        let mut n_forced = 0;
        for constraint in some_constraints().into_iter().take(if device.is_gpu() { 2 } else { usize::MAX }) {
            let end_ids = model.tokenizer().unwrap().eos_ids();
            let before = device.counters();
            let (ids, ..) = run(&model, PROMPT, &GenerateOptions { max_tokens: 80, ..options(constraint.clone()) });
            let n_passes = (device.counters() - before).submits as usize;
            n_forced += ids.len().saturating_sub(n_passes);
            let trace = block_on(model.trace(&[&prompt[..], &ids].concat())).unwrap();
            let n_vocab = model.config().vocab_size as usize;
            let mut guide = model.grammars().unwrap().begin(&constraint, end_ids).unwrap();
            for (i, &id) in ids.iter().enumerate() {
                let logits = &trace.logits[(prompt.len() + i - 1) * n_vocab..][..n_vocab];
                let allowed = guide.allowed().unwrap();
                let is_allowed = |id: usize| allowed[id / 32] >> (id % 32) & 1 == 1;
                assert!(is_allowed(id as usize), "{constraint:?}: token {i} is not allowed");
                let best = (0..n_vocab).filter(|&id| is_allowed(id)).map(|id| logits[id]).fold(f32::MIN, f32::max);
                assert!(
                    logits[id as usize] > best - 0.05,
                    "{constraint:?}: token {i} has {} of {best}",
                    logits[id as usize]
                );
                if !end_ids.contains(&id) {
                    guide.accept(id).unwrap();
                }
            }
        }
        println!("{}: {n_forced} tokens without a pass of their own", device.info().name);
        assert!(n_forced > 0);
    }
}

/// Counters for 32 tokens after the first eight.
fn counts(device: &Device, model: &Model, options: &GenerateOptions) -> Counters {
    let mut session = model.session().unwrap();
    let mut generation = session.generate(PROMPT, options).unwrap();
    let mut take = |n| (0..n).for_each(|_| drop(block_on(generation.next()).unwrap().unwrap()));
    take(8);
    let before = device.counters();
    take(32);
    device.counters() - before
}

#[test]
fn constraint_adds_one_dispatch_per_token() {
    for device in executors() {
        let model = builtin(&device);
        for (temperature, repeat_penalty) in [(0.0, 1.0), (0.8, 1.1)] {
            let plain = GenerateOptions {
                max_tokens: 60,
                temperature,
                repeat_penalty,
                ignore_eos: true,
                tokens_per_submit: Some(1),
                submits_in_flight: Some(1),
                ..GenerateOptions::default()
            };
            let without = counts(&device, &model, &plain);
            // None of these tokens is forced.
            let options = GenerateOptions { constraint: Some(regex("[a-z ]{500}")), ..plain };
            let did = counts(&device, &model, &options);
            assert_eq!((did.buffers_created, did.bind_groups_created, did.pipelines_created), (0, 0, 0), "{did:?}");
            assert_eq!((without.submits, did.submits), (32, 32), "{did:?}");
            assert_eq!(did.dispatches, without.dispatches + 32, "{did:?}");
            let mask_bytes = 4 * u64::from(model.config().vocab_size.div_ceil(32));
            assert_eq!((without.bytes_uploaded, did.bytes_uploaded), (0, 32 * mask_bytes), "{did:?}");
            assert!(did.bytes_read <= 32 * 64, "{did:?}");
        }
    }
}

#[test]
fn a_constraint_ends_with_its_generation() {
    let model = builtin(&common::cpu());
    let plain = GenerateOptions::greedy(20);
    let mut session = model.session().unwrap();
    let mut ids = model.encode(PROMPT).unwrap();
    let constrained = options(schema(
        r#"{"type": "object", "properties": {"name": {"const": "Tom"}}, "required": ["name"], "additionalProperties": false}"#,
    ));
    let mut generation = session.generate_ids(&ids, &constrained).unwrap();
    let mut text = String::new();
    while let Some(piece) = block_on(generation.next()) {
        let piece = piece.unwrap();
        ids.push(piece.id);
        text += &piece.text;
    }
    assert_eq!(generation.stop_reason(), Some(StopReason::Complete));
    assert_eq!(text.split_whitespace().collect::<String>(), r#"{"name":"Tom"}"#);
    drop(generation);
    assert_eq!(session.tokens(), ids);
    // The session continues like one given the same tokens.
    let take = |generation: Result<tilewright::generate::Generation<'_>, Error>| {
        let (mut generation, mut ids) = (generation.unwrap(), Vec::new());
        while let Some(piece) = block_on(generation.next()) {
            ids.push(piece.unwrap().id);
        }
        ids
    };
    let found = take(session.generate_ids(&[], &plain));
    assert_eq!(found, take(model.session().unwrap().generate_ids(&ids, &plain)));
    let logits = [block_on(session.logits(&[])), block_on(model.session().unwrap().logits(session.tokens()))]
        .map(Result::unwrap);
    assert!(largest_difference(&logits[0], &logits[1]) < 0.05);
}

#[test]
fn generation_options_keep_their_meaning_when_constrained() {
    let model = builtin(&common::cpu());
    // End tokens come only where the text is complete, and then belong to it.
    let (ids, text, end) = run(&model, PROMPT, &options(regex("[a-z]{3}( [a-z]{1,5}){2,90}[.]?")));
    let is_end = |id: &u32| model.tokenizer().unwrap().eos_ids().contains(id);
    assert!(end == StopReason::Eos && is_end(ids.last().unwrap()) || end == StopReason::Complete, "{end:?}: {text:?}");
    assert!(ids[..ids.len() - 1].iter().all(|id| !is_end(id)));
    // A pattern without a last character never ends if end tokens are ignored.
    let (_, text, end) =
        run(&model, PROMPT, &GenerateOptions { ignore_eos: true, max_tokens: 50, ..options(regex("[a-z ]+")) });
    assert!(end == StopReason::MaxTokens && text.chars().all(|c| c == ' ' || c.is_ascii_lowercase()), "{text:?}");
    // Stop strings and ids.
    let stopping = GenerateOptions { stop: vec!["aab".into()], ..options(regex("a{20}b{20}")) };
    assert_eq!(run(&model, PROMPT, &stopping).1.trim_end_matches('a'), "");
    assert_eq!(run(&model, PROMPT, &stopping).2, StopReason::StopText);
    let stop_ids = model.tokenizer().unwrap().encode("x", false).unwrap();
    let (ids, text, end) = run(
        &model,
        PROMPT,
        &GenerateOptions { stop_ids: stop_ids.clone(), ignore_eos: false, ..options(regex("y[xy]{5}z")) },
    );
    // A stop token does not occur before the text is complete, even if the pattern would allow it.
    assert!(end == StopReason::Complete && text.len() == 7 && !ids.iter().any(|id| stop_ids.contains(id)), "{text:?}");
    // A penalty keeps forbidden tokens at finite logits.
    let penalised = GenerateOptions { repeat_penalty: 2.0, ..drawn(regex("(ab){30}"), 3) };
    assert_eq!(run(&model, PROMPT, &penalised).1, "ab".repeat(30));
    for (top_k, top_p, min_p, temperature) in
        [(1, 1.0, 0.0, 0.7), (40, 0.9, 0.05, 0.8), (0, 0.5, 0.0, 100.0), (3, 1.0, 1.0, 0.001)]
    {
        let options = GenerateOptions { top_k, top_p, min_p, temperature, ..drawn(regex("[xyz]{40}"), 1) };
        let text = run(&model, PROMPT, &options).1;
        assert!(text.len() == 40 && text.chars().all(|c| "xyz".contains(c)), "{text:?}");
    }
    // No draft tokens.
    let mut session = model.session().unwrap();
    let guessing = GenerateOptions { prompt_lookup: 4, ..options(regex("a")) };
    let error = session.generate(PROMPT, &guessing).err().unwrap();
    assert!(
        matches!(&error, Error::Option { option: "prompt_lookup", .. }) && error.to_string().contains("constraint"),
        "{error}"
    );
    let mut draft = model.session().unwrap();
    let mut generation = session.generate(PROMPT, &options(regex("a"))).unwrap();
    assert!(matches!(generation.draft_with(&mut draft, 3), Err(Error::Option { option: "draft", .. })));
}

#[test]
fn hostile_constraints_are_refused() {
    let grammars = Arc::clone(builtin(&common::cpu()).grammars().unwrap());
    for (constraint, says) in bombs::all() {
        let shown: String = format!("{constraint:?}").chars().take(150).collect();
        let error = grammars.begin(&constraint, &[2]).expect_err(&shown);
        assert!(matches!(error, Error::Constraint { .. }), "{shown}: {error}");
        let error = error.to_string();
        assert!(error.contains(says) && error.len() < 700, "{shown}: {error}, which does not say {says:?}");
    }
    for constraint in bombs::large() {
        let shown: String = format!("{constraint:?}").chars().take(150).collect();
        // On a busy machine, a constraint may take longer than it is allowed to.
        let is_late = |error: &Error| error.to_string().contains("compiles within");
        let mut begun = (0..10).map(|_| grammars.begin(&constraint, &[2]).map(drop));
        let begun = begun.find(|begun| !begun.as_ref().is_err_and(is_late));
        begun.expect(&shown).unwrap_or_else(|error| panic!("{shown}: {error}"));
    }
    // The session is unchanged.
    let model = builtin(&common::cpu());
    let mut session = model.session().unwrap();
    assert!(matches!(session.generate(PROMPT, &options(regex("("))), Err(Error::Constraint { .. })));
    assert!(session.tokens().is_empty());
    let error = Constraint::json_schema("{").unwrap_err();
    assert!(matches!(&error, Error::Constraint { field, .. } if field == "json_schema"), "{error}");
}
