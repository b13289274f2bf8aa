//! Recordings for targets with arbitrary limits, and their shaders.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use naga::valid::{Capabilities, ValidationFlags, Validator};
use tilewright::kernels::{self, Gate, Gelu, LayerNorm, Linear, Norm};
use tilewright::shaders::Variant;
use tilewright::{
    DType, Error, Matrix, Recorder, Recording, Role, Target, TargetKind, TargetLimits, Tensor, Tier, WeightType,
    Workspace,
};

use super::builder::Rng;
use super::fuzz;

const TIERS: [Tier; 4] = [Tier::Scalar, Tier::Baseline, Tier::Subgroups, Tier::F16];

/// Limits from WebGPU's minimum to those of graphics cards, and beyond both.
pub fn any_target(rng: &mut Rng) -> Target {
    if rng.below(8) == 0 {
        return Target::cpu();
    }
    let limits = TargetLimits {
        max_workgroups: rng.pick(&[65_535, 1 << 16, 1 << 20, u32::MAX]),
        max_binding_bytes: rng.pick(&[1 << 16, 128 << 20, 1 << 31, 4 << 30]),
        max_dispatch_operations: rng.pick(&[1 << 24, 1 << 27, 1 << 33, u64::MAX]),
        min_subgroup: rng.pick(&[0, 4, 8, 16, 32]),
        max_subgroup: rng.pick(&[0, 4, 8, 16, 32, 64, 128]),
        converts_slowly: rng.below(2) == 0,
        max_splits: rng.pick(&[1, 2, 8, 16]),
        max_workgroup_bytes: rng.pick(&[16 << 10, 32 << 10, 64 << 10]),
        params_stride: rng.pick(&[0, 16, 64, 256]),
    };
    let kind = rng.pick(&[TargetKind::Gpu, TargetKind::SoftwareGpu]);
    Target::new(kind, rng.pick(&TIERS), limits)
}

/// Sizes around those of tiles and grids.
fn size(rng: &mut Rng) -> u32 {
    match rng.below(4) {
        0 => 1 + rng.below(40) as u32,
        1 => rng.pick(&[63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4096]),
        2 => 4 * (1 + rng.below(600) as u32),
        _ => rng.pick(&[65_535, 65_536, 65_537, 151_936, 262_144]),
    }
}

/// A recording of one to four kernels.
fn recorded(rng: &mut Rng, target: &Target) -> Result<Recording, Error> {
    let mut rec = Recorder::new(target.clone());
    for _ in 0..1 + rng.below(4) {
        let (t, n, k) = (size(rng).min(4096), size(rng), size(rng));
        let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32);
        let weight = rng.pick(&WeightType::ALL);
        match rng.below(9) {
            0 => kernels::softmax(&mut rec, &declare(&[t, n])?, &declare(&[t, n])?)?,
            1 => kernels::rms_norm(&mut rec, &declare(&[t, n])?, &declare(&[n])?, &declare(&[t, n])?, 1e-5)?,
            2 => {
                let weight = declare(&[n])?;
                let norm = LayerNorm { weight: &weight, bias: None, eps: 1e-5 };
                kernels::layer_norm(&mut rec, &declare(&[t, n])?, &norm, &declare(&[t, n])?)?;
            }
            3 => {
                let ids = Tensor::declare("ids", Role::Activations, &[t], DType::U32)?;
                kernels::argmax(&mut rec, &declare(&[t, n])?, &ids)?;
            }
            4 => kernels::matmul_plain(&mut rec, &declare(&[t, k])?, &declare(&[k, n])?, &declare(&[t, n])?)?,
            5 | 6 => {
                let w = Matrix::declare(target, "w", weight, n, k)?;
                let splits = rng.pick(&[None, None, Some(0), Some(3), Some(u32::MAX)]);
                kernels::matmul(
                    &mut rec,
                    &Linear { splits, ..Linear::new(&w) },
                    &declare(&[t, k])?,
                    &declare(&[t, n])?,
                )?;
            }
            7 => {
                let w = Matrix::declare(target, "w", weight, n, k)?;
                let t = 1 + t % 9;
                let (bias, norm) = (declare(&[n])?, declare(&[k])?);
                let linear = match rng.below(3) {
                    0 => Linear { bias: Some(&bias), ..Linear::new(&w) },
                    1 => Linear { norm: Some(Norm { weight: &norm, eps: 1e-5 }), ..Linear::new(&w) },
                    _ => Linear::new(&w),
                };
                kernels::matvec(&mut rec, &linear, &declare(&[t, k])?, &declare(&[t, n])?)?;
            }
            _ => {
                let n = n / 2 * 2 + 2;
                let w = Matrix::declare(target, "w", weight, n, k)?;
                let t = 1 + t % 9;
                let gate = rng.pick(&[Gate::Silu, Gate::Gelu(Gelu::Tanh)]);
                kernels::gate_up(&mut rec, &w, None, gate, &declare(&[t, k])?, &declare(&[t, n / 2])?)?;
            }
        }
    }
    Ok(rec.finish(&mut Workspace::default()))
}

#[test]
fn plan_validate() {
    fuzz("plan_validate", 2000, |rng| {
        let target = any_target(rng);
        let recording = match recorded(rng, &target) {
            Ok(recording) => recording,
            Err(error) => return error.to_string().is_empty(),
        };
        let limits = target.limits();
        for dispatch in recording.dispatches() {
            let (label, grid) = (dispatch.label(), dispatch.grid());
            assert!(grid.iter().all(|&n| 0 < n && n <= limits.max_workgroups), "{label} on {target:?}: {grid:?}");
            assert_eq!(dispatch.params().len(), dispatch.kernel().params_size as usize, "{label}");
            assert_eq!(dispatch.operands().len(), dispatch.kernel().bindings.len(), "{label}");
            for operand in dispatch.operands() {
                assert!(
                    operand.size_bytes() <= limits.max_binding_bytes,
                    "{label} on {target:?}: {}",
                    operand.size_bytes()
                );
            }
        }
        true
    });
}

/// Compiles a shader with a recording's constants, as a pipeline does.
fn compile(variant: &Variant, entry: &str, constants: &[(&str, f64)]) {
    let source = variant.source();
    let module = naga::front::wgsl::parse_str(&source).unwrap_or_else(|error| panic!("{}: {error}", variant.label));
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::all());
    let info = validator.validate(&module).unwrap_or_else(|error| panic!("{}: {error:?}", variant.label));
    let constants = constants.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let entry = Some((naga::ShaderStage::Compute, entry));
    let processed = naga::back::pipeline_constants::process_overrides(&module, &info, entry, &constants);
    let (module, _) = processed.unwrap_or_else(|error| panic!("{} with {constants:?}: {error:?}", variant.label));
    validator.reset();
    validator.validate(&module).unwrap_or_else(|error| panic!("{} with {constants:?}: {error:?}", variant.label));
}

#[test]
fn kernel_codegen() {
    // Each shader with each set of constants once.
    static SEEN: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    fuzz("kernel_codegen", 60, |rng| {
        let target = any_target(rng);
        let Ok(recording) = recorded(rng, &target) else { return false };
        for dispatch in recording.dispatches() {
            let key = format!("{} {:?}", dispatch.variant().label, dispatch.constants());
            if target.is_gpu() && SEEN.lock().unwrap().insert(key) {
                compile(dispatch.variant(), dispatch.kernel().name, dispatch.constants());
            }
        }
        true
    });
    println!("kernel_codegen: {} shaders with their constants", SEEN.lock().unwrap().len());
}
