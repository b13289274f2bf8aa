//! `matvec_lora`, `gate_up_lora` and `add_lora`: products with what an adapter adds.

use super::linear::{self, GatePlan};
use super::{Call, Operand, threads};
use crate::shaders::params::{AddLoraParams, GateUpLoraParams, GateUpParams, LinearParams, MatvecLoraParams};

/// Columns of a row that a thread takes at a time where there is one row.
const CHUNK: usize = 1 << 12;

/// `sum over r of b[n, r] * inner[t, member of n, r]`.
struct LowRank<'a> {
    inner: &'a [f32],
    b: &'a [f32],
    /// See `shaders/shared/members.wgsl`.
    members: [u32; 4],
    rank: usize,
}

impl<'a> LowRank<'a> {
    /// With a rank in quads, as params have it.
    fn new(inner: &'a Operand<'_>, b: &'a Operand<'_>, members: [u32; 4], quads: u32) -> LowRank<'a> {
        LowRank { inner: inner.get(), b: b.get(), members, rank: 4 * quads as usize }
    }

    fn of(&self, token: usize, n: usize) -> f32 {
        let [starts @ .., stride] = self.members;
        let member = starts.iter().filter(|&&start| n >= start as usize).count();
        let inner = &self.inner[4 * token * stride as usize + member * self.rank..][..self.rank];
        let b = &self.b[n * self.rank..][..self.rank];
        let mut sums = [0.0f32; 4];
        for (x, b) in inner.as_chunks::<4>().0.iter().zip(b.as_chunks::<4>().0) {
            sums.iter_mut().zip(x.iter().zip(b)).for_each(|(sum, (x, b))| *sum += x * b);
        }
        sums.iter().sum()
    }

    /// Adds it to columns `start..start + n` of rows of `stride`; the first is row `first` of `b`.
    fn add_to(&self, y: &mut [f32], stride: usize, [start, n]: [usize; 2], first: usize) {
        let ops = y.len() / stride.max(1) * n * self.rank;
        if y.len() == stride {
            return threads::for_each_chunk(&mut y[start..start + n], CHUNK, ops, |chunk, y| {
                let first = first + chunk * CHUNK;
                y.iter_mut().enumerate().for_each(|(i, y)| *y += self.of(0, first + i));
            });
        }
        threads::for_each_chunk(y, stride, ops, |token, y| {
            y[start..start + n].iter_mut().enumerate().for_each(|(i, y)| *y += self.of(token, first + i));
        });
    }
}

pub(crate) fn matvec_lora(mut call: Call<'_>) {
    let params: MatvecLoraParams = call.params();
    let MatvecLoraParams { n_tokens, n_out, dim, blocks, w_scales, y_start, y_stride, .. } = params;
    let MatvecLoraParams { flags, eps, split_blocks, first_group, members, rank, .. } = params;
    let linear = LinearParams {
        n_tokens,
        n_out,
        dim,
        blocks,
        w_scales,
        y_start,
        y_stride,
        flags,
        eps,
        split_blocks,
        first_group,
    };
    let (constants, weight, rounds, batch_invariance) =
        (call.constants, call.weight, call.rounds, call.batch_invariance);
    let [w, vector, x, inner, b, y] = call.operands();
    let y = y.get_mut::<f32>();
    linear::matmul(Call {
        params: bytemuck::bytes_of(&linear),
        constants,
        weight,
        rounds,
        batch_invariance,
        panels: None,
        operands: vec![
            Operand::Read(w.get()),
            Operand::Read(vector.get()),
            Operand::Read(x.get()),
            Operand::Write(bytemuck::cast_slice_mut(&mut *y)),
        ],
    });
    let (start, stride) = (y_start as usize, y_stride as usize);
    let low = LowRank::new(inner, b, members, rank);
    low.add_to(&mut y[..n_tokens as usize * stride], stride, [start, n_out as usize], start);
}

pub(crate) fn gate_up_lora(mut call: Call<'_>) {
    let GateUpLoraParams { n_tokens, ffn_dim, dim, blocks, w_scales, eps, first_group, members, rank } = call.params();
    let params = GateUpParams { n_tokens, ffn_dim, dim, blocks, w_scales, eps, first_group };
    let plan = GatePlan::of(&call);
    let [w, vector, x, inner, b, y] = call.operands();
    let low = LowRank::new(inner, b, members, rank);
    let first = if plan.is_ups { ffn_dim as usize } else { 0 };
    let operands = (w.get(), vector.get(), x.get(), y.get_mut());
    linear::gate_up_with(params, &plan, operands, |sums, n_out| {
        low.add_to(sums, n_out, [0, n_out], first);
    });
}

pub(crate) fn add_lora(mut call: Call<'_>) {
    let AddLoraParams { n_tokens, n_out, y_stride, rank, members } = call.params();
    let [inner, b, y] = call.operands();
    let stride = y_stride as usize;
    let y = &mut y.get_mut::<f32>()[..n_tokens as usize * stride];
    LowRank::new(inner, b, members, rank).add_to(y, stride, [0, n_out as usize], 0);
}
