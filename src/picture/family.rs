//! Families of models that take pictures: their names, and the text that stands for a picture.

use serde_json::Value;

use super::{Layout, Preprocess};

/// A family of vision encoders with one way of preparing pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen3-VL and Qwen3.5 to 3.8.
    Qwen3Vl,
    /// The tower of Gemma 4.
    Gemma4,
    /// Gemma 4 without a tower: patches go straight into the text model.
    Gemma4Unified,
    /// LFM2-VL and LFM2.5-VL.
    Lfm2Vl,
    /// LFM3-VL.
    Lfm3Vl,
    /// SmolVLM and Idefics3.
    SmolVlm,
    /// Gemma 3.
    Gemma3,
    /// CLIP.
    Clip,
    /// SigLIP, and SigLIP 2 with a fixed size.
    Siglip,
    /// SigLIP 2 with any aspect ratio, "naflex".
    Siglip2,
}

/// The names of a family, and the text of its pictures.
pub(super) struct Names {
    family: Family,
    /// `model_type` in `config.json`.
    json: &'static [&'static str],
    /// `clip.projector_type` or `clip.vision.projector_type` in GGUF.
    gguf: &'static str,
    /// A picture in the text of a chat template, which [`Preprocess::text`] replaces. Empty for models that embed.
    placeholder: &'static str,
    /// The token of a row.
    row: &'static str,
    begin: &'static str,
    /// Before a tile; `{row}` and `{column}` count from 1.
    tile: &'static str,
    /// After a row of tiles.
    line: &'static str,
    /// Before the whole picture after tiles, and without tiles.
    whole: [&'static str; 2],
    end: &'static str,
}

const NONE: Names = Names {
    family: Family::Clip,
    json: &["clip"],
    gguf: "",
    placeholder: "",
    row: "",
    begin: "",
    tile: "",
    line: "",
    whole: ["", ""],
    end: "",
};

const QWEN: Names = Names {
    family: Family::Qwen3Vl,
    json: &["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"],
    gguf: "qwen3vl_merger",
    placeholder: "<|vision_start|><|image_pad|><|vision_end|>",
    row: "<|image_pad|>",
    begin: "<|vision_start|>",
    end: "<|vision_end|>",
    ..NONE
};

const GEMMA4: Names = Names {
    family: Family::Gemma4,
    json: &["gemma4"],
    gguf: "gemma4v",
    placeholder: "<|image|>",
    row: "<|image|>",
    begin: "<|image>",
    end: "<image|>",
    ..NONE
};

/// Texts are what the processors of transformers 5.24 write.
static NAMES: [Names; 10] = [
    QWEN,
    GEMMA4,
    Names { family: Family::Gemma4Unified, json: &["gemma4_unified"], gguf: "gemma4uv", ..GEMMA4 },
    Names {
        family: Family::Lfm2Vl,
        json: &["lfm2_vl", "lfm2-vl"],
        gguf: "lfm2",
        placeholder: "<image>",
        row: "<image>",
        begin: "<|image_start|>",
        tile: "<|img_row_{row}_col_{column}|>",
        whole: ["<|img_thumbnail|>", ""],
        end: "<|image_end|>",
        ..NONE
    },
    Names { family: Family::Lfm3Vl, json: &["lfm3_vl"], gguf: "lfm3", ..QWEN },
    Names {
        family: Family::SmolVlm,
        json: &["smolvlm", "idefics3"],
        gguf: "idefics3",
        placeholder: "<image>",
        row: "<image>",
        tile: "<fake_token_around_image><row_{row}_col_{column}>",
        line: "\n",
        whole: ["\n<fake_token_around_image><global-img>", "<fake_token_around_image><global-img>"],
        end: "<fake_token_around_image>",
        ..NONE
    },
    Names {
        family: Family::Gemma3,
        json: &["gemma3"],
        gguf: "gemma3",
        placeholder: "<start_of_image>",
        row: "<image_soft_token>",
        begin: "\n\n<start_of_image>",
        end: "<end_of_image>\n\n",
        ..NONE
    },
    NONE,
    Names { family: Family::Siglip, json: &["siglip"], ..NONE },
    Names { family: Family::Siglip2, json: &["siglip2"], ..NONE },
];

/// A part of the text that stands for a picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextPart {
    /// Text with special tokens.
    Text(String),
    /// The rows of a tile: `count` times the token [`Family::row_token`].
    Rows {
        /// Index in [`Prepared::tiles`](super::Prepared::tiles).
        tile: usize,
        /// Rows that the encoder gives for the tile.
        count: u32,
    },
}

impl Family {
    /// Of a model folder, by `model_type` of its `config.json`. A SigLIP 2 of fixed size calls itself SigLIP, but some
    /// checkpoints differ, so there the preprocessor's type decides.
    pub fn of_json(preprocessor: &Value, config: &Value) -> Option<Family> {
        let name = config.get("model_type")?.as_str()?;
        let family = NAMES.iter().find(|names| names.json.contains(&name))?.family;
        let processor = preprocessor.get("image_processor").unwrap_or(preprocessor).get("image_processor_type");
        Some(match (family, processor.and_then(Value::as_str)) {
            (Family::Siglip | Family::Siglip2, Some(processor)) if processor.starts_with("Siglip2") => Family::Siglip2,
            (Family::Siglip2, Some(processor)) if processor.starts_with("Siglip") => Family::Siglip,
            _ => family,
        })
    }

    /// Of a GGUF file, by its projector.
    pub fn of_projector(projector: &str) -> Option<Family> {
        NAMES.iter().find(|names| !projector.is_empty() && names.gguf == projector).map(|names| names.family)
    }

    /// A picture in the text of the family's chat templates, which [`Preprocess::text`] replaces. Empty for models
    /// that embed.
    pub fn placeholder(self) -> &'static str {
        self.names().placeholder
    }

    /// The token whose embeddings the rows of a picture replace. Empty for models that embed.
    pub fn row_token(self) -> &'static str {
        self.names().row
    }

    /// `model_type` in `config.json`.
    pub(crate) fn model_types(self) -> &'static [&'static str] {
        self.names().json
    }

    /// The projector in a GGUF file: `clip.projector_type`.
    pub(crate) fn projector(self) -> &'static str {
        self.names().gguf
    }

    fn names(self) -> &'static Names {
        NAMES.iter().find(|names| names.family == self).unwrap_or(&NONE)
    }
}

impl Preprocess {
    /// The text that stands for a picture of this layout, in place of [`Family::placeholder`]: tokens around and
    /// between the rows of its tiles, as the family's processor writes them.
    pub fn text(&self, layout: &Layout) -> Vec<TextPart> {
        let names = self.family.names();
        let mut parts = Vec::with_capacity(2 * layout.tile_rows.len() + 1);
        let mut text = String::from(names.begin);
        let mut add_rows = |text: &mut String, tile: usize, count: u32| {
            if !text.is_empty() {
                parts.push(TextPart::Text(std::mem::take(text)));
            }
            parts.push(TextPart::Rows { tile, count });
        };
        let n_tiles = (layout.rows * layout.columns) as usize;
        for (tile, &count) in layout.tile_rows.iter().enumerate() {
            if tile < n_tiles {
                let (row, column) = (tile as u32 / layout.columns, tile as u32 % layout.columns);
                let number = |number: u32| (number + 1).to_string();
                text += &names.tile.replace("{row}", &number(row)).replace("{column}", &number(column));
            } else {
                text += names.whole[usize::from(n_tiles == 0)];
            }
            add_rows(&mut text, tile, count);
            if tile < n_tiles && (tile as u32 + 1).is_multiple_of(layout.columns) {
                text += names.line;
            }
        }
        text += names.end;
        if !text.is_empty() {
            parts.push(TextPart::Text(text));
        }
        parts
    }
}
