//! Instructions of NVIDIA's GPUs by the pipe that executes them.

use std::ops::AddAssign;

use crate::listing::Tally;

/// Counts in a range of a listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pipes {
    pub all: u32,
    /// Integers to floats or back, and between sizes of floats, whatever the pipe.
    pub conversions: u32,
    /// Conversions, reciprocals, exponentials: a sixteenth of a warp and clock in each quarter of a multiprocessor, where
    /// others have a half or a whole.
    pub special: u32,
    /// Integers, logic, comparisons, selections.
    pub integer: u32,
    /// Sums and products of f32, and products of integers.
    pub fma: u32,
    /// Sums and products of f16.
    pub half: u32,
    pub tensor: u32,
    /// Loads, stores and shuffles.
    pub memory: u32,
    /// What a warp does once.
    pub uniform: u32,
    pub control: u32,
    /// Global loads of 16 bytes, and of fewer.
    pub wide_loads: u32,
    pub narrow_loads: u32,
    /// Loads and stores of local memory.
    pub local: u32,
}

impl AddAssign for Pipes {
    fn add_assign(&mut self, other: Pipes) {
        for (mine, others) in [
            (&mut self.all, other.all),
            (&mut self.conversions, other.conversions),
            (&mut self.special, other.special),
            (&mut self.integer, other.integer),
            (&mut self.fma, other.fma),
            (&mut self.half, other.half),
            (&mut self.tensor, other.tensor),
            (&mut self.memory, other.memory),
            (&mut self.uniform, other.uniform),
            (&mut self.control, other.control),
            (&mut self.wide_loads, other.wide_loads),
            (&mut self.narrow_loads, other.narrow_loads),
            (&mut self.local, other.local),
        ] {
            *mine += others;
        }
    }
}

impl Tally for Pipes {
    fn of(line: &str) -> Pipes {
        let Some(instruction) = instruction(line) else { return Pipes::default() };
        let mut counts = Pipes { all: 1, ..Pipes::default() };
        let mut parts = instruction.split('.');
        let name = parts.next().unwrap_or_default();
        let is_wide = instruction.split('.').any(|part| part == "128");
        match name {
            "NOP" => return Pipes::default(),
            "MUFU" | "I2F" | "F2I" | "F2F" | "I2I" | "FRND" | "POPC" | "FLO" | "BREV" => counts.special = 1,
            "FADD" | "FMUL" | "FFMA" | "FADD2" | "FMUL2" | "FFMA2" | "FFMA32I" | "FMUL32I" | "FADD32I" | "IMAD"
            | "IMUL" | "FSWZADD" | "IDP" => counts.fma = 1,
            "HADD2" | "HMUL2" | "HFMA2" | "HMNMX2" | "HSETP2" | "HSET2" => counts.half = 1,
            "HMMA" | "IMMA" | "BMMA" | "DMMA" | "QMMA" | "OMMA" => counts.tensor = 1,
            "BRA" | "BRX" | "JMP" | "EXIT" | "RET" | "CALL" | "BAR" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC"
            | "YIELD" | "DEPBAR" | "MEMBAR" | "ERRBAR" | "CCTL" | "BMOV" | "KILL" | "NANOSLEEP" | "ACQBULK"
            | "PREEXIT" => counts.control = 1,
            "LDG" | "LD" => {
                counts.memory = 1;
                counts.wide_loads = u32::from(is_wide);
                counts.narrow_loads = u32::from(!is_wide);
            }
            "LDL" | "STL" => (counts.memory, counts.local) = (1, 1),
            "STG" | "ST" | "LDS" | "STS" | "LDSM" | "LDC" | "SHFL" | "ATOM" | "ATOMG" | "ATOMS" | "RED" | "S2R"
            | "STSM" | "LDGSTS" | "REDUX" => counts.memory = 1,
            "S2UR" | "R2UR" | "CS2R" => counts.uniform = 1,
            _ if name.starts_with('U') => counts.uniform = 1,
            _ => counts.integer = 1,
        }
        // Widening an f16 is a sum with nothing: no conversion that costs more.
        counts.conversions = u32::from(matches!(name, "I2F" | "I2FP" | "F2I" | "F2IP" | "F2F" | "I2I" | "I2IP"));
        counts
    }

    fn label(line: &str) -> Option<&str> {
        line.strip_suffix(':').filter(|label| label.starts_with(".L"))
    }

    fn jump(line: &str) -> Option<&str> {
        let is_jump = instruction(line).is_some_and(|i| i.split('.').next() == Some("BRA"));
        line.split_once("`(").and_then(|(_, rest)| rest.split(')').next()).filter(|_| is_jump)
    }

    fn work(&self) -> u32 {
        self.fma
    }

    fn matrix(&self) -> u32 {
        self.tensor
    }

    fn all(&self) -> u32 {
        self.all
    }

    fn loads(&self) -> u32 {
        self.wide_loads + self.narrow_loads
    }
}

/// The instruction of a line such as `/*01d0*/ @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;`, with its suffixes.
fn instruction(line: &str) -> Option<&str> {
    let (_, text) = line.strip_prefix("/*")?.split_once("*/")?;
    text.split_whitespace().find(|word| !word.starts_with('@') && *word != "{")
}
