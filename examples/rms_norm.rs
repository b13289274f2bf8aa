//! A single kernel: upload, record, run, read.
//!
//! `cargo run --release --example rms_norm`

use tilewright::kernels::rms_norm;
use tilewright::{DType, Device, Error, Role, Tensor, Workspace};

fn main() -> Result<(), Error> {
    pollster::block_on(async {
        let device = Device::auto().await;
        let x = device.upload("x", &[2, 4], &[1f32, 2.0, 3.0, 4.0, -1.0, 1.0, -1.0, 1.0])?; // [T, C]
        let weight = device.upload("weight", &[4], &[1f32, 1.0, 1.0, 2.0])?; // [C]
        let y = Tensor::declare("y", Role::Activations, &[2, 4], DType::F32)?; // [T, C]

        let mut rec = device.recorder();
        rms_norm(&mut rec, &x, &weight, &y, 1e-5)?;
        let recording = rec.finish(&mut Workspace::default()); // can run any number of times
        device.run(&recording)?;

        let y: Vec<f32> = device.read(&y).await?;
        println!("on {}: {y:.3?}", device.info().name);
        Ok(())
    })
}
