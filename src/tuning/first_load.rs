//! Automatic tuning: the first load of a model on a GPU measures its products, and later loads read the results.

use std::sync::{Mutex, PoisonError};

use web_time::Instant;

use super::file::{latest, marker, write};
use super::measure::{products, tune_load};
use crate::device::Device;
use crate::error::Error;
use crate::model::Weights;
use crate::platform::block_on;

/// Where loading a model measures its matrix products, see [`LoadOptions::tune`](crate::LoadOptions::tune).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TuneOnLoad {
    /// Nowhere.
    #[default]
    Never,
    /// On GPUs, but not on software adapters.
    Gpus,
    /// On software adapters too, which is for tests.
    AllAdapters,
}

/// The device with the tuning in its file, after measuring and adding the model's products that the file lacks. Without
/// a tuning file, or if `on` excludes the device, the device unchanged. Blocks while it measures.
///
/// # Errors
/// [`Error::DeviceLost`]. Other failures are notices, and the usual choices then remain. Later loads do not measure the
/// same products after either, nor after a load that did not end, so a driver that fails under them does not lose the
/// device at every load. If memory was short, later loads try again.
pub(crate) fn tuned_for_load(
    device: &Device,
    weights: &Weights,
    is_exact: bool,
    on: TuneOnLoad,
) -> Result<Device, Error> {
    /// Loads at the same time would slow each other's measurements.
    static TURN: Mutex<()> = Mutex::new(());
    let is_included = match on {
        TuneOnLoad::Never => false,
        TuneOnLoad::Gpus => device.is_real_gpu(),
        TuneOnLoad::AllAdapters => device.is_gpu(),
    };
    if !is_included || device.tuning_file().is_none() {
        return Ok(device.clone());
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let device = device.with_tuning(latest(device));
    let of_model = device.for_model(is_exact);
    let mut missing = products(&of_model, weights);
    missing.retain(|product| !device.tuning().is_measured(product.bucket));
    if missing.is_empty() {
        return Ok(device);
    }
    let (start, name) = (Instant::now(), &device.info().name);
    let marker = marker(&device);
    let result = match &marker {
        Some(marker) if marker.exists() => Err(Failure::Unended),
        _ => {
            marker.iter().for_each(|marker| _ = std::fs::write(marker, []));
            block_on(tune_load(&of_model, &missing)).map_err(Failure::Of)
        }
    };
    marker.iter().for_each(|marker| _ = std::fs::remove_file(marker));
    let (tuning, error) = match result {
        Ok((tuning, _)) => (tuning, None),
        Err(error) => {
            let mut tuning = device.tuning().clone();
            if !matches!(error, Failure::Of(Error::OutOfMemory { .. })) {
                missing.iter().for_each(|product| tuning.choose(product.bucket, None));
            }
            (tuning, Some(error))
        }
    };
    device.tested().note(match &error {
        None => format!("the fastest kernels for {name} were measured in {:.1} s, once", start.elapsed().as_secs_f64()),
        Some(error) => format!("the fastest kernels for {name} could not be measured: {error}"),
    });
    if let Err(error) = write(&device, Some(&tuning)) {
        device.tested().note(format!("the tuned choices were not saved: {error}"));
    }
    match error {
        Some(Failure::Of(error @ Error::DeviceLost { .. })) => Err(error),
        _ => Ok(device.with_tuning(tuning)),
    }
}

/// Why nothing was measured.
enum Failure {
    Of(Error),
    Unended,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Of(error) => error.fmt(f),
            Failure::Unended => f.write_str("an earlier measurement did not end; `tilewright tune` repeats it"),
        }
    }
}
