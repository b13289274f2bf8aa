//! Loading a model from bytes that arrive piece by piece.

use super::{LoadOptions, Model};
use crate::device::Device;
use crate::error::Error;
use crate::load::{FileName, Loader};
#[cfg(all(target_arch = "wasm32", feature = "web"))]
use crate::load::{ReadFile, WeightFiles};
use crate::platform::MaybeSend;
use crate::target::Tuning;
use crate::tuning::{TunedRow, products, tune_load};

impl Model {
    /// A loader for these files. It ignores `options.progress`; use [`Loader::progress`].
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn loader(device: &Device, files: Vec<FileName>, options: LoadOptions<'_>) -> Result<Loader<Model>, Error> {
        let options = of_pieces(options);
        Loader::new(device, files, move |device, header, _| Model::declare(device, header, None, &options()))
    }

    /// As [`Model::loader`]. Passes call `read` for weights with disk offload.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn loader_reading(
        device: &Device,
        files: Vec<FileName>,
        options: LoadOptions<'_>,
        read: ReadFile,
    ) -> Result<Loader<Model>, Error> {
        let options = of_pieces(options);
        Loader::new(device, files, move |device, header, numbers| {
            Model::declare(device, header, Some(&WeightFiles::new(read, numbers)), &options())
        })
    }
}

/// The options for a streamed load, without the progress callback: it is not `Send`, but a loader may be.
fn of_pieces(options: LoadOptions<'_>) -> impl Fn() -> LoadOptions<'static> + MaybeSend + use<> {
    move || LoadOptions {
        context_length: options.context_length,
        fit_context: options.fit_context,
        memory_limit: options.memory_limit,
        stream_layers: options.stream_layers,
        max_pass: options.max_pass,
        kv_type: options.kv_type,
        exact: options.exact,
        mtp_tokens: options.mtp_tokens,
        ..LoadOptions::default()
    }
}

impl Loader<Model> {
    /// Switches the model to another tuning of the device.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.device = self.device.with_tuning(tuning);
    }

    /// Measures kernel variants for those of the model's products that the device's tuning lacks, and makes the model
    /// use the fastest, as in [`crate::tuning`]. Begins no measurement after three seconds, two in a browser, shared by
    /// all products, but compiles and runs one product's default variant in any case, which takes longer on slow
    /// adapters. No effect on the CPU or before the headers are read.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn tune(&mut self) -> Result<Vec<TunedRow>, Error> {
        let Some(model) = self.declared() else { return Ok(Vec::new()) };
        if !self.device.is_gpu() {
            return Ok(Vec::new());
        }
        let device = self.device.for_model(!model.rounds());
        let mut products = products(&device, &model.transformer().weights);
        products.retain(|product| !device.tuning().is_measured(product.bucket));
        let (tuning, rows) = tune_load(&device, &products).await?;
        self.set_tuning(tuning);
        Ok(rows)
    }

    /// The model, once all bytes have been pushed.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are missing; errors of the device.
    pub async fn finish(self) -> Result<Model, Error> {
        let digest = self.digest();
        let (model, device) = self.loaded()?;
        model.fill().await?;
        let model = model.complete(device, digest)?;
        model.device().drained().await?;
        Ok(model)
    }
}
