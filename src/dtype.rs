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
    /// Super-blocks of 256 nibbles: a 6-bit scale and min for each 32, and two F16 scales of these.
    Q4_K,
    /// As Q4_K with 5-bit quants.
    Q5_K,
    /// Super-blocks of 256 6-bit quants: an 8-bit scale for each 16, and one F16 scale of these.
    Q6_K,
}

/// Weights in a block of any type; kernels unpack one at a time.
pub const BLOCK: usize = 32;

impl WeightType {
    /// All weight types.
    pub const ALL: [WeightType; 8] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q8_0,
        WeightType::Q4_0,
        WeightType::Q4_K,
        WeightType::Q5_K,
        WeightType::Q6_K,
    ];

    /// Name as the files spell it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q4_0 => "Q4_0",
            WeightType::Q4_K => "Q4_K",
            WeightType::Q5_K => "Q5_K",
            WeightType::Q6_K => "Q6_K",
        }
    }

    /// Weights in a unit, which is a block or a super-block of eight: rows are padded with zeros to a multiple of it.
    pub fn unit_len(self) -> usize {
        match self {
            WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => 8 * BLOCK,
            _ => BLOCK,
        }
    }

    /// Bytes of a unit in packed form, without the scale behind all units; a multiple of 16.
    pub fn unit_bytes(self) -> usize {
        match self {
            WeightType::F32 => 128,
            WeightType::F16 | WeightType::BF16 => 64,
            WeightType::Q8_0 => 32,
            WeightType::Q4_0 => 16,
            WeightType::Q4_K => 144,
            WeightType::Q5_K => 176,
            WeightType::Q6_K => 208,
        }
    }

    /// Whether each unit has an F16 scale behind all units.
    pub fn has_scale(self) -> bool {
        matches!(self, WeightType::Q8_0 | WeightType::Q4_0 | WeightType::Q6_K)
    }
}

/// Its name.
impl serde::Serialize for WeightType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
