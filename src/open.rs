//! Opens a device with the tuning and self-test results of its adapter and driver.

use std::path::Path;

use crate::device::{Device, DeviceChoice};
use crate::error::Error;
use crate::gpu::Setup;
use crate::platform::BoxFuture;
use crate::shaders::Tier;
use crate::tested::Tested;
use crate::tuning;

/// The device with this process's self-test results.
fn with_results_of_process(device: &Device) -> Device {
    let info = device.info();
    let identity = [&info.name, &info.backend, &info.driver, &info.tier].map(String::clone);
    device.with_tested(Tested::of_process(identity))
}

impl Device {
    /// A real GPU if there is one, else the CPU, which is faster than a software adapter. [`Device::info`] has the
    /// choice and the reason.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn auto() -> Device {
        match Device::open(&DeviceChoice::Auto, None).await {
            Ok(device) => device,
            Err(error) => Device::on_cpu(format!("the GPU could not be used: {error}")),
        }
    }

    /// Opens the chosen device; `tier` overrides its default shader tier.
    ///
    /// On the first use of this program, adapter, driver and tier together, the pipelines of a model, encoder or
    /// index are compared with the CPU before they return a result; shader variants that compute wrongly are banned,
    /// see [`Device::banned`]. The results are saved in the user's cache folder or `TILEWRIGHT_CACHE_DIR`; if that
    /// is empty, they last for this process only.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] if the chosen GPU does not exist, [`Error::Limit`] if it lacks something that the tier
    /// or the kernels need, [`Error::Gpu`] if it cannot be opened. `Auto` falls back to the CPU only if there is no
    /// real GPU, not if one fails.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn open(choice: &DeviceChoice, tier: Option<Tier>) -> Result<Device, Error> {
        Device::open_in(choice, tier, crate::cache::folder().as_deref()).await
    }

    /// As [`Device::open`], with another cache folder or none, regardless of the environment.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub async fn open_in(choice: &DeviceChoice, tier: Option<Tier>, folder: Option<&Path>) -> Result<Device, Error> {
        Device::set_up(choice, Setup { tier, folder, ..Setup::default() }).await
    }

    /// As [`Device::open_in`], with a shader variant, or one pipeline (written as in the tuning file), that does
    /// nothing: for tests.
    #[doc(hidden)]
    pub async fn open_broken(
        choice: &DeviceChoice,
        tier: Option<Tier>,
        folder: &Path,
        broken: &str,
    ) -> Result<Device, Error> {
        Device::set_up(choice, Setup { tier, folder: Some(folder), broken: Some(broken), ..Setup::default() }).await
    }

    /// As [`Device::open_in`], with fault injection.
    ///
    /// # Errors
    /// As [`Device::open`].
    #[doc(hidden)]
    #[cfg(all(feature = "fault-injection", not(target_arch = "wasm32")))]
    pub async fn open_with_faults(
        choice: &DeviceChoice,
        tier: Option<Tier>,
        folder: Option<&Path>,
        faults: &crate::gpu::Faults,
    ) -> Result<Device, Error> {
        Device::set_up(choice, Setup { tier, folder, faults: Some(faults), ..Setup::default() }).await
    }

    /// Boxed: see [`AnyExecutor`](crate::device).
    fn set_up<'a>(choice: &'a DeviceChoice, setup: Setup<'a>) -> BoxFuture<'a, Result<Device, Error>> {
        Box::pin(async move {
            match choice {
                DeviceChoice::Cpu => Ok(Device::on_cpu_with("requested".into(), setup.faults())),
                _ => {
                    let device = Device::open_one(choice, Device::adapters().await, setup).await?;
                    Ok(match setup.folder {
                        Some(folder) if device.is_gpu() => tuning::from_folder(&device, folder),
                        None if device.is_gpu() => with_results_of_process(&device),
                        _ => device,
                    })
                }
            }
        })
    }

    /// Opens the chosen device in a browser. `adapter`: what the page knows of its adapter, if any.
    ///
    /// # Errors
    /// As natively.
    #[cfg(target_arch = "wasm32")]
    pub async fn open(
        choice: &DeviceChoice,
        adapter: Option<&crate::gpu::BrowserAdapter>,
        tier: Option<Tier>,
    ) -> Result<Device, Error> {
        let reports = match adapter {
            Some(adapter) if *choice != DeviceChoice::Cpu => vec![crate::gpu::browser_adapter(adapter).await?],
            _ => Vec::new(),
        };
        match choice {
            DeviceChoice::Cpu => Ok(Device::on_cpu("requested".into())),
            _ => {
                let device = Device::open_one(choice, reports, Setup { tier, ..Setup::default() }).await?;
                Ok(if device.is_gpu() { with_results_of_process(&device) } else { device })
            }
        }
    }

    /// Saves the tuning to its file, if it has one.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; the device stays usable.
    pub fn save_tuning(&self) -> Result<(), Error> {
        tuning::write(self, Some(self.tuning()))
    }
}
