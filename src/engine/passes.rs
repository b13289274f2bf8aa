//! Where an engine computes: the stages of its model, one on each device that computes some of its layers.

use super::pages::{HostPage, PageId};
use super::stage::{Pass, Stage};
pub(super) use super::stage::{RowsForm, Sizes};
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::generate::{Adapted, Model, rows_for};
use crate::kernels::StateRow;
#[cfg(not(target_arch = "wasm32"))]
use crate::model::Ending;
use crate::model::PassTensors;
use crate::recording::MemoryPlan;

/// All stages have the same pages, places and rows under the same numbers. The host carries the rows of a pass from each to the
/// next.
pub(super) struct Passes {
    /// Those of layers which other devices compute before the model's own, in order.
    before: Vec<Stage>,
    last: Stage,
    sizes: Sizes,
}

impl Passes {
    /// Declares all of it; nothing is allocated.
    ///
    /// # Errors
    /// Those of [`Stage::declare`].
    pub fn declare(model: &Model, sizes: Sizes) -> Result<Passes, Error> {
        let stage = |(device, transformer)| Stage::declare(device, transformer, sizes);
        let before = model.parts_before().map(stage).collect::<Result<_, _>>()?;
        Ok(Passes { before, last: stage((model.device(), model.transformer()))?, sizes })
    }

    /// Allocates all of it where a GPU has it.
    ///
    /// # Errors
    /// As [`Stage::allocate`].
    pub fn allocate(&self, with_room: bool) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.allocate(with_room))
    }

    fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.before.iter().chain([&self.last])
    }

    /// Memory of the weights and of all this on the model's device.
    pub fn plan(&self) -> MemoryPlan {
        self.last.plan()
    }

    /// The same on all devices together.
    pub fn whole_plan(&self) -> MemoryPlan {
        self.plans_before().fold(self.plan(), |sum, plan| sum + plan)
    }

    /// The same on each device before it.
    pub fn plans_before(&self) -> impl Iterator<Item = MemoryPlan> {
        self.before.iter().map(Stage::plan)
    }

    /// What a pass over rows shares with the host after its last layer.
    pub fn rows(&self) -> &PassTensors {
        &self.last.rows
    }

    /// The device that embeds tokens.
    fn first(&self) -> &Stage {
        self.before.first().unwrap_or(&self.last)
    }

    /// Has the next pass over rows begin with these, on all devices.
    ///
    /// # Errors
    /// Those of writing, and of reading rows of tables from the file.
    pub async fn set_rows(&self, model: &Model, rows: Vec<StateRow>) -> Result<(), Error> {
        let rows = padded(rows);
        self.fetch_rows(model, &rows).await?;
        self.stages().try_for_each(|stage| stage.rows.state.set_rows(&stage.device, &rows))
    }

    /// Hands the first device the rows of tables that are in the file, and their numbers, if there are such tables.
    async fn fetch_rows(&self, model: &Model, rows: &[StateRow]) -> Result<(), Error> {
        let first = self.first();
        let Some(state) = &first.rows.fetched_state else { return Ok(()) };
        let n = rows.first().map_or(0, |row| row.n_tokens as usize);
        let ids: Vec<u32> = rows.iter().take(n).map(|row| row.token).collect();
        model.fetch_rows(&first.device, &first.rows, 0, &ids).await?;
        let numbers = model.fetched_numbers(&ids).into_iter();
        let rows = numbers.zip(rows).map(|(token, row)| StateRow { token, pages: Vec::new(), ..row.clone() });
        state.set_rows(&first.device, &rows.collect::<Vec<_>>())
    }

    /// Gives the sequence of a row a further page: the `at`-th.
    ///
    /// # Errors
    /// As [`Passes::set_rows`].
    pub fn set_page(&self, row: usize, at: usize, page: PageId) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.rows.state.set_page(&stage.device, row, at, page))
    }

    /// Copies the states of the sequence in a place to a copy.
    ///
    /// # Errors
    /// Those of [`Stage::keep_states`].
    pub fn keep_states(&self, slot: u32, copy: u32) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.keep_states(slot, copy))
    }

    /// Copies states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Passes::keep_states`].
    pub fn restore_states(&self, copy: u32, slot: u32) -> Result<(), Error> {
        self.stages().try_for_each(|stage| stage.restore_states(copy, slot))
    }

    /// What a page holds, and the copy of the states after it.
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

    /// Writes keys and values back to a page.
    ///
    /// # Errors
    /// Those of writing and copying.
    pub fn write_page(&self, page: PageId, keys: &[u32]) -> Result<(), Error> {
        self.stages().try_fold(keys, |keys, stage| stage.write_page(page, keys)).map(drop)
    }

    /// Writes states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Passes::write_page`].
    pub fn write_states(&self, slot: u32, states: &[u32]) -> Result<(), Error> {
        self.stages().try_fold(states, |states, stage| stage.write_states(slot, states)).map(drop)
    }

    /// Pages, the one that is nobody's included.
    pub fn n_pages(&self) -> u32 {
        self.sizes.n_pages
    }

    /// Rows of a pass at most.
    pub fn n_rows(&self) -> u32 {
        self.sizes.n_rows
    }

    /// States that layers keep of a sequence.
    pub fn n_states(&self) -> u32 {
        self.sizes.n_states
    }

    /// Tokens that a pass over a prompt takes at most.
    pub fn max_pass(&self) -> u32 {
        self.sizes.max_pass
    }

    /// Computes these tokens of a prompt, which `row` is about. No model with stages before the last one has adapters.
    ///
    /// # Errors
    /// Those of recording, of the self-test, and of the devices.
    pub async fn compute_prompt(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        row: StateRow,
        ids: &[u32],
    ) -> Result<(), Error> {
        let size = rows_for(ids.len() as u32).min(self.sizes.max_pass);
        let (position, rows) = (row.pos as usize, [row]);
        for stage in self.stages() {
            stage.device.write(&stage.prompt.tokens, position, ids)?;
            stage.prompt.state.set_rows(&stage.device, &rows)?;
        }
        model.fetch_rows(&self.first().device, &self.first().prompt, position, ids).await?;
        let mut left = None;
        for stage in &mut self.before {
            let (device, stream) = (stage.device.clone(), stage.prompt.stream.first_rows(size)?);
            take_left(&device, &stage.prompt, left)?;
            left = Some(device.run_and_read(stage.pass(None, Pass::Prompt(size)).await?, &stream)?.await?);
        }
        take_left(&self.last.device, &self.last.prompt, left)?;
        model.run(self.last.pass(Some(adapted), Pass::Prompt(size)).await?, ids.len()).await
    }

    /// Submits a pass over the rows that were set, of which there are `n`, and reads the tokens that it chooses.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn submit_rows(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        n: u32,
        form: RowsForm,
    ) -> Result<Pending, Error> {
        let n_rows = n.next_power_of_two();
        let mut left = None;
        for stage in &mut self.before {
            let (device, stream) = (stage.device.clone(), stage.rows.stream.first_rows(n_rows)?);
            take_left(&device, &stage.rows, left)?;
            let form = RowsForm { has_runs: form.has_runs, ..RowsForm::default() };
            left = Some(device.run_and_read(stage.pass(None, Pass::Rows(n_rows, form)).await?, &stream)?.await?);
        }
        take_left(&self.last.device, &self.last.rows, left)?;
        let chosen = self.last.rows.chosen.clone();
        model.run_and_read(self.last.pass(Some(adapted), Pass::Rows(n_rows, form)).await?, n as usize, &chosen, 1).await
    }

    /// Whether the MTP head drafts. It does so in no browser.
    pub fn has_mtp(&self) -> bool {
        cfg!(not(target_arch = "wasm32")) && self.sizes.mtp
    }

    /// Has the head go on with what the pass over a part of a prompt left that `row` was about. `next_ids`: the token after each of
    /// its tokens.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn mtp_follow(&mut self, model: &Model, row: StateRow, next_ids: &[u32]) -> Result<(), Error> {
        let stage = &mut self.last;
        let Some(mtp) = &stage.prompt.mtp else { return Ok(()) };
        stage.device.write(mtp.tokens(), row.pos as usize, next_ids)?;
        mtp.state().set_rows(&stage.device, &[row])?;
        let size = rows_for(next_ids.len() as u32).min(self.sizes.max_pass);
        model.run(stage.pass(None, Pass::MtpFollow(size)).await?, next_ids.len()).await
    }

    /// Has the head guess after each of these rows: those that the last pass over rows left, or with [`Ending::MtpDraftNext`] those that it
    /// has made of them itself. A row that counts for nothing is none.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn mtp_draft(&mut self, rows: Vec<StateRow>, ending: Ending) -> Result<Vec<u32>, Error> {
        let stage = &mut self.last;
        let Some(mtp) = &stage.rows.mtp else { return Ok(Vec::new()) };
        let rows = padded(rows);
        let n_rows = rows.len() as u32;
        mtp.state().set_rows(&stage.device, &rows)?;
        let (device, chosen) = (stage.device.clone(), stage.rows.chosen.clone());
        device.replay_and_read(stage.pass(None, Pass::MtpDraft(n_rows, ending)).await?, &chosen, 1)?.await
    }
}

/// As many rows as a pass has. The first one says how many count; the others write to the page and the state that are nobody's.
fn padded(mut rows: Vec<StateRow>) -> Vec<StateRow> {
    let n = rows.len();
    rows.resize(n.next_power_of_two(), StateRow::default());
    if let Some(first) = rows.first_mut() {
        first.n_tokens = n as u32;
    }
    rows
}

/// Has a device's next pass begin with the rows that the device before it left, if there is one.
fn take_left(device: &Device, io: &PassTensors, left: Option<Vec<u32>>) -> Result<(), Error> {
    left.map_or(Ok(()), |rows| device.write(&io.stream, 0, &rows))
}
