//! Packed weight matrices: the kernels' layout, and packing from the files' layout.
//!
//! A matrix `[N, K]` is stored row by row in units along K: one or more blocks of 32 weights, or super-blocks of
//! eight. Rows are padded with zeros to whole units. First come all units, each a multiple of 16 bytes, so that a
//! kernel loads `vec4<u32>`. For types that have them, the tails of all units follow: f16 scales and other data that
//! would not fill 16 bytes, as 16-bit halves, two per word. A matrix larger than a binding is split into row slabs.
//!
//! Files put an f16 scale before each block. A Q4_0 block then has 18 bytes, so that nearly every load would
//! straddle words. Repacking happens once, during upload, and preserves every bit of a weight. `dtype.rs` has each
//! type's unit and tail, `unit.rs` the order of its bits.
//!
//! - Kernels only see blocks of 32; a shader fragment finds a block's super-block.
//! - Kernels multiply the factors of a scale in f32, where `scale * quant` is exact: weights equal the reference
//!   decoder's bit for bit. Mins are subtracted from each weight: in the sum, two large numbers would cancel.
//! - Codebooks are decoded during loading, so shaders need no tables of up to 1024 entries. Types may share a layout
//!   (`WeightType::layout`): IQ2_XXS, IQ2_XS and IQ2_S use 3.5 bits per weight, IQ3_XXS and IQ3_S 4.25. Other types
//!   use at most 2 % more than in the file. Codebooks in the kernel would need a dependent load for every four
//!   weights; not tried.
//! - Uneven levels (IQ4, 4-bit floats) are constants that are shifted into place, because each invocation would copy
//!   an array to memory.
//! - IQ1_S, IQ1_M, TQ1_0 and TQ2_0 are expanded to F32 during loading. Types without a decoder are refused by name.
//! - Matrices with the same input and type (Q, K and V; gate and up) are merged into one, for one dispatch.

mod unit;

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::platform::{IS_BROWSER, for_each_item};
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// A packed weight matrix `[rows, cols]` on a device.
#[derive(Clone, Debug)]
pub struct Matrix {
    slabs: Vec<Slab>,
    rows: u32,
    /// See [`Matrix::tuned_rows`].
    tuned_rows: u32,
    cols: u32,
    weight: WeightType,
}

/// Consecutive rows in one tensor.
#[derive(Clone, Debug)]
pub(crate) struct Slab {
    pub words: Tensor,
    pub first_row: u32,
    pub rows: u32,
}

impl Matrix {
    /// Declares a matrix for a target, in as many slabs as its binding limit requires.
    ///
    /// # Errors
    /// [`Error::Operand`] if a dimension is zero or one row exceeds the limit.
    pub fn declare(target: &Target, label: &str, weight: WeightType, rows: u32, cols: u32) -> Result<Matrix, Error> {
        Matrix::declare_whole(target, label, weight, rows, cols, 1)
    }

    /// As [`Matrix::declare`], with each `whole` consecutive rows in one slab.
    ///
    /// # Errors
    /// [`Error::Operand`] if a dimension is zero or `whole` rows exceed the limit.
    pub(crate) fn declare_whole(
        target: &Target,
        label: &str,
        weight: WeightType,
        rows: u32,
        cols: u32,
        whole: u32,
    ) -> Result<Matrix, Error> {
        Matrix::declare_as(Role::Weights, target, label, weight, [rows, cols], whole)
    }

    /// Declares memory for some rows of this matrix in the same layout, which passes read instead of the matrix. The
    /// number of rows is made even, so that no row shares a word of tails with an unwritten one.
    ///
    /// # Errors
    /// As [`Matrix::declare`].
    pub(crate) fn declare_rows(&self, target: &Target, label: &str, n_rows: u32) -> Result<Matrix, Error> {
        let shape = [n_rows.next_multiple_of(2), self.cols];
        Matrix::declare_as(Role::Activations, target, label, self.weight, shape, 2)
    }

    fn declare_as(
        role: Role,
        target: &Target,
        label: &str,
        weight: WeightType,
        [rows, cols]: [u32; 2],
        whole: u32,
    ) -> Result<Matrix, Error> {
        let limit = target.limits().max_binding_bytes;
        let row_bytes = (packed_words(weight, 1, cols) * 4).max(16);
        // A slab's size is rounded up to 16 bytes.
        let slab_rows = u32::try_from((limit - 16) / row_bytes).unwrap_or(u32::MAX).min(rows);
        let slab_rows = slab_rows / whole.max(1) * whole;
        if rows == 0 || cols == 0 || slab_rows == 0 {
            return Err(Error::Operand {
                kernel: "matrix",
                operand: "shape",
                expected: format!("two dimensions, and {whole} rows of at most {limit} bytes"),
                found: format!("[{rows}, {cols}] in {weight}"),
            });
        }
        let mut slabs = Vec::new();
        for first_row in (0..rows).step_by(slab_rows as usize) {
            let rows = slab_rows.min(rows - first_row);
            let n_words = packed_words(weight, rows, cols);
            let n_words = u32::try_from(n_words).map_err(|_| Error::Operand {
                kernel: "matrix",
                operand: "shape",
                expected: "at most 2^32 words in a slab".into(),
                found: format!("{n_words}"),
            })?;
            let words = Tensor::declare(label, role, &[n_words], DType::U32)?;
            slabs.push(Slab { words, first_row, rows });
        }
        Ok(Matrix { slabs, rows, tuned_rows: rows, cols, weight })
    }

    /// A matrix without rows.
    pub(crate) fn empty(cols: u32) -> Matrix {
        Matrix { slabs: Vec::new(), rows: 0, tuned_rows: 0, cols, weight: WeightType::F32 }
    }

    /// Stacks two matrices of the same type and width, without copying.
    pub(crate) fn above(&self, below: &Matrix) -> Matrix {
        let moved = below.slabs.iter().map(|slab| Slab { first_row: self.rows + slab.first_row, ..slab.clone() });
        Matrix {
            slabs: self.slabs.iter().cloned().chain(moved).collect(),
            rows: self.rows + below.rows,
            ..self.clone()
        }
    }

    /// Fills the matrix from rows in file layout; several parts, such as Q, K and V, are stacked.
    ///
    /// # Errors
    /// [`Error::Operand`] if the parts are not whole rows, or not the declared number of rows; errors of
    /// [`TensorWriter::write_words`].
    pub fn upload(&self, device: &dyn TensorWriter, parts: &[&[u8]]) -> Result<(), Error> {
        let row_bytes = file_row_bytes(self.weight, self.cols as usize);
        let n_rows: usize = parts.iter().map(|part| part.len() / row_bytes).sum();
        if parts.iter().any(|part| part.len() % row_bytes != 0) || n_rows != self.rows as usize {
            return Err(Error::Operand {
                kernel: "matrix",
                operand: "parts",
                expected: format!("{} rows of {row_bytes} bytes", self.rows),
                found: format!("parts of {:?} bytes", parts.iter().map(|p| p.len()).collect::<Vec<_>>()),
            });
        }
        let mut edges = TailEdges::default();
        let mut first_row = 0;
        for part in parts {
            self.write_rows(device, first_row, part, &mut edges)?;
            first_row += (part.len() / row_bytes) as u32;
        }
        Ok(())
    }

    /// Writes rows in file layout from `first_row` on. Write every row once, in any order, with the same `edges` for
    /// the whole matrix.
    ///
    /// # Errors
    /// [`Error::Operand`] if the bytes are not whole rows of the matrix; errors of [`TensorWriter::write_words`].
    pub(crate) fn write_rows(
        &self,
        device: &dyn TensorWriter,
        first_row: u32,
        bytes: &[u8],
        edges: &mut TailEdges,
    ) -> Result<(), Error> {
        let row_bytes = file_row_bytes(self.weight, self.cols as usize);
        let n_rows = bytes.len() / row_bytes;
        if !bytes.len().is_multiple_of(row_bytes) || first_row as usize + n_rows > self.rows as usize {
            return Err(Error::Operand {
                kernel: "matrix",
                operand: "rows",
                expected: format!("rows of {row_bytes} bytes, {} in total", self.rows),
                found: format!("{} bytes from row {first_row} on", bytes.len()),
            });
        }
        let (n_units, unit_words) = (self.units() as usize, self.weight.unit_bytes() / 4);
        let n_tail = n_units * self.weight.tail_len();
        let mut rows = bytes.chunks_exact(row_bytes);
        let mut row = first_row;
        for slab in &self.slabs {
            let first = row.saturating_sub(slab.first_row).min(slab.rows);
            let n = rows.len().min((slab.rows - first) as usize);
            if n == 0 {
                continue;
            }
            let mut units = vec![0u32; n * n_units * unit_words];
            let mut tails = vec![0u16; n * n_tail];
            self.pack(rows.by_ref().take(n), &mut units, &mut tails);
            device.write_words(&slab.words, first as usize * n_units * unit_words, &units)?;
            if n_tail > 0 {
                let places = TailPlaces {
                    words: &slab.words,
                    first_word: self.quants_words(slab) as usize,
                    len: slab.rows as usize * n_tail,
                };
                edges.write(device, &places, first as usize * n_tail, &tails)?;
            }
            row += n as u32;
        }
        Ok(())
    }

    /// Packs rows into zeroed words and tails; many rows on all cores, except on the web.
    fn pack<'a>(&self, rows: impl Iterator<Item = &'a [u8]>, units: &mut [u32], tails: &mut [u16]) {
        /// Words that one core packs before other cores would have started.
        const FEW_WORDS: usize = 1 << 14;
        let are_few = IS_BROWSER || units.len() <= FEW_WORDS;
        let (n_units, n_tail) = (self.units() as usize, self.units() as usize * self.weight.tail_len());
        let mut tails = tails;
        let places = units.chunks_exact_mut(n_units * (self.weight.unit_bytes() / 4)).map(|units| {
            let (tail, rest) = std::mem::take(&mut tails).split_at_mut(n_tail);
            tails = rest;
            (units, tail)
        });
        let pack = |(row, (units, tail))| unit::pack_row(self.weight, row, units, tail);
        let rows = rows.zip(places);
        if are_few { rows.for_each(pack) } else { for_each_item(rows, pack) }
    }

    /// Number of rows, N.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The number of rows for looking up tuned parameters.
    pub(crate) fn tuned_rows(&self) -> u32 {
        self.tuned_rows
    }

    /// This matrix with `other`'s tuned parameters: products with both are computed in the same way.
    pub(crate) fn tuned_as(self, other: &Matrix) -> Matrix {
        Matrix { tuned_rows: other.tuned_rows, ..self }
    }

    /// Bytes of `rows` rows, without rounding up a slab.
    pub(crate) fn bytes_of(&self, rows: u32) -> u64 {
        packed_words(self.weight, rows, self.cols) * 4
    }

    /// Whether groups of `rows` rows can be overwritten without their neighbours: an odd number of tail halves
    /// shares a word with the next row's.
    pub(crate) fn are_apart(&self, rows: u32) -> bool {
        (u64::from(rows) * u64::from(self.units()) * self.weight.tail_len() as u64).is_multiple_of(2)
    }

    /// Where a group of rows that [`Matrix::are_apart`] is stored, if in one slab: the tensor, and the first word
    /// and number of words of its units and of its tails. `None` if the matrix lacks these rows.
    pub(crate) fn words_of(&self, first_row: u32, rows: u32) -> Option<(&Tensor, [(usize, usize); 2])> {
        let slab = self.slabs.iter().find(|slab| (slab.first_row..slab.first_row + slab.rows).contains(&first_row))?;
        let first = first_row - slab.first_row;
        let unit_words = self.units() as usize * (self.weight.unit_bytes() / 4);
        let tail_halves = self.units() as usize * self.weight.tail_len();
        let tails = self.quants_words(slab) as usize + first as usize * tail_halves / 2;
        let units = (first as usize * unit_words, rows as usize * unit_words);
        (rows <= slab.rows - first).then_some((&slab.words, [units, (tails, rows as usize * tail_halves / 2)]))
    }

    /// Number of columns, K.
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Type of the weights.
    pub fn weight(&self) -> WeightType {
        self.weight
    }

    /// Units in a row.
    fn units(&self) -> u32 {
        self.cols.div_ceil(self.weight.unit_len() as u32)
    }

    /// Blocks in a row.
    pub(crate) fn blocks(&self) -> u32 {
        self.units() * (self.weight.unit_len() / BLOCK) as u32
    }

    /// Whether rows end at a unit's end, without padding.
    pub(crate) fn is_whole_blocks(&self) -> bool {
        self.cols.is_multiple_of(self.weight.unit_len() as u32)
    }

    pub(crate) fn slabs(&self) -> &[Slab] {
        &self.slabs
    }

    /// Number of slabs: 1 unless the matrix is larger than the device's limit for a binding.
    pub fn n_slabs(&self) -> usize {
        self.slabs.len()
    }

    /// The only slab, for a kernel that does not support several.
    pub(crate) fn only_slab(&self, kernel: &'static str) -> Result<&Slab, Error> {
        match self.slabs() {
            [slab] => Ok(slab),
            slabs => Err(Error::Operand {
                kernel,
                operand: "w",
                expected: "a matrix in one slab".into(),
                found: format!("a matrix in {} slabs", slabs.len()),
            }),
        }
    }

    /// The matrix's tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slabs.iter().map(|slab| &slab.words)
    }

    /// Words of a slab before its tails.
    pub(crate) fn quants_words(&self, slab: &Slab) -> u32 {
        slab.rows * self.units() * (self.weight.unit_bytes() / 4) as u32
    }
}

/// Tail words with only one half written so far: rows with an odd number of tail halves share a word with their
/// neighbours, which may arrive much later.
#[derive(Clone, Default)]
pub(crate) struct TailEdges {
    /// Keyed by the slab's memory and the word's index.
    halves: HashMap<(usize, usize), u16>,
}

impl TailEdges {
    /// Writes halves from the slab's half `first` on.
    fn write(
        &mut self,
        device: &dyn TensorWriter,
        places: &TailPlaces<'_>,
        first: usize,
        tails: &[u16],
    ) -> Result<(), Error> {
        let (head, rest) = tails.split_at((first % 2).min(tails.len()));
        let (pairs, tail) = rest.as_chunks::<2>();
        let words: Vec<u32> = pairs.iter().map(|&[low, high]| u32::from(low) | u32::from(high) << 16).collect();
        device.write_words(places.words, places.first_word + first.div_ceil(2), &words)?;
        let last = first + tails.len() - 1;
        let halves = head.iter().map(|&half| (first, half)).chain(tail.iter().map(|&half| (last, half)));
        for (at, half) in halves {
            let key = (Arc::as_ptr(&places.words.storage) as usize, at / 2);
            // The last half may have no partner.
            let is_alone = at % 2 == 0 && at + 1 == places.len;
            let Some(other) = self.halves.remove(&key).or(is_alone.then_some(0)) else {
                self.halves.insert(key, half);
                continue;
            };
            let [low, high] = if at % 2 == 0 { [half, other] } else { [other, half] };
            let word = u32::from(low) | u32::from(high) << 16;
            device.write_words(places.words, places.first_word + at / 2, &[word])?;
        }
        Ok(())
    }
}

/// Location of a slab's tails.
struct TailPlaces<'a> {
    words: &'a Tensor,
    /// First word of the tails.
    first_word: usize,
    /// Number of halves.
    len: usize,
}

/// 4-byte words of a packed matrix.
fn packed_words(weight: WeightType, rows: u32, cols: u32) -> u64 {
    let units = u64::from(rows) * u64::from(cols.div_ceil(weight.unit_len() as u32));
    units * weight.unit_bytes() as u64 / 4 + (units * weight.tail_len() as u64).div_ceil(2)
}

/// Bytes of a row in file layout, in whole blocks.
pub fn file_row_bytes(weight: WeightType, cols: usize) -> usize {
    let block_type = weight.block_type();
    cols.div_ceil(block_type.block_len() as usize) * block_type.block_bytes() as usize
}
