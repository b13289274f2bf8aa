//! GGUF files of models that take pictures and sounds.

use std::path::{Path, PathBuf};

use tilewright::formats::Gguf;
use tilewright::formats::gguf::{Value as Key, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;

use crate::common;

/// The template of Qwen3-VL, as far as messages of texts and images go.
const PICTURE_TEMPLATE: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}\
    {{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' or 'image_url' in p %}\
    <|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A template of Gemma 4's placeholders, for messages of texts, images and sounds.
const SOUND_TEMPLATE: &str = "{%- for m in messages %}<|turn>{{ m.role }}\n{% if m.content is string %}\
    {{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% elif p.type == 'audio' %}\
    <|audio|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}\
    {% if add_generation_prompt %}<|turn>model\n{% endif %}";

/// Copies the tiny random Qwen3-VL to a folder as GGUF files: the text model, `model.gguf`, with a vocabulary of bytes
/// and a template, and its vision encoder, `mmproj.gguf`. Returns the model's path.
pub fn picture_model(folder: &Path) -> PathBuf {
    let names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"];
    copy(folder, "qwen3-vl", PICTURE_TEMPLATE, (285, &names))
}

/// As [`picture_model`], the tiny random Gemma 4 unified, which takes pictures and sounds.
pub fn sound_model(folder: &Path) -> PathBuf {
    let names =
        ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>"];
    copy(folder, "gemma4-unified", SOUND_TEMPLATE, (283, &names))
}

/// Copies a model with a template, and tokens of these names from an id on.
fn copy(folder: &Path, source: &str, template: &str, named: (usize, &[&str])) -> PathBuf {
    let data = common::data(&["tiny-random-pictures"]).expect("committed test data");
    let data = data.join("tiny-random-pictures").join(source);
    let file = std::fs::read(data.join("model-bf16.gguf")).unwrap();
    let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
    let mut header = GgufHeader::new(32);
    for (key, value) in gguf.metadata.iter().filter(|(key, _)| !key.starts_with("tokenizer.")) {
        match value {
            Key::Array(array) => {
                let values: Vec<Key> = array.iter().collect();
                let kind = match values.first() {
                    Some(Key::Bool(_)) => ValueType::Bool,
                    Some(Key::F32(_)) => ValueType::F32,
                    _ => ValueType::I32,
                };
                header.set_array(key, kind, values.into_iter()).unwrap();
            }
            value => header.set(key, value).unwrap(),
        }
    }
    let tokens = vocabulary(named);
    header.set("tokenizer.ggml.model", Key::Str("gpt2")).unwrap();
    header.set("tokenizer.ggml.pre", Key::Str("qwen2")).unwrap();
    header.set("tokenizer.chat_template", Key::Str(template)).unwrap();
    header.set("tokenizer.ggml.eos_token_id", Key::U32(291)).unwrap();
    header.set_array("tokenizer.ggml.merges", ValueType::String, [Key::Str("a b")].into_iter()).unwrap();
    let texts: Vec<Key> = tokens.iter().map(|token| Key::Str(token)).collect();
    header.set_array("tokenizer.ggml.tokens", ValueType::String, texts.into_iter()).unwrap();
    let types: Vec<Key> = (0..tokens.len()).map(|id| Key::I32(if id < 257 { 1 } else { 3 })).collect();
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

/// A token for each byte, as GPT-2 writes them, and special tokens, of which these have the ids of the references.
fn vocabulary((first, named): (usize, &[&str])) -> Vec<String> {
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
    tokens.push("ab".into());
    let special = |id: usize| match id.checked_sub(first).and_then(|at| named.get(at)) {
        Some(name) => (*name).to_owned(),
        None => format!("<|{id}|>"),
    };
    tokens.extend((257..293).map(special));
    tokens
}
