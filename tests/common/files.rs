//! GGUF files made from the built-in model, or for it, and a model that takes pictures.

use std::path::{Path, PathBuf};

use tilewright::formats::gguf::{Value as Key, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::formats::{BlockType, Gguf};

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

/// The template of Qwen3-VL, as far as messages of texts and images go.
const PICTURE_TEMPLATE: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}\
    {{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' or 'image_url' in p %}\
    <|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Copies the tiny random Qwen3-VL to a folder as GGUF files: the text model, `model.gguf`, with a vocabulary of bytes
/// and a template, and its vision encoder, `mmproj.gguf`. Returns the model's path.
pub fn picture_model(folder: &Path) -> PathBuf {
    let data = common::data(&["tiny-random-pictures"]).expect("committed test data");
    let data = data.join("tiny-random-pictures/qwen3-vl");
    let file = std::fs::read(data.join("model-bf16.gguf")).unwrap();
    let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
    let mut header = GgufHeader::new(32);
    for (key, value) in gguf.metadata.iter().filter(|(key, _)| !key.starts_with("tokenizer.")) {
        match value {
            Key::Array(array) => {
                let values: Vec<Key> = array.iter().collect();
                header.set_array(key, ValueType::U32, values.into_iter()).unwrap();
            }
            value => header.set(key, value).unwrap(),
        }
    }
    let tokens = vocabulary();
    header.set("tokenizer.ggml.model", Key::Str("gpt2")).unwrap();
    header.set("tokenizer.ggml.pre", Key::Str("qwen2")).unwrap();
    header.set("tokenizer.chat_template", Key::Str(PICTURE_TEMPLATE)).unwrap();
    header.set("tokenizer.ggml.eos_token_id", Key::U32(291)).unwrap();
    header.set_array("tokenizer.ggml.merges", ValueType::String, [Key::Str("a b")].into_iter()).unwrap();
    let texts: Vec<Key> = tokens.iter().map(|token| Key::Str(token)).collect();
    header.set_array("tokenizer.ggml.tokens", ValueType::String, texts.into_iter()).unwrap();
    let types: Vec<Key> = (0..tokens.len()).map(|id| Key::I32(if id < 256 { 1 } else { 3 })).collect();
    header.set_array("tokenizer.ggml.token_type", ValueType::I32, types.into_iter()).unwrap();
    for tensor in &gguf.tensors {
        header.add_tensor(&tensor.name, &tensor.shape, tensor.block_type).unwrap();
    }
    let mut written = header.to_bytes();
    for tensor in &gguf.tensors {
        written.extend_from_slice(tensor.bytes(&file).unwrap());
        written.resize(written.len().next_multiple_of(32), 0);
    }
    std::fs::create_dir_all(folder).unwrap();
    let path = folder.join("model.gguf");
    std::fs::write(&path, written).unwrap();
    std::fs::copy(data.join("mmproj-bf16.gguf"), folder.join("mmproj.gguf")).unwrap();
    path
}

/// A token for each byte, as GPT-2 writes them, and special tokens with the ids of the references.
fn vocabulary() -> Vec<String> {
    let is_shown = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut n_hidden = 0;
    let byte = |byte: u32| {
        if !is_shown(byte) {
            n_hidden += 1;
        }
        let code = if is_shown(byte) { byte } else { 255 + n_hidden };
        char::from_u32(code).unwrap().to_string()
    };
    let mut tokens: Vec<String> = (0..256).map(byte).collect();
    let named = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"];
    tokens.extend((256..285).map(|id| format!("<|{id}|>")));
    tokens.extend(named.map(str::to_owned));
    tokens.extend((291..293).map(|id| format!("<|{id}|>")));
    tokens
}
