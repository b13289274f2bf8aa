//! Runs the processes of `vulkan.rs`, with a time limit, and parses their answers.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use serde_json::{Map, Value};

use crate::cases::Machine;
use crate::listing::{Counts, Listing};
use crate::vulkan;

/// The argument that starts this program as a compiler process.
pub const WORKER: &str = "--compile-with-vulkan";

/// The argument by which it leaves out the checks that keep accesses within their buffers.
pub const NOT_ROBUST: &str = "--not-robust";

/// Most shaders compile within a second; the slowest takes longer on a loaded machine.
const LIMIT: Duration = Duration::from_secs(90);

/// A GPU to compile for, and a driver that supports it.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// RADV's name for the family, or `system`.
    pub family: &'static str,
    /// RADV's manifest; none for the machine's own driver.
    manifest: Option<PathBuf>,
    is_robust: bool,
}

/// What a driver says of itself.
pub struct About {
    pub device: String,
    pub driver: String,
    pub machine: Machine,
}

impl Gpu {
    /// RDNA 2, supported by Debian 12's Mesa.
    pub fn navi21() -> Result<Gpu, String> {
        let folders = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
        let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let is_radv =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("radeon_icd"));
        let manifest = entries.map(|entry| entry.path()).find(is_radv);
        let manifest = manifest.ok_or("RADV is not installed (mesa-vulkan-drivers)")?;
        Ok(Gpu { family: "navi21", manifest: Some(manifest), is_robust: true })
    }

    /// RDNA 3, with matrix units; supported by the Mesa that `scripts/mesa-backport` unpacks.
    pub fn navi31() -> Result<Gpu, String> {
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/lavapipe/files/usr/lib");
        let folders = std::fs::read_dir(&library).into_iter().flatten().flatten();
        let library = folders.map(|folder| folder.path().join("libvulkan_radeon.so")).find(|path| path.exists());
        let library = library.ok_or("no newer RADV (run scripts/mesa-backport)")?;
        let manifest = Path::new(env!("CARGO_TARGET_TMPDIR")).join("radeon-backport.json");
        let text = serde_json::json!({
            "file_format_version": "1.0.0",
            "ICD": { "library_path": library, "api_version": "1.4.0" },
        });
        crate::write(&manifest, &text.to_string())?;
        Ok(Gpu { family: "navi31", manifest: Some(manifest), is_robust: true })
    }

    /// What the machine has.
    pub fn system(is_robust: bool) -> Gpu {
        Gpu { family: "system", manifest: None, is_robust }
    }
}

/// A driver's report about one shader.
#[derive(Clone, Debug)]
pub struct Compiled {
    pub subgroup: u64,
    /// Empty where the driver does not tell it.
    pub isa: String,
    pub listing: Listing<Counts>,
    /// By the driver's names.
    pub statistics: Map<String, Value>,
}

impl Compiled {
    /// A statistic by the driver's name.
    pub fn get(&self, name: &str) -> u64 {
        self.statistics.get(name).and_then(Value::as_u64).unwrap_or_default()
    }

    pub fn spills(&self) -> u64 {
        self.get("Spilled SGPRs") + self.get("Spilled VGPRs")
    }

    pub fn waves(&self) -> u64 {
        self.get("Subgroups per SIMD")
    }
}

/// A compiler for one GPU. Restarts its process after a crash or timeout.
pub struct Compiler {
    gpu: Gpu,
    worker: Option<Worker>,
}

struct Worker {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    hello: Value,
}

impl Compiler {
    pub fn new(gpu: Gpu) -> Compiler {
        Compiler { gpu, worker: None }
    }

    pub fn about(&mut self) -> Result<About, String> {
        let hello = &self.worker()?.hello;
        let text = |name: &str| hello[name].as_str().unwrap_or_default().to_string();
        let is = |name: &str| hello[name].as_bool().unwrap_or_default();
        let size = |i: usize| hello["subgroup"][i].as_u64().and_then(|n| n.try_into().ok()).unwrap_or_default();
        let machine = Machine {
            subgroup: [size(0), size(1)],
            has_matrices: is("has_matrices"),
            converts_slowly: is("converts_slowly"),
        };
        Ok(About { device: text("device"), driver: text("driver"), machine })
    }

    pub fn compile(&mut self, entry: &str, words: &[u32]) -> Result<Compiled, String> {
        let answer = self.worker()?.ask(&vulkan::request(entry, words));
        if answer.is_err() {
            self.worker = None;
        }
        let answer = answer?;
        if let Some(error) = answer["error"].as_str() {
            return Err(error.to_string());
        }
        let isa = answer["isa"].as_str().unwrap_or_default().to_string();
        Ok(Compiled {
            subgroup: answer["subgroup"].as_u64().unwrap_or_default(),
            listing: Listing::parse(&isa),
            statistics: answer["statistics"].as_object().cloned().unwrap_or_default(),
            isa,
        })
    }

    fn worker(&mut self) -> Result<&mut Worker, String> {
        if self.worker.is_none() {
            self.worker = Some(Worker::start(&self.gpu)?);
        }
        self.worker.as_mut().ok_or_else(|| "no compiler".into())
    }
}

impl Worker {
    fn start(gpu: &Gpu) -> Result<Worker, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(program);
        command.arg(WORKER).args((!gpu.is_robust).then_some(NOT_ROBUST));
        if let Some(manifest) = &gpu.manifest {
            command
                .env("RADV_FORCE_FAMILY", gpu.family)
                .env("VK_DRIVER_FILES", manifest)
                .env("VK_ICD_FILENAMES", manifest);
        }
        let mut child = command
            .env("MESA_SHADER_CACHE_DISABLE", "true")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| e.to_string())?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the process has no pipes".into());
        };
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            lines.map_while(|line| sender.send(line).ok()).for_each(drop);
        });
        let mut worker = Worker { child, input, answers, hello: Value::Null };
        worker.hello = worker.answer()?;
        match worker.hello["error"].as_str() {
            Some(error) => Err(error.to_string()),
            None => Ok(worker),
        }
    }

    fn ask(&mut self, request: &[u8]) -> Result<Value, String> {
        self.input
            .write_all(request)
            .and_then(|()| self.input.flush())
            .map_err(|e| format!("the compiler process ended: {e}"))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Value, String> {
        let line = self.answers.recv_timeout(LIMIT).map_err(|error| match error {
            mpsc::RecvTimeoutError::Timeout => format!("timed out after {} s", LIMIT.as_secs()),
            mpsc::RecvTimeoutError::Disconnected => "the compiler crashed".into(),
        })?;
        serde_json::from_str(&line).map_err(|e| e.to_string())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
