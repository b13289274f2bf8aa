//! LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on a device: low-rank deltas of a model's products, separate
//! from its weights, which any number of adapters share.
//!
//! Merging an adapter would need a copy of the weights per adapter, in a type that holds the sum. Instead the A
//! matrices of all members of a stack are one matrix and one dispatch; `matvec_lora` and `gate_up_lora` add the rest
//! where they write their sums. These are separate kernels, because two more bindings would change the plain
//! kernels' pipelines for everyone. Ranks are zero-padded to the largest of a stack, factors are F32, and B includes
//! the scale.

use super::config::ModelConfig;
use super::stack::Stack;
use super::weights::{BlockWeights, Weights};
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{
    Gate, Input, Linear, LowRank, MAX_MEMBERS, Norm, add_lora, gate_up_lora, matmul_input, matvec, matvec_lora,
    up_gated_lora,
};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// Delta of a stack's product: `y += b (a x)`. Each adapted member has R rows of `a`, R being the largest rank rounded
/// up to a multiple of 4. The kernels know [`MAX_MEMBERS`]: the members from the last of these on share one, and R grows
/// to hold all their ranks.
#[derive(Clone, Debug)]
pub(super) struct LoraDelta {
    /// A matrices, concatenated, `[members R, K]`.
    a: Matrix,
    /// Scaled B matrices, `[N, R]`; rows of members that are not adapted are zero.
    b: Tensor,
    /// First stack rows of adapted members; the first member's counts as 0.
    starts: Vec<u32>,
}

/// Destinations of one adapted tensor's factors, in tensors that are zero elsewhere.
#[derive(Clone, Debug)]
pub struct FactorPlaces {
    /// Receives A.
    pub a: Matrix,
    /// First row of A.
    pub a_row: u32,
    /// Receives B.
    pub b: Tensor,
    /// First row of B.
    pub b_row: u32,
    /// First column of B.
    pub b_column: u32,
}

impl LoraDelta {
    fn low<'a>(&'a self, inner: &'a Tensor) -> LowRank<'a> {
        LowRank { inner, b: &self.b, starts: &self.starts }
    }

    fn inner(&self, rec: &Recorder, n_tokens: u32) -> Result<Tensor, Error> {
        rec.temporary("inner", &[n_tokens, self.a.rows()])
    }

    /// Records a stack's product with its delta: one more dispatch for a few tokens, two for many.
    pub fn record(
        &self,
        rec: &mut Recorder,
        stack: &Stack,
        input: &mut Input<'_>,
        y: &Tensor,
        accumulate: bool,
    ) -> Result<(), Error> {
        let [n_tokens, _] = input.dims("matvec_lora")?;
        let inner = self.inner(rec, n_tokens)?;
        let low = self.low(&inner);
        let of = |w, y_start| Linear { y_start, accumulate, ..stack.linear(w) };
        if let Some((x, norm)) = input.folded(rec, stack.bias().is_some())? {
            matvec(rec, &Linear { norm, ..Linear::new(&self.a) }, &x, &inner)?;
            return stack
                .matrices()
                .try_for_each(|(w, y_start)| matvec_lora(rec, &Linear { norm, ..of(w, y_start) }, &low, &x, y));
        }
        matmul_input(rec, &Linear { bias: None, ..stack.linear(&self.a) }, input, &inner)?;
        stack.matrices().try_for_each(|(w, y_start)| matmul_input(rec, &of(w, y_start), input, y))?;
        add_lora(rec, &low, y)
    }

    /// Records [`gate_up`](fn@crate::kernels::gate_up) with a delta; `gates` is set if their weight type differs.
    pub fn record_gate_up(
        &self,
        rec: &mut Recorder,
        (gates, w): (Option<&Matrix>, &Matrix),
        norm: Option<Norm<'_>>,
        gate: Gate,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        let [n_tokens, _] = x.dims2("gate_up_lora", "x")?;
        let inner = self.inner(rec, n_tokens)?;
        matvec(rec, &Linear { norm, ..Linear::new(&self.a) }, x, &inner)?;
        match gates {
            None => gate_up_lora(rec, w, norm, gate, &self.low(&inner), x, y),
            Some(gates) => {
                matvec_lora(rec, &Linear { norm, ..Linear::new(gates) }, &self.low(&inner), x, y)?;
                up_gated_lora(rec, w, norm, gate, &self.low(&inner), x, y)
            }
        }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.a.tensors().chain([&self.b])
    }
}

impl Stack {
    /// Declares deltas for the members that have a rank.
    fn adapt(
        &mut self,
        target: &Target,
        rank_of: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<Vec<(String, FactorPlaces)>, Error> {
        let (mut n_rows, mut adapted) = (0, Vec::new());
        for (name, rows) in self.members() {
            adapted.extend(rank_of(name).map(|rank| (name.to_owned(), n_rows, rank)));
            n_rows += rows;
        }
        let cols = self.matrices().next().map_or(0, |(w, _)| w.cols());
        let Some(rank) = adapted.iter().map(|(.., rank)| rank.next_multiple_of(4)).max() else {
            return Ok(Vec::new());
        };
        let label =
            |factor: &str| adapted.iter().map(|(name, ..)| format!("{name}.{factor}")).collect::<Vec<_>>().join("+");
        let n_kernel_members = adapted.len().min(MAX_MEMBERS);
        let columns = rank.saturating_mul((adapted.len() - n_kernel_members + 1) as u32);
        let a_rows = columns.saturating_mul(n_kernel_members as u32);
        let a = Matrix::declare(target, &label("lora_a"), WeightType::F32, a_rows, cols)?;
        let b = Tensor::declare(label("lora_b"), Role::Weights, &[n_rows, columns], DType::F32)?;
        let starts = adapted.iter().take(n_kernel_members).enumerate();
        let starts = starts.map(|(i, (_, row, _))| if i == 0 { 0 } else { *row }).collect();
        self.delta = Some(LoraDelta { a: a.clone(), b: b.clone(), starts });
        let places = |(i, (name, b_row, _)): (usize, (String, u32, u32))| {
            let member = i.min(n_kernel_members - 1);
            let b_column = (i - member) as u32 * rank;
            let a_row = member as u32 * columns + b_column;
            (name, FactorPlaces { a: a.clone(), a_row, b: b.clone(), b_row, b_column })
        };
        Ok(adapted.into_iter().enumerate().map(places).collect())
    }

    fn adaptable(&self) -> impl Iterator<Item = (&str, [u32; 2])> {
        let cols = self.matrices().next().map_or(0, |(w, _)| w.cols());
        self.members().map(move |(name, rows)| (name, [rows, cols]))
    }
}

impl BlockWeights {
    /// Stacks that adapters can change: those of attention, except `attn_kv_b`, or `attn_k_b` and `attn_v_b`, of
    /// recurrences, and of a feed-forward without experts.
    fn adaptable(&mut self) -> impl Iterator<Item = &mut Stack> {
        let of_attention = [&mut self.attn_qkv, &mut self.attn_output];
        let of_latent = self.latent.iter_mut().flat_map(|latent| &mut latent.queries).map(|(_, stack)| stack);
        let of_recurrence = self.recurrence.iter_mut();
        let of_recurrence = of_recurrence.flat_map(|recurrence| [&mut recurrence.input, &mut recurrence.output]);
        let of_feed_forward = [&mut self.ffn_up, &mut self.ffn_down];
        of_attention.into_iter().chain(of_latent).chain(of_recurrence).chain(of_feed_forward)
    }
}

impl Weights {
    /// GGUF names, rows and columns of the tensors that adapters can change.
    pub fn adaptable(&self, config: &ModelConfig) -> Vec<(String, [u32; 2])> {
        let mut weights = self.clone();
        // Without the MTP head, which is no layer.
        let blocks = weights.blocks.iter_mut().take(config.n_layers() as usize);
        let stacks = blocks.flat_map(BlockWeights::adaptable);
        stacks
            .flat_map(|stack| stack.adaptable().map(|(name, dims)| (name.to_owned(), dims)).collect::<Vec<_>>())
            .collect()
    }

    /// Adds deltas for the tensors to which `rank_of` gives a rank, and returns the destinations of their factors by
    /// tensor name. Declares the deltas; the caller writes them.
    ///
    /// # Errors
    /// [`Error::Operand`] if a delta would be too large for a tensor.
    pub fn adapted(
        &self,
        target: &Target,
        rank_of: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<(Weights, Vec<(String, FactorPlaces)>), Error> {
        let mut weights = self.clone();
        let mut places = Vec::new();
        for block in &mut weights.blocks {
            for stack in block.adaptable() {
                places.extend(stack.adapt(target, rank_of)?);
            }
        }
        Ok((weights, places))
    }

    /// Tensors of all deltas.
    pub fn delta_tensors(&self) -> impl Iterator<Item = &Tensor> {
        let stacks = self.blocks.iter().flat_map(BlockWeights::stacks);
        stacks.filter_map(|stack| stack.delta.as_ref()).flat_map(LoraDelta::tensors)
    }
}
