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
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in FOLDERS {
        println!("cargo::rerun-if-changed={folder}");
        let entries = fs::read_dir(root.join(folder)).expect("the folder is part of the package");
        files.extend(entries.map(|entry| entry.expect("readable").path()));
    }
    files.retain(|path| path.extension().is_some_and(|ext| ext == "wgsl"));
    if env::var("CARGO_FEATURE_LORA").is_err() {
        files.retain(|path| !path.to_string_lossy().ends_with(OF_ADAPTERS));
    }
    files.sort();

    let mut linked = Linked::default();
    for file in &files {
        if let Err(message) = link_file(&root.join(FOLDERS[0]), file, &mut linked) {
            for line in message.lines() {
                println!("cargo::error={}: {line}", file.strip_prefix(&root).unwrap_or(file).display());
            }
        }
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let compiler = locked_compiler(&out).unwrap_or_else(|| written_by_compiler(&linked.kernels, &linked.parts));
    let compiler = format!("/// What compiles shaders for a driver.\npub const COMPILER: &str = {compiler:?};\n");
    let mirrored = params(&linked.kernels) + &constants(&linked.constants) + &overrides(&linked.overrides);
    let table = table(&linked.kernels, &linked.parts) + &compiler + &mirrored;
    fs::write(out.join("shaders.rs"), table).expect("OUT_DIR is writable");
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
        let source: String = variant.parts.iter().map(|&part| parts.texts[part].as_str()).collect();
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

/// Links all variants of one file.
fn link_file(
    dir: &Path,
    file: &Path,
    Linked { kernels, parts, constants, overrides }: &mut Linked,
) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|e| e.to_string())?;
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let (mut name, mut file_tier) = (stem.clone(), "t0".to_string());
    // Each import offers one or more (tag, fragment); the plain form has an empty tag.
    let mut imports: Vec<Vec<(String, String)>> = Vec::new();
    let mut body = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["#kernel", kernel, tier] => (name, file_tier) = (kernel.to_string(), tier.to_string()),
            ["#weights"] => {
                let choice = |name: &&str| (name.to_string(), format!("block_{}", name.to_lowercase()));
                imports.push(WEIGHTS.iter().map(choice).collect());
            }
            ["#import", fragment] => imports.push(vec![(String::new(), fragment.to_string())]),
            ["#import", _slot, choices @ ..] => {
                let parse = |choice: &&str| {
                    let (tag, fragment) = choice.split_once('=').ok_or(format!("`{choice}` is not tag=fragment"))?;
                    Ok::<_, String>((tag.to_string(), fragment.to_string()))
                };
                imports.push(choices.iter().map(parse).collect::<Result<_, _>>()?);
            }
            _ => {
                body.push_str(line);
                body.push('\n');
            }
        }
    }
    let mut picks: Vec<Vec<(String, String)>> = vec![Vec::new()];
    for choices in &imports {
        picks = picks
            .iter()
            .flat_map(|pick| choices.iter().map(move |choice| [pick.clone(), vec![choice.clone()]].concat()))
            .collect();
    }
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
        let (mut tier, mut weight) = (file_tier.clone(), None);
        let (mut joined, mut enables, mut linked) = (Vec::new(), String::new(), vec![parts.number(&body)]);
        for (tag, fragment) in &pick {
            if TIERS.contains(&tag.as_str()) {
                if tag != "t0" {
                    tier = tag.clone();
                }
            } else if !tag.is_empty() {
                weight = Some(tag.clone());
            }
            join_fragment(dir, fragment, &mut joined, &mut enables, &mut linked, parts)?;
        }
        // The file's own text leads, so that naga's line numbers are the file's for everything before the imports; but
        // nothing may stand before directives.
        if !enables.is_empty() {
            linked.insert(0, parts.number(&enables));
        }
        let label = [Some(stem.as_str()), weight.as_deref(), Some(tier.as_str())]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join(".");
        let source: String = linked.iter().map(|&part| parts.texts[part].as_str()).collect();
        let described = describe(&name, &tier, &source).map_err(|e| format!("{label}: {e}"))?;
        for (file, names) in [(name.clone(), constant_names(&body))].into_iter().chain(joined) {
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
        kernel.variants.push(Variant { tier, weight, parts: linked, workgroup_bytes: described.workgroup_bytes });
    }
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
fn table(kernels: &BTreeMap<String, Kernel>, parts: &Parts) -> String {
    let mut out = String::from("// Written by build.rs from the shaders.\n");
    let _ = writeln!(out, "static PARTS: [&str; {}] = {:#?};", parts.texts.len(), parts.texts);
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
        let mut variants = String::new();
        for v in &kernel.variants {
            let tier = match v.tier.as_str() {
                "t1" => "F16",
                "t2" => "Subgroups",
                "scalar" => "Scalar",
                "matrix8" => "Matrix8",
                "matrix16" => "Matrix16",
                _ => "Baseline",
            };
            let weight = v.weight.as_ref().map_or("None".into(), |w| format!("Some(WeightType::{w})"));
            let label = [Some(name.as_str()), v.weight.as_deref(), Some(v.tier.as_str())]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(".");
            let _ = write!(
                variants,
                "\n        Variant {{ label: {label:?}, tier: Tier::{tier}, weight: {weight}, workgroup_bytes: {}, parts: &{:?} }},",
                v.workgroup_bytes, v.parts
            );
        }
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
    out.hash(&mut hasher);
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
