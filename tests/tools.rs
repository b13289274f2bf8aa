//! Tool calls enforced by a grammar: an `AnswerReader` parses any sampled output, and arguments match the tool's
//! schema.

use crate::common;
#[path = "tools/sets.rs"]
mod sets;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::Rng;
use serde_json::{Value, json};
use tilewright::answer::{AnswerReader, Event, Format, ToolCall};
use tilewright::formats::Gguf;
use tilewright::generate::{ContextPolicy, StopReason};
use tilewright::grammar::{Constraint, Grammars, Next, ToolChoice, ToolRules};
use tilewright::load::vocab_from_gguf;
use tilewright::tokenizer::{EncodeOptions, TokenType, Tokenizer};
use tilewright::{Error, GenerateOptions, Model};

/// Formats with calls.
fn formats() -> impl Iterator<Item = Format> {
    Format::ALL.into_iter().filter(|format| *format != Format::Plain)
}

/// All marks that are tokens in some vocabulary.
const MARKS: [&str; 47] = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<|channel>",
    "<channel|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_tag|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<seed:think>",
    "</seed:think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_calls_section_end|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
];

struct Vocabulary {
    name: String,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
}

/// A vocabulary with all marks as tokens of one type, or without them.
fn vocabulary(name: &str, path: PathBuf, kind: Option<TokenType>) -> Vocabulary {
    let bytes = std::fs::read(path).unwrap();
    let mut vocab = vocab_from_gguf(&Gguf::parse(&bytes, bytes.len() as u64).unwrap().metadata).unwrap();
    if vocab.token_types.is_empty() {
        vocab.token_types = vec![TokenType::Normal; vocab.tokens.len()];
    }
    for mark in MARKS {
        match (vocab.tokens.iter().position(|token| token == mark), kind) {
            (Some(at), Some(kind)) => vocab.token_types[at] = kind,
            (Some(at), None) => {
                vocab.tokens[at] = format!("<unused {at}>");
                vocab.token_types[at] = TokenType::Unused;
            }
            (None, Some(kind)) => {
                vocab.tokens.push(mark.into());
                vocab.token_types.push(kind);
                if !vocab.scores.is_empty() {
                    vocab.scores.push(0.0);
                }
            }
            (None, None) => {}
        }
    }
    let tokenizer = Arc::new(Tokenizer::from_vocab(vocab).unwrap());
    let grammars = Arc::new(Grammars::new(Arc::clone(&tokenizer), tokenizer.vocab_size() as u32).unwrap());
    let name = format!("{name}, {}", kind.map_or("no marks".into(), |kind| format!("marks {kind:?}")));
    Vocabulary { name, tokenizer, grammars }
}

fn vocabularies() -> Vec<Vocabulary> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders/qwen3-embedding/model.gguf");
    let mut paths = vec![("qwen3-embedding", own)];
    let known = ["qwen35", "gemma-4", "llama-bpe"];
    for name in known.into_iter().take(if common::is_full() { 3 } else { 1 }) {
        match common::find_data(Path::new(&format!("vocab/ggml-vocab-{name}.gguf"))) {
            Some(path) => paths.push((name, path)),
            None => common::skip_part(format_args!("no vocabulary `{name}`")),
        }
    }
    let kinds = [Some(TokenType::Control), Some(TokenType::UserDefined), None];
    paths.iter().flat_map(|(name, path)| kinds.map(|kind| vocabulary(name, path.clone(), kind))).collect()
}

/// Part of a text to write: so many arbitrary tokens, or this string.
enum Step {
    Free(usize),
    Write(&'static str),
}

/// Tokens that end or close something, in any format.
const ENDS: [&str; 25] = [
    "</think>",
    "[/THINK]",
    "<channel|>",
    "<|end|>",
    "</tool_call>",
    "<tool_call|>",
    "<|tool_call_end|>",
    "<|\"|>",
    "\"",
    "}",
    "]",
    ")",
    ", ",
    "\n</parameter>\n",
    "</function>",
    "</arg_value>",
    "</seed:think>",
    "</seed:tool_call>",
    "</parameter>\n",
    "<｜tool▁calls▁end｜>",
    "</｜DSML｜parameter>\n",
    "</｜DSML｜function_calls>",
    "<|tool_calls_section_end|>",
    "</minimax:tool_call>",
    "1",
];

/// Samples from allowed tokens uniformly, and sometimes one of those that end something. `None` for a text that does
/// not end.
fn draw(
    vocabulary: &Vocabulary,
    constraint: &Constraint,
    steps: &[Step],
    rng: &mut Rng,
) -> Result<Option<Vec<u32>>, Error> {
    const MOST: usize = 700;
    let tokenizer = &vocabulary.tokenizer;
    let ids_of = |text: &str| match tokenizer.special_id(text) {
        Some(id) => vec![id],
        None => tokenizer.encode_with(text, EncodeOptions::default()).unwrap(),
    };
    let token_of = |text: &str| ids_of(text)[0];
    let mark_ids: Vec<u32> = MARKS.iter().filter_map(|mark| tokenizer.special_id(mark)).collect();
    let end_id = tokenizer.eos_ids()[0];
    let ends = ENDS.map(|text| (text, token_of(text)));
    let mut guide = vocabulary.grammars.begin(constraint, &[end_id])?;
    let mut steps = steps.iter();
    let (mut step, mut n_free) = (steps.next(), 0);
    let (mut ids, mut forced): (Vec<u32>, Vec<u32>) = Default::default();
    // Unwritten rest of a mark or an end.
    let mut wish: Vec<u32> = Vec::new();
    while ids.len() < MOST {
        let words = guide.allowed().inspect_err(|_| println!("after {:?}", tokenizer.decode(&ids, false)))?;
        let is_allowed = |id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
        if forced.is_empty() && wish.first().is_some_and(|&id| !is_allowed(id)) {
            wish.clear();
        }
        if forced.is_empty() && wish.is_empty() {
            while matches!(step, Some(Step::Free(n)) if n_free >= *n) {
                (step, n_free) = (steps.next(), 0);
            }
            match step {
                Some(Step::Free(_)) => n_free += 1,
                Some(Step::Write(text)) if is_allowed(token_of(text)) => {
                    wish = ids_of(text);
                    step = steps.next();
                }
                Some(Step::Write(text)) => {
                    // Within a character.
                    assert!(n_free < 60, "{text} is not allowed: {:?} {constraint:?}", tokenizer.decode(&ids, true));
                    n_free += 1;
                }
                None if is_allowed(end_id) && rng.below(3) == 0 => return Ok(Some(ids)),
                None if rng.below(3) == 0 => {
                    let all: Vec<_> = ends.iter().filter(|(_, id)| is_allowed(*id)).collect();
                    if !all.is_empty() {
                        wish = ids_of(all[rng.below(all.len())].0);
                    }
                }
                None => {}
            }
        }
        let id = if !forced.is_empty() {
            let id = forced.remove(0);
            assert!(is_allowed(id), "{id} is forced and forbidden");
            id
        } else if let Some(&id) = wish.first() {
            id
        } else {
            // A step's string is written only by its own step.
            let is_free = |id: u32| is_allowed(id) && id != end_id && (step.is_none() || !mark_ids.contains(&id));
            let mut any = (0..40).map(|_| rng.below(tokenizer.vocab_size()) as u32);
            match any.find(|&id| is_free(id)) {
                Some(id) => id,
                None => {
                    let all = || (0..tokenizer.vocab_size() as u32).filter(|&id| is_allowed(id) && id != end_id);
                    let mut some: Vec<u32> = all().filter(|&id| is_free(id)).collect();
                    if some.is_empty() {
                        some = all().collect();
                    }
                    match some.is_empty() {
                        true => return Ok(Some(ids)),
                        false => some[rng.below(some.len())],
                    }
                }
            }
        };
        ids.push(id);
        match wish.first() == Some(&id) {
            true => drop(wish.remove(0)),
            false => wish.clear(),
        }
        match guide.accept(id)? {
            Next::Complete => return Ok(Some(ids)),
            Next::Forced(next) if forced.is_empty() => forced = next,
            _ => {}
        }
    }
    Ok(None)
}

/// Events parsed from an answer.
fn events(tokenizer: &Tokenizer, format: Format, tools: &[Value], prompt: &str, ids: &[u32]) -> Vec<Event> {
    let mut reader = AnswerReader::for_tokenizer(format, tokenizer).with_tools(tools).after_prompt(prompt);
    let mut decoder = tokenizer.decoder().continuing();
    let mut events = Vec::new();
    for &id in ids {
        let text = decoder.push(id).unwrap();
        events.extend(reader.push(id, &text).unwrap());
    }
    events.extend(reader.push_text(&decoder.finish()));
    events.extend(reader.finish());
    events
}

/// The calls of an answer, all valid.
fn valid_calls(tools: &[Value], events: &[Event]) -> Result<Vec<ToolCall>, String> {
    let mut calls = Vec::new();
    for event in events {
        match event {
            Event::Call(call) => {
                let tool = tools
                    .iter()
                    .find(|tool| tool["function"]["name"] == call.name)
                    .ok_or(format!("no `{}`", call.name))?;
                let none = json!({"type": "object", "maxProperties": 0});
                let schema = tool["function"].get("parameters").unwrap_or(&none);
                let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
                let arguments = json!(call.arguments);
                validator.validate(&arguments).map_err(|error| format!("{arguments}: {error}"))?;
                calls.push(call.clone());
            }
            Event::NotACall { problem, .. } | Event::Open(problem) => return Err(problem.to_string()),
            Event::Thinking(_) | Event::Text(_) | Event::CallPart(_) => {}
        }
    }
    Ok(calls)
}

/// The marks around reasoning, and the beginning of a call.
fn marks(format: Format, has_marks: bool) -> (Vec<Step>, Vec<Step>) {
    let thought = |open, close| vec![Step::Write(open), Step::Free(5), Step::Write(close)];
    match format {
        Format::Harmony => (
            vec![Step::Write("<|channel|>"), Step::Write("analysis"), Step::Free(6), Step::Write("<|end|>")],
            vec![Step::Write("<|channel|>"), Step::Write("commentary"), Step::Write(" to")],
        ),
        Format::Gemma4 => (thought("<|channel>", "<channel|>"), vec![Step::Write("<|tool_call>")]),
        Format::Mistral => (thought("[THINK]", "[/THINK]"), vec![Step::Write("[TOOL_CALLS]")]),
        Format::Llama3 if has_marks => (thought("<think>", "</think>"), vec![Step::Write("<|python_tag|>")]),
        Format::Llama3 | Format::Json => (thought("<think>", "</think>"), vec![Step::Write("{\"")]),
        Format::Lfm2 => (thought("<think>", "</think>"), vec![Step::Write("<|tool_call_start|>")]),
        Format::Granite => (thought("<think>", "</think>"), vec![Step::Write("<|tool_call|>")]),
        Format::NemotronV2 => (thought("<think>", "</think>"), vec![Step::Write("<TOOLCALL>")]),
        Format::SeedOss => (thought("<seed:think>", "</seed:think>"), vec![Step::Write("<seed:tool_call>")]),
        Format::DeepSeek => (thought("<think>", "</think>"), vec![Step::Write("<｜tool▁calls▁begin｜>")]),
        Format::Dsml => (thought("<think>", "</think>"), vec![Step::Write("<｜DSML｜function_calls>")]),
        Format::KimiK2 => (thought("<think>", "</think>"), vec![Step::Write("<|tool_calls_section_begin|>")]),
        Format::MiniMax => (thought("<think>", "</think>"), vec![Step::Write("<minimax:tool_call>")]),
        _ => (thought("<think>", "</think>"), vec![Step::Write("<tool_call>")]),
    }
}

#[derive(Debug, Default)]
struct Tally {
    drawn: usize,
    calls: usize,
    cut: usize,
    thoughts: usize,
    parallel: usize,
}

#[test]
fn constrained_calls_of_all_formats_parse_and_validate() {
    let sets = sets::sets();
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    for (at, vocabulary) in vocabularies().iter().enumerate() {
        let has_marks = vocabulary.tokenizer.special_id("<think>").is_some();
        let start = std::time::Instant::now();
        for format in formats() {
            let tally = tallies.entry(format.name()).or_default();
            // A mask over a large vocabulary takes longer.
            let n_seeds = match (common::is_full(), vocabulary.tokenizer.vocab_size() < 1000) {
                (true, _) => 60,
                (false, true) => 12,
                (false, false) => 2,
            };
            for seed in 0..n_seeds {
                let mut rng = Rng::new(seed * 1000 + at as u64 * 100 + format as u64);
                let tools = &sets[seed as usize % sets.len()];
                let (thinks, is_required) = (seed / 2 % 2 == 0, seed % 2 == 0);
                let mut rules = ToolRules::new(format);
                if is_required {
                    rules.choice = ToolChoice::Required;
                }
                rules.parallel = seed % 3 > 0;
                rules.thinking = thinks || seed % 4 == 3;
                let (thought, call) = marks(format, has_marks);
                let mut steps = Vec::new();
                if thinks {
                    steps.extend(thought);
                }
                if !is_required {
                    // Text before the call, if it has a mark.
                    let is_bare = matches!(call[0], Step::Write("{\"")) || format == Format::Harmony;
                    steps.push(Step::Free(if is_bare { 0 } else { rng.below(4) }));
                    // Text between reasoning and the next channel's name is forced.
                    let n_forced = usize::from(thinks && format == Format::Harmony);
                    steps.extend(call.into_iter().skip(n_forced));
                }
                let constraint = Constraint::tools(tools, &rules, &vocabulary.tokenizer, "").unwrap();
                let about = format!("{format}, {}, seed {seed}", vocabulary.name);
                let drawn = draw(vocabulary, &constraint, &steps, &mut rng);
                let Constraint::Tools(grammar) = &constraint else { panic!("{constraint:?}") };
                let drawn = drawn.unwrap_or_else(|error| panic!("{about}: {error}\n{}", grammar.lark()));
                tally.drawn += 1;
                let Some(ids) = drawn else {
                    tally.cut += 1;
                    continue;
                };
                let text = vocabulary.tokenizer.decode(&ids, false).unwrap();
                let events = events(&vocabulary.tokenizer, format, tools, "", &ids);
                let calls = valid_calls(tools, &events);
                let calls = calls.unwrap_or_else(|error| panic!("{about}: {error}: {text:?}\n{events:?}"));
                // Harmony's channel names are text here, so sampling may choose another one.
                let may_have_none = format == Format::Harmony && !has_marks && !is_required;
                assert!(!calls.is_empty() || may_have_none, "{about}: no call in {text:?}\n{events:?}");
                assert!(rules.parallel || calls.len() == 1, "{about}: {} calls in {text:?}", calls.len());
                tally.calls += calls.len();
                tally.parallel += usize::from(calls.len() > 1);
                tally.thoughts += usize::from(events.iter().any(|event| matches!(event, Event::Thinking(_))));
            }
        }
        println!("{}: {:?}", vocabulary.name, start.elapsed());
    }
    let fewest = if common::is_full() { 40 } else { 20 };
    for (format, tally) in &tallies {
        println!("{format}: {tally:?}");
        assert!(tally.drawn - tally.cut >= fewest && tally.cut * 5 <= tally.drawn, "{format}: {tally:?}");
        // A harmony message has one call, and ends the answer.
        assert!(tally.thoughts > fewest / 4 && (tally.parallel > 0 || *format == "harmony"), "{format}: {tally:?}");
    }
}

/// The first, small vocabulary of a kind.
fn small(kind: Option<TokenType>) -> Vocabulary {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders/qwen3-embedding/model.gguf");
    vocabulary("qwen3-embedding", own, kind)
}

/// A model untrained on tools, without marks.
#[test]
fn model_without_tool_training_makes_valid_calls() {
    let model = Model::builtin(&common::cpu()).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let sets = sets::sets();
    let n = if common::is_full() { 40 } else { 4 };
    for format in formats() {
        let (mut n_calls, mut n_cut) = (0, 0);
        for seed in 0..n {
            let tools: Vec<Value> = sets[seed % 4].clone();
            let mut rules = ToolRules::new(format);
            (rules.choice, rules.thinking, rules.parallel) = (ToolChoice::Required, false, false);
            let constraint = Constraint::tools(&tools, &rules, tokenizer, "Call a tool: ").unwrap();
            let options = GenerateOptions {
                max_tokens: 1500,
                context_policy: ContextPolicy::Slide,
                constraint: Some(constraint),
                temperature: 1.0,
                top_k: 0,
                top_p: 1.0,
                min_p: 0.0,
                seed: Some(seed as u64),
                ..GenerateOptions::greedy(0)
            };
            let mut session = model.session().unwrap();
            let (ids, text, end) = common::collect(&mut session.generate("Call a tool: ", &options).unwrap());
            if end == StopReason::MaxTokens {
                n_cut += 1;
                continue;
            }
            let events = events(tokenizer, format, &tools, "", &ids);
            let calls = valid_calls(&tools, &events).unwrap_or_else(|error| panic!("{format}: {error}: {text:?}"));
            assert_eq!(calls.len(), 1, "{format}: {text:?}\n{events:?}");
            n_calls += 1;
        }
        println!("{format}: {n_calls} calls of {n}, {n_cut} cut");
        assert!(n_calls * 2 > n, "{format}: {n_cut} of {n} texts did not end");
    }
}

#[test]
fn tool_choice_is_enforced_in_every_format() {
    let sets = sets::sets();
    let tools = &sets[4];
    for kind in [Some(TokenType::Control), None] {
        let vocabulary = small(kind);
        for format in formats() {
            let (thought, _) = marks(format, kind.is_some());
            for seed in 0..if common::is_full() { 8 } else { 2 } {
                let mut rng = Rng::new(seed);
                let mut rules = ToolRules { choice: ToolChoice::Tool("calculate".into()), ..ToolRules::new(format) };
                let about = format!("{format}, {}, seed {seed}", vocabulary.name);
                let mut drawn = |rules: &ToolRules, prompt: &str, steps: &[Step]| {
                    let constraint = Constraint::tools(tools, rules, &vocabulary.tokenizer, prompt).unwrap();
                    let ids = draw(&vocabulary, &constraint, steps, &mut rng)
                        .unwrap_or_else(|error| panic!("{about}: {error}"))?;
                    Some(events(&vocabulary.tokenizer, format, tools, prompt, &ids))
                };
                let named = drawn(&rules, "", &[]);
                for events in named.iter() {
                    let calls =
                        valid_calls(tools, events).unwrap_or_else(|error| panic!("{about}: {error}: {events:?}"));
                    assert!(
                        !calls.is_empty() && calls.iter().all(|call| call.name == "calculate"),
                        "{about}: {calls:?}"
                    );
                }
                // Only text, after reasoning.
                rules.choice = ToolChoice::None;
                let steps: Vec<Step> =
                    if seed % 2 == 0 { thought.iter().map(Step::again).collect() } else { Vec::new() };
                for events in drawn(&rules, "", &steps).iter() {
                    assert_eq!(valid_calls(tools, events).map(|calls| calls.len()), Ok(0), "{about}: {events:?}");
                }
                // Reasoning opened by the prompt continues, or ends at once.
                rules.choice = ToolChoice::Required;
                let prompt = match format {
                    Format::Harmony => "<|start|>assistant<|channel|>analysis<|message|>",
                    Format::Mistral => "[THINK]",
                    Format::Gemma4 => "<|channel>",
                    Format::SeedOss => "<seed:bos>assistant\n<seed:think>",
                    _ => "<|im_start|>assistant\n<think>\n",
                };
                for thinking in [true, false] {
                    rules.thinking = thinking;
                    let close = match thought.last() {
                        Some(Step::Write(close)) => close,
                        _ => "",
                    };
                    let steps = if thinking { vec![Step::Free(4), Step::Write(close)] } else { Vec::new() };
                    for events in drawn(&rules, prompt, &steps).iter() {
                        let calls =
                            valid_calls(tools, events).unwrap_or_else(|error| panic!("{about}: {error}: {events:?}"));
                        let thinks = events.iter().any(|event| matches!(event, Event::Thinking(_)));
                        assert!(!calls.is_empty() && thinks <= thinking, "{about}: {events:?}");
                    }
                }
                // Closed reasoning is not reopened.
                rules.thinking = true;
                let prompt = match format {
                    Format::Harmony => "<|start|>assistant",
                    Format::Mistral => "[/THINK]",
                    Format::Gemma4 => "<channel|>",
                    Format::SeedOss => "<seed:think></seed:think>",
                    _ => "<think>\n\n</think>\n\n",
                };
                for events in drawn(&rules, prompt, &[]).iter() {
                    let thinks = events.iter().any(|event| matches!(event, Event::Thinking(_)));
                    assert!(!thinks || format == Format::Harmony, "{about}: {events:?}");
                    valid_calls(tools, events).unwrap_or_else(|error| panic!("{about}: {error}: {events:?}"));
                }
            }
        }
    }
}

impl Step {
    fn again(&self) -> Step {
        match self {
            Step::Free(n) => Step::Free(*n),
            Step::Write(text) => Step::Write(text),
        }
    }
}

#[test]
fn unusable_tools_are_refused_by_name() {
    let vocabulary = small(Some(TokenType::Control));
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let with = |parameters: Value| vec![named("first"), json!({"name": "bad", "parameters": parameters})];
    let of = |schema: Value| with(json!({"type": "object", "properties": {"k": schema}, "required": ["k"]}));
    let nested = (0..300).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let many: serde_json::Map<String, Value> =
        (0..2000).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
    let every = formats().collect::<Vec<_>>();
    let tagged = vec![Format::Xml, Format::SeedOss, Format::Glm, Format::Dsml, Format::MiniMax];
    let raw = [&tagged[..], &[Format::Lfm2, Format::Gemma4]].concat();
    let bare = [Format::Mistral, Format::Gemma4, Format::Harmony, Format::Lfm2, Format::Glm, Format::KimiK2];
    let cases: Vec<(Vec<Format>, Vec<Value>, Vec<&str>)> = vec![
        (every.clone(), vec![named("a"), named("a")], vec!["`a`: name", "duplicate"]),
        (every.clone(), vec![json!({"type": "function", "function": {}})], vec!["tool 0: name"]),
        (every.clone(), vec![named("")], vec!["tool 0: name"]),
        (every.clone(), vec![named("a\nb")], vec!["name", "'\\n'"]),
        (bare.to_vec(), vec![named("a b")], vec!["`a b`: name"]),
        (tagged.clone(), vec![named("a>b")], vec!["`a>b`: name", "'>'"]),
        (every.clone(), vec![named(&"a".repeat(200))], vec!["tool 0: name", "128 bytes"]),
        (every.clone(), with(json!({"type": "string"})), vec!["`bad`: parameters.type"]),
        (every.clone(), with(json!([])), vec!["`bad`: parameters"]),
        (every.clone(), of(nested), vec!["`bad`: parameters", "depth"]),
        (
            every.clone(),
            with(json!({"type": "object", "properties": many})),
            vec!["`bad`: parameters", "property counts"],
        ),
        (every.clone(), of(json!({"type": "integer", "multipleOf": 1_000_003})), vec!["`bad`", "multipleOf"]),
        (every.clone(), of(json!({"type": "string", "pattern": "(a{1000}){1000}"})), vec!["`bad`", "pattern"]),
        (
            every.clone(),
            of(json!({"type": "integer", "minimum": 5, "maximum": 3})),
            vec!["`bad`: parameters.properties.k", "minimum"],
        ),
        (
            every.clone(),
            of(json!({"type": "array", "uniqueItems": true})),
            vec!["`bad`: parameters.properties.k", "uniqueItems"],
        ),
        (every.clone(), of(json!({"$ref": "#/$defs/none"})), vec!["`bad`: parameters"]),
        (every, of(json!(false)), vec!["`bad`"]),
        (
            raw.clone(),
            with(json!({"type": "object", "properties": {}, "minProperties": 1})),
            vec!["`bad`: parameters", "minProperties"],
        ),
        (raw, with(json!({"type": "object", "required": ["k"]})), vec!["`bad`: parameters.required", "`k`"]),
        (tagged.clone(), of(json!({"type": "string", "minLength": 5, "maxLength": 3})), vec!["properties.k.maxLength"]),
        (tagged.clone(), of(json!({"type": "string", "pattern": "a(b$)"})), vec!["properties.k.pattern"]),
        (vec![Format::Xml], of(json!({"type": "string", "enum": ["</parameter>"]})), vec!["properties.k.enum"]),
        (vec![Format::Glm], of(json!({"type": "string", "enum": ["</arg_value>"]})), vec!["properties.k.enum"]),
        (vec![Format::Glm], of(json!({"const": ["</arg_value>"]})), vec!["properties.k", "</arg_value>"]),
        (tagged, with(json!({"properties": {"a>b": {}}})), vec!["properties.a>b"]),
        (vec![Format::Lfm2], with(json!({"properties": {"a b": {}}})), vec!["properties.a b"]),
        (vec![Format::Gemma4], of(json!({"type": "string", "enum": [1]})), vec!["properties.k.enum"]),
    ];
    let mut longest = std::time::Duration::ZERO;
    for (formats, tools, says) in cases {
        for format in formats {
            let rules = ToolRules { choice: ToolChoice::Required, ..ToolRules::new(format) };
            let start = std::time::Instant::now();
            let made = Constraint::tools(&tools, &rules, &vocabulary.tokenizer, "");
            let begun =
                made.and_then(|constraint| vocabulary.grammars.begin(&constraint, vocabulary.tokenizer.eos_ids()));
            let elapsed = start.elapsed();
            let shown: String = json!(tools).to_string().chars().take(200).collect();
            let Err(error) = begun else { panic!("{format}: {shown} is not an error") };
            let told = error.to_string();
            assert!(matches!(error, Error::Constraint { .. }), "{format}: {shown}: {told}");
            for says in &says {
                assert!(told.contains(says), "{format}: {shown}: `{told}` lacks `{says}`");
            }
            longest = longest.max(elapsed);
        }
    }
    let refuses = |tools: &[Value], rules: &ToolRules, says: &str| {
        let told = Constraint::tools(tools, rules, &vocabulary.tokenizer, "").unwrap_err().to_string();
        assert!(told.contains(says), "{told}");
    };
    let rules = |choice| ToolRules { choice, ..ToolRules::new(Format::Hermes) };
    refuses(&[named("a")], &rules(ToolChoice::Tool("b".into())), "`b`");
    refuses(&[], &rules(ToolChoice::Required), "without tools");
    refuses(&[named("a")], &ToolRules::new(Format::Plain), "plain");
    println!("refused within {longest:?}");
}

/// Long lists of tools, such as those of several servers.
#[test]
fn list_of_100_tools_is_accepted() {
    let vocabulary = small(Some(TokenType::Control));
    let base = sets::sets().pop().unwrap();
    let tools: Vec<Value> = (0..100)
        .map(|i| {
            let mut tool = base[i % base.len()].clone();
            tool["function"]["name"] = json!(format!("server{}_tool{i}", i % 7));
            tool
        })
        .collect();
    for format in formats() {
        let rules = ToolRules::new(format);
        let start = std::time::Instant::now();
        let constraint = Constraint::tools(&tools, &rules, &vocabulary.tokenizer, "").unwrap();
        let made = start.elapsed();
        let begun = vocabulary.grammars.begin(&constraint, vocabulary.tokenizer.eos_ids());
        println!("{format}: 100 tools: made in {made:?}, read in {:?}", start.elapsed() - made);
        begun.unwrap();
    }
}

/// A template omits old reasoning: positions before the first omission stay cached, and only later ones are
/// recomputed. Recurrent layers restart, since their state covers the latest positions only.
#[test]
fn history_without_old_thinking_recomputes_only_the_change() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    for (name, has_state) in [("llama3-rope", false), ("gemma3", false), ("qwen35", true)] {
        let folder = data.join("tiny-random").join(name);
        let model = Model::load(&common::cpu(), folder, tilewright::LoadOptions::default()).unwrap();
        let options = |n| GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
        let prompt: Vec<u32> = (1..=30).collect();
        let mut session = model.session().unwrap();
        let (answer, ..) = common::collect(&mut session.generate_from(&prompt, &options(20)).unwrap());
        // With all reasoning kept, only new tokens are computed, and the answer's last token, which no pass has read.
        let (user, thought) = ([5, 6, 7, 8], 12);
        let whole = [&prompt[..], &answer, &user].concat();
        let without = [&prompt[..], &answer[thought..], &user].concat();
        let alike = answer.iter().zip(&without[prompt.len()..]).take_while(|(a, b)| a == b).count();
        let changed = without.len() - prompt.len() - alike;
        let computed = if has_state { without.len() } else { changed };
        for (ids, computed) in [(&whole, user.len() + 1), (&without, computed)] {
            let mut generation = session.generate_from(ids, &options(6)).unwrap();
            let (told, ..) = common::collect(&mut generation);
            assert_eq!(generation.prefill().tokens, computed, "{name}");
            let mut fresh = model.session().unwrap();
            let (expected, ..) = common::collect(&mut fresh.generate_from(ids, &options(6)).unwrap());
            assert_eq!(told, expected, "{name}");
        }
        println!("{name}: of {} tokens without the thought, {computed} are computed", without.len());
    }
}
