//! NVIDIA's compiler and disassembler, from the packages that `scripts/cuda-compiler` fetches.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

/// The compiler's library, loaded, and the disassembler's path.
pub struct Tools {
    library: Library,
    disassembler: PathBuf,
}

/// What both say about a kernel.
pub struct Answer {
    /// The assembler's summary: registers, spills.
    pub log: String,
    pub listing: String,
}

type Program = *mut c_void;
type Of<T> = unsafe extern "C" fn(Program, *mut T) -> c_int;

impl Tools {
    pub fn open() -> Result<Tools, String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda/nvidia/cu13");
        let disassembler = folder.join("bin/nvdisasm");
        if !disassembler.exists() {
            return Err("no compiler for NVIDIA's GPUs (run scripts/cuda-compiler)".into());
        }
        // SAFETY: its initialisers are those of NVIDIA's compiler, which the user fetched to run it.
        let library = unsafe { Library::new(folder.join("lib/libnvrtc.so.13")) }.map_err(|e| e.to_string())?;
        Ok(Tools { library, disassembler })
    }

    /// The compiler's version.
    pub fn version(&self) -> Result<String, String> {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: the signature is that of nvrtc.h.
        let code = unsafe {
            let version: libloading::Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                self.library.get(b"nvrtcVersion\0").map_err(|e| e.to_string())?;
            version(&mut major, &mut minor)
        };
        if code == 0 { Ok(format!("CUDA {major}.{minor}")) } else { Err(format!("nvrtcVersion: error {code}")) }
    }

    /// Machine code of CUDA C++ for an architecture such as `sm_90`, disassembled.
    pub fn compile(&self, source: &str, architecture: &str) -> Result<Answer, String> {
        // SAFETY: the signatures are those of nvrtc.h, and the buffers have the sizes that it asks for.
        let (code, log) = unsafe { self.machine_code(source, architecture)? };
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("{}-{}.cubin", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, code).map_err(|e| e.to_string())?;
        let output = Command::new(&self.disassembler).arg("--print-code").arg(&path).output();
        let _ = std::fs::remove_file(&path);
        let output = output.map_err(|e| format!("nvdisasm: {e}"))?;
        if !output.status.success() {
            return Err(format!("nvdisasm: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(Answer { log, listing: String::from_utf8_lossy(&output.stdout).into_owned() })
    }

    unsafe fn machine_code(&self, source: &str, architecture: &str) -> Result<(Vec<u8>, String), String> {
        // A driver may take sums apart less exactly than the standard says, too; WGSL allows it.
        let options = [
            format!("--gpu-architecture={architecture}"),
            "--use_fast_math".into(),
            "--disable-warnings".into(),
            "--ptxas-options=-v".into(),
        ];
        let options: Vec<CString> =
            options.into_iter().map(CString::new).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let text = CString::new(source).map_err(|e| e.to_string())?;
        unsafe {
            type Create = unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int;
            let create: libloading::Symbol<Create> =
                self.library.get(b"nvrtcCreateProgram\0").map_err(|e| e.to_string())?;
            let compile: libloading::Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> =
                self.library.get(b"nvrtcCompileProgram\0").map_err(|e| e.to_string())?;
            let destroy: libloading::Symbol<unsafe extern "C" fn(*mut Program) -> c_int> =
                self.library.get(b"nvrtcDestroyProgram\0").map_err(|e| e.to_string())?;
            let mut program = ptr::null_mut();
            let code = create(&mut program, text.as_ptr(), c"shader.cu".as_ptr(), 0, ptr::null(), ptr::null());
            if code != 0 {
                return Err(format!("nvrtcCreateProgram: error {code}"));
            }
            let code = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.bytes(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0");
            let log = log.map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').to_string());
            let binary = self.bytes(program, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0");
            destroy(&mut program);
            let log = log?;
            if code == 0 { Ok((binary?, log)) } else { Err(log) }
        }
    }

    /// What a pair of functions has: its size, then its bytes.
    unsafe fn bytes(&self, program: Program, size: &[u8], get: &[u8]) -> Result<Vec<u8>, String> {
        unsafe {
            let size: libloading::Symbol<Of<usize>> = self.library.get(size).map_err(|e| e.to_string())?;
            let get: libloading::Symbol<Of<c_char>> = self.library.get(get).map_err(|e| e.to_string())?;
            let mut n = 0;
            let code = size(program, &mut n);
            let mut bytes = vec![0_u8; n];
            let code = if code == 0 { get(program, bytes.as_mut_ptr().cast()) } else { code };
            if code == 0 { Ok(bytes) } else { Err(format!("NVRTC: error {code}")) }
        }
    }
}
