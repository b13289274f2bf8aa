//! Where a model's tensors come from and where they go: matrices that share an input, and vectors side by side.

use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{Activation, Input, Linear, Norm, matmul_input};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// A tensor in a source: how its rows will be delivered, and its dimensions, the contiguous one last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Weight type of the rows.
    pub weight: WeightType,
    /// `[rows, columns]`, or `[columns]`.
    pub shape: Vec<u64>,
}

/// Which tensors a source has. Names are GGUF's: `token_embd.weight`, `blk.0.attn_q.weight` and so on.
pub trait WeightSource {
    /// Type and shape of a tensor, if it is there.
    fn describe(&self, name: &str) -> Option<SourceTensor>;
}

/// The layer that a tensor belongs to, by its name.
pub(crate) fn layer_of(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// Where the data of a source's tensor belongs.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Rows of a matrix.
    Rows {
        /// The matrix, whose [`WeightType`] the rows have.
        matrix: Matrix,
        /// Which.
        places: RowPlaces,
    },
    /// Elements of a vector.
    Values {
        /// The vector.
        tensor: Tensor,
        /// Which.
        places: RowPlaces,
    },
}

/// Places of a tensor's rows in a matrix, or of its elements in a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlaces {
    /// That of the first row.
    pub first: u32,
    /// Rows that stay together.
    pub run: u32,
    /// Places from where a run of rows begins to where the next one does.
    pub stride: u32,
    /// Places that a run has; those without a row are zero.
    pub height: u32,
    /// Columns of the rows that are put there, where a row is cut: its next columns are as many places further as the
    /// tensor has rows, `stride`. What the last columns lack is zero.
    pub slice: Option<u32>,
}

impl RowPlaces {
    /// One after the other.
    pub fn from(first: u32) -> RowPlaces {
        RowPlaces { first, run: u32::MAX, stride: 0, height: 0, slice: None }
    }

    /// Runs of so many rows.
    pub fn runs(first: u32, run: u32, stride: u32, height: u32) -> RowPlaces {
        RowPlaces { first, run, stride, height, slice: None }
    }

    /// `rows` rows, cut into slices of so many columns.
    pub fn slices(first: u32, rows: u32, columns: u32) -> RowPlaces {
        RowPlaces { stride: rows, slice: Some(columns), ..RowPlaces::from(first) }
    }

    /// Rows `row..row + n` of the tensor as runs of places: the first place of each, and how many.
    pub fn places(self, row: u32, n: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut left = row..row + n;
        std::iter::from_fn(move || {
            let row = left.start;
            let (i, within) = (row / self.run, row % self.run);
            let n = (self.run - within).min(left.len() as u32);
            left.start += n;
            (n > 0).then_some((self.first + i * self.stride + within, n))
        })
    }

    /// Runs of places that are left free by a tensor of so many rows.
    pub fn gaps(self, n_rows: u32) -> impl Iterator<Item = (u32, u32)> {
        let n_runs = if self.height > 0 { n_rows.div_ceil(self.run) } else { 0 };
        (0..n_runs).filter_map(move |i| {
            let n = self.run.min(n_rows - i * self.run);
            (n < self.height).then(|| (self.first + i * self.stride + n, self.height - n))
        })
    }
}

/// Matrices side by side that share an input, such as Q, K and V: neighbours of one weight type are one matrix.
#[derive(Clone, Debug)]
pub struct Stack {
    parts: Vec<Part>,
    bias: Option<Joined>,
    /// Of an adapter.
    #[cfg(feature = "lora")]
    pub(super) addends: Option<super::lora::LoraDelta>,
}

#[derive(Clone, Debug)]
struct Part {
    matrix: Matrix,
    /// Source tensors from top to bottom, with their numbers of rows.
    members: Vec<(String, u32)>,
}

/// Vectors of a source side by side in one tensor.
#[derive(Clone, Debug)]
pub(super) struct Joined {
    tensor: Tensor,
    /// Source tensors with their places.
    members: Vec<(String, RowPlaces)>,
}

impl Joined {
    /// Declares the vectors of these names and lengths, one after the other.
    pub fn declare(source: &dyn WeightSource, members: Vec<(String, u32)>) -> Result<Joined, Error> {
        let len = n_rows(&members);
        let firsts: Vec<u32> = starts(&members).map(|(_, first)| first).collect();
        let at = |((name, len), first): ((String, u32), u32)| (name, RowPlaces::from(first), len);
        Joined::declare_at(source, members.into_iter().zip(firsts).map(at).collect(), len)
    }

    /// Declares vectors by their names, places and lengths, in a tensor of `len` elements.
    pub fn declare_at(
        source: &dyn WeightSource,
        members: Vec<(String, RowPlaces, u32)>,
        len: u32,
    ) -> Result<Joined, Error> {
        for (name, _, len) in &members {
            describe(source, name, &[*len])?;
        }
        let label = members.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>().join("+");
        let tensor = Tensor::declare(label, Role::Weights, &[len], DType::F32)?;
        Ok(Joined { tensor, members: members.into_iter().map(|(name, places, _)| (name, places)).collect() })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let to = |places: &RowPlaces| Destination::Values { tensor: self.tensor.clone(), places: *places };
        self.members.iter().map(move |(name, places)| (name.as_str(), to(places)))
    }
}

impl Stack {
    /// Declares the matrices `names`, each `[rows, cols]`, and their biases if the source has them.
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        names: &[(&str, u32)],
        cols: u32,
    ) -> Result<Stack, Error> {
        let mut groups: Vec<(WeightType, Vec<(String, u32)>)> = Vec::new();
        for &(name, rows) in names {
            let member = (format!("{prefix}{name}.weight"), rows);
            let found = describe(source, &member.0, &[rows, cols])?;
            match groups.last_mut() {
                Some((weight, members)) if *weight == found.weight => members.push(member),
                _ => groups.push((found.weight, vec![member])),
            }
        }
        let part = |(weight, members): (WeightType, Vec<(String, u32)>)| {
            let matrix = Matrix::declare(target, &label(&members), weight, n_rows(&members), cols)?;
            Ok(Part { matrix, members })
        };
        let parts = groups.into_iter().map(part).collect::<Result<_, Error>>()?;

        let members: Vec<_> = names.iter().map(|(name, rows)| (format!("{prefix}{name}.bias"), *rows)).collect();
        let has_bias = members.iter().any(|(name, _)| source.describe(name).is_some());
        let bias = if has_bias { Some(Joined::declare(source, members)?) } else { None };
        Ok(Stack {
            parts,
            bias,
            #[cfg(feature = "lora")]
            addends: None,
        })
    }

    /// Records `y = x wᵀ (+ bias)`, or `y += ..`, of `x` as it is or normalised.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record(
        &self,
        rec: &mut Recorder,
        norm: Option<Norm<'_>>,
        x: &Tensor,
        y: &Tensor,
        accumulate: bool,
    ) -> Result<(), Error> {
        self.record_input(rec, &mut Input::normed(x, norm), y, accumulate)
    }

    /// As [`Stack::record`] of an input that is turned into rows for all matrices at once.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub(super) fn record_input(
        &self,
        rec: &mut Recorder,
        input: &mut Input<'_>,
        y: &Tensor,
        accumulate: bool,
    ) -> Result<(), Error> {
        #[cfg(feature = "lora")]
        if let Some(addends) = &self.addends {
            return addends.record(rec, self, input, y, accumulate);
        }
        self.matrices().try_for_each(|(w, y_start)| {
            Linear { bias: self.bias(), y_start, accumulate, ..Linear::new(w) }.record_input(rec, input, y)
        })
    }

    /// Records `y = act(x wᵀ (+ bias))`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_activated(
        &self,
        rec: &mut Recorder,
        x: &Tensor,
        activation: Activation,
        y: &Tensor,
    ) -> Result<(), Error> {
        let input = &mut Input::new(x);
        self.matrices().try_for_each(|(w, y_start)| {
            let activation = Some(activation);
            Linear { bias: self.bias(), activation, y_start, ..Linear::new(w) }.record_input(rec, input, y)
        })
    }

    /// Records `y = act(x wᵀ (+ bias))`, or `y += ..`, as tiles however few rows `x` has: a row's result is then the same
    /// whatever rows stand around it.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_tiled(
        &self,
        rec: &mut Recorder,
        input: &mut Input<'_>,
        activation: Option<Activation>,
        accumulate: bool,
        y: &Tensor,
    ) -> Result<(), Error> {
        self.matrices().try_for_each(|(w, y_start)| {
            matmul_input(rec, &Linear { activation, y_start, accumulate, ..self.tiled(w) }, input, y)
        })
    }

    /// The stack as one such product, if it has a single matrix.
    pub(super) fn as_tiled(&self) -> Option<Linear<'_>> {
        match self.parts.as_slice() {
            [part] => Some(self.tiled(&part.matrix)),
            _ => None,
        }
    }

    /// A product whose sums are in one order for every number of rows.
    fn tiled<'a>(&'a self, w: &'a Matrix) -> Linear<'a> {
        Linear { bias: self.bias(), batch_invariant: true, ..Linear::new(w) }
    }

    /// The matrices from top to bottom, and their first rows.
    pub fn matrices(&self) -> impl Iterator<Item = (&Matrix, u32)> {
        self.parts.iter().scan(0, |next, part| {
            let first_row = *next;
            *next += part.matrix.rows();
            Some((&part.matrix, first_row))
        })
    }

    /// Names and rows of the source tensors, from top to bottom.
    #[cfg(feature = "lora")]
    pub(super) fn members(&self) -> impl Iterator<Item = (&str, u32)> {
        self.parts.iter().flat_map(|part| &part.members).map(|(name, rows)| (name.as_str(), *rows))
    }

    /// One value for each row.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(|bias| &bias.tensor)
    }

    /// The stack as a single matrix without a bias in one slab, if it is one.
    pub fn as_one(&self) -> Option<&Matrix> {
        match (self.parts.as_slice(), &self.bias) {
            ([part], None) if part.matrix.n_slabs() == 1 => Some(&part.matrix),
            _ => None,
        }
    }

    /// The stack as matrices for `gate_up`: one that has gates and ups, or gates and ups of different types apart.
    pub(super) fn as_gate_up(&self) -> Option<(Option<&Matrix>, &Matrix)> {
        match (self.parts.as_slice(), &self.bias) {
            ([gates, ups], None) if gates.matrix.rows() == ups.matrix.rows() && ups.matrix.n_slabs() == 1 => {
                Some((Some(&gates.matrix), &ups.matrix))
            }
            _ => self.as_one().map(|w| (None, w)),
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let biases = self.bias.iter().map(|bias| &bias.tensor);
        self.parts.iter().flat_map(|part| part.matrix.tensors()).chain(biases)
    }

    pub(super) fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let rows = self.parts.iter().flat_map(|part| {
            starts(&part.members).map(|(name, first)| {
                (name, Destination::Rows { matrix: part.matrix.clone(), places: RowPlaces::from(first) })
            })
        });
        rows.chain(self.bias.iter().flat_map(Joined::destinations))
    }
}

/// The name of several source tensors as one.
fn label(members: &[(String, u32)]) -> String {
    members.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("+")
}

fn n_rows(members: &[(String, u32)]) -> u32 {
    members.iter().map(|(_, rows)| rows).sum()
}

/// Each member's name and first row.
fn starts(members: &[(String, u32)]) -> impl Iterator<Item = (&str, u32)> {
    members.iter().scan(0, |next, (name, rows)| {
        let first = *next;
        *next += rows;
        Some((name.as_str(), first))
    })
}

/// The tensor `name`, which must have this shape.
pub(super) fn describe(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<SourceTensor, Error> {
    let found = source.describe(name);
    let expected: Vec<u64> = shape.iter().map(|&d| u64::from(d)).collect();
    match found {
        Some(tensor) if tensor.shape == expected => Ok(tensor),
        found => Err(Error::Config {
            field: name.into(),
            expected: format!("a tensor of shape {expected:?}"),
            found: found.map_or("missing".into(), |tensor| format!("one of shape {:?}", tensor.shape)),
        }),
    }
}

/// Declares a tensor of F32 under its name in the source.
pub(super) fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}
