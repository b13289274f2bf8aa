//! Where an engine computes: the stages of its model, one on each device that computes some of its layers.

use super::pages::{HostPage, PageId};
pub(super) use super::stage::Sizes;
use super::stage::Stage;
use crate::device::{Device, Pending};
use crate::error::Error;
use crate::generate::{Adapted, Model, rows_for};
use crate::kernels::StateRow;
use crate::model::{PassTensors, Sampler};
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

    /// The same on each device before it.
    pub fn plans_before(&self) -> impl Iterator<Item = MemoryPlan> {
        self.before.iter().map(Stage::plan)
    }

    /// What a pass over one token of each of several sequences shares with the host after its last layer.
    pub fn rows(&self) -> &PassTensors {
        &self.last.rows
    }

    /// The device that embeds tokens.
    #[cfg(not(target_arch = "wasm32"))]
    fn first(&self) -> &Stage {
        self.before.first().unwrap_or(&self.last)
    }

    /// Has the next pass over rows begin with these, on all devices.
    ///
    /// # Errors
    /// Those of writing, and of reading rows of tables from the file.
    #[cfg_attr(target_arch = "wasm32", expect(unused_variables))]
    pub fn set_rows(&self, model: &Model, rows: &[StateRow]) -> Result<(), Error> {
        #[cfg(not(target_arch = "wasm32"))]
        self.fetch_rows(model, rows)?;
        self.stages().try_for_each(|stage| stage.rows.state.set_rows(&stage.device, rows))
    }

    /// Hands the first device the rows of tables that are in the file, and their numbers, if there are such tables.
    #[cfg(not(target_arch = "wasm32"))]
    fn fetch_rows(&self, model: &Model, rows: &[StateRow]) -> Result<(), Error> {
        let first = self.first();
        let Some(state) = &first.rows.fetched_state else { return Ok(()) };
        let n = rows.first().map_or(0, |row| row.n_tokens as usize);
        let ids: Vec<u32> = rows.iter().take(n).map(|row| row.token).collect();
        model.fetch_rows(&first.device, &first.rows, 0, &ids)?;
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
        #[cfg(not(target_arch = "wasm32"))]
        model.fetch_rows(&self.first().device, &self.first().prompt, position, ids)?;
        let mut left = None;
        for stage in &mut self.before {
            let (device, stream) = (stage.device.clone(), stage.prompt.stream.first_rows(size)?);
            take_left(&device, &stage.prompt, left)?;
            left = Some(device.run_and_read(stage.of_prompt(None, size).await?, &stream)?.await?);
        }
        take_left(&self.last.device, &self.last.prompt, left)?;
        model.run(self.last.of_prompt(Some(adapted), size).await?, ids.len()).await
    }

    /// Submits a pass over the rows that were set, of which there are `n`, and reads the tokens that it chooses.
    ///
    /// # Errors
    /// As [`Passes::compute_prompt`].
    pub async fn submit_rows(
        &mut self,
        (model, adapted): (&Model, Adapted<'_>),
        n: u32,
        sampler: Sampler,
    ) -> Result<Pending, Error> {
        let n_rows = n.next_power_of_two();
        let mut left = None;
        for stage in &mut self.before {
            let (device, stream) = (stage.device.clone(), stage.rows.stream.first_rows(n_rows)?);
            take_left(&device, &stage.rows, left)?;
            left = Some(device.run_and_read(stage.of_rows(None, n_rows, Sampler::default()).await?, &stream)?.await?);
        }
        take_left(&self.last.device, &self.last.rows, left)?;
        let chosen = self.last.rows.chosen.clone();
        model.run_and_read(self.last.of_rows(Some(adapted), n_rows, sampler).await?, n as usize, &chosen, 1).await
    }
}

/// Has a device's next pass begin with the rows that the device before it left, if there is one.
fn take_left(device: &Device, io: &PassTensors, left: Option<Vec<u32>>) -> Result<(), Error> {
    left.map_or(Ok(()), |rows| device.write(&io.stream, 0, &rows))
}
