//! Hostile vocabularies: each is refused by the field at fault. `cargo bench --bench hostile` measures the time.

use std::time::Instant;

use serde_json::{Value, json};
use tilewright::Error;
use tilewright::tokenizer::{TokenType, Tokenizer, TokenizerConfig, Vocab};

/// More tokens, and merges, than GPT-2 has.
const N_TOKENS: usize = 65_536;

/// A vocabulary of that size for a model type.
fn large(model: &str) -> Vocab {
    let mut tokens = vec!["<unk>".to_owned(), "<s>".into(), "</s>".into()];
    tokens.extend((3..N_TOKENS).map(|id| format!("t{id}")));
    let mut token_types = vec![TokenType::Normal; N_TOKENS];
    token_types[..3].copy_from_slice(&[TokenType::Unknown, TokenType::Control, TokenType::Control]);
    let has_scores = matches!(model, "llama" | "t5");
    let merges = if has_scores { vec![] } else { vec!["t3 t4".to_owned(); N_TOKENS] };
    tokens[N_TOKENS - 1] = "t3t4".into();
    Vocab {
        model: model.into(),
        pre: Some("gpt-2".into()),
        scores: if has_scores { vec![-1.0; N_TOKENS] } else { vec![] },
        tokens,
        token_types,
        merges,
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        ..Vocab::default()
    }
}

/// Character rules: the words of a trie, and texts.
fn charsmap(trie: &[u32], texts: &[u8]) -> Vec<u8> {
    let size = 4 * trie.len() as u32;
    [size].iter().chain(trie).flat_map(|word| word.to_le_bytes()).chain(texts.iter().copied()).collect()
}

type Change = fn(&mut Vocab);

/// The model type, the field at fault, and the change to a valid vocabulary.
const VOCABULARIES: [(&str, &str, Change); 24] = [
    ("llama", "tokens[65535]", |vocab| vocab.tokens[N_TOKENS - 1] = "t3".into()),
    ("gpt2", "tokens[65535]", |vocab| vocab.tokens[N_TOKENS - 1] = "t3".into()),
    ("t5", "scores[65535]", |vocab| vocab.scores[N_TOKENS - 1] = f32::NAN),
    ("llama", "scores", |vocab| vocab.scores.truncate(N_TOKENS - 1)),
    ("llama", "tokens[9]", |vocab| vocab.tokens[9] = "x".repeat(1 << 24)),
    ("t5", "tokens", |vocab| {
        vocab.tokens.iter_mut().skip(3).step_by(55).for_each(|token| token.push_str(&"x".repeat(60_000)))
    }),
    ("llama", "tokens[9]", |vocab| vocab.token_types[9] = TokenType::Byte),
    ("gemma4", "tokens[9]", |vocab| vocab.token_types[9] = TokenType::Byte),
    ("llama", "token_types", |vocab| vocab.token_types.push(TokenType::Normal)),
    ("gpt2", "merges[65535]", |vocab| vocab.merges[N_TOKENS - 1] = "t3 ".into()),
    ("gpt2", "merges[65535]", |vocab| vocab.merges[N_TOKENS - 1] = "t3 t5".into()),
    ("gpt2", "merges[0]", |vocab| vocab.merges[0] = "t3t4 t3t4".into()),
    ("gpt2", "merges[1]", |vocab| vocab.merges[1] = "<s> t3".into()),
    ("gemma4", "merges[65535]", |vocab| vocab.merges[N_TOKENS - 1] = "t3 t5".into()),
    ("gemma4", "merges", |vocab| vocab.merges.clear()),
    ("gpt2", "bos_id", |vocab| (vocab.bos_id, vocab.add_bos) = (Some(1 << 31), Some(true))),
    ("gpt2", "eos_id", |vocab| vocab.eos_id = Some(N_TOKENS as u32)),
    ("gpt2", "eos_id", |vocab| (vocab.eos_id, vocab.add_eos) = (Some(u32::MAX), Some(true))),
    ("gpt2", "bos_id", |vocab| (vocab.bos_id, vocab.add_bos) = (None, Some(true))),
    ("gpt2", "pre", |vocab| vocab.pre = Some("nobody's".repeat(1 << 20))),
    ("t5", "charsmap", |vocab| vocab.charsmap = charsmap(&[(1 << 31) | 77], b"a\0")),
    ("t5", "charsmap", |vocab| vocab.charsmap = charsmap(&[1 << 31], &[b'a'; 1 << 20])),
    ("t5", "charsmap", |vocab| vocab.charsmap = [&u32::MAX.to_le_bytes()[..], &[0; 1 << 20]].concat()),
    ("t5", "tokens", |vocab| vocab.token_types.fill(TokenType::Control)),
];

/// A `tokenizer.json` of byte-level BPE with as many tokens.
fn large_json() -> Value {
    let vocab = large("gpt2");
    let step = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let ids: serde_json::Map<String, Value> =
        vocab.tokens.into_iter().zip(0..).map(|(token, id)| (token, json!(id))).collect();
    json!({
        "added_tokens": [], "normalizer": null, "pre_tokenizer": step, "post_processor": null, "decoder": step,
        "model": { "type": "BPE", "vocab": ids, "merges": vec![json!(["t3", "t4"]); N_TOKENS] },
    })
}

/// Changed pointer, new value, and the field at fault.
fn files() -> Vec<(&'static str, Value, &'static str)> {
    let template = |id: u64| {
        json!({
            "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "x", "type_id": 0 } }], "pair": [],
            "special_tokens": { "x": { "id": "x", "ids": [id], "tokens": ["x"] } },
        })
    };
    vec![
        ("/model/vocab/t65534", json!(1u64 << 31), "model.vocab"),
        ("/model/vocab/t65534", json!(3), "token id 3"),
        ("/model/vocab/t65534", json!(-1), "model.vocab"),
        ("/model/merges/65535", json!(["t3", "t5"]), "model.merges[65535]"),
        ("/model/merges/65535", json!("t3"), "model.merges[65535]"),
        ("/added_tokens", json!([{ "id": 1u64 << 40, "content": "x", "special": true }]), "added_tokens[0]"),
        ("/added_tokens", json!([{ "id": 7, "content": "t9", "special": true }]), "added_tokens[0]"),
        ("/post_processor", template(1 << 20), "post_processor"),
        ("/model/vocab", json!({ "x".repeat(1 << 24): 0 }), "model.vocab"),
    ]
}

/// An attempt to build a tokenizer from something hostile.
pub type Attempt = Box<dyn FnOnce() -> Result<Tokenizer, Error>>;

/// All attempts, each with its fault and the field at fault.
pub fn all() -> Vec<(String, &'static str, Attempt)> {
    let mut all: Vec<(String, &'static str, Attempt)> = Vec::new();
    for (at, (model, field, change)) in VOCABULARIES.into_iter().enumerate() {
        let mut vocab = large(model);
        change(&mut vocab);
        all.push((format!("{model} vocabulary {at}"), field, Box::new(|| Tokenizer::from_vocab(vocab))));
    }
    let good = large_json();
    for (pointer, value, field) in files() {
        let mut file = good.clone();
        *file.pointer_mut(pointer).expect(pointer) = value;
        // Only the refusal of the contents counts; the JSON parser is not ours.
        let text = file.to_string();
        let load = move || Tokenizer::from_json(text.as_bytes(), &TokenizerConfig::default());
        all.push((format!("tokenizer.json {pointer}"), field, Box::new(load)));
    }
    all
}

#[test]
fn hostile_vocabularies_are_refused_by_field() {
    for model in ["llama", "gpt2", "gemma4", "t5"] {
        Tokenizer::from_vocab(large(model)).unwrap();
    }
    for (name, field, load) in all() {
        let start = Instant::now();
        let error = load().expect_err(&name);
        println!("{name}: {:.0?}", start.elapsed());
        let (found, message) = match &error {
            Error::Tokenizer { field, .. } | Error::Unsupported { field, .. } => (field, error.to_string()),
            other => panic!("{name}: {other}"),
        };
        assert!(found.starts_with(field), "{name}: {message}");
        assert!(message.len() < 2000, "{name}: {} bytes", message.len());
    }
}
