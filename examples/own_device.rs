//! A kernel on one's own wgpu device and buffers.
//!
//! `cargo run --release --example own_device`

use tilewright::kernels::rms_norm;
use tilewright::wgpu::util::{BufferInitDescriptor, DeviceExt};
use tilewright::wgpu::{self, BufferUsages};
use tilewright::{BUFFER_USAGES, DType, Device, Workspace};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    pollster::block_on(async {
        // The program's own device. Subgroups make kernels faster, where the adapter has them.
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let Ok(adapter) = instance.request_adapter(&wgpu::RequestAdapterOptions::default()).await else {
            println!("no adapter");
            return Ok(());
        };
        let required_features = adapter.features() & wgpu::Features::SUBGROUP;
        let descriptor = wgpu::DeviceDescriptor { required_features, ..Default::default() };
        let (own, queue) = adapter.request_device(&descriptor).await?;
        let buffer = |numbers: &[f32]| {
            let contents: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            own.create_buffer_init(&BufferInitDescriptor { label: None, contents: &contents, usage: BUFFER_USAGES })
        };
        let (x, weight, y) = (buffer(&[1.0, 2.0, 3.0, 4.0]), buffer(&[1.0, 1.0, 1.0, 2.0]), buffer(&[0.0; 4]));

        // Kernels over these buffers.
        let device = Device::from_wgpu(&adapter, own.clone(), queue.clone())?;
        let tensor = |buffer, shape: &[u32]| device.tensor_of(buffer, shape, DType::F32);
        let mut rec = device.recorder();
        rms_norm(&mut rec, &tensor(&x, &[1, 4])?, &tensor(&weight, &[4])?, &tensor(&y, &[1, 4])?, 1e-5)?;
        device.run(&rec.finish(&mut Workspace::default()))?;

        // The program's own work follows on the same queue.
        let usage = BufferUsages::COPY_DST | BufferUsages::MAP_READ;
        let staging =
            own.create_buffer(&wgpu::BufferDescriptor { label: None, size: 16, usage, mapped_at_creation: false });
        let mut encoder = own.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&y, 0, &staging, 0, 16);
        queue.submit([encoder.finish()]);
        staging.slice(..).map_async(wgpu::MapMode::Read, |mapped| mapped.unwrap());
        own.poll(wgpu::PollType::wait_indefinitely())?;
        let bytes = staging.slice(..).get_mapped_range()?.to_vec();
        let numbers: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        println!("on {}: {numbers:.3?}", device.info().name);
        Ok(())
    })
}
