//! `probe_copy`, `probe_fma`, `probe_matrix`, `probe_read` and `probe_reduce`: memory and arithmetic by themselves.

use super::simd::{self, Lanes, WideWork};
use super::{Call, threads};
use crate::kernels::microbench::{PROBE_NUMBERS, PROBE_READS};
use crate::shaders::params::ProbeMatrixParams;
use crate::shaders::params::{ProbeCopyParams, ProbeFmaParams, ProbeReadParams, ProbeReduceParams};

pub(crate) fn probe_read(mut call: Call<'_>) {
    let params: ProbeReadParams = call.params();
    let [x, y] = call.operands();
    let x = &x.get::<u32>()[..params.len as usize];
    let y = &mut y.get_mut::<u32>()[..params.n_out as usize];
    if params.scattered == 1 {
        fill(y, |y, n| y.iter_mut().zip(n..).for_each(|(y, n)| *y ^= x[(hash(n) & (params.len - 1)) as usize]));
    } else if params.stride_shift == 0 {
        fill(y, |y, n| y.iter_mut().zip(&x[n as usize..]).for_each(|(y, x)| *y ^= x));
    } else {
        let rows_mask = (1u32 << params.rows_shift) - 1;
        let at = |n: u32| (((n & rows_mask) << params.stride_shift) + (n >> params.rows_shift)) as usize;
        fill(y, |y, n| y.iter_mut().zip(n..).for_each(|(y, n)| *y ^= x[at(n)]));
    }
}

/// Clears `y` and calls `read` on each piece of it for each of its reads, with the number of the piece's first.
fn fill(y: &mut [u32], read: impl Fn(&mut [u32], u32) + Sync + Send) {
    /// Outputs that a thread takes at a time.
    const CHUNK: usize = 1 << 12;
    let n_out = y.len();
    threads::for_each_chunk(y, CHUNK, n_out * PROBE_READS as usize, |i, y| {
        y.fill(0);
        (0..PROBE_READS).for_each(|j| read(y, j * n_out as u32 + (i * CHUNK) as u32));
    });
}

fn hash(n: u32) -> u32 {
    let mut h = n.wrapping_mul(0x9e37_79b1);
    h = (h ^ (h >> 15)).wrapping_mul(0x85eb_ca77);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2_ae3d);
    h ^ (h >> 16)
}

pub(crate) fn probe_copy(mut call: Call<'_>) {
    /// Words that a thread takes at a time.
    const CHUNK: usize = 1 << 16;
    let params: ProbeCopyParams = call.params();
    let [x, y] = call.operands();
    let len = 4 * params.n_quads as usize;
    let (x, y) = (&x.get::<u32>()[..len], &mut y.get_mut::<u32>()[..len]);
    threads::for_each_chunk(y, CHUNK, len, |i, y| y.copy_from_slice(&x[i * CHUNK..][..y.len()]));
}

pub(crate) fn probe_reduce(mut call: Call<'_>) {
    let params: ProbeReduceParams = call.params();
    let [x, y] = call.operands();
    let (n_rows, columns) = (params.n_rows as usize, 4 * params.row_quads as usize);
    let x = x.get::<f32>();
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_rows], 1, n_rows * columns, |row, y| {
        // Sixteen sums side by side, which the compiler makes vectors of.
        let mut sums = [0.0; 16];
        let (whole, rest) = x[row * columns..][..columns].as_chunks::<16>();
        whole.iter().for_each(|x| sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x));
        y[0] = sums.iter().sum::<f32>() + rest.iter().sum::<f32>();
    });
}

pub(crate) fn probe_fma(mut call: Call<'_>) {
    /// Elements that a thread takes at a time.
    const CHUNK: usize = 32;
    let params: ProbeFmaParams = call.params();
    let [y] = call.operands();
    let y = &mut y.get_mut::<f32>()[..params.n_out as usize];
    let ops = y.len() * (PROBE_NUMBERS * params.rounds) as usize;
    threads::for_each_chunk(y, CHUNK, ops, |i, y| simd::run_wide(Fma { params, first: i * CHUNK, y }));
}

/// The elements of `y` from number `first` on.
struct Fma<'a> {
    params: ProbeFmaParams,
    first: usize,
    y: &'a mut [f32],
}

impl WideWork for Fma<'_> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        // As many chains as there are registers for them, beside factor and step.
        match L::SUMS * LEN / PROBE_NUMBERS as usize {
            ..2 => self.chains::<LEN, L, 4>(),
            2..4 => self.chains::<LEN, L, 8>(),
            4.. => self.chains::<LEN, L, 12>(),
        }
    }
}

impl Fma<'_> {
    /// `N` vectors at a time, each the numbers of an element's next lanes.
    #[inline(always)]
    fn chains<const LEN: usize, L: Lanes<LEN>, const N: usize>(self) {
        let Fma { params, first, y } = self;
        let (factor, step) = (L::splat(params.factor), L::splat(params.step));
        let per_element = PROBE_NUMBERS as usize / LEN;
        y.fill(0.0);
        let n_vectors = y.len() * per_element;
        for vector in (0..n_vectors).step_by(N) {
            let mut numbers: [L; N] = std::array::from_fn(|j| {
                let (element, part) = ((vector + j) / per_element, (vector + j) % per_element);
                let begin = ((first + element) % 32 + part * LEN) as f32;
                L::load(&std::array::from_fn(|lane| begin + lane as f32))
            });
            for _ in 0..params.rounds {
                for a in &mut numbers {
                    *a = a.fma(factor, step);
                }
            }
            for (j, a) in numbers.into_iter().enumerate().take(n_vectors - vector) {
                let mut lanes = [0.0; LEN];
                a.store(&mut lanes);
                y[(vector + j) / per_element] += lanes.iter().sum::<f32>();
            }
        }
    }
}

pub(crate) fn probe_matrix(mut call: Call<'_>) {
    let params: ProbeMatrixParams = call.params();
    let [x, y] = call.operands();
    let x = x.get::<f32>();
    // The CPU's matrices are those of the baseline.
    const SIZE: usize = 8;
    let (rows, columns) = x[..6 * SIZE * SIZE].split_at(2 * SIZE * SIZE);
    let n = SIZE * SIZE;
    let y = &mut y.get_mut::<f32>()[..4 * params.n_groups as usize * 8 * n];
    let ops = y.len() * SIZE * params.rounds as usize;
    threads::for_each_chunk(y, 8 * n, ops, |_, y| {
        for (at, y) in y.iter_mut().enumerate() {
            let (i, j, row, column) = (at / n / 4, at / n % 4, at % n / SIZE, at % SIZE);
            let (a, b) = (&rows[i * n + row * SIZE..][..SIZE], &columns[j * n + column..]);
            *y = 0.0;
            for _ in 0..params.rounds {
                a.iter().zip(b.iter().step_by(SIZE)).for_each(|(a, b)| *y += a * b);
            }
        }
    });
}
