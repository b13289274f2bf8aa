//! A tiny GPT-2 with scripted output, for any chat template: its next token depends only on the position.

use tilewright::formats::BlockType;
use tilewright::formats::gguf::{Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;

const FFN_DIM: usize = 32;

/// The scripted output.
pub enum Says<'a> {
    /// This byte without end.
    Always(u8),
    /// This text after a prompt of `n` tokens, and then the end.
    Behind(usize, &'a str),
}

/// The vocabulary: a token per byte, then `words`, then `special`, whose last token is EOS.
fn tokens(words: &[&str], special: &[&str]) -> Vec<String> {
    let is_shown = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut n_others = 0;
    let letter = |byte: u8| match is_shown(&byte) {
        true => char::from(byte),
        false => {
            n_others += 1;
            char::from_u32(255 + n_others).unwrap()
        }
    };
    let bytes = (0..=255).map(letter).map(String::from);
    let mut tokens: Vec<String> = bytes.collect();
    tokens.extend(words.iter().chain(special).map(|name| (*name).to_owned()));
    tokens
}

/// A GGUF file with room for `n_positions`.
pub fn gguf(template: &str, special: &[&str], says: &Says, n_positions: usize) -> Vec<u8> {
    // Words of the template are tokens, so that its text is short. The output is bytes.
    let mut words: Vec<&str> = match says {
        Says::Always(_) => template.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| word.len() > 2).collect(),
        Says::Behind(..) => Vec::new(),
    };
    words.sort_unstable();
    words.dedup();
    let n_words = words.len();
    let tokens = tokens(&words, special);
    let n_tokens = tokens.len();
    // The width limits the number of scripted tokens.
    let dim = if let Says::Always(_) = says { 32 } else { 128 };
    let mut header = GgufHeader::new(32);
    let number = |value: usize| Value::U32(value as u32);
    for (key, value) in [
        ("general.architecture", Value::Str("gpt2")),
        ("general.name", Value::Str("scripted")),
        ("gpt2.context_length", number(n_positions)),
        ("gpt2.embedding_length", number(dim)),
        ("gpt2.block_count", number(1)),
        ("gpt2.feed_forward_length", number(FFN_DIM)),
        ("gpt2.attention.head_count", number(1)),
        ("gpt2.attention.layer_norm_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", Value::Str("gpt2")),
        ("tokenizer.ggml.pre", Value::Str("gpt-2")),
        ("tokenizer.ggml.eos_token_id", number(n_tokens - 1)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
        ("tokenizer.chat_template", Value::Str(template)),
    ] {
        header.set(key, value).unwrap();
    }
    let texts: Vec<Value> = tokens.iter().map(|token| Value::Str(token)).collect();
    // Types: 1 is normal, 4 is matched first, 3 is control. DeepSeek's `｜DSML｜` is a part of tags.
    let kind = |id: usize| match id {
        ..256 => 1,
        _ if id < 256 + n_words || tokens[id] == "｜DSML｜" => 4,
        _ => 3,
    };
    let kinds = (0..n_tokens).map(|id| Value::I32(kind(id))).collect::<Vec<_>>();
    header.set_array("tokenizer.ggml.tokens", ValueType::String, texts.into_iter()).unwrap();
    header.set_array("tokenizer.ggml.token_type", ValueType::I32, kinds.into_iter()).unwrap();
    header.set_array("tokenizer.ggml.merges", ValueType::String, std::iter::empty::<Value>()).unwrap();

    // Each position has its own element, cyclically.
    let mut positions = vec![0f32; n_positions * dim];
    positions.chunks_mut(dim).enumerate().for_each(|(at, row)| row[at % dim] = 1.0);
    let (mut output, mut bias) = (vec![0f32; n_tokens * dim], vec![0f32; dim]);
    match says {
        Says::Always(byte) => {
            bias[0] = 40.0;
            output[usize::from(*byte) * dim] = 40.0;
        }
        Says::Behind(n_before, text) => {
            let ids = ids(text, special);
            assert!(ids.len() < dim, "{text:?} is too long");
            for (at, id) in ids.into_iter().chain([n_tokens - 1]).enumerate() {
                output[id * dim + (n_before - 1 + at) % dim] = 10.0;
            }
        }
    }
    let (ones, zeros) = (|n: usize| vec![1f32; n], |n: usize| vec![0f32; n]);
    let tensors = [
        ("token_embd.weight", vec![n_tokens, dim], zeros(n_tokens * dim)),
        ("position_embd.weight", vec![n_positions, dim], positions),
        ("output.weight", vec![n_tokens, dim], output),
        ("output_norm.weight", vec![dim], ones(dim)),
        ("output_norm.bias", vec![dim], bias),
        ("blk.0.attn_norm.weight", vec![dim], ones(dim)),
        ("blk.0.attn_norm.bias", vec![dim], zeros(dim)),
        ("blk.0.attn_qkv.weight", vec![3 * dim, dim], zeros(3 * dim * dim)),
        ("blk.0.attn_qkv.bias", vec![3 * dim], zeros(3 * dim)),
        ("blk.0.attn_output.weight", vec![dim, dim], zeros(dim * dim)),
        ("blk.0.attn_output.bias", vec![dim], zeros(dim)),
        ("blk.0.ffn_norm.weight", vec![dim], ones(dim)),
        ("blk.0.ffn_norm.bias", vec![dim], zeros(dim)),
        ("blk.0.ffn_up.weight", vec![FFN_DIM, dim], zeros(FFN_DIM * dim)),
        ("blk.0.ffn_up.bias", vec![FFN_DIM], zeros(FFN_DIM)),
        ("blk.0.ffn_down.weight", vec![dim, FFN_DIM], zeros(dim * FFN_DIM)),
        ("blk.0.ffn_down.bias", vec![dim], zeros(dim)),
    ];
    for (name, shape, _) in &tensors {
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        header.add_tensor(name, &shape, BlockType::F32).unwrap();
    }
    let mut file = header.to_bytes();
    for (_, _, values) in &tensors {
        file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let padding = header.padding(4 * values.len() as u64);
        file.resize(file.len() + padding, 0);
    }
    file
}

/// Tokens of a text, with names of special tokens encoded as those.
fn ids(text: &str, special: &[&str]) -> Vec<usize> {
    let mut ids = Vec::new();
    let mut rest = text;
    while let Some(&byte) = rest.as_bytes().first() {
        let named = special.iter().enumerate().filter(|(_, name)| rest.starts_with(**name));
        match named.max_by_key(|(_, name)| name.len()) {
            Some((at, name)) => {
                ids.push(256 + at);
                rest = &rest[name.len()..];
            }
            None => {
                assert!(byte.is_ascii(), "{text:?}");
                ids.push(usize::from(byte));
                rest = &rest[1..];
            }
        }
    }
    ids
}
