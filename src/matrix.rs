//! Packed weight matrices: the layout that kernels read, and packing from the layout of files.
//!
//! A matrix `[N, K]` is stored row by row in units along K: blocks of 32 weights, a few of them, or super-blocks of eight;
//! rows are padded with zeros to whole units. First come all units, each a multiple of 16 bytes, so that a kernel loads
//! `vec4<u32>`; then, for types whose units have one, the tails of all units, which are scales as f16 and what else would
//! not fill 16 bytes, two 16-bit words to a word. A matrix larger than one binding may be is cut into slabs of rows.
//!
//! Files put an f16 scale in front of each block, which makes a Q4_0 block 18 bytes long, so that nearly every load
//! would straddle words. Repacking happens once, during the upload, and changes no bit of a weight. `dtype.rs` has
//! each type's unit and tail, `unit.rs` the order of its bits.
//!
//! - Kernels only see blocks of 32; a fragment of a shader finds the super-block of a block.
//! - Factors of a scale are multiplied in the kernel, in f32, where `scale * quant` is exact: weights equal those of
//!   the reference decoder to the bit. Mins are subtracted from each weight, not from the sum, where two large
//!   numbers would cancel.
//! - Codebooks are looked up while loading, so no shader has a table of up to 1024 entries. A type may share the
//!   layout of another one (`WeightType::layout`): IQ2_XXS, IQ2_XS and IQ2_S take 3.5 bits per weight, IQ3_XXS and
//!   IQ3_S 4.25. No other type takes over 2 % more than in its file. Looking codebooks up in the kernel would need a
//!   dependent load for every four weights; that was not tried.
//! - Uneven levels (IQ4, 4-bit floats) are constants that are shifted into place, because each invocation would copy
//!   an array to memory.
//! - IQ1_S, IQ1_M, TQ1_0 and TQ2_0 are expanded to F32 while loading. Types without a decoder are refused by name.
//! - Matrices that share an input and a type (Q, K and V; gate and up) are one matrix, and so one dispatch.

mod unit;

use std::collections::HashMap;
use std::sync::Arc;

#[cfg(not(target_arch = "wasm32"))]
use rayon::prelude::*;

use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::target::Target;
use crate::tensor::{Role, Tensor, TensorWriter};

/// A weight matrix `[rows, cols]` on a device, packed.
#[derive(Clone, Debug)]
pub struct Matrix {
    slabs: Vec<Slab>,
    rows: u32,
    /// See [`Matrix::tuned_rows`].
    tuned_rows: u32,
    cols: u32,
    weight: WeightType,
}

/// A run of rows in a tensor of its own.
#[derive(Clone, Debug)]
pub(crate) struct Slab {
    pub words: Tensor,
    pub first_row: u32,
    pub rows: u32,
}

impl Matrix {
    /// Declares a matrix for a target, in as many slabs as the target's limit of a binding demands.
    ///
    /// # Errors
    /// [`Error::Operand`] if a dimension is zero or one row alone exceeds the limit.
    pub fn declare(target: &Target, label: &str, weight: WeightType, rows: u32, cols: u32) -> Result<Matrix, Error> {
        Matrix::declare_whole(target, label, weight, rows, cols, 1)
    }

    /// The same, where `whole` rows at a time stay in one slab.
    ///
    /// # Errors
    /// [`Error::Operand`] if a dimension is zero or these rows exceed the limit.
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

    /// Declares room for some rows of this matrix, packed as they are here, that passes read in place of the matrix: an even
    /// number of rows, so that no row shares a word of tails with one that is not written.
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
        // A slab's end is rounded up to 16 bytes.
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

    /// The rows of two matrices of one type and width, in the memory that they have.
    pub(crate) fn above(&self, below: &Matrix) -> Matrix {
        let moved = below.slabs.iter().map(|slab| Slab { first_row: self.rows + slab.first_row, ..slab.clone() });
        Matrix {
            slabs: self.slabs.iter().cloned().chain(moved).collect(),
            rows: self.rows + below.rows,
            ..self.clone()
        }
    }

    /// Fills the matrix from rows as files store them; several parts are stacked, for instance Q, K and V.
    ///
    /// # Errors
    /// [`Error::Operand`] if the parts are not whole rows or not as many as declared; errors of [`TensorWriter::write_words`].
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

    /// Writes some rows from `first_row` on, as files store them. Every row is to be written once, in any order, with
    /// the same `edges` for the whole matrix.
    ///
    /// # Errors
    /// [`Error::Operand`] if these are not whole rows of the matrix; errors of [`TensorWriter::write_words`].
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
                expected: format!("rows of {row_bytes} bytes, {} in all", self.rows),
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

    /// Packs rows into words and tails that are zero: many of them on all cores, except on the web.
    fn pack<'a>(&self, rows: impl Iterator<Item = &'a [u8]>, units: &mut [u32], tails: &mut [u16]) {
        /// Words that one core packs before others would be awake.
        #[cfg(not(target_arch = "wasm32"))]
        const FEW_WORDS: usize = 1 << 14;
        #[cfg(not(target_arch = "wasm32"))]
        let are_few = units.len() <= FEW_WORDS;
        let (n_units, n_tail) = (self.units() as usize, self.units() as usize * self.weight.tail_len());
        let mut tails = tails;
        let places = units.chunks_exact_mut(n_units * (self.weight.unit_bytes() / 4)).map(|units| {
            let (tail, rest) = std::mem::take(&mut tails).split_at_mut(n_tail);
            tails = rest;
            (units, tail)
        });
        let pack = |(row, (units, tail))| unit::pack_row(self.weight, row, units, tail);
        let rows = rows.zip(places);
        #[cfg(not(target_arch = "wasm32"))]
        if !are_few {
            return rows.collect::<Vec<_>>().into_par_iter().for_each(pack);
        }
        rows.for_each(pack);
    }

    /// Number of rows, N.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The rows by which a tuning knows the matrix.
    pub(crate) fn tuned_rows(&self) -> u32 {
        self.tuned_rows
    }

    /// The matrix as a tuning knows `other`: products with it are computed in the same way.
    pub(crate) fn tuned_as(self, other: &Matrix) -> Matrix {
        Matrix { tuned_rows: other.tuned_rows, ..self }
    }

    /// Bytes of so many rows without what a slab is rounded up by.
    pub(crate) fn bytes_of(&self, rows: u32) -> u64 {
        packed_words(self.weight, rows, self.cols) * 4
    }

    /// Whether so many rows, wherever a multiple of them begins, can be written again without their neighbours: tails of an odd
    /// number of halves share a word with those of the next row.
    pub(crate) fn are_apart(&self, rows: u32) -> bool {
        (u64::from(rows) * u64::from(self.units()) * self.weight.tail_len() as u64).is_multiple_of(2)
    }

    /// Where rows lie that [`Matrix::are_apart`] from others, all in one slab: the tensor, and in it first words and numbers of
    /// words of units and of tails. `None` if the matrix has no such rows.
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

    /// How the weights are stored.
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

    /// Whether a row ends with its last block; others end amid a block or a super-block.
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

    /// The slab of a matrix that `kernel` takes in one piece.
    pub(crate) fn only_slab(&self, kernel: &'static str) -> Result<&Slab, Error> {
        match self.slabs() {
            [slab] => Ok(slab),
            slabs => Err(Error::Operand {
                kernel,
                operand: "w",
                expected: "a matrix in one slab".into(),
                found: format!("one in {}", slabs.len()),
            }),
        }
    }

    /// The tensors that hold the matrix.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.slabs.iter().map(|slab| &slab.words)
    }

    /// Words of a slab before its tails.
    pub(crate) fn quants_words(&self, slab: &Slab) -> u32 {
        slab.rows * self.units() * (self.weight.unit_bytes() / 4) as u32
    }
}

/// Words of tails of which one half has come so far: rows whose tails are an odd number of halves share a word with their
/// neighbours, and these may come much later.
#[derive(Clone, Default)]
pub(crate) struct TailEdges {
    /// By the slab's memory and the word in it.
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
            // The last half of all may have no neighbour.
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

/// Where a slab keeps its tails.
struct TailPlaces<'a> {
    words: &'a Tensor,
    /// First word of tails.
    first_word: usize,
    /// Halves in all.
    len: usize,
}

/// 4-byte words of a packed matrix.
fn packed_words(weight: WeightType, rows: u32, cols: u32) -> u64 {
    let units = u64::from(rows) * u64::from(cols.div_ceil(weight.unit_len() as u32));
    units * weight.unit_bytes() as u64 / 4 + (units * weight.tail_len() as u64).div_ceil(2)
}

/// Bytes of a row as files store it; the blocks of quantised types must be whole there.
pub fn file_row_bytes(weight: WeightType, cols: usize) -> usize {
    let block_type = weight.block_type();
    cols.div_ceil(block_type.block_len() as usize) * block_type.block_bytes() as usize
}
