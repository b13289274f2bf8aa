//! Chat templates in a model's files.

use serde_json::{Map, Value};

use super::huggingface::FolderTexts;
use super::vocab;
use crate::error::Error;
use crate::formats::gguf::{self, Metadata, ValueType};
use crate::formats::gguf_writer::GgufHeader;
use crate::formats::text::read_json;
use crate::tokenizer::Tokenizer;

/// The name of an unnamed template.
const DEFAULT: &str = "default";

/// The chat templates of a model, and the special tokens they use.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatSource {
    /// Names and Jinja sources. The usual one is `default`; others are `tool_use`, `rag` and so on.
    pub templates: Vec<(String, String)>,
    /// Special tokens by name: `bos_token` and so on, and the list `additional_special_tokens`.
    pub special_tokens: Map<String, Value>,
}

impl ChatSource {
    /// Templates of a GGUF file. The tokens around a text come from the tokenizer.
    pub(super) fn of_gguf(metadata: &Metadata, tokenizer: Option<&Tokenizer>) -> Result<ChatSource, Error> {
        let mut source = ChatSource::default();
        if let Some(template) = metadata.get_str("tokenizer.chat_template")? {
            source.set(DEFAULT, template);
        }
        let names = metadata.get_str_array("tokenizer.chat_templates")?.unwrap_or_default();
        for name in names {
            if let Some(template) = metadata.get_str(&format!("tokenizer.chat_template.{name}"))? {
                source.set(name, template);
            }
        }
        for (name, key) in [("unk_token", "unknown"), ("pad_token", "padding")] {
            let id = vocab::id(metadata, &format!("tokenizer.ggml.{key}_token_id"))?;
            let text = id.zip(tokenizer).and_then(|(id, tokenizer)| tokenizer.token_bytes(id).ok());
            let text = text.and_then(|text| std::str::from_utf8(text).ok());
            source.special_tokens.extend(text.map(|text| (name.to_owned(), Value::from(text))));
        }
        Ok(source)
    }

    /// Templates of a folder. Separate files take precedence over `chat_template.json`, and that over
    /// `tokenizer_config.json`. Ignores broken files; the tokenizer reports an invalid configuration.
    pub(super) fn of_folder(texts: &FolderTexts) -> ChatSource {
        let mut source = ChatSource::default();
        let parse = |text: &Option<Vec<u8>>| read_json::<Value>(text.as_ref()?).ok();
        let config = parse(&texts.tokenizer_config);
        for json in [&config, &parse(&texts.chat_template_json)].into_iter().flatten() {
            match json.get("chat_template") {
                Some(Value::String(template)) => source.set(DEFAULT, template),
                Some(Value::Array(named)) => named.iter().for_each(|entry| {
                    let text = |key| entry.get(key).and_then(Value::as_str);
                    if let (Some(name), Some(template)) = (text("name"), text("template")) {
                        source.set(name, template);
                    }
                }),
                _ => {}
            }
        }
        let files = [(DEFAULT, &texts.chat_template), ("tool_use", &texts.tool_template), ("rag", &texts.rag_template)];
        for (name, file) in files {
            if let Some(template) = file {
                source.set(name, &String::from_utf8_lossy(template));
            }
        }
        for (name, value) in config.as_ref().and_then(Value::as_object).into_iter().flatten() {
            let text = |token: &Value| Some(Value::from(token.as_str().or_else(|| token.get("content")?.as_str())?));
            let value = match value {
                Value::Array(tokens) if name == "additional_special_tokens" => {
                    Some(tokens.iter().filter_map(text).collect())
                }
                token if name.ends_with("_token") => text(token),
                _ => None,
            };
            source.special_tokens.extend(value.map(|value| (name.clone(), value)));
        }
        source
    }

    /// Writes the templates to a GGUF file. The special tokens are in its vocabulary.
    ///
    /// # Errors
    /// Errors of [`GgufHeader::set`].
    #[cfg_attr(target_arch = "wasm32", expect(dead_code))]
    pub(super) fn write(&self, header: &mut GgufHeader) -> Result<(), Error> {
        let mut names = Vec::new();
        for (name, template) in &self.templates {
            let mut key = "tokenizer.chat_template".to_owned();
            if name != DEFAULT {
                key = format!("{key}.{name}");
                names.push(gguf::Value::Str(name));
            }
            header.set(&key, gguf::Value::Str(template))?;
        }
        match names.is_empty() {
            true => Ok(()),
            false => header.set_array("tokenizer.chat_templates", ValueType::String, names.into_iter()),
        }
    }

    fn set(&mut self, name: &str, template: &str) {
        self.templates.retain(|(other, _)| other != name);
        // A template from a file may begin with a byte order mark.
        let template = template.strip_prefix(crate::formats::text::MARK).unwrap_or(template);
        self.templates.push((name.to_owned(), template.to_owned()));
    }
}
