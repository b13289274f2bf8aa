//! GPU executor: prepares recordings (pipelines, bind groups, params) once and replays each in one pass.

use std::collections::HashSet;
use std::future::poll_fn;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};

use super::adapter::{AdapterReport, MATRICES, params_stride};
use super::buffer_pool::{BufferPool, PooledBuffer};
use super::faults::{Call, Faults};
use super::outcome::{Failure, Fault, Outcome, Unsettled, refused, scoped};
use super::pipeline::{Pipeline, Pipelines};
use super::polling::poll;
use super::readback::{MappedRead, Poller, ReadFuture, Staging, map};
use super::signal::{SignalFuture, complete};
use super::unchecked;
use crate::counters::LiveCounters;
use crate::error::Error;
use crate::loss::LossReason;
use crate::platform::{BoxFuture, IS_BROWSER, n_cores, on_threads};
use crate::recording::{Recording, Step};
use crate::shaders::Tier;
use crate::tensor::{Tensor, WordCopy};

/// Options for opening a device.
#[derive(Clone, Copy, Default)]
pub(crate) struct Setup<'a> {
    /// Overrides the adapter's default tier.
    pub tier: Option<Tier>,
    /// Folder for compiled pipelines and the tuning.
    pub folder: Option<&'a Path>,
    /// Label of a shader variant, or key of one pipeline, to replace with a shader that does nothing.
    pub broken: Option<&'a str>,
    /// Overrides how long a submission may take; with zero, the GPU never answers.
    pub timeout: Option<Duration>,
    /// Faults to inject.
    #[cfg(feature = "fault-injection")]
    pub faults: Option<&'a Faults>,
}

impl Setup<'_> {
    /// Faults to inject, if any.
    pub fn faults(&self) -> Faults {
        #[cfg(feature = "fault-injection")]
        return self.faults.cloned().unwrap_or_default();
        #[cfg(not(feature = "fault-injection"))]
        Faults
    }
}

#[derive(Debug)]
pub(crate) struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    adapter_name: String,
    notice: Option<String>,
    pool: Arc<BufferPool>,
    pipelines: Pipelines,
    staging: Arc<Staging>,
    poller: Poller,
    /// Bytes uploaded since the last submission for staged uploads.
    staged_bytes: AtomicUsize,
    fault: Fault,
    unsettled: Unsettled,
    counters: Arc<LiveCounters>,
    faults: Faults,
}

/// A recording's dispatches, ready to be encoded.
#[derive(Debug)]
pub(crate) struct PreparedSteps {
    dispatches: Vec<(Arc<Pipeline>, wgpu::BindGroup, [u32; 3])>,
    /// Compilations of unknown outcome at preparation. Always empty natively.
    checks: Vec<Outcome>,
}

impl Gpu {
    /// Opens an adapter with the features that all these tiers need.
    pub async fn open(
        report: &AdapterReport,
        tiers: &[Tier],
        setup: Setup<'_>,
        counters: Arc<LiveCounters>,
    ) -> Result<Gpu, Error> {
        let adapter = &report.adapter;
        let faults = setup.faults();
        faults.open(&report.name)?;
        let available = faults.features(adapter.features());
        let mut needed = wgpu::Features::empty();
        for &tier in tiers {
            // Required features, their name in errors, and whether the adapter supports the tier otherwise.
            let (of_tier, limit, is_there) = match tier {
                Tier::Baseline | Tier::Scalar => (wgpu::Features::empty(), "", true),
                Tier::F16 => (wgpu::Features::SHADER_F16, "feature shader-f16", true),
                // In a browser, the page's shim enables subgroups without wgpu's knowledge.
                Tier::Subgroups if IS_BROWSER => {
                    (wgpu::Features::empty(), "feature subgroups", report.subgroups.is_some())
                }
                Tier::Subgroups => (wgpu::Features::SUBGROUP, "feature subgroups", true),
                Tier::Matrix8 => (MATRICES, "feature cooperative-matrix of 8 x 8", report.matrices.contains(&8)),
                Tier::Matrix16 => (MATRICES, "feature cooperative-matrix of 16 x 16", report.matrices.contains(&16)),
            };
            if !available.contains(of_tier) || !is_there {
                return Err(Error::Limit { adapter: report.name.clone(), limit, expected: 1, found: 0 });
            }
            needed |= of_tier;
        }
        let experimental_features = if needed.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
            // SAFETY: undefined behaviour could only come from bugs in wgpu. build.rs validates this crate's
            // shaders, and the conformance tests and the self-test compare them with the CPU.
            unsafe { wgpu::ExperimentalFeatures::enabled() }
        } else {
            wgpu::ExperimentalFeatures::disabled()
        };
        // The f16 tiers' kernels have variants with subgroups.
        let needed = needed | wgpu::Features::SUBGROUP;
        let wanted = needed | wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::PIPELINE_CACHE;
        let wanted = wgpu::DeviceDescriptor {
            label: Some("tilewright"),
            required_features: wanted & available,
            required_limits: faults.limits(adapter.limits()),
            experimental_features,
            ..Default::default()
        };
        let (unchecked, notice) = match unchecked::open(adapter, &wanted) {
            Ok(opened) => (opened, None),
            Err(why) => (None, Some(format!("`{}` keeps its driver's bounds checks: {why}", report.name))),
        };
        let (device, queue) = match unchecked {
            Some(opened) => opened,
            None => adapter
                .request_device(&wanted)
                .await
                .map_err(|e| Error::Gpu { context: format!("opening `{}`", report.name), message: e.to_string() })?,
        };

        let fault = Fault::default();
        let uncaptured = fault.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            uncaptured.stray(error.to_string());
        }));
        Ok(Gpu { notice, ..Gpu::over(report, (device, queue), setup, (counters, fault)) })
    }

    /// A problem on opening that is no error.
    pub fn notice(&self) -> Option<String> {
        self.notice.clone()
    }

    /// Uses an open device. Takes its callback for losses.
    pub fn over(
        report: &AdapterReport,
        (device, queue): (wgpu::Device, wgpu::Queue),
        setup: Setup<'_>,
        (counters, fault): (Arc<LiveCounters>, Fault),
    ) -> Gpu {
        let faults = setup.faults();
        let (lost, injected) = (fault.clone(), faults.clone());
        device.set_device_lost_callback(move |reason, message| {
            if !injected.is_untold() {
                lost.lose(LossReason::Driver, format!("{reason:?}: {message}"));
            }
        });
        Gpu {
            pool: BufferPool::new(counters.clone(), fault.clone(), faults.clone()),
            pipelines: Pipelines::new(&device, &report.adapter.get_info(), setup, counters.clone()),
            staging: Staging::new(counters.clone()),
            poller: Poller::new(&device, &queue, fault.clone(), setup.timeout, faults.clone()),
            staged_bytes: AtomicUsize::new(0),
            adapter_name: report.name.clone(),
            notice: None,
            fault,
            unsettled: Unsettled::default(),
            counters,
            device,
            queue,
            faults,
        }
    }

    pub fn allocate(&self, label: &str, size_bytes: u64) -> Result<PooledBuffer, Error> {
        let limit = self.device.limits().max_buffer_size;
        if size_bytes > limit {
            return Err(Error::Operand {
                kernel: "allocate",
                operand: "size_bytes",
                expected: format!("at most {limit}, the max_buffer_size of `{}`", self.adapter_name),
                found: format!("{size_bytes} for `{label}`"),
            });
        }
        let buffer = self.pool.take(&self.device, label, size_bytes);
        let context = format!("allocating {size_bytes} bytes for `{label}`");
        self.fault.check_lost(&context)?;
        let buffer = buffer.map_err(|failure| self.explained(&context, failure))?;
        self.unsettled.add(buffer.outcome.clone());
        Ok(buffer)
    }

    /// Returns an operation's error, or leaves an unknown outcome to the next read.
    fn settle(&self, context: &str, outcome: Result<Option<Outcome>, Failure>) -> Result<(), Error> {
        self.fault.check_lost(context)?;
        self.unsettled.add(outcome.map_err(|failure| self.explained(context, failure))?);
        Ok(())
    }

    /// The error of a failed operation. A lost device refuses everything, so its loss takes precedence.
    fn explained(&self, context: &str, failure: Failure) -> Error {
        // A destroyed device reports its loss only after its work is done.
        if !IS_BROWSER {
            let how = wgpu::PollType::Wait { submission_index: None, timeout: Some(Duration::from_secs(1)) };
            let _ = poll(&self.device, &self.fault, &self.faults, how);
        }
        match self.fault.check_lost(context) {
            Ok(()) => failure.into_error(),
            Err(lost) => lost,
        }
    }

    pub fn write(&self, tensor: &Tensor, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_buffer(tensor.memory()?, offset, bytes)
    }

    /// Fills a tensor's whole buffer, including slack after the tensor.
    pub fn fill(&self, tensor: &Tensor, word: u32) -> Result<(), Error> {
        let buffer: &PooledBuffer = tensor.memory()?;
        self.write_buffer(buffer, 0, bytemuck::cast_slice(&vec![word; buffer.buffer.size() as usize / 4]))
    }

    fn write_buffer(&self, buffer: &PooledBuffer, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        /// wgpu stages uploads until the next submission; this bounds the staged bytes.
        const MAX_STAGED: usize = 32 << 20;
        let _done = self.begin(Call::Write, "uploading")?;
        let ((), outcome) = scoped(&self.device, &[Validation, OutOfMemory], refused("uploading"), || {
            for (i, piece) in bytes.chunks(MAX_STAGED).enumerate() {
                self.queue.write_buffer(&buffer.buffer, offset + (i * MAX_STAGED) as u64, piece);
                if self.staged_bytes.fetch_add(piece.len(), Ordering::Relaxed) + piece.len() >= MAX_STAGED {
                    self.staged_bytes.store(0, Ordering::Relaxed);
                    self.queue.submit([]);
                }
            }
        });
        self.settle("uploading", outcome)
    }

    /// Resolves when all submissions and uploads so far are done.
    pub fn drained(&self) -> Result<BoxFuture<'static, Result<(), Error>>, Error> {
        let _done = self.begin(Call::Submit, "uploading")?;
        let (index, outcome) = scoped(&self.device, &[Validation], refused("uploading"), || self.queue.submit([]));
        self.settle("uploading", outcome)?;
        let (signal, done) = SignalFuture::new();
        let callback = signal.clone();
        self.queue.on_submitted_work_done(move || complete(&callback, Ok(())));
        self.poller.wait_for(index, signal);
        let (mut reports, fault) = (self.unsettled.reports(), self.fault.clone());
        Ok(Box::pin(async move {
            done.await?;
            fault.check("uploading")?;
            poll_fn(|cx| reports.poll(cx)).await.map_err(Failure::into_error)
        }))
    }

    /// Bytes of buffers in use.
    pub fn used_bytes(&self) -> u64 {
        self.pool.used_bytes()
    }

    /// Frees the pool's idle buffers.
    pub fn free_unused(&self) {
        self.pool.clear();
    }

    /// Destroys the device and frees its memory.
    pub fn destroy(&self) {
        self.device.destroy();
        // wgpu's callback may be late.
        self.fault.lose(LossReason::Destroyed, "it was destroyed".into());
    }

    /// Marks the device as lost without freeing its memory, which would block if the device hangs. Pending reads fail.
    pub fn give_up(&self, reason: LossReason, message: String) {
        self.fault.lose(reason, message);
    }

    /// The limits that the device was opened with.
    pub fn limits(&self) -> wgpu::Limits {
        self.device.limits()
    }

    /// Whether the device is lost.
    pub fn is_lost(&self) -> bool {
        self.fault.lost().is_some()
    }

    /// Begins a call that tests can make fail.
    fn begin(&self, call: Call, context: &str) -> Result<super::faults::Done, Error> {
        let begun = self.faults.begin(call, &self.device);
        self.fault.check_lost(context)?;
        begun.map_err(|failure| self.explained(context, failure))
    }

    pub fn prepare(&self, steps: &[Step]) -> Result<PreparedSteps, Error> {
        let stride = params_stride(&self.device.limits()) as usize;
        let mut params = vec![0u8; stride * steps.len().max(1)];
        for (slot, step) in params.chunks_mut(stride).zip(steps) {
            slot[..step.params.len()].copy_from_slice(&step.params);
        }
        let uniforms = self.uniforms(&params)?;

        let mut dispatches: Vec<(Arc<Pipeline>, _, _)> = Vec::with_capacity(steps.len());
        let mut checks = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            let label = step.variant.label;
            let pipeline = self.pipelines.get(&self.device, step);
            let context = format!("compiling `{label}`");
            self.fault.check_lost(&context)?;
            let pipeline = pipeline.map_err(|failure| self.explained(&context, failure))?;
            let binding = |buffer, offset: usize, size: u64| {
                let size = std::num::NonZeroU64::new(size);
                wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset: offset as u64, size })
            };
            let mut entries = vec![wgpu::BindGroupEntry {
                binding: 0,
                resource: binding(&uniforms, i * stride, step.params.len() as u64),
            }];
            for (slot, operand) in (1..).zip(&step.operands) {
                let buffer: &PooledBuffer = operand.memory()?;
                let resource = binding(&buffer.buffer, 0, operand.size_bytes());
                entries.push(wgpu::BindGroupEntry { binding: slot, resource });
            }
            self.counters.bind_groups_created.add(1);
            let context = format!("binding `{label}`");
            let (group, outcome) =
                scoped(&self.device, &[Validation, OutOfMemory, Internal], refused(context.clone()), || {
                    self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                        label: Some(label),
                        layout: &pipeline.layout,
                        entries: &entries,
                    })
                });
            self.settle(&context, outcome)?;
            if let Some(check) = &pipeline.check
                && dispatches.iter().all(|(known, ..)| !Arc::ptr_eq(known, &pipeline))
            {
                checks.push(check.clone());
            }
            dispatches.push((pipeline, group, step.grid));
        }
        Ok(PreparedSteps { dispatches, checks })
    }

    /// A buffer with the params of all dispatches in a recording.
    fn uniforms(&self, params: &[u8]) -> Result<wgpu::Buffer, Error> {
        self.counters.buffers_created.add(1);
        self.counters.bytes_allocated.add(params.len() as u64);
        let (buffer, outcome) = self.pool.create(
            &self.device,
            &wgpu::BufferDescriptor {
                label: Some("params"),
                size: params.len() as u64,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            },
        );
        self.settle("allocating params", outcome)?;
        let context = "uploading params";
        let ((), outcome) = scoped(&self.device, &[Validation, OutOfMemory], refused(context), || {
            self.queue.write_buffer(&buffer, 0, params);
        });
        self.settle(context, outcome)?;
        Ok(buffer)
    }

    /// Compiles steps' pipelines, one thread per core. Errors are reported at first use.
    pub fn compile<'a>(&self, steps: impl IntoIterator<Item = &'a Step>) {
        let mut known = HashSet::new();
        let steps: Vec<&Step> = steps.into_iter().filter(|step| known.insert(step.pipeline())).collect();
        let next = AtomicUsize::new(0);
        on_threads(n_cores().min(steps.len()), || {
            while let Some(step) = steps.get(next.fetch_add(1, Ordering::Relaxed)) {
                let _ = self.pipelines.get(&self.device, step);
            }
        });
    }

    /// Submits a range of dispatches in one pass.
    pub fn run(&self, recording: &Recording, which: Range<usize>) -> Result<(), Error> {
        let steps = prepared(recording)?;
        self.expect_sound(steps)?;
        let mut encoder = self.encoder();
        self.encode(&mut encoder, steps, which);
        self.submit(encoder, || ()).map(drop)
    }

    /// Submits a range of dispatches `n_runs` times, one pass each, and copies a tensor to the host after each pass.
    pub fn run_and_read(
        &self,
        recording: &Recording,
        which: Range<usize>,
        tensor: &Tensor,
        n_runs: u32,
    ) -> Result<ReadFuture, Error> {
        let (steps, buffer, size) = (prepared(recording)?, tensor.memory::<PooledBuffer>()?, tensor.size_bytes());
        self.expect_sound(steps)?;
        let staging = self.staging(size * u64::from(n_runs))?;
        let mut encoder = self.encoder();
        for run in 0..u64::from(n_runs) {
            self.encode(&mut encoder, steps, which.clone());
            encoder.copy_buffer_to_buffer(&buffer.buffer, 0, &staging, run * size, size);
        }
        self.submit_and_map(encoder, staging)
    }

    /// Refuses shaders that are known not to compile: in a browser, they would run as if they wrote zeros. The next
    /// read waits for unknown outcomes.
    fn expect_sound(&self, steps: &PreparedSteps) -> Result<(), Error> {
        for check in &steps.checks {
            match check.now() {
                Poll::Ready(None) => {}
                Poll::Ready(Some(failure)) => {
                    self.fault.check_lost("running")?;
                    return Err(failure.into_error());
                }
                Poll::Pending => self.unsettled.add(Some(check.clone())),
            }
        }
        Ok(())
    }

    fn encode(&self, encoder: &mut wgpu::CommandEncoder, steps: &PreparedSteps, which: Range<usize>) {
        let dispatches = &steps.dispatches[which];
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        for (pipeline, group, [x, y, z]) in dispatches {
            pass.set_pipeline(&pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            pass.dispatch_workgroups(*x, *y, *z);
        }
        drop(pass);
        self.counters.dispatches.add(dispatches.len() as u64);
    }

    /// Reads a range of words of a tensor.
    pub fn read(&self, tensor: &Tensor, words: Range<usize>) -> Result<ReadFuture, Error> {
        let [first, end] = [words.start, words.end].map(|word| word as u64 * 4);
        self.submit_and_read(self.encoder(), &tensor.memory::<PooledBuffer>()?.buffer, first..end)
    }

    /// Reads a tensor's whole buffer.
    pub fn read_all(&self, tensor: &Tensor) -> Result<ReadFuture, Error> {
        let buffer = &tensor.memory::<PooledBuffer>()?.buffer;
        self.submit_and_read(self.encoder(), buffer, 0..buffer.size())
    }

    /// Copies whole tensors of equal sizes, in order.
    pub fn copy(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
        let mut encoder = self.encoder();
        for (from, to) in pairs {
            let [source, destination] = [from.memory::<PooledBuffer>()?, to.memory()?];
            encoder.copy_buffer_to_buffer(&source.buffer, 0, &destination.buffer, 0, from.size_bytes());
        }
        self.submit(encoder, || ()).map(drop)
    }

    /// Copies ranges of words between tensors, in order.
    pub fn copy_words(&self, copies: &[WordCopy]) -> Result<(), Error> {
        let mut encoder = self.encoder();
        for WordCopy { from: (from, from_first), to: (to, to_first), n_words } in copies {
            let [source, destination] = [from.memory::<PooledBuffer>()?, to.memory()?];
            let [from, to, n] = [*from_first, *to_first, *n_words].map(|words| 4 * words as u64);
            encoder.copy_buffer_to_buffer(&source.buffer, from, &destination.buffer, to, n);
        }
        self.submit(encoder, || ()).map(drop)
    }

    /// Whether the device supports [`Gpu::run_profiled`].
    pub fn has_timestamps(&self) -> bool {
        self.device.features().contains(wgpu::Features::TIMESTAMP_QUERY)
    }

    /// Runs each dispatch in its own pass between two timestamps.
    pub async fn run_profiled(&self, recording: &Recording) -> Result<Vec<Duration>, Error> {
        let steps = prepared(recording)?;
        if !self.has_timestamps() {
            let limit = "feature timestamp-query";
            return Err(Error::Limit { adapter: self.adapter_name.clone(), limit, expected: 1, found: 0 });
        }
        self.expect_sound(steps)?;
        let mut times = Vec::with_capacity(steps.dispatches.len());
        // A query set holds at most 4096 timestamps.
        for part in steps.dispatches.chunks(wgpu::QUERY_SET_MAX_QUERIES as usize / 2) {
            let count = 2 * part.len() as u32;
            self.counters.buffers_created.add(1);
            let size = u64::from(count) * 8;
            let context = "allocating timestamps";
            let ((queries, resolved), outcome) =
                scoped(&self.device, &[Validation, OutOfMemory], refused(context), || {
                    let queries = self.device.create_query_set(&wgpu::QuerySetDescriptor {
                        label: Some("profile"),
                        ty: wgpu::QueryType::Timestamp,
                        count,
                    });
                    let resolved = self.device.create_buffer(&wgpu::BufferDescriptor {
                        label: Some("timestamps"),
                        size,
                        usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                        mapped_at_creation: false,
                    });
                    (queries, resolved)
                });
            self.settle(context, outcome)?;
            let mut encoder = self.encoder();
            for (first, (pipeline, group, [x, y, z])) in (0..count).step_by(2).zip(part) {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: None,
                    timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                        query_set: &queries,
                        beginning_of_pass_write_index: Some(first),
                        end_of_pass_write_index: Some(first + 1),
                    }),
                });
                pass.set_pipeline(&pipeline.pipeline);
                pass.set_bind_group(0, group, &[]);
                pass.dispatch_workgroups(*x, *y, *z);
            }
            encoder.resolve_query_set(&queries, 0..count, &resolved, 0);
            self.counters.dispatches.add(part.len() as u64);
            let words = self.submit_and_read(encoder, &resolved, 0..size)?.await?.words()?;
            let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&words);
            let period_ns = f64::from(self.queue.get_timestamp_period());
            times.extend(
                ticks
                    .chunks_exact(2)
                    .map(|pair| Duration::from_nanos((pair[1].saturating_sub(pair[0]) as f64 * period_ns) as u64)),
            );
        }
        Ok(times)
    }

    pub fn save_pipeline_cache(&self) -> Result<(), Error> {
        self.pipelines.save()
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Submits commands, then calls `then` within the same error scopes.
    fn submit<T>(
        &self,
        encoder: wgpu::CommandEncoder,
        then: impl FnOnce() -> T,
    ) -> Result<(wgpu::SubmissionIndex, T), Error> {
        // wgpu silently drops submissions to a lost device.
        self.fault.check("submitting")?;
        let _done = self.begin(Call::Submit, "submitting")?;
        // Finishing the encoder reports its commands' errors. A submission that runs out of memory loses the device.
        let (submitted, outcome) = scoped(&self.device, &[Validation], refused("submitting"), || {
            let index = self.queue.submit([encoder.finish()]);
            (index, then())
        });
        self.counters.submits.add(1);
        self.settle("submitting", outcome)?;
        Ok(submitted)
    }

    fn staging(&self, size: u64) -> Result<wgpu::Buffer, Error> {
        let staging = self.staging.take(&self.pool, &self.device, size);
        self.fault.check_lost("allocating a staging buffer")?;
        let (buffer, outcome) = staging.map_err(|failure| self.explained("allocating a staging buffer", failure))?;
        self.unsettled.add(outcome);
        Ok(buffer)
    }

    fn submit_and_read(
        &self,
        mut encoder: wgpu::CommandEncoder,
        buffer: &wgpu::Buffer,
        bytes: Range<u64>,
    ) -> Result<ReadFuture, Error> {
        let size = bytes.end.saturating_sub(bytes.start);
        let staging = self.staging(size)?;
        encoder.copy_buffer_to_buffer(buffer, bytes.start, &staging, 0, size);
        self.submit_and_map(encoder, staging)
    }

    /// Submits commands that write to a staging buffer, and maps it.
    fn submit_and_map(&self, encoder: wgpu::CommandEncoder, staging: wgpu::Buffer) -> Result<ReadFuture, Error> {
        self.faults.map(&self.device).inspect_err(|error| self.give_up(LossReason::Driver, error.to_string()))?;
        let (index, mapped) = self.submit(encoder, || map(&staging))?;
        self.poller.wait_for(index, mapped.signal());
        let (pool, fault, reports) = (self.staging.clone(), self.fault.clone(), self.unsettled.reports());
        Ok(Box::pin(MappedRead::new(staging, pool, fault, reports, mapped)))
    }
}

/// The prepared steps of a recording.
fn prepared(recording: &Recording) -> Result<&PreparedSteps, Error> {
    recording.prepared.get().ok_or_else(|| Error::Operand {
        kernel: "device",
        operand: "recording",
        expected: "a recording of this device".into(),
        found: "a recording of another device".into(),
    })
}
