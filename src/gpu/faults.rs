//! Fault injection for tests: the n-th call of a kind fails, waits or loses the device. Without the feature
//! `fault-injection`, it compiles to nothing.

#[cfg(feature = "fault-injection")]
pub(crate) use injected::Done;
#[cfg(feature = "fault-injection")]
pub use injected::{Call, Effect, Faults};
#[cfg(not(feature = "fault-injection"))]
pub(crate) use nothing::{Call, Done, Faults};

#[cfg(feature = "fault-injection")]
mod injected {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    use crate::error::Error;
    use crate::gpu::outcome::{Failure, Fault};
    use crate::loss::LossReason;

    /// Kinds of GPU calls.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Call {
        /// Opening a device.
        Open,
        /// Creating a buffer.
        CreateBuffer,
        /// Compiling a pipeline.
        CreatePipeline,
        /// Writing to a buffer from the host.
        Write,
        /// Submitting commands.
        Submit,
        /// Mapping a buffer to read it.
        Map,
        /// Waiting for a submission.
        Poll,
    }

    impl Call {
        /// All kinds.
        pub const ALL: [Call; 7] =
            [Call::Open, Call::CreateBuffer, Call::CreatePipeline, Call::Write, Call::Submit, Call::Map, Call::Poll];
    }

    /// The effect of a fault.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Effect {
        /// The call fails with the GPU's error.
        Fail,
        /// The call runs out of memory.
        OutOfMemory,
        /// The device is destroyed before the call.
        LoseBefore,
        /// The device is destroyed right after the call.
        LoseAfter,
        /// As `LoseAfter`, but the device never reports its loss.
        LoseUntold,
        /// The call is delayed by this time.
        Wait(Duration),
        /// A poll that is never answered.
        Hang,
        /// A pipeline whose shader has an error.
        BadShader,
        /// A panic, as in `wgpu` on an unexpected driver result. On the CPU, where a submission runs kernels, a
        /// worker thread panics.
        Panic,
    }

    #[derive(Debug)]
    struct Planned {
        call: Call,
        /// Numbers of the affected calls, from 1.
        calls: std::ops::Range<u64>,
        effect: Effect,
    }

    /// Planned faults and counts of calls over all devices opened with it. Clones share both.
    #[derive(Clone, Debug, Default)]
    pub struct Faults(Arc<Inner>);

    #[derive(Debug, Default)]
    struct Inner {
        counts: [AtomicU64; Call::ALL.len()],
        plan: Mutex<Vec<Planned>>,
        is_untold: AtomicBool,
        /// Maximum bytes of a device's buffers, and whether exceeding it loses the device; `None` for no limit.
        memory: Mutex<Option<(u64, bool)>>,
        minimum_limits: AtomicBool,
        without: Mutex<Vec<String>>,
    }

    impl Faults {
        /// Plans a fault for the `n`-th call, counted from 1.
        pub fn at(self, call: Call, n: u64, effect: Effect) -> Faults {
            self.plan(call, n..n + 1, effect);
            self
        }

        /// Plans a fault for all calls from the `n`-th on.
        pub fn from(self, call: Call, n: u64, effect: Effect) -> Faults {
            self.plan(call, n..u64::MAX, effect);
            self
        }

        /// Plans a fault for the `i`-th call from now, counted from 1.
        pub fn next(&self, call: Call, i: u64, effect: Effect) {
            let n = self.count(call) + i;
            self.plan(call, n..n + 1, effect);
        }

        /// Plans a fault for all calls from now on.
        pub fn every(&self, call: Call, effect: Effect) {
            self.plan(call, self.count(call) + 1..u64::MAX, effect);
        }

        /// Limits devices' memory. Exceeding it fails, or loses the device.
        pub fn with_memory(self, bytes: u64, loses: bool) -> Faults {
            *self.0.memory.lock().unwrap_or_else(PoisonError::into_inner) = Some((bytes, loses));
            self
        }

        /// Limits devices to the minimum that WebGPU guarantees.
        pub fn with_minimum_limits(self) -> Faults {
            self.0.minimum_limits.store(true, Ordering::Relaxed);
            self
        }

        /// Hides an optional feature, by its WebGPU name, from adapters.
        pub fn without(self, feature: &str) -> Faults {
            self.0.without.lock().unwrap_or_else(PoisonError::into_inner).push(feature.into());
            self
        }

        /// Calls so far.
        pub fn count(&self, call: Call) -> u64 {
            self.0.counts[call as usize].load(Ordering::Relaxed)
        }

        fn plan(&self, call: Call, calls: std::ops::Range<u64>, effect: Effect) {
            let mut plan = self.0.plan.lock().unwrap_or_else(PoisonError::into_inner);
            plan.push(Planned { call, calls, effect });
        }

        /// Counts a call and returns its planned effect.
        fn called(&self, call: Call) -> Option<Effect> {
            let n = self.0.counts[call as usize].fetch_add(1, Ordering::Relaxed) + 1;
            let plan = self.0.plan.lock().unwrap_or_else(PoisonError::into_inner);
            plan.iter().find(|planned| planned.call == call && planned.calls.contains(&n)).map(|planned| planned.effect)
        }

        /// Begins a call. Keep the result until the call is done.
        ///
        /// # Errors
        /// The planned failure.
        pub(crate) fn begin(&self, call: Call, device: &wgpu::Device) -> Result<Done, Failure> {
            let effect = self.called(call);
            self.begin_with(call, effect, device)
        }

        fn begin_with(&self, call: Call, effect: Option<Effect>, device: &wgpu::Device) -> Result<Done, Failure> {
            let mut done = Done { device: None };
            match effect {
                None | Some(Effect::Hang | Effect::BadShader) => {}
                Some(Effect::Fail) => {
                    return Err(Failure::Refused { context: format!("{call:?}"), message: "injected failure".into() });
                }
                Some(Effect::OutOfMemory) => return Err(self.out_of_memory("injected", 0, 0)),
                Some(Effect::LoseBefore) => device.destroy(),
                Some(Effect::LoseAfter) => done.device = Some(device.clone()),
                Some(Effect::LoseUntold) => {
                    self.0.is_untold.store(true, Ordering::Relaxed);
                    done.device = Some(device.clone());
                }
                Some(Effect::Wait(time)) => std::thread::sleep(time),
                Some(Effect::Panic) => panic!("injected panic"),
            }
            Ok(done)
        }

        /// Begins a run of kernels on the CPU.
        pub(crate) fn run(&self) {
            if self.called(Call::Submit) == Some(Effect::Panic) {
                panic!("injected panic");
            }
        }

        fn out_of_memory(&self, label: &str, size_bytes: u64, allocated_bytes: u64) -> Failure {
            let message = "injected out-of-memory error".into();
            Failure::OutOfMemory { label: label.into(), size_bytes, allocated_bytes, message }
        }

        /// Begins creating a buffer, given the bytes already allocated.
        ///
        /// # Errors
        /// The planned failure, or out of memory.
        pub(crate) fn begin_buffer(
            &self,
            device: &wgpu::Device,
            label: &str,
            [size_bytes, allocated_bytes]: [u64; 2],
        ) -> Result<Done, Failure> {
            let memory = *self.0.memory.lock().unwrap_or_else(PoisonError::into_inner);
            match memory {
                Some((most, false)) if allocated_bytes + size_bytes > most => {
                    self.called(Call::CreateBuffer);
                    return Err(self.out_of_memory(label, size_bytes, allocated_bytes));
                }
                Some((most, true)) if allocated_bytes + size_bytes > most => device.destroy(),
                _ => {}
            }
            self.begin(Call::CreateBuffer, device).map_err(|failure| match failure {
                Failure::OutOfMemory { .. } => self.out_of_memory(label, size_bytes, allocated_bytes),
                refused => refused,
            })
        }

        /// Begins opening a device.
        ///
        /// # Errors
        /// The planned failure.
        pub(crate) fn open(&self, name: &str) -> Result<(), Error> {
            match self.called(Call::Open) {
                None => Ok(()),
                Some(_) => Err(Error::Gpu { context: format!("opening `{name}`"), message: "injected failure".into() }),
            }
        }

        /// Begins compiling a pipeline. Returns its source, or one with an error.
        ///
        /// # Errors
        /// The planned failure.
        pub(crate) fn shader(&self, device: &wgpu::Device, source: String) -> Result<(Done, String), Failure> {
            let effect = self.called(Call::CreatePipeline);
            let done = self.begin_with(Call::CreatePipeline, effect, device)?;
            Ok((done, if effect == Some(Effect::BadShader) { "fn broken( {".into() } else { source }))
        }

        /// Begins mapping a buffer.
        ///
        /// # Errors
        /// The planned failure.
        pub(crate) fn map(&self, device: &wgpu::Device) -> Result<(), Error> {
            let failed = |_| {
                let (reason, context) = (LossReason::Driver, "reading a buffer".into());
                Error::DeviceLost { reason, context, message: "injected failure".into() }
            };
            self.begin(Call::Map, device).map(drop).map_err(failed)
        }

        /// Begins waiting for a submission. [`Effect::Hang`] blocks until the device is marked as lost.
        ///
        /// # Errors
        /// The planned failure.
        pub(crate) fn poll(&self, device: &wgpu::Device, fault: &Fault) -> Result<(), String> {
            let effect = self.called(Call::Poll);
            let begun = self.begin_with(Call::Poll, effect, device);
            begun.map(drop).map_err(|_| "injected failure".to_string())?;
            while effect == Some(Effect::Hang) && fault.lost().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }

        /// Whether devices hide their loss.
        pub(crate) fn is_untold(&self) -> bool {
            self.0.is_untold.load(Ordering::Relaxed)
        }

        /// These limits, or WebGPU's minimum if the test chose that.
        pub(crate) fn limits(&self, limits: wgpu::Limits) -> wgpu::Limits {
            if self.0.minimum_limits.load(Ordering::Relaxed) { wgpu::Limits::defaults() } else { limits }
        }

        /// These features without those that the test hides.
        pub(crate) fn features(&self, features: wgpu::Features) -> wgpu::Features {
            let without = self.0.without.lock().unwrap_or_else(PoisonError::into_inner);
            let is_left = |one: &wgpu::Features| !without.iter().any(|name| one.as_str() == Some(name));
            features.iter().filter(is_left).fold(wgpu::Features::empty(), wgpu::Features::union)
        }
    }

    /// Destroys the device, if set, when dropped.
    #[must_use]
    pub(crate) struct Done {
        device: Option<wgpu::Device>,
    }

    impl Drop for Done {
        fn drop(&mut self) {
            if let Some(device) = self.device.take() {
                device.destroy();
            }
        }
    }
}

#[cfg(not(feature = "fault-injection"))]
mod nothing {
    use crate::error::Error;
    use crate::gpu::outcome::Failure;
    use crate::gpu::outcome::Fault;

    pub(crate) enum Call {
        Write,
        Submit,
    }

    /// No fault injection.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Faults;

    #[must_use]
    pub(crate) struct Done;

    impl Faults {
        pub fn begin(&self, _: Call, _: &wgpu::Device) -> Result<Done, Failure> {
            Ok(Done)
        }

        pub fn begin_buffer(&self, _: &wgpu::Device, _: &str, _: [u64; 2]) -> Result<Done, Failure> {
            Ok(Done)
        }

        pub fn open(&self, _: &str) -> Result<(), Error> {
            Ok(())
        }

        pub fn shader(&self, _: &wgpu::Device, source: String) -> Result<(Done, String), Failure> {
            Ok((Done, source))
        }

        pub fn map(&self, _: &wgpu::Device) -> Result<(), Error> {
            Ok(())
        }

        pub fn poll(&self, _: &wgpu::Device, _: &Fault) -> Result<(), String> {
            Ok(())
        }

        pub fn run(&self) {}

        pub fn is_untold(&self) -> bool {
            false
        }

        pub fn limits(&self, limits: wgpu::Limits) -> wgpu::Limits {
            limits
        }

        pub fn features(&self, features: wgpu::Features) -> wgpu::Features {
            features
        }
    }
}
