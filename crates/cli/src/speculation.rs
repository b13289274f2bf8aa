//! Speculative decoding: by prompt lookup, MTP head or draft model.

use std::path::PathBuf;

use clap::Args;
use tilewright::generate::{Generation, Speculation};
use tilewright::load::ModelFile;
use tilewright::{Error, LoadOptions, Model, Session};

use super::run::with_loading_bar;

#[derive(Args)]
pub struct SpeculationArgs {
    /// Speculative decoding by prompt lookup: draft up to N (1-7) tokens per step; output is unchanged.
    ///
    /// Faster where the text repeats its prompt. Requires --temperature 0.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub prompt_lookup: u32,
    /// Speculative decoding by the model's MTP head: draft up to N (1-7) tokens per step; output is unchanged.
    ///
    /// For Qwen3.5 and Qwen3-Next, whose head takes about as much memory as a layer. Requires --temperature 0.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    pub mtp: u32,
    #[command(flatten)]
    pub draft: DraftArgs,
}

/// A draft model.
#[derive(Args)]
pub struct DraftArgs {
    /// Speculative decoding with a smaller draft model; output is unchanged.
    ///
    /// It has the same vocabulary. A file, folder or address. Applies at temperature 0, without penalties or
    /// constraints.
    #[arg(long = "draft", id = "draft", value_name = "MODEL")]
    pub path: Option<PathBuf>,
    /// Draft tokens per step with --draft, 1 to 7.
    #[arg(long = "draft-tokens", default_value_t = 4, value_name = "N", requires = "draft")]
    pub n: u32,
}

/// A session of the draft model, and the number of draft tokens per step.
pub struct Draft {
    session: Session,
    n: u32,
}

impl SpeculationArgs {
    /// Whether speculative decoding is requested.
    pub fn is_asked_for(&self) -> bool {
        self.prompt_lookup > 0 || self.mtp > 0 || self.draft.path.is_some()
    }
}

impl DraftArgs {
    /// Draft tokens per step; 0 without a draft model.
    pub fn n(&self) -> u32 {
        if self.path.is_some() { self.n } else { 0 }
    }

    /// Loads the draft model, if one is given, on the device of `model` and for its context length.
    pub fn load(&self, model: &Model) -> Result<Option<Model>, Error> {
        let Some(path) = &self.path else { return Ok(None) };
        let file = ModelFile::open(path)?;
        let decoder = file.header.shape.decoder().map_err(|error| error.in_model_file(path))?;
        let context_length = decoder.max_seq_len.min(model.context_length());
        with_loading_bar(|progress| {
            let options = LoadOptions {
                context_length: Some(context_length),
                kv_type: model.kv_type(),
                progress: Some(progress),
                ..LoadOptions::default()
            };
            Model::from_file(model.device(), file, options).map_err(|error| error.in_model_file(path))
        })
        .map(Some)
    }

    /// Loads the draft model for a session.
    pub fn load_session(&self, model: &Model) -> Result<Option<Draft>, Error> {
        self.load(model)?.map(|draft| Ok(Draft { session: draft.session()?, n: self.n })).transpose()
    }

    /// Loads the draft model for an engine and attaches it to `model`.
    pub fn load_with(&self, model: Model) -> Result<Model, Error> {
        match self.load(&model)? {
            Some(draft) => model.with_draft(&draft),
            None => Ok(model),
        }
    }
}

impl Draft {
    /// Attaches the draft model to a generation.
    pub fn draft_for<'s>(&'s mut self, generation: &mut Generation<'s>) -> Result<(), Error> {
        generation.draft_with(&mut self.session, self.n)
    }
}

/// A summary of draft tokens, if speculative decoding is requested.
pub fn summary(is_asked_for: bool, speculation: Speculation) -> Option<String> {
    let Speculation { drafted, accepted, passes } = speculation;
    is_asked_for.then(|| match passes {
        0 => "no draft tokens".into(),
        _ => format!("{accepted} of {drafted} draft tokens accepted, in {passes} passes"),
    })
}
