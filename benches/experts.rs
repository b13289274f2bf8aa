//! Experts in prefill: one product per token and expert against tiles of tokens per expert, in turns.
//!
//!     cargo bench --bench experts
//!
//! Prints a line per device and size: medians from submission to completion, and their ratio. The CPU's kernels group
//! the tokens of an expert anyway; there the alternative is one pass per token.

use std::time::Instant;

use tilewright::kernels::{ExpertDown, ExpertGateUp, ExpertProduct, ExpertRows, ExpertTiles, Gate, expert_sum, gated};
use tilewright::{DType, Device, Error, Matrix, Recording, Role, Tensor, Tier, WeightType, Workspace};

/// Rounds; the first one compiles and is not counted.
const ROUNDS: usize = 5;

/// T, E, K, C, F: from few to many rows per expert.
const SIZES: [[u32; 5]; 5] = [
    [8, 32, 4, 512, 256],
    [32, 32, 4, 512, 256],
    [64, 32, 4, 512, 256],
    [128, 32, 4, 512, 256],
    [128, 8, 2, 512, 1024],
];

/// Tensors of a prompt's experts.
struct Case {
    sizes: [u32; 5],
    up: Matrix,
    down: Matrix,
    x: Vec<f32>,
    routes: Vec<u32>,
}

fn main() -> Result<(), Error> {
    let mut devices = vec![("cpu", Device::cpu())];
    for tier in [Tier::Scalar, Tier::Subgroups, Tier::Baseline] {
        match pollster::block_on(Device::open(&tilewright::DeviceChoice::Gpu, Some(tier))) {
            Ok(device) => devices.push((tier.name(), device)),
            Err(error) => println!("skipped: tier {}: {error}", tier.name()),
        }
    }
    for (name, device) in &devices {
        for sizes in SIZES {
            let case = Case::new(device, sizes)?;
            let one = Tensor::declare("y", Role::Activations, &[1], DType::F32)?;
            device.allocate(&one)?;
            let ways = match device.is_gpu() {
                true => [case.by_slot(device, sizes[0])?, case.by_tiles(device)?],
                false => [case.by_slot(device, 1)?, case.by_slot(device, sizes[0])?],
            };
            let [apart, together] = times(device, &ways, &one)?;
            let ratio = apart / together;
            println!("{name:<10} {sizes:?} {:9.2} ms, together {:9.2} ms: {ratio:.2}", 1e3 * apart, 1e3 * together);
        }
    }
    Ok(())
}

/// Medians of two recordings run in turns.
fn times(device: &Device, ways: &[Recording; 2], one: &Tensor) -> Result<[f64; 2], Error> {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (way, times) in ways.iter().zip(&mut times) {
            let start = Instant::now();
            pollster::block_on(device.run_and_read(way, one)?)?;
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    Ok(times.map(|mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }))
}

/// Seeded pseudorandom numbers.
fn numbers(n: u32) -> impl Iterator<Item = u32> {
    (0..n).scan(7u32, |state, _| {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(*state >> 8)
    })
}

fn matrix(device: &Device, rows: u32, cols: u32) -> Result<Matrix, Error> {
    // Blocks: an f16 scale of 2^-7 and 32 quants.
    let blocks = (0..rows * cols / 32).flat_map(|_| [0x00, 0x20]).collect::<Vec<u8>>();
    let quants = numbers(rows * cols).map(|word| word as u8).collect::<Vec<u8>>();
    let bytes: Vec<u8> =
        blocks.chunks_exact(2).zip(quants.chunks_exact(32)).flat_map(|(s, q)| [s, q].concat()).collect();
    let matrix = Matrix::declare(&device.target(), "w", WeightType::Q8_0, rows, cols)?;
    matrix.upload(device, &[&bytes])?;
    Ok(matrix)
}

impl Case {
    fn new(device: &Device, sizes: [u32; 5]) -> Result<Case, Error> {
        let [t, e, k, c, f] = sizes;
        let routes = numbers(t).flat_map(|first| (0..k).flat_map(move |s| [(first + 5 * s) % e, 0.5f32.to_bits()]));
        Ok(Case {
            sizes,
            up: matrix(device, 2 * e * f, c)?,
            down: matrix(device, e * c, f)?,
            x: numbers(t * c).map(|word| word as f32 / (1 << 23) as f32 - 1.0).collect(),
            routes: routes.collect(),
        })
    }

    /// Uploads tokens `first..first + n` and their experts; declares the output.
    fn operands(&self, device: &Device, first: u32, n: u32) -> Result<[Tensor; 3], Error> {
        let [_, _, k, c, _] = self.sizes;
        let part = |len: u32| (first * len) as usize..((first + n) * len) as usize;
        let y = Tensor::declare("y", Role::Activations, &[n, c], DType::F32)?;
        device.allocate(&y)?;
        let x = device.upload("x", &[n, c], &self.x[part(c)])?;
        Ok([x, device.upload("routes", &[n, k, 2], &self.routes[part(2 * k)])?, y])
    }

    /// One product per slot, `n` tokens at a time.
    fn by_slot(&self, device: &Device, n: u32) -> Result<Recording, Error> {
        let [t, _, k, _, f] = self.sizes;
        let mut rec = device.recorder();
        for first in (0..t).step_by(n as usize) {
            let [x, routes, y] = self.operands(device, first, n)?;
            let activated = rec.temporary("activated", &[n * k, f])?;
            let (rows, gate) = (ExpertRows::Both, Gate::Silu);
            let up = ExpertGateUp { w: &self.up, rows, first_expert: 0, bias: None, norm: None, gate };
            up.record(&mut rec, &x, &routes, &activated)?;
            let down = ExpertDown { w: &self.down, first_expert: 0, bias: None, accumulate: false };
            down.record(&mut rec, &activated, &routes, &y)?;
        }
        Ok(rec.finish(&mut Workspace::default()))
    }

    fn by_tiles(&self, device: &Device) -> Result<Recording, Error> {
        let [t, e, k, c, f] = self.sizes;
        let [x, routes, y] = self.operands(device, 0, t)?;
        let mut rec = device.recorder();
        let tiles = ExpertTiles::record(&mut rec, &routes, e)?;
        let up = rec.temporary("up", &[t * k, 2 * f])?;
        let (activated, each) = (rec.temporary("activated", &[t * k, f])?, rec.temporary("each", &[t * k, c])?);
        let product = |w, rows| ExpertProduct { w, rows, first_expert: 0, bias: None, y_start: 0 };
        product(&self.up, 2 * f).record(&mut rec, &tiles, &x, &up)?;
        gated(&mut rec, Gate::Silu, &up, &activated)?;
        product(&self.down, c).record(&mut rec, &tiles, &activated, &each)?;
        expert_sum(&mut rec, &each, &routes, false, &y)?;
        Ok(rec.finish(&mut Workspace::default()))
    }
}
