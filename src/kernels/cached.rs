//! Cached keys and values: what they are stored as, and the tensors that hold them.
//!
//! A head's row is a whole number of units of 16 bytes, so that kernels load `vec4<u32>` and no two rows share a
//! word: four f32, eight f16, or for Q8_0 two units per block and then the scales as f32. f16 needs no `shader-f16`,
//! because `pack2x16float` is always there.

use std::fmt;
use std::str::FromStr;

use super::AttentionConfig;
use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::tensor::{Role, Tensor};

/// What keys and values are cached as. Sums stay f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// As they are computed.
    F32,
    /// Rounded to half precision: half the memory. What is beyond ±65504 is kept as that.
    #[default]
    F16,
    /// Blocks of 32 signed bytes that share a scale: a quarter of the memory and a little more.
    Q8_0,
}

impl KvType {
    /// All types, the most exact one first.
    pub const ALL: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8_0];

    /// Name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
        }
    }

    /// Words of a head's row: whole units of 16 bytes. `shaders/shared/row_f32.wgsl` and its like say what is in them.
    pub fn row_words(self, head_dim: u32) -> u32 {
        let blocks = head_dim.div_ceil(BLOCK as u32);
        match self {
            KvType::F32 => head_dim.next_multiple_of(4),
            KvType::F16 => head_dim.div_ceil(8) * 4,
            KvType::Q8_0 => 8 * blocks + blocks.div_ceil(4) * 4,
        }
    }

    /// The tag of the shader variants for it.
    pub(crate) fn variant(self) -> WeightType {
        match self {
            KvType::F32 => WeightType::F32,
            KvType::F16 => WeightType::F16,
            KvType::Q8_0 => WeightType::Q8_0,
        }
    }

    /// The type of a variant's tag; other variants have none.
    pub(crate) fn of(variant: Option<WeightType>) -> Option<KvType> {
        KvType::ALL.into_iter().find(|kind| Some(kind.variant()) == variant)
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(name: &str) -> Result<KvType, Error> {
        KvType::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| Error::Option {
            option: "kv_type",
            expected: KvType::ALL.map(KvType::name).join(", "),
            found: name.into(),
        })
    }
}

/// Keys and values of a layer on the device. The row of position s lies in slot `s % slots`.
#[derive(Clone, Debug)]
pub struct CachedKeys {
    /// `[Hkv, slots, row]` of words, see [`KvType::row_words`].
    pub k: Tensor,
    /// The same of values; `None` where keys hold them.
    pub v: Option<Tensor>,
    /// What they are stored as.
    pub kind: KvType,
    /// Positions below this one are written and read; at least as many as slots.
    pub capacity: u32,
}

impl CachedKeys {
    /// Declares both tensors, for `slots` positions at a time of `capacity` in all.
    ///
    /// # Errors
    /// [`Error::Operand`] if they are empty or too large for a tensor.
    pub fn declare(
        label: &str,
        kind: KvType,
        shape @ [n_kv_heads, slots, head_dim]: [u32; 3],
        capacity: u32,
    ) -> Result<CachedKeys, Error> {
        let words = [n_kv_heads, slots, kind.row_words(head_dim)];
        let v = Tensor::declare(format!("{label}.v"), Role::Cache, &words, DType::U32)?;
        Ok(CachedKeys { v: Some(v), ..CachedKeys::declare_latent(label, kind, shape, capacity)? })
    }

    /// As [`CachedKeys::declare`], of keys that hold their values.
    ///
    /// # Errors
    /// As [`CachedKeys::declare`].
    pub fn declare_latent(
        label: &str,
        kind: KvType,
        [n_kv_heads, slots, head_dim]: [u32; 3],
        capacity: u32,
    ) -> Result<CachedKeys, Error> {
        let words = [n_kv_heads, slots, kind.row_words(head_dim)];
        let k = Tensor::declare(format!("{label}.k"), Role::Cache, &words, DType::U32)?;
        Ok(CachedKeys { k, v: None, kind, capacity })
    }

    /// Slots, once the tensors have the shape that the heads of an attention layer take.
    pub(super) fn slots(&self, kernel: &'static str, config: &AttentionConfig) -> Result<u32, Error> {
        self.slots_for(kernel, [config.n_kv_heads, config.head_dim], config.values_from.is_some())
    }

    /// As [`CachedKeys::slots`], by number and size of the heads.
    pub(super) fn slots_for(
        &self,
        kernel: &'static str,
        [n_kv_heads, head_dim]: [u32; 2],
        keys_hold_values: bool,
    ) -> Result<u32, Error> {
        let slots = self.k.shape().get(1).copied().unwrap_or(0).max(1);
        self.k.expect_shape(kernel, "k", &[n_kv_heads, slots, self.kind.row_words(head_dim)])?;
        match &self.v {
            Some(v) => v.expect_shape(kernel, "v", self.k.shape())?,
            None if keys_hold_values => {}
            None => {
                let expected = "values beside the keys".into();
                return Err(Error::Operand { kernel, operand: "v", expected, found: "none".into() });
            }
        }
        Ok(slots)
    }
}
