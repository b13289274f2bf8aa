//! A process that compiles shaders with a Vulkan driver: RADV for an absent GPU, or the machine's own. A separate process,
//! because a compiler may crash or hang, and because RADV reads the GPU's name from the environment.
//!
//! Nothing is ever dispatched. wgpu cannot open RADV's device of an absent GPU, so this module uses Vulkan.

use std::ffi::{CStr, CString, c_char};
use std::io::{self, Read, Write};

use ash::vk;
use serde_json::{Map, Value, json};

type Failure = Box<dyn std::error::Error>;

/// Reads requests from standard input until it ends, and writes a line of JSON for each to standard output.
/// `is_robust`: whether the driver is to keep accesses within their buffers, as wgpu asks it to.
pub fn serve(is_robust: bool) -> Result<(), Failure> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    // SAFETY: all calls below follow the Vulkan specification; handles live as long as this process, which ends with
    // this function.
    let device = match unsafe { Device::open(is_robust) } {
        Ok(device) => device,
        Err(error) => {
            writeln!(output, "{}", json!({ "error": error.to_string() }))?;
            return Ok(());
        }
    };
    writeln!(
        output,
        "{}",
        json!({
            "device": device.name,
            "driver": device.driver,
            "has_matrices": device.has_matrices,
            "subgroup": device.subgroup,
            "converts_slowly": device.vendor == NVIDIA,
        })
    )?;
    output.flush()?;
    while let Some((entry, words)) = read_request(&mut input)? {
        // SAFETY: as above; naga wrote and validated the words.
        let answer = unsafe { device.compile(&entry, &words) };
        let answer = answer.unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

/// Bytes of a request: lengths of the entry point's name and of the words, then both.
pub fn request(entry: &str, words: &[u32]) -> Vec<u8> {
    let lengths = [entry.len() as u32, words.len() as u32];
    [bytemuck::cast_slice(&lengths), entry.as_bytes(), bytemuck::cast_slice(words)].concat()
}

fn read_request(input: &mut impl Read) -> Result<Option<(CString, Vec<u32>)>, Failure> {
    let mut lengths = [0_u32; 2];
    match input.read_exact(bytemuck::cast_slice_mut(&mut lengths)) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let mut entry = vec![0; lengths[0] as usize];
    input.read_exact(&mut entry)?;
    let mut words = vec![0; lengths[1] as usize];
    input.read_exact(bytemuck::cast_slice_mut(&mut words))?;
    Ok(Some((CString::new(entry)?, words)))
}

struct Device {
    _entry: ash::Entry,
    _instance: ash::Instance,
    device: ash::Device,
    executables: ash::khr::pipeline_executable_properties::Device,
    layout: vk::PipelineLayout,
    name: String,
    driver: String,
    has_matrices: bool,
    /// Smallest and largest.
    subgroup: [u32; 2],
    vendor: u32,
}

/// Its number among vendors.
const NVIDIA: u32 = 0x10de;

/// `params` and the number of storage buffers that WebGPU guarantees.
const BINDINGS: u32 = 9;

impl Device {
    /// The first device of those that are most of a GPU, with the features that wgpu enables: those for robustness affect
    /// the code.
    unsafe fn open(is_robust: bool) -> Result<Device, Failure> {
        unsafe {
            let entry = ash::Entry::load()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let create = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&create, None)?;
            let devices = instance.enumerate_physical_devices()?;
            let rank = |&device: &vk::PhysicalDevice| match instance.get_physical_device_properties(device).device_type
            {
                vk::PhysicalDeviceType::DISCRETE_GPU => 0,
                vk::PhysicalDeviceType::INTEGRATED_GPU => 1,
                _ => 2,
            };
            let physical = devices.into_iter().min_by_key(rank).ok_or("there is no device")?;
            let extensions = instance.enumerate_device_extension_properties(physical)?;
            let has = |name: &CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
            let mut driver = vk::PhysicalDeviceDriverProperties::default();
            let mut sizes = vk::PhysicalDeviceVulkan13Properties::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut driver).push_next(&mut sizes);
            instance.get_physical_device_properties2(physical, &mut properties);
            let vendor = properties.properties.vendor_id;
            let name = properties.properties.device_name_as_c_str()?.to_string_lossy().into_owned();
            let subgroup = [sizes.min_subgroup_size, sizes.max_subgroup_size];
            let has_matrices = has(ash::khr::cooperative_matrix::NAME);
            if !has(ash::khr::pipeline_executable_properties::NAME) {
                return Err(format!("{name} has no VK_KHR_pipeline_executable_properties").into());
            }

            let mut executable =
                vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default().pipeline_executable_info(true);
            let mut robustness = vk::PhysicalDeviceRobustness2FeaturesEXT::default().robust_buffer_access2(is_robust);
            let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
            let mut of_1_1 = vk::PhysicalDeviceVulkan11Features::default()
                .storage_buffer16_bit_access(true)
                .uniform_and_storage_buffer16_bit_access(true);
            let mut of_1_2 = vk::PhysicalDeviceVulkan12Features::default()
                .shader_float16(true)
                .shader_int8(true)
                .vulkan_memory_model(true)
                .vulkan_memory_model_device_scope(true);
            let mut of_1_3 = vk::PhysicalDeviceVulkan13Features::default()
                .shader_integer_dot_product(true)
                .subgroup_size_control(true)
                .robust_image_access(true);
            let mut names = vec![ash::khr::pipeline_executable_properties::NAME.as_ptr()];
            let mut features = vk::PhysicalDeviceFeatures2::default()
                .features(vk::PhysicalDeviceFeatures::default().robust_buffer_access(is_robust))
                .push_next(&mut executable)
                .push_next(&mut of_1_1)
                .push_next(&mut of_1_2)
                .push_next(&mut of_1_3);
            if is_robust && has(ash::ext::robustness2::NAME) {
                names.push(ash::ext::robustness2::NAME.as_ptr());
                features = features.push_next(&mut robustness);
            }
            if has_matrices {
                names.push(ash::khr::cooperative_matrix::NAME.as_ptr());
                features = features.push_next(&mut matrices);
            }
            let queue = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
            let create = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queue)
                .enabled_extension_names(&names)
                .push_next(&mut features);
            let device = instance.create_device(physical, &create, None)?;
            let executables = ash::khr::pipeline_executable_properties::Device::new(&instance, &device);
            let bindings: Vec<_> = (0..BINDINGS).map(binding).collect();
            let create = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            let sets = [device.create_descriptor_set_layout(&create, None)?];
            let layout =
                device.create_pipeline_layout(&vk::PipelineLayoutCreateInfo::default().set_layouts(&sets), None)?;
            let driver = driver.driver_info_as_c_str()?.to_string_lossy().into_owned();
            let _instance = instance;
            Ok(Device {
                _entry: entry,
                _instance,
                device,
                executables,
                layout,
                name,
                driver,
                has_matrices,
                subgroup,
                vendor,
            })
        }
    }

    /// Statistics by name, subgroup size and, if the driver tells it, ISA of one shader.
    unsafe fn compile(&self, entry: &CStr, words: &[u32]) -> Result<Value, Failure> {
        unsafe {
            let module = self.device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(words), None)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .flags(vk::PipelineShaderStageCreateFlags::ALLOW_VARYING_SUBGROUP_SIZE)
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(entry);
            let create = vk::ComputePipelineCreateInfo::default()
                .flags(
                    vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
                        | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR,
                )
                .stage(stage)
                .layout(self.layout);
            let pipeline = self
                .device
                .create_compute_pipelines(vk::PipelineCache::null(), &[create], None)
                .map_err(|(_, error)| error)?;
            let pipeline = *pipeline.first().ok_or("no pipeline")?;
            let info = vk::PipelineInfoKHR::default().pipeline(pipeline);
            let properties = self.executables.get_pipeline_executable_properties(&info)?;
            let subgroup = properties.first().ok_or("no executable")?.subgroup_size;
            let info = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
            let mut statistics = Map::new();
            for statistic in self.executables.get_pipeline_executable_statistics(&info)? {
                let value = match statistic.format {
                    vk::PipelineExecutableStatisticFormatKHR::UINT64 => json!(statistic.value.u64),
                    vk::PipelineExecutableStatisticFormatKHR::INT64 => json!(statistic.value.i64),
                    vk::PipelineExecutableStatisticFormatKHR::FLOAT64 => json!(statistic.value.f64),
                    vk::PipelineExecutableStatisticFormatKHR::BOOL32 => json!(u32::from(statistic.value.b32 != 0)),
                    _ => continue,
                };
                statistics.insert(statistic.name_as_c_str()?.to_string_lossy().into_owned(), value);
            }
            let isa = self.isa(&info)?;
            self.device.destroy_pipeline(pipeline, None);
            self.device.destroy_shader_module(module, None);
            Ok(json!({ "subgroup": subgroup, "statistics": statistics, "isa": isa }))
        }
    }

    /// Text of the representation that is the ISA, if the driver has one: the others are earlier stages.
    unsafe fn isa(&self, info: &vk::PipelineExecutableInfoKHR<'_>) -> Result<Option<String>, Failure> {
        unsafe {
            let get = self.executables.fp().get_pipeline_executable_internal_representations_khr;
            let handle = self.executables.device();
            let mut n = 0;
            get(handle, info, &mut n, std::ptr::null_mut()).result()?;
            let mut found = vec![vk::PipelineExecutableInternalRepresentationKHR::default(); n as usize];
            get(handle, info, &mut n, found.as_mut_ptr()).result()?;
            // The first call returned the sizes, the second writes the texts.
            let mut texts: Vec<Vec<u8>> = found.iter().map(|r| vec![0; r.data_size]).collect();
            for (representation, text) in found.iter_mut().zip(&mut texts) {
                representation.p_data = text.as_mut_ptr().cast();
            }
            get(handle, info, &mut n, found.as_mut_ptr()).result()?;
            let names: Vec<String> = found.iter().map(|r| name(&r.name)).collect();
            let at = names.iter().position(|name| name == "Assembly");
            Ok(at.map(|at| String::from_utf8_lossy(&texts[at]).trim_end_matches('\0').to_string()))
        }
    }
}

fn name(chars: &[c_char]) -> String {
    chars.iter().take_while(|&&c| c != 0).map(|&c| char::from(c.to_ne_bytes()[0])).collect()
}

fn binding(number: u32) -> vk::DescriptorSetLayoutBinding<'static> {
    vk::DescriptorSetLayoutBinding::default()
        .binding(number)
        .descriptor_type(if number == 0 {
            vk::DescriptorType::UNIFORM_BUFFER
        } else {
            vk::DescriptorType::STORAGE_BUFFER
        })
        .descriptor_count(1)
        .stage_flags(vk::ShaderStageFlags::COMPUTE)
}
