//! WGSL to SPIR-V with the options of `wgpu-hal`'s Vulkan backend for an unchecked shader.

use naga::back::spv::{self, Capability, WriterFlags, ZeroInitializeWorkgroupMemoryMode};
use naga::back::{PipelineConstants, pipeline_constants};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// Capabilities of RADV that wgpu enables.
const CAPABILITIES: [Capability; 17] = [
    Capability::Shader,
    Capability::Matrix,
    Capability::GroupNonUniform,
    Capability::GroupNonUniformVote,
    Capability::GroupNonUniformArithmetic,
    Capability::GroupNonUniformBallot,
    Capability::GroupNonUniformShuffle,
    Capability::GroupNonUniformShuffleRelative,
    Capability::GroupNonUniformQuad,
    Capability::Float16,
    Capability::StorageBuffer16BitAccess,
    Capability::UniformAndStorageBuffer16BitAccess,
    Capability::DotProductInputAllKHR,
    Capability::DotProductInput4x8BitKHR,
    Capability::DotProductInput4x8BitPackedKHR,
    Capability::DotProductKHR,
    Capability::Int8,
];

/// Extra capabilities of the tiers with cooperative matrices.
const MATRIX_CAPABILITIES: [Capability; 2] = [Capability::CooperativeMatrixKHR, Capability::VulkanMemoryModel];

/// The module's words for one entry point with these override values.
pub fn compile(source: &str, entry: &str, constants: &[(String, f64)], has_matrices: bool) -> Result<Vec<u32>, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let mut known = Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16 | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    known.set(Capabilities::COOPERATIVE_MATRIX, has_matrices);
    let info = Validator::new(ValidationFlags::all(), known).validate(&module).map_err(|e| e.emit_to_string(source))?;
    let stage = naga::ShaderStage::Compute;
    let constants: PipelineConstants = constants.iter().cloned().collect();
    let (module, info) = pipeline_constants::process_overrides(&module, &info, Some((stage, entry)), &constants)
        .map_err(|e| e.to_string())?;
    let matrices = MATRIX_CAPABILITIES.into_iter().filter(|_| has_matrices);
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = spv::Options {
        lang_version: (1, 6),
        flags: WriterFlags::LABEL_VARYINGS | WriterFlags::FORCE_POINT_SIZE,
        capabilities: Some(CAPABILITIES.into_iter().chain(matrices).collect()),
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions { shader_stage: stage, entry_point: entry.to_string() };
    spv::write_vec(&module, &info, &options, Some(&entry)).map_err(|e| e.to_string())
}
