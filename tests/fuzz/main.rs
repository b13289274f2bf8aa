//! Random input for all parsers of untrusted data: refused with a typed error, or accepted with consistent results.
//!
//! A target derives its input from a seed, mostly by changing valid input, which gets further than noise. By default
//! each runs with a few hundred fixed seeds. `TILEWRIGHT_FUZZ=600` runs it for that many seconds with new seeds, and
//! `TILEWRIGHT_CASE=gguf_parse/17` with one seed, as printed by a failure.

use crate::chat::bombs;
use crate::common;
use crate::formats::builder;
mod files;
use crate::formats::hostile;
#[path = "../kernels/inputs.rs"]
#[allow(dead_code)]
mod inputs;
mod kernels;
mod mutate;
mod pictures;
#[cfg(feature = "sound-files")]
mod sounds;
use crate::grammar::schemas;
mod target;
mod texts;

use target::fuzz;
