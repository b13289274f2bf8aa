//! Element types of tensors and weight types of packed matrices.

use crate::formats::BlockType;

/// Element type of a [`Tensor`](crate::Tensor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float, the type of all arithmetic.
    F32,
    /// 16-bit float, the input of products in half precision.
    F16,
    /// 32-bit unsigned integer: token ids, state words, packed weights.
    U32,
}

impl DType {
    /// Size of an element in bytes.
    pub fn size_bytes(self) -> u64 {
        match self {
            DType::F16 => 2,
            DType::F32 | DType::U32 => 4,
        }
    }
}

macro_rules! weight_types {
    ($($name:ident, $layout:ident, $len:expr, $bytes:expr, $tail:expr, $doc:expr;)*) => {
        /// Weight type of a [`Matrix`](crate::Matrix) in files, by the files' names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)]
        pub enum WeightType {
            $(#[doc = $doc] $name,)*
        }

        impl WeightType {
            /// All weight types.
            pub const ALL: [WeightType; [$(WeightType::$name),*].len()] = [$(WeightType::$name),*];

            /// Name as in files.
            pub fn name(self) -> &'static str {
                match self { $(WeightType::$name => stringify!($name),)* }
            }

            /// The block type in files.
            pub(crate) fn block_type(self) -> BlockType {
                match self { $(WeightType::$name => BlockType::$name,)* }
            }

            /// The type whose packed layout and kernels this one uses: itself, or one that represents it exactly.
            pub fn layout(self) -> WeightType {
                match self { $(WeightType::$name => WeightType::$layout,)* }
            }

            /// Weights in a unit: one or more blocks, or a super-block of eight. Zeros pad rows to whole units.
            pub fn unit_len(self) -> usize {
                match self { $(WeightType::$name => $len,)* }
            }

            /// Bytes of a packed unit without its tail; a multiple of 16.
            pub fn unit_bytes(self) -> usize {
                match self { $(WeightType::$name => $bytes,)* }
            }

            /// 16-bit words of a unit's tail, stored after all units: the f16 scale and what would not fill 16 bytes.
            pub fn tail_len(self) -> usize {
                match self { $(WeightType::$name => $tail,)* }
            }
        }
    };
}

// Name, layout, weights and bytes per unit, 16-bit words per tail.
weight_types! {
    F32, F32, 32, 128, 0, "32-bit float.";
    F16, F16, 32, 64, 0, "IEEE half precision.";
    BF16, BF16, 32, 64, 0, "The upper half of an F32.";
    Q8_0, Q8_0, 32, 32, 1, "Blocks of 32 signed bytes with one F16 scale.";
    Q4_0, Q4_0, 32, 16, 1, "Blocks of 32 nibbles with one F16 scale.";
    Q4_1, Q4_1, 32, 16, 2, "As Q4_0 with an F16 min.";
    Q5_0, Q5_0, 32, 16, 3, "As Q4_0 with 5-bit quants.";
    Q5_1, Q5_1, 32, 16, 4, "As Q5_0 with an F16 min.";
    Q2_K, Q2_K, 256, 80, 2, "Super-blocks of 256 2-bit quants: a 4-bit scale and min for each 16, and two F16 scales of these.";
    Q3_K, Q3_K, 256, 112, 0, "Super-blocks of 256 3-bit quants: a 6-bit scale for each 16, and one F16 scale of these.";
    Q4_K, Q4_K, 256, 144, 0, "Super-blocks of 256 nibbles: a 6-bit scale and min for each 32, and two F16 scales of these.";
    Q5_K, Q5_K, 256, 176, 0, "As Q4_K with 5-bit quants.";
    Q6_K, Q6_K, 256, 208, 1, "Super-blocks of 256 6-bit quants: an 8-bit scale for each 16, and one F16 scale of these.";
    IQ4_NL, IQ4_NL, 32, 16, 1, "Blocks of 32 indices of 16 uneven levels, with one F16 scale.";
    IQ4_XS, IQ4_XS, 256, 128, 4, "The levels of IQ4_NL: a 6-bit scale for each 32, and one F16 scale of these.";
    IQ3_S, IQ3_S, 256, 128, 4, "Fours of weights from a codebook of 512; signs, a 4-bit scale for 32, one F16 scale of these.";
    IQ3_XXS, IQ3_S, 256, 128, 4, "As IQ3_S, from a codebook of 256.";
    IQ2_S, IQ2_S, 256, 112, 0, "Eights of weights from a codebook of 1024; signs, a 4-bit scale for 16, one F16 scale of these.";
    IQ2_XS, IQ2_S, 256, 112, 0, "As IQ2_S, from a codebook of 512.";
    IQ2_XXS, IQ2_S, 256, 112, 0, "As IQ2_S, from a codebook of 256, with a scale for each 32.";
    MXFP4, MXFP4, 64, 32, 1, "Blocks of 32 4-bit floats with a power of two as scale.";
    NVFP4, NVFP4, 64, 32, 2, "Blocks of 64 4-bit floats with an 8-bit float as scale for each 16.";
    Q2_0, Q2_0, 64, 16, 1, "Blocks of 64 2-bit quants with one F16 scale.";
    Q1_0, Q1_0, 128, 16, 1, "Blocks of 128 signs with one F16 scale.";
}

/// Weights in a block, the same for all types; kernels unpack one block at a time.
pub const BLOCK: usize = 32;

/// Serialises the name.
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
