//! BPE over characters in GGUF files: Gemma 4's, and its relatives by name.

use super::*;

/// The built-in vocabulary with runs of line breaks, like Gemma 4's: as a `tokenizer.json` and as a GGUF file's
/// vocabulary.
fn gemma4() -> (Value, Vocab) {
    let mut file = stories_json();
    let names = ["\n\n", "\n\n\n", "\n\n\n\n", "<bos>", "<|turn>", "<turn|>", "<|tool_response>"];
    let mut vocab = stories_vocab();
    for name in names {
        let id = vocab.tokens.len();
        vocab.tokens.push(name.into());
        let is_control = name.starts_with('<');
        vocab.token_types.push(if is_control { TokenType::Control } else { TokenType::Normal });
        file["model"]["vocab"][name] = json!(id);
        if is_control {
            file["added_tokens"].as_array_mut().unwrap().push(json!({
                "id": id, "content": name, "special": true, "normalized": false, "lstrip": false, "rstrip": false,
                "single_word": false,
            }));
        }
    }
    // A line break is a character here, not a byte, as in Gemma's vocabulary.
    let line_break = vocab.tokens.len();
    vocab.tokens.push("\n".into());
    vocab.token_types.push(TokenType::Normal);
    file["model"]["vocab"]["\n"] = json!(line_break);
    for pair in [["\n", "\n"], ["\n\n", "\n\n"], ["\n\n", "\n"]] {
        file["model"]["merges"].as_array_mut().unwrap().push(json!(pair));
    }
    let replace = |pattern: &str, content: &str| json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content });
    file["normalizer"] = replace(" ", "▁");
    file["pre_tokenizer"] =
        json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false });
    file["decoder"] =
        json!({ "type": "Sequence", "decoders": [replace("▁", " "), { "type": "ByteFallback" }, { "type": "Fuse" }] });
    file["post_processor"] = Value::Null;
    let merges = file["model"]["merges"].as_array().unwrap().iter();
    vocab.merges = merges.map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())).collect();
    vocab.model = "gemma4".into();
    vocab.scores.clear();
    (vocab.bos_id, vocab.eos_id, vocab.unk_id, vocab.add_bos) = (None, None, None, Some(false));
    (file, vocab)
}

fn lines(n: usize) -> impl Iterator<Item = String> {
    random_texts(n).enumerate().map(|(at, text)| text.replace('e', &"\n".repeat(at % 7)).replace('t', "  "))
}

#[test]
fn gemma4_equals_the_tokenizers_crate() {
    let (file, vocab) = gemma4();
    let oracle = oracle(file);
    // Files without merges of line breaks give the same ids for runs that are tokens.
    let without =
        Vocab { merges: vocab.merges.iter().filter(|merge| !merge.contains('\n')).cloned().collect(), ..vocab.clone() };
    let (own, without) = (Tokenizer::from_vocab(vocab).unwrap(), Tokenizer::from_vocab(without).unwrap());
    assert_eq!(own.algorithm(), "BPE");
    for text in random_texts(4000).chain(lines(4000)) {
        let want = oracle.encode_fast(text.as_str(), false).unwrap();
        assert_eq!(own.encode(&text, false).unwrap(), want.get_ids(), "{text:?}");
        if !text.contains("\n\n\n\n\n") {
            assert_eq!(without.encode(&text, false).unwrap(), want.get_ids(), "without merges of lines: {text:?}");
        }
        assert_eq!(own.decode(want.get_ids(), true).unwrap(), oracle.decode(want.get_ids(), true).unwrap(), "{text:?}");
    }
    for run in [" ", "a", "\n", "中", "\n a"] {
        let text = run.repeat(200_000 / run.len());
        let start = Instant::now();
        own.encode(&text, false).unwrap();
        assert!(start.elapsed().as_secs() < 60, "{run:?}");
    }
}

/// Its files say not to add BOS, although the model needs it.
#[test]
fn gemma4_begins_with_bos_and_ends_with_a_turn() {
    let (file, vocab) = gemma4();
    let config = TokenizerConfig { bos_token: Some("<bos>".into()), ..TokenizerConfig::default() };
    let from_file = Tokenizer::from_json(file.to_string().as_bytes(), &config).unwrap();
    for tokenizer in [Tokenizer::from_vocab(vocab).unwrap(), from_file] {
        let bos = tokenizer.special_id("<bos>").unwrap();
        assert_eq!(tokenizer.bos_id(), Some(bos));
        let plain = tokenizer.encode("a b", false).unwrap();
        assert_eq!(tokenizer.encode("a b", true).unwrap(), [&[bos], &plain[..]].concat());
        for name in ["<turn|>", "<|tool_response>"] {
            assert!(tokenizer.eos_ids().contains(&tokenizer.special_id(name).unwrap()), "{name}");
        }
        assert!(!tokenizer.eos_ids().contains(&bos));
    }
}

#[test]
fn gemma4_variants_are_recognised_by_name() {
    let (_, vocab) = gemma4();
    let named = |pre: &str| {
        let vocab = Vocab { model: "gpt2".into(), pre: Some(pre.into()), ..vocab.clone() };
        Tokenizer::from_vocab(vocab).unwrap()
    };
    let gemma4 = Tokenizer::from_vocab(vocab.clone()).unwrap();
    let texts = ["one two", " one\n\n\nthe  river", "\nécole"];
    for text in texts {
        let want = gemma4.encode(text, false).unwrap();
        for pre in ["gemma4", "granite-embed-multi-311m", "sarvam-moe"] {
            assert_eq!(named(pre).encode(text, false).unwrap(), want, "{pre}: {text:?}");
        }
    }
    // Every word begins with an implicit space, but line breaks do not.
    let mmbert = named("mmbert");
    let words =
        |words: &[&str]| -> Vec<u32> { words.iter().flat_map(|word| gemma4.encode(word, false).unwrap()).collect() };
    assert_eq!(mmbert.encode("one two\n\nthe", false).unwrap(), words(&[" one", " two", "\n\n", " the"]));
    assert_eq!(mmbert.encode(" one  two", false).unwrap(), words(&[" one", " ", " two"]));
}

#[test]
fn broken_vocabularies_of_gemma4_are_refused_by_field() {
    let fault = |change: fn(&mut Vocab)| {
        let (_, mut vocab) = gemma4();
        change(&mut vocab);
        Tokenizer::from_vocab(vocab).unwrap_err().to_string()
    };
    let cases: [(&str, String); 5] = [
        ("merges[0] is \"a\"", fault(|vocab| vocab.merges[0] = "a".into())),
        ("merges[1] is \"a <bos>\"", fault(|vocab| vocab.merges[1] = "a <bos>".into())),
        (
            "bos_id is missing",
            fault(|vocab| vocab.tokens.iter_mut().filter(|t| *t == "<bos>").for_each(|t| *t = "<x>".into())),
        ),
        (
            "tokens[9] is \"<0xGG>\"",
            fault(|vocab| (vocab.tokens[9], vocab.token_types[9]) = ("<0xGG>".into(), TokenType::Byte)),
        ),
        ("merges is 0", fault(|vocab| vocab.merges.clear())),
    ];
    for (want, message) in cases {
        assert!(message.contains(want) && message.len() < 200, "{want}: {message}");
    }
}
