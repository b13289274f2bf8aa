//! A mixture of logits in one pass, against the same in separate kernels and against a scan of dot products that reads as
//! many bytes of each item: `cargo bench --bench mol -- [cpu | adapter's name]`.
//!
//! The chain of separate kernels is what others would run: logits, transposition, two layers, softmax. It is short of three
//! elementwise steps that no kernel of its own exists for (A * B + C, z * sigmoid(z), the weighted sum), and its activation is
//! GELU by the tanh form, which costs what SiLU does: the whole chain would take longer.

use std::time::Instant;

use tilewright::kernels::{
    self, Combination, Gelu, Linear, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands, MolScores, Pairing,
};
use tilewright::{
    DType, Device, DeviceChoice, Error, Matrix, Recorder, Recording, Role, Tensor, WeightType, Workspace,
};

const QUERIES: u32 = 32;
const ITEMS: u32 = 2048;
const ROUNDS: usize = 7;

fn numbers(n: u32) -> Vec<f32> {
    (0..n).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn halves(device: &Device, rows: u32, cols: u32) -> Result<Matrix, Error> {
    let matrix = Matrix::declare(device, "items", WeightType::F16, rows, cols)?;
    let bytes: Vec<u8> = numbers(rows * cols).iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
    matrix.upload(device, &[&bytes])?;
    Ok(matrix)
}

fn blank(rows: u32, cols: u32) -> Result<Tensor, Error> {
    Tensor::declare("y", Role::Activations, &[rows, cols], DType::F32)
}

/// Recordings to be timed, with their names and operations.
struct Run(&'static str, Recording, f64);

fn runs(device: &Device, form: MolForm, dim: u32) -> Result<Vec<Run>, Error> {
    let MolForm { query_components: n, item_components: m, hidden, .. } = form;
    let (pairs, columns, scored) = (form.n_pairs(), form.gate_columns(), f64::from(QUERIES * ITEMS));
    let (w1, w2) = (numbers(hidden * pairs), numbers(pairs * hidden));
    let (b1, b2) = (numbers(hidden), numbers(pairs));
    let weights = MolGateWeights { w1: &w1, b1: &b1, w2: &w2, b2: &b2 };
    let gate = MolGate::new(device, form, &weights)?;
    let items = halves(device, m * ITEMS, dim)?;
    let upload = |rows: u32, cols: u32| device.upload("x", &[rows, cols], &numbers(rows * cols));
    let queries = upload(QUERIES, n * dim)?;
    let (item_gates, query_gates) = (upload(ITEMS, columns)?, upload(QUERIES, columns)?);
    let operands = MolOperands { items: &items, item_gates: &item_gates, queries: &queries, query_gates: &query_gates };

    let mut fused = Recorder::new(device);
    kernels::mol(&mut fused, &gate, &operands, MolScores::All, &blank(QUERIES, ITEMS)?)?;

    let mut chain = Recorder::new(device);
    let logits = blank(QUERIES * n, m * ITEMS)?;
    Linear::new(&items).record(&mut chain, &queries.reshape(&[QUERIES * n, dim])?, &logits)?;
    let by_item = Tensor::declare("by_item", Role::Activations, &[ITEMS, QUERIES * pairs, 1], DType::F32)?;
    kernels::by_head(&mut chain, &logits.reshape(&[QUERIES * pairs, ITEMS])?, &by_item)?;
    let rows = ITEMS * QUERIES;
    let (first, second) =
        (Matrix::from_f32(device, "w1", hidden, pairs, &w1)?, Matrix::from_f32(device, "w2", pairs, hidden, &w2)?);
    let (b1, b2) = (device.upload("b1", &[hidden], &b1)?, device.upload("b2", &[pairs], &b2)?);
    let (before, after, c, pi) = (blank(rows, hidden)?, blank(rows, hidden)?, blank(rows, pairs)?, blank(rows, pairs)?);
    let biased = |w, bias| Linear { bias: Some(bias), ..Linear::new(w) };
    biased(&first, &b1).record(&mut chain, &by_item.reshape(&[rows, pairs])?, &before)?;
    kernels::gelu(&mut chain, &before, &after, Gelu::Tanh)?;
    biased(&second, &b2).record(&mut chain, &after, &c)?;
    kernels::softmax(&mut chain, &c, &pi)?;

    // As many bytes: components in F16 and gates in F32.
    let width = m * dim + 2 * columns;
    let mut scan = Recorder::new(device);
    Linear::new(&halves(device, ITEMS, width)?).record(&mut scan, &upload(QUERIES, width)?, &blank(QUERIES, ITEMS)?)?;

    let finish = |rec: Recorder| rec.finish(&mut Workspace::default());
    let operations = form.operations(dim) as f64 * scored;
    Ok(vec![
        Run("fused", finish(fused), operations),
        Run("chain", finish(chain), operations),
        Run("dot scan", finish(scan), 2.0 * f64::from(width) * scored),
    ])
}

fn main() {
    // Cargo hands `--bench` to it.
    let name = std::env::args().skip(1).find(|argument| !argument.starts_with("--")).unwrap_or("gpu".into());
    let choice: DeviceChoice = name.parse().unwrap_or_default();
    let device = pollster::block_on(Device::open(&choice, None)).expect("the device is there");
    println!("{} {}, tier {}", device.info().name, device.info().driver, device.info().tier);
    println!("{QUERIES} queries, {ITEMS} items in F16, gates in F32; medians of {ROUNDS} rounds");
    for [n, m, dim] in [[8, 4, 64], [8, 4, 128], [8, 8, 32]] {
        let form = MolForm {
            query_components: n,
            item_components: m,
            hidden: 128,
            pairing: Pairing::Cross,
            combination: Combination::GluSilu,
            activation: MolActivation::Silu,
        };
        let runs = runs(&device, form, dim).expect("the operands fit");
        let time = |run: &Run| {
            let start = Instant::now();
            device.run(&run.1).expect("the device runs it");
            pollster::block_on(device.drained()).expect("the device is there");
            start.elapsed().as_secs_f64()
        };
        runs.iter().for_each(|run| _ = time(run));
        // In turns, so that what else the machine does meets all.
        let rounds: Vec<Vec<f64>> = (0..ROUNDS).map(|_| runs.iter().map(time).collect()).collect();
        let median = |i: usize| {
            let mut times: Vec<f64> = rounds.iter().map(|round| round[i]).collect();
            times.sort_by(f64::total_cmp);
            times[ROUNDS / 2]
        };
        println!("{n} x {m} x {dim}");
        for (i, Run(name, _, operations)) in runs.iter().enumerate() {
            let (ms, rate) = (median(i) * 1e3, operations / median(i) / 1e9);
            println!("  {name:8} {ms:9.2} ms  {rate:6.1} GFLOP/s  {:6.2} x fused", median(i) / median(0));
        }
        println!(
            "  fused is {:.2} x the dot scan, with {:.0} x its operations",
            median(0) / median(2),
            runs[0].2 / runs[2].2
        );
    }
}
