//! Compiles the shaders with NVIDIA's compiler, which needs no GPU either.
//!
//! This is NVRTC rather than the Vulkan driver's compiler, but with the same code generator for the same instructions.
//! Its input is the SPIR-V that wgpu hands to the driver, translated to CUDA C++ instruction by instruction (`cuda.rs`).

mod cuda;
mod sass;
mod tools;

use std::collections::HashSet;
use std::fmt::Write as _;

use tilewright::{Error, Tier};

use crate::cases::{self, Case, Machine};
use crate::listing::Listing;
use crate::{linux, spirv};

pub use sass::Pipes;
pub use tools::Tools;

/// A100; H100 and H200; GeForce RTX 50.
pub const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90", "sm_120"];

/// Matrix products are not translated.
pub const MACHINE: Machine = Machine { subgroup: [32, 32], has_matrices: false, converts_slowly: true };

/// The compiler's report about one shader.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub registers: u32,
    /// Bytes of local memory for arrays and for registers that were too many.
    pub stack_bytes: u32,
    pub spilled_bytes: u32,
    pub workgroup_bytes: u32,
    pub listing: Listing<Pipes>,
    pub text: String,
}

pub type Outcome = (Case, Result<Compiled, String>);

/// The translation of a case.
pub fn source(case: &Case) -> Result<String, String> {
    cuda::translate(&spirv::compile(&case.source, case.kernel, &case.constants, case.has_matrices())?)
}

/// Compiles a case for an architecture.
pub fn compile(tools: &Tools, case: &Case, architecture: &str) -> Result<Compiled, String> {
    let tools::Answer { log, listing } = tools.compile(&source(case)?, architecture)?;
    // `ptxas info : Used 40 registers, used 1 barriers, 2048 bytes smem`; numbers come before their names.
    let words: Vec<&str> = log.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty()).collect();
    let number = |name: &[&str]| {
        let at = words.windows(name.len()).position(|found| found == name)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    Ok(Compiled {
        registers: number(&["registers"]).ok_or_else(|| format!("no registers in `{log}`"))?,
        stack_bytes: number(&["bytes", "stack", "frame"]).unwrap_or_default(),
        spilled_bytes: number(&["bytes", "spill", "stores"]).unwrap_or_default(),
        workgroup_bytes: number(&["bytes", "smem"]).unwrap_or_default(),
        listing: Listing::parse(&listing),
        text: listing,
    })
}

/// Title of the cases that show what conversions cost.
const UNPACKING: &str = "Loops that unpack weights";

/// The passes of some models without matrices, and `matvec` of all weight types, with conversions and by bits.
pub fn usual() -> Result<Vec<Case>, Error> {
    let mut cases = cases::passes(&MACHINE)?;
    // Many pipelines occur in several passes.
    let mut known = HashSet::new();
    cases.retain(|case| case.tier != Tier::F16 && known.insert(case.label.clone()));
    let by_conversions = cases::variants(&Machine { converts_slowly: false, ..MACHINE }).into_iter().filter(|case| {
        let is_one = case.columns() == 1 || case.columns() == 8 && case.is_sampled();
        case.kernel == "matvec" && case.tier == Tier::Subgroups && case.constant("NORM").is_none() && is_one
    });
    for mut case in by_conversions {
        case.group = UNPACKING.into();
        let is_double = case.has_bytes();
        cases.push(case.clone());
        if is_double {
            cases.push(case.by_bits());
        }
    }
    Ok(cases)
}

/// Tables in Markdown, one for each group.
pub fn tables(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for group in outcomes.chunk_by(|a, b| a.0.group == b.0.group) {
        let _ = writeln!(text, "\n## {}\n", group[0].0.group);
        text.push_str(
            "| variant | registers | spilled bytes | local memory | workgroup memory | instructions | conversions | hot loop | \
             conversions in it | XU | ALU | FMA | half | LSU | loads of 16 B, of fewer | per weight |\n\
             |---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
        );
        for (case, compiled) in group {
            let cells = match compiled {
                Ok(compiled) => row(case, compiled),
                Err(error) => vec![error.lines().next().unwrap_or_default().to_string()],
            };
            let _ = writeln!(text, "| {} | {} |", case.label, cells.join(" | "));
        }
    }
    text
}

fn row(case: &Case, compiled: &Compiled) -> Vec<String> {
    let hot = compiled.listing.hot().map(|l| l.counts);
    let feeding = compiled.listing.feeding().map_or(compiled.listing.total, |l| l.counts);
    let of_hot = |count: fn(&Pipes) -> u32| hot.as_ref().map_or(String::new(), |hot| count(hot).to_string());
    let per_weight = |hot: Pipes| Some(format!("{:.2}", f64::from(hot.all) / f64::from(case.weights_per_round()?)));
    vec![
        compiled.registers.to_string(),
        compiled.spilled_bytes.to_string(),
        compiled.stack_bytes.to_string(),
        compiled.workgroup_bytes.to_string(),
        compiled.listing.total.all.to_string(),
        compiled.listing.total.conversions.to_string(),
        of_hot(|hot| hot.all),
        of_hot(|hot| hot.conversions),
        of_hot(|hot| hot.special),
        of_hot(|hot| hot.integer),
        of_hot(|hot| hot.fma),
        of_hot(|hot| hot.half),
        of_hot(|hot| hot.memory),
        format!("{}, {}", feeding.wide_loads, feeding.narrow_loads),
        hot.and_then(per_weight).unwrap_or_default(),
    ]
}

/// Outcomes in the order of the cases.
pub fn compile_all(tools: &Tools, cases: Vec<Case>, architecture: &str) -> Vec<Outcome> {
    linux::each(cases, || (), |(), case| compile(tools, case, architecture))
}
