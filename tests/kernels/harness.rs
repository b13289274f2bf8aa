//! Test cases and their execution: surrounds operands with a pattern, records, runs, reads back and checks.

use tilewright::kernels::StepState;
use tilewright::shaders::Tier;
use tilewright::{DType, Device, Error, Matrix, Recorder, Role, Target, TargetLimits, Tensor, WeightType, Workspace};

use crate::common::{Expected, compare};
use crate::inputs::{Inputs, Source};

/// A quiet NaN, and an invalid token id: fills outputs before a run, and the slack behind them.
pub const PATTERN: u32 = 0x7fd2_5a5a;
/// Another one, behind tensors with initial contents. Arithmetic propagates a NaN's bits, so with a single pattern a
/// result computed from one slack and written to another would look untouched.
pub const INPUT_PATTERN: u32 = 0x7fe1_a5a5;

/// Half a unit in the last place of 1: the relative error of one f32 rounding.
pub const ROUND: f64 = 1.0 / 16_777_216.0;
/// The smallest normal f32: the error of flushing a subnormal.
pub const FLUSH: f64 = f32::MIN_POSITIVE as f64;

/// Rounding error of `n` summed terms, relative to the sum of their magnitudes: errors add up like a random walk.
pub fn sum_rounding(n: usize) -> f64 {
    ROUND * (16.0 + 4.0 * (n as f64).sqrt())
}

/// One case of a kernel; its inputs are drawn when it runs.
pub struct Case {
    pub kernel: &'static str,
    pub variant: String,
    pub sizes: String,
    pub inputs: Inputs,
    pub build: Box<dyn Fn(&mut Source) -> Job>,
}

impl Case {
    /// The case's name on `executor`.
    pub fn name(&self, executor: &str, seed: u64) -> String {
        format!("{}/{}/{executor}/{}/{}/seed={seed}", self.kernel, self.variant, self.sizes, self.inputs.name())
    }

    /// Whether the device stages this case's tiles in half precision, which rounds operands.
    pub fn is_staged_in_half(&self, device: &Device) -> bool {
        if self.kernel == "attention" {
            let is_of_tokens = !self.variant.starts_with("F32") && !self.variant.contains("+next");
            return device.is_gpu() && device.tier().matrix_size().is_some() && is_of_tokens;
        }
        device.is_gpu()
            && device.tier().rounds_to_half()
            && matches!(self.kernel, "matmul" | "matmul_split" | "linear" | "half_rows")
            && !self.variant.starts_with("F32")
    }

    /// The case's own seed, the same on every executor.
    pub fn seed(&self, seed: u64) -> u64 {
        hash(&self.name("", seed))
    }
}

/// 64-bit FNV-1a.
pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// An operand's contents before the run.
pub enum Data {
    Floats(Vec<f32>),
    Words(Vec<u32>),
    Weights(WeightType, Vec<u8>),
    /// Step state: pos, n_tokens, token, row of angles. For sequences that share a cache, one row each, with pages.
    State(Vec<u32>),
    /// Only the pattern.
    Blank(DType),
}

type Check = Box<dyn Fn(&[u32]) -> Result<(), String>>;

/// An operand's expected contents after the run.
pub enum Want {
    /// Its contents before the run.
    Unchanged,
    /// These words; in float tensors zeros of either sign are equal.
    Exact(Vec<u32>),
    /// These numbers, with at most this normalised mean squared error. A NaN requires that the element still holds the
    /// pattern; an infinity allows anything.
    Close(Vec<Expected>, f64),
    /// Checked by a closure.
    Check(Check),
}

impl Data {
    fn pattern(&self) -> u32 {
        if matches!(self, Data::Blank(_)) { PATTERN } else { INPUT_PATTERN }
    }
}

pub struct Operand {
    pub label: &'static str,
    pub shape: Vec<u32>,
    pub data: Data,
    pub want: Want,
}

impl Operand {
    fn new(label: &'static str, shape: &[u32], data: Data, want: Want) -> Operand {
        Operand { label, shape: shape.to_vec(), data, want }
    }

    pub fn floats(label: &'static str, shape: &[u32], data: Vec<f32>) -> Operand {
        Operand::new(label, shape, Data::Floats(data), Want::Unchanged)
    }

    pub fn words(label: &'static str, shape: &[u32], data: Vec<u32>) -> Operand {
        Operand::new(label, shape, Data::Words(data), Want::Unchanged)
    }

    pub fn weights(weight: WeightType, shape: &[u32], bytes: Vec<u8>) -> Operand {
        Operand::new("w", shape, Data::Weights(weight, bytes), Want::Unchanged)
    }

    pub fn state(pos: u32, n_tokens: u32) -> Operand {
        Operand::turned_state(pos, n_tokens, 0)
    }

    /// A state with this row of angles for position 0.
    pub fn turned_state(pos: u32, n_tokens: u32, angles: u32) -> Operand {
        Operand::new("state", &[4], Data::State(vec![pos, n_tokens, 7, angles]), Want::Unchanged)
    }

    /// States of sequences that share a cache: eight words and the pages of each.
    pub fn states(rows: &[Vec<u32>]) -> Operand {
        let shape = [rows.len() as u32, rows[0].len() as u32];
        Operand::new("state", &shape, Data::State(rows.concat()), Want::Unchanged)
    }

    /// A float output, blank before the run.
    pub fn close(label: &'static str, shape: &[u32], want: Vec<Expected>, nmse: f64) -> Operand {
        Operand::new(label, shape, Data::Blank(DType::F32), Want::Close(want, nmse))
    }

    /// A float output that must equal `want`.
    pub fn exact_floats(label: &'static str, shape: &[u32], want: &[f32]) -> Operand {
        let want = want.iter().map(|value| value.to_bits()).collect();
        Operand::new(label, shape, Data::Blank(DType::F32), Want::Exact(want))
    }

    /// A word output that must equal `want`.
    pub fn exact_words(label: &'static str, shape: &[u32], want: Vec<u32>) -> Operand {
        Operand::new(label, shape, Data::Blank(DType::U32), Want::Exact(want))
    }

    /// The same operand, expecting `want` after the run.
    pub fn becomes(mut self, want: Want) -> Operand {
        self.want = want;
        self
    }
}

type Record = Box<dyn Fn(&mut Recorder, &Bound) -> Result<(), Error>>;

/// A recording and its operands, with contents before and after.
pub struct Job {
    pub operands: Vec<Operand>,
    pub record: Record,
}

impl Job {
    pub fn new(operands: Vec<Operand>, record: impl Fn(&mut Recorder, &Bound) -> Result<(), Error> + 'static) -> Job {
        Job { operands, record: Box::new(record) }
    }
}

enum Slot {
    Tensor(Tensor),
    Matrix(Matrix),
    State(StepState),
}

/// A job's operands in order, and their device.
pub struct Bound {
    slots: Vec<Slot>,
    pub device: Device,
}

impl Bound {
    pub fn tensor(&self, i: usize) -> &Tensor {
        match &self.slots[i] {
            Slot::Tensor(tensor) => tensor,
            Slot::State(state) => state.tensor(),
            Slot::Matrix(_) => panic!("operand {i} is a matrix"),
        }
    }

    pub fn matrix(&self, i: usize) -> &Matrix {
        match &self.slots[i] {
            Slot::Matrix(matrix) => matrix,
            _ => panic!("operand {i} is not a matrix"),
        }
    }

    pub fn state(&self, i: usize) -> &StepState {
        match &self.slots[i] {
            Slot::State(state) => state,
            _ => panic!("operand {i} is not a step state"),
        }
    }
}

fn place(device: &Device, operand: &Operand) -> Result<Slot, Error> {
    let declare = |dtype| Tensor::declare(operand.label, Role::Activations, &operand.shape, dtype);
    Ok(match &operand.data {
        Data::Floats(_) => Slot::Tensor(declare(DType::F32)?),
        Data::Words(_) => Slot::Tensor(declare(DType::U32)?),
        Data::Blank(dtype) => Slot::Tensor(declare(*dtype)?),
        Data::State(_) => Slot::State(match operand.shape[..] {
            [n_rows, n_words] => StepState::declare_shared(Some(n_rows), n_words - 8, false)?,
            _ => StepState::declare()?,
        }),
        Data::Weights(weight, _) => {
            let [rows, cols] = operand.shape[..] else { panic!("a matrix has two dimensions") };
            Slot::Matrix(Matrix::declare(&device.target(), operand.label, *weight, rows, cols)?)
        }
    })
}

fn fill(device: &Device, slot: &Slot, data: &Data) -> Result<(), Error> {
    let pattern = data.pattern();
    match slot {
        Slot::Tensor(tensor) => device.fill_buffer(tensor, pattern)?,
        Slot::State(state) => device.fill_buffer(state.tensor(), pattern)?,
        Slot::Matrix(matrix) => matrix.tensors().try_for_each(|words| device.fill_buffer(words, pattern))?,
    }
    match (slot, data) {
        (Slot::Tensor(tensor), Data::Floats(data)) => device.write(tensor, 0, data),
        (Slot::Tensor(tensor), Data::Words(data)) => device.write(tensor, 0, data),
        (Slot::State(state), Data::State(words)) => device.write(state.tensor(), 0, words),
        (Slot::Matrix(matrix), Data::Weights(_, bytes)) => matrix.upload(device, &[bytes.as_slice()]),
        _ => Ok(()),
    }
}

/// Maximum size to read back: larger matrices would dominate the run time.
const LARGEST_READ: u64 = 4 << 20;

/// Contents of all operands, slack included.
async fn snapshot(device: &Device, bound: &Bound) -> Result<Vec<Vec<u32>>, Error> {
    let mut content = Vec::new();
    for slot in &bound.slots {
        content.push(match slot {
            Slot::Tensor(tensor) => device.read_buffer(tensor).await?,
            Slot::State(state) => device.read_buffer(state.tensor()).await?,
            Slot::Matrix(matrix) => {
                let mut parts = Vec::new();
                for words in matrix.tensors().filter(|words| words.size_bytes() <= LARGEST_READ) {
                    parts.extend(device.read_buffer(words).await?);
                }
                parts
            }
        });
    }
    Ok(content)
}

/// A job's operands on a device, and its recorder.
pub fn recorded(device: &Device, job: &Job) -> Result<(Bound, Recorder), Error> {
    let slots: Result<Vec<Slot>, Error> = job.operands.iter().map(|operand| place(device, operand)).collect();
    let bound = Bound { slots: slots?, device: device.clone() };
    let mut rec = Recorder::new(target(device));
    (job.record)(&mut rec, &bound)?;
    Ok((bound, rec))
}

/// The device's target; in the tier `subgroups` with shaders that do without conversions, as on NVIDIA's GPUs.
fn target(device: &Device) -> Target {
    let target = device.target();
    match device.tier() {
        Tier::Subgroups => {
            Target::new(target.kind(), Tier::Subgroups, TargetLimits { converts_slowly: true, ..target.limits() })
        }
        _ => target,
    }
}

/// Runs a job `rounds` times; each must give the same bits. Returns the largest normalised mean squared error.
pub async fn execute(device: &Device, job: &Job, rounds: usize) -> Result<f64, String> {
    let gpu = |error: Error| error.to_string();
    let (bound, rec) = recorded(device, job).map_err(gpu)?;
    let recording = rec.finish(&mut Workspace::default());

    let mut first: Option<Vec<Vec<u32>>> = None;
    let mut worst = 0.0f64;
    for round in 0..rounds {
        for (slot, operand) in bound.slots.iter().zip(&job.operands) {
            fill(device, slot, &operand.data).map_err(gpu)?;
        }
        let before = if round == 0 { Some(snapshot(device, &bound).await.map_err(gpu)?) } else { None };
        device.run(&recording).map_err(gpu)?;
        let after = snapshot(device, &bound).await.map_err(gpu)?;
        match (&first, &before) {
            (Some(first), _) if *first != after => {
                return Err(format!("run {round} differs in bits from the first run"));
            }
            (None, Some(before)) => {
                for ((operand, before), after) in job.operands.iter().zip(before).zip(&after) {
                    let nmse = judge(operand, before, after).map_err(|e| format!("`{}`: {e}", operand.label))?;
                    worst = worst.max(nmse);
                }
                first = Some(after);
            }
            _ => {}
        }
    }
    Ok(worst)
}

fn judge(operand: &Operand, before: &[u32], after: &[u32]) -> Result<f64, String> {
    let pattern = operand.data.pattern();
    let len = match operand.data {
        Data::Weights(..) => after.len(),
        _ => operand.shape.iter().map(|&d| d as usize).product(),
    };
    if let Some(at) = (len..after.len()).find(|&at| after[at] != pattern) {
        return Err(format!("word {at} was written, the tensor ends at {len}"));
    }
    let content = &after[..len];
    match &operand.want {
        Want::Unchanged => match before.iter().zip(after).position(|(a, b)| a != b) {
            None => Ok(0.0),
            Some(at) => Err(format!("word {at} of an input changed from {:#x} to {:#x}", before[at], after[at])),
        },
        Want::Exact(want) => {
            let floats = matches!(operand.data, Data::Floats(_) | Data::Blank(DType::F32));
            let zeros = |a: u32, b: u32| floats && (a | b) & 0x7fff_ffff == 0;
            match content.iter().zip(want).position(|(&a, &b)| a != b && !zeros(a, b)) {
                None if want.len() == content.len() => Ok(0.0),
                None => Err(format!("{} words expected", want.len())),
                Some(at) if floats => {
                    let (got, want) = (f32::from_bits(content[at]), f32::from_bits(want[at]));
                    Err(format!("element {at} is {got:e}, expected exactly {want:e}"))
                }
                Some(at) => Err(format!("element {at} is {}, expected {}", content[at], want[at])),
            }
        }
        Want::Close(want, limit) => {
            let (mut got, mut judged) = (Vec::with_capacity(len), Vec::with_capacity(len));
            for (i, (&bits, expected)) in content.iter().zip(want).enumerate() {
                if expected.value.is_nan() {
                    if bits != pattern {
                        return Err(format!("element {i} was written and should not have been"));
                    }
                } else if expected.value.is_finite() {
                    got.push(f32::from_bits(bits));
                    judged.push(*expected);
                }
            }
            if want.len() != len {
                return Err(format!("{len} elements, {} expected", want.len()));
            }
            let nmse = compare(&got, &judged)?;
            if nmse <= *limit { Ok(nmse) } else { Err(format!("NMSE {nmse:.2e}, at most {limit:.0e} is allowed")) }
        }
        Want::Check(check) => check(content).map(|()| 0.0),
    }
}

#[test]
fn judge_rejects_wrong_results() {
    let one = Expected::new(1.0, 1e-6, 0.0);
    let judged = |want: Want, data: Data, after: &[u32]| {
        let operand = Operand::new("y", &[2], data, want);
        let before = [operand.data.pattern(); 4];
        judge(&operand, &before, after)
    };
    let blank = || Data::Blank(DType::F32);
    let [fine, off, nan] = [1.0f32, 1.0 + 2e-6, f32::NAN].map(f32::to_bits);
    let close = || Want::Close(vec![one; 2], 1e-10);
    assert!(judged(close(), blank(), &[fine, fine, PATTERN, PATTERN]).is_ok());
    for after in [
        [fine, off, PATTERN, PATTERN],
        [nan, fine, PATTERN, PATTERN],
        [fine, PATTERN, PATTERN, PATTERN],
        [fine, fine, fine, PATTERN],
        [fine, fine, PATTERN, INPUT_PATTERN],
    ] {
        assert!(judged(close(), blank(), &after).is_err(), "{after:x?}");
    }
    let loose = Want::Close(vec![Expected::new(1.0, 1.0, 0.0); 2], 1e-10);
    assert!(judged(loose, blank(), &[fine, 0, PATTERN, PATTERN]).is_err(), "within bounds and too far on average");
    let untouched = || Want::Close(vec![one, Expected::new(f64::NAN, 0.0, 0.0)], 1e-10);
    assert!(judged(untouched(), blank(), &[fine, PATTERN, PATTERN, PATTERN]).is_ok());
    assert!(judged(untouched(), blank(), &[fine, fine, PATTERN, PATTERN]).is_err());
    let input = || Data::Words(vec![3, 4]);
    assert!(judged(Want::Unchanged, input(), &[INPUT_PATTERN; 4]).is_ok());
    assert!(judged(Want::Unchanged, input(), &[INPUT_PATTERN, 5, INPUT_PATTERN, INPUT_PATTERN]).is_err());
    let exact = || Want::Exact(vec![fine, 0x8000_0000]);
    assert!(judged(exact(), blank(), &[fine, 0, PATTERN, PATTERN]).is_ok(), "zeros of either sign");
    assert!(judged(exact(), blank(), &[fine + 1, 0, PATTERN, PATTERN]).is_err());
    assert!(judged(exact(), Data::Blank(DType::U32), &[fine, 0, PATTERN, PATTERN]).is_err(), "words have no sign");
}
