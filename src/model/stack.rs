//! Mapping of source tensors to device tensors: stacked matrices with one input, and concatenated vectors.

use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{Activation, Input, Linear, Norm, clip, matmul_input};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// A source tensor: the weight type of its rows, and its dimensions, contiguous one last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Weight type of the rows.
    pub weight: WeightType,
    /// `[rows, columns]`, or `[columns]`.
    pub shape: Vec<u64>,
}

/// The tensors of a source, by GGUF name: `token_embd.weight`, `blk.0.attn_q.weight` and so on.
pub trait WeightSource {
    /// Type and shape of a tensor, if the source has it.
    fn describe(&self, name: &str) -> Option<SourceTensor>;
}

/// The layer number in a tensor's name.
pub(crate) fn layer_of(name: &str) -> Option<u32> {
    split_layer(name)?.0.parse().ok()
}

/// A tensor's name within its layer: `attn_q.weight` of `blk.0.attn_q.weight`.
pub(crate) fn name_in_layer(name: &str) -> Option<&str> {
    Some(split_layer(name)?.1)
}

fn split_layer(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("blk.")?.split_once('.')
}

/// Destination of a source tensor's data.
#[derive(Clone, Debug)]
pub enum TensorSlot {
    /// Rows of a matrix.
    Rows {
        /// The matrix, of the rows' [`WeightType`].
        matrix: Matrix,
        /// Positions of the rows.
        places: RowPlaces,
    },
    /// Elements of a vector.
    Values {
        /// The vector.
        tensor: Tensor,
        /// Positions of the elements.
        places: RowPlaces,
    },
}

/// Positions of a tensor's rows in a matrix, or of its elements in a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPlaces {
    /// Position of the first row.
    pub first: u32,
    /// Number of consecutive rows.
    pub run: u32,
    /// Distance between the beginnings of two runs.
    pub stride: u32,
    /// Positions per run; those without a row are zero.
    pub height: u32,
    /// Columns of a slice, where rows are cut into slices: the next slice of all rows starts `stride` positions (the
    /// tensor's rows) further. The last slice is zero-padded.
    pub slice: Option<u32>,
    /// Distance to a second copy of all rows, where a matrix has them twice.
    pub copy: Option<u32>,
    /// Positions before the first that no row has and that are zero, in a vector.
    pub zeros_before: u32,
}

impl RowPlaces {
    /// Consecutive positions.
    pub fn from(first: u32) -> RowPlaces {
        RowPlaces::runs(first, u32::MAX, 0, 0)
    }

    /// Runs of `run` rows, `stride` apart.
    pub fn runs(first: u32, run: u32, stride: u32, height: u32) -> RowPlaces {
        RowPlaces { first, run, stride, height, slice: None, copy: None, zeros_before: 0 }
    }

    /// `rows` rows, cut into slices of `columns` columns.
    pub fn slices(first: u32, rows: u32, columns: u32) -> RowPlaces {
        RowPlaces { stride: rows, slice: Some(columns), ..RowPlaces::from(first) }
    }

    /// Positions of the tensor's rows `row..row + n`, as runs: first position and length.
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

    /// Runs of positions that a tensor of `n_rows` rows leaves free.
    pub fn gaps(self, n_rows: u32) -> impl Iterator<Item = (u32, u32)> {
        let n_runs = if self.height > 0 { n_rows.div_ceil(self.run) } else { 0 };
        let before = (self.zeros_before > 0).then(|| (self.first - self.zeros_before, self.zeros_before));
        before.into_iter().chain((0..n_runs).filter_map(move |i| {
            let n = self.run.min(n_rows - i * self.run);
            (n < self.height).then(|| (self.first + i * self.stride + n, self.height - n))
        }))
    }
}

/// Matrices with one input, such as Q, K and V: neighbours of one weight type are a single matrix.
#[derive(Clone, Debug)]
pub struct Stack {
    parts: Vec<StackPart>,
    bias: Option<Joined>,
    /// Bounds of inputs and outputs, if the file has any.
    bounds: Option<Box<Bounds>>,
    /// [`Linear::full_precision`].
    full_precision: bool,
    /// LoRA deltas.
    #[cfg(feature = "lora")]
    pub(super) delta: Option<super::lora::LoraDelta>,
}

/// Bounds of a product's inputs and outputs: Gemma 4's vision encoder. Only batch-invariant products apply them.
#[derive(Clone, Debug)]
struct Bounds {
    /// Low and high of each matrix's input, `[2]`.
    inputs: Vec<Joined>,
    /// Low and high of each matrix's outputs, `[2 G]`.
    outputs: Joined,
    /// Rows of each matrix.
    widths: Vec<u32>,
}

#[derive(Clone, Debug)]
struct StackPart {
    matrix: Matrix,
    /// Source tensors from top to bottom, and their rows.
    members: Vec<(String, u32)>,
}

/// Source vectors, concatenated in one tensor.
#[derive(Clone, Debug)]
pub(super) struct Joined {
    tensor: Tensor,
    /// Source tensors and their positions.
    members: Vec<(String, RowPlaces)>,
}

impl Joined {
    /// Declares vectors of these names and lengths, concatenated.
    pub fn declare(source: &dyn WeightSource, members: Vec<(String, u32)>) -> Result<Joined, Error> {
        let len = n_rows(&members);
        let firsts: Vec<u32> = starts(&members).map(|(_, first)| first).collect();
        let at = |((name, len), first): ((String, u32), u32)| (name, RowPlaces::from(first), len);
        Joined::declare_at(source, members.into_iter().zip(firsts).map(at).collect(), len)
    }

    /// As [`Joined::declare`], where one that the source lacks is zero.
    fn declare_biases(
        source: &dyn WeightSource,
        members: Vec<(String, u32)>,
        may_lack: Option<String>,
    ) -> Result<Joined, Error> {
        let (mut placed, mut next, mut zeros_before) = (Vec::new(), 0, 0);
        for (name, rows) in members {
            if may_lack.as_ref() == Some(&name) && source.describe(&name).is_none() {
                zeros_before = rows;
            } else {
                placed.push((name, RowPlaces { zeros_before, ..RowPlaces::from(next) }, rows));
                zeros_before = 0;
            }
            next += rows;
        }
        Joined::declare_at(source, placed, next)
    }

    /// Declares vectors by name, position and length, in a tensor of `len` elements.
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

    /// Declares matrices of these names, on top of each other in a tensor of `rows` rows.
    pub fn declare_rows(
        source: &dyn WeightSource,
        names: Vec<String>,
        [rows, cols]: [u32; 2],
    ) -> Result<Joined, Error> {
        let (mut members, mut next) = (Vec::new(), 0);
        let n = names.len();
        for (i, name) in names.into_iter().enumerate() {
            let own = source.describe(&name).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
            // The last one has the rest.
            let own = own.filter(|own| i + 1 < n && *own < rows - next).unwrap_or(rows - next);
            describe(source, &name, &[own, cols])?;
            members.push((name, RowPlaces::from(next * cols)));
            next += own;
        }
        let label = members.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("+");
        Ok(Joined { tensor: Tensor::declare(label, Role::Weights, &[rows, cols], DType::F32)?, members })
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let to = |places: &RowPlaces| TensorSlot::Values { tensor: self.tensor.clone(), places: *places };
        self.members.iter().map(move |(name, places)| (name.as_str(), to(places)))
    }
}

impl Bounds {
    fn declare(source: &dyn WeightSource, prefix: &str, names: &[(&str, u32)]) -> Result<Option<Box<Bounds>>, Error> {
        let ends = |kind: &str, name: &str| ["min", "max"].map(|end| (format!("{prefix}{name}.{kind}_{end}"), 1));
        let mut of_inputs = names.iter().flat_map(|(name, _)| ends("input", name));
        if !of_inputs.any(|(name, _)| source.describe(&name).is_some()) {
            return Ok(None);
        }
        let inputs = names.iter().map(|(name, _)| Joined::declare(source, ends("input", name).into()));
        let outputs = names.iter().flat_map(|(name, _)| ends("output", name)).collect();
        Ok(Some(Box::new(Bounds {
            inputs: inputs.collect::<Result<_, _>>()?,
            outputs: Joined::declare(source, outputs)?,
            widths: names.iter().map(|(_, rows)| *rows).collect(),
        })))
    }
}

impl Stack {
    /// Declares the matrices `names`, each `[rows, cols]`, and their biases, if any. A name that follows itself stands
    /// for a second copy of its rows.
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        names: &[(&str, u32)],
        cols: u32,
    ) -> Result<Stack, Error> {
        Stack::declare_biased(target, source, prefix, (names, None), cols)
    }

    /// As [`Stack::declare`], where the matrix `unbiased` may lack a bias that others have: it is zero, and not of the last.
    pub(super) fn declare_biased(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        (names, unbiased): (&[(&str, u32)], Option<&str>),
        cols: u32,
    ) -> Result<Stack, Error> {
        let bounds = Bounds::declare(source, prefix, names)?;
        let mut groups: Vec<(WeightType, Vec<(String, u32)>)> = Vec::new();
        for &(name, rows) in names {
            let member = (format!("{prefix}{name}.weight"), rows);
            let found = describe(source, &member.0, &[rows, cols])?;
            match groups.last_mut() {
                Some((weight, members)) if *weight == found.weight && bounds.is_none() => members.push(member),
                _ => groups.push((found.weight, vec![member])),
            }
        }
        let part = |(weight, members): (WeightType, Vec<(String, u32)>)| {
            let matrix = Matrix::declare(target, &label(&members), weight, n_rows(&members), cols)?;
            Ok(StackPart { matrix, members })
        };
        let parts = groups.into_iter().map(part).collect::<Result<_, Error>>()?;

        let members: Vec<_> = names.iter().map(|(name, rows)| (format!("{prefix}{name}.bias"), *rows)).collect();
        let has_bias = members.iter().any(|(name, _)| source.describe(name).is_some());
        let unbiased = unbiased.map(|name| format!("{prefix}{name}.bias"));
        let bias = if has_bias { Some(Joined::declare_biases(source, members, unbiased)?) } else { None };
        Ok(Stack {
            parts,
            bias,
            bounds,
            full_precision: false,
            #[cfg(feature = "lora")]
            delta: None,
        })
    }

    /// The same, whose products keep their precision where a target rounds to half.
    pub(super) fn in_full_precision(self) -> Stack {
        Stack { full_precision: true, ..self }
    }

    /// The product with one of the matrices.
    pub(super) fn linear<'a>(&'a self, w: &'a Matrix) -> Linear<'a> {
        Linear { bias: self.bias(), full_precision: self.full_precision, ..Linear::new(w) }
    }

    /// Records `y = x wᵀ (+ bias)`, or `y += ..`, with an optional norm of `x`.
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

    /// As [`Stack::record`], with an input that is converted once for all matrices.
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
        if let Some(delta) = &self.delta {
            return delta.record(rec, self, input, y, accumulate);
        }
        self.matrices()
            .try_for_each(|(w, y_start)| Linear { y_start, accumulate, ..self.linear(w) }.record_input(rec, input, y))
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
            Linear { activation, y_start, ..self.linear(w) }.record_input(rec, input, y)
        })
    }

    /// Records `y = act(x wᵀ (+ bias))`, or `y += ..`, with the batch-invariant kernel: a row's result does not
    /// depend on other rows.
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
        let Some(bounds) = &self.bounds else {
            return self.matrices().try_for_each(|(w, y_start)| {
                matmul_input(rec, &Linear { activation, y_start, accumulate, ..self.tiled(w) }, input, y)
            });
        };
        if accumulate || activation.is_some() {
            let (kernel, operand, expected) = ("clip", "product", "one of its own, without an activation".into());
            return Err(Error::Operand { kernel, operand, expected, found: "a sum or an activation".into() });
        }
        let x = input.rows(rec)?;
        let beyond = rec.temporary("beyond", y.shape())?;
        for ((w, y_start), of_input) in self.matrices().zip(&bounds.inputs) {
            let within = rec.temporary("within", x.shape())?;
            clip(rec, &of_input.tensor, &x.shape()[1..], &x, &within)?;
            matmul_input(rec, &Linear { y_start, ..self.tiled(w) }, &mut Input::new(&within), &beyond)?;
        }
        clip(rec, &bounds.outputs.tensor, &bounds.widths, &beyond, y)
    }

    /// The stack as one batch-invariant product, if it has a single matrix.
    pub(super) fn as_tiled(&self) -> Option<Linear<'_>> {
        match self.parts.as_slice() {
            [part] if self.bounds.is_none() => Some(self.tiled(&part.matrix)),
            _ => None,
        }
    }

    /// A batch-invariant product: sums have one order for any number of rows.
    fn tiled<'a>(&'a self, w: &'a Matrix) -> Linear<'a> {
        Linear { batch_invariant: true, ..self.linear(w) }
    }

    /// Matrices from top to bottom, and their first rows.
    pub fn matrices(&self) -> impl Iterator<Item = (&Matrix, u32)> {
        self.parts.iter().scan(0, |next, part| {
            let first_row = *next;
            *next += part.matrix.rows();
            Some((&part.matrix, first_row))
        })
    }

    /// Matrices from top to bottom, each with its source tensors and their rows.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&Matrix, &[(String, u32)])> {
        self.parts.iter().map(|part| (&part.matrix, part.members.as_slice()))
    }

    /// Names and rows of the source tensors, from top to bottom.
    #[cfg(feature = "lora")]
    pub(super) fn members(&self) -> impl Iterator<Item = (&str, u32)> {
        self.parts.iter().flat_map(|part| &part.members).map(|(name, rows)| (name.as_str(), *rows))
    }

    /// Bias, one value per row.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(|bias| &bias.tensor)
    }

    /// The stack as a single matrix in one slab without bias, if possible.
    pub fn as_one(&self) -> Option<&Matrix> {
        match (self.parts.as_slice(), &self.bias) {
            ([part], None) if part.matrix.n_slabs() == 1 => Some(&part.matrix),
            _ => None,
        }
    }

    /// The stack for `gate_up`: one matrix of gates and ups, or two of different types.
    pub(super) fn as_gate_up(&self) -> Option<(Option<&Matrix>, &Matrix)> {
        match (self.parts.as_slice(), &self.bias) {
            ([gates, ups], None) if gates.matrix.rows() == ups.matrix.rows() && ups.matrix.n_slabs() == 1 => {
                Some((Some(&gates.matrix), &ups.matrix))
            }
            _ => self.as_one().map(|w| (None, w)),
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let mut tensors: Vec<_> = self.parts.iter().flat_map(|part| part.matrix.tensors()).collect();
        tensors.extend(self.joined().into_iter().map(Joined::tensor));
        tensors.into_iter()
    }

    fn joined(&self) -> Vec<&Joined> {
        let mut joined: Vec<_> = self.bias.iter().collect();
        if let Some(bounds) = &self.bounds {
            joined.extend(bounds.inputs.iter().chain([&bounds.outputs]));
        }
        joined
    }

    pub(super) fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let mut slots = Vec::new();
        for part in &self.parts {
            let mut first = 0;
            for of_one in part.members.chunk_by(|(one, _), (next, _)| one == next) {
                let [(name, rows), ..] = of_one else { continue };
                let copy = (of_one.len() > 1).then_some(*rows);
                let places = RowPlaces { copy, ..RowPlaces::from(first) };
                slots.push((name.as_str(), TensorSlot::Rows { matrix: part.matrix.clone(), places }));
                first += n_rows(of_one);
            }
        }
        slots.extend(self.joined().into_iter().flat_map(Joined::tensor_slots));
        slots.into_iter()
    }
}

/// Joined name of several source tensors.
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

/// Looks up tensor `name` and checks its shape.
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

/// Declares an F32 tensor under its source name.
pub(super) fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}
