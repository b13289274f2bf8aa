//! An engine's pipeline stages, one on each device that computes layers of the model.

use std::ops::Range;

use super::pages::{HostPage, PageId};
pub(super) use super::stage::{DecodeForm, EngineSizes, SCORED_ROWS};
use super::stage::{Pass, Stage};
use super::windows::WindowSizes;
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::generate::{Adapted, Model, rows_for};
use crate::kernels::BatchRow;
use crate::model::{Ending, PassTensors, Sampler};
use crate::platform::{IS_BROWSER, unless_browser};
use crate::recording::MemoryPlan;
use crate::vision::ImageRows;

/// All stages use the same page numbers, slots and rows. The host copies the activations of a pass from each stage
/// to the next.
pub(super) struct Passes {
    /// Stages on other devices, before the model's own, in order.
    before: Vec<Stage>,
    last: Stage,
    sizes: EngineSizes,
}

impl Passes {
    /// Declares all stages; allocates nothing.
    ///
    /// # Errors
    /// Those of [`Stage::declare`].
    pub fn declare(model: &Model, sizes: EngineSizes) -> Result<Passes, Error> {
        let stage = |(device, transformer)| Stage::declare(device, transformer, sizes);
        let before = model.parts_before().map(stage).collect::<Result<_, _>>()?;
        Ok(Passes { before, last: stage((model.device(), model.transformer()))?, sizes })
    }

    /// Allocates all stages on their GPUs.
    ///
    /// # Errors
    /// As [`Stage::allocate`].
    pub fn allocate(&self, with_room: bool) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.allocate(with_room))
    }

    fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.before.iter().chain([&self.last])
    }

    /// Memory of the weights, cache and passes on the model's device.
    pub fn plan(&self) -> MemoryPlan {
        self.last.plan()
    }

    /// Memory on all devices together.
    pub fn whole_plan(&self) -> MemoryPlan {
        self.plans_before().fold(self.plan(), |sum, plan| sum + plan)
    }

    /// Memory on each device before the model's own.
    pub fn plans_before(&self) -> impl Iterator<Item = MemoryPlan> {
        self.before.iter().map(Stage::plan)
    }

    /// Tensors that decode passes share with the host after the last layer.
    pub fn rows(&self) -> &PassTensors {
        &self.last.rows
    }

    /// The stage that embeds tokens.
    fn first(&self) -> &Stage {
        self.before.first().unwrap_or(&self.last)
    }

    /// Sets the rows of the next decode pass on all devices.
    ///
    /// # Errors
    /// Those of writing to the devices and of reading embedding rows from disk.
    pub async fn set_rows(&self, model: &Model, rows: Vec<BatchRow>, form: DecodeForm) -> Result<(), Error> {
        let rows = padded(rows, form);
        self.fetch_rows(model, &rows).await?;
        self.stages().try_for_each(|stage| stage.rows.state.set_rows(&stage.device, &rows))
    }

    /// With embedding tables on disk: uploads the rows' embeddings and their indices to the first device.
    async fn fetch_rows(&self, model: &Model, rows: &[BatchRow]) -> Result<(), Error> {
        let first = self.first();
        let Some(state) = &first.rows.fetched_state else { return Ok(()) };
        let n = rows.first().map_or(0, |row| row.n_tokens as usize);
        let ids: Vec<u32> = rows.iter().take(n).map(|row| row.token).collect();
        model.fetch_rows(&first.device, &first.rows, 0, &ids).await?;
        let numbers = model.fetched_numbers(&ids).into_iter();
        let rows = numbers.zip(rows).map(|(token, row)| BatchRow {
            token,
            pages: Vec::new(),
            window_pages: Vec::new(),
            ..row.clone()
        });
        state.set_rows(&first.device, &rows.collect::<Vec<_>>())
    }

    /// Appends a page and a window page to a row's sequence, as its `at`-th.
    ///
    /// # Errors
    /// As [`Passes::set_rows`].
    pub fn set_page(&self, row: usize, at: usize, pages: [PageId; 2]) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.rows.state.set_page(&stage.device, row, at, pages))
    }

    /// Copies the states of a sequence to a copy.
    ///
    /// # Errors
    /// Those of [`Stage::keep_states`].
    pub fn keep_states(&self, slot: u32, copy: u32) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.keep_states(slot, copy))
    }

    /// Copies states back to a sequence.
    ///
    /// # Errors
    /// As [`Passes::keep_states`].
    pub fn restore_states(&self, copy: u32, slot: u32) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.restore_states(copy, slot))
    }

    /// Reads a page and the copy of the states after it.
    ///
    /// # Errors
    /// Those of copying and reading.
    pub async fn read_page(&self, page: PageId, copy: Option<u32>) -> Result<HostPage, Error> {
        let (mut keys, mut states) = (Vec::new(), Vec::new());
        for stage in self.stages() {
            keys.extend(stage.read_page(page).await?);
            if let Some(copy) = copy {
                states.extend(stage.read_copy(copy).await?);
            }
        }
        Ok(HostPage { keys: keys.into(), states: copy.map(|_| states.into()) })
    }

    /// Writes keys and values to a page.
    ///
    /// # Errors
    /// Those of writing and copying.
    pub fn write_page(&self, page: PageId, keys: &[u32]) -> Result<(), Error> {
        self.stages().try_fold(keys, |keys, stage| stage.write_page(page, keys)).map(drop)
    }

    /// Writes states to a sequence.
    ///
    /// # Errors
    /// As [`Passes::write_page`].
    pub fn write_states(&self, slot: u32, states: &[u32]) -> Result<(), Error> {
        self.stages().try_fold(states, |states, stage| stage.write_states(slot, states)).map(drop)
    }

    /// Pages, including the padding page 0.
    pub fn n_pages(&self) -> u32 {
        self.sizes.n_pages
    }

    /// Pages of layers with a window, if these have their own.
    pub fn windows(&self) -> Option<WindowSizes> {
        self.sizes.windows
    }

    /// Maximum number of rows of a pass.
    pub fn n_rows(&self) -> u32 {
        self.sizes.n_rows
    }

    /// Whether decode passes of many sequences use the products of prefill.
    pub fn has_many(&self) -> bool {
        self.sizes.many
    }

    /// Recurrent states per sequence.
    pub fn n_states(&self) -> u32 {
        self.sizes.n_states
    }

    /// Maximum number of tokens of a prefill chunk.
    pub fn max_pass(&self) -> u32 {
        self.sizes.max_pass
    }

    /// Allocates what prefill chunks with logits need.
    ///
    /// # Errors
    /// As [`Stage::allocate_logits`].
    pub async fn allocate_logits(&mut self, adapted: Adapted<'_>) -> Result<(), Error> {
        self.last.allocate_logits(Some(adapted)).await
    }

    /// Computes a prefill chunk for the sequence of `row`, of at most [`SCORED_ROWS`] tokens if `with_logits`; then
    /// returns the logits of each. Requires [`Passes::allocate_logits`]. Models with several stages have no adapters.
    ///
    /// # Errors
    /// Those of recording, of the self-test, and of the devices.
    pub async fn compute_prompt(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        row: BatchRow,
        ids: &[u32],
        with_logits: bool,
    ) -> Result<Vec<f32>, Error> {
        let size = rows_for(ids.len() as u32).min(self.sizes.max_pass);
        let (position, rows) = (row.pos as usize, [row]);
        for stage in self.stages() {
            stage.device.write(&stage.prompt.tokens, position, ids)?;
            stage.prompt.state.set_rows(&stage.device, &rows)?;
        }
        model.fetch_rows(&self.first().device, &self.first().prompt, position, ids).await?;
        let pass = Pass::Prompt(size);
        let left = unless_browser(|| self.compute_before(pass, size, |stage| &stage.prompt), || Ok(None)).await?;
        take_left(&self.last.device, &self.last.prompt, left)?;
        if !with_logits {
            model.run(self.last.pass(Some(adapted), Pass::Prompt(size)).await?, ids.len()).await?;
            return Ok(Vec::new());
        }
        let pass = Pass::ScoredPrompt(size);
        let logits = self.last.scored.logits.first_rows(size)?;
        let recording = self.last.pass(Some(adapted), pass).await?;
        let words = model.run_and_read(recording, ids.len(), &logits, 1).await?.await?;
        Ok(bytemuck::cast_vec(words))
    }

    /// Computes a prefill chunk over these rows of an image, which are at these times, rows and columns, for the sequence
    /// of `row`.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn compute_image(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        row: BatchRow,
        (image, rows): (&ImageRows, Range<usize>),
        positions: &[[u32; 3]],
    ) -> Result<(), Error> {
        let n_rows = rows.len();
        let size = rows_for(n_rows as u32).min(self.sizes.max_pass);
        let stage = &mut self.last;
        let tokens = (&stage.device, &stage.prompt);
        model.write_row_tokens(tokens, row.pos as usize, (image, rows.clone())).await?;
        let rope_offset = match stage.write_image(image, positions, (rows, size))? {
            Some(first) => first.wrapping_sub(row.pos),
            None => row.rope_offset,
        };
        stage.prompt.state.set_rows(&stage.device, &[BatchRow { rope_offset, ..row }])?;
        model.run(stage.pass(Some(adapted), Pass::Image(size)).await?, n_rows).await
    }

    /// Submits a decode pass over the first `n` of the set rows and reads the tokens that it chooses.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn submit_rows(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        n: u32,
        form: DecodeForm,
    ) -> Result<Pending, Error> {
        let n_rows = form.rows(n);
        let greedy = DecodeForm { sampler: Sampler::default(), ..form };
        let pass = Pass::Decode(n_rows, greedy);
        let left = unless_browser(|| self.compute_before(pass, n_rows, |stage| &stage.rows), || Ok(None)).await?;
        take_left(&self.last.device, &self.last.rows, left)?;
        let chosen = self.last.rows.chosen.clone();
        model
            .run_and_read(self.last.pass(Some(adapted), Pass::Decode(n_rows, form)).await?, n as usize, &chosen, 1)
            .await
    }

    /// Computes a pass of `size` rows on the stages before the model's own device and returns its activations,
    /// `[size, C]`, if there are such stages. `io`: the tensors of the pass.
    async fn compute_before(
        &mut self,
        pass: Pass,
        size: u32,
        io: impl Fn(&Stage) -> &PassTensors,
    ) -> Result<Option<Vec<u32>>, Error> {
        let mut left = None;
        for stage in &mut self.before {
            let (device, stream) = (stage.device.clone(), io(stage).stream.first_rows(size)?);
            take_left(&device, io(stage), left)?;
            left = Some(device.run_and_read(stage.pass(None, pass).await?, &stream)?.await?);
        }
        Ok(left)
    }

    /// Whether the MTP head drafts; never in browsers.
    pub fn has_mtp(&self) -> bool {
        !IS_BROWSER && self.sizes.mtp
    }

    /// Runs the MTP head over the prefill chunk of `row`. `next_ids`: the token after each of the chunk's tokens.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn mtp_follow(&mut self, model: &Model, row: BatchRow, next_ids: &[u32]) -> Result<(), Error> {
        let stage = &mut self.last;
        let Some(mtp) = &stage.prompt.mtp else { return Ok(()) };
        stage.device.write(mtp.tokens(), row.pos as usize, next_ids)?;
        mtp.state().set_rows(&stage.device, &[row])?;
        let size = rows_for(next_ids.len() as u32).min(self.sizes.max_pass);
        model.run(stage.pass(None, Pass::MtpFollow(size)).await?, next_ids.len()).await
    }

    /// Drafts a token after each row: over the hidden states of the last decode pass, or with
    /// [`Ending::MtpDraftNext`] over the head's own. Skips padding rows.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn mtp_draft(&mut self, rows: Vec<BatchRow>, ending: Ending) -> Result<Vec<u32>, Error> {
        let stage = &mut self.last;
        let Some(mtp) = &stage.rows.mtp else { return Ok(Vec::new()) };
        let rows = padded(rows, DecodeForm::default());
        let n_rows = rows.len() as u32;
        mtp.state().set_rows(&stage.device, &rows)?;
        let (device, chosen) = (stage.device.clone(), stage.rows.chosen.clone());
        device.replay_and_read(stage.pass(None, Pass::MtpDraft(n_rows, ending)).await?, &chosen, 1)?.await
    }
}

/// Pads the rows to those of the pass. The first row holds the number of real rows; the others write to the padding
/// page and state.
fn padded(mut rows: Vec<BatchRow>, form: DecodeForm) -> Vec<BatchRow> {
    let n = rows.len();
    rows.resize(form.rows(n as u32) as usize, BatchRow::default());
    if let Some(first) = rows.first_mut() {
        first.n_tokens = n as u32;
    }
    rows
}

/// Uploads the activations of the previous stage, if there is one.
fn take_left(device: &Device, io: &PassTensors, left: Option<Vec<u32>>) -> Result<(), Error> {
    left.map_or(Ok(()), |rows| device.write(&io.stream, 0, &rows))
}
