//! Device state for batches of queries of one size, with recordings made at first use.

use std::collections::HashMap;

use super::encoder::Encoded;
use super::{ItemShard, Mol};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{self, Linear, MolOperands, MolScores, TopStrip, merge_top, select_top, top_splits};
use crate::recording::{Recorder, Recording, Workspace};
use crate::retrieval::{Hit, listed};
use crate::tensor::{Role, Tensor};
use crate::tuning::record_tested;

/// How items are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum By {
    /// The mixture.
    Mixture,
    /// The highest logit.
    Bound,
    /// The dot product of the sum of the query's components and the mean of the item's.
    Mean,
    /// `Mean` in 8 bits.
    Coarse,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Task {
    /// Scores a shard and updates the lists of the best items.
    Select { by: By, shard: usize, k: u32 },
    /// Merges the lists.
    Merge { k: u32 },
    /// Computes a shard's scores.
    Scores { by: By, shard: usize },
    /// Computes the mixture's scores of selected items of a shard.
    Of { shard: usize, columns: u32 },
}

struct RecordedTask {
    recording: Recording,
    result: Tensor,
    /// The selected items, for `Task::Of`.
    ids: Option<Tensor>,
}

/// Maximum cached recordings.
const MAX_TASKS: usize = 512;

/// A batch of queries and its recordings, which share memory. One search at a time uses a lane.
pub(super) struct Lane {
    /// Queries in the batch, including padding.
    pub batch: u32,
    workspace: Workspace,
    /// `[B, query_dim]`, the encoder's input.
    x: Tensor,
    encoding: Recording,
    encoded: Encoded,
    inputs: Inputs,
    /// The best items so far, `[B, splits, K, 2]`, keyed by K.
    lists: HashMap<u32, Tensor>,
    tasks: HashMap<Task, RecordedTask>,
}

/// Query inputs of the kernels.
pub(super) struct Inputs {
    /// `[B, N D]`.
    pub components: Tensor,
    /// `[B, G]`.
    pub gates: Tensor,
    /// `[B, D]`: sums of the components.
    pub sums: Tensor,
}

impl Lane {
    /// Batch size of a lane for `n` queries.
    pub fn size_for(n: usize) -> u32 {
        let n = n as u32;
        if n > 4 { n.next_multiple_of(4) } else { n.next_power_of_two() }
    }

    pub async fn new(mol: &Mol, batch: u32) -> Result<Lane, Error> {
        let form = &mol.config.form;
        let declare = |label: &str, columns| Tensor::declare(label, Role::Activations, &[batch, columns], DType::F32);
        let x = declare("mol.x", mol.config.query_dim)?;
        let mut workspace = Workspace::default();
        let record = || {
            let mut rec = mol.device.recorder();
            let encoded = mol.query_encoder.record(&mut rec, &x)?;
            Ok((rec.finish(&mut workspace), encoded))
        };
        let (encoding, encoded) = record_tested(&mol.device, record, |(recording, _)| recording).await?;
        let inputs = Inputs {
            components: declare("mol.queries", form.query_components * mol.config.dim)?,
            gates: declare("mol.query_gates", form.gate_columns().max(4))?,
            sums: declare("mol.sums", mol.config.dim)?,
        };
        Ok(Lane { batch, workspace, x, encoding, encoded, inputs, lists: HashMap::new(), tasks: HashMap::new() })
    }

    /// Encodes rows to components, and gates if there are any. Missing rows are zeros.
    pub async fn encode(&self, mol: &Mol, rows: &[f32]) -> Result<[Vec<f32>; 2], Error> {
        let mut x = rows.to_vec();
        x.resize(self.x.len(), 0.0);
        mol.device.write(&self.x, 0, &x)?;
        mol.device.run(&self.encoding)?;
        self.encoded.read(&mol.device).await
    }

    /// The tensors that queries are written to.
    pub fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// The best items of each query, at most [`MAX_TOP`](crate::kernels::MAX_TOP), in order; non-finite scores first.
    pub async fn best(&mut self, mol: &Mol, by: By, k: usize) -> Result<Vec<Vec<Hit>>, Error> {
        let rounded = k.next_power_of_two().max(8) as u32;
        for shard in 0..mol.shards.len() {
            let task = self.task(mol, Task::Select { by, shard, k: rounded }).await?;
            mol.device.run(&task.recording)?;
            // Software adapters are slow, and waits have a time limit.
            if !mol.device.is_real_gpu() {
                mol.device.drained().await?;
            }
        }
        let task = self.task(mol, Task::Merge { k: rounded }).await?;
        let words = mol.device.run_and_read(&task.recording, &task.result)?.await?;
        let lists = words.chunks_exact(2 * rounded as usize);
        Ok(lists.map(|list| listed(&list[..2 * k]).collect()).collect())
    }

    /// The scores of a shard, `[B, items]`.
    pub async fn scores(&mut self, mol: &Mol, by: By, shard: usize) -> Result<Vec<f32>, Error> {
        let task = self.task(mol, Task::Scores { by, shard }).await?;
        let words = mol.device.run_and_read(&task.recording, &task.result)?.await?;
        Ok(bytemuck::cast_vec(words))
    }

    /// The mixture's scores of selected items of a shard, `[B, columns]`. `ids` are item numbers within the shard
    /// for each query; invalid numbers get no score.
    pub async fn scores_of(&mut self, mol: &Mol, shard: usize, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let columns = ids.len() as u32 / self.batch;
        let task = self.task(mol, Task::Of { shard, columns }).await?;
        if let Some(place) = &task.ids {
            mol.device.write(place, 0, ids)?;
        }
        let words = mol.device.run_and_read(&task.recording, &task.result)?.await?;
        Ok(bytemuck::cast_vec(words))
    }

    async fn task(&mut self, mol: &Mol, task: Task) -> Result<&RecordedTask, Error> {
        if !self.tasks.contains_key(&task) {
            let recorded = record_tested(&mol.device, || self.record(mol, task), |task| &task.recording).await?;
            if self.tasks.len() >= MAX_TASKS {
                self.tasks.clear();
            }
            self.tasks.insert(task, recorded);
        }
        Ok(&self.tasks[&task])
    }

    fn record(&mut self, mol: &Mol, task: Task) -> Result<RecordedTask, Error> {
        let Lane { batch, workspace, inputs, lists, .. } = self;
        let mut rec = mol.device.recorder();
        let mut ids = None;
        let result = match task {
            Task::Select { by, shard, k } => {
                let shard = &mol.shards[shard];
                let scores = record_scores(mol, inputs, &mut rec, by, shard, *batch)?;
                let lists = lists_of(mol, lists, [*batch, k])?;
                let strip = TopStrip { first_id: shard.first, begins: shard.first == 0, allowed: None };
                select_top(&mut rec, &scores, &strip, &lists)?;
                lists
            }
            Task::Merge { k } => {
                let best = Tensor::temporary("best", &[*batch, k, 2], DType::U32)?;
                merge_top(&mut rec, &lists_of(mol, lists, [*batch, k])?, &best)?;
                best
            }
            Task::Scores { by, shard } => record_scores(mol, inputs, &mut rec, by, &mol.shards[shard], *batch)?,
            Task::Of { shard, columns } => {
                let scores = rec.temporary("scores", &[*batch, columns])?;
                let candidate_ids = Tensor::temporary("ids", &[*batch, columns], DType::U32)?;
                record_mixture(mol, inputs, &mut rec, &mol.shards[shard], MolScores::Of(&candidate_ids), &scores)?;
                ids = Some(candidate_ids);
                scores
            }
        };
        Ok(RecordedTask { recording: rec.finish(workspace), result, ids })
    }
}

fn lists_of(mol: &Mol, lists: &mut HashMap<u32, Tensor>, [batch, k]: [u32; 2]) -> Result<Tensor, Error> {
    if let Some(lists) = lists.get(&k) {
        return Ok(lists.clone());
    }
    let longest = mol.shards.iter().map(|shard| shard.n_items).max().unwrap_or(1);
    let shape = [batch, top_splits(batch, longest as u32), k, 2];
    let tensor = Tensor::declare("mol.lists", Role::Activations, &shape, DType::U32)?;
    lists.insert(k, tensor.clone());
    Ok(tensor)
}

fn record_scores(
    mol: &Mol,
    inputs: &Inputs,
    rec: &mut Recorder,
    by: By,
    shard: &ItemShard,
    batch: u32,
) -> Result<Tensor, Error> {
    let scores = rec.temporary("scores", &[batch, shard.n_items as u32])?;
    match by {
        By::Mixture => record_mixture(mol, inputs, rec, shard, MolScores::All, &scores)?,
        By::Bound => record_mixture(mol, inputs, rec, shard, MolScores::Bounds, &scores)?,
        By::Mean => Linear::new(&shard.means).record(rec, &inputs.sums, &scores)?,
        By::Coarse => Linear::new(&shard.coarse).record(rec, &inputs.sums, &scores)?,
    }
    Ok(scores)
}

fn record_mixture(
    mol: &Mol,
    inputs: &Inputs,
    rec: &mut Recorder,
    shard: &ItemShard,
    what: MolScores<'_>,
    scores: &Tensor,
) -> Result<(), Error> {
    let operands = MolOperands {
        items: &shard.components,
        item_gates: &shard.gates,
        queries: &inputs.components,
        query_gates: &inputs.gates,
    };
    kernels::mol(rec, &mol.gate, &operands, what, scores)
}
