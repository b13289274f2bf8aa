//! Vocabularies, texts, chat templates and constraints.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde::de::IgnoredAny;
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::chat::{ChatOptions, ChatTemplate, Message, SpecialTexts};
use tilewright::formats::Gguf;
use tilewright::grammar::{Constraint, Grammars, Next};
use tilewright::load::{ModelFile, vocab_from_gguf};
use tilewright::tokenizer::{EncodeOptions, Tokenizer, TokenizerConfig, Vocab};

use super::builder::Rng;
use super::mutate::{any_json, any_text};
use super::{bombs, common, fuzz, mutate, schemas};

/// `tokenizer.json` files of all algorithms, a few kilobytes each.
fn jsons() -> &'static [Json] {
    static JSONS: OnceLock<Vec<Json>> = OnceLock::new();
    JSONS.get_or_init(|| {
        let folder = common::find_data(Path::new("encoders")).expect("committed test data");
        let own = ["bert-reranker", "modernbert-bpe", "qwen3-embedding", "roberta-reranker"];
        let mut paths: Vec<_> = own.iter().map(|name| folder.join(name)).collect();
        paths.push(folder.with_file_name("unigram"));
        let read = |path: std::path::PathBuf| std::fs::read(path.join("tokenizer.json")).unwrap();
        paths.into_iter().map(|path| serde_json::from_slice(&read(path)).unwrap()).collect()
    })
}

/// Vocabularies of the repository's GGUF files.
fn vocabs() -> [Vocab; 2] {
    let unigram = common::find_data(Path::new("unigram/vocab.gguf")).expect("committed test data");
    [std::fs::read(unigram).unwrap(), ModelFile::BUILTIN.to_vec()].map(|bytes| {
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        vocab_from_gguf(&gguf.metadata).unwrap()
    })
}

/// Whether the input was refused.
fn refused(error: &Error) -> bool {
    let message = error.to_string();
    assert!(!message.is_empty() && message.len() < 4000, "{} bytes: {:.200}", message.len(), message);
    false
}

/// Invariants of any tokenizer with any text.
fn use_it(tokenizer: &Tokenizer, text: &str) {
    let options = EncodeOptions { add_special: false, parse_special: true };
    let (Ok(ids), Ok(with_special)) = (tokenizer.encode(text, false), tokenizer.encode_with(text, options)) else {
        return;
    };
    for ids in [ids, with_special] {
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        let whole = tokenizer.decode(&ids, false).unwrap();
        let mut decoder = tokenizer.decoder().with_special();
        let mut parts: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        parts += &decoder.finish();
        assert_eq!(parts, whole, "{text:?} as {ids:?}");
    }
}

#[test]
fn tokenizer_load() {
    let vocabs = vocabs();
    fuzz("tokenizer_load", 1500, |rng| {
        let loaded = if rng.below(4) == 0 {
            let mut vocab = vocabs[rng.below(vocabs.len())].clone();
            for _ in 0..1 + rng.below(3) {
                let at = rng.below(vocab.tokens.len());
                match rng.below(9) {
                    0 => vocab.tokens[at] = any_text(rng, 4),
                    1 => mutate::text(rng, &mut vocab.tokens[at]),
                    2 if at < vocab.scores.len() => vocab.scores[at] = f32::from_bits(rng.next() as u32),
                    3 => vocab.scores.truncate(at),
                    4 => vocab.merges.push(any_text(rng, 4)),
                    5 => vocab.token_types.truncate(at),
                    6 => vocab.model = rng.pick(&["llama", "gpt2", "bert", "t5", "gemma4", "x"]).to_owned(),
                    7 => (vocab.bos_id, vocab.unk_id) = (Some(rng.next() as u32), Some(at as u32)),
                    _ => {
                        let end = vocab.charsmap.len();
                        mutate::bytes(rng, &mut vocab.charsmap, end);
                    }
                }
            }
            Tokenizer::from_vocab(vocab)
        } else {
            let mut json = jsons()[rng.below(jsons().len())].clone();
            mutate::json(rng, &mut json);
            let mut bytes = json.to_string().into_bytes();
            if rng.below(8) == 0 {
                let end = bytes.len();
                mutate::bytes(rng, &mut bytes, end);
            }
            let name = |rng: &mut Rng| (rng.below(3) == 0).then(|| any_text(rng, 2));
            let config =
                TokenizerConfig { bos_token: name(rng), eos_token: name(rng), end_ids: vec![rng.next() as u32] };
            Tokenizer::from_json(&bytes, &config)
        };
        match loaded {
            Ok(tokenizer) => {
                use_it(&tokenizer, &any_text(rng, 60));
                true
            }
            Err(error) => refused(&error),
        }
    });
}

#[test]
fn tokenizer_encode_decode() {
    let config = TokenizerConfig::default();
    let load = |json: &Json| Tokenizer::from_json(json.to_string().as_bytes(), &config).unwrap();
    let mut tokenizers: Vec<Tokenizer> = jsons().iter().map(load).collect();
    tokenizers.extend(vocabs().map(|vocab| Tokenizer::from_vocab(vocab).unwrap()));
    let n = tokenizers.len();
    fuzz("tokenizer_encode_decode", 3000, |rng| {
        let text = any_text(rng, 200);
        let at = rng.below(n);
        let tokenizer = &tokenizers[at];
        use_it(tokenizer, &text);
        let ids = tokenizer.encode(&text, false).unwrap();
        // The built-in model has a token per byte, so nothing is lost except SentencePiece's own space symbol.
        if at == n - 1 {
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text.replace('\u{2581}', " "));
        }
        // Any tokens decode to a text, and decoding them in parts gives the same one.
        let any: Vec<u32> = (0..rng.below(40)).map(|_| rng.below(tokenizer.vocab_size()) as u32).collect();
        let whole = tokenizer.decode(&any, true).unwrap();
        let mut decoder = tokenizer.decoder();
        let parts: String = any.iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!(parts + &decoder.finish(), whole, "{any:?}");
        assert!(tokenizer.decode(&[tokenizer.vocab_size() as u32], true).is_err());
        true
    });
}

/// Templates: built-in ones, real ones if available, our own, and hostile ones.
fn templates() -> Vec<String> {
    let cases = common::find_data(Path::new("chat/cases.json")).expect("committed test data");
    let cases: Json = serde_json::from_slice(&std::fs::read(cases).unwrap()).unwrap();
    let mut sources = Vec::new();
    fn collect(value: &Json, sources: &mut Vec<String>) {
        match value {
            Json::Object(fields) => {
                sources.extend(fields.get("template").and_then(Json::as_str).map(str::to_owned));
                fields.values().for_each(|value| collect(value, sources));
            }
            Json::Array(list) => list.iter().for_each(|value| collect(value, sources)),
            _ => {}
        }
    }
    collect(&cases, &mut sources);
    assert!(sources.len() > 20, "{} templates", sources.len());
    sources.extend(bombs::all().into_iter().map(|(source, _)| source).filter(|source| source.len() < 10_000));
    if let Some(folder) = common::find_data(Path::new("chat-templates")) {
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
        paths.sort();
        sources.extend(paths.into_iter().map(|path| std::fs::read_to_string(path).unwrap()));
    }
    sources
}

/// Expressions, some of them valid.
fn expression(rng: &mut Rng, depth: usize) -> String {
    const LEAVES: [&str; 16] = [
        "messages",
        "message",
        "x",
        "loop.index",
        "bos_token",
        "1",
        "-7",
        "0.5",
        "'a'",
        "\"é\"",
        "[]",
        "{}",
        "none",
        "true",
        "tools",
        "9223372036854775807",
    ];
    const FILTERS: [&str; 14] = [
        "length",
        "trim",
        "upper",
        "tojson",
        "join(', ')",
        "list",
        "first",
        "last",
        "default('d')",
        "int",
        "string",
        "replace('a', 'bb')",
        "selectattr('role')",
        "batch(2)",
    ];
    if depth == 0 {
        return rng.pick(&LEAVES).to_owned();
    }
    let inner = |rng: &mut Rng| expression(rng, depth - 1);
    match rng.below(9) {
        0 => format!(
            "{} {} {}",
            inner(rng),
            rng.pick(&["+", "-", "*", "/", "//", "%", "**", "~", "in", "and", "==", "<"]),
            inner(rng)
        ),
        1 => format!("{} | {}", inner(rng), rng.pick(&FILTERS)),
        2 => format!("{}[{}]", inner(rng), inner(rng)),
        3 => format!("{}[{}:{}]", inner(rng), inner(rng), inner(rng)),
        4 => format!(
            "{}.{}",
            inner(rng),
            rng.pick(&["role", "content", "items()", "split(' ')", "strip()", "format(1)"])
        ),
        5 => format!("({} if {} else {})", inner(rng), inner(rng), inner(rng)),
        6 => format!("[{}, {}]", inner(rng), inner(rng)),
        7 => format!("range({})", inner(rng)),
        _ => format!("not {}", inner(rng)),
    }
}

fn statements(rng: &mut Rng, depth: usize) -> String {
    let of = |rng: &mut Rng| expression(rng, 1 + depth);
    let inner = |rng: &mut Rng| if depth == 0 { String::new() } else { statements(rng, depth - 1) };
    (0..1 + rng.below(3))
        .map(|_| match rng.below(6) {
            0 => format!("{{% for message in {} %}}{}{{% endfor %}}", of(rng), inner(rng)),
            1 => format!("{{% if {} %}}{}{{% else %}}{}{{% endif %}}", of(rng), inner(rng), inner(rng)),
            2 => format!("{{% set x = {} %}}", of(rng)),
            3 => format!("{{% macro f(x) %}}{}{{% endmacro %}}{{{{ f({}) }}}}", inner(rng), of(rng)),
            4 => any_text(rng, 3),
            _ => format!("{{{{- {} -}}}}", of(rng)),
        })
        .collect()
}

#[test]
fn chat_template_render() {
    let sources = templates();
    fuzz("chat_template_render", 800, |rng| {
        let mut source = match rng.below(3) {
            0 => statements(rng, 2),
            _ => sources[rng.below(sources.len())].clone(),
        };
        if rng.below(4) > 0 {
            mutate::text(rng, &mut source);
        }
        let template = match ChatTemplate::from_source(&source, SpecialTexts::new()) {
            Ok(template) => template,
            Err(error) => return refused(&error),
        };
        let user = format!("\u{1F409}{}\u{1F409}", any_text(rng, 20));
        let messages: Vec<Message> = (0..rng.below(5))
            .map(|_| {
                let mut message =
                    Message::new(rng.pick(&["system", "user", "assistant", "tool", "\u{1F409}"]), user.clone());
                if rng.below(4) == 0 {
                    message.content = any_json(rng);
                    message.fields.insert("tool_calls".into(), any_json(rng));
                }
                message
            })
            .collect();
        let tool = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
        let options = ChatOptions {
            add_generation_prompt: rng.below(2) == 0,
            tools: (rng.below(3) == 0).then(|| tool.as_array().cloned().unwrap_or_default()),
            now: Some(rng.next() as i64),
            ..ChatOptions::default()
        };
        match template.render(&messages, &options) {
            Ok(rendered) => {
                let pieces: String = rendered.pieces().map(|(piece, _)| piece).collect();
                assert_eq!(pieces, rendered.text());
                // User text stays marked as such everywhere, but templates may contain the character too.
                let own = rendered.pieces().filter(|(piece, is_user)| !is_user && piece.contains('\u{1F409}'));
                assert!(
                    source.contains("1f409") || source.contains('\u{1F409}') || own.count() == 0,
                    "{source}\n{messages:?}"
                );
                true
            }
            Err(error) => refused(&error),
        }
    });
}

fn grammars() -> (Arc<Tokenizer>, Arc<Grammars>) {
    let [_, builtin] = vocabs();
    let tokenizer = Arc::new(Tokenizer::from_vocab(builtin).unwrap());
    let grammars = Grammars::new(tokenizer.clone(), tokenizer.vocab_size() as u32).unwrap();
    (tokenizer, Arc::new(grammars))
}

const GRAMMARS: [&str; 6] = [
    "root ::= \"yes\" | \"no\"",
    "root ::= item+\nitem ::= [a-z]+ (\",\" ws [0-9]{1,3})? \"\\n\"\nws ::= [ \\t]*",
    "root ::= \"(\" root \")\" | [^()]*",
    "start: word (\" \" word)*\nword: /[a-z]+/",
    "start: \"[\" [value (\",\" value)*] \"]\"\nvalue: NUMBER | start\nNUMBER: /[0-9]+/",
    "%llguidance {}\nstart: @j\nj: %json {\"type\": \"integer\"}",
];

/// Constraints of all kinds, valid or not.
fn constraint(rng: &mut Rng) -> Constraint {
    match rng.below(4) {
        0 => {
            let mut source = rng.pick(&GRAMMARS).to_owned();
            mutate::text(rng, &mut source);
            Constraint::grammar_of(source)
        }
        1 => {
            let mut pattern =
                rng.pick(&["[a-z]{2,5}(x|y)+", "(a*)*b", "\\d+(\\.\\d+)?", "[^\\n]{0,9}", "(?i)é+"]).to_owned();
            mutate::text(rng, &mut pattern);
            Constraint::Regex(pattern)
        }
        _ => {
            let mut schema = schemas::generated(rng.next());
            if rng.below(5) > 0 {
                mutate::json(rng, &mut schema);
            }
            Constraint::JsonSchema(schema)
        }
    }
}

#[test]
fn grammar_compile() {
    let (tokenizer, grammars) = grammars();
    fuzz("grammar_compile", 300, |rng| {
        let constraint = constraint(rng);
        match grammars.begin(&constraint, tokenizer.eos_ids()) {
            Ok(mut guide) => guide.allowed().unwrap().iter().any(|&word| word != 0),
            Err(error) => refused(&error),
        }
    });
}

/// Product of all integral `multipleOf` of a schema, if small.
fn multiples(schema: &Json) -> Option<u64> {
    let parts: Vec<&Json> = match schema {
        Json::Object(fields) => fields.values().collect(),
        Json::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    };
    let own = schema.get("multipleOf").and_then(Json::as_u64).unwrap_or(1);
    let product = parts.into_iter().try_fold(own, |product, part| product.checked_mul(multiples(part)?))?;
    (1..1 << 20).contains(&product).then_some(product)
}

/// The same text for a validator that represents numbers as floats: an integer with too many digits is replaced by a
/// representable one of the same sign, as far from these schemas' bounds, with the same remainder by all their
/// multiples.
fn in_floats(text: &str, schema: &Json) -> String {
    let Some(multiples) = multiples(schema) else { return text.to_owned() };
    let (mut out, mut in_string, mut rest) = (String::new(), false, text);
    while let Some(first) = rest.chars().next() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let is_whole = !rest[digits..].starts_with(['.', 'e', 'E']);
        let n = match digits {
            0 if in_string && first == '\\' => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            0 => first.len_utf8(),
            n => n,
        };
        match digits > 15 && is_whole && !in_string && !out.ends_with(['.', 'e', 'E', '+']) {
            true => {
                let remainder = rest[..n].bytes().fold(0, |r, digit| (10 * r + u64::from(digit - b'0')) % multiples);
                out += &((1 << 50) / multiples * multiples + remainder).to_string();
            }
            false => out += &rest[..n],
        }
        in_string ^= first == '"';
        rest = &rest[n..];
    }
    out
}

#[test]
fn oversized_integers_are_reduced_keeping_remainders() {
    let schema = json!({ "items": { "multipleOf": 3 }, "not": { "multipleOf": 4 } });
    let text =
        r#"[1790117713375989216135160271407639038166173, "99999999999999999999\"9", -10000000000000000001, 2.5, 1e99]"#;
    let held = in_floats(text, &schema);
    assert!(held.contains(r#""99999999999999999999\"9""#) && held.ends_with("2.5, 1e99]"), "{held}");
    let numbers: Vec<Json> = serde_json::from_str(&held).unwrap();
    // By the last two digits and by their sum.
    assert_eq!(numbers[0].as_u64().unwrap() % 12, 9, "{held}");
    assert_eq!(-numbers[2].as_i64().unwrap() % 12, 5, "{held}");
    assert_eq!(in_floats("[7]", &schema), "[7]");
}

#[test]
fn grammar_step() {
    let (tokenizer, grammars) = grammars();
    let vocab_size = tokenizer.vocab_size() as u32;
    fuzz("grammar_step", 150, |rng| {
        let constraint = constraint(rng);
        let Ok(mut guide) = grammars.begin(&constraint, tokenizer.eos_ids()) else { return false };
        let (mut ids, mut forced) = (Vec::new(), Vec::new());
        for _ in 0..60 {
            let words = match guide.allowed() {
                Ok(words) => words.to_vec(),
                Err(error) => return refused(&error),
            };
            let is_allowed = |id: u32| words[id as usize / 32] >> (id % 32) & 1 == 1;
            let is_forced = !forced.is_empty();
            let id = match is_forced {
                false => {
                    let allowed: Vec<u32> = (0..vocab_size).filter(|&id| is_allowed(id)).collect();
                    allowed[rng.below(allowed.len())]
                }
                true => forced.remove(0),
            };
            // A forbidden token ends the text, unless its bytes are allowed as another token.
            let forbidden = rng.next() as u32 % vocab_size;
            if rng.below(100) == 0 && !is_allowed(forbidden) && !tokenizer.eos_ids().contains(&forbidden) {
                return match guide.accept(forbidden) {
                    Ok(_) => true,
                    Err(error) => refused(&error),
                };
            }
            let is_end = tokenizer.eos_ids().contains(&id);
            let next = match is_end {
                true => Next::Complete,
                false => {
                    ids.push(id);
                    match guide.accept(id) {
                        Ok(next) => next,
                        Err(error) if is_forced => {
                            panic!("{constraint:?}: {error} at {id}, which is forced, after {ids:?}")
                        }
                        Err(error) => return refused(&error),
                    }
                }
            };
            match next {
                Next::Forced(ids) if forced.is_empty() => forced = ids,
                Next::Complete => {
                    let text = tokenizer.decode(&ids, true).unwrap();
                    if let Constraint::JsonSchema(schema) = &constraint {
                        let parsed: Result<Json, _> = serde_json::from_str(&in_floats(&text, schema));
                        let Ok(value) = parsed else {
                            // It has a number too large for the parser.
                            assert!(serde_json::from_str::<IgnoredAny>(&text).is_ok(), "{schema}: {text:?}");
                            return true;
                        };
                        let validator = jsonschema::options().should_validate_formats(true).build(schema);
                        if let Ok(validator) = validator {
                            assert!(validator.is_valid(&value), "{schema}: {text}");
                        }
                    }
                    return true;
                }
                _ => {}
            }
        }
        true
    });
}
