//! Published vocabularies of many families: llama.cpp's own texts with ids from Hugging Face's tokenizers, and the
//! `tokenizers` crate on random texts.

use super::*;

/// Vocabularies with llama.cpp's texts, besides those of [`vocabularies`].
const WITH_TEXTS: [&str; 9] =
    ["command-r", "deepseek-coder", "deepseek-llm", "falcon", "llama-bpe", "mpt", "phi-3", "refact", "starcoder"];

fn published(data: &Data, name: &str) -> Vocab {
    gguf_vocab(data.join(format!("vocab/ggml-vocab-{name}.gguf")))
}

#[test]
fn family_texts_of_llama_cpp_encode_to_its_ids() {
    let Some(data) = common::data(&["vocab/ggml-vocab-falcon.gguf"]) else { return };
    for name in WITH_TEXTS {
        let tokenizer = Tokenizer::from_vocab(published(&data, name)).unwrap();
        let n = assert_texts(name, &tokenizer, &data.join(format!("vocab/ggml-vocab-{name}.gguf")));
        println!("{name}: {n} texts of llama.cpp exact");
    }
}

fn byte_level(use_regex: bool) -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

fn split(regex: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
}

fn sequence(steps: Value) -> Value {
    json!({ "type": "Sequence", "pretokenizers": steps })
}

const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Pre-tokenizers as in the models' own `tokenizer.json`.
fn pre_tokenizers() -> Vec<(&'static str, Value)> {
    let digits = |each: bool| json!({ "type": "Digits", "individual_digits": each });
    let punctuation = json!({ "type": "Punctuation", "behavior": "Contiguous" });
    let coder = [split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+")];
    let mut deepseek_coder = coder.to_vec();
    deepseek_coder.extend([digits(true), byte_level(false)]);
    vec![
        ("falcon", sequence(json!([punctuation, byte_level(true), split("[0-9][0-9][0-9]")]))),
        ("starcoder", sequence(json!([digits(true), byte_level(true)]))),
        ("refact", sequence(json!([digits(true), byte_level(true)]))),
        ("mpt", byte_level(true)),
        ("llama-bpe", sequence(json!([split(CL100K), byte_level(false)]))),
        ("deepseek-coder", sequence(json!(deepseek_coder))),
        // Predates named pre-tokenizers.
        ("gpt-neox", byte_level(true)),
        ("aquila", byte_level(true)),
    ]
}

#[test]
fn published_byte_level_vocabularies_equal_the_tokenizers_crate() {
    let Some(data) = common::data(&["vocab/ggml-vocab-falcon.gguf"]) else { return };
    for (name, pre_tokenizer) in pre_tokenizers() {
        let vocab = published(&data, name);
        let normalizer = if name == "mpt" { json!({ "type": "NFC" }) } else { Value::Null };
        let mut file = byte_level_json(&vocab, normalizer, pre_tokenizer, Value::Null);
        file["model"]["ignore_merges"] = json!(name == "llama-bpe");
        let own = Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
        assert_eq!(own.algorithm(), "byte-level BPE", "{name}");
        let from_vocab = Tokenizer::from_vocab(vocab).unwrap();
        let oracle = oracle(file);
        for text in random_texts(1500) {
            let want = oracle.encode_fast(text.as_str(), false).unwrap();
            assert_eq!(own.encode(&text, false).unwrap(), want.get_ids(), "{name} tokenizer.json: {text:?}");
            assert_eq!(from_vocab.encode(&text, false).unwrap(), want.get_ids(), "{name} GGUF: {text:?}");
        }
        println!("{name}: equal as GGUF and as tokenizer.json");
    }
}

/// Steps that none of these published vocabularies has, on GPT-2's.
#[test]
fn other_pre_tokenizer_steps_equal_the_tokenizers_crate() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let vocab = published(&data, "gpt-2");
    let digits = |each: bool| json!({ "type": "Digits", "individual_digits": each });
    let punctuation = |behavior: &str| json!({ "type": "Punctuation", "behavior": behavior });
    let o200k = concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    let mut removed = split(o200k);
    (removed["behavior"], removed["invert"]) = (json!("Removed"), json!(true));
    let cases = [
        ("gpt-4o", "gpt-4o", sequence(json!([removed, byte_level(false)]))),
        ("cohere2", "tiny_aya", sequence(json!([split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(o200k), byte_level(false)]))),
        ("bloom", "bloom", sequence(json!([split(r" ?[^(\s|.,!?…。，、।۔،)]+"), byte_level(false)]))),
        ("superbpe", "superbpe", sequence(json!([split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), byte_level(false)]))),
        ("numbers as a whole", "", sequence(json!([digits(false), byte_level(true)]))),
        ("single signs", "", sequence(json!([punctuation("Isolated"), digits(true), byte_level(true)]))),
        ("nested", "command-r", sequence(json!([sequence(json!([digits(true)])), byte_level(true)]))),
    ];
    for (name, pre, pre_tokenizer) in cases {
        let file = byte_level_json(&vocab, Value::Null, pre_tokenizer, Value::Null);
        let own = Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()).unwrap();
        assert_eq!(own.algorithm(), "byte-level BPE", "{name}");
        let by_name = (!pre.is_empty() && pre != "command-r")
            .then(|| Tokenizer::from_vocab(Vocab { pre: Some(pre.into()), ..vocab.clone() }).unwrap());
        let oracle = oracle(file);
        for text in random_texts(1500) {
            let want = oracle.encode_fast(text.as_str(), false).unwrap();
            assert_eq!(own.encode(&text, false).unwrap(), want.get_ids(), "{name}: {text:?}");
            if let Some(by_name) = &by_name {
                assert_eq!(by_name.encode(&text, false).unwrap(), want.get_ids(), "{pre}: {text:?}");
            }
        }
    }
}

/// Steps after `ByteLevel` see bytes in GPT-2's spelling, where some are digits.
#[test]
fn unknown_pre_tokenizer_steps_are_left_to_the_crate() {
    let Some(data) = common::data(&["vocab"]) else { return };
    let vocab = published(&data, "gpt-2");
    let digits = json!({ "type": "Digits", "individual_digits": false });
    let many: Vec<Value> = (0..40).map(|_| digits.clone()).chain([byte_level(true)]).collect();
    for steps in [
        json!([byte_level(true), digits]),
        json!([split("c+"), byte_level(true)]),
        json!([byte_level(false), byte_level(true)]),
        json!(many),
    ] {
        let file = byte_level_json(&vocab, Value::Null, sequence(steps.clone()), Value::Null);
        match Tokenizer::from_json(file.to_string().as_bytes(), &TokenizerConfig::default()) {
            Ok(tokenizer) => assert_eq!(tokenizer.algorithm(), "tokenizers", "{steps}"),
            Err(Error::Unsupported { field, .. }) => assert_eq!(field, "pre_tokenizer"),
            Err(error) => panic!("{steps}: {error}"),
        }
    }
}

/// Text after one of Phi-3's turn tokens is stripped, as its `tokenizer.json` specifies per token.
#[test]
fn phi_3_special_tokens_strip_following_whitespace() {
    let Some(data) = common::data(&["vocab/ggml-vocab-phi-3.gguf"]) else { return };
    let vocab = published(&data, "phi-3");
    let mut file = spm_json(&vocab);
    file["added_tokens"] = Value::Array(Vec::new());
    for (id, name) in vocab.tokens.iter().enumerate().filter(|(id, _)| *id < 3 || (32000..32011).contains(id)) {
        let rstrip = !["<unk>", "<s>", "<|endoftext|>"].contains(&name.as_str());
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": name, "special": name != "</s>", "normalized": false, "lstrip": false, "rstrip": rstrip,
            "single_word": false,
        }));
    }
    let oracle = oracle(file);
    let own = Tokenizer::from_vocab(vocab).unwrap();
    for text in [
        "<|user|>\nHow are you?<|end|>\n<|assistant|>\n",
        "<s><|system|> \n Be brief.<|end|>  <|user|>x",
        "<|endoftext|> a </s> b <|assistant|>",
    ] {
        let want = oracle.encode_fast(text, false).unwrap();
        assert_eq!(own.encode_with(text, PARSE_SPECIAL).unwrap(), want.get_ids(), "{text:?}");
    }
}

/// Baichuan's vocabulary has 64,000 tokens of SentencePiece BPE.
#[test]
fn a_published_sentencepiece_vocabulary_equals_the_tokenizers_crate() {
    let Some(data) = common::data(&["vocab/ggml-vocab-baichuan.gguf"]) else { return };
    let vocab = published(&data, "baichuan");
    let oracle = oracle(spm_json(&vocab));
    let own = Tokenizer::from_vocab(vocab).unwrap();
    for text in random_texts(3000) {
        let want = oracle.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(own.encode(&text, false).unwrap(), want.get_ids(), "{text:?}");
    }
}

/// XLM-RoBERTa's 250,000 tokens with SentencePiece's own character rules, as in its `tokenizer.json`.
#[test]
fn a_published_unigram_vocabulary_equals_the_tokenizers_crate() {
    let Some(data) = common::data(&["vocab/ggml-vocab-nomic-bert-moe.gguf"]) else { return };
    let vocab = published(&data, "nomic-bert-moe");
    let scored = vocab.tokens.iter().zip(&vocab.scores).map(|(token, score)| json!([token, f64::from(*score)]));
    // The last ids are padding.
    let n_tokens = vocab.tokens.iter().position(|token| token == "<mask>").unwrap();
    let charsmap = BASE64_STANDARD.encode(&vocab.charsmap);
    let metaspace = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": { "type": "Precompiled", "precompiled_charsmap": charsmap },
        "pre_tokenizer": sequence(json!([{ "type": "WhitespaceSplit" }, metaspace.clone()])),
        "post_processor": null, "decoder": metaspace,
        "model": { "type": "Unigram", "unk_id": 3, "vocab": scored.take(n_tokens).collect::<Vec<_>>() },
    });
    assert_equals_oracle("nomic-bert-moe", &file, random_texts(1500));

    // GGUF's, which works like SentencePiece itself.
    let file = read_json(data.join("vocab/nomic-bert-moe.cases.json"));
    let n = check_cases("nomic-bert-moe", &Tokenizer::from_vocab(vocab).unwrap(), &file, false);
    println!("nomic-bert-moe: {n} cases of SentencePiece exact");
    assert!(n > 300);
}
