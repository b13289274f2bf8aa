//! Predicts the time of a pass on a GPU that is not present, from its recording and the manufacturer's figures.
//! Predictions are not measurements; they show what bounds each kernel, and which changes would pay off.
//!
//! A dispatch takes as long as the slowest of its resources, plus costs that none of them hides:
//!
//! - bytes from memory: each operand once, of a cache the filled part, of a table the rows read;
//! - lane instructions, from RADV's ISA for RDNA 3 (`benches/record/isa/navi31.md`), assumed similar elsewhere;
//! - operations of matrix units at the manufacturer's rate, if the variant uses them; they occupy the lanes if
//!   [`MatrixUnits::on_lanes`] is set;
//! - bytes of workgroup memory;
//! - the critical path of a dispatch that is a chain of barriers and dependent loads;
//! - the time between dispatches, 1.8 us, and the tail of workgroups on the last cores.

use crate::dtype::{BLOCK, WeightType};
use crate::recording::{Dispatch, Recording};
use crate::shaders::params::{AttentionParams, GateUpParams, LinearParams};
use crate::shaders::{Id, read_params};

mod machines;
mod sampling;

pub use machines::{MACHINES, Machine, MatrixUnits};

/// Maximum share of peak memory bandwidth that a reading kernel reaches, as copies on these GPUs do.
const MEMORY_SHARE: f64 = 0.92;
/// Seconds from the end of a dispatch until the next one runs at full rate: a barrier of 0.9 us (a chain of tiny
/// dispatches on a W7900 by Vulkan, ROCm issue 10834) and the first loads.
const START: f64 = 1.8e-6;
/// Share of peak rate that units reach between barriers, with loads in flight.
const BUSY_SHARE: f64 = 0.85;
/// Latency of a memory load in seconds.
const LATENCY: f64 = 0.6e-6;

/// Bottleneck of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// Bytes from memory.
    Memory,
    /// Too few loads in flight to keep memory busy.
    Latency,
    /// Lane instructions.
    Instructions,
    /// Operations of matrix units.
    Matrix,
    /// Bytes of workgroup memory.
    SharedMemory,
    /// The time until the dispatch starts.
    Start,
}

impl BoundBy {
    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            BoundBy::Memory => "memory",
            BoundBy::Latency => "latency",
            BoundBy::Instructions => "instructions",
            BoundBy::Matrix => "matrix units",
            BoundBy::SharedMemory => "workgroup memory",
            BoundBy::Start => "its start",
        }
    }
}

/// A dispatch's work and predicted time.
#[derive(Clone, Debug, serde::Serialize)]
pub struct PredictedDispatch {
    /// Label of the shader variant.
    pub label: &'static str,
    /// Bytes from and to memory.
    pub bytes: f64,
    /// Multiplications and additions.
    pub operations: f64,
    /// Lane instructions.
    pub instructions: f64,
    /// Seconds, including the start.
    pub seconds: f64,
    /// The bottleneck.
    pub bound_by: BoundBy,
}

/// Prediction of a pass.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Prediction {
    /// Dispatches in order.
    pub dispatches: Vec<PredictedDispatch>,
    /// Total seconds.
    pub seconds: f64,
    /// Memory bandwidth used, relative to the peak.
    pub memory_share: f64,
    /// Rate of operations, relative to the peak of the matrix units, or of the lanes if no matrix units are used.
    pub compute_share: f64,
}

impl Machine {
    /// Predicts a pass with `filled` cached positions before it.
    pub fn predict(&self, recording: &Recording, filled: u32) -> Prediction {
        let dispatches: Vec<PredictedDispatch> = recording
            .dispatches()
            .map(|dispatch| self.dispatch(&DispatchWork::of(&dispatch, filled), &dispatch))
            .collect();
        let sum = |of: fn(&PredictedDispatch) -> f64| dispatches.iter().map(of).sum::<f64>();
        let (seconds, bytes, operations) = (sum(|d| d.seconds), sum(|d| d.bytes), sum(|d| d.operations));
        let has_matrices = dispatches.iter().any(|dispatch| dispatch.label.contains(".matrix"));
        let peak = match self.matrix {
            Some(units) if has_matrices => units.rate,
            _ => 2.0 * self.lane_rate(),
        };
        Prediction {
            memory_share: bytes / seconds / self.memory_rate,
            compute_share: operations / seconds / peak,
            seconds,
            dispatches,
        }
    }

    fn dispatch(&self, work: &DispatchWork, dispatch: &Dispatch<'_>) -> PredictedDispatch {
        let groups: f64 = dispatch.grid().iter().map(|&n| f64::from(n)).product();
        let cores = f64::from(self.n_cores);
        let slots = cores * work.groups_per_core;
        // The last round of workgroups leaves slots idle. With fewer workgroups than slots, two subgroups occupy
        // each unit of a core: four independent sums hide an addition's latency. With matrices, sixteen are
        // independent and the next staged data is prefetched, so one subgroup is enough.
        let subgroups = if work.on_matrices { 1.0 } else { 2.0 };
        let busy = match groups >= slots {
            true => groups / ((groups / slots).ceil() * slots),
            false => (groups * work.group_lanes / (cores * subgroups * f64::from(self.lanes))).min(1.0),
        };
        let lanes_rate = self.lane_rate() * busy * BUSY_SHARE;
        let in_flight = groups.min(slots) * work.bytes_in_flight;
        let reach = (in_flight / LATENCY).min(self.memory_rate * MEMORY_SHARE);
        let matrix = match self.matrix {
            Some(units) if work.on_matrices => work.operations / (units.rate * busy * BUSY_SHARE),
            _ => 0.0,
        };
        let instructions = work.instructions / lanes_rate;
        let on_lanes = self.matrix.is_some_and(|units| units.on_lanes);
        let parts = [
            (BoundBy::Memory, work.bytes / (self.memory_rate * MEMORY_SHARE)),
            (BoundBy::Latency, work.bytes / reach),
            (BoundBy::Latency, work.cycles / self.clock + work.trips * LATENCY),
            (BoundBy::Instructions, if on_lanes { instructions + matrix } else { instructions }),
            (BoundBy::Matrix, matrix),
            (BoundBy::SharedMemory, work.shared_bytes / (self.shared_memory_rate() * busy * BUSY_SHARE)),
            (BoundBy::Start, START),
        ];
        let mut longest = parts[0];
        for part in parts {
            // Among equals, the first.
            if part.1 > longest.1 {
                longest = part;
            }
        }
        let seconds = START + if longest.0 == BoundBy::Start { 0.0 } else { longest.1 };
        PredictedDispatch {
            label: dispatch.label(),
            bytes: work.bytes,
            operations: work.operations,
            instructions: work.instructions,
            seconds,
            bound_by: longest.0,
        }
    }
}

/// A dispatch's work, on any machine.
struct DispatchWork {
    bytes: f64,
    operations: f64,
    /// Whether matrix units do the operations.
    on_matrices: bool,
    /// Lane instructions, without matrix units' work.
    instructions: f64,
    shared_bytes: f64,
    /// Invocations per workgroup.
    group_lanes: f64,
    /// Workgroups that a core runs concurrently.
    groups_per_core: f64,
    /// Bytes of a workgroup's outstanding loads.
    bytes_in_flight: f64,
    /// Cycles of an invocation's critical path: barriers and dependent loads.
    cycles: f64,
    /// Dependent loads from memory.
    trips: f64,
}

impl DispatchWork {
    fn of(dispatch: &Dispatch<'_>, filled: u32) -> DispatchWork {
        let bytes = operand_bytes(dispatch, filled);
        // Row kernels: a few instructions per word read or written, workgroups of 64 to 256.
        let rows = DispatchWork {
            bytes,
            operations: bytes / 4.0,
            on_matrices: false,
            instructions: 4.0 * bytes / 4.0,
            shared_bytes: 0.0,
            group_lanes: 64.0,
            groups_per_core: 8.0,
            bytes_in_flight: 4096.0,
            cycles: 0.0,
            trips: 0.0,
        };
        match dispatch.kernel().id {
            Id::Matvec => vector_product(dispatch, rows, {
                let params: LinearParams = params(dispatch);
                [params.n_tokens, params.n_out, params.dim]
            }),
            Id::GateUp => vector_product(dispatch, rows, {
                let params: GateUpParams = params(dispatch);
                [params.n_tokens, 2 * params.ffn_dim, params.dim]
            }),
            Id::Matmul | Id::LinearNorm => {
                let params: LinearParams = params(dispatch);
                tiled_product(dispatch, rows, [params.n_tokens, params.n_out, params.dim])
            }
            Id::MatmulHalf => {
                let params: LinearParams = params(dispatch);
                half_product(dispatch, rows, [params.n_tokens, params.n_out, params.blocks * BLOCK as u32])
            }
            Id::AttentionDecode | Id::AttentionPrefill => attention(dispatch, rows, filled),
            Id::AttentionHalf => half_attention(dispatch, rows, filled),
            Id::Candidates => sampling::candidates(dispatch, rows),
            Id::Sample => sampling::sample(dispatch, rows),
            _ => rows,
        }
    }
}

/// A kernel's params.
fn params<P: bytemuck::Pod>(dispatch: &Dispatch<'_>) -> P {
    read_params(dispatch.params())
}

/// Bytes of all operands, each once; of caches and tables only the part read.
fn operand_bytes(dispatch: &Dispatch<'_>, filled: u32) -> f64 {
    let (kernel, operands) = (dispatch.kernel(), dispatch.operands());
    let is_lookup = [Id::Embed, Id::EmbedSum].contains(&kernel.id);
    let written = kernel.bindings.iter().zip(operands).rfind(|(binding, _)| binding.writes);
    let result = written.map_or(0.0, |(_, tensor)| tensor.size_bytes() as f64);
    let heads = kernel.bindings.iter().position(|binding| ["qkv", "x"].contains(&binding.name));
    let n_tokens = heads.map_or(1.0, |at| f64::from(operands[at].shape()[0]));
    let bytes = kernel.bindings.iter().zip(operands).enumerate().map(|(i, (binding, tensor))| {
        let size = tensor.size_bytes() as f64;
        match binding.name {
            // An unused operand is bound to another tensor.
            _ if operands[..i].iter().any(|other| other.is_same(tensor)) => 0.0,
            // One row per token, no longer than the resulting row.
            _ if is_lookup => size.min(result),
            "table" => size.min(n_tokens * size / f64::from(tensor.shape()[0])),
            _ if tensor.is_cache() => size * share_of_cache(dispatch, filled),
            "parts" if kernel.id == Id::AttentionMerge => size * share_of_parts(dispatch, filled),
            "y" if kernel.id == Id::AttentionDecode => size * share_of_parts(dispatch, filled),
            _ => size,
        }
    });
    bytes.sum()
}

/// Share of a layer's cache that a kernel reads or writes.
fn share_of_cache(dispatch: &Dispatch<'_>, filled: u32) -> f64 {
    match dispatch.kernel().id {
        Id::AttentionDecode | Id::AttentionHalf | Id::AttentionPrefill => {
            let params: AttentionParams = params(dispatch);
            f64::from(seen(&params, filled).min(params.slots)) / f64::from(params.slots.max(1))
        }
        // Writes one row per token.
        _ => 0.0,
    }
}

/// Share of the splits of a token's keys that have keys.
fn share_of_parts(dispatch: &Dispatch<'_>, filled: u32) -> f64 {
    let params: AttentionParams = params(dispatch);
    let n_keys = seen(&params, filled);
    let of_part = n_keys.div_ceil(params.splits.max(1)).next_multiple_of(params.step.max(1));
    f64::from(n_keys.div_ceil(of_part)) / f64::from(params.splits.max(1))
}

/// Positions that the last token of a pass sees.
fn seen(params: &AttentionParams, filled: u32) -> u32 {
    let all = filled + params.n_tokens;
    if params.window > 0 { all.min(params.window + params.n_tokens) } else { all }
}

/// Instructions per weight of `matvec` and similar kernels in RDNA 3's ISA (`benches/record/isa/navi31.md`, "per
/// product"), and per weight that a tile unpacks.
fn unpacking(weight: WeightType) -> [f64; 2] {
    match weight.layout() {
        WeightType::F32 => [1.5, 3.0],
        WeightType::F16 => [1.4, 4.5],
        WeightType::BF16 => [2.4, 4.5],
        WeightType::Q8_0 => [3.9, 10.0],
        WeightType::Q4_0 | WeightType::Q4_1 => [4.2, 10.5],
        WeightType::Q4_K => [4.9, 14.5],
        WeightType::Q5_K | WeightType::Q6_K | WeightType::Q5_0 | WeightType::Q5_1 => [5.8, 18.5],
        WeightType::MXFP4 | WeightType::NVFP4 => [8.6, 20.0],
        _ => [12.0, 25.0],
    }
}

/// The same per weight unpacked for several columns, and per product.
fn of_columns(weight: WeightType) -> [f64; 2] {
    let of_weight = match weight.layout() {
        WeightType::F32 => 1.6,
        WeightType::F16 => 2.3,
        WeightType::BF16 => 3.3,
        WeightType::Q4_0 | WeightType::Q4_1 => 6.3,
        WeightType::Q8_0 => 7.2,
        WeightType::Q4_K => 8.9,
        WeightType::Q5_K | WeightType::Q5_0 | WeightType::Q5_1 => 10.6,
        WeightType::Q6_K | WeightType::MXFP4 => 12.8,
        _ => 16.0,
    };
    [of_weight, 1.1]
}

/// What a fused norm adds to both.
const COLUMNS_NORM: [f64; 2] = [1.3, 0.31];

fn weight(dispatch: &Dispatch<'_>) -> WeightType {
    dispatch.variant().weight.unwrap_or(WeightType::F32)
}

fn constant(dispatch: &Dispatch<'_>, name: &str) -> Option<f64> {
    dispatch.constants().iter().find(|(known, _)| *known == name).map(|&(_, value)| value)
}

/// A product of a few tokens with a matrix: reads every weight once per group of `COLUMNS` tokens.
fn vector_product(dispatch: &Dispatch<'_>, rows: DispatchWork, [n_tokens, n_out, dim]: [u32; 3]) -> DispatchWork {
    let weight = weight(dispatch);
    let columns = constant(dispatch, "COLUMNS").unwrap_or(1.0);
    let passes = f64::from(dispatch.grid()[2]);
    let weights = passes * f64::from(n_out) * f64::from(dim);
    let has_norm = constant(dispatch, "NORM").is_some();
    let per_weight = match columns {
        // A fused norm multiplies each element of x, shared by four rows.
        1.0 => unpacking(weight)[0] + if has_norm { 0.6 } else { 0.0 },
        _ => {
            let [of_weight, of_product] = of_columns(weight);
            let [norm_of_weight, norm_of_product] = if has_norm { COLUMNS_NORM } else { [0.0; 2] };
            of_weight + norm_of_weight + (of_product + norm_of_product) * columns
        }
    };
    let packed = packed_bytes(dispatch);
    DispatchWork {
        bytes: rows.bytes + (passes - 1.0) * packed,
        operations: 2.0 * f64::from(n_tokens) * f64::from(n_out) * f64::from(dim),
        instructions: weights * per_weight,
        // For each of 64 lanes and four rows: a block, or a quarter of one with several columns.
        bytes_in_flight: if columns > 1.0 { 64.0 * 4.0 * 4.0 } else { 64.0 * 4.0 * 16.0 },
        groups_per_core: 16.0,
        ..rows
    }
}

/// Bytes of a product's matrix.
fn packed_bytes(dispatch: &Dispatch<'_>) -> f64 {
    let bindings = dispatch.kernel().bindings.iter().zip(dispatch.operands());
    bindings.filter(|(binding, _)| binding.name == "w").map(|(_, tensor)| tensor.size_bytes() as f64).sum()
}

/// A tiled product on lanes: each workgroup unpacks its weights once and reads its operands from workgroup memory.
fn tiled_product(dispatch: &Dispatch<'_>, rows: DispatchWork, [n_tokens, n_out, dim]: [u32; 3]) -> DispatchWork {
    let [m, n, k] = [n_tokens, n_out, dim].map(f64::from);
    let tile = constant(dispatch, "TILE").unwrap_or(64.0);
    let width = constant(dispatch, "WIDTH").unwrap_or(16.0);
    let [height, width] = [tile * 16.0 / width, tile * width / 16.0];
    let [tile_rows, tile_cols] = [(m / height).ceil(), (n / width).ceil()];
    let products = tile_rows * height * tile_cols * width * k;
    // Each invocation has 8 x 8 sums of a large tile, 4 x 4 of a small one.
    let is_large = tile > 64.0;
    let side = if is_large { 8.0 } else { 4.0 };
    let staged = unpacking(weight(dispatch))[1] * n * k * tile_rows + unpacking(WeightType::F32)[1] * m * k * tile_cols;
    DispatchWork {
        operations: 2.0 * m * n * k,
        // A step along K loads `2 * side` operands for `side * side` products.
        instructions: staged + products * (1.0 + 2.0 / side),
        shared_bytes: products * 2.0 * 4.0 / side,
        group_lanes: 256.0,
        groups_per_core: if is_large { 2.0 } else { 4.0 },
        bytes_in_flight: 8192.0,
        ..rows
    }
}

/// Lane instructions, without scalar ones, per element of x that a tile stages in half precision, and per weight:
/// from the hot loops of `matmul_half` in RDNA 3's ISA, for several tiles.
const HALF_X: f64 = 1.0;

fn half_unpacking(weight: WeightType) -> f64 {
    match weight.layout() {
        WeightType::F16 | WeightType::BF16 => 2.5,
        WeightType::Q8_0 | WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4_K => 5.0,
        WeightType::Q5_K | WeightType::Q6_K | WeightType::Q5_0 | WeightType::Q5_1 => 8.4,
        _ => 12.0,
    }
}

/// A subgroup's instructions per matrix load, from the same loops, and elements of a matrix.
const MATRIX_LOADS: f64 = 4.2;
const MATRIX_LEN: f64 = 256.0;

/// A tiled product in half precision, on lanes or matrix units.
fn half_product(dispatch: &Dispatch<'_>, rows: DispatchWork, [n_tokens, n_out, dim]: [u32; 3]) -> DispatchWork {
    let [m, n, k] = [n_tokens, n_out, dim].map(f64::from);
    let [height, width] = ["ROWS", "COLS"].map(|name| constant(dispatch, name).unwrap_or(64.0));
    let [tile_rows, tile_cols] = [(m / height).ceil(), (n / width).ceil()];
    let products = tile_rows * height * tile_cols * width * k;
    let steps = tile_rows * tile_cols * k;
    let (subgroup, across) = (constant(dispatch, "SUBGROUP"), constant(dispatch, "ACROSS"));
    let group_lanes = subgroup.map_or(256.0, |lanes| 4.0 * lanes);
    // Lanes without a part of w execute the same instructions.
    let staged = HALF_X * height + half_unpacking(weight(dispatch)) * width.max(group_lanes / 2.0);
    let (instructions, shared_bytes, on_matrices) = match (subgroup, across) {
        // Each of four subgroups loads the rows and columns of its part of the tile.
        (Some(lanes), Some(across)) => {
            let loaded = height * across + 4.0 * width / across;
            (steps * (staged + MATRIX_LOADS * lanes * loaded / MATRIX_LEN), steps * loaded * 2.0, true)
        }
        _ => {
            let side = if height * width > 4096.0 { 8.0 } else { 4.0 };
            (steps * staged + products * (1.0 + 2.0 / side), products * 2.0 * 2.0 / side, false)
        }
    };
    DispatchWork {
        operations: 2.0 * m * n * k,
        on_matrices,
        instructions,
        shared_bytes: shared_bytes + steps * 2.0 * (height + width),
        group_lanes,
        groups_per_core: if height * width > 4096.0 { 2.0 } else { 4.0 },
        bytes_in_flight: 8192.0,
        ..rows
    }
}

/// Keys that a token of a pass sees, on average.
fn seen_on_average(params: &AttentionParams, filled: u32) -> f64 {
    (f64::from(seen(params, filled)) - f64::from(params.n_tokens) / 2.0).max(1.0)
}

/// Scores and weighted sums of values: each query with the keys it sees.
fn attention(dispatch: &Dispatch<'_>, rows: DispatchWork, filled: u32) -> DispatchWork {
    let params: AttentionParams = params(dispatch);
    let per_token = f64::from(params.n_heads) * f64::from(params.head_dim);
    let products = 2.0 * f64::from(params.n_tokens) * per_token * seen_on_average(&params, filled);
    DispatchWork {
        operations: 2.0 * products,
        // RDNA 3's listing of both kernels: about 1.3 and 1.4 instructions per multiplication.
        instructions: 1.4 * products,
        shared_bytes: products,
        groups_per_core: 4.0,
        bytes_in_flight: 64.0 * 4.0 * 16.0,
        ..rows
    }
}

/// Lane instructions of `attention_half` per score, and per staged element of a key or value: its loop in RDNA 3's
/// ISA, without matrix loads, soft cap, masks and rescaling.
const SCORE: f64 = 30.0;
const STAGED: f64 = 3.5;

/// Attention with matrix units: tiles of 64 rows by 32 keys, shared by four subgroups.
fn half_attention(dispatch: &Dispatch<'_>, rows: DispatchWork, filled: u32) -> DispatchWork {
    const ROWS: f64 = 64.0;
    const KEYS: f64 = 32.0;
    let params: AttentionParams = params(dispatch);
    let [n_tokens, n_heads, n_kv_heads, dim] =
        [params.n_tokens, params.n_heads, params.n_kv_heads, params.head_dim].map(f64::from);
    let lanes = constant(dispatch, "SUBGROUP").unwrap_or(32.0);
    let keys = seen_on_average(&params, filled);
    let tiles = n_kv_heads * (n_tokens * n_heads / n_kv_heads / ROWS).ceil() * (keys / KEYS).ceil();
    // Elements of keys, values and attention weights that each subgroup loads, and those that all stage together.
    let loaded = 4.0 * (2.0 * KEYS * dim + ROWS / 4.0 * KEYS);
    let staged = 2.0 * KEYS * dim;
    let scores = ROWS * KEYS;
    DispatchWork {
        operations: 4.0 * n_tokens * n_heads * dim * keys,
        on_matrices: true,
        instructions: tiles * (SCORE * scores + STAGED * staged + MATRIX_LOADS * lanes * loaded / MATRIX_LEN),
        // Scores are stored and read as f32, the rest is f16.
        shared_bytes: tiles * (2.0 * (loaded + staged + scores) + 8.0 * scores),
        group_lanes: 4.0 * lanes,
        groups_per_core: if dim > 64.0 { 2.0 } else { 3.0 },
        bytes_in_flight: 2.0 * KEYS * dim,
        ..rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::shapes::{SHAPES, ShapePass};

    fn predict(machine: &Machine, shape: usize, n_tokens: u32, filled: u32) -> Prediction {
        let pass = ShapePass { n_tokens, context_length: 4096 };
        let recording = SHAPES[shape].record(&machine.target(), WeightType::Q8_0, pass).expect("it is recorded");
        machine.predict(&recording, filled)
    }

    #[test]
    fn decode_reads_all_weights_and_the_kv_cache() {
        // Llama-3.2-1B: its weights at 34 bytes per 32, norms, and keys and values of 16 layers in half precision.
        let (weights, norms) = (1_235_746_816.0 / 32.0 * 34.0, 33.0 * 2048.0 * 4.0);
        for filled in [0u32, 1000] {
            let found: f64 = predict(&MACHINES[0], 0, 1, filled).dispatches.iter().map(|d| d.bytes).sum();
            let cached = f64::from(filled + 1) * 2.0 * 16.0 * 512.0 * 2.0;
            let known = weights + norms + cached;
            // The rest is activations and logits.
            assert!(found > known && found < 1.01 * known, "{filled}: {found} of {known}");
        }
    }

    #[test]
    fn pass_of_few_tokens_reads_each_weight_once() {
        for machine in &MACHINES {
            // Llama-3.2-1B after 512 tokens.
            let bytes = |n_tokens| predict(machine, 0, n_tokens, 512).dispatches.iter().map(|d| d.bytes).sum::<f64>();
            let of_one = bytes(1);
            for n_tokens in 2..=8 {
                let share = bytes(n_tokens) / of_one;
                assert!((0.99..=1.3).contains(&share), "{}, {n_tokens} tokens: {share} of one's bytes", machine.name);
            }
        }
    }

    #[test]
    fn sampling_takes_at_most_2_percent_of_a_decode_pass() {
        let gemma = SHAPES.iter().find(|shape| shape.name == "Gemma-3-1B").expect("it is there");
        let pass = ShapePass { n_tokens: 1, context_length: 4096 };
        let machine = Machine::named("RTX 4090").expect("it is there");
        let recording = gemma.record_sampled(&machine.target(), WeightType::Q4_K, pass).expect("it is recorded");
        let prediction = machine.predict(&recording, 512);
        let is_draw = |label: &str| label.starts_with("candidates") || label.starts_with("sample");
        let draws: Vec<f64> = prediction.dispatches.iter().filter(|d| is_draw(d.label)).map(|d| d.seconds).collect();
        assert_eq!(draws.len(), 2);
        assert!(draws.iter().sum::<f64>() <= 0.02 * prediction.seconds, "{draws:?} of {} s", prediction.seconds);
        println!("{draws:?} of {} s", prediction.seconds);
    }

    #[test]
    fn prefill_takes_two_operations_per_weight_and_token() {
        let found: f64 = predict(&MACHINES[0], 0, 512, 0).dispatches.iter().map(|d| d.operations).sum();
        // The embedding head multiplies the last token only; on average, 256 keys precede a token.
        let products = 2.0 * 512.0 * 973_078_528.0 + 2.0 * 262_668_288.0;
        let attention = 4.0 * 16.0 * 2048.0 * 512.0 * 256.0;
        assert!((found / (products + attention) - 1.0).abs() < 0.01, "{found} of {}", products + attention);
    }

    #[test]
    fn predicted_pass_stays_below_memory_and_compute_peaks() {
        for machine in &MACHINES {
            for (i, shape) in SHAPES.iter().enumerate() {
                for n_tokens in [1, 512] {
                    let prediction = predict(machine, i, n_tokens, 0);
                    let name = format!("{} {} {n_tokens}", machine.name, shape.name);
                    assert!(prediction.memory_share > 0.0 && prediction.memory_share < 1.0, "{name}: {prediction:?}");
                    assert!(prediction.compute_share > 0.0 && prediction.compute_share < 1.0, "{name}");
                    let sum: f64 = prediction.dispatches.iter().map(|d| d.seconds).sum();
                    assert!((sum - prediction.seconds).abs() < 1e-9, "{name}");
                }
            }
        }
    }

    #[test]
    fn machine_is_found_by_part_of_its_name() {
        let found = |name| Machine::named(name).map(|machine| machine.name);
        assert_eq!(found("rtx4090"), Some("RTX 4090"));
        assert_eq!(found("7900 xtx"), Some("RX 7900 XTX"));
        assert_eq!(found("m3 max"), Some("Apple M3 Max"));
        assert_eq!([found(""), found("RTX 9090")], [None, None]);
    }
}
