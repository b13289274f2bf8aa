//! WGSL to SPIR-V, with the options that `wgpu-hal`'s Vulkan backend has, for shaders with cooperative matrices.
//!
//! wgpu would compile them, too, and wrongly: naga 30 declares Vulkan's memory model for them and leaves all accesses
//! private. Barriers order no private access, so a load of workgroup memory may see what was there before. On an H100 18
//! of some 700 cases of products and attention by matrices did. Here the accesses are marked as shared.

use naga::back::spv::{self, Capability, WriterFlags, ZeroInitializeWorkgroupMemoryMode};
use naga::back::{PipelineConstants, pipeline_constants};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// What adapters with cooperative matrices offer and wgpu asks for; a module declares those of them that it needs.
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
/// Those of matrices, which wgpu asks for only where they are used.
const MATRIX_CAPABILITIES: [Capability; 2] = [Capability::CooperativeMatrixKHR, Capability::VulkanMemoryModel];

/// The words of a module for one entry point with these values of its overrides. With `checked`, indices are kept within
/// what they index, loops end and nothing is divided by 0.
pub fn compile(
    source: &str,
    entry: &str,
    constants: &[(impl AsRef<str>, f64)],
    has_matrices: bool,
    checked: bool,
) -> Result<Vec<u32>, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let mut known = Capabilities::SUBGROUP | Capabilities::SHADER_FLOAT16 | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    known.set(Capabilities::COOPERATIVE_MATRIX, has_matrices);
    let info = Validator::new(ValidationFlags::all(), known).validate(&module).map_err(|e| e.emit_to_string(source))?;
    let stage = naga::ShaderStage::Compute;
    let constants: PipelineConstants =
        constants.iter().map(|(name, value)| (name.as_ref().to_string(), *value)).collect();
    let (module, info) = pipeline_constants::process_overrides(&module, &info, Some((stage, entry)), &constants)
        .map_err(|e| e.to_string())?;
    let matrices = MATRIX_CAPABILITIES.into_iter().filter(|_| has_matrices);
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = spv::Options {
        lang_version: (1, 6),
        flags: WriterFlags::LABEL_VARYINGS | WriterFlags::FORCE_POINT_SIZE,
        capabilities: Some(CAPABILITIES.into_iter().chain(matrices).collect()),
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            image_load: BoundsCheckPolicy::Unchecked,
            binding_array: BoundsCheckPolicy::Unchecked,
        },
        zero_initialize_workgroup_memory: ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions { shader_stage: stage, entry_point: entry.to_string() };
    let words = spv::write_vec(&module, &info, &options, Some(&entry)).map_err(|e| e.to_string())?;
    shared(words)
}

// Numbers of the SPIR-V specification, section 3, and of SPV_KHR_cooperative_matrix.
const HEADER_WORDS: usize = 5;
const BOUND: usize = 3;
const OP_CAPABILITY: u32 = 2 << 16 | 17;
const OP_TYPE_INT: u32 = 21;
const OP_TYPE_POINTER: u32 = 32;
const OP_CONSTANT: u32 = 43;
const OP_VARIABLE: u32 = 59;
const OP_LOAD: u32 = 61;
const OP_STORE: u32 = 62;
const OP_ACCESS_CHAIN: u32 = 65;
const OP_IN_BOUNDS_ACCESS_CHAIN: u32 = 66;
const OP_CONTROL_BARRIER: u32 = 224;
const OP_COOPERATIVE_MATRIX_LOAD: u32 = 4457;
const OP_COOPERATIVE_MATRIX_STORE: u32 = 4458;
const VULKAN_MEMORY_MODEL: u32 = 5345;
const STORAGE_WORKGROUP: u32 = 4;
const NON_PRIVATE_POINTER: u32 = 0x20;
const ACQUIRE_RELEASE: u32 = 0x8;
const WORKGROUP_MEMORY: u32 = 0x100;
const MAKE_AVAILABLE_AND_VISIBLE: u32 = 0x2000 | 0x4000;

/// The module with all accesses to workgroup memory shared by the invocations of a workgroup, and with barriers that make
/// what was written before them visible after them.
fn shared(words: Vec<u32>) -> Result<Vec<u32>, String> {
    // Capabilities come first. Other memory models know no private accesses.
    if !words[HEADER_WORDS..].chunks(2).take_while(|c| c[0] == OP_CAPABILITY).any(|c| c[1] == VULKAN_MEMORY_MODEL) {
        return Ok(words);
    }
    let mut out = words.get(..HEADER_WORDS).ok_or("the module has no header")?.to_vec();
    // Types of pointers to workgroup memory, pointers of them, and constants that say what such a barrier orders.
    let (mut types, mut pointers) = (Vec::new(), Vec::new());
    let (mut unsigned, mut barriers) = (None, Vec::new());
    let mut at = HEADER_WORDS;
    while let Some(&first) = words.get(at) {
        let instruction = words.get(at..at + (first >> 16).max(1) as usize).ok_or("the module ends in an instruction")?;
        at += instruction.len();
        let mut instruction = instruction.to_vec();
        // Where the memory operands are, if the instruction has an access.
        let operands = match (first & 0xffff, &instruction[1..]) {
            (OP_TYPE_INT, &[id, 32, 0]) => {
                unsigned = Some(id);
                None
            }
            (OP_TYPE_POINTER, &[id, STORAGE_WORKGROUP, _]) => {
                types.push(id);
                None
            }
            (OP_CONSTANT, &[of, id, value])
                if Some(of) == unsigned && value & !WORKGROUP_MEMORY == ACQUIRE_RELEASE && value != ACQUIRE_RELEASE =>
            {
                // The number may be one of the shader's own, so the barriers get another.
                let new = out[BOUND];
                out[BOUND] += 1;
                barriers.push((id, new));
                out.extend_from_slice(&instruction);
                instruction = vec![first, of, new, value | MAKE_AVAILABLE_AND_VISIBLE];
                None
            }
            (OP_VARIABLE | OP_ACCESS_CHAIN | OP_IN_BOUNDS_ACCESS_CHAIN, &[of, id, ..]) if types.contains(&of) => {
                pointers.push(id);
                None
            }
            (OP_CONTROL_BARRIER, &[_, _, semantics]) => {
                if let Some(&(_, new)) = barriers.iter().find(|(id, _)| *id == semantics) {
                    instruction[3] = new;
                }
                None
            }
            (OP_LOAD, &[_, _, pointer, ..]) if pointers.contains(&pointer) => Some(4),
            (OP_STORE, &[pointer, ..]) if pointers.contains(&pointer) => Some(3),
            (OP_COOPERATIVE_MATRIX_LOAD, &[_, _, pointer, ..]) if pointers.contains(&pointer) => Some(6),
            (OP_COOPERATIVE_MATRIX_STORE, &[pointer, ..]) if pointers.contains(&pointer) => Some(5),
            _ => None,
        };
        if let Some(operands) = operands {
            match instruction.len().checked_sub(operands) {
                None => return Err("a matrix is loaded or stored without a stride".into()),
                Some(0) => instruction.push(NON_PRIVATE_POINTER),
                Some(_) => instruction[operands] |= NON_PRIVATE_POINTER,
            }
            instruction[0] = (instruction.len() as u32) << 16 | first & 0xffff;
        }
        out.extend_from_slice(&instruction);
    }
    Ok(out)
}
