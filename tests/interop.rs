//! Kernels on the caller's own wgpu device and buffers.

use tilewright::kernels::rms_norm;
use tilewright::wgpu::util::{BufferInitDescriptor, DeviceExt};
use tilewright::wgpu::{self, BufferUsages};
use tilewright::{BUFFER_USAGES, DType, Device, Tier, Workspace};

use super::common;

/// An adapter and a device that asks for few features.
fn open(limits: wgpu::Limits) -> Option<(wgpu::Adapter, wgpu::Device, wgpu::Queue)> {
    // Skips as other tests do where no adapter is.
    common::gpu(None)?;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
    pollster::block_on(async {
        let adapter = instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await.unwrap();
        let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
        let (device, queue) = adapter.request_device(&descriptor).await.unwrap();
        Some((adapter, device, queue))
    })
}

#[test]
fn kernels_run_on_the_callers_device_and_buffers() {
    let Some((adapter, own, queue)) = open(wgpu::Limits::default()) else { return };
    let buffer = |numbers: &[f32], usage| {
        let contents = bytemuck::cast_slice(numbers);
        own.create_buffer_init(&BufferInitDescriptor { label: None, contents, usage })
    };
    let given: Vec<f32> = (0..3 * 40).map(|at| ((at * 37 % 101) as f32 - 50.0) / 16.0).collect();
    let (x, weight) = (buffer(&given, BUFFER_USAGES), buffer(&[0.5; 40], BUFFER_USAGES));
    // Larger than the tensor: the rest must stay.
    let y = buffer(&[7.0; 3 * 40 + 8], BUFFER_USAGES);
    let device = Device::from_wgpu(&adapter, own.clone(), queue).unwrap();
    // Without the feature.
    assert!(matches!(device.tier(), Tier::Baseline | Tier::Scalar), "{:?}", device.tier());
    let out = device.tensor_of(&y, &[3, 40], DType::F32).unwrap();
    let mut rec = device.recorder();
    let tensor = |buffer, shape: &[u32]| device.tensor_of(buffer, shape, DType::F32).unwrap();
    rms_norm(&mut rec, &tensor(&x, &[3, 40]), &tensor(&weight, &[40]), &out, 1e-5).unwrap();
    device.run(&rec.finish(&mut Workspace::default())).unwrap();
    let numbers: Vec<f32> = pollster::block_on(device.read(&out)).unwrap();
    for (row, got) in given.chunks(40).zip(numbers.chunks(40)) {
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 40.0;
        for (&x, &y) in row.iter().zip(got) {
            assert!((0.5 * f64::from(x) / (mean + 1e-5).sqrt() - f64::from(y)).abs() < 1e-5);
        }
    }
    // The caller still owns the buffer when its tensor is gone: nothing else gets it.
    drop(out);
    let other = device.upload("other", &[3 * 40], &[1f32; 3 * 40]).unwrap();
    assert_ne!(device.buffer_of(&other).unwrap(), y);
    let rest = device.tensor_of(&y, &[3 * 40 + 8], DType::F32).unwrap();
    let rest: Vec<f32> = pollster::block_on(device.read(&rest)).unwrap();
    assert_eq!((&rest[..120], &rest[120..]), (&numbers[..], &[7.0; 8][..]));

    let small = device.tensor_of(&weight, &[41], DType::F32).unwrap_err().to_string();
    assert!(small.contains("176") && small.contains("160"), "{small}");
    let unusable = device.tensor_of(&buffer(&[0.0; 4], BufferUsages::STORAGE), &[4], DType::F32).unwrap_err();
    assert!(unusable.to_string().contains("COPY_SRC"), "{unusable}");
    assert_eq!(Device::cpu().tensor_of(&weight, &[4], DType::F32).unwrap_err().code(), "operand");
}

#[test]
fn device_below_webgpus_limits_is_refused() {
    let limits = wgpu::Limits { max_storage_buffers_per_shader_stage: 4, ..wgpu::Limits::default() };
    let Some((adapter, own, queue)) = open(limits) else { return };
    let error = Device::from_wgpu(&adapter, own, queue).unwrap_err();
    assert_eq!(error.code(), "limit");
    assert!(error.to_string().contains("maxStorageBuffersPerShaderStage"), "{error}");
}
