//! `--lora`: a LoRA adapter for the model.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use tilewright::{Adapter, Error, Model};

#[derive(Args)]
pub struct LoraArgs {
    /// LoRA adapter: GGUF file or PEFT folder, scaled by SCALE [default: 1].
    #[arg(long, value_name = "FILE[:SCALE]")]
    lora: Option<Lora>,
}

/// An adapter's file or folder, and its scale.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    path: PathBuf,
    scale: f32,
}

impl FromStr for Lora {
    type Err = String;

    fn from_str(text: &str) -> Result<Lora, String> {
        let whole = || Lora { path: text.into(), scale: 1.0 };
        // The name of an existing file may contain a colon.
        if text.is_empty() || Path::new(text).exists() {
            return if text.is_empty() { Err("expected a file or a folder".into()) } else { Ok(whole()) };
        }
        match text.rsplit_once(':').map(|(path, scale)| (path, scale.parse::<f32>())) {
            Some((path, Ok(scale))) if !path.is_empty() => Ok(Lora { path: path.into(), scale }),
            _ => Ok(whole()),
        }
    }
}

impl Lora {
    /// Loads the adapter for `model`.
    pub fn load(&self, model: &Model) -> Result<Adapter, Error> {
        model.load_adapter(&self.path, self.scale)
    }
}

impl LoraArgs {
    /// The model with the adapter, if one is given.
    pub fn added_to(&self, model: Model) -> Result<Model, Error> {
        match &self.lora {
            None => Ok(model),
            Some(lora) => model.with_adapter(Some(&lora.load(&model)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lora_argument_is_split_into_path_and_scale() {
        let read = |text: &str| text.parse::<Lora>();
        let of = |path: &str, scale| Ok(Lora { path: path.into(), scale });
        assert_eq!(read("a.gguf"), of("a.gguf", 1.0));
        assert_eq!(read("a.gguf:0.5"), of("a.gguf", 0.5));
        assert_eq!(read("C:\\a:-2"), of("C:\\a", -2.0));
        assert_eq!(read("C:\\a"), of("C:\\a", 1.0));
        assert!(read("").is_err());
    }
}
