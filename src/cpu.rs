//! The CPU executor: runs the same recordings, each kernel in plain Rust. These reference kernels define what a kernel
//! means: GPU results are compared with theirs.

use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use bytemuck::Pod;
use web_time::Instant;

use crate::counters::LiveCounters;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::gpu::Faults;
use crate::platform::{self, IS_BROWSER, Threads};
use crate::recording::{BatchInvariance, Recording, Step};
use crate::shaders::{Id, read_params};
use crate::tensor::{Tensor, WordCopy};

mod activation;
mod argmax;
mod attention;
mod block;
mod by_head;
pub(crate) mod cached;
mod dots;
mod embed;
mod experts;
mod grid_conv;
mod head_matmul;
mod linear;
#[cfg(feature = "lora")]
mod lora;
mod matmul_plain;
mod max_sim;
mod mol;
mod mol_parts;
mod norm;
mod panels;
mod pool;
mod probe;
mod recurrent;
mod rope;
mod sample;
mod select_top;
mod simd;
mod softmax;
mod threads;
mod whole_sequences;

use panels::Panels;
pub(crate) use panels::take_halves;
pub(crate) use simd::bytes::has_byte_dots;
pub(crate) use threads::for_each_chunk;
use threads::run_on;
#[cfg(not(target_arch = "wasm32"))]
pub use threads::set_threads;

/// Memory of a tensor, in 4-byte words.
#[derive(Debug)]
pub(crate) struct Memory {
    stored: RwLock<Stored>,
    /// Words, in the order in which they are written and read.
    len: usize,
}

#[derive(Debug)]
struct Stored {
    words: Words,
    /// The order of a matrix's weights, if its rows do not come one after the other.
    panels: Option<Panels>,
}

/// Zeros at first, that the system makes when they are first touched.
#[derive(Debug)]
enum Words {
    /// Where they begin is a cache line's beginning: a large allocation otherwise begins 16 bytes behind one, and every second
    /// load of 32 bytes takes two lines.
    Few { all: Vec<u32>, first: usize, len: usize },
    /// Pages of their own, large ones where the system has them: reading weights one after the other, a processor otherwise
    /// waits a third of its time for addresses of pages.
    #[cfg(target_os = "linux")]
    Pages(memmap2::MmapMut),
}

impl Words {
    /// Words in a cache line.
    const LINE: usize = 16;

    fn zeros(len: usize) -> Words {
        /// Bytes from which on pages are worth it. Neighbours share large ones, so that it need not be one of those.
        #[cfg(target_os = "linux")]
        const MANY: usize = 1 << 18;
        #[cfg(target_os = "linux")]
        if let Some(pages) = (4 * len >= MANY).then(|| memmap2::MmapMut::map_anon(4 * len)).and_then(Result::ok) {
            // Without large pages, small ones do.
            let _ = pages.advise(memmap2::Advice::HugePage);
            return Words::Pages(pages);
        }
        let all = vec![0; len + Words::LINE - 1];
        // Never more than the spare words, even if the offset is unknown.
        let first = all.as_ptr().align_offset(4 * Words::LINE).min(Words::LINE - 1);
        Words::Few { all, first, len }
    }
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Words::Few { all, first, len } => &all[*first..][..*len],
            #[cfg(target_os = "linux")]
            Words::Pages(pages) => bytemuck::cast_slice(pages),
        }
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u32] {
        match self {
            Words::Few { all, first, len } => &mut all[*first..][..*len],
            #[cfg(target_os = "linux")]
            Words::Pages(pages) => bytemuck::cast_slice_mut(pages),
        }
    }
}

impl Memory {
    fn zeros(len: usize) -> Memory {
        Memory { stored: RwLock::new(Stored { words: Words::zeros(len), panels: None }), len }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn write(&self, first: usize, words: &[u32]) {
        self.writable().words[first..first + words.len()].copy_from_slice(words);
    }

    pub fn read(&self, first: usize, n: usize) -> Vec<u32> {
        self.readable(None).words[first..first + n].to_vec()
    }

    /// The words in their usual order.
    fn writable(&self) -> RwLockWriteGuard<'_, Stored> {
        let mut stored = self.stored.write().unwrap_or_else(PoisonError::into_inner);
        stored.arrange(None, self.len);
        stored
    }

    /// The words in an order.
    fn readable(&self, panels: Option<Panels>) -> RwLockReadGuard<'_, Stored> {
        loop {
            let stored = self.stored.read().unwrap_or_else(PoisonError::into_inner);
            if stored.panels == panels {
                return stored;
            }
            // Another thread may want another order before this one reads.
            drop(stored);
            self.stored.write().unwrap_or_else(PoisonError::into_inner).arrange(panels, self.len);
        }
    }
}

impl Stored {
    /// Brings the words into an order. Neither is kept beside the other, as weights are most of a model's memory.
    fn arrange(&mut self, panels: Option<Panels>, len: usize) {
        if self.panels == panels {
            return;
        }
        if let Some(panels) = self.panels.take() {
            let mut rows = Words::zeros(len);
            panels.unpack(&self.words, &mut rows);
            self.words = rows;
        }
        if let Some(panels) = panels {
            let mut packed = Words::zeros(panels.len());
            panels.pack(&self.words, &mut packed);
            self.words = packed;
            self.panels = Some(panels);
        }
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

/// A kernel's call: params as the shader sees them, its overrides, weight type, operands in binding order.
pub(crate) struct Call<'a> {
    params: &'a [u8],
    constants: &'a [(&'static str, f64)],
    pub weight: Option<WeightType>,
    /// Whether activations that meet quantised weights may be rounded.
    pub rounds: bool,
    pub batch_invariance: BatchInvariance,
    /// The order of the first operand's weights, if its rows do not come one after the other.
    pub panels: Option<Panels>,
    pub operands: Vec<Operand<'a>>,
}

impl<'a> Call<'a> {
    pub fn params<P: Pod>(&self) -> P {
        read_params(self.params)
    }

    /// The value of a shader override, 0 if the recording does not set it. Overrides that kernels here read default to 0
    /// in the shader, or every recording sets them (`COMBINE`).
    pub fn constant(&self, name: &str) -> u32 {
        let found = self.constants.iter().find(|(known, _)| *known == name);
        found.map_or(0, |&(_, value)| value as u32)
    }

    /// Whether an override is set.
    pub fn is(&self, name: &str) -> bool {
        self.constant(name) != 0
    }

    /// All operands at once, so that one can be written while others are read.
    pub fn operands<const N: usize>(&mut self) -> &mut [Operand<'a>; N] {
        let n = self.operands.len();
        match (&mut self.operands[..]).try_into() {
            Ok(operands) => operands,
            Err(_) => unreachable!("a kernel takes {N} operands and its shader has {n}"),
        }
    }
}

type CpuKernel = fn(Call<'_>);

/// The CPU reference kernel of a shader.
fn cpu_kernel(kernel: Id) -> Option<CpuKernel> {
    Some(match kernel {
        Id::Add => activation::add,
        #[cfg(feature = "lora")]
        Id::AddLora => lora::add_lora,
        Id::Advance => sample::advance,
        Id::Argmax => argmax::argmax,
        Id::ArgmaxMerge => argmax::argmax_merge,
        Id::AttentionDecode => attention::attention_decode,
        Id::AttentionMerge => attention::attention_merge,
        Id::AttentionPrefill => attention::attention_prefill,
        Id::ByHead => by_head::by_head,
        Id::DeltaRule => recurrent::delta_rule,
        Id::SelectiveScan => recurrent::selective_scan,
        Id::Embed => embed::embed,
        Id::EmbedSum => embed::embed_sum,
        Id::ExpertDown => experts::expert_down,
        Id::ExpertGateUp => experts::expert_gate_up,
        Id::ExpertMatmul => experts::expert_matmul,
        Id::ExpertSum => experts::expert_sum,
        Id::ExpertTiles => experts::expert_tiles,
        Id::GateUp => linear::gate_up,
        #[cfg(feature = "lora")]
        Id::GateUpLora => lora::gate_up_lora,
        Id::Geglu => activation::geglu,
        Id::Gelu => activation::gelu,
        Id::LastRow => embed::last_row,
        Id::LayerNorm => norm::layer_norm,
        Id::LinearNorm => linear::linear_norm,
        Id::HeadMatmul => head_matmul::head_matmul,
        Id::Matmul => linear::matmul,
        Id::MatmulPlain => matmul_plain::matmul_plain,
        Id::MaskLogits => sample::mask_logits,
        Id::Matvec => linear::matvec,
        #[cfg(feature = "lora")]
        Id::MatvecLora => lora::matvec_lora,
        Id::MergeTop => select_top::merge_top,
        Id::Mol => mol::mol,
        Id::Penalize => sample::penalize,
        Id::MaxSim => max_sim::max_sim,
        Id::Pool => pool::pool,
        Id::RmsNorm => norm::rms_norm,
        Id::Rope => rope::rope,
        Id::Route => experts::route,
        Id::RopeKv => rope::rope_kv,
        Id::RopePacked => rope::rope_packed,
        Id::Candidates => sample::candidates,
        Id::Sample => sample::sample,
        Id::Scale => activation::scale,
        Id::SelectTop => select_top::select_top,
        Id::ShortConv => recurrent::short_conv,
        Id::GridConv => grid_conv::grid_conv,
        Id::Relu => activation::relu,
        Id::Clip => activation::clip,
        Id::SigmoidGate => activation::sigmoid_gate,
        Id::Silu => activation::silu,
        Id::Softmax => softmax::softmax,
        Id::SplitSum => linear::split_sum,
        Id::Swiglu => activation::swiglu,
        // The WASM module has no shaders of these.
        Id::MatmulNaive | Id::MolGate | Id::ProbeMatrix | Id::WeightedSum if IS_BROWSER => return None,
        Id::MatmulNaive => linear::matmul,
        Id::MolGate => mol_parts::mol_gate,
        Id::ProbeCopy => probe::probe_copy,
        Id::ProbeFma => probe::probe_fma,
        Id::ProbeMatrix => probe::probe_matrix,
        Id::ProbeRead => probe::probe_read,
        Id::ProbeReduce => probe::probe_reduce,
        Id::WeightedSum => mol_parts::weighted_sum,
        // In half precision, which no recording for the CPU has.
        Id::AttentionHalf | Id::HalfRows | Id::MatmulHalf => return None,
    })
}

/// Number of threads that kernels use.
pub(crate) fn threads() -> usize {
    platform::n_pool_threads()
}

#[derive(Debug)]
pub(crate) struct Cpu {
    /// Recordings run one at a time, as on a queue. Whoever has the lock waits for `threads` alone, which never need it.
    running: Mutex<()>,
    threads: Threads,
    counters: Arc<LiveCounters>,
    faults: Faults,
}

impl Cpu {
    pub fn new(counters: Arc<LiveCounters>, faults: Faults) -> Self {
        Cpu { running: Mutex::new(()), threads: Threads::new(), counters, faults }
    }

    pub fn allocate(&self, size_bytes: u64) -> Memory {
        self.counters.buffers_created.add(1);
        self.counters.bytes_allocated.add(size_bytes);
        Memory::zeros(size_bytes as usize / 4)
    }

    pub fn write(&self, tensor: &Tensor, first: usize, words: &[u32]) -> Result<(), Error> {
        tensor.memory::<Memory>()?.write(first, words);
        Ok(())
    }

    /// Reads some words of a tensor.
    pub fn read(&self, tensor: &Tensor, words: Range<usize>) -> Result<Vec<u32>, Error> {
        Ok(tensor.memory::<Memory>()?.read(words.start, words.len()))
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
        pairs.iter().try_for_each(|(from, to)| self.write(to, 0, &self.read(from, from.all_words())?))
    }

    /// The same of some words of each.
    pub fn copy_words(&self, copies: &[WordCopy]) -> Result<(), Error> {
        copies.iter().try_for_each(|WordCopy { from: (from, from_first), to: (to, to_first), n_words }| {
            let words = from.memory::<Memory>()?.read(*from_first, *n_words);
            self.write(to, *to_first, &words)
        })
    }

    /// Finds the kernels of a recording's steps and their operands' places in memory.
    ///
    /// # Errors
    /// [`Error::Operand`] if a kernel has no CPU reference.
    pub fn prepare(&self, steps: &Arc<[Step]>) -> Result<PreparedSteps, Error> {
        let prepared = steps.iter().map(PreparedStep::new).collect::<Result<_, _>>()?;
        Ok(PreparedSteps(Arc::new((steps.clone(), prepared))))
    }

    /// Runs some of the steps. Where `rounds` says so, activations are rounded to bytes where they meet quantised weights.
    pub fn run(&self, recording: &Recording, which: Range<usize>, rounds: bool) -> Result<(), Error> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (own, n_steps, faults) = (PreparedSteps::of(recording)?, which.len(), self.faults.clone());
        let run_all = move || {
            faults.run();
            own.iter(which).try_for_each(|(step, prepared)| prepared.run(step, rounds))
        };
        run_on(&self.threads, run_all)??;
        self.counters.dispatches.add(n_steps as u64);
        self.counters.submits.add(1);
        Ok(())
    }

    pub fn run_profiled(&self, recording: &Recording, rounds: bool) -> Result<Vec<Duration>, Error> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let (own, n_steps) = (PreparedSteps::of(recording)?, recording.n_dispatches());
        let timed = move |(step, prepared): (&Step, &PreparedStep)| {
            let start = Instant::now();
            prepared.run(step, rounds).map(|()| start.elapsed())
        };
        let times = run_on(&self.threads, move || own.iter(0..n_steps).map(timed).collect::<Result<_, _>>())??;
        self.counters.dispatches.add(n_steps as u64);
        self.counters.submits.add(1);
        Ok(times)
    }
}

/// A recording's steps, shared with the threads that run them, and what [`Cpu::prepare`] made of each.
#[derive(Clone)]
pub(crate) struct PreparedSteps(Arc<(Arc<[Step]>, Vec<PreparedStep>)>);

impl PreparedSteps {
    fn of(recording: &Recording) -> Result<PreparedSteps, Error> {
        let prepared: Option<&PreparedSteps> = recording.prepared.get();
        prepared.cloned().ok_or_else(|| Error::Operand {
            kernel: "device",
            operand: "recording",
            expected: "a recording of this device".into(),
            found: "one of another device".into(),
        })
    }

    fn iter(&self, which: Range<usize>) -> impl Iterator<Item = (&Step, &PreparedStep)> {
        let (steps, prepared) = &*self.0;
        steps[which.clone()].iter().zip(&prepared[which])
    }
}

/// What a step needs beside what was recorded.
struct PreparedStep {
    kernel: CpuKernel,
    /// The first operand in each memory: several operands may read the same, which is then locked once. A written one
    /// has no other reader, as the recorder checked.
    memories: Vec<usize>,
    /// Which memory each operand is in, and how many words it has.
    places: Vec<(usize, usize)>,
    /// The order of the first operand's weights.
    panels: Option<Panels>,
}

enum Guard<'a> {
    Read(RwLockReadGuard<'a, Stored>),
    Write(RwLockWriteGuard<'a, Stored>),
}

impl PreparedStep {
    fn new(step: &Step) -> Result<PreparedStep, Error> {
        let kernel = cpu_kernel(step.kernel.id).ok_or_else(|| Error::Operand {
            kernel: step.kernel.name,
            operand: "device",
            expected: "a kernel with a CPU reference".into(),
            found: "one without".into(),
        })?;
        let (mut memories, mut places) = (Vec::new(), Vec::with_capacity(step.operands.len()));
        for (i, (operand, binding)) in step.operands.iter().zip(step.kernel.bindings).enumerate() {
            let memory: &Memory = operand.memory()?;
            let is_same = |&other: &usize| step.operands[other].memory().is_ok_and(|other| std::ptr::eq(other, memory));
            let place = memories.iter().position(is_same).unwrap_or_else(|| {
                memories.push(i);
                memories.len() - 1
            });
            // Inputs are rounded up to 16 bytes for kernels that read vectors. Outputs end with the tensor, for kernels
            // that derive the number of rows from the length.
            let len_bytes = operand.len() * operand.dtype().size_bytes() as usize;
            let len = if binding.writes { len_bytes.div_ceil(4) } else { operand.size_bytes() as usize / 4 };
            places.push((place, len));
        }
        // Only a matrix that is no other operand is in panels.
        let panels = Panels::wanted(step).filter(|_| places.iter().filter(|(place, _)| *place == 0).count() == 1);
        Ok(PreparedStep { kernel, memories, places, panels })
    }

    fn run(&self, step: &Step, rounds: bool) -> Result<(), Error> {
        let &PreparedStep { kernel, ref memories, ref places, panels } = self;
        let lock = |&first: &usize| {
            let memory: &Memory = step.operands[first].memory()?;
            Ok(match step.kernel.bindings[first].writes {
                true => Guard::Write(memory.writable()),
                false => Guard::Read(memory.readable(panels.filter(|_| first == 0))),
            })
        };
        let mut guards = memories.iter().map(lock).collect::<Result<Vec<Guard>, Error>>()?;
        let mut operands: Vec<Operand> = places.iter().map(|_| Operand::Read(&[])).collect();
        for (i, guard) in guards.iter_mut().enumerate() {
            let mut own = operands.iter_mut().zip(places).filter(|(_, (place, _))| *place == i);
            match guard {
                Guard::Write(stored) => {
                    if let Some((operand, &(_, len))) = own.next() {
                        *operand = Operand::Write(&mut stored.words[..len]);
                    }
                }
                Guard::Read(stored) => own.for_each(|(operand, &(_, len))| {
                    // Panels are as many as they are.
                    let words: &[u32] = &stored.words;
                    *operand = Operand::Read(if panels.is_some() && i == 0 { words } else { &words[..len] });
                }),
            }
        }
        let Step { params, constants, variant, batch_invariance, .. } = step;
        let (weight, batch_invariance) = (variant.weight, *batch_invariance);
        kernel(Call { params, constants, weight, rounds, batch_invariance, panels, operands });
        Ok(())
    }
}
