//! `matvec_lora`, `gate_up_lora` and `add_lora`: products with what an adapter adds.

use super::linear::{self, Form};
use super::{Call, Operand, threads};
use crate::kernels::{AddLoraParams, GateUpLoraParams, GateUpParams, LinearParams, MatvecLoraParams, UPS};

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
    let (weight, rounds, products, all) = (call.weight, call.rounds, call.products, call.params);
    let [w, vector, x, inner, b, y] = call.operands();
    let y = y.get_mut::<f32>();
    linear::matmul(Call {
        params: &all[..size_of::<LinearParams>()],
        weight,
        rounds,
        products,
        panels: None,
        operands: vec![
            Operand::Read(w.get()),
            Operand::Read(vector.get()),
            Operand::Read(x.get()),
            Operand::Write(bytemuck::cast_slice_mut(&mut *y)),
        ],
    });
    let LinearParams { n_tokens, n_out, y_start, y_stride, _pad: quads, .. } = params.linear;
    let (start, stride) = (y_start as usize, y_stride as usize);
    let low = LowRank::new(inner, b, params.members, quads);
    low.add_to(&mut y[..n_tokens as usize * stride], stride, [start, n_out as usize], start);
}

pub(crate) fn gate_up_lora(mut call: Call<'_>) {
    let params: GateUpLoraParams = call.params();
    let GateUpParams { ffn_dim, flags, .. } = params.gate_up;
    let (weight, form) = (call.weight, Form::of(flags, call.rounds, call.products));
    let [w, vector, x, inner, b, y] = call.operands();
    let low = LowRank::new(inner, b, params.members, params.rank);
    let first = if flags & UPS != 0 { ffn_dim as usize } else { 0 };
    let operands = (w.get(), vector.get(), x.get(), y.get_mut());
    linear::gate_up_with(params.gate_up, (weight, form), operands, |sums, n_out| {
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
