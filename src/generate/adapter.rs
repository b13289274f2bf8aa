//! LoRA adapters, resident beside their model.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use super::model::ModelInner;
use super::passes::RecordedPasses;
use super::{Model, Session};
use crate::device::Device;
use crate::error::Error;
use crate::load::{AdapterFile, LoraFactors};
use crate::matrix::TailEdges;
use crate::model::{FactorPlaces, Transformer};
use crate::tensor::Tensor;

/// A LoRA adapter (Hu et al. 2021, arXiv:2106.09685) on its model's device; the model's weights are unchanged.
/// Clones share it. Any number can be resident; a session uses one at a time, see [`Session::set_adapter`]. Dropping
/// the last handle, and the last session that used it, frees its memory.
#[derive(Clone)]
pub struct Adapter {
    inner: Arc<AdapterInner>,
}

pub(super) struct AdapterInner {
    id: u64,
    name: String,
    /// The model's, with the adapter's deltas.
    transformer: Transformer,
    model: Weak<ModelInner>,
    n_targets: usize,
    size_bytes: u64,
    digest: u64,
}

impl AdapterInner {
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

impl Adapter {
    /// The name of the adapter's file or folder.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Number of adapted matrices.
    pub fn n_targets(&self) -> usize {
        self.inner.n_targets
    }

    /// Bytes on the device.
    pub fn size_bytes(&self) -> u64 {
        self.inner.size_bytes
    }

    pub(super) fn id(&self) -> u64 {
        self.inner.id
    }

    /// Identifies the adapter's content, regardless of file and device.
    pub(super) fn digest(&self) -> u64 {
        self.inner.digest
    }

    pub(super) fn transformer(&self) -> &Transformer {
        &self.inner.transformer
    }
}

impl Model {
    /// Loads an adapter from a PEFT folder or a GGUF file, see [`AdapterFile::open`]. `scale` multiplies its deltas.
    ///
    /// # Errors
    /// Those of [`AdapterFile::open`] and [`Model::add_adapter`].
    pub fn load_adapter(&self, path: impl AsRef<Path>, scale: f32) -> Result<Adapter, Error> {
        let path = path.as_ref();
        self.add_adapter(&AdapterFile::open(path)?, scale).map_err(|error| error.in_model_file(path))
    }

    /// Loads an adapter beside the model. `scale` multiplies its deltas.
    ///
    /// # Errors
    /// [`Error::Adapter`] naming the key or tensor that does not match the model; [`Error::Option`] for a non-finite
    /// scale, or if other devices compute some layers; [`Error::Memory`] if it does not fit beside the model, a
    /// session and the other adapters, with nothing allocated; errors of [`Device::write`].
    pub fn add_adapter(&self, file: &AdapterFile, scale: f32) -> Result<Adapter, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        if !scale.is_finite() {
            let (expected, found) = ("a finite number".into(), scale.to_string());
            return Err(Error::Option { option: "scale", expected, found });
        }
        let base = self.base_transformer();
        if base.layers().start > 0 {
            self.expect_resident("adapter")?;
        }
        let factors = file.factors(&base.config, &base.weights.adaptable(&base.config))?;
        let rank_of = |name: &str| factors.iter().find(|factors| factors.name == name).map(|factors| factors.rank);
        let (weights, places) = base.weights.adapted(&self.device().target(), &rank_of)?;
        let most = self.device().target().limits().max_binding_bytes;
        if let Some((name, place)) = places.iter().find(|(_, place)| place.b.size_bytes() > most) {
            return Err(Error::Adapter {
                field: name.clone(),
                expected: format!("a B matrix of at most {most} bytes, the device's binding limit"),
                found: format!("{} bytes", place.b.size_bytes()),
            });
        }
        let size_bytes = weights.delta_tensors().map(Tensor::size_bytes).sum();
        self.check_adapter_fits(size_bytes)?;
        write(self.device(), &factors, &places, scale)?;
        let digest = factors.iter().fold(u64::from(scale.to_bits()), |sum, factors| sum.wrapping_add(factors.digest()));
        let inner = AdapterInner {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: file.name().to_owned(),
            transformer: base.with_weights(weights),
            model: self.downgrade(),
            n_targets: factors.len(),
            size_bytes,
            digest,
        };
        let inner = Arc::new(inner);
        self.loaded_adapters().lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&inner));
        Ok(Adapter { inner })
    }

    /// The same model with this adapter, or none, for new sessions.
    ///
    /// # Errors
    /// [`Error::Operand`] if the adapter belongs to another model.
    pub fn with_adapter(&self, adapter: Option<&Adapter>) -> Result<Model, Error> {
        let model = self.adapted(adapter)?;
        let plan = RecordedPasses::declare(&self.device().target(), model.transformer(), self.room())?.plan();
        Ok(model.planned(plan))
    }

    /// The same model with named adapters for engine requests:
    /// [`Request::adapter`](crate::engine::Request::adapter).
    ///
    /// # Errors
    /// [`Error::Operand`] if an adapter belongs to another model; [`Error::Option`] for a duplicate name.
    pub fn with_adapters(&self, adapters: impl IntoIterator<Item = (String, Adapter)>) -> Result<Model, Error> {
        let adapters: Vec<(String, Adapter)> = adapters.into_iter().collect();
        for (at, (name, adapter)) in adapters.iter().enumerate() {
            self.check_is_own(adapter)?;
            if adapters[..at].iter().any(|(other, _)| other == name) {
                let (expected, found) = ("names that differ".into(), format!("`{name}` twice"));
                return Err(Error::Option { option: "adapters", expected, found });
            }
        }
        let mut model = self.clone();
        model.set_adapters(adapters.into());
        Ok(model)
    }

    fn check_is_own(&self, adapter: &Adapter) -> Result<(), Error> {
        if Weak::ptr_eq(&adapter.inner.model, &self.downgrade()) {
            return Ok(());
        }
        Err(Error::Operand {
            kernel: "model",
            operand: "adapter",
            expected: format!("an adapter loaded by `{}` on this device", self.name()),
            found: format!("`{}` of another model", adapter.name()),
        })
    }

    /// As [`Model::with_adapter`], with the plan unchanged.
    fn adapted(&self, adapter: Option<&Adapter>) -> Result<Model, Error> {
        adapter.map_or(Ok(()), |adapter| self.check_is_own(adapter))?;
        let mut model = self.clone();
        model.set_adapter(adapter.cloned());
        Ok(model)
    }

    /// Number of the new sessions' adapter; 0 is none.
    pub(super) fn adapter_id(&self) -> u64 {
        self.adapter().map_or(0, Adapter::id)
    }

    /// Bytes of this model's resident adapters.
    pub fn adapters_bytes(&self) -> u64 {
        let mut adapters = self.loaded_adapters().lock().unwrap_or_else(PoisonError::into_inner);
        adapters.retain(|adapter| adapter.strong_count() > 0);
        adapters.iter().filter_map(Weak::upgrade).map(|adapter| adapter.size_bytes()).sum()
    }
}

impl Session {
    /// The adapter in use.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.model.adapter()
    }

    /// Switches to an adapter, or to none. Tokens stay, but unless the adapter is the one in use, their cache is
    /// recomputed when next needed. Passes are recorded once per adapter.
    ///
    /// # Errors
    /// [`Error::Operand`] if the adapter belongs to another model or exceeds the device's limits; the session is
    /// then unchanged.
    pub fn set_adapter(&mut self, adapter: Option<&Adapter>) -> Result<(), Error> {
        if adapter.map_or(0, Adapter::id) == self.model.adapter_id() {
            return Ok(());
        }
        let model = self.model.adapted(adapter)?;
        let before = std::mem::replace(&mut self.model, model);
        if let Err(error) = self.select_passes() {
            self.model = before;
            self.select_passes()?;
            return Err(error);
        }
        self.model = self.model.clone().planned(self.passes.plan());
        self.sequence.forget_cache();
        self.mtp.forget();
        Ok(())
    }

    fn select_passes(&mut self) -> Result<(), Error> {
        let resident: Vec<u64> = {
            let adapters = self.model.loaded_adapters().lock().unwrap_or_else(PoisonError::into_inner);
            adapters.iter().filter_map(Weak::upgrade).map(|adapter| adapter.id).collect()
        };
        let target = self.model.device().target();
        self.passes.select(&target, self.model.transformer(), self.model.adapter_id(), &resident)
    }

    /// Refuses a model whose initial adapter is not the one in use.
    pub(super) fn check_adapter_of(&self, model: &Model) -> Result<(), Error> {
        let [own, other] = [&self.model, model].map(Model::adapter);
        if own.map(Adapter::digest) == other.map(Adapter::digest) {
            return Ok(());
        }
        let shown =
            |adapter: Option<&Adapter>| adapter.map_or("none".into(), |adapter| format!("`{}`", adapter.name()));
        Err(Error::Operand { kernel: "session", operand: "adapter", expected: shown(own), found: shown(other) })
    }
}

/// Uploads factors, padded with zero rows and columns.
fn write(
    device: &Device,
    factors: &[LoraFactors<'_>],
    places: &[(String, FactorPlaces)],
    scale: f32,
) -> Result<(), Error> {
    // The first matrix of a stack stands for its tensors.
    for (_, FactorPlaces { a, b, .. }) in places.iter().filter(|(_, place)| place.a_row == 0) {
        let zeros = vec![0.0f32; a.rows() as usize * a.cols() as usize];
        a.write_rows(device, 0, bytemuck::cast_slice(&zeros), &mut TailEdges::default())?;
        device.write(b, 0, &vec![0.0f32; b.len()])?;
    }
    for (name, FactorPlaces { a, a_row, b, b_row, b_column }) in places {
        let Some(factors) = factors.iter().find(|factors| factors.name == *name) else { continue };
        a.write_rows(device, *a_row, bytemuck::cast_slice(&factors.a()?), &mut TailEdges::default())?;
        let (second, own) = (factors.b(scale)?, factors.rank as usize);
        let (n_columns, first) = (b.shape()[1] as usize, *b_column as usize);
        let mut rows = vec![0.0; second.len() / own * n_columns];
        rows.chunks_exact_mut(n_columns)
            .zip(second.chunks_exact(own))
            .for_each(|(to, from)| to[first..][..own].copy_from_slice(from));
        device.write(b, *b_row as usize * n_columns, &rows)?;
    }
    Ok(())
}
