//! The CPU executor: the same recordings, each kernel by its twin in plain Rust. The twin is also what a kernel means:
//! GPU results are compared with it.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bytemuck::Pod;
use web_time::Instant;

use crate::counters::LiveCounters;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::recording::Step;
use crate::tensor::Tensor;

mod activation;
mod argmax;
mod attention;
mod block;
mod by_head;
pub(crate) mod cached;
mod dots;
mod embed;
mod experts;
mod linear;
mod matmul_plain;
mod mol;
#[cfg(not(target_arch = "wasm32"))]
mod mol_parts;
mod norm;
mod pool;
mod probe;
mod recurrent;
mod rope;
mod sample;
mod select_top;
mod simd;
mod softmax;
mod threads;

pub(crate) use simd::has_byte_dots;
use threads::Threads;
pub(crate) use threads::for_each_chunk;

/// Memory of a tensor, in 4-byte words.
#[derive(Debug)]
pub(crate) struct Memory(RwLock<Words>);

/// Zeros at first. Where they begin is a cache line's beginning: a large allocation otherwise begins 16 bytes behind one, and
/// every second load of 32 bytes takes two lines.
#[derive(Debug)]
struct Words {
    /// As the system gives them: zeros that it makes when they are first touched.
    all: Vec<u32>,
    first: usize,
}

impl Words {
    /// Words in a cache line.
    const LINE: usize = 16;

    fn zeros(len: usize) -> Words {
        let all = vec![0; len + Words::LINE - 1];
        // Never more than the words that are to spare, also where it cannot be told.
        let first = all.as_ptr().align_offset(4 * Words::LINE).min(Words::LINE - 1);
        Words { all, first }
    }
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.all[self.first..][..self.all.len() + 1 - Words::LINE]
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u32] {
        let len = self.all.len() + 1 - Words::LINE;
        &mut self.all[self.first..][..len]
    }
}

impl Memory {
    pub fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub fn write(&self, first: usize, words: &[u32]) {
        let mut memory = self.0.write().unwrap_or_else(PoisonError::into_inner);
        memory[first..first + words.len()].copy_from_slice(words);
    }

    pub fn read(&self, first: usize, n: usize) -> Vec<u32> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)[first..first + n].to_vec()
    }
}

/// One operand of a kernel, in binding order.
pub(crate) enum Operand<'a> {
    Read(&'a [u32]),
    Write(&'a mut [u32]),
}

impl<'a> Operand<'a> {
    /// The words as `T`, a 4-byte type or an array of such.
    pub fn get<T: Pod>(&self) -> &[T] {
        match self {
            Operand::Read(words) => bytemuck::cast_slice(words),
            Operand::Write(words) => bytemuck::cast_slice(words),
        }
    }

    /// The words for writing; empty if the binding is read-only.
    pub fn get_mut<T: Pod>(&mut self) -> &mut [T] {
        match self {
            Operand::Read(_) => &mut [],
            Operand::Write(words) => bytemuck::cast_slice_mut(words),
        }
    }
}

/// A kernel's call: params as the shader sees them, weight type, operands in binding order.
pub(crate) struct Call<'a> {
    params: &'a [u8],
    pub weight: Option<WeightType>,
    /// Whether activations that meet quantised weights may be rounded.
    pub rounds: bool,
    pub operands: Vec<Operand<'a>>,
}

impl<'a> Call<'a> {
    pub fn params<P: Pod>(&self) -> P {
        bytemuck::pod_read_unaligned(self.params)
    }

    /// All operands at once, so that one can be written while others are read.
    pub fn operands<const N: usize>(&mut self) -> &mut [Operand<'a>; N] {
        let n = self.operands.len();
        match (&mut self.operands[..]).try_into() {
            Ok(operands) => operands,
            Err(_) => unreachable!("a twin takes {N} operands and its shader has {n}"),
        }
    }
}

type Twin = fn(Call<'_>);

/// The twin of a kernel.
fn twin(kernel: &str) -> Option<Twin> {
    Some(match kernel {
        "add" => activation::add,
        "advance" => sample::advance,
        "argmax" => argmax::argmax,
        "argmax_merge" => argmax::argmax_merge,
        "attention_decode" => attention::attention_decode,
        "attention_merge" => attention::attention_merge,
        "attention_prefill" => attention::attention_prefill,
        "by_head" => by_head::by_head,
        "delta_rule" => recurrent::delta_rule,
        "selective_scan" => recurrent::selective_scan,
        "embed" => embed::embed,
        "embed_sum" => embed::embed_sum,
        "expert_down" => experts::expert_down,
        "expert_gate_up" => experts::expert_gate_up,
        "expert_matmul" => experts::expert_matmul,
        "expert_sum" => experts::expert_sum,
        "expert_tiles" => experts::expert_tiles,
        "gate_up" => linear::gate_up,
        "geglu" => activation::geglu,
        "gelu" => activation::gelu,
        "last_row" => embed::last_row,
        "layer_norm" => norm::layer_norm,
        "linear_norm" => linear::linear_norm,
        "matmul" => linear::matmul,
        "matmul_plain" => matmul_plain::matmul_plain,
        "matvec" => linear::matvec,
        "merge_top" => select_top::merge_top,
        "mol" => mol::mol,
        "penalize" => sample::penalize,
        "pool" => pool::pool,
        "rms_norm" => norm::rms_norm,
        "rope" => rope::rope,
        "route" => experts::route,
        "rope_kv" => rope::rope_kv,
        "rope_packed" => rope::rope_packed,
        "sample" => sample::sample,
        "scale" => activation::scale,
        "select_top" => select_top::select_top,
        "short_conv" => recurrent::short_conv,
        "sigmoid_gate" => activation::sigmoid_gate,
        "silu" => activation::silu,
        "softmax" => softmax::softmax,
        "split_sum" => linear::split_sum,
        "swiglu" => activation::swiglu,
        #[cfg(not(target_arch = "wasm32"))]
        "matmul_naive" => linear::matmul,
        #[cfg(not(target_arch = "wasm32"))]
        "mol_gate" => mol_parts::mol_gate,
        "probe_copy" => probe::probe_copy,
        "probe_fma" => probe::probe_fma,
        #[cfg(not(target_arch = "wasm32"))]
        "probe_matrix" => probe::probe_matrix,
        "probe_read" => probe::probe_read,
        "probe_reduce" => probe::probe_reduce,
        #[cfg(not(target_arch = "wasm32"))]
        "weighted_sum" => mol_parts::weighted_sum,
        _ => return None,
    })
}

/// Number of threads that kernels use.
pub(crate) fn threads() -> usize {
    #[cfg(not(target_arch = "wasm32"))]
    return rayon::current_num_threads();
    #[cfg(target_arch = "wasm32")]
    return 1;
}

#[derive(Debug)]
pub(crate) struct Cpu {
    /// Recordings run one at a time, as on a queue. Whoever has the lock waits for `threads` alone, which never need it.
    running: Mutex<()>,
    threads: Threads,
    counters: Arc<LiveCounters>,
}

impl Cpu {
    pub fn new(counters: Arc<LiveCounters>) -> Self {
        Cpu { running: Mutex::new(()), threads: Threads::new(), counters }
    }

    pub fn allocate(&self, size_bytes: u64) -> Memory {
        self.counters.buffers_created.add(1);
        self.counters.bytes_allocated.add(size_bytes);
        Memory(RwLock::new(Words::zeros(size_bytes as usize / 4)))
    }

    pub fn write(&self, tensor: &Tensor, first: usize, words: &[u32]) -> Result<(), Error> {
        tensor.memory::<Memory>()?.write(first, words);
        Ok(())
    }

    pub fn read(&self, tensor: &Tensor) -> Result<Vec<u32>, Error> {
        Ok(tensor.memory::<Memory>()?.read(0, tensor.size_bytes() as usize / 4))
    }

    /// Fills a tensor's memory, with what lies between the tensor's end and its own.
    pub fn fill(&self, tensor: &Tensor, word: u32) -> Result<(), Error> {
        let memory: &Memory = tensor.memory()?;
        memory.write(0, &vec![word; memory.len()]);
        Ok(())
    }

    /// Reads a tensor's memory to its end.
    pub fn read_all(&self, tensor: &Tensor) -> Result<Vec<u32>, Error> {
        let memory: &Memory = tensor.memory()?;
        Ok(memory.read(0, memory.len()))
    }

    /// Copies whole tensors of equal sizes, in order.
    pub fn copy(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
        pairs.iter().try_for_each(|(from, to)| self.write(to, 0, &self.read(from)?))
    }

    /// Runs the steps. Where `rounds` says so, the activations of a few tokens are rounded to bytes where they meet quantised
    /// weights.
    pub fn run(&self, steps: &Arc<[Step]>, rounds: bool) -> Result<(), Error> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let own = steps.clone();
        self.threads.run(move || own.iter().try_for_each(|step| run_step(step, rounds)))??;
        self.counters.dispatches.add(steps.len() as u64);
        self.counters.submits.add(1);
        Ok(())
    }

    pub fn run_profiled(&self, steps: &Arc<[Step]>, rounds: bool) -> Result<Vec<Duration>, Error> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let own = steps.clone();
        let timed = move |step: &Step| {
            let start = Instant::now();
            run_step(step, rounds).map(|()| start.elapsed())
        };
        let times = self.threads.run(move || own.iter().map(timed).collect::<Result<_, _>>())??;
        self.counters.dispatches.add(steps.len() as u64);
        self.counters.submits.add(1);
        Ok(times)
    }
}

enum Guard<'a> {
    Read(RwLockReadGuard<'a, Words>),
    Write(RwLockWriteGuard<'a, Words>),
}

fn run_step(step: &Step, rounds: bool) -> Result<(), Error> {
    let twin = twin(step.kernel.name).ok_or_else(|| Error::Operand {
        kernel: step.kernel.name,
        operand: "device",
        expected: "a kernel with a CPU twin".into(),
        found: "one without".into(),
    })?;
    // A memory that several operands read is locked once; a written one has no other reader, as the recorder checked.
    let mut memories: Vec<(&Memory, bool)> = Vec::with_capacity(step.operands.len());
    let mut slots = Vec::with_capacity(step.operands.len());
    for (operand, binding) in step.operands.iter().zip(step.kernel.bindings) {
        let memory: &Memory = operand.memory()?;
        let slot = memories.iter().position(|(other, _)| std::ptr::eq(*other, memory)).unwrap_or_else(|| {
            memories.push((memory, binding.writes));
            memories.len() - 1
        });
        // Inputs keep the rounding to 16 bytes, for twins that read them as vectors; outputs end where the tensor does,
        // for twins that write as many rows as there are.
        let len_bytes = operand.len() * operand.dtype().size_bytes() as usize;
        let len = if binding.writes { len_bytes.div_ceil(4) } else { operand.size_bytes() as usize / 4 };
        slots.push((slot, len));
    }
    let mut guards: Vec<Guard> = memories
        .iter()
        .map(|(memory, writes)| match writes {
            true => Guard::Write(memory.0.write().unwrap_or_else(PoisonError::into_inner)),
            false => Guard::Read(memory.0.read().unwrap_or_else(PoisonError::into_inner)),
        })
        .collect();
    let mut views: Vec<Option<Operand>> = Vec::with_capacity(guards.len());
    for guard in &mut guards {
        views.push(Some(match guard {
            Guard::Read(words) => Operand::Read(words),
            Guard::Write(words) => Operand::Write(words),
        }));
    }
    let operands = slots
        .iter()
        .map(|&(slot, len)| match views[slot].take() {
            Some(Operand::Write(words)) => Operand::Write(&mut words[..len]),
            Some(Operand::Read(words)) => {
                views[slot] = Some(Operand::Read(words));
                Operand::Read(&words[..len])
            }
            None => Operand::Read(&[]),
        })
        .collect();
    twin(Call { params: &step.params, weight: step.variant.weight, rounds, operands });
    Ok(())
}
