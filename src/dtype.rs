//! Element types of tensors and weight types of packed matrices.

/// What an element of a [`Tensor`](crate::Tensor) is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float; all arithmetic is done in it.
    F32,
    /// 32-bit unsigned integer: token ids, state words, packed weights.
    U32,
}

impl DType {
    /// Size of an element in bytes.
    pub fn size_bytes(self) -> u64 {
        4
    }
}

/// How the weights of a [`Matrix`](crate::Matrix) are stored; the names are those of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)]
pub enum WeightType {
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an F32.
    BF16,
    /// Blocks of 32 signed bytes with one F16 scale.
    Q8_0,
    /// Blocks of 32 nibbles with one F16 scale.
    Q4_0,
}

/// Weights in a block of any type: rows are padded with zeros to a multiple of it.
pub const BLOCK: usize = 32;

impl WeightType {
    /// All weight types.
    pub const ALL: [WeightType; 5] =
        [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0];

    /// Name as the files spell it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q4_0 => "Q4_0",
        }
    }

    /// Bytes of a block's weights in packed form, without its scale.
    pub fn quants_bytes(self) -> usize {
        match self {
            WeightType::F32 => 128,
            WeightType::F16 | WeightType::BF16 => 64,
            WeightType::Q8_0 => 32,
            WeightType::Q4_0 => 16,
        }
    }

    /// Whether blocks have a scale.
    pub fn has_scale(self) -> bool {
        matches!(self, WeightType::Q8_0 | WeightType::Q4_0)
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
