//! Compiles the shaders for real GPUs without such a GPU: Mesa's RADV compiles for any AMD GPU and reports registers,
//! waves and instructions.
//!
//! ```text
//! cargo bench --profile dev --bench isa                   tables of all kernels and, but for matvec, some weight types
//! cargo bench --profile dev --bench isa -- matvec.Q4      of variants whose label contains that
//! cargo bench --profile dev --bench isa -- --help
//! ```
//!
//! Under `cargo test` it checks limits on a sample of the variants, or on all if `TILEWRIGHT_FULL` is set.

#[cfg(target_os = "linux")]
mod cases;
#[cfg(target_os = "linux")]
mod check;
#[cfg(target_os = "linux")]
mod compiler;
#[cfg(target_os = "linux")]
mod listing;
#[cfg(target_os = "linux")]
mod radv;
#[cfg(target_os = "linux")]
mod report;
#[cfg(target_os = "linux")]
mod spirv;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("skipped step: isa: RADV needs Linux");
}

#[cfg(target_os = "linux")]
use linux::write;

#[cfg(target_os = "linux")]
mod linux {
    use std::path::Path;
    use std::process::ExitCode;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::cases::{self, Case};
    use crate::compiler::{Compiler, Gpu, WORKER};
    use crate::report::Outcome;
    use crate::{check, radv, report, spirv};

    const HELP: &str = "\
Usage: cargo bench --profile dev --bench isa -- [OPTIONS] [PART OF A LABEL]..

Compiles shader variants for absent AMD GPUs and prints a table per kernel. The default selection is that of
benches/record/isa: a few weight types, but all types of matvec.

  --gpu NAME    navi21 or navi31 (default: both)
  --isa         print the instructions of each variant instead
  --record      write the tables to benches/record/isa/NAME.md, below its other text
  --help        this text

navi21 (RDNA 2) needs the RADV of Debian 12, navi31 (RDNA 3) one that scripts/mesa-backport fetches.";

    struct Options {
        gpus: Vec<String>,
        isa: bool,
        record: bool,
        parts: Vec<String>,
    }

    pub fn main() -> ExitCode {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let is = |wanted: &str| arguments.iter().any(|argument| argument == wanted);
        let outcome = if is(WORKER) {
            radv::serve().map_err(|e| e.to_string())
        } else if is("--help") {
            println!("{HELP}");
            Ok(())
        } else if is("--bench") {
            options(&arguments).and_then(|options| tell(&options))
        } else {
            return check::main(&arguments);
        };
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                eprintln!("error: {message}");
                ExitCode::FAILURE
            }
        }
    }

    fn options(arguments: &[String]) -> Result<Options, String> {
        let mut options = Options { gpus: Vec::new(), isa: false, record: false, parts: Vec::new() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--bench" => {}
                "--isa" => options.isa = true,
                "--record" => options.record = true,
                "--gpu" => options.gpus.push(rest.next().ok_or("--gpu wants a name")?.clone()),
                other if other.starts_with("--") => return Err(format!("unknown option `{other}`\n\n{HELP}")),
                part => options.parts.push(part.to_string()),
            }
        }
        if options.gpus.is_empty() {
            options.gpus = ["navi21", "navi31"].map(str::to_string).to_vec();
        }
        Ok(options)
    }

    fn tell(options: &Options) -> Result<(), String> {
        for name in &options.gpus {
            let gpu = match name.as_str() {
                "navi21" => Gpu::navi21()?,
                "navi31" => Gpu::navi31()?,
                other => return Err(format!("unknown GPU `{other}`, expected navi21 or navi31")),
            };
            let (driver, has_matrices) = Compiler::new(gpu.clone()).about()?;
            let mut cases = cases::passes(has_matrices).map_err(|e| e.to_string())?;
            cases.extend(cases::variants());
            let is_usual = |case: &Case| case.is_sampled() || case.kernel == "matvec";
            let wanted = |case: &Case| match options.parts.as_slice() {
                [] => is_usual(case),
                parts => parts.iter().any(|part| case.label.contains(part.as_str())),
            };
            cases.retain(|case| wanted(case) && (has_matrices || !case.has_matrices()));
            let outcomes = compile_all(&gpu, cases);
            if options.isa {
                for (case, compiled) in &outcomes {
                    println!("; {} on {name}", case.label);
                    println!(
                        "{}",
                        compiled.as_ref().map_or_else(|error| error.as_str(), |compiled| compiled.isa.as_str())
                    );
                }
                continue;
            }
            let tables = report::tables(&outcomes);
            println!("# {name}, {driver}\n{tables}");
            if options.record {
                record(name, &driver, &tables)?;
            }
        }
        Ok(())
    }

    /// Outcomes in the order of the cases, compiled by one process per processor.
    pub fn compile_all(gpu: &Gpu, cases: Vec<Case>) -> Vec<Outcome> {
        let n_workers = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..n_workers.min(cases.len()) {
                scope.spawn(|| {
                    let mut compiler = Compiler::new(gpu.clone());
                    while let Some((at, case)) =
                        Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, cases.get(at)?)))
                    {
                        let words = spirv::compile(&case.source, case.kernel, &case.constants, case.has_matrices());
                        let compiled = words.and_then(|words| compiler.compile(case.kernel, &words));
                        outcomes.lock().unwrap_or_else(|e| e.into_inner()).push((at, compiled));
                    }
                });
            }
        });
        let mut outcomes = outcomes.into_inner().unwrap_or_else(|e| e.into_inner());
        outcomes.sort_by_key(|&(at, _)| at);
        cases.into_iter().zip(outcomes).map(|(case, (_, compiled))| (case, compiled)).collect()
    }

    /// The line of a record above the tables.
    const MARK: &str = "# Tables";

    fn record(name: &str, driver: &str, tables: &str) -> Result<(), String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/record/isa").join(format!("{name}.md"));
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let words = text.split(MARK).next().unwrap_or_default();
        write(&path, &format!("{words}{MARK}\n\n{driver}.\n{tables}"))
    }

    pub fn write(path: &Path, text: &str) -> Result<(), String> {
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
    }
}
