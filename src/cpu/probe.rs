//! `probe_read`: memory in a chosen order.

use super::{Call, threads};
use crate::bench::yardsticks::{PROBE_READS, ProbeReadParams};

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
