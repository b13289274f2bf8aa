//! Computes components and gates from vectors, on a device.

use super::weights::{Glu, Layer, PartialGate, Projection};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{self, Gelu, Linear};
use crate::matrix::Matrix;
use crate::recording::{Recorder, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::record_tested;

/// A layer on a device.
struct Dense {
    w: Matrix,
    bias: Tensor,
}

impl Dense {
    fn new(device: &Device, label: &str, layer: &Layer) -> Result<Dense, Error> {
        Ok(Dense {
            w: device.upload_matrix(label, [layer.n_out, layer.n_in], &layer.w)?,
            bias: device.upload(label, &[layer.n_out], &layer.b)?,
        })
    }

    fn record(&self, rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
        Linear { bias: Some(&self.bias), ..Linear::new(&self.w) }.record(rec, x, y)
    }

    /// Records the layer with a temporary result.
    fn passed_on(&self, rec: &mut Recorder, x: &Tensor) -> Result<Tensor, Error> {
        let y = rec.temporary("y", &[x.shape()[0], self.w.rows()])?;
        self.record(rec, x, &y)?;
        Ok(y)
    }
}

enum DenseGate {
    None,
    Linear(Dense),
    /// SiLU between the layers.
    Perceptron(Dense, Dense),
}

/// The part of a mixture that depends on queries only, or on items only.
pub(super) struct MolEncoder {
    glu: Option<(Glu, Dense)>,
    out: Dense,
    gate: DenseGate,
}

/// An encoder's outputs: `[T, components D]`, and `[T, columns]` if it has a gate.
pub(super) struct Encoded {
    pub components: Tensor,
    pub gates: Option<Tensor>,
}

impl MolEncoder {
    pub fn new(device: &Device, projection: &Projection, glu: Glu, gate: &PartialGate) -> Result<MolEncoder, Error> {
        let hidden = projection.glu.as_ref().map(|layer| Dense::new(device, "mol.glu", layer)).transpose()?;
        let gate = match gate {
            PartialGate::None => DenseGate::None,
            PartialGate::Linear(layer) => DenseGate::Linear(Dense::new(device, "mol.gate", layer)?),
            PartialGate::Perceptron(first, second) => DenseGate::Perceptron(
                Dense::new(device, "mol.gate.1", first)?,
                Dense::new(device, "mol.gate.2", second)?,
            ),
        };
        let out = Dense::new(device, "mol.out", &projection.out)?;
        Ok(MolEncoder { glu: hidden.map(|layer| (glu, layer)), out, gate })
    }

    /// Records the encoder on `x`, `[T, dimensions of a vector]`.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor) -> Result<Encoded, Error> {
        let n_rows = x.shape()[0];
        let kept = |w: &Matrix| Tensor::declare("mol.encoded", Role::Activations, &[n_rows, w.rows()], DType::F32);
        let gates = match &self.gate {
            DenseGate::None => None,
            DenseGate::Linear(layer) => {
                let y = kept(&layer.w)?;
                layer.record(rec, x, &y)?;
                Some(y)
            }
            DenseGate::Perceptron(first, second) => {
                let z = first.passed_on(rec, x)?;
                let hidden = rec.temporary("hidden", z.shape())?;
                kernels::silu(rec, &z, &hidden)?;
                let y = kept(&second.w)?;
                second.record(rec, &hidden, &y)?;
                Some(y)
            }
        };
        let components = kept(&self.out.w)?;
        match &self.glu {
            None => self.out.record(rec, x, &components)?,
            Some((glu, layer)) => {
                let both = layer.passed_on(rec, x)?;
                let hidden = rec.temporary("hidden", &[n_rows, layer.w.rows() / 2])?;
                match glu {
                    Glu::GeGlu => kernels::geglu(rec, &both, &hidden, Gelu::Exact)?,
                    Glu::SwiGlu => kernels::swiglu(rec, &both, &hidden)?,
                }
                self.out.record(rec, &hidden, &components)?;
            }
        }
        Ok(Encoded { components, gates })
    }

    /// Encodes rows once. Returns components and gates; gates are empty if the encoder has none.
    pub async fn encode(&self, device: &Device, x: &[f32], n_rows: usize) -> Result<[Vec<f32>; 2], Error> {
        let x = device.upload("x", &[n_rows as u32, (x.len() / n_rows) as u32], x)?;
        let record = || {
            let mut rec = device.recorder();
            let encoded = self.record(&mut rec, &x)?;
            Ok((rec.finish(&mut Workspace::default()), encoded))
        };
        let (recording, encoded) = record_tested(device, record, |(recording, _)| recording).await?;
        device.run(&recording)?;
        encoded.read(device).await
    }
}

impl Encoded {
    /// Reads components and gates; gates are empty if there are none.
    pub async fn read(&self, device: &Device) -> Result<[Vec<f32>; 2], Error> {
        let gates = match &self.gates {
            Some(gates) => device.read(gates).await?,
            None => Vec::new(),
        };
        Ok([device.read(&self.components).await?, gates])
    }
}
