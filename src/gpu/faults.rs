//! Faults on demand, so that tests see what becomes of them: the n-th call of a kind fails, waits or loses the device. Only with
//! the feature `fault-injection`; else nothing of it is left.

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

    /// What is done with a GPU.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Call {
        /// A device is opened.
        Open,
        /// A buffer is created.
        CreateBuffer,
        /// A pipeline is compiled.
        CreatePipeline,
        /// A buffer is written from the host.
        Write,
        /// Commands are submitted.
        Submit,
        /// A buffer is mapped, so that the host reads it.
        Map,
        /// A submission is waited for.
        Poll,
    }

    impl Call {
        /// All of them.
        pub const ALL: [Call; 7] =
            [Call::Open, Call::CreateBuffer, Call::CreatePipeline, Call::Write, Call::Submit, Call::Map, Call::Poll];
    }

    /// What becomes of a call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Effect {
        /// It fails with the error that the GPU would have.
        Fail,
        /// There is no memory for it.
        OutOfMemory,
        /// The device is destroyed before it.
        LoseBefore,
        /// The device is destroyed at once after it.
        LoseAfter,
        /// The same, and the device never tells that it is lost.
        LoseUntold,
        /// It begins so much later.
        Wait(Duration),
        /// It is never answered. Only polls.
        Hang,
        /// The shader has an error. Only pipelines.
        BadShader,
        /// It panics, as `wgpu` does where a driver's answer is not what it expects. On the CPU, where a submission is a run of
        /// kernels, one of its threads does.
        Panic,
    }

    #[derive(Debug)]
    struct Planned {
        call: Call,
        /// The first call, counted from 1, and the one after the last.
        calls: std::ops::Range<u64>,
        effect: Effect,
    }

    /// Calls that devices make, and what is to become of some of them. Clones share counts and plan; calls are counted over all
    /// devices that are opened with it.
    #[derive(Clone, Debug, Default)]
    pub struct Faults(Arc<Inner>);

    #[derive(Debug, Default)]
    struct Inner {
        counts: [AtomicU64; Call::ALL.len()],
        plan: Mutex<Vec<Planned>>,
        is_untold: AtomicBool,
        /// Bytes of a device's buffers at most, and whether more loses the device; `u64::MAX` if there is no such limit.
        memory: Mutex<Option<(u64, bool)>>,
        minimum_limits: AtomicBool,
        without: Mutex<Vec<String>>,
    }

    impl Faults {
        /// Has the `n`-th call, counted from 1, come out so.
        pub fn at(self, call: Call, n: u64, effect: Effect) -> Faults {
            self.plan(call, n..n + 1, effect);
            self
        }

        /// Has all calls from the `n`-th one on come out so.
        pub fn from(self, call: Call, n: u64, effect: Effect) -> Faults {
            self.plan(call, n..u64::MAX, effect);
            self
        }

        /// Has the `i`-th call from now on, counted from 1, come out so.
        pub fn next(&self, call: Call, i: u64, effect: Effect) {
            let n = self.count(call) + i;
            self.plan(call, n..n + 1, effect);
        }

        /// Has all calls from now on come out so.
        pub fn every(&self, call: Call, effect: Effect) {
            self.plan(call, self.count(call) + 1..u64::MAX, effect);
        }

        /// Gives devices so much memory. What exceeds it fails, or loses the device.
        pub fn with_memory(self, bytes: u64, loses: bool) -> Faults {
            *self.0.memory.lock().unwrap_or_else(PoisonError::into_inner) = Some((bytes, loses));
            self
        }

        /// Gives devices no more than WebGPU promises everywhere.
        pub fn with_minimum_limits(self) -> Faults {
            self.0.minimum_limits.store(true, Ordering::Relaxed);
            self
        }

        /// Takes an optional feature, by its name in WebGPU, away from adapters.
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

        /// Counts a call. What becomes of it.
        fn called(&self, call: Call) -> Option<Effect> {
            let n = self.0.counts[call as usize].fetch_add(1, Ordering::Relaxed) + 1;
            let plan = self.0.plan.lock().unwrap_or_else(PoisonError::into_inner);
            plan.iter().find(|planned| planned.call == call && planned.calls.contains(&n)).map(|planned| planned.effect)
        }

        /// A call begins. What it gives is kept until the call is done.
        ///
        /// # Errors
        /// If it is to fail.
        pub(crate) fn begin(&self, call: Call, device: &wgpu::Device) -> Result<Done, Failure> {
            let effect = self.called(call);
            self.begin_with(call, effect, device)
        }

        fn begin_with(&self, call: Call, effect: Option<Effect>, device: &wgpu::Device) -> Result<Done, Failure> {
            let mut done = Done { device: None };
            match effect {
                None | Some(Effect::Hang | Effect::BadShader) => {}
                Some(Effect::Fail) => {
                    return Err(Failure::Refused {
                        context: format!("{call:?}"),
                        message: "a test has it fail".into(),
                    });
                }
                Some(Effect::OutOfMemory) => return Err(self.out_of_memory("a test", 0, 0)),
                Some(Effect::LoseBefore) => device.destroy(),
                Some(Effect::LoseAfter) => done.device = Some(device.clone()),
                Some(Effect::LoseUntold) => {
                    self.0.is_untold.store(true, Ordering::Relaxed);
                    done.device = Some(device.clone());
                }
                Some(Effect::Wait(time)) => std::thread::sleep(time),
                Some(Effect::Panic) => panic!("a test has it panic"),
            }
            Ok(done)
        }

        /// The CPU runs kernels.
        pub(crate) fn run(&self) {
            if self.called(Call::Submit) == Some(Effect::Panic) {
                panic!("a test has it panic");
            }
        }

        fn out_of_memory(&self, label: &str, size_bytes: u64, allocated_bytes: u64) -> Failure {
            let message = "a test has no more memory".into();
            Failure::OutOfMemory { label: label.into(), size_bytes, allocated_bytes, message }
        }

        /// A buffer is created where so much is allocated already.
        ///
        /// # Errors
        /// If it is to fail, or the memory is used up.
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

        /// A device is opened.
        ///
        /// # Errors
        /// If it is to fail.
        pub(crate) fn open(&self, name: &str) -> Result<(), Error> {
            match self.called(Call::Open) {
                None => Ok(()),
                Some(_) => {
                    Err(Error::Gpu { context: format!("opening `{name}`"), message: "a test has it fail".into() })
                }
            }
        }

        /// A pipeline is compiled: its source, or one with an error.
        ///
        /// # Errors
        /// If it is to fail.
        pub(crate) fn shader(&self, device: &wgpu::Device, source: String) -> Result<(Done, String), Failure> {
            let effect = self.called(Call::CreatePipeline);
            let done = self.begin_with(Call::CreatePipeline, effect, device)?;
            Ok((done, if effect == Some(Effect::BadShader) { "fn broken( {".into() } else { source }))
        }

        /// A buffer is mapped.
        ///
        /// # Errors
        /// If it is to fail.
        pub(crate) fn map(&self, device: &wgpu::Device) -> Result<(), Error> {
            let failed = |_| {
                let (reason, context) = (LossReason::Driver, "reading a buffer".into());
                Error::DeviceLost { reason, context, message: "a test has the map fail".into() }
            };
            self.begin(Call::Map, device).map(drop).map_err(failed)
        }

        /// A submission is waited for, for ever if it is never answered: then until the device is given up.
        ///
        /// # Errors
        /// If there is to be no answer.
        pub(crate) fn poll(&self, device: &wgpu::Device, fault: &Fault) -> Result<(), String> {
            let effect = self.called(Call::Poll);
            let begun = self.begin_with(Call::Poll, effect, device);
            begun.map(drop).map_err(|_| "a test has no answer".to_string())?;
            while effect == Some(Effect::Hang) && fault.lost().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }

        /// Whether devices do not tell that they are lost.
        pub(crate) fn is_untold(&self) -> bool {
            self.0.is_untold.load(Ordering::Relaxed)
        }

        /// The limits of an adapter that has these.
        pub(crate) fn limits(&self, limits: wgpu::Limits) -> wgpu::Limits {
            if self.0.minimum_limits.load(Ordering::Relaxed) { wgpu::Limits::defaults() } else { limits }
        }

        /// The features of an adapter that has these.
        pub(crate) fn features(&self, features: wgpu::Features) -> wgpu::Features {
            let without = self.0.without.lock().unwrap_or_else(PoisonError::into_inner);
            let is_left = |one: &wgpu::Features| !without.iter().any(|name| one.as_str() == Some(name));
            features.iter().filter(is_left).fold(wgpu::Features::empty(), wgpu::Features::union)
        }
    }

    /// Loses a device when it is dropped, if it has one.
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
    #[cfg(not(target_arch = "wasm32"))]
    use crate::gpu::outcome::Fault;

    pub(crate) enum Call {
        Write,
        Submit,
    }

    /// No faults.
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

        #[cfg(not(target_arch = "wasm32"))]
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
