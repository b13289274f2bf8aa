//! GGUF files made from the built-in model, or for it.

use tilewright::formats::BlockType;
use tilewright::formats::gguf::Value as Key;
use tilewright::formats::gguf_writer::GgufHeader;

use crate::common::{self, Rng};

/// A GGUF file of the model in `assets/` with extra keys before its own, padded so that its weights stay aligned.
pub fn with_templates(default: &str, named: &[(&str, &str)]) -> Vec<u8> {
    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }
    let string = 8u32.to_le_bytes();
    let mut keys = [text("tokenizer.chat_templates"), 9u32.to_le_bytes().to_vec(), string.to_vec()].concat();
    keys.extend((named.len() as u64).to_le_bytes());
    keys.extend(named.iter().flat_map(|(name, _)| text(name)));
    for (name, template) in named {
        keys.extend([text(&format!("tokenizer.chat_template.{name}")), string.to_vec(), text(template)].concat());
    }
    keys.extend([text("tokenizer.chat_template"), string.to_vec()].concat());
    // Pads with a comment in the template.
    let length = keys.len() + text(&format!("{default}{{##}}")).len();
    keys.extend(text(&format!("{default}{{#{}#}}", " ".repeat((32 - length % 32) % 32))));
    let file = std::fs::read(common::repository().join("assets/stories.gguf")).unwrap();
    let n_keys = u64::from_le_bytes(file[16..24].try_into().unwrap()) + 2 + named.len() as u64;
    [&file[..16], &n_keys.to_le_bytes(), &keys, &file[24..]].concat()
}

/// A random adapter for the built-in model, strong enough to change its output.
pub fn adapter_of_stories(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut random = |n: u64| (0..n).map(|_| rng.uniform() as f32).collect::<Vec<f32>>();
    let factors: Vec<_> = (0..5)
        .flat_map(|layer| {
            let name = format!("blk.{layer}.ffn_down.weight");
            let (rank, [n_rows, n_columns]) = (2, [128, 384]);
            [
                (format!("{name}.lora_a"), vec![rank, n_columns], random(rank * n_columns)),
                (format!("{name}.lora_b"), vec![n_rows, rank], random(n_rows * rank)),
            ]
        })
        .collect();
    adapter("llama", 1.0, &factors)
}

/// An adapter in a GGUF file.
pub fn adapter(architecture: &str, alpha: f32, tensors: &[(String, Vec<u64>, Vec<f32>)]) -> Vec<u8> {
    let keys = [("general.type", "adapter"), ("general.architecture", architecture), ("adapter.type", "lora")];
    adapter_with(&keys, Some(alpha), tensors)
}

pub fn adapter_with(keys: &[(&str, &str)], alpha: Option<f32>, tensors: &[(String, Vec<u64>, Vec<f32>)]) -> Vec<u8> {
    let mut header = GgufHeader::new(32);
    for (key, text) in keys {
        header.set(key, Key::Str(text)).unwrap();
    }
    if let Some(alpha) = alpha {
        header.set("adapter.lora.alpha", Key::F32(alpha)).unwrap();
    }
    for (name, shape, _) in tensors {
        header.add_tensor(name, shape, BlockType::F32).unwrap();
    }
    let mut file = header.to_bytes();
    for (.., values) in tensors {
        file.extend_from_slice(bytemuck::cast_slice(values));
        file.resize(file.len().next_multiple_of(32), 0);
    }
    file
}
