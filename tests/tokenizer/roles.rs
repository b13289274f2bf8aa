//! Tokens that begin and end a text: one BOS where a model needs it, never two.

use super::*;

/// Byte-level BPE of the 256 bytes, followed by these control tokens.
fn bytes_and(control: &[&str]) -> Vocab {
    let mut tokens: Vec<String> = Vec::new();
    let printable = |byte: u8| (0x21..=0x7E).contains(&byte) || (0xA1..=0xAC).contains(&byte) || byte >= 0xAE;
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let code = if printable(byte) { u32::from(byte) } else { next };
        next += u32::from(!printable(byte));
        tokens.push(char::from_u32(code).unwrap().into());
    }
    tokens.extend(control.iter().map(|name| name.to_string()));
    let mut token_types = vec![TokenType::Normal; 256];
    token_types.resize(tokens.len(), TokenType::Control);
    Vocab { model: "gpt2".into(), pre: Some("gpt-2".into()), tokens, token_types, ..Vocab::default() }
}

fn ends_of(vocab: &Vocab) -> Vec<&str> {
    let tokenizer = Tokenizer::from_vocab(vocab.clone()).unwrap();
    tokenizer.eos_ids().iter().map(|&id| vocab.tokens[id as usize].as_str()).collect()
}

#[test]
fn eos_tokens_come_from_file_keys_and_known_names() {
    let find = |vocab: &Vocab, name: &str| vocab.tokens.iter().position(|token| token == name).map(|id| id as u32);
    // gpt-oss: the token ends a message, not the answer.
    let mut harmony =
        bytes_and(&["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>", "<|message|>"]);
    harmony.eos_id = find(&harmony, "<|return|>");
    assert_eq!(ends_of(&harmony), ["<|return|>", "<|endoftext|>", "<|call|>"]);
    // Even if a key names that token.
    harmony.eot_id = find(&harmony, "<|end|>");
    assert_eq!(ends_of(&harmony), ["<|return|>", "<|endoftext|>", "<|call|>"]);
    let solar = bytes_and(&["<|end|>", "<|calls|>", "<|flush|>"]);
    assert_eq!(ends_of(&solar), ["<|calls|>", "<|flush|>"]);
    // Phi-3: the same token ends the turn.
    let mut phi = bytes_and(&["<|endoftext|>", "<|end|>", "<|user|>"]);
    phi.eos_id = find(&phi, "<|endoftext|>");
    assert_eq!(ends_of(&phi), ["<|endoftext|>", "<|end|>"]);
    let llama = bytes_and(&["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]);
    assert_eq!(ends_of(&llama), ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]);
    let gemma = bytes_and(&["<bos>", "<eos>", "<end_of_turn>", "<start_of_turn>"]);
    assert_eq!(ends_of(&gemma), ["<end_of_turn>", "<eos>"]);
    // GLM: keys name tokens that their texts do not identify.
    let mut glm = bytes_and(&["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"]);
    (glm.eos_id, glm.eot_id, glm.eom_id) =
        (find(&glm, "<|endoftext|>"), find(&glm, "<|user|>"), find(&glm, "<|observation|>"));
    assert_eq!(ends_of(&glm), ["<|endoftext|>", "<|user|>", "<|observation|>"]);
    // An id beyond the vocabulary.
    glm.eom_id = Some(999);
    assert_eq!(ends_of(&glm), ["<|endoftext|>", "<|user|>"]);
    assert!(Tokenizer::from_vocab(glm).unwrap().notices()[0].contains("eom_id is 999"));
    // Tokens that files left unmarked, and texts that are only text.
    let mut unmarked = bytes_and(&["<|im_end|>", "</s>", "[EOS]", "<eos>"]);
    unmarked.token_types[256..].fill(TokenType::Normal);
    unmarked.token_types[256] = TokenType::UserDefined;
    assert_eq!(ends_of(&unmarked), ["<|im_end|>"]);
}

#[test]
fn generation_config_adds_eos_tokens() {
    let mut file = stories_json();
    let names = ["<|turn_end|>", "<|im_end|>"];
    for (n, name) in names.into_iter().enumerate() {
        file["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": 1024 + n, "content": name, "special": true, "normalized": false, "lstrip": false, "rstrip": false,
            "single_word": false,
        }));
    }
    let config = TokenizerConfig {
        eos_token: Some("</s>".into()),
        // An id beyond the vocabulary.
        end_ids: vec![1024, 2, 4000],
        ..TokenizerConfig::default()
    };
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes(), &config).unwrap();
    assert_eq!(tokenizer.eos_ids(), [2, 1024, 1025]);
}

/// The file's BOS setting, and whether parsing the text for special tokens already gives one.
#[test]
fn bos_is_never_added_twice() {
    let mut spm = stories_vocab();
    let mut bytes = bytes_and(&["<s>", "</s>"]);
    for vocab in [&mut spm, &mut bytes] {
        let id = |name: &str| vocab.tokens.iter().position(|token| token == name).map(|id| id as u32);
        (vocab.bos_id, vocab.eos_id) = (id("<s>"), id("</s>"));
    }
    for vocab in [spm, bytes] {
        let bos = vocab.bos_id.unwrap();
        for add_bos in [true, false] {
            let tokenizer = Tokenizer::from_vocab(Vocab { add_bos: Some(add_bos), ..vocab.clone() }).unwrap();
            let n_bos = |text: &str, add_special: bool| {
                let ids = tokenizer.encode_with(text, EncodeOptions { add_special, parse_special: true }).unwrap();
                assert!(ids.iter().skip(1).all(|&id| id != bos), "{text}: {ids:?}");
                usize::from(ids.first() == Some(&bos))
            };
            let found = [n_bos("hi", true), n_bos("<s>hi", true), n_bos("hi", false), n_bos("<s>hi", false)];
            assert_eq!(found, [usize::from(add_bos), 1, 0, 1], "{}, add_bos {add_bos}", vocab.model);
            // A user's text is plain text.
            let ids = tokenizer.encode("<s>hi", true).unwrap();
            assert_eq!(ids.iter().filter(|&&id| id == bos).count(), usize::from(add_bos));
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), "<s>hi");
        }
    }
}
