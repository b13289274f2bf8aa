//! `probe_read`: words in every order, exact to the bit.

use tilewright::bench::yardsticks::{self, ReadOrder};

use crate::harness::{Case, Job, Operand};
use crate::inputs::{Inputs, Source};

/// N: around the workgroup of 256, and beyond a chunk of the CPU.
const SIZES: [u32; 7] = [1, 2, 128, 256, 512, 8192, 65_536];
const STRIDES: [u32; 4] = [1, 2, 16, 256];
const READS: u32 = 16;

pub fn cases(cases: &mut Vec<Case>) {
    for n in SIZES {
        let strides = STRIDES.into_iter().filter(|&stride| stride <= READS * n).map(ReadOrder::Strided);
        for order in strides.chain([ReadOrder::Scattered]) {
            cases.push(Case {
                kernel: "probe_read",
                variant: "U32".into(),
                sizes: format!("n={n},order={order:?}"),
                inputs: Inputs::Normal,
                build: Box::new(move |source| probe_read(source, n, order)),
            });
        }
    }
}

/// Word numbers in the order in which they are read.
fn places(len: u64, order: ReadOrder) -> Vec<u64> {
    match order {
        // One word out of every `stride`, from the first on, from the second on, ..
        ReadOrder::Strided(stride) => {
            (0..u64::from(stride)).flat_map(|first| (first..len).step_by(stride as usize)).collect()
        }
        ReadOrder::Scattered => {
            let times = |h: u64, factor: u64| h * factor % (1 << 32);
            let hash = |n: u64| {
                let h = times(n, 0x9e37_79b1);
                let h = times(h ^ (h / (1 << 15)), 0x85eb_ca77);
                let h = times(h ^ (h / (1 << 13)), 0xc2b2_ae3d);
                (h ^ (h / (1 << 16))) % len
            };
            (0..len).map(hash).collect()
        }
    }
}

fn probe_read(source: &mut Source, n: u32, order: ReadOrder) -> Job {
    let len = READS * n;
    let x: Vec<u32> = source.rows(1, len).into_iter().map(f32::to_bits).collect();
    let mut y = vec![0; n as usize];
    for (i, at) in places(u64::from(len), order).into_iter().enumerate() {
        y[i % n as usize] ^= x[at as usize];
    }
    let operands = vec![Operand::words("x", &[len], x), Operand::exact_words("y", &[n], y)];
    Job::new(operands, move |rec, bound| yardsticks::probe_read(rec, bound.tensor(0), bound.tensor(1), order))
}
