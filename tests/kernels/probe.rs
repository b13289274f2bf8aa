//! The probes: words in every order, sums and products of small integers, all exact to the bit.

use tilewright::kernels::microbench::{self, FmaRounds, ReadOrder};

use tilewright::Tier;

use crate::common::{self, shared};
use crate::harness::{Case, Job, Operand, execute};
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
    let mut case = |kernel, variant: &str, sizes: String, build: Build| {
        cases.push(Case { kernel, variant: variant.into(), sizes, inputs: Inputs::Normal, build });
    };
    for n in [4, 252, 1024, 1028, 262_148] {
        case("probe_copy", "U32", format!("n={n}"), Box::new(move |source| probe_copy(source, n)));
    }
    for [rows, columns] in [[1, 4], [3, 60], [1, 1020], [5, 1024], [2, 1028], [300, 16], [7, 16_384]] {
        let sizes = format!("r={rows},c={columns}");
        case("probe_reduce", "F32", sizes, Box::new(move |source| probe_reduce(source, rows, columns)));
    }
    for n in [1, 31, 255, 257, 1021] {
        for (rounds, factor, step) in
            [(0, 1.0, 1.0), (4, 0.5, 0.0), (4, 1.0, 3.0), (8, -1.0, 2.0), (132, 1.0, 1.0), (1024, 1.0, 1.0)]
        {
            let what = FmaRounds { rounds, factor, step };
            let sizes = format!("n={n},rounds={rounds},factor={factor},step={step}");
            case("probe_fma", "F32", sizes, Box::new(move |_| probe_fma(n, what)));
        }
    }
}

type Build = Box<dyn Fn(&mut Source) -> Job>;

/// Integers from -8 to 8, with exact sums and products in every type.
fn whole(source: &mut Source, n: u32) -> Vec<f32> {
    (0..n).map(|_| source.rng.below(17) as f32 - 8.0).collect()
}

fn probe_copy(source: &mut Source, n: u32) -> Job {
    let x: Vec<u32> = source.rows(1, n).into_iter().map(f32::to_bits).collect();
    let operands = vec![Operand::words("x", &[n], x.clone()), Operand::exact_words("y", &[n], x)];
    Job::new(operands, |rec, bound| microbench::probe_copy(rec, bound.tensor(0), bound.tensor(1)))
}

fn probe_reduce(source: &mut Source, rows: u32, columns: u32) -> Job {
    let x = whole(source, rows * columns);
    let sums: Vec<f32> =
        x.chunks_exact(columns as usize).map(|row| row.iter().map(|&x| f64::from(x)).sum::<f64>() as f32).collect();
    let operands = vec![Operand::floats("x", &[rows, columns], x), Operand::exact_floats("y", &[rows], &sums)];
    Job::new(operands, |rec, bound| microbench::probe_reduce(rec, bound.tensor(0), bound.tensor(1)))
}

/// By the closed form: `a f^r + s (1 + f + .. + f^(r - 1))`.
fn probe_fma(n: u32, what: FmaRounds) -> Job {
    let FmaRounds { rounds, factor, step } = what;
    let (f, s) = (f64::from(factor), f64::from(step));
    let power = f.powi(rounds as i32);
    let series = if f == 1.0 { f64::from(rounds) } else { (1.0 - power) / (1.0 - f) };
    let sum = |i: u32| (0..32).map(|n| f64::from(i % 32 + n) * power + s * series).sum::<f64>() as f32;
    let want: Vec<f32> = (0..n).map(sum).collect();
    let operands = vec![Operand::exact_floats("y", &[n], &want)];
    Job::new(operands, move |rec, bound| microbench::probe_fma(rec, what, bound.tensor(0)))
}

/// Not a conformance case: the device determines the matrices' size.
#[test]
fn probe_matrix_matches_oracle() {
    let mut devices = vec![common::cpu()];
    devices.extend(shared::gpus(Tier::ALL));
    for device in devices {
        let size = microbench::probe_matrix_size(&device.target());
        for (n, rounds) in [(4, 1), (12, 0), (20, 7), (8, 64)] {
            let job = probe_matrix(&mut Source::new(Inputs::Normal, u64::from(n), false), size, n, rounds);
            let outcome = common::block_on(execute(&device, &job, 1));
            assert!(outcome.is_ok(), "{}, {n} subgroups, {rounds} rounds: {outcome:?}", device.info().tier);
        }
    }
}

fn probe_matrix(source: &mut Source, size: u32, n: u32, rounds: u32) -> Job {
    let x = whole(source, 6 * size * size);
    let at = |matrix: u32, row: u32, column: u32| f64::from(x[((matrix * size + row) * size + column) as usize]);
    let mut product = Vec::new();
    for (a, b) in (0..2).flat_map(|a| (2..6).map(move |b| (a, b))) {
        for (row, column) in (0..size).flat_map(|row| (0..size).map(move |column| (row, column))) {
            let sum: f64 = (0..size).map(|k| at(a, row, k) * at(b, k, column)).sum();
            product.push((f64::from(rounds) * sum) as f32);
        }
    }
    let want = product.repeat(n as usize);
    let operands =
        vec![Operand::floats("x", &[6, size, size], x), Operand::exact_floats("y", &[n, 2, 4, size, size], &want)];
    Job::new(operands, move |rec, bound| microbench::probe_matrix(rec, bound.tensor(0), bound.tensor(1), rounds))
}

/// Word indices in reading order.
fn places(len: u64, order: ReadOrder) -> Vec<u64> {
    match order {
        // Every `stride`-th word from the first, then from the second, ..
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
    Job::new(operands, move |rec, bound| microbench::probe_read(rec, bound.tensor(0), bound.tensor(1), order))
}
