//! Tokenizers against expected ids from llama.cpp and Hugging Face, against the `tokenizers` crate on random text,
//! and against hostile vocabularies.

use crate::common;
#[path = "tokenizer/families.rs"]
mod families;
#[path = "tokenizer/gemma4.rs"]
mod gemma4;
#[path = "tokenizer/hostile.rs"]
mod hostile;
#[path = "tokenizer/roles.rs"]
mod roles;

use std::collections::HashMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::Data;
use serde_json::{Value, json};
use tilewright::Error;
use tilewright::formats::Gguf;
use tilewright::load::vocab_from_gguf;
use tilewright::tokenizer::{EncodeOptions, EncodingCache, TokenType, Tokenizer, TokenizerConfig, Vocab};

const PARSE_SPECIAL: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };

fn read_json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn gguf_vocab(path: PathBuf) -> Vocab {
    let bytes = fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    vocab_from_gguf(&gguf.metadata).unwrap()
}

fn from_gguf(path: PathBuf) -> Tokenizer {
    Tokenizer::from_vocab(gguf_vocab(path)).unwrap()
}

fn from_json(folder: PathBuf) -> Tokenizer {
    let config = TokenizerConfig::from_json(&fs::read(folder.join("tokenizer_config.json")).unwrap()).unwrap();
    Tokenizer::from_json(&fs::read(folder.join("tokenizer.json")).unwrap(), &config).unwrap()
}

/// Qwen2 as in its repository: `vocab.json`, `merges.txt` and `added_tokens.json`.
fn qwen2_vocab(data: &Data) -> Vocab {
    let folder = data.join("vocab/qwen2");
    let (vocab, added) = (read_json(folder.join("vocab.json")), read_json(folder.join("added_tokens.json")));
    let mut vocab_of_both: Vec<(u32, String, TokenType)> = Vec::new();
    for (file, kind) in [(vocab, TokenType::Normal), (added, TokenType::Control)] {
        let tokens = file.as_object().unwrap().iter();
        vocab_of_both.extend(tokens.map(|(token, id)| (id.as_u64().unwrap() as u32, token.clone(), kind)));
    }
    vocab_of_both.sort_unstable_by_key(|token| token.0);
    let merges = fs::read_to_string(folder.join("merges.txt")).unwrap();
    Vocab {
        model: "gpt2".into(),
        pre: Some("qwen2".into()),
        tokens: vocab_of_both.iter().map(|token| token.1.clone()).collect(),
        token_types: vocab_of_both.iter().map(|token| token.2).collect(),
        merges: merges.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect(),
        eos_id: Some(151_645),
        ..Vocab::default()
    }
}

/// The vocabularies under `vocab/`: name, tokenizer, and the file of llama.cpp's own texts.
fn vocabularies(data: &Data) -> Vec<(&'static str, Tokenizer, &'static str)> {
    let gguf = |name: &str| from_gguf(data.join("vocab").join(name));
    vec![
        ("llama-spm", gguf("ggml-vocab-llama-spm.gguf"), "ggml-vocab-llama-spm.gguf"),
        ("gpt-2", gguf("ggml-vocab-gpt-2.gguf"), "ggml-vocab-gpt-2.gguf"),
        ("bert-bge", gguf("ggml-vocab-bert-bge.gguf"), "ggml-vocab-bert-bge.gguf"),
        ("qwen2", Tokenizer::from_vocab(qwen2_vocab(data)).unwrap(), "qwen2/qwen2"),
    ]
}

/// The vocabulary of the model in `assets/`: SentencePiece BPE with 1024 tokens, bytes included.
fn stories_vocab() -> Vocab {
    gguf_vocab(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf"))
}

fn stories() -> Tokenizer {
    Tokenizer::from_vocab(stories_vocab()).unwrap()
}

/// The same as a `tokenizer.json`.
fn stories_json() -> Value {
    spm_json(&stories_vocab())
}

/// The `tokenizer.json` that Hugging Face's converter makes from SentencePiece BPE: two tokens merge if the vocabulary
/// has their concatenation, best scores first.
fn spm_json(vocab: &Vocab) -> Value {
    let ids: HashMap<&str, usize> = vocab.tokens.iter().map(String::as_str).zip(0..).collect();
    let is_text = |id: usize| vocab.token_types[id] == TokenType::Normal;
    let mut merges: Vec<(f32, [&str; 2])> = Vec::new();
    for (id, token) in vocab.tokens.iter().enumerate().filter(|(id, _)| is_text(*id)) {
        let halves = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let known = halves.filter(|(a, b)| [a, b].iter().all(|half| ids.get(*half).is_some_and(|id| is_text(*id))));
        merges.extend(known.map(|(a, b)| (vocab.scores[id], [a, b])));
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    let added = |id: usize| json!({ "id": id, "content": vocab.tokens[id], "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
    let bos = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
    let replace = |pattern: &str, content: &str| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added(0), added(1), added(2)],
        "normalizer": { "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "▁" }, replace(" ", "▁")] },
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            replace("▁", " "), { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab.tokens.iter().zip(0..).map(|(token, id)| (token.clone(), json!(id))).collect::<serde_json::Map<_, _>>(),
            "merges": merges.iter().map(|(_, pair)| json!(pair)).collect::<Vec<_>>(),
        },
    })
}

/// `tokenizer.json` files of BPE over characters: our own, and those of published models if available.
fn character_jsons() -> Vec<(&'static str, Value)> {
    let mut files = vec![("stories", stories_json())];
    for name in ["stories260k", "tinystories656k"] {
        match common::find_data(Path::new(name)) {
            Some(folder) => files.push((name, read_json(folder.join("tokenizer.json")))),
            None => common::skip_part(format_args!("no test data `{name}`")),
        }
    }
    files
}

/// A small Unigram vocabulary in the repository's own data.
fn unigram_vocab() -> Vocab {
    gguf_vocab(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/unigram/vocab.gguf"))
}

/// Random texts of characters that tokenizers treat differently.
fn random_texts(n: usize) -> impl Iterator<Item = String> {
    let alphabet: Vec<char> = "etaoin shrdlu  \n\t'sST.,!?()[]{}<>|/\\#01239éÉÅñüßçÇИжΩأहि中文あ가각😀👍🏽\u{301}\u{327}\u{200d}\u{a0}\u{3000}▁ſ²"
        .chars()
        .collect();
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    (0..n).map(move |_| (0..next() % 48).map(|_| alphabet[next() % alphabet.len()]).collect())
}

/// Compares `cases[]` of a file: `ids`, and if present `ids_with_special` and `decoded`. Returns their number.
fn check_cases(name: &str, tokenizer: &Tokenizer, file: &Value, decoded: bool) -> usize {
    let cases = file["cases"].as_array().unwrap();
    for case in cases {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&case["ids"]), "{name}: {text:?}");
        if let Some(with_special) = case.get("ids_with_special") {
            assert_eq!(tokenizer.encode(text, true).unwrap(), ids(with_special), "{name}: {text:?}");
        }
        if let Some(want) = case.get("decoded").filter(|_| decoded) {
            assert_eq!(
                tokenizer.decode(&ids(&case["ids"]), false).unwrap(),
                want.as_str().unwrap(),
                "{name}: {text:?}"
            );
        }
    }
    cases.len()
}

/// Compares with llama.cpp's texts and ids beside a file, and returns their number.
fn assert_texts(name: &str, tokenizer: &Tokenizer, file: &Path) -> usize {
    let read = |suffix: &str| fs::read_to_string(format!("{}{suffix}", file.display())).unwrap();
    let (texts, lines) = (read(".inp"), read(".out"));
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    assert!(texts.len() > 40, "{name}: {} texts", texts.len());
    for (text, line) in texts.iter().zip(lines.lines().chain(std::iter::repeat(""))) {
        let want: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        assert_eq!(tokenizer.encode(text, false).unwrap(), want, "{name}: {text:?}");
    }
    texts.len()
}

#[test]
fn texts_of_llama_cpp_encode_to_its_ids() {
    let Some(data) = common::data(&["vocab"]) else { return };
    for (name, tokenizer, file) in vocabularies(&data) {
        // One file of each is in the repository, and the others lie beside it.
        let texts = data.join(format!("vocab/{file}.inp")).with_extension("");
        println!("{name}: {} texts of llama.cpp exact", assert_texts(name, &tokenizer, &texts));
    }
}

#[test]
fn vocabulary_cases_encode_exactly() {
    let Some(data) = common::data(&["vocab"]) else { return };
    for (name, tokenizer, _) in vocabularies(&data) {
        let file = read_json(data.join(format!("vocab/{name}.cases.json")));
        let n = check_cases(name, &tokenizer, &file, true);
        println!("{name}: {n} cases exact");
    }
}

fn check_tokenizer_json(name: &str, algorithm: &str) {
    let Some(data) = common::data(&[name]) else { return };
    let folder = data.join(name);
    let cases = read_json(folder.join("tokenizer_cases.json"));
    let tokenizer = from_json(folder);
    assert_eq!(tokenizer.algorithm(), algorithm, "{name}");
    let n = check_cases(name, &tokenizer, &cases, true);
    println!("{name}: {n} cases exact");
}

#[test]
fn minilm_tokenizer_json_cases_encode_exactly() {
    check_tokenizer_json("minilm-l6-v2", "WordPiece");
}

/// Tests on models that are not in the repository: see `scripts/test`.
mod further_data {
    use super::*;

    #[test]
    fn model_tokenizer_cases_encode_exactly() {
        let Some(data) = common::data(&["stories260k", "stories260k-wide", "tinystories656k"]) else { return };
        let stories = data.join("stories260k");
        let tiny = data.join("tinystories656k");
        let cases = |folder: &Path| read_json(folder.join("tokenizer_cases.json"));
        check_cases("stories260k GGUF", &from_gguf(stories.join("stories260k-q4_0.gguf")), &cases(&stories), true);
        // The crate decodes <unk> with the space of its normalizer; SentencePiece does not.
        check_cases("tinystories656k GGUF", &from_gguf(tiny.join("tinystories656k-q5_0.gguf")), &cases(&tiny), false);
        let wide = data.join("stories260k-wide/stories260k-wide-mixed.gguf");
        check_cases("stories260k-wide GGUF", &from_gguf(wide), &cases(&stories), true);
    }

    #[test]
    fn published_tokenizer_json_cases_encode_exactly() {
        for name in ["stories260k", "tinystories656k"] {
            check_tokenizer_json(name, "BPE");
        }
    }

    #[test]
    fn model_prompts_encode_exactly() {
        let Some(data) = common::data(&["stories260k", "stories260k-wide", "tinystories656k"]) else { return };
        let models = [
            ("stories260k", "stories260k-f16.gguf"),
            ("stories260k-wide", "stories260k-wide-q2_k.gguf"),
            ("tinystories656k", "tinystories656k-q8_0.gguf"),
        ];
        for (name, file) in models {
            let tokenizer = from_gguf(data.join(name).join(file));
            let mut texts = 0;
            for case in read_json(data.join(name).join("cases.json"))["cases"].as_array().unwrap() {
                let Some(text) = case["text"].as_str() else { continue };
                let want = ids(&case["ids"]);
                let with_bos = want.first() == tokenizer.bos_id().as_ref();
                assert_eq!(tokenizer.encode(text, with_bos).unwrap(), want, "{name}: {text:?}");
                texts += 1;
            }
            println!("{name}: {texts} prompts exact");
            assert!(texts > 5);
        }
    }
}

#[test]
fn special_tokens_are_known_by_role_and_name() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let qwen = Tokenizer::from_vocab(qwen2_vocab(&data)).unwrap();
    assert_eq!((qwen.vocab_size(), qwen.bos_id()), (151_646, None));
    assert_eq!(qwen.eos_ids(), [151_645, 151_643]);
    assert_eq!(qwen.special_id("<|im_start|>"), Some(151_644));
    assert!(qwen.is_control(151_644) && !qwen.is_control(0) && !qwen.is_control(u32::MAX));

    let bert = from_gguf(data.join("vocab/ggml-vocab-bert-bge.gguf"));
    assert_eq!(bert.encode("", true).unwrap(), [101, 102]);
    assert_eq!(bert.encode_with("a [MASK] b", PARSE_SPECIAL).unwrap(), [1037, 103, 1038]);
}

#[test]
fn special_token_names_are_text_unless_parsed() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let prompt = "<|im_start|>user\nhi<|im_end|>";
    let qwen = Tokenizer::from_vocab(qwen2_vocab(&data)).unwrap();
    let as_text = qwen.encode(prompt, true).unwrap();
    assert!(as_text.iter().all(|&id| !qwen.is_control(id)));
    assert_eq!(qwen.decode(&as_text, true).unwrap(), prompt);
    assert_eq!(qwen.encode_with(prompt, PARSE_SPECIAL).unwrap(), [151_644, 872, 198, 6023, 151_645]);
    assert_eq!(qwen.decode(&[151_644, 872, 198, 6023, 151_645], true).unwrap(), "user\nhi");
    assert_eq!(qwen.decode(&[151_644, 872, 198, 6023, 151_645], false).unwrap(), prompt);
}

#[test]
fn text_after_a_special_token_gets_the_space_prefix() {
    let stories = stories();
    assert_eq!((stories.vocab_size(), stories.bos_id(), stories.eos_ids()), (1024, Some(1), &[2][..]));
    assert!(!stories.encode("<s>a</s>", true).unwrap()[1..].contains(&1));
    let a = stories.encode("a", false).unwrap();
    assert_eq!(stories.encode_with("<s>a", PARSE_SPECIAL).unwrap(), [&[1], &a[..]].concat());
}

/// Merging must not produce a control token, even if the vocabulary could spell it.
#[test]
fn merging_never_reaches_a_control_token() {
    let tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s", "▁"].map(String::from).to_vec();
    let mut token_types = vec![TokenType::Normal; tokens.len()];
    token_types[0] = TokenType::Unknown;
    token_types[1..3].fill(TokenType::Control);
    let vocab =
        Vocab { model: "llama".into(), scores: vec![0.0; tokens.len()], tokens, token_types, ..Vocab::default() };
    let tokenizer = Tokenizer::from_vocab(vocab).unwrap();
    assert_eq!(tokenizer.encode("<s>", false).unwrap(), [7, 6, 5]);
}

#[test]
fn user_defined_tokens_are_found_first_and_longest() {
    let tokens = ["<unk>", "a", "b", "ab", "▁", "▁a", "aa", "aab"].map(String::from).to_vec();
    let mut token_types = vec![TokenType::Normal; tokens.len()];
    token_types[0] = TokenType::Unknown;
    token_types[6..8].fill(TokenType::UserDefined);
    let vocab = Vocab {
        model: "llama".into(),
        scores: vec![0.0; tokens.len()],
        tokens,
        token_types,
        add_bos: Some(false),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::from_vocab(vocab).unwrap();
    assert_eq!(tokenizer.encode("aabaaa", false).unwrap(), [7, 6, 5]);
    assert_eq!(tokenizer.encode("b aaz?a", false).unwrap(), [4, 2, 4, 6, 4, 0, 1]);
}

#[test]
fn merges_follow_scores_and_ties_go_left() {
    let tokens = ["<unk>", "a", "b", "c", "ab", "bc", "aa"].map(String::from).to_vec();
    let vocab = |ab: f32, bc: f32| Vocab {
        model: "llama".into(),
        tokens: tokens.clone(),
        scores: vec![0.0, 0.0, 0.0, 0.0, ab, bc, -9.0],
        unk_id: Some(0),
        add_bos: Some(false),
        add_space_prefix: Some(false),
        ..Vocab::default()
    };
    let encode = |ab, bc, text: &str| Tokenizer::from_vocab(vocab(ab, bc)).unwrap().encode(text, false).unwrap();
    assert_eq!(encode(-1.0, -2.0, "abc"), [4, 3]);
    assert_eq!(encode(-2.0, -1.0, "abc"), [1, 5]);
    assert_eq!(encode(-1.0, -1.0, "abc"), [4, 3]);
    assert_eq!(encode(-1.0, -1.0, "aaaaa"), [6, 6, 1]);
}

/// Pieces of a stream, and the rest at its end.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> (Vec<String>, String) {
    let mut decoder = tokenizer.decoder().with_special();
    let pieces = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    (pieces, decoder.finish())
}

#[test]
fn streaming_emits_whole_characters_only() {
    let stories = stories();
    let byte = |byte: u32| byte + 3;
    let emoji = [0xF0, 0x9F, 0xA6, 0x99].map(byte);
    let (pieces, rest) = stream(&stories, &emoji);
    assert_eq!((pieces.concat().as_str(), pieces[3].as_str(), rest.as_str()), ("🦙", "🦙", ""));
    // Truncated: nothing until the end, where one character replaces the rest.
    assert_eq!(stream(&stories, &emoji[..3]), (vec![String::new(); 3], "\u{FFFD}".into()));
    // An invalid sequence: detected when the next byte arrives.
    let (pieces, rest) = stream(&stories, &[byte(0xF0), byte(0x9F), byte(b'a'.into()), byte(0xFF), byte(0x80)]);
    assert_eq!((pieces, rest.as_str()), (["", "", "\u{FFFD}a", "\u{FFFD}", "\u{FFFD}"].map(String::from).to_vec(), ""));
}

#[test]
fn streaming_of_byte_level_bpe_emits_whole_characters_only() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let qwen = Tokenizer::from_vocab(qwen2_vocab(&data)).unwrap();
    let ids = qwen.encode("🦙🏽‍♀️ 各", false).unwrap();
    let (pieces, rest) = stream(&qwen, &ids);
    assert_eq!((pieces.concat().as_str(), rest.as_str()), ("🦙🏽‍♀️ 各", ""));
    assert!(pieces.iter().any(String::is_empty) && !pieces.concat().contains(char::REPLACEMENT_CHARACTER));
}

#[test]
fn streamed_pieces_join_to_the_decoded_text() {
    let Some(data) = common::data(&["vocab"]) else { return };
    for (name, tokenizer, _) in vocabularies(&data) {
        let size = tokenizer.vocab_size() as u32;
        let mut state = 1u32;
        for round in 0..300 {
            // Low ids are bytes in most vocabularies, so half of the rounds have many broken characters.
            let range = if round % 2 == 0 { size } else { 260 };
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) % range
            };
            let ids: Vec<u32> = (0..40).map(|_| next()).collect();
            let (pieces, rest) = stream(&tokenizer, &ids);
            assert_eq!(pieces.concat() + &rest, tokenizer.decode(&ids, false).unwrap(), "{name}: {ids:?}");
        }
    }
}

#[test]
fn finished_decoder_can_be_reused() {
    let stories = stories();
    let ids = stories.encode("Once upon", false).unwrap();
    let mut decoder = stories.decoder();
    for _ in 0..2 {
        let text: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!(text + &decoder.finish(), "Once upon");
    }
}

#[test]
fn text_survives_encoding_and_decoding() {
    let Some(data) = common::data(&["vocab"]) else { return };
    for (name, tokenizer, _) in
        vocabularies(&data).into_iter().filter(|(name, ..)| *name == "llama-spm" || *name == "gpt-2")
    {
        for text in random_texts(2000) {
            // SentencePiece encodes spaces as U+2581, so that character decodes to a space.
            let want = if name == "llama-spm" { text.replace('▁', " ") } else { text.clone() };
            let ids = tokenizer.encode(&text, true).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), want, "{name}");
        }
    }
}

#[test]
fn ids_outside_the_vocabulary_are_errors() {
    let stories = stories();
    for id in [1024, u32::MAX] {
        let message = stories.decode(&[1, id], true).unwrap_err().to_string();
        assert_eq!(message, format!("tokenizer: token id is {id}, expected below the vocabulary size 1024"));
        assert!(stories.token_bytes(id).is_err() && stories.decoder().push(id).is_err());
    }
    assert_eq!((stories.token_bytes(13).unwrap(), stories.token_bytes(0).unwrap()), (&b"\n"[..], &b"<unk>"[..]));
}

#[test]
fn long_runs_take_linear_time() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let n_chars = if common::is_full() { 1_000_000 } else { 250_000 };
    let runs = [" ", "a", "\n", "\u{301}", "'", "1", "中", "\t ", "é"];
    for (name, tokenizer, _) in vocabularies(&data) {
        for run in runs {
            let text = run.repeat(n_chars / run.chars().count());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, false).unwrap();
            let elapsed = start.elapsed();
            println!("{name}: {n_chars} of {run:?} in {:.2} s, {} ids", elapsed.as_secs_f64(), ids.len());
            // Quadratic time would be many minutes; the limit allows for an unoptimised build on a busy machine.
            assert!(elapsed.as_secs() < 60, "{name}: {run:?}");
        }
    }
}

#[test]
fn encoding_cache_counts_hits_and_evicts_the_oldest() {
    let tokenizer = Arc::new(stories());
    let cache = EncodingCache::new(Arc::clone(&tokenizer), NonZeroUsize::new(2).unwrap());
    let plain = EncodeOptions::default();
    for (text, hits, misses) in [("a", 0, 1), ("b", 0, 2), ("a", 1, 2), ("c", 1, 3), ("a", 2, 3), ("b", 2, 4)] {
        assert_eq!(cache.encode(text, plain).unwrap()[..], tokenizer.encode(text, false).unwrap());
        assert_eq!((cache.hits(), cache.misses()), (hits, misses), "{text}");
    }
    assert!((cache.hit_rate() - 2.0 / 6.0).abs() < 1e-12);
    // Options are part of the cache key.
    let with_bos = cache.encode("a", EncodeOptions { add_special: true, ..plain }).unwrap();
    assert_eq!((with_bos[0], cache.misses(), cache.len()), (1, 5, 2));
    // Very long texts are not cached.
    let long = "a".repeat(1 << 17);
    assert_eq!(cache.encode(&long, plain).unwrap(), cache.encode(&long, plain).unwrap());
    assert_eq!((cache.misses(), cache.len()), (7, 2));
    cache.clear();
    assert!(cache.is_empty());
    assert_eq!((cache.hits(), cache.misses(), cache.hit_rate()), (0, 0, 0.0));

    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for text in random_texts(500) {
                    assert_eq!(cache.encode(&text, plain).unwrap()[..], tokenizer.encode(&text, false).unwrap());
                }
            });
        }
    });
    assert_eq!(cache.hits() + cache.misses(), 2000);
}

/// A `tokenizer.json` of byte-level BPE over a vocabulary.
fn byte_level_json(vocab: &Vocab, normalizer: Value, pre_tokenizer: Value, post_processor: Value) -> Value {
    let typed = || vocab.tokens.iter().zip(&vocab.token_types).enumerate();
    let tokens =
        typed().filter(|(_, (_, kind))| **kind == TokenType::Normal).map(|(id, (token, _))| (token.clone(), json!(id)));
    let is_added = |kind: TokenType| matches!(kind, TokenType::Control | TokenType::UserDefined);
    let added = typed().filter(|(_, (_, kind))| is_added(**kind)).map(|(id, (token, kind))| {
        json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": *kind == TokenType::Control })
    });
    json!({
        "version": "1.0",
        "truncation": { "max_length": 1, "strategy": "LongestFirst", "stride": 5 },
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": false, "byte_fallback": false, "vocab": tokens.collect::<serde_json::Map<_, _>>(), "merges": vocab.merges,
        },
    })
}

fn qwen2_json(data: &Data) -> Value {
    let regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let pre_tokenizer = json!({ "type": "Sequence", "pretokenizers": [split, byte_level] });
    byte_level_json(&qwen2_vocab(data), json!({ "type": "NFC" }), pre_tokenizer, Value::Null)
}

/// The crate's own tokenizer, without the file's truncation.
fn oracle(mut file: Value) -> tokenizers::Tokenizer {
    file["truncation"] = Value::Null;
    file["padding"] = Value::Null;
    tokenizers::Tokenizer::from_bytes(file.to_string()).unwrap()
}

/// Compares our ids and texts with the crate's on random text.
fn assert_equals_crate(name: &str, own: &Tokenizer, oracle: &tokenizers::Tokenizer) {
    // Around the longest word that BERT splits.
    let long_words = (99..103).map(|len| "a".repeat(len));
    for text in random_texts(4000).chain(long_words) {
        let want = oracle.encode_fast(text.as_str(), true).unwrap();
        assert_eq!(own.encode(&text, true).unwrap(), want.get_ids(), "{name}: {text:?}");
        // The crate decodes each invalid byte to U+FFFD; these texts are valid.
        let (own_text, want_text) = (own.decode(want.get_ids(), true).unwrap(), oracle.decode(want.get_ids(), true));
        assert_eq!(own_text, want_text.unwrap(), "{name}: {text:?}");
    }
}

#[test]
fn the_built_in_vocabulary_equals_the_tokenizers_crate_on_random_text() {
    assert_equals_crate("stories", &stories(), &oracle(stories_json()));
}

#[test]
fn minilm_equals_the_tokenizers_crate_on_random_text() {
    let Some(data) = common::data(&["minilm-l6-v2"]) else { return };
    let folder = data.join("minilm-l6-v2");
    let file = oracle(read_json(folder.join("tokenizer.json")));
    assert_equals_crate("minilm", &from_json(folder), &file);
    match common::find_data(Path::new("vocab")) {
        Some(vocab) => assert_equals_crate("bert", &from_gguf(vocab.join("ggml-vocab-bert-bge.gguf")), &file),
        None => common::skip_part("no test data `vocab`"),
    }
}

#[test]
fn qwen2_equals_the_tokenizers_crate_on_random_text() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let qwen = qwen2_json(&data);
    let from_file = Tokenizer::from_json(qwen.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
    let oracle = oracle(qwen);
    assert_equals_crate("qwen2 vocab", &Tokenizer::from_vocab(qwen2_vocab(&data)).unwrap(), &oracle);
    assert_equals_crate("qwen2 tokenizer.json", &from_file, &oracle);
}

#[test]
fn tokenizer_json_template_adds_special_tokens() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let vocab = gguf_vocab(data.join("vocab/ggml-vocab-gpt-2.gguf"));
    let special = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
    let template = json!({
        "type": "TemplateProcessing",
        "single": [special("<|endoftext|>"), { "Sequence": { "id": "A", "type_id": 0 } }, special("<|endoftext|>")],
        "pair": [],
        "special_tokens": { "<|endoftext|>": { "id": "<|endoftext|>", "ids": [50256], "tokens": ["<|endoftext|>"] } },
    });
    let pre_tokenizer =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let file = byte_level_json(&vocab, Value::Null, pre_tokenizer, template);
    let config =
        TokenizerConfig::from_json(br#"{"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}"#)
            .unwrap();
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes(), &config).unwrap();
    assert_eq!(tokenizer.encode("Hello world", true).unwrap(), [50256, 15496, 995, 50256]);
    assert_eq!(tokenizer.encode("Hello world", false).unwrap(), [15496, 995]);
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_ids()), (Some(50256), &[50256][..]));
    assert!(tokenizer.encode("<|endoftext|>", false).unwrap().iter().all(|&id| id != 50256));
}

/// `tokenizer.json` files of BPE over characters: the given one with each part replaced in turn, by name.
fn character_variants(base: &Value) -> Vec<(String, Value)> {
    let mut variants: Vec<(String, Value)> = vec![("as it is".into(), base.clone())];
    let mut add = |name: &str, parts: &[(&str, Value)]| {
        let mut file = base.clone();
        for (pointer, value) in parts {
            let (parent, field) = pointer.rsplit_once('/').unwrap();
            file.pointer_mut(parent).unwrap()[field] = value.clone();
        }
        variants.push((name.into(), file));
    };
    let replace = |pattern: &str, content: &str| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
    let prepend = |text: &str| json!({ "type": "Prepend", "prepend": text });
    let normalizers = |steps: Value| json!({ "type": "Sequence", "normalizers": steps });
    let pre_tokenizers = |steps: Value| json!({ "type": "Sequence", "pretokenizers": steps });
    let split = |pattern: &str, behavior: &str| json!({ "type": "Split", "pattern": { "String": pattern }, "behavior": behavior, "invert": false });
    let metaspace = |scheme: &str, split: bool| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split });

    for scheme in ["always", "first", "never"] {
        for split in [true, false] {
            let step = metaspace(scheme, split);
            let parts = [("/normalizer", Value::Null), ("/pre_tokenizer", step.clone()), ("/decoder", step)];
            add(&format!("Metaspace {scheme} {split}"), &parts);
        }
    }
    add(
        "Metaspace of old files",
        &[
            ("/normalizer", Value::Null),
            (
                "/pre_tokenizer",
                json!({ "type": "Metaspace", "replacement": "_", "add_prefix_space": true, "str_rep": "_" }),
            ),
            ("/decoder", json!({ "type": "Metaspace", "replacement": "_", "add_prefix_space": true })),
        ],
    );
    let no_strip =
        json!({ "type": "Sequence", "decoders": [replace("▁", " "), { "type": "ByteFallback" }, { "type": "Fuse" }] });
    add(
        "Gemma",
        &[
            ("/normalizer", replace(" ", "▁")),
            ("/pre_tokenizer", split(" ", "MergedWithPrevious")),
            ("/decoder", no_strip.clone()),
        ],
    );
    for fuse in [true, false] {
        let parts = [("/model/byte_fallback", json!(false)), ("/model/fuse_unk", json!(fuse))];
        add(&format!("no byte_fallback, fuse_unk {fuse}"), &parts);
    }
    add(
        "ignore_merges",
        &[
            ("/model/ignore_merges", json!(true)),
            ("/normalizer", Value::Null),
            ("/pre_tokenizer", metaspace("always", true)),
        ],
    );
    add("NFC", &[("/normalizer", normalizers(json!([{ "type": "NFC" }, prepend("▁"), replace(" ", "▁")])))]);
    add(
        "longer texts",
        &[(
            "/normalizer",
            normalizers(json!([replace("th", "s he"), replace("ee", ""), prepend(" th "), replace(" ", "▁")])),
        )],
    );
    for behavior in ["Isolated", "MergedWithPrevious", "MergedWithNext"] {
        for scheme in ["always", "first"] {
            let steps = json!([split("s", behavior), { "type": "Sequence", "pretokenizers": [split("he", "Isolated")] }, metaspace(scheme, true)]);
            let parts = [("/normalizer", Value::Null), ("/pre_tokenizer", pre_tokenizers(steps))];
            add(&format!("Split {behavior} and Metaspace {scheme}"), &parts);
        }
    }
    add("Split behind a normalizer", &[("/pre_tokenizer", split("▁", "MergedWithNext"))]);
    add("no decoder", &[("/decoder", Value::Null)]);
    add("another decoder", &[("/decoder", replace("▁", "  "))]);
    add("no post-processor", &[("/post_processor", Value::Null)]);
    // Old files have merges as strings, and a pair may occur twice.
    let pairs = base["model"]["merges"].as_array().unwrap().iter();
    let mut strings: Vec<String> = pairs
        .map(|pair| match pair.as_array() {
            Some(halves) => format!("{} {}", halves[0].as_str().unwrap(), halves[1].as_str().unwrap()),
            None => pair.as_str().unwrap().to_owned(),
        })
        .collect();
    strings.extend_from_within(..20);
    add("merges as strings", &[("/model/merges", json!(strings))]);
    variants
}

/// Adds tokens of every kind to a `tokenizer.json`, and returns their names.
fn add_tokens(file: &mut Value, normalized: bool) -> Vec<String> {
    // lstrip, rstrip, single_word, special
    let tokens = [
        ("<x>", [false, false, false, true]),
        ("<|user|>", [false, true, false, true]),
        ("<mask>", [true, false, false, true]),
        ("<|both|>", [true, true, false, true]),
        ("word", [false, false, true, false]),
        ("[W]", [true, true, true, true]),
        ("\n\n", [false, false, false, false]),
        ("  ", [false, true, false, false]),
        (" x", [true, false, false, false]),
        ("x>y", [false, false, false, false]),
        ("▁▁", [false, false, false, false]),
        ("é", [false, true, true, false]),
    ];
    // Metaspace cannot decode tokens with spaces, and normalizers must keep all of them distinct.
    let plain = file["decoder"]["type"] == "Metaspace" || normalized;
    let vocab = &file["model"]["vocab"];
    let known: HashMap<String, usize> = match vocab.as_array() {
        Some(scored) => (0..).zip(scored).map(|(id, token)| (token[0].as_str().unwrap().into(), id)).collect(),
        None => {
            vocab.as_object().unwrap().iter().map(|(text, id)| (text.clone(), id.as_u64().unwrap() as usize)).collect()
        }
    };
    let n_vocab = known.len();
    let mut names = Vec::new();
    for (name, [lstrip, rstrip, single_word, special]) in tokens {
        // SentencePiece's rules turn line breaks into spaces.
        let becomes_spaces = normalized && file["model"]["type"] == "Unigram" && name.trim().is_empty();
        if plain && name.contains(' ') || becomes_spaces {
            continue;
        }
        let id = n_vocab + names.len();
        if known.contains_key(name) {
            continue;
        }
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": name, "special": special, "normalized": normalized,
            "lstrip": lstrip, "rstrip": rstrip, "single_word": single_word,
        }));
        names.push(name.to_owned());
    }
    names
}

/// Random texts with token names, broken names, runs and control characters.
fn texts_with(names: &[String], n: usize) -> impl Iterator<Item = String> {
    let mut inserts: Vec<&str> = names.iter().map(String::as_str).collect();
    inserts.extend([
        "<s>",
        "</s>",
        "<unk>",
        "<|start_story|>",
        "<|end_story|>",
        "<0x41>",
        "<s",
        "x>",
        "|>",
        "_",
        "word",
    ]);
    inserts.extend(["          ", "\n\n\n", "▁▁▁", " x", "\0", "\u{1}\u{7f}", "\u{85}", "the", "Once upon a time"]);
    inserts.extend(["👩‍👩‍👧", "\u{10ffff}", "e\u{301}", "ＡＢ", "สวัสดี"]);
    let inserts: Vec<String> = inserts.into_iter().map(str::to_owned).collect();
    random_texts(n).enumerate().map(move |(at, text)| {
        let mut mixed = String::new();
        for (place, c) in text.chars().enumerate() {
            mixed.push(c);
            let choice = (at * 31 + place * 17 + c as usize * 7) % (inserts.len() * 5);
            mixed.push_str(inserts.get(choice).map_or("", String::as_str));
        }
        mixed
    })
}

/// Compares ids with and without parsing, decoding with and without special tokens, and the streamed text.
fn assert_equals_oracle(name: &str, file: &Value, texts: impl Iterator<Item = String>) {
    let own = Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default())
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let is_unigram = file["model"]["type"] == "Unigram";
    assert_eq!(own.algorithm(), if is_unigram { "Unigram" } else { "BPE" }, "{name}");
    let names: Vec<&str> = own.special_tokens().map(|(name, _)| name).collect();
    let parsing = oracle(file.clone());
    let mut plain = parsing.clone();
    plain.set_encode_special_tokens(true);
    let added = file["added_tokens"].as_array().unwrap().iter().filter(|token| token["special"] == true);
    let special: Vec<u32> = added.map(|token| token["id"].as_u64().unwrap() as u32).collect();
    for text in texts {
        for (oracle, parse_special) in [(&plain, false), (&parsing, true)] {
            // The crate's Unigram matches special tokens by name anywhere.
            if is_unigram && !parse_special && names.iter().any(|name| text.contains(name)) {
                continue;
            }
            let want = oracle.encode_fast(text.as_str(), true).unwrap();
            let ids = own.encode_with(&text, EncodeOptions { add_special: true, parse_special }).unwrap();
            assert_eq!(ids, want.get_ids(), "{name}, parse_special {parse_special}: {text:?}");
            for skip_special in [true, false] {
                // The crate does not skip a special token that its normalizer changes, so its ids are filtered here.
                let kept: Vec<u32> = ids.iter().copied().filter(|id| !(skip_special && special.contains(id))).collect();
                let want = oracle.decode(&kept, false).unwrap();
                let whole = own.decode(&ids, skip_special).unwrap();
                assert_eq!(whole, want, "{name}, skip_special {skip_special}: {ids:?} of {text:?}");
            }
            let (pieces, rest) = stream(&own, &ids);
            assert_eq!(pieces.concat() + &rest, own.decode(&ids, false).unwrap(), "{name}: {ids:?}");
        }
    }
}

#[test]
fn bpe_over_characters_equals_the_tokenizers_crate() {
    let [n_texts, n_of_variant] = if common::is_full() { [20_000, 1500] } else { [1500, 100] };
    for (model, base) in character_jsons() {
        assert_equals_oracle(model, &base, texts_with(&[], n_texts).chain([String::new(), " ".into(), "\0".into()]));
        let mut compared = 0;
        for (name, file) in character_variants(&base) {
            assert_equals_oracle(&format!("{model}, {name}"), &file, texts_with(&[], n_of_variant));
            for normalized in [false, true] {
                let mut file = file.clone();
                let names = add_tokens(&mut file, normalized);
                let name = format!("{model}, {name}, added tokens, normalized {normalized}");
                assert_equals_oracle(&name, &file, texts_with(&names, n_of_variant));
                compared += 1;
            }
        }
        println!("{model}: {compared} variants with added tokens equal");
    }
}

/// Features that we do not implement exactly use the crate, or are refused by name without it.
#[test]
fn unsupported_bpe_parts_are_left_to_the_crate_or_refused() {
    let base = stories_json();
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true });
    let mut few_bytes = base["model"]["vocab"].clone();
    let renamed = few_bytes.as_object_mut().unwrap().remove("<0x07>").unwrap();
    few_bytes["<bell>"] = renamed;
    let added = |content: &str, normalized: bool| json!({ "id": 1024, "content": content, "special": false, "normalized": normalized, "lstrip": false, "rstrip": false, "single_word": false });
    let regex = json!({ "type": "Split", "pattern": { "Regex": "c+" }, "behavior": "Isolated", "invert": false });
    let removed = json!({ "type": "Split", "pattern": { "String": "c" }, "behavior": "Removed", "invert": false });
    let late = json!({ "type": "Sequence", "decoders": [{ "type": "Fuse" }, { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }] });
    let cases = [
        ("/normalizer", json!({ "type": "Lowercase" }), "normalizer"),
        ("/normalizer", json!({ "type": "Replace", "pattern": { "Regex": " +" }, "content": "▁" }), "normalizer"),
        ("/pre_tokenizer", regex, "pre_tokenizer"),
        ("/pre_tokenizer", removed, "pre_tokenizer"),
        ("/pre_tokenizer", metaspace.clone(), "pre_tokenizer"),
        (
            "/pre_tokenizer",
            json!({ "type": "Sequence", "pretokenizers": [metaspace.clone(), metaspace.clone()] }),
            "pre_tokenizer",
        ),
        ("/decoder", late, "decoder"),
        ("/model/end_of_word_suffix", json!("</w>"), "model"),
        ("/model/vocab", few_bytes, "model.byte_fallback"),
        ("/added_tokens/0/id", json!(0.0), "added_tokens[0]"),
        ("/added_tokens/1", added("<new>", false), "added_tokens[2]"),
    ];
    for (pointer, value, part) in cases {
        let mut file = base.clone();
        *file.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value.clone();
        if value == metaspace {
            // The crate's "first" depends on how the rewritten text was split.
            file["added_tokens"][2]["normalized"] = json!(true);
        }
        if part == "added_tokens[2]" {
            // Ids of added tokens must be consecutive.
            file["added_tokens"][2] = added("<other>", false);
            file["added_tokens"][2]["id"] = json!(1026);
        }
        match Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()) {
            Ok(tokenizer) => {
                assert_eq!((tokenizer.algorithm(), cfg!(feature = "tokenizer-json")), ("tokenizers", true), "{part}")
            }
            Err(Error::Unsupported { field, .. }) => assert_eq!(field, part),
            // Refused even by the crate's own checks.
            Err(Error::Tokenizer { .. }) if cfg!(feature = "tokenizer-json") || pointer == "/added_tokens/0/id" => {}
            Err(error) => panic!("{part}: {error}"),
        }
    }
}

#[test]
fn bpe_over_characters_takes_linear_time() {
    let n_chars = if common::is_full() { 1_000_000 } else { 250_000 };
    for (model, base) in character_jsons() {
        for (name, file) in character_variants(&base) {
            if !["as it is", "Metaspace always true", "Gemma", "no byte_fallback, fuse_unk true"]
                .contains(&name.as_str())
            {
                continue;
            }
            // With and without tokens that are spaces or swallow spaces.
            let mut with_tokens = file.clone();
            add_tokens(&mut with_tokens, false);
            for (file, runs) in [
                (file, &[" ", "a", "\n", "中", "é", "▁", "the ", "\0"][..]),
                (with_tokens, &[" ", "\n", "▁", "é", "<mask> ", "[W] "]),
            ] {
                let tokenizer = Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
                for run in runs {
                    let text = run.repeat(n_chars / run.chars().count());
                    let start = Instant::now();
                    let ids = tokenizer.encode_with(&text, PARSE_SPECIAL).unwrap();
                    let elapsed = start.elapsed();
                    println!(
                        "{model}, {name}: {n_chars} of {run:?} in {:.2} s, {} ids",
                        elapsed.as_secs_f64(),
                        ids.len()
                    );
                    assert!(elapsed.as_secs() < 60, "{model}, {name}: {run:?}");
                }
            }
        }
    }
}

#[test]
fn bpe_over_characters_keeps_special_names_as_text() {
    let config =
        TokenizerConfig::from_json(br#"{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}"#).unwrap();
    let stories = Tokenizer::from_json(stories_json().to_string().as_bytes(), &config).unwrap();
    assert_eq!((stories.vocab_size(), stories.bos_id(), stories.eos_ids()), (1024, Some(1), &[2][..]));
    assert_eq!(stories.special_id("</s>"), Some(2));
    assert!(!stories.encode("</s>", false).unwrap().contains(&2));
    assert!(stories.encode_with("</s>", PARSE_SPECIAL).unwrap().contains(&2));

    // Merges that would spell a control token are refused, and without an unknown token nothing is dropped silently.
    let mut file = stories_json();
    let load = |file: &Value| Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default());
    file["model"]["byte_fallback"] = json!(false);
    file["model"]["unk_token"] = Value::Null;
    let message = load(&file).unwrap().encode("a𐍈", false).unwrap_err().to_string();
    assert!(message.contains("\"𐍈\""), "{message}");
    file["model"]["vocab"]["<"] = json!(1024);
    file["model"]["vocab"]["s>"] = json!(1025);
    file["model"]["merges"].as_array_mut().unwrap().push(json!(["<", "s>"]));
    let message = load(&file).unwrap_err().to_string();
    assert!(message.contains("text tokens (\"<s>\" is not)"), "{message}");
}

#[cfg(feature = "tokenizer-json")]
#[test]
fn foreign_pipelines_keep_special_names_as_text() {
    // A pipeline of whole-word lookup would turn the name into the token.
    let words = json!({
        "added_tokens": [{ "id": 1, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false }],
        "normalizer": null, "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "[UNK]": 0, "</s>": 1, "a": 2 }, "unk_token": "[UNK]" },
    });
    let tokenizer = Tokenizer::from_json(words.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
    assert_eq!(tokenizer.encode("a b", false).unwrap(), [2, 0]);
    assert_eq!(tokenizer.decode(&[2, 2], false).unwrap(), "a a");
    assert_eq!(tokenizer.encode_with("a </s>", PARSE_SPECIAL).unwrap(), [2, 1]);
    let message = tokenizer.encode("a </s>", false).unwrap_err().to_string();
    assert_eq!(message, "tokenizer: text is the name of token 1, expected text that is not a control token");
}

#[test]
fn unigram_matches_the_ids_of_sentencepiece() {
    let file = read_json(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/unigram/cases.json"));
    let tokenizer = Tokenizer::from_vocab(unigram_vocab()).unwrap();
    assert_eq!(tokenizer.algorithm(), "Unigram");
    assert!(check_cases("unigram", &tokenizer, &file, false) > 400);
    let the = tokenizer.encode("the", false).unwrap();
    assert_eq!(tokenizer.encode(" the ", true).unwrap(), [&[0], &the[..], &[2]].concat());
    assert_eq!(tokenizer.encode_with("the</s>the", PARSE_SPECIAL).unwrap(), [&the[..], &[2], &the].concat());
    assert_eq!(tokenizer.decode(&tokenizer.encode("the river ﬁnds", false).unwrap(), true).unwrap(), "the river finds");
    for run in [" ", "the ", "x", "e\u{301}", "😀", "▁"] {
        let start = Instant::now();
        let ids = tokenizer.encode(&run.repeat(1_000_000 / run.chars().count()), false).unwrap();
        println!("10^6 of {run:?} in {:.2} s, {} ids", start.elapsed().as_secs_f64(), ids.len());
    }
}

/// The vocabulary of [`unigram_vocab`] as an XLM-RoBERTa `tokenizer.json`.
fn unigram_json() -> Value {
    read_json(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/unigram/tokenizer.json"))
}

#[test]
fn unigram_of_a_tokenizer_json_equals_the_tokenizers_crate() {
    let base = unigram_json();
    let rules = &base["normalizer"];
    let sequence = |steps: Value| json!({ "type": "Sequence", "normalizers": steps });
    let runs = |content: &str| json!({ "type": "Replace", "pattern": { "Regex": " {2,}" }, "content": content });
    let strip = |left: bool, right: bool| json!({ "type": "Strip", "strip_left": left, "strip_right": right });
    let metaspace = |scheme: &str, split: bool| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split });
    let mut with_bytes = base["model"].clone();
    with_bytes["byte_fallback"] = json!(true);
    let no_bytes = with_bytes.clone();
    let bytes = (0..=255u8).map(|byte| json!([format!("<0x{byte:02X}>"), -20.0]));
    with_bytes["vocab"].as_array_mut().unwrap().extend(bytes);
    let variants: Vec<(&str, Vec<(&str, Value)>)> = vec![
        ("XLM-RoBERTa", vec![]),
        ("T5", vec![("pre_tokenizer", metaspace("always", true))]),
        (
            "BGE-M3",
            vec![("normalizer", sequence(json!([rules, runs(" ")]))), ("pre_tokenizer", metaspace("always", true))],
        ),
        (
            "XLM-RoBERTa of later versions",
            vec![
                ("normalizer", sequence(json!([rules, strip(false, true), runs("▁")]))),
                ("pre_tokenizer", metaspace("always", true)),
            ],
        ),
        ("whole texts", vec![("pre_tokenizer", metaspace("always", false))]),
        ("no space in front", vec![("pre_tokenizer", metaspace("never", true))]),
        ("stripped first", vec![("normalizer", sequence(json!([strip(true, false), runs(""), rules])))]),
        ("stripped", vec![("normalizer", strip(true, true))]),
        ("NFC", vec![("normalizer", json!({ "type": "NFC" }))]),
        ("no normalizer", vec![("normalizer", Value::Null)]),
        ("no pre-tokenizer", vec![("pre_tokenizer", Value::Null), ("decoder", Value::Null)]),
        ("bytes", vec![("model", with_bytes)]),
        ("bytes that are missing", vec![("model", no_bytes)]),
    ];
    let texts = read_json(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/unigram/cases.json"));
    let texts: Vec<String> =
        texts["cases"].as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap().to_owned()).collect();
    // Rules for one character of a grapheme, for two, and for one longer than the limit.
    let graphemes =
        ["\r\n", "①\u{301}", "e\u{301}\u{301}", "c\u{327}\u{301}", "ﾊﾞ", "ｶﾞ", "👩\u{200d}👩", "ﬁ\u{308}", "\0①", "한"]
            .map(String::from);
    let [n_texts, n_with_tokens] = if common::is_full() { [3000, 1500] } else { [400, 200] };
    for (name, parts) in variants {
        let mut file = base.clone();
        parts.into_iter().for_each(|(part, value)| file[part] = value);
        assert_equals_oracle(name, &file, texts.iter().chain(&graphemes).cloned().chain(texts_with(&[], n_texts)));
        for normalized in [false, true] {
            let mut file = file.clone();
            let names = add_tokens(&mut file, normalized);
            assert_equals_oracle(
                &format!("{name}, added tokens, normalized {normalized}"),
                &file,
                texts_with(&names, n_with_tokens),
            );
        }
    }
}

#[test]
fn unigram_of_a_tokenizer_json_keeps_special_names_as_text() {
    let load = |file: &Value| Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default());
    let file = unigram_json();
    let tokenizer = load(&file).unwrap();
    let eos = tokenizer.special_id("</s>").unwrap();
    assert!(!tokenizer.encode("a</s>", false).unwrap().contains(&eos));
    assert!(tokenizer.encode_with("a</s>", PARSE_SPECIAL).unwrap().contains(&eos));

    let fault = |part: &str, value: Value| {
        let mut file = file.clone();
        *file.pointer_mut(part).unwrap() = value;
        load(&file).unwrap_err().to_string()
    };
    let message = fault("/normalizer/precompiled_charsmap", json!("a"));
    assert!(message.contains("normalizer.precompiled_charsmap") && message.contains("base64"), "{message}");
    let message = fault("/normalizer/precompiled_charsmap", json!("AAA="));
    assert!(message.contains("normalizer.precompiled_charsmap is 2, expected at least 4 bytes"), "{message}");
    let mut without = file.clone();
    without["model"]["unk_id"] = Value::Null;
    let message = load(&without).unwrap().encode("a𐍈", false).unwrap_err().to_string();
    assert!(message.contains("\"𐍈\""), "{message}");
}

#[test]
fn unigram_takes_the_highest_scoring_segmentation() {
    let tokens: Vec<String> = ["<unk>", "a", "b", "ab", "ba", "aba"].map(String::from).to_vec();
    let scores = vec![0.0, -1.0, -2.0, -2.5, -1.5, -3.25];
    let kinds = [2, 1, 1, 1, 1, 1].map(|kind| TokenType::try_from(kind).unwrap()).to_vec();
    let vocab = Vocab {
        model: "t5".into(),
        tokens,
        scores,
        token_types: kinds,
        add_eos: Some(false),
        add_sep: Some(false),
        add_space_prefix: Some(false),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::from_vocab(vocab.clone()).unwrap();
    let encode = |text: &str| tokenizer.encode(text, true).unwrap();
    // a + ba is -2.5, ab + a -3.5, aba -3.25; of ab and a + b, -2.5 and -3, the token wins.
    assert_eq!([encode("aba"), encode("ab")], [vec![1, 4], vec![3]]);
    // A run of unknown characters is one token, and so is a space here.
    assert_eq!(encode("aéé b"), [1, 0, 2]);
    let without = Vocab { token_types: [1; 6].map(|kind| TokenType::try_from(kind).unwrap()).to_vec(), ..vocab };
    let message = Tokenizer::from_vocab(without).unwrap().encode("aé", false).unwrap_err().to_string();
    assert!(message.contains("text is \"é\""), "{message}");
}

#[test]
fn broken_vocabularies_of_unigram_are_refused_by_field() {
    let fault = |change: fn(&mut Vocab)| {
        let mut vocab = unigram_vocab();
        change(&mut vocab);
        Tokenizer::from_vocab(vocab).unwrap_err().to_string()
    };
    let cases: [(&str, String); 7] = [
        ("scores is 0", fault(|vocab| vocab.scores.clear())),
        ("charsmap is 3", fault(|vocab| vocab.charsmap.truncate(3))),
        ("charsmap is 4294967295", fault(|vocab| vocab.charsmap[..4].fill(0xff))),
        ("charsmap is 2", fault(|vocab| vocab.charsmap = vec![2, 0, 0, 0, 1, 1, 1])),
        ("charsmap is 7", fault(|vocab| vocab.charsmap = vec![4, 0, 0, 0, 7, 0, 0, 0x80, 0])),
        ("UTF-8", fault(|vocab| vocab.charsmap = vec![4, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0])),
        ("tokens is none", fault(|vocab| vocab.token_types.fill(TokenType::Control))),
    ];
    for (want, message) in cases {
        assert!(message.contains(want) && message.len() < 200, "{want}: {message}");
    }
    // Arbitrary rules: encoding always terminates.
    let mut state = 7u32;
    for _ in 0..200 {
        let mut vocab = unigram_vocab();
        for _ in 0..40 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let at = 4 + (state >> 8) as usize % (vocab.charsmap.len() - 4);
            vocab.charsmap[at] ^= 1 << (state % 8);
        }
        if let Ok(tokenizer) = Tokenizer::from_vocab(vocab) {
            random_texts(20).for_each(|text| drop(tokenizer.encode(&text, false).unwrap()));
        }
    }
}

/// The error for a small SentencePiece vocabulary after `change`.
fn spm_fault(change: impl FnOnce(&mut Vocab)) -> String {
    let tokens: Vec<String> = ["<unk>", "<s>", "</s>", "<0x0A>", "a", "▁a"].map(String::from).to_vec();
    let kinds = [2, 3, 3, 6, 1, 1].map(|kind| TokenType::try_from(kind).unwrap());
    let mut vocab = Vocab {
        model: "llama".into(),
        scores: vec![0.0; tokens.len()],
        tokens,
        token_types: kinds.to_vec(),
        ..Vocab::default()
    };
    assert!(Tokenizer::from_vocab(vocab.clone()).is_ok());
    change(&mut vocab);
    Tokenizer::from_vocab(vocab).unwrap_err().to_string()
}

#[test]
fn broken_vocabularies_are_refused_by_field() {
    let cases: [(&str, String); 14] = [
        ("tokens is 0", spm_fault(|vocab| vocab.tokens.clear())),
        ("scores is 5", spm_fault(|vocab| vocab.scores.truncate(5))),
        ("scores is 0", spm_fault(|vocab| vocab.scores.clear())),
        ("token_types is 7", spm_fault(|vocab| vocab.token_types.push(TokenType::Normal))),
        ("tokens[5] is \"a\", a duplicate of token 4", spm_fault(|vocab| vocab.tokens[5] = "a".into())),
        ("bos_id is 6", spm_fault(|vocab| (vocab.bos_id, vocab.add_bos) = (Some(6), Some(true)))),
        ("eos_id is 6", spm_fault(|vocab| vocab.eos_id = Some(6))),
        ("scores[4] is NaN", spm_fault(|vocab| vocab.scores[4] = f32::NAN)),
        ("tokens[3] is \"<0x-1>\"", spm_fault(|vocab| vocab.tokens[3] = "<0x-1>".into())),
        ("tokens[3] is \"<0xZZ>\"", spm_fault(|vocab| vocab.tokens[3] = "<0xZZ>".into())),
        ("tokens[3] is \"<0x+1>\"", spm_fault(|vocab| vocab.tokens[3] = "<0x+1>".into())),
        ("tokens[3] is \"xxxx", spm_fault(|vocab| vocab.tokens[3] = "x".repeat(1 << 20))),
        ("model is \"plamo\"", spm_fault(|vocab| vocab.model = "plamo".into())),
        ("bos_id is missing", spm_fault(|vocab| vocab.token_types[1] = TokenType::Normal)),
    ];
    for (want, message) in cases {
        assert!(message.contains(want) && message.len() < 200, "{want}: {message}");
    }
    assert!(spm_fault(|vocab| vocab.model = "plamo".into()).contains("llama, gpt2, gemma4, bert, t5"));
    assert!(matches!(TokenType::try_from(7), Err(Error::Tokenizer { .. })));
}

#[test]
fn unencodable_text_without_unknown_token_is_an_error() {
    let vocab = Vocab {
        model: "llama".into(),
        tokens: vec!["a".into(), "▁".into()],
        scores: vec![0.0; 2],
        add_bos: Some(false),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::from_vocab(vocab).unwrap();
    assert_eq!(tokenizer.encode("a a", false).unwrap(), [1, 0, 1, 0]);
    assert!(tokenizer.encode("é", false).unwrap_err().to_string().contains("text is \"é\""));
}

#[test]
fn broken_merges_are_refused() {
    let tokens: Vec<String> = ["a", "b", "ab", "<s>"].map(String::from).to_vec();
    let kinds = [1, 1, 1, 3].map(|kind| TokenType::try_from(kind).unwrap()).to_vec();
    let load = |merge: &str, pre: &str| {
        Tokenizer::from_vocab(Vocab {
            model: "gpt2".into(),
            pre: Some(pre.into()),
            tokens: tokens.clone(),
            token_types: kinds.clone(),
            merges: vec![merge.into()],
            ..Vocab::default()
        })
    };
    assert_eq!(load("a b", "gpt-2").unwrap().encode("abab", false).unwrap(), [2, 2]);
    assert!(load("a b", "gpt-2").unwrap().encode("c", false).unwrap_err().to_string().contains("byte 0x63"));
    for merge in ["ab", "", " ", "a ", " b", "a c", "b a", "a b b", "a <s>", "< s>", "aaaaaaaaaaaaaaaa b"] {
        let message = load(merge, "gpt-2").unwrap_err().to_string();
        assert!(message.starts_with("tokenizer: merges[0] is "), "{merge:?}: {message}");
    }
    let message = load("a b", "klingon").unwrap_err().to_string();
    assert!(message.contains("klingon") && message.contains("gpt-2") && message.contains("qwen2"), "{message}");
}

/// A small valid `tokenizer.json`, changed at a JSON pointer.
fn json_fault(pointer: &str, value: Value) -> Error {
    let added = |id: u32, content: &str| json!({ "id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false });
    let mut file = json!({
        "truncation": null,
        "padding": null,
        "added_tokens": [added(3, "<s>")],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "_" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [{ "type": "Split", "pattern": { "Regex": "c+" }, "behavior": "Isolated", "invert": false }, { "type": "FixedLength", "length": 5 }] },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [3], "tokens": ["<s>"] } },
        },
        "decoder": { "type": "Fuse" },
        "model": { "type": "BPE", "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": ["a b"], "unk_token": null },
    });
    let load = |file: &Value| Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default());
    if cfg!(feature = "tokenizer-json") {
        assert_eq!(load(&file).unwrap().encode("aba", true).unwrap(), [3, 2, 0]);
    }
    *file.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
    load(&file).expect_err(pointer)
}

#[test]
fn broken_tokenizer_json_is_refused() {
    let cases = [
        ("/model", json!(null), "model"),
        ("/model/vocab", json!({}), "model.vocab"),
        ("/model/vocab", json!({ "a": 4294967295u32, "b": 1, "ab": 2 }), "model.vocab"),
        ("/model/vocab", json!({ "a": 4000000000u32, "b": 1, "ab": 2 }), "model.vocab"),
        ("/model/vocab", json!({ "a": -1, "b": 1, "ab": 2 }), "model.vocab"),
        ("/model/vocab", json!({ "a": 1, "b": 1, "ab": 2 }), "token id 1"),
        ("/model/vocab", json!({ "a": 0.5, "b": 1, "ab": 2 }), "model.vocab"),
        ("/model/merges", json!(["ab"]), "model.merges[0]"),
        ("/model/merges", json!([["a", "b", "c"]]), "model.merges[0]"),
        ("/model/merges", json!([["b", "a"]]), "model.merges[0]"),
        ("/model/merges", json!(["a aaaaaaaaaaaaaaa"]), "model.merges[0]"),
        ("/model/merges", json!(7), "merges"),
        ("/model/unk_token", json!("<nothing>"), "model.unk_token"),
        ("/added_tokens/0/content", json!(""), "added_tokens[0]"),
        ("/added_tokens/0/id", json!(4294967295u32), "added_tokens[0]"),
        ("/added_tokens/0/id", json!(2), "token id 2"),
        ("/added_tokens/0/content", json!("a"), "added_tokens[0]"),
        ("/pre_tokenizer/pretokenizers/1/length", json!(0), "pre_tokenizer.length"),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("(a+)+$"), "pre_tokenizer"),
        ("/normalizer/content", json!("x".repeat(1000)), "normalizer"),
        ("/post_processor/single/0/SpecialToken/id", json!("<nothing>"), "post_processor"),
        ("/post_processor/special_tokens/<s>/ids", json!([99]), "post_processor"),
    ];
    for (pointer, value, field) in cases {
        let error = json_fault(pointer, value.clone());
        let named = match &error {
            Error::Tokenizer { field, .. } | Error::Unsupported { field, .. } => field,
            other => panic!("{pointer}: {other}"),
        };
        assert!(named.contains(field), "{pointer} = {value}: {error}");
    }
    let load = |bytes: &[u8]| Tokenizer::from_json(bytes, &TokenizerConfig::default());
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xFF\xFE", "[".repeat(100_000).as_bytes()] {
        assert!(matches!(load(bytes), Err(Error::Format { .. } | Error::Tokenizer { .. })));
    }
    let Err(Error::Format { offset, .. }) = load(b"{\n  \"model\": ?}") else { panic!("not a format error") };
    assert_eq!(offset, 13);
}

#[cfg(feature = "tokenizer-json")]
#[test]
fn pipelines_that_cannot_run_safely_are_refused() {
    for (pointer, value) in [
        ("/decoder", json!({ "type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": true })),
        ("/model/type", json!("Nonsense")),
        ("/normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "AAECAwQFBgcICQ==" })),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("(unclosed")),
    ] {
        let error = json_fault(pointer, value);
        assert!(matches!(error, Error::Tokenizer { .. } | Error::Unsupported { .. }), "{pointer}: {error}");
    }
}

/// Tokens with common prefixes make naive search quadratic.
#[test]
fn user_defined_tokens_with_a_common_prefix_take_linear_time() {
    let mut tokens: Vec<String> = ["<unk>", "a", "▁"].map(String::from).to_vec();
    tokens.extend((1..200).map(|n| "a".repeat(50 * n) + "b"));
    let mut token_types = vec![TokenType::UserDefined; tokens.len()];
    token_types[..3].copy_from_slice(&[TokenType::Unknown, TokenType::Normal, TokenType::Normal]);
    let scores = vec![0.0; tokens.len()];
    let vocab = Vocab { model: "llama".into(), tokens, token_types, scores, add_bos: Some(false), ..Vocab::default() };
    let tokenizer = Tokenizer::from_vocab(vocab).unwrap();
    let start = Instant::now();
    assert_eq!(tokenizer.encode(&"a".repeat(1_000_000), false).unwrap().len(), 1_000_001);
    assert!(start.elapsed().as_secs() < 60);
}
