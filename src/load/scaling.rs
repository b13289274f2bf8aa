//! RoPE scaling in model files.

use super::keys::{Key, Keys};
use crate::error::Error;
use crate::kernels::{QueryGrowth, RopeScaling};

/// A key of GGUF's `rope.scaling` and its counterpart in `config.json`, whose object was renamed twice.
macro_rules! key {
    ($gguf:literal, $json:literal) => {
        Key(
            concat!("rope.scaling.", $gguf),
            concat!("rope_parameters.full_attention.", $json, "|rope_parameters.", $json, "|rope_scaling.", $json),
        )
    };
    ($json:literal) => {
        Key("", concat!("rope_parameters.full_attention.", $json, "|rope_parameters.", $json, "|rope_scaling.", $json))
    };
}

/// Older files call it `type`.
const KIND: Key = Key(
    "rope.scaling.type",
    "rope_parameters.full_attention.rope_type|rope_parameters.rope_type|rope_scaling.rope_type|rope_scaling.type",
);
/// A key that neither format has.
const NONE: Key = Key("", "");
const SHORT: Key = key!("short_factor");
const LONG: Key = key!("long_factor");
const MAGNITUDE: Key = key!("attn_factor", "attention_factor");
const FACTOR: Key = key!("factor", "factor");
const LOW: Key = key!("low_freq_factor");
const HIGH: Key = key!("high_freq_factor");
/// Context length before scaling.
pub(super) const ORIGINAL: Key = Key(
    "rope.scaling.original_context_length",
    "rope_parameters.full_attention.original_max_position_embeddings|rope_parameters.original_max_position_embeddings|\
     rope_scaling.original_max_position_embeddings|original_max_position_embeddings",
);

/// The RoPE scaling of all layers, or of the global-attention layers.
pub(super) fn read(keys: &Keys<'_>, rot_dims: u32, max_seq_len: u32) -> Result<RopeScaling, Error> {
    // Marks duplicates as read. Unscaled models state the original context as well.
    for key in [key!("type"), key!("rope_theta"), ORIGINAL] {
        keys.says(key);
    }
    if let Some(factors) = keys.factors("rope_freqs.weight", NONE, rot_dims / 2)? {
        return Ok(RopeScaling::Factors(factors));
    }
    if let Some(long) = keys.factors("rope_factors_long.weight", LONG, rot_dims / 2)? {
        return longrope(keys, long, max_seq_len);
    }
    let required = |key: Key| positive(keys, key)?.ok_or_else(|| keys.missing(key));
    match keys.str(KIND)? {
        None | Some("default" | "none") => Ok(RopeScaling::None),
        // Converters write this type for unscaled models, too.
        Some("linear") if keys.is_gguf() && keys.f32(FACTOR)?.is_none() => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: required(FACTOR)? }),
        Some("llama3") if !keys.is_gguf() => {
            let (low_freq_factor, high_freq_factor) = (required(LOW)?, required(HIGH)?);
            if low_freq_factor >= high_freq_factor {
                let expected = format!("a number above low_freq_factor, {low_freq_factor}");
                return Err(keys.wrong(HIGH, expected, high_freq_factor));
            }
            Ok(RopeScaling::Llama3 {
                factor: required(FACTOR)?,
                low_freq_factor,
                high_freq_factor,
                original_max_seq_len: original(keys)?,
            })
        }
        Some("proportional") if !keys.is_gguf() => proportional(keys, rot_dims),
        // Alibaba's: the base grows by the factor, and then all wavelengths do by its root
        // (https://kexue.fm/archives/9706).
        Some("ntk") if ["new", "gte"].contains(&keys.architecture) => {
            let mixed = key!("mixed_b");
            if let Some(found) = keys.f32(mixed)? {
                return Err(keys.unsupported(mixed, found, "none"));
            }
            let factor = required(FACTOR)?;
            let of_pair = |i| factor.powf(2.0 * f64::from(i + 1) / f64::from(rot_dims)) as f32;
            Ok(RopeScaling::Factors((0..rot_dims / 2).map(of_pair).collect()))
        }
        Some("yarn") => yarn(keys, required(FACTOR)?, original(keys)?),
        Some(other) => {
            let supported = match keys.is_gguf() {
                true => "none, linear, yarn, or tensors of factors",
                false => "default, linear, llama3, yarn, proportional, longrope with its factors",
            };
            Err(keys.unsupported(KIND, other, supported))
        }
    }
}

/// The context length before scaling, which is required.
fn original(keys: &Keys<'_>) -> Result<f64, Error> {
    match keys.required(ORIGINAL)? {
        0 => Err(keys.wrong(ORIGINAL, "1 or more".into(), 0)),
        length => Ok(f64::from(length)),
    }
}

/// Gemma 4: a share of the pairs rotates, at the frequencies of a full rotation; the others stay.
fn proportional(keys: &Keys<'_>, rot_dims: u32) -> Result<RopeScaling, Error> {
    /// GGUF's stand-in for infinity.
    const STILL: f32 = 1e30;
    const SHARE: Key = key!("partial_rotary_factor");
    let share = keys.f32(SHARE)?.unwrap_or(1.0);
    if !(share > 0.0 && share <= 1.0) {
        return Err(keys.wrong(SHARE, "a number above 0, up to 1".into(), share));
    }
    let factor = positive(keys, FACTOR)?.unwrap_or(1.0) as f32;
    let n_turning = (share * rot_dims as f32 / 2.0) as u32;
    let of_pair = |i| if i < n_turning { factor } else { STILL };
    Ok(RopeScaling::Factors((0..rot_dims / 2).map(of_pair).collect()))
}

/// LongRoPE. If the files state no magnitude, it follows from the context lengths.
fn longrope(keys: &Keys<'_>, long: Vec<f32>, max_seq_len: u32) -> Result<RopeScaling, Error> {
    if let Some(found) = keys.str(KIND)?.filter(|kind| !["longrope", "su"].contains(kind)) {
        return Err(keys.unsupported(KIND, found, "longrope with long_factor"));
    }
    let short = keys.factors("rope_factors_short.weight", SHORT, long.len() as u32)?;
    let short = short.ok_or_else(|| keys.missing(SHORT))?;
    let original = keys.required(ORIGINAL)?;
    if original < 2 || original > max_seq_len {
        return Err(keys.wrong(ORIGINAL, format!("2 to the context length {max_seq_len}"), original));
    }
    let stated = positive(keys, MAGNITUDE)?;
    keys.says(FACTOR);
    let growth = 1.0 + (f64::from(max_seq_len) / f64::from(original)).ln() / f64::from(original).ln();
    let magnitude = stated.unwrap_or(growth.sqrt());
    Ok(RopeScaling::Long { short, long, original_max_seq_len: original, magnitude })
}

/// The growth of queries with position, if any.
pub(super) fn query_growth(keys: &Keys<'_>) -> Result<Option<QueryGrowth>, Error> {
    const BETA: Key = Key("attention.temperature_scale", "rope_parameters.llama_4_scaling_beta|llama_4_scaling_beta");
    // transformers has a separate key for the context length here.
    keys.says(key!("max_position_embeddings"));
    let Some(beta) = positive(keys, BETA)? else { return Ok(None) };
    Ok(Some(QueryGrowth { beta, length: original(keys)? as u32 }))
}

/// YaRN, with the defaults of transformers. Both formats may state the magnitude of the rotated elements as a
/// quotient.
fn yarn(keys: &Keys<'_>, factor: f64, original_max_seq_len: f64) -> Result<RopeScaling, Error> {
    let optional = |key| positive(keys, key);
    let growth = |share: f64| if factor <= 1.0 { 1.0 } else { 0.1 * share * factor.ln() + 1.0 };
    let of_one = optional(key!("mscale"))?;
    let of_all = optional(key!("yarn_log_multiplier", "mscale_all_dim"))?;
    let usual = match of_all {
        Some(of_all) if of_one.is_some() || keys.is_gguf() => growth(of_one.unwrap_or(1.0)) / growth(of_all),
        _ => growth(1.0),
    };
    let magnitude = optional(MAGNITUDE)?;
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: optional(key!("yarn_beta_fast", "beta_fast"))?.unwrap_or(32.0),
        beta_slow: optional(key!("yarn_beta_slow", "beta_slow"))?.unwrap_or(1.0),
        original_max_seq_len,
        truncate: keys.bool(key!("truncate"))?.unwrap_or(true),
        magnitude: match magnitude {
            // GGUF states it relative to the usual magnitude.
            Some(magnitude) if keys.is_gguf() => magnitude * usual,
            Some(magnitude) => magnitude,
            None => usual,
        },
    })
}

/// By how much YaRN grows queries and keys as a whole in latent attention: `mscale_all_dim`, of which GGUF has the tenth.
pub(super) fn yarn_mscale(keys: &Keys<'_>, factor: f64) -> Result<f64, Error> {
    let of_all = positive(keys, key!("yarn_log_multiplier", "mscale_all_dim"))?;
    let of_all = of_all.map(|of_all| if keys.is_gguf() { of_all / 0.1 } else { of_all });
    Ok(match of_all {
        Some(of_all) if factor > 1.0 => 0.1 * of_all * factor.ln() + 1.0,
        _ => 1.0,
    })
}

/// A finite number above 0.
fn positive(keys: &Keys<'_>, key: Key) -> Result<Option<f64>, Error> {
    match keys.f32(key)? {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            Err(keys.wrong(key, "a finite number above 0".into(), value))
        }
        value => Ok(value.map(f64::from)),
    }
}
