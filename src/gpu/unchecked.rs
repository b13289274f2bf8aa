//! Vulkan devices whose driver does not check bounds of buffers in shaders. wgpu enables `robustBufferAccess` and
//! `robustBufferAccess2` on each device and has no option against it, so such a device is created here, as wgpu
//! creates one but for these two features.

use wgpu::{Adapter, Device, DeviceDescriptor, Queue};

use super::pipeline::checked;
use crate::platform::IS_BROWSER;

/// A device without the driver's checks; `None` if [`checked`] says that checks stay, or the backend is another than
/// Vulkan. Like [`Adapter::request_device`] otherwise, which the caller uses for `None` and after an error.
///
/// # Errors
/// Why the device cannot be created in this way.
pub(super) fn open(adapter: &Adapter, wanted: &DeviceDescriptor<'_>) -> Result<Option<(Device, Queue)>, String> {
    if IS_BROWSER || checked() || adapter.get_info().backend != wgpu::Backend::Vulkan {
        return Ok(None);
    }
    // wgpu does not compare these with the adapter's for a device that it did not create.
    if !adapter.features().contains(wanted.required_features) || !wanted.required_limits.check_limits(&adapter.limits())
    {
        return Err("it lacks features or limits".into());
    }
    vulkan::create(adapter, wanted).map(Some)
}

/// Vulkan is a backend of wgpu on these systems alone, see Cargo.toml.
#[cfg(not(any(target_arch = "wasm32", target_vendor = "apple")))]
mod vulkan {
    use std::ffi::CStr;

    use ash::vk;
    use wgpu::hal::api::Vulkan;
    use wgpu::hal::vulkan::{Adapter as HalAdapter, PhysicalDeviceFeatures};
    use wgpu::{Adapter, Device, DeviceDescriptor, Features, Queue};

    /// The queue family of all of wgpu's devices.
    const FAMILY: u32 = 0;

    /// What a device is created with.
    pub(super) struct Asked {
        pub extensions: Vec<&'static CStr>,
        /// Vulkan's features beyond the core ones, and its core features as wgpu enables them.
        pub features: PhysicalDeviceFeatures,
        /// The core features to enable.
        pub core: vk::PhysicalDeviceFeatures,
    }

    /// wgpu's extensions and features for a device, without the two for checks.
    pub(super) fn asked(adapter: &HalAdapter, features: Features) -> Asked {
        let extensions = adapter.required_device_extensions(features);
        // wgpu enables an extension's features if its name is listed.
        let others: Vec<_> = extensions.iter().copied().filter(|&name| name != ash::ext::robustness2::NAME).collect();
        let features = adapter.physical_device_features(&others, features);
        let core = features.get_core().robust_buffer_access(false);
        Asked { extensions, features, core }
    }

    pub(super) fn create(adapter: &Adapter, wanted: &DeviceDescriptor<'_>) -> Result<(Device, Queue), String> {
        // SAFETY: the device is what `device_from_raw` expects: created from this adapter with wgpu's extensions and
        // features for `required_features`, which `open` has compared with the adapter's as wgpu does, and owned by
        // nothing else. Only the two features are missing by which the driver keeps shaders within buffers. Shaders on
        // this device are wgpu's own and this crate's, since nobody else gets a handle to it, and the latter are
        // compiled without bounds checks under the same condition, for the reasons in `Pipelines::compile`. wgpu
        // itself checks bindings, copies and maps.
        unsafe {
            let hal = adapter.as_hal::<Vulkan>().ok_or("wgpu does not give its Vulkan adapter")?;
            let Asked { extensions, mut features, core } = asked(&hal, wanted.required_features);
            let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
            let families = [vk::DeviceQueueCreateInfo::default().queue_family_index(FAMILY).queue_priorities(&[1.0])];
            let info = vk::DeviceCreateInfo::default().queue_create_infos(&families).enabled_extension_names(&names);
            let info = features.add_to_device_create(info).enabled_features(&core);
            let instance = hal.shared_instance().raw_instance();
            let raw = instance.create_device(hal.raw_physical_device(), &info, None).map_err(|e| e.to_string())?;
            let (of_wgpu, limits, hints) = (wanted.required_features, &wanted.required_limits, &wanted.memory_hints);
            let opened = hal.device_from_raw(raw, None, &extensions, of_wgpu, limits, hints, FAMILY, 0);
            let opened = opened.map_err(|e| e.to_string())?;
            adapter.create_device_from_hal::<Vulkan>(opened, wanted).map_err(|e| e.to_string())
        }
    }
}

#[cfg(any(target_arch = "wasm32", target_vendor = "apple"))]
mod vulkan {
    use wgpu::{Adapter, Device, DeviceDescriptor, Queue};

    pub(super) fn create(_: &Adapter, _: &DeviceDescriptor<'_>) -> Result<(Device, Queue), String> {
        Err("there is no Vulkan on this system".into())
    }
}

#[cfg(all(test, not(any(target_arch = "wasm32", target_vendor = "apple"))))]
mod tests {
    use std::collections::BTreeMap;
    use std::process::Command;

    use wgpu::hal::api::Vulkan;

    use super::*;
    use crate::gpu::adapters;

    /// The first Vulkan adapter, with what tests of devices ask for.
    fn adapter() -> Option<(Adapter, DeviceDescriptor<'static>)> {
        let reports = pollster::block_on(adapters());
        let Some(report) = reports.into_iter().find(|report| report.backend == "vulkan") else {
            assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set and there is no adapter");
            println!("skipped: no Vulkan adapter");
            return None;
        };
        let optional = wgpu::Features::SUBGROUP | wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::PIPELINE_CACHE;
        let wanted = DeviceDescriptor {
            required_features: optional & report.adapter.features(),
            required_limits: report.adapter.limits(),
            ..Default::default()
        };
        Some((report.adapter, wanted))
    }

    #[test]
    fn all_features_of_wgpu_but_the_driver_checks_are_enabled() {
        let Some((adapter, wanted)) = adapter() else { return };
        // SAFETY: the adapter is read only.
        let hal = unsafe { adapter.as_hal::<Vulkan>() }.unwrap();
        let ours = vulkan::asked(&hal, wanted.required_features);
        let extensions = hal.required_device_extensions(wanted.required_features);
        let usual = hal.physical_device_features(&extensions, wanted.required_features);
        assert_eq!(ours.extensions, extensions);

        let (usual_fields, our_fields) = (fields(&usual), fields(&ours.features));
        let differing: Vec<_> = usual_fields.iter().filter(|(name, of)| our_fields[*name] != **of).collect();
        assert_eq!((usual_fields.len(), our_fields["robustness2"].as_str()), (our_fields.len(), "None,"));
        assert!(differing.iter().all(|(name, _)| *name == "robustness2"), "{differing:?}");

        let core = usual.get_core();
        assert_eq!((core.robust_buffer_access, ours.core.robust_buffer_access), (1, 0));
        assert_eq!(fields(&ours.core.robust_buffer_access(true)), fields(&core));
    }

    /// The fields of a struct of wgpu or Vulkan, which shows them by `Debug` alone.
    fn fields(of: &dyn std::fmt::Debug) -> BTreeMap<String, String> {
        let (mut fields, mut name) = (BTreeMap::<String, String>::new(), String::new());
        for line in format!("{of:#?}").lines() {
            let field =
                line.strip_prefix("    ").filter(|rest| rest.starts_with(|c: char| c.is_alphabetic() || c == '_'));
            let text = match field.and_then(|field| field.split_once(": ")) {
                Some((of_field, text)) => {
                    name = of_field.to_string();
                    text
                }
                None => line,
            };
            fields.entry(name.clone()).or_default().push_str(text);
        }
        fields
    }

    #[test]
    fn environment_decides_whether_the_driver_checks() {
        for (value, is_unchecked) in [("0", true), ("1", false)] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "gpu::unchecked::tests::device_is_opened", "--ignored", "--nocapture"])
                .env("TILEWRIGHT_CHECKED", value)
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && printed.contains("1 passed"), "{printed}{output:?}");
            let expected = format!("unchecked: {is_unchecked}");
            assert!(printed.contains("skipped") || printed.contains(&expected), "{value}: {printed}");
        }
    }

    #[test]
    #[ignore = "run by environment_decides_whether_the_driver_checks"]
    fn device_is_opened() {
        let Some((adapter, wanted)) = adapter() else { return };
        let opened = open(&adapter, &wanted).unwrap();
        println!("unchecked: {}", opened.is_some());
        let (usual, _) = pollster::block_on(adapter.request_device(&wanted)).unwrap();
        if let Some((device, _)) = opened {
            assert_eq!((device.features(), device.limits()), (usual.features(), usual.limits()));
            // SAFETY: the device is read only.
            let [ours, usual] = [&device, &usual].map(|device| unsafe { device.as_hal::<Vulkan>() }.unwrap());
            assert_eq!(ours.enabled_device_extensions(), usual.enabled_device_extensions());
        }
    }

    #[test]
    fn features_that_an_adapter_lacks_are_an_error() {
        let Some((adapter, wanted)) = adapter() else { return };
        if checked() {
            println!("skipped: TILEWRIGHT_CHECKED is not 0");
            return;
        }
        let lacking = wgpu::Features::all() - adapter.features();
        let wanted = DeviceDescriptor { required_features: lacking, ..wanted };
        assert!(open(&adapter, &wanted).is_err());
    }
}
