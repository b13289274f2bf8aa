//! Parses ISA listings: loops, and instructions by kind, those of AMD GPUs here and those of NVIDIA's in `ptx/sass.rs`.

use std::collections::HashMap;
use std::ops::AddAssign;

/// Instruction counts by kind, and what a listing of them looks like.
pub trait Tally: Copy + Default + AddAssign {
    /// Counts of a line, none if it is no instruction.
    fn of(line: &str) -> Self;
    /// The label that a line is.
    fn label(line: &str) -> Option<&str>;
    /// The label that a line jumps to.
    fn jump(line: &str) -> Option<&str>;
    /// All instructions.
    fn all(&self) -> u32;
    /// Arithmetic that a loop is hot by.
    fn work(&self) -> u32;
    /// Matrix products.
    fn matrix(&self) -> u32;
    /// Global loads.
    fn loads(&self) -> u32;
}

/// Instruction counts in a range of a listing of an AMD GPU. Hints to the hardware (waits, clauses, delays) are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All instructions.
    pub all: u32,
    /// Vector multiply-adds and other vector arithmetic.
    pub math: u32,
    pub valu: u32,
    /// Matrix products.
    pub matrix: u32,
    pub salu: u32,
    pub smem: u32,
    /// Global loads: of 16 bytes, and of fewer.
    pub wide_loads: u32,
    pub narrow_loads: u32,
    /// Bytes of both.
    pub load_bytes: u32,
    pub stores: u32,
    /// Loads and stores of workgroup memory, and their bytes.
    pub lds: u32,
    pub lds_bytes: u32,
    pub barriers: u32,
    /// Indirect register accesses.
    pub indirect: u32,
    /// Loads and stores of scratch memory.
    pub scratch: u32,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        let Counts { all, math, valu, matrix, salu, smem, wide_loads, narrow_loads, load_bytes, stores, .. } = other;
        let Counts { lds, lds_bytes, barriers, indirect, scratch, .. } = other;
        for (mine, others) in [
            (&mut self.all, all),
            (&mut self.math, math),
            (&mut self.valu, valu),
            (&mut self.matrix, matrix),
            (&mut self.salu, salu),
            (&mut self.smem, smem),
            (&mut self.wide_loads, wide_loads),
            (&mut self.narrow_loads, narrow_loads),
            (&mut self.load_bytes, load_bytes),
            (&mut self.stores, stores),
            (&mut self.lds, lds),
            (&mut self.lds_bytes, lds_bytes),
            (&mut self.barriers, barriers),
            (&mut self.indirect, indirect),
            (&mut self.scratch, scratch),
        ] {
            *mine += others;
        }
    }
}

/// A loop: from the block jumped back to, up to the jump.
#[derive(Clone, Copy, Debug)]
pub struct Loop<T> {
    pub counts: T,
    lines: [usize; 2],
}

impl<T> Loop<T> {
    fn contains(&self, other: &Loop<T>) -> bool {
        self.lines != other.lines && self.lines[0] <= other.lines[0] && other.lines[1] <= self.lines[1]
    }
}

#[derive(Clone, Debug)]
pub struct Listing<T> {
    pub total: T,
    /// By position of their ends.
    pub loops: Vec<Loop<T>>,
}

impl<T: Tally> Listing<T> {
    pub fn parse(text: &str) -> Listing<T> {
        let lines: Vec<&str> = text.lines().map(|line| line.split(';').next().unwrap_or_default().trim()).collect();
        let labels: HashMap<&str, usize> =
            lines.iter().enumerate().filter_map(|(at, line)| Some((T::label(line)?, at))).collect();
        let mut spans: HashMap<usize, usize> = HashMap::new();
        for (at, line) in lines.iter().enumerate() {
            if let Some(&target) = T::jump(line).and_then(|target| labels.get(target)).filter(|&&target| target <= at) {
                // Several jumps back to one block form one loop.
                spans.insert(target, at);
            }
        }
        let count = |span: [usize; 2]| {
            let mut counts = T::default();
            lines[span[0]..=span[1]].iter().for_each(|line| counts += T::of(line));
            counts
        };
        let mut loops: Vec<Loop<T>> =
            spans.into_iter().map(|(start, end)| Loop { counts: count([start, end]), lines: [start, end] }).collect();
        // An endless loop of nothing fills up the last line of NVIDIA's instructions.
        loops.retain(|l| l.counts.all() > 1);
        loops.sort_by_key(|l| (l.lines[1], std::cmp::Reverse(l.lines[0])));
        let total = if lines.is_empty() { T::default() } else { count([0, lines.len() - 1]) };
        Listing { total, loops }
    }

    /// The hot loop: the shortest loop with matrix products, or else the one with most arithmetic, if it runs four
    /// rounds per round of the loop around it.
    pub fn hot(&self) -> Option<&Loop<T>> {
        let with_matrices = self.loops.iter().filter(|l| l.counts.matrix() > 0).min_by_key(|l| l.counts.all());
        let depth = |l: &Loop<T>| self.loops.iter().filter(|other| other.contains(l)).count();
        let work = |l: &Loop<T>| u64::from(l.counts.work()) << (2 * depth(l)).min(32);
        with_matrices.or_else(|| self.loops.iter().max_by_key(|l| (work(l), std::cmp::Reverse(l.lines[0]))))
    }

    /// The loop around the hot one that loads from memory, or the hot one if that does.
    pub fn feeding(&self) -> Option<&Loop<T>> {
        let hot = self.hot()?;
        let loads = |l: &&Loop<T>| l.counts.loads() > 0;
        let around = self.loops.iter().filter(|l| l.contains(hot)).filter(loads);
        std::iter::once(hot).filter(loads).chain(around).min_by_key(|l| l.lines[1] - l.lines[0])
    }
}

impl Tally for Counts {
    fn of(line: &str) -> Counts {
        instruction(line)
    }

    fn label(line: &str) -> Option<&str> {
        line.strip_suffix(':').filter(|label| label.starts_with("BB"))
    }

    fn jump(line: &str) -> Option<&str> {
        let mut words = line.split_whitespace();
        let is_branch = words.next().is_some_and(|w| w == "s_branch" || w.starts_with("s_cbranch"));
        words.next().filter(|_| is_branch)
    }

    fn all(&self) -> u32 {
        self.all
    }

    fn work(&self) -> u32 {
        self.math
    }

    fn matrix(&self) -> u32 {
        self.matrix
    }

    fn loads(&self) -> u32 {
        self.wide_loads + self.narrow_loads
    }
}

/// Parses a line of a listing, if it is an instruction.
fn instruction(line: &str) -> Counts {
    let name = line.split_whitespace().next().unwrap_or_default();
    let mut counts = Counts { all: 1, ..Counts::default() };
    let is_hint =
        ["s_waitcnt", "s_clause", "s_delay_alu", "s_nop", "s_code_end", "s_inst_prefetch", "s_set_inst_prefetch"];
    if !name.contains('_') || is_hint.iter().any(|hint| name.starts_with(hint)) {
        return Counts::default();
    }
    if name.starts_with("v_movrel") || name.starts_with("s_movrel") || name.starts_with("s_set_gpr_idx") {
        counts.indirect = 1;
    }
    if name.starts_with("v_wmma") {
        counts.matrix = 1;
    } else if name.starts_with("v_") {
        let math = ["v_fma", "v_pk_fma", "v_dual_fma", "v_mad", "v_dot"];
        let is_math = |name: &str| math.iter().any(|math| name.starts_with(math));
        // `::` separates two operations in one instruction.
        let second = line.split("::").nth(1).and_then(|half| half.split_whitespace().next());
        counts.math = u32::from(is_math(name)) + u32::from(second.is_some_and(is_math));
        counts.valu = u32::from(counts.math == 0);
    } else if name.starts_with("s_load") || name.starts_with("s_buffer_load") {
        counts.smem = 1;
    } else if name.starts_with("s_barrier") {
        counts.barriers = 1;
    } else if name.starts_with("s_") {
        counts.salu = 1;
    } else if name.starts_with("scratch_") {
        counts.scratch = 1;
    } else if name.starts_with("ds_") {
        counts.lds = 1;
        let pair = if name.contains("read2") || name.contains("write2") || name.contains("2addr") { 2 } else { 1 };
        counts.lds_bytes = pair * width(name);
    } else if name.contains("_load_") {
        counts.load_bytes = width(name);
        if counts.load_bytes >= 16 {
            counts.wide_loads = 1;
        } else {
            counts.narrow_loads = 1;
        }
    } else if name.contains("_store_") || name.contains("_atomic_") {
        counts.stores = 1;
    }
    counts
}

/// Bytes that a memory instruction moves, by its name: LLVM's names up to RDNA 2, and since.
fn width(name: &str) -> u32 {
    let widths = [
        ("dwordx4", 16),
        ("dwordx3", 12),
        ("dwordx2", 8),
        ("dword", 4),
        ("b128", 16),
        ("b96", 12),
        ("b64", 8),
        ("b32", 4),
        ("16", 2),
        ("short", 2),
        ("8", 1),
        ("byte", 1),
    ];
    widths.iter().find(|(suffix, _)| name.contains(suffix)).map_or(4, |&(_, bytes)| bytes)
}
