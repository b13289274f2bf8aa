//! Compiles the shaders for real GPUs without such a GPU: Mesa's RADV compiles for any AMD GPU and reports registers,
//! waves and instructions; NVIDIA's compiler does so for NVIDIA's GPUs. With `--driver system`, the driver of this
//! machine's GPU reports instead.
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
mod ptx;
#[cfg(target_os = "linux")]
mod report;
#[cfg(target_os = "linux")]
mod spirv;
#[cfg(target_os = "linux")]
mod vulkan;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("skipped step: isa: its compilers need Linux");
}

#[cfg(target_os = "linux")]
use linux::write;

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::{HashMap, HashSet};
    use std::path::Path;
    use std::process::ExitCode;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::cases::{self, Case, Machine};
    use crate::compiler::{About, Compiler, Gpu, NOT_ROBUST, WORKER};
    use crate::ptx::{self, Tools};
    use crate::report::Outcome;
    use crate::{check, report, spirv, vulkan};

    const HELP: &str = "\
Usage: cargo bench --profile dev --bench isa -- [OPTIONS] [PART OF A LABEL]..

Compiles shader variants and prints a table per kernel: for absent AMD GPUs, for absent NVIDIA GPUs, or with the driver
of this machine. The default selection is that of benches/record/isa: for AMD a few weight types, but all types of
matvec; for NVIDIA the passes of some models, and the loops that unpack weights, with conversions and by bits.

  --gpu NAME        navi21, navi31, sm_80, sm_90 or sm_120, repeatable (default: navi21 and navi31)
  --driver system   this machine's Vulkan driver instead: its statistics, by its names
  --robustness R    with --driver: `on`, as wgpu asks for, `off`, or `both`, next to each other (default: on)
  --isa             print the instructions of each variant instead
  --record          write the tables to benches/record/isa/NAME.md, below its other text
  --help            this text

navi21 (RDNA 2) needs the RADV of Debian 12, navi31 (RDNA 3) one that scripts/mesa-backport fetches. sm_80 (A100), sm_90
(H100) and sm_120 (GeForce RTX 50) need the compiler that scripts/cuda-compiler fetches; it has no matrix products here.
A driver needs VK_KHR_pipeline_executable_properties.";

    #[derive(Default)]
    struct Options {
        gpus: Vec<String>,
        is_system: bool,
        /// With checks against accesses past buffers, without, or both.
        robustness: Vec<bool>,
        isa: bool,
        record: bool,
        parts: Vec<String>,
    }

    pub fn main() -> ExitCode {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let is = |wanted: &str| arguments.iter().any(|argument| argument == wanted);
        let outcome = if is(WORKER) {
            vulkan::serve(!is(NOT_ROBUST)).map_err(|e| e.to_string())
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
        let mut options = Options::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--bench" => {}
                "--isa" => options.isa = true,
                "--record" => options.record = true,
                "--gpu" => options.gpus.push(rest.next().ok_or("--gpu wants a name")?.clone()),
                "--driver" => match rest.next().map(String::as_str) {
                    Some("system") => options.is_system = true,
                    _ => return Err("--driver wants `system`".into()),
                },
                "--robustness" => {
                    options.robustness = match rest.next().map(String::as_str) {
                        Some("on") => vec![true],
                        Some("off") => vec![false],
                        Some("both") => vec![true, false],
                        _ => return Err("--robustness wants `on`, `off` or `both`".into()),
                    }
                }
                other if other.starts_with("--") => return Err(format!("unknown option `{other}`\n\n{HELP}")),
                part => options.parts.push(part.to_string()),
            }
        }
        match (options.is_system, options.gpus.is_empty(), options.robustness.is_empty()) {
            (true, false, _) => return Err("--driver system compiles for no other --gpu".into()),
            (true, true, true) => options.robustness = vec![true],
            (false, _, false) => return Err("--robustness is for --driver system".into()),
            _ => {}
        }
        if options.is_system && options.record {
            return Err("--record is for the GPUs of benches/record/isa".into());
        }
        if options.gpus.is_empty() {
            options.gpus = ["navi21", "navi31"].map(str::to_string).to_vec();
        }
        Ok(options)
    }

    fn tell(options: &Options) -> Result<(), String> {
        if options.is_system {
            return tell_system(options);
        }
        for name in &options.gpus {
            let gpu = match name.as_str() {
                "navi21" => Gpu::navi21()?,
                "navi31" => Gpu::navi31()?,
                name if ptx::ARCHITECTURES.contains(&name) => {
                    tell_nvidia(options, name)?;
                    continue;
                }
                other => return Err(format!("unknown GPU `{other}`, expected navi21, navi31, sm_80, sm_90 or sm_120")),
            };
            let About { driver, machine, .. } = Compiler::new(gpu.clone()).about()?;
            let outcomes = compile_all(&gpu, wanted(options, &machine)?);
            if options.isa {
                print_instructions(name, &outcomes);
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

    /// The cases whose labels the user names, or the usual ones.
    fn wanted(options: &Options, machine: &Machine) -> Result<Vec<Case>, String> {
        let mut cases = cases::passes(machine).map_err(|e| e.to_string())?;
        cases.extend(cases::variants(machine));
        cases.retain(|case| match options.parts.as_slice() {
            [] => case.is_sampled() || case.kernel == "matvec",
            parts => parts.iter().any(|part| case.label.contains(part.as_str())),
        });
        Ok(cases)
    }

    fn print_instructions(name: &str, outcomes: &[Outcome]) {
        for (case, compiled) in outcomes {
            println!("; {} on {name}", case.label);
            println!("{}", compiled.as_ref().map_or_else(|error| error.as_str(), |compiled| compiled.isa.as_str()));
        }
    }

    /// What the driver of this machine makes of the shaders. That it does not tell is no error.
    fn tell_system(options: &Options) -> Result<(), String> {
        let mut all = Vec::new();
        for &is_robust in &options.robustness {
            let gpu = Gpu::system(is_robust);
            let About { device, driver, machine } = match Compiler::new(gpu.clone()).about() {
                Ok(about) => about,
                Err(reason) => {
                    println!("nothing to tell: {reason}");
                    return Ok(());
                }
            };
            if all.is_empty() {
                println!("# {device}, {driver}");
            }
            let mut cases = wanted(options, &machine)?;
            // Many pipelines occur in several passes.
            let mut known = HashSet::new();
            cases.retain(|case| known.insert(case.label.clone()));
            let mut outcomes = compile_all(&gpu, cases);
            outcomes.iter_mut().for_each(|(case, _)| case.label.push_str(if is_robust { "" } else { " (not robust)" }));
            all.push(outcomes);
        }
        if options.isa {
            all.iter().for_each(|outcomes| print_instructions("system", outcomes));
            return Ok(());
        }
        println!("{}", report::statistics(&all));
        Ok(())
    }

    fn tell_nvidia(options: &Options, architecture: &str) -> Result<(), String> {
        let tools = Tools::open()?;
        let version = tools.version()?;
        let mut cases = ptx::usual().map_err(|e| e.to_string())?;
        if !options.parts.is_empty() {
            cases.extend(cases::variants(&ptx::MACHINE));
            let mut known = HashSet::new();
            cases.retain(|case| options.parts.iter().any(|part| case.label.contains(part.as_str())));
            cases.retain(|case| known.insert(case.label.clone()));
        }
        let outcomes = ptx::compile_all(&tools, cases, architecture);
        if options.isa {
            for (case, compiled) in &outcomes {
                println!("; {} on {architecture}", case.label);
                println!(
                    "{}",
                    compiled.as_ref().map_or_else(|error| error.as_str(), |compiled| compiled.text.as_str())
                );
            }
            return Ok(());
        }
        let tables = ptx::tables(&outcomes);
        println!("# {architecture}, {version}\n{tables}");
        if options.record {
            record(architecture, &version, &tables)?;
        }
        Ok(())
    }

    /// Outcomes in the order of the cases, compiled by one process per processor.
    pub fn compile_all(gpu: &Gpu, cases: Vec<Case>) -> Vec<Outcome> {
        let compile = |compiler: &mut Compiler, case: &Case| {
            let words = spirv::compile(&case.source, case.kernel, &case.constants, case.has_matrices())?;
            compiler.compile(case.kernel, &words)
        };
        each(cases, || Compiler::new(gpu.clone()), compile)
    }

    /// What `compile` makes of each case, in their order; one compiler per processor, and each label once.
    pub fn each<C, T: Clone + Send>(
        cases: Vec<Case>,
        compiler: impl Fn() -> C + Sync,
        compile: impl Fn(&mut C, &Case) -> Result<T, String> + Sync,
    ) -> Vec<(Case, Result<T, String>)> {
        let mut labels = HashSet::new();
        let distinct: Vec<&Case> = cases.iter().filter(|case| labels.insert(case.label.as_str())).collect();
        let n_workers = std::thread::available_parallelism().map_or(1, |n| n.get());
        let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(HashMap::new()));
        std::thread::scope(|scope| {
            for _ in 0..n_workers.min(distinct.len()) {
                scope.spawn(|| {
                    let mut compiler = compiler();
                    while let Some(case) = distinct.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let compiled = compile(&mut compiler, case);
                        outcomes.lock().unwrap_or_else(|e| e.into_inner()).insert(case.label.clone(), compiled);
                    }
                });
            }
        });
        let outcomes = outcomes.into_inner().unwrap_or_else(|e| e.into_inner());
        let outcome = |case: Case| outcomes.get(&case.label).cloned().map(|compiled| (case, compiled));
        cases.into_iter().filter_map(outcome).collect()
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
