//! Kernels on the caller's own wgpu device and buffers. The version of wgpu is the re-exported one, [`wgpu`].

use std::sync::Arc;

pub use wgpu;

use crate::counters::LiveCounters;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
pub use crate::gpu::BUFFER_USAGES;
use crate::gpu::{Fault, Gpu, PooledBuffer, Setup, report_within};
use crate::tensor::{Role, Tensor};

fn refused(operand: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Operand { kernel: "wgpu", operand, expected: expected.into(), found: found.into() }
}

impl Device {
    fn expect_gpu(&self) -> Result<(), Error> {
        if self.is_gpu() { Ok(()) } else { Err(refused("device", "a GPU", "the CPU")) }
    }

    /// Uses a wgpu device of the caller's. Kernels run on `queue`, so they see earlier submissions, and later ones see
    /// their results. The shader tier is the best that the device's features allow: request
    /// [`SUBGROUP`](wgpu::Features::SUBGROUP) and [`SHADER_F16`](wgpu::Features::SHADER_F16) for the faster ones, and
    /// the adapter's limits for large tensors.
    ///
    /// Takes the device's callback for losses; errors of other work on the device stay with the caller. Nothing is
    /// saved on disk, and losing the device is final: [`Recovery`](crate::Recovery) needs a device of its own.
    ///
    /// # Errors
    /// [`Error::Limit`] if the device has less than WebGPU guarantees, such as with
    /// [`downlevel_defaults`](wgpu::Limits::downlevel_defaults).
    pub fn from_wgpu(adapter: &wgpu::Adapter, device: wgpu::Device, queue: wgpu::Queue) -> Result<Device, Error> {
        let (features, limits) = (device.features(), device.limits());
        let report = report_within(adapter.clone(), (features, limits.clone()));
        let usual = wgpu::Limits::default();
        let needed = |of: &wgpu::Limits| {
            [
                ("maxStorageBuffersPerShaderStage", of.max_storage_buffers_per_shader_stage),
                ("maxComputeWorkgroupStorageSize", of.max_compute_workgroup_storage_size),
                ("maxComputeInvocationsPerWorkgroup", of.max_compute_invocations_per_workgroup),
                ("maxComputeWorkgroupsPerDimension", of.max_compute_workgroups_per_dimension),
            ]
        };
        for ((limit, expected), (_, found)) in needed(&usual).into_iter().zip(needed(&limits)) {
            let (expected, found) = (expected.into(), found.into());
            if found < expected {
                return Err(Error::Limit { adapter: report.name, limit, expected, found });
            }
        }
        let counters = Arc::new(LiveCounters::default());
        let setup = Setup::default();
        let gpu = Gpu::over(&report, (device, queue), setup, (counters.clone(), Fault::default()));
        let tiers = [report.tier, report.rounding_tier];
        Ok(Device::of_gpu(gpu, &report, tiers, "the caller's device".into(), counters))
    }

    /// A tensor whose memory is a buffer of the caller's, from its start on. The buffer is not reused after the tensor.
    ///
    /// # Errors
    /// [`Error::Operand`] if the device is the CPU, the buffer is smaller than the tensor (rounded up to 16 bytes) or
    /// lacks one of [`BUFFER_USAGES`]; errors of [`Tensor::declare`].
    pub fn tensor_of(&self, buffer: &wgpu::Buffer, shape: &[u32], dtype: DType) -> Result<Tensor, Error> {
        self.expect_gpu()?;
        if !buffer.usage().contains(BUFFER_USAGES) {
            return Err(refused("buffer", format!("usages {BUFFER_USAGES:?}"), format!("{:?}", buffer.usage())));
        }
        let tensor = Tensor::declare("caller's buffer", Role::Activations, shape, dtype)?;
        if buffer.size() < tensor.size_bytes() {
            let expected = format!("at least {} bytes, for {shape:?} rounded up to 16", tensor.size_bytes());
            return Err(refused("buffer", expected, buffer.size().to_string()));
        }
        let block =
            tensor.storage.block().ok_or_else(|| refused("tensor", "one with its own memory", "a temporary"))?;
        block.memory.attach(PooledBuffer::foreign(buffer.clone()));
        Ok(tensor)
    }

    /// The buffer of a tensor, which is allocated if necessary; for the caller's own passes on the same device. It has
    /// [`BUFFER_USAGES`], may be larger than the tensor, and must not be used after the tensor is dropped: another
    /// tensor may get it.
    ///
    /// # Errors
    /// [`Error::Operand`] if the device is the CPU; errors of [`Device::allocate`].
    pub fn buffer_of(&self, tensor: &Tensor) -> Result<wgpu::Buffer, Error> {
        self.expect_gpu()?;
        self.allocate(tensor)?;
        Ok(tensor.memory::<PooledBuffer>()?.buffer.clone())
    }
}
