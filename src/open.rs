//! Opening a device, with what is known of its adapter and driver.

#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;

use crate::device::{Device, DeviceChoice};
use crate::error::Error;
use crate::gpu::Setup;
use crate::shaders::Tier;
use crate::tested::Tested;
#[cfg(not(target_arch = "wasm32"))]
use crate::tuning;

/// A device with the self-test's results of this process.
fn with_results_of_process(device: &Device) -> Device {
    let info = device.info();
    let identity = [&info.name, &info.backend, &info.driver, &info.tier].map(String::clone);
    device.with_tested(Tested::of_process(identity))
}

impl Device {
    /// A real GPU if there is one, else the CPU: on a software adapter the same work takes longer than on the CPU
    /// itself. [`Device::info`] says what was chosen and why.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn auto() -> Device {
        match Device::open(&DeviceChoice::Auto, None).await {
            Ok(device) => device,
            Err(error) => Device::on_cpu(format!("the GPU could not be used: {error}")),
        }
    }

    /// Opens the chosen device; `tier` overrides the shader tier that would be picked for it.
    ///
    /// Where this program, adapter, driver and tier meet for the first time, the pipelines that a model, an encoder or an
    /// index has recorded are compared with the CPU before their first result is given out; shader variants that compute
    /// wrongly are banned, see [`Device::banned`]. What was found is kept in the user's cache folder, or the one that
    /// `TILEWRIGHT_CACHE_DIR` names; if that is empty, in this process alone.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] if the choice names a GPU that is not there, [`Error::Limit`] if it lacks what the tier or
    /// the kernels need, [`Error::Gpu`] if it cannot be opened. `Auto` falls
    /// back to the CPU only where no real GPU exists, never because one failed.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn open(choice: &DeviceChoice, tier: Option<Tier>) -> Result<Device, Error> {
        Device::open_in(choice, tier, crate::cache::folder().as_deref()).await
    }

    /// As [`Device::open`], with another folder for what is kept from run to run, or none, whatever the environment
    /// says.
    ///
    /// # Errors
    /// As [`Device::open`].
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn open_in(choice: &DeviceChoice, tier: Option<Tier>, folder: Option<&Path>) -> Result<Device, Error> {
        Device::set_up(choice, Setup { tier, folder, ..Setup::default() }).await
    }

    /// As [`Device::open_in`], with a shader variant that does nothing, or one pipeline of it, written as in the tuning's
    /// file, so that a test can tell what becomes of it.
    #[doc(hidden)]
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn open_broken(
        choice: &DeviceChoice,
        tier: Option<Tier>,
        folder: &Path,
        broken: &str,
    ) -> Result<Device, Error> {
        Device::set_up(choice, Setup { tier, folder: Some(folder), broken: Some(broken), ..Setup::default() }).await
    }

    /// As [`Device::open_in`], with faults on demand.
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

    #[cfg(not(target_arch = "wasm32"))]
    async fn set_up(choice: &DeviceChoice, setup: Setup<'_>) -> Result<Device, Error> {
        match choice {
            DeviceChoice::Cpu => Ok(Device::on_cpu_with("asked for".into(), setup.faults())),
            _ => {
                let device = Device::open_one(choice, Device::adapters().await, setup).await?;
                Ok(match setup.folder {
                    Some(folder) if device.is_gpu() => tuning::from_folder(&device, folder),
                    None if device.is_gpu() => with_results_of_process(&device),
                    _ => device,
                })
            }
        }
    }

    /// Opens the chosen device in a browser; `adapter` is what the page knows of its adapter, if it has one.
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
            DeviceChoice::Cpu => Ok(Device::on_cpu("asked for".into())),
            _ => {
                let device = Device::open_one(choice, reports, Setup { tier, ..Setup::default() }).await?;
                Ok(if device.is_gpu() { with_results_of_process(&device) } else { device })
            }
        }
    }

    /// Writes the tuning to its file. Does nothing where there is none.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; the device goes on working.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn save_tuning(&self) -> Result<(), Error> {
        tuning::write(self, Some(self.tuning()))
    }
}
