//! `embed` and `last_row`, gathers, and `embed_sum`: exact to the bit.

use tilewright::WeightType;
use tilewright::kernels::{self, Embedding};
#[cfg(not(target_arch = "wasm32"))]
use tilewright::{Tier, formats::Safetensors, kernels::Linear};

use crate::harness::{Case, Job, Operand};
use crate::inputs::{Inputs, Source, dequantise};
#[cfg(not(target_arch = "wasm32"))]
use crate::{
    common::{self, Expected, shared},
    harness::{Want, execute},
};

/// T, V, C, pos.
const EMBED: [[u32; 4]; 12] = [
    [1, 1, 1, 0],
    [2, 3, 31, 1],
    [3, 2, 32, 0],
    [5, 31, 33, 2],
    [1, 32, 63, 0],
    [2, 33, 64, 7],
    [1, 65, 65, 0],
    [3, 129, 172, 4],
    [2, 255, 256, 0],
    [1, 257, 257, 3],
    [33, 100, 36, 0],
    [2, 512, 1000, 1],
];

/// T, C, tokens in the pass.
const LAST_ROW: [[u32; 3]; 9] =
    [[1, 1, 1], [2, 3, 1], [2, 31, 2], [3, 64, 2], [5, 255, 5], [5, 256, 3], [4, 257, 4], [65, 1000, 64], [3, 4097, 2]];

/// T, V, C, S, N.
const EMBED_SUM: [[u32; 5]; 7] = [
    [1, 1, 1, 1, 1],
    [2, 3, 31, 2, 1],
    [5, 33, 64, 0, 2],
    [3, 7, 257, 5, 0],
    [4, 65, 36, 0, 0],
    [33, 129, 96, 65, 2],
    [2, 300, 1000, 3, 3],
];

pub fn cases(cases: &mut Vec<Case>) {
    for weight in WeightType::ALL {
        for sizes in EMBED_SUM {
            let [t, v, c, s, n] = sizes;
            cases.push(Case {
                kernel: "embed_sum",
                variant: weight.name().into(),
                sizes: format!("t={t},v={v},c={c},s={s},n={n}"),
                inputs: Inputs::Normal,
                build: Box::new(move |source| embed_sum(source, weight, sizes)),
            });
        }
    }
    // Many adapters can bind this table only in slabs of rows.
    cases.push(Case {
        kernel: "embed_sum",
        variant: "F32".into(),
        sizes: "slabs".into(),
        inputs: Inputs::Normal,
        build: Box::new(|source| embed_sum(source, WeightType::F32, [8, 151_936, 256, 3, 2])),
    });
    let mut embed = |weight: WeightType, sizes: [u32; 4], inputs| {
        let [t, v, c, pos] = sizes;
        cases.push(Case {
            kernel: "embed",
            variant: weight.name().into(),
            sizes: format!("t={t},v={v},c={c},pos={pos}"),
            inputs,
            build: Box::new(move |source| embed(source, weight, sizes, inputs == Inputs::Uniform)),
        });
    };
    for weight in WeightType::ALL {
        // Weights are drawn independently of the family, so families only act as seeds here.
        for inputs in [Inputs::Normal, Inputs::Uniform, Inputs::Student, Inputs::Masked] {
            EMBED.into_iter().for_each(|sizes| embed(weight, sizes, inputs));
        }
        embed(weight, [4, 65_537, 4, 0], Inputs::Normal);
    }
    // Many adapters can bind this table only in slabs of rows.
    embed(WeightType::F32, [8, 151_936, 256, 1], Inputs::Normal);
    for inputs in Inputs::ALL {
        for sizes in LAST_ROW {
            let [t, c, n] = sizes;
            cases.push(Case {
                kernel: "last_row",
                variant: "F32".into(),
                sizes: format!("t={t},c={c},n={n}"),
                inputs,
                build: Box::new(move |source| last_row(source, sizes)),
            });
        }
    }
}

/// With `more`, rows are scaled by a power of two and a position table is added, whose last row serves all later
/// positions: exact to the bit.
fn embed(source: &mut Source, weight: WeightType, [t, v, c, pos]: [u32; 4], more: bool) -> Job {
    let (factor, n_positions) = if more { (0.5, (pos + t).saturating_sub(1).max(1)) } else { (1.0, 1) };
    let positions = source.normal(n_positions * c);
    let bytes = source.weights(weight, v, c);
    let row_bytes = bytes.len() / v as usize;
    let mut tokens: Vec<u32> = (0..pos + t).map(|_| source.rng.below(v as usize) as u32).collect();
    tokens[pos as usize] = v - 1;
    // The remaining rows are padding.
    let n_tokens = t - source.rng.below(t.div_ceil(2) as usize) as u32;
    if n_tokens > 1 {
        // An id outside the vocabulary gives zeros.
        tokens[(pos + n_tokens) as usize - 1] = if source.rng.below(2) == 0 { v } else { u32::MAX };
    }
    let mut want = Vec::with_capacity((t * c) as usize);
    for (i, &id) in (0..).zip(&tokens[pos as usize..]) {
        if id >= v || i >= n_tokens {
            want.extend(std::iter::repeat_n(0.0, c as usize));
        } else {
            let at = id as usize * row_bytes;
            let row = (pos + i).min(n_positions - 1) as usize * c as usize;
            let added = positions[row..].iter().map(|&v| if more { v } else { 0.0 });
            let values = dequantise(weight, &bytes[at..at + row_bytes], c);
            want.extend(values.iter().zip(added).map(|(&v, added)| factor * v as f32 + added));
        }
    }
    let n_ids = if source.rng.below(2) == 0 { n_tokens } else { t };
    tokens.truncate((pos + n_ids) as usize);
    let operands = vec![
        Operand::state(pos, n_tokens),
        // Ids of padding rows may be missing.
        Operand::words("tokens", &[pos + n_ids], tokens),
        Operand::weights(weight, &[v, c], bytes),
        Operand::floats("positions", &[n_positions, c], positions),
        Operand::exact_floats("y", &[t, c], &want),
    ];
    Job::new(operands, move |rec, bound| {
        let positions = more.then_some(bound.tensor(3));
        let embedding = Embedding { w: bound.matrix(2), factor, positions };
        kernels::embed(rec, bound.state(0), bound.tensor(1), &embedding, bound.tensor(4))
    })
}

/// Sums of two and three numbers are exact to the bit in order.
fn embed_sum(source: &mut Source, weight: WeightType, [t, v, c, s, n]: [u32; 5]) -> Job {
    let bytes = source.weights(weight, v, c);
    let row_bytes = bytes.len() / v as usize;
    let (positions, types) = (source.normal(s.max(1) * c), source.normal(n.max(1) * c));
    let mut number = |i: u32, rows: u32| match i {
        // The last row of a table, and indices past it.
        0 => rows.max(1) - 1,
        1 => [rows, u32::MAX][source.rng.below(2)],
        _ => source.rng.below(rows.max(1) as usize) as u32,
    };
    let tokens: Vec<u32> = (0..t).flat_map(|i| [number(i, v), number(i, s), number(i, n)]).collect();
    let mut want = Vec::with_capacity((t * c) as usize);
    for token in tokens.chunks_exact(3) {
        let at = token[0].min(v - 1) as usize * row_bytes;
        let row = dequantise(weight, &bytes[at..at + row_bytes], c);
        let of = |table: &[f32], rows: u32, number: u32, col: usize| match rows {
            0 => 0.0,
            _ => table[(number.min(rows - 1) * c) as usize + col],
        };
        let sum = |(col, &w): (usize, &f64)| w as f32 + of(&positions, s, token[1], col) + of(&types, n, token[2], col);
        want.extend(row.iter().enumerate().map(sum));
    }
    let operands = vec![
        Operand::words("tokens", &[t, 3], tokens),
        Operand::weights(weight, &[v, c], bytes),
        Operand::floats("positions", &[s.max(1), c], positions),
        Operand::floats("types", &[n.max(1), c], types),
        Operand::exact_floats("y", &[t, c], &want),
    ];
    Job::new(operands, move |rec, bound| {
        let (positions, types) = ((s > 0).then_some(bound.tensor(2)), (n > 0).then_some(bound.tensor(3)));
        kernels::embed_sum(rec, bound.tensor(0), bound.matrix(1), positions, types, bound.tensor(4))
    })
}

fn last_row(source: &mut Source, [t, c, n]: [u32; 3]) -> Job {
    let x = source.rows(t, c);
    let start = ((n - 1) * c) as usize;
    let y = Operand::exact_floats("y", &[1, c], &x[start..start + c as usize]);
    let operands = vec![Operand::state(5, n), Operand::floats("x", &[t, c], x), y];
    Job::new(operands, |rec, bound| kernels::last_row(rec, bound.state(0), bound.tensor(1), bound.tensor(2)))
}

/// Random blocks, packed and decoded by a kernel, have ggml's values.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn embed_kernel_reads_blocks_with_the_values_of_ggml() {
    let Some(data) = common::data(&["quant-vectors"]) else { return };
    for file in ["vectors.safetensors", "more.safetensors"] {
        let bytes = std::fs::read(data.join("quant-vectors").join(file)).expect("the file exists");
        let vectors = Safetensors::parse(&bytes, bytes.len() as u64).expect("the file is valid");
        let tensor = |name: String| Some(vectors.tensor(&name)?.bytes(&bytes).expect("a complete file"));
        for device in shared::gpus_beside_cpu([Tier::Baseline, Tier::Subgroups]).into_iter().chain([common::cpu()]) {
            let (mut n_types, mut worst) = (0, 0.0f64);
            for weight in WeightType::ALL {
                let blocks = tensor(format!("{weight}.blocks")).zip(tensor(format!("{weight}.values")));
                let Some((blocks, values)) = blocks else { continue };
                let values: Vec<f32> = values.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
                let n = values.len() as u32;
                let x: Vec<f32> = (0..n).map(|i| (i * 37 % 64) as f32 / 64.0 - 0.5).collect();
                let product: f64 = values.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                let power: f64 = values.iter().zip(&x).map(|(&w, &x)| (f64::from(w) * f64::from(x)).powi(2)).sum();
                let want = Expected { value: product, bound: f64::MAX, floor: 0.0, power: power.max(product.powi(2)) };
                let check = move |found: &[u32]| match found.iter().zip(&values).position(|(&found, want)| {
                    // A GPU may flush subnormals: a weight, or a scale, whose largest multiple is 12 in MXFP4.
                    let is_tiny = want.abs() < 12.0 * f32::MIN_POSITIVE;
                    let is_flushed = is_tiny && f32::from_bits(found) == 0.0;
                    f32::from_bits(found) != *want && !is_flushed
                }) {
                    Some(at) => Err(format!("weight {at} is {:e}, not {:e}", f32::from_bits(found[at]), values[at])),
                    None => Ok(()),
                };
                let operands = vec![
                    Operand::state(0, 1),
                    Operand::words("tokens", &[1], vec![0]),
                    Operand::weights(weight, &[1, n], blocks.to_vec()),
                    Operand::exact_floats("y", &[1, n], &[]).becomes(Want::Check(Box::new(check))),
                    Operand::floats("x", &[1, n], x),
                    Operand::close("product", &[1, 1], vec![want], 1e-10),
                ];
                let job = Job::new(operands, |rec, bound| {
                    let embedding = Embedding { w: bound.matrix(2), factor: 1.0, positions: None };
                    kernels::embed(rec, bound.state(0), bound.tensor(1), &embedding, bound.tensor(3))?;
                    kernels::matvec(rec, &Linear::new(bound.matrix(2)), bound.tensor(4), bound.tensor(5))
                });
                match common::block_on(execute(&device, &job, 1)) {
                    Ok(nmse) => worst = worst.max(nmse),
                    Err(reason) => panic!("{file}, {weight} on {}: {reason}", device.tier().name()),
                }
                n_types += 1;
            }
            println!("{file} on {}: {n_types} types, worst NMSE {worst:.1e}", device.info().name);
        }
    }
}
