//! Links, validates and describes every shader variant, so that a broken shader fails `cargo build`.
//!
//! A shader in `shaders/` or `benches/shaders/`, of which the WASM module has a few alone, may hold three directives, each on a line of its own:
//!
//! - `#import reduce` joins in `shaders/shared/reduce.wgsl`. `#import reduce t0=reduce t2=reduce_subgroup` links one
//!   variant of the shader for each `tag=fragment`; several such lines give their cross product. A tag is a weight
//!   type as the files spell it (`Q4_0`) or a tier (`t0` baseline, `t1` shader-f16, `t2` subgroups, `matrix8`
//!   and `matrix16` cooperative matrices). Fragments use the first form themselves; what several of them
//!   import is joined in once.
//! - `#weights` is such a line for every weight type, whose fragment is `block_` and its name in lower case.
//! - `#kernel matmul scalar` says that the file is the `scalar` variant of the kernel `matmul`, with its bindings.
//!
//! A file in `benches/shaders/ablations/` is a shader of the library with some functions replaced, to measure what they
//! cost. `#ablate matvec Q4_0` names the shader, and the weight types that it is linked for; `#replace block_dot` says
//! that the file has its own `block_dot`. The other one remains, as `shipped_block_dot`.
//!
//! The result is `$OUT_DIR/shaders.rs`: one `Kernel` for each kernel name with its bindings and its variants. A
//! variant's source is a list of parts, each a file's text, of which the table has one copy.
//!
//! A kernel's uniform is a struct in Rust as well, with the same members. `Params` of `by_head` is `ByHeadParams`
//! there; a struct of any other name keeps it, and kernels may share it. Members whose names begin with `_` fill the
//! struct up at its end and are left out. Constants of `u32` are there in a module for each file, names of overrides
//! in one for all.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display, Write as _};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs};

use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Where shaders are: those of the library, and those that only benches use.
const FOLDERS: [&str; 2] = ["shaders", "benches/shaders"];

/// Shaders of the library with functions replaced, for benches. No WASM module has them.
const ABLATIONS: &str = "benches/shaders/ablations";

/// Kernels of the benches that a page measures with; the WASM module goes without the variants of the others.
const BROWSER_PROBES: [&str; 4] = ["probe_copy", "probe_fma", "probe_read", "probe_reduce"];

/// What WebGPU guarantees without asking for more; every baseline variant must fit.
const MAX_STORAGE_BINDINGS: usize = 8;
const MAX_WORKGROUP_BYTES: u32 = 16 << 10;
const MAX_INVOCATIONS: u32 = 256;

/// Cooperative matrices need f16 tiles large enough to be reused, and every adapter that has them has this much.
const MAX_MATRIX_WORKGROUP_BYTES: u32 = 32 << 10;

/// Types that packed weights have; the names are those of `WeightType`'s layouts.
const WEIGHTS: [&str; 21] = [
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "IQ3_S", "IQ2_S", "MXFP4", "NVFP4", "Q2_0", "Q1_0",
];

const TIERS: [&str; 6] = ["t0", "t1", "t2", "scalar", "matrix8", "matrix16"];

/// How the names of kernels end that only models with adapters use: without the feature `lora` they are left out.
const OF_ADAPTERS: &str = "_lora.wgsl";

/// Tiers that no browser has; the WASM module goes without their variants.
const NATIVE_TIERS: [&str; 2] = ["matrix8", "matrix16"];

struct Binding {
    name: String,
    uniform: bool,
    writes: bool,
    /// `F32`, `F16` or `U32`: what the elements of a storage array are made of.
    dtype: &'static str,
}

/// A kernel's params: a uniform struct.
#[derive(Clone, Default, PartialEq)]
struct Params {
    /// Its name in Rust.
    name: String,
    size: u32,
    members: Vec<Member>,
}

/// A field of a kernel's params.
#[derive(Clone, PartialEq)]
struct Member {
    name: String,
    /// Its type in Rust, and in WGSL.
    rust_type: String,
    wgsl_type: String,
    offset: u32,
}

struct Variant {
    tier: String,
    weight: Option<String>,
    /// Numbers of its parts.
    parts: Vec<usize>,
    workgroup_bytes: u32,
}

/// A shader of the library with functions replaced.
struct Ablation {
    /// Name of the file.
    name: String,
    kernel: String,
    variants: Vec<Variant>,
}

/// The texts that variants consist of, each once.
#[derive(Default)]
struct Parts {
    texts: Vec<String>,
}

#[derive(Default)]
struct Kernel {
    bindings: Vec<Binding>,
    params: Params,
    variants: Vec<Variant>,
}

/// Values of constants by file, a kernel's name or a fragment's, and by name. `None`: shaders differ in it.
type Constants = BTreeMap<String, BTreeMap<String, Option<u32>>>;

/// Everything linked so far.
#[derive(Default)]
struct Linked {
    kernels: BTreeMap<String, Kernel>,
    ablations: Vec<Ablation>,
    parts: Parts,
    constants: Constants,
    /// Names of overrides.
    overrides: BTreeSet<String>,
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(devices)");
    if !is_text_module() {
        println!("cargo::rustc-cfg=devices");
    }
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut files: Vec<PathBuf> = FOLDERS.iter().flat_map(|folder| shaders_of(&root, folder)).collect();
    if env::var("CARGO_FEATURE_LORA").is_err() {
        files.retain(|path| !path.to_string_lossy().ends_with(OF_ADAPTERS));
    }
    files.sort();
    let ablations = if is_wasm() { Vec::new() } else { shaders_of(&root, ABLATIONS) };

    let mut linked = Linked::default();
    let dir = root.join(FOLDERS[0]);
    let report = |file: &Path, result: Result<(), String>| {
        for line in result.err().iter().flat_map(|message| message.lines()) {
            println!("cargo::error={}: {line}", file.strip_prefix(&root).unwrap_or(file).display());
        }
    };
    for file in &files {
        report(file, link_file(&dir, file, &mut linked));
    }
    let n_shipped = linked.parts.texts.len();
    for file in &ablations {
        report(file, link_ablation(&dir, file, &mut linked));
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let compiler = locked_compiler(&out).unwrap_or_else(|| written_by_compiler(&linked.kernels, &linked.parts));
    let compiler = format!("/// What compiles shaders for a driver.\npub const COMPILER: &str = {compiler:?};\n");
    let mirrored = params(&linked.kernels) + &constants(&linked.constants) + &overrides(&linked.overrides);
    let table = table(&linked.kernels, &linked.parts, n_shipped) + &ablated(&linked.ablations) + &compiler + &mirrored;
    fs::write(out.join("shaders.rs"), table).expect("OUT_DIR is writable");
}

/// The shaders of a folder, in alphabetical order.
fn shaders_of(root: &Path, folder: &str) -> Vec<PathBuf> {
    println!("cargo::rerun-if-changed={folder}");
    let entries = fs::read_dir(root.join(folder)).expect("the folder is part of the package");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "wgsl"));
    files.sort();
    files
}

/// Versions of the crates that compile shaders, by the lock file of the workspace that is built. That is above the folder of its
/// builds; the one that is packed with this package is not that of others who build it.
fn locked_compiler(out: &Path) -> Option<String> {
    let lock = out.ancestors().map(|folder| folder.join("Cargo.lock")).find(|path| path.is_file())?;
    println!("cargo::rerun-if-changed={}", lock.display());
    let text = fs::read_to_string(lock).ok()?;
    let packages: Vec<&str> = text.split("[[package]]").collect();
    let version_of = |name: &str| {
        let named = format!("name = \"{name}\"");
        let package = packages.iter().find(|package| package.lines().any(|line| line == named))?;
        let version = package.lines().find_map(|line| line.strip_prefix("version = \""))?;
        Some(format!("{name} {}", version.trim_end_matches('"')))
    };
    let versions: Option<Vec<String>> = ["naga", "wgpu", "wgpu-core", "wgpu-hal"].into_iter().map(version_of).collect();
    Some(versions?.join(", "))
}

/// Without a lock file: what the compiler makes of the shaders stands for it. It is the library's own naga.
fn written_by_compiler(kernels: &BTreeMap<String, Kernel>, parts: &Parts) -> String {
    let mut hasher = DefaultHasher::new();
    for variant in kernels.values().flat_map(|kernel| &kernel.variants) {
        let source = parts.source(&variant.parts);
        let module = naga::front::wgsl::parse_str(&source).expect("it was parsed before");
        let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
        let info = validator.validate(&module).expect("it was valid before");
        // Overrides have the values that they begin with. What lacks one cannot be written.
        let constants = naga::back::PipelineConstants::default();
        if let Ok((module, info)) = naga::back::pipeline_constants::process_overrides(&module, &info, None, &constants)
        {
            hash_written(&module, &info, &mut hasher);
        }
    }
    format!("naga {:016x}", hasher.finish())
}

#[cfg(not(target_vendor = "apple"))]
fn hash_written(module: &naga::Module, info: &naga::valid::ModuleInfo, hasher: &mut DefaultHasher) {
    naga::back::spv::write_vec(module, info, &naga::back::spv::Options::default(), None).ok().hash(hasher);
}

#[cfg(target_vendor = "apple")]
fn hash_written(module: &naga::Module, info: &naga::valid::ModuleInfo, hasher: &mut DefaultHasher) {
    let options = (naga::back::msl::Options::default(), naga::back::msl::PipelineOptions::default());
    naga::back::msl::write_string(module, info, &options.0, &options.1).ok().map(|(text, _)| text).hash(hasher);
}

/// Whether this is the WASM module of constraints and answers, which computes nothing.
fn is_text_module() -> bool {
    let has = |name: &str| env::var(format!("CARGO_FEATURE_{name}")).is_ok();
    is_wasm() && has("WEB_TEXT") && !has("WEB_DEVICE")
}

fn is_wasm() -> bool {
    env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "wasm32")
}

/// What an import offers: tags and fragments. The plain form has an empty tag.
type Choices = Vec<(String, String)>;

/// A shader file without its directives.
struct Shader {
    /// Name of the kernel.
    name: String,
    tier: String,
    imports: Vec<Choices>,
    body: String,
}

/// A variant of a shader, joined from parts.
struct Joined {
    tier: String,
    weight: Option<String>,
    /// Numbers of its parts.
    parts: Vec<usize>,
    /// Fragments with the names of their constants.
    fragments: Vec<(String, Vec<String>)>,
}

impl Shader {
    fn read(file: &Path) -> Result<Shader, String> {
        let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut shader = Shader { name, tier: "t0".into(), imports: Vec::new(), body: String::new() };
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["#kernel", kernel, tier] => (shader.name, shader.tier) = (kernel.to_string(), tier.to_string()),
                ["#weights"] => {
                    let choice = |name: &&str| (name.to_string(), format!("block_{}", name.to_lowercase()));
                    shader.imports.push(WEIGHTS.iter().map(choice).collect());
                }
                ["#import", fragment] => shader.imports.push(vec![(String::new(), fragment.to_string())]),
                ["#import", _slot, choices @ ..] => {
                    let parse = |choice: &&str| {
                        let (tag, fragment) =
                            choice.split_once('=').ok_or(format!("`{choice}` is not tag=fragment"))?;
                        Ok::<_, String>((tag.to_string(), fragment.to_string()))
                    };
                    shader.imports.push(choices.iter().map(parse).collect::<Result<_, _>>()?);
                }
                _ => {
                    shader.body.push_str(line);
                    shader.body.push('\n');
                }
            }
        }
        Ok(shader)
    }

    /// One choice of each import for each variant.
    fn picks(&self) -> Vec<Choices> {
        let mut picks: Vec<Choices> = vec![Vec::new()];
        for choices in &self.imports {
            picks = picks
                .iter()
                .flat_map(|pick| choices.iter().map(move |choice| [pick.clone(), vec![choice.clone()]].concat()))
                .collect();
        }
        picks
    }

    /// Joins the variant of these choices.
    fn join(&self, dir: &Path, pick: &Choices, parts: &mut Parts) -> Result<Joined, String> {
        let (mut tier, mut weight) = (self.tier.clone(), None);
        let (mut fragments, mut enables, mut numbers) = (Vec::new(), String::new(), vec![parts.number(&self.body)]);
        for (tag, fragment) in pick {
            if TIERS.contains(&tag.as_str()) {
                if tag != "t0" {
                    tier = tag.clone();
                }
            } else if !tag.is_empty() {
                weight = Some(tag.clone());
            }
            join_fragment(dir, fragment, &mut fragments, &mut enables, &mut numbers, parts)?;
        }
        // The file's own text leads, so that naga's line numbers are the file's for everything before the imports; but
        // nothing may stand before directives.
        if !enables.is_empty() {
            numbers.insert(0, parts.number(&enables));
        }
        Ok(Joined { tier, weight, parts: numbers, fragments })
    }
}

/// Links all variants of one file.
fn link_file(
    dir: &Path,
    file: &Path,
    Linked { kernels, parts, constants, overrides, .. }: &mut Linked,
) -> Result<(), String> {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let shader = Shader::read(file)?;
    let name = &shader.name;
    let mut picks = shader.picks();
    let is_native = |pick: &Vec<(String, String)>| pick.iter().any(|(tag, _)| NATIVE_TIERS.contains(&tag.as_str()));
    let is_native_bench = file.parent() != Some(dir) && !BROWSER_PROBES.contains(&stem.as_str());
    // Such a kernel, or one of these tiers alone, has no variants there, but is known all the same.
    let is_left_out = is_wasm() && (is_native_bench || picks.iter().all(is_native));
    if is_wasm() && !is_left_out {
        picks.retain(|pick| !is_native(pick));
    }
    let mut unused = Parts::default();
    let parts = if is_left_out { &mut unused } else { parts };
    for pick in picks {
        let Joined { tier, weight, parts: numbers, fragments } = shader.join(dir, &pick, parts)?;
        let label = [Some(stem.as_str()), weight.as_deref(), Some(tier.as_str())]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(".");
        let described = describe(name, &tier, &parts.source(&numbers)).map_err(|e| format!("{label}: {e}"))?;
        for (file, names) in [(name.clone(), constant_names(&shader.body))].into_iter().chain(fragments) {
            let of_file = constants.entry(file).or_default();
            for name in names {
                let Some(&value) = described.constants.get(&name) else { continue };
                let known = of_file.entry(name).or_insert(Some(value));
                *known = known.filter(|known| *known == value);
            }
        }
        overrides.extend(described.overrides);
        let kernel = kernels.entry(name.clone()).or_default();
        if kernel.bindings.is_empty() {
            (kernel.bindings, kernel.params) = (described.bindings, described.params);
        } else if !same_bindings(&kernel.bindings, &described.bindings) {
            return Err(format!("{label}: bindings differ from the other variants of `{name}`"));
        } else if kernel.params != described.params {
            let (found, expected) = (described.params, &kernel.params);
            return Err(format!("{label}: params are {found}, and {expected} in other variants of `{name}`"));
        }
        if kernel.variants.iter().any(|v| v.tier == tier && v.weight == weight) {
            return Err(format!("{label}: a second variant of `{name}` with these tags"));
        }
        if is_left_out {
            continue;
        }
        kernel.variants.push(Variant { tier, weight, parts: numbers, workgroup_bytes: described.workgroup_bytes });
    }
    Ok(())
}

/// Links an ablation: the shader that it names, with the functions that it replaces.
fn link_ablation(
    dir: &Path,
    file: &Path,
    Linked { kernels, ablations, parts, overrides, .. }: &mut Linked,
) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|e| e.to_string())?;
    let (mut of, mut replaced, mut own) = (None, Vec::<&str>::new(), String::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["#ablate", kernel, weights @ ..] => of = Some((kernel.to_string(), weights.to_vec())),
            ["#replace", functions @ ..] => replaced.extend(functions),
            _ => {
                own.push_str(line);
                own.push('\n');
            }
        }
    }
    let (kernel, weights) = of.ok_or("`#ablate` is missing")?;
    let known = kernels.get(&kernel).ok_or(format!("`{kernel}` is no kernel"))?;
    let shader = Shader::read(&dir.join(format!("{kernel}.wgsl")))?;
    let mut variants = Vec::new();
    for pick in shader.picks() {
        let Joined { tier, weight, parts: mut numbers, .. } = shader.join(dir, &pick, parts)?;
        if !weight.as_deref().is_some_and(|weight| weights.contains(&weight)) {
            continue;
        }
        for function in &replaced {
            let declares = format!("fn {function}(");
            let is_declared = |&number: &usize| parts.texts[number].contains(&declares);
            let at = numbers.iter().position(is_declared).ok_or(format!("{kernel} has no function `{function}`"))?;
            let renamed = parts.texts[numbers[at]].replace(&declares, &format!("fn shipped_{function}("));
            numbers[at] = parts.number(&renamed);
        }
        numbers.push(parts.number(&own));
        let described = describe(&kernel, &tier, &parts.source(&numbers))?;
        if !same_bindings(&known.bindings, &described.bindings) || known.params != described.params {
            return Err(format!("bindings or params differ from those of `{kernel}`"));
        }
        overrides.extend(described.overrides);
        variants.push(Variant { tier, weight, parts: numbers, workgroup_bytes: described.workgroup_bytes });
    }
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    ablations.push(Ablation { name, kernel, variants });
    Ok(())
}

/// Adds a fragment after what it imports itself, each once; `enable` lines go to the front of the file. `joined` has
/// the fragments with the names of their constants.
fn join_fragment(
    dir: &Path,
    fragment: &str,
    joined: &mut Vec<(String, Vec<String>)>,
    enables: &mut String,
    linked: &mut Vec<usize>,
    parts: &mut Parts,
) -> Result<(), String> {
    if joined.iter().any(|(name, _)| name == fragment) {
        return Ok(());
    }
    let path = dir.join("shared").join(format!("{fragment}.wgsl"));
    let source = fs::read_to_string(&path).map_err(|e| format!("#import {fragment}: {e}"))?;
    joined.push((fragment.to_string(), constant_names(&source)));
    let mut own = String::new();
    for line in source.lines() {
        if let Some(inner) = line.strip_prefix("#import ") {
            join_fragment(dir, inner.trim(), joined, enables, linked, parts)?;
            continue;
        }
        let target = if line.starts_with("enable ") { &mut *enables } else { &mut own };
        target.push_str(line);
        target.push('\n');
    }
    linked.push(parts.number(&own));
    Ok(())
}

/// Names of the constants that a file declares outside of functions.
fn constant_names(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.strip_prefix("const ")?.split_once(':'));
    names.map(|(name, _)| name.trim().to_string()).collect()
}

impl Parts {
    /// The number of a text, which is added if it is new. A WASM module has no use for comments and indentation; line
    /// breaks stay, so that messages still point at a line.
    fn number(&mut self, text: &str) -> usize {
        let short = |line: &str| line.split("//").next().unwrap_or_default().trim().to_owned() + "\n";
        let text = if is_wasm() { text.lines().map(short).collect() } else { text.to_owned() };
        self.texts.iter().position(|known| *known == text).unwrap_or_else(|| {
            self.texts.push(text);
            self.texts.len() - 1
        })
    }

    /// What the parts with these numbers are together.
    fn source(&self, numbers: &[usize]) -> String {
        numbers.iter().map(|&number| self.texts[number].as_str()).collect()
    }
}

fn same_bindings(a: &[Binding], b: &[Binding]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| a.name == b.name && (a.uniform, a.writes, a.dtype) == (b.uniform, b.writes, b.dtype))
}

struct Described {
    bindings: Vec<Binding>,
    params: Params,
    workgroup_bytes: u32,
    /// Those of `u32`.
    constants: BTreeMap<String, u32>,
    /// Names of overrides.
    overrides: Vec<String>,
}

/// Parses and validates one linked source and reads off what the host must know.
fn describe(kernel: &str, tier: &str, source: &str) -> Result<Described, String> {
    // WGSL makes such a variable zero each time a loop comes by. Chromium's compiler was seen to keep the last round's value.
    let is_bare = |line: &&str| line.trim_start().starts_with("var ") && !line.contains('=');
    if let Some(line) = source.lines().find(is_bare) {
        return Err(format!("`{}` has no value to begin with", line.trim()));
    }
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let mut capabilities =
        Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16 | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let mut max_workgroup_bytes = MAX_WORKGROUP_BYTES;
    if NATIVE_TIERS.contains(&tier) {
        capabilities |= Capabilities::COOPERATIVE_MATRIX;
        max_workgroup_bytes = MAX_MATRIX_WORKGROUP_BYTES;
    }
    Validator::new(ValidationFlags::all(), capabilities).validate(&module).map_err(|e| e.emit_to_string(source))?;
    let [entry] = module.entry_points.as_slice() else {
        return Err("exactly one entry point is expected".into());
    };
    if entry.name != kernel {
        return Err(format!("the entry point is called `{}`, expected `{kernel}`", entry.name));
    }
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|e| e.to_string())?;
    let (mut bindings, mut params, mut workgroup_bytes) = (BTreeMap::new(), Params::default(), 0);
    for (_, var) in module.global_variables.iter() {
        let size = layouter[var.ty].size;
        if var.space == naga::AddressSpace::WorkGroup {
            workgroup_bytes += match module.types[var.ty].inner {
                naga::TypeInner::Array { size: naga::ArraySize::Pending(len), stride, .. } => {
                    let len = module.overrides[len].init.and_then(|init| default_value(&module, init));
                    stride * len.ok_or("an array whose length has no value of its own")?
                }
                _ => size,
            };
        }
        let Some(slot) = &var.binding else { continue };
        let (uniform, writes) = match var.space {
            naga::AddressSpace::Uniform => (true, false),
            naga::AddressSpace::Storage { access } => (false, access.contains(naga::StorageAccess::STORE)),
            other => return Err(format!("a binding in address space {other:?}")),
        };
        if uniform {
            params = Params::of(kernel, &module, var.ty)?;
        }
        let dtype = if uniform { "" } else { element_type(&module, var.ty)? };
        let name = var.name.clone().unwrap_or_default();
        if slot.group != 0 || bindings.insert(slot.binding, Binding { name, uniform, writes, dtype }).is_some() {
            return Err(format!("group {} binding {} is taken or not in group 0", slot.group, slot.binding));
        }
    }
    if bindings.keys().copied().ne(0..bindings.len() as u32) || !bindings.get(&0).is_some_and(|b| b.uniform) {
        return Err("bindings must be numbered from 0, `params` first".into());
    }
    let bindings: Vec<Binding> = bindings.into_values().collect();
    let invocations: u32 = entry.workgroup_size.iter().product();
    let storage = bindings.iter().filter(|b| !b.uniform).count();
    for (what, found, limit) in [
        ("storage bindings", storage as u32, MAX_STORAGE_BINDINGS as u32),
        ("bytes of workgroup memory", workgroup_bytes, max_workgroup_bytes),
        ("invocations in a workgroup", invocations, MAX_INVOCATIONS),
    ] {
        if found > limit {
            return Err(format!("{found} {what}, expected at most {limit}"));
        }
    }
    let value = |constant: &naga::Constant| match module.global_expressions[constant.init] {
        naga::Expression::Literal(naga::Literal::U32(value)) => Some((constant.name.clone()?, value)),
        _ => None,
    };
    let constants = module.constants.iter().filter_map(|(_, constant)| value(constant)).collect();
    let overrides = module.overrides.iter().filter_map(|(_, known)| known.name.clone()).collect();
    Ok(Described { bindings, params, workgroup_bytes, constants, overrides })
}

impl Params {
    /// The struct of a kernel's uniform.
    fn of(kernel: &str, module: &naga::Module, ty: naga::Handle<naga::Type>) -> Result<Params, String> {
        let naga::Type { name: Some(name), inner: naga::TypeInner::Struct { members, span } } = &module.types[ty]
        else {
            return Err("`params` is no struct".into());
        };
        let name = if name == "Params" { camel_case(kernel) + "Params" } else { name.clone() };
        let mut params = Params { name, size: *span, members: Vec::new() };
        let (mut end, mut is_full) = (0, false);
        for member in members {
            let name = member.name.clone().unwrap_or_default();
            if name.starts_with('_') {
                is_full = true;
                continue;
            }
            // So that the struct in Rust has the same offsets and begins as the one in WGSL does.
            if is_full || member.offset != end {
                let offset = member.offset;
                return Err(format!("`params.{name}` is at byte {offset}, expected {end}: gaps belong to the end"));
            }
            let types = types(module, member.ty).map_err(|found| format!("`params.{name}` is {found}"))?;
            let (rust_type, wgsl_type, size) = types;
            end += size;
            params.members.push(Member { name, rust_type, wgsl_type, offset: member.offset });
        }
        Ok(params)
    }
}

impl Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Params { name, size, members } = self;
        let members: Vec<String> =
            members.iter().map(|Member { name, rust_type, .. }| format!("{name}: {rust_type}")).collect();
        write!(f, "{name} {{ {} }} of {size} bytes", members.join(", "))
    }
}

/// The Rust type with a member's layout, its type in WGSL and its size in bytes; an error names the unsupported type.
fn types(module: &naga::Module, ty: naga::Handle<naga::Type>) -> Result<(String, String, u32), String> {
    let of_scalar = |scalar: naga::Scalar| match scalar {
        naga::Scalar::U32 => Ok("u32"),
        naga::Scalar::I32 => Ok("i32"),
        naga::Scalar::F32 => Ok("f32"),
        other => Err(format!("of {other:?}")),
    };
    match module.types[ty].inner {
        naga::TypeInner::Scalar(scalar) => Ok((of_scalar(scalar)?.into(), of_scalar(scalar)?.into(), 4)),
        naga::TypeInner::Vector { size, scalar } => {
            let (of, n) = (of_scalar(scalar)?, size as u32);
            Ok((format!("[{of}; {n}]"), format!("vec{n}<{of}>"), 4 * n))
        }
        naga::TypeInner::Array { base, size: naga::ArraySize::Constant(n), stride } => match types(module, base)? {
            (rust, wgsl, size) if size == stride => {
                Ok((format!("[{rust}; {n}]"), format!("array<{wgsl}, {n}>"), n.get() * stride))
            }
            (rust, ..) => Err(format!("an array of {rust}, {stride} bytes apart")),
        },
        ref other => Err(format!("of {other:?}")),
    }
}

fn camel_case(name: &str) -> String {
    let words = name.split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
    words.collect()
}

/// What an expression of overrides gives where the host sets none of them.
fn default_value(module: &naga::Module, expression: naga::Handle<naga::Expression>) -> Option<u32> {
    use naga::{BinaryOperator as Op, Expression, Literal};
    let value = |expression| default_value(module, expression);
    match module.global_expressions[expression] {
        Expression::Literal(Literal::U32(value)) => Some(value),
        Expression::Constant(constant) => value(module.constants[constant].init),
        Expression::Override(known) => value(module.overrides[known].init?),
        Expression::Binary { op, left, right } => {
            let (left, right) = (value(left)?, value(right)?);
            match op {
                Op::Add => left.checked_add(right),
                Op::Multiply => left.checked_mul(right),
                Op::Divide => left.checked_div(right),
                Op::Equal => Some(u32::from(left == right)),
                _ => None,
            }
        }
        Expression::Select { condition, accept, reject } => value(if value(condition)? != 0 { accept } else { reject }),
        _ => None,
    }
}

/// What a storage array is made of.
fn element_type(module: &naga::Module, ty: naga::Handle<naga::Type>) -> Result<&'static str, String> {
    let naga::TypeInner::Array { base, .. } = module.types[ty].inner else {
        return Err("a storage binding that is no array".into());
    };
    // Of a struct's members, all of which are the same.
    let of_member = |ty: naga::Handle<naga::Type>| match &module.types[ty].inner {
        naga::TypeInner::Struct { members, .. } if members.iter().all(|member| member.ty == members[0].ty) => {
            members[0].ty
        }
        _ => ty,
    };
    match module.types[of_member(base)].inner {
        naga::TypeInner::Scalar(scalar) | naga::TypeInner::Vector { scalar, .. } => match scalar {
            naga::Scalar::F32 => Ok("F32"),
            naga::Scalar::F16 => Ok("F16"),
            naga::Scalar::U32 => Ok("U32"),
            other => Err(format!("a storage array of {other:?}")),
        },
        ref other => Err(format!("a storage array of {other:?}")),
    }
}

/// The Rust source of the params' structs, each once.
fn params(kernels: &BTreeMap<String, Kernel>) -> String {
    let mut structs: BTreeMap<&str, (&Params, Vec<&str>)> = BTreeMap::new();
    for (kernel, Kernel { params, .. }) in kernels {
        let (known, of) = structs.entry(&params.name).or_insert((params, Vec::new()));
        if *known != params {
            println!("cargo::error=params of `{kernel}` are {params}, and {known} in `{}`", of[0]);
        }
        of.push(kernel);
    }
    let mut out = String::from("/// Params of kernels, as declared in their shaders.\npub(crate) mod params {\n");
    for (name, (params, of)) in structs {
        let member = |Member { name, rust_type, .. }: &Member| format!("        pub {name}: {rust_type},\n");
        let members: String = params.members.iter().map(member).collect();
        let _ = writeln!(
            out,
            "    /// Params of `{}`.\n    #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]\n    \
             #[repr(C)]\n    pub struct {name} {{\n{members}    }}",
            of.join("`, `")
        );
    }
    out + "}\n"
}

/// The Rust source of the overrides' names, so that a misspelt one does not compile.
fn overrides(names: &BTreeSet<String>) -> String {
    let lines: String = names.iter().map(|name| format!("    pub const {name}: &str = {name:?};\n")).collect();
    format!("/// Names of overrides.\n#[allow(dead_code)]\npub(crate) mod overrides {{\n{lines}}}\n")
}

/// The Rust source of the constants, in a module for each file.
fn constants(constants: &Constants) -> String {
    let mut out = String::from(
        "/// Constants of shaders and fragments; the host uses some of them.\n#[allow(dead_code)]\n\
         pub(crate) mod constants {\n",
    );
    for (file, constants) in constants {
        let values = constants.iter().filter_map(|(name, value)| Some((name, (*value)?)));
        let lines: String = values.map(|(name, value)| format!("        pub const {name}: u32 = {value};\n")).collect();
        if !lines.is_empty() {
            let _ = writeln!(out, "    pub mod {file} {{\n{lines}    }}");
        }
    }
    out + "}\n"
}

/// The Rust source of the table.
fn table(kernels: &BTreeMap<String, Kernel>, parts: &Parts, n_shipped: usize) -> String {
    let mut out = String::from("// Written by build.rs from the shaders.\n");
    let _ = writeln!(out, "static PARTS: [&str; {}] = {:#?};", parts.texts.len(), parts.texts);
    let begin = out.len();
    for (name, kernel) in kernels {
        let mut bindings = String::new();
        for binding in kernel.bindings.iter().filter(|b| !b.uniform) {
            let _ = write!(
                bindings,
                "Binding {{ name: {:?}, writes: {}, dtype: DType::{} }}, ",
                binding.name, binding.writes, binding.dtype
            );
        }
        let field = |Member { name, wgsl_type, offset, .. }: &Member| {
            format!("ParamField {{ name: {name:?}, wgsl_type: {wgsl_type:?}, offset_bytes: {offset} }}, ")
        };
        let fields: String = kernel.params.members.iter().map(field).collect();
        let variants = variants(name, &kernel.variants);
        let _ = writeln!(
            out,
            "/// `{name}`, see the shader of that name.\n\
             pub static {}: KernelOf<params::{}> = KernelOf::new(Kernel {{\n    id: Id::{},\n    name: {name:?},\n    \
             params_size: {},\n    params: if IS_BROWSER {{ &[] }} else {{ &[{fields}] }},\n    bindings: &[{bindings}],\n    variants: &[{variants}\n    ],\n}});",
            name.to_uppercase(),
            kernel.params.name,
            camel_case(name),
            kernel.params.size
        );
    }
    let mut hasher = DefaultHasher::new();
    // Not of ablations, which are no part of a pass.
    (&parts.texts[..n_shipped], &out[begin..]).hash(&mut hasher);
    let _ = writeln!(
        out,
        "/// Stands for all sources together.\npub const FINGERPRINT: &str = \"{:016x}\";",
        hasher.finish()
    );
    let ids: Vec<String> = kernels.keys().map(|name| camel_case(name)).collect();
    let _ = writeln!(
        out,
        "/// Which kernel it is.\n#[derive(Clone, Copy, Debug, PartialEq, Eq)]\npub(crate) enum Id {{ {} }}",
        ids.join(", ")
    );
    let names: Vec<String> = kernels.keys().map(|name| format!("&{}.kernel", name.to_uppercase())).collect();
    let _ = writeln!(
        out,
        "/// Every kernel, in alphabetical order.\npub static ALL: [&Kernel; {}] = [{}];",
        names.len(),
        names.join(", ")
    );
    out
}

/// The Rust source of a list of variants.
fn variants(name: &str, variants: &[Variant]) -> String {
    let mut out = String::new();
    for v in variants {
        let tier = match v.tier.as_str() {
            "t1" => "F16",
            "t2" => "Subgroups",
            "scalar" => "Scalar",
            "matrix8" => "Matrix8",
            "matrix16" => "Matrix16",
            _ => "Baseline",
        };
        let weight = v.weight.as_ref().map_or("None".into(), |w| format!("Some(WeightType::{w})"));
        let label = [Some(name), v.weight.as_deref(), Some(v.tier.as_str())]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(".");
        let _ = write!(
            out,
            "\n        Variant {{ label: {label:?}, tier: Tier::{tier}, weight: {weight}, workgroup_bytes: {}, parts: &{:?} }},",
            v.workgroup_bytes, v.parts
        );
    }
    out
}

/// The Rust source of the ablations, none for a WASM module.
fn ablated(ablations: &[Ablation]) -> String {
    let mut out = String::new();
    for Ablation { name, kernel, variants: of } in ablations {
        let _ = writeln!(
            out,
            "/// `{kernel}` with functions replaced, see `{ABLATIONS}/{name}.wgsl`.\n\
             pub(crate) static {}: Ablation = Ablation {{ kernel: &{}.kernel, variants: &[{}\n    ] }};",
            name.to_uppercase(),
            kernel.to_uppercase(),
            variants(name, of)
        );
    }
    out
}
