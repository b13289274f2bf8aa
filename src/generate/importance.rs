//! Importance matrices: the mean square of each input of each matrix over a text, as llama.cpp's `llama-imatrix`
//! measures it. Quantisation then rounds important columns more precisely.
//!
//! A pass is recorded with the kernels for many rows, whose inputs are tensors of their own, and runs product by
//! product; the input of each is read before it runs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::perplexity::{TextWindows, window_bos};
use super::{Model, Session};
use crate::cache;
use crate::device::Device;
use crate::error::Error;
use crate::formats::BlockType;
use crate::formats::gguf::{DEFAULT_ALIGNMENT, Value, ValueType};
use crate::formats::gguf_writer::GgufHeader;
use crate::matrix::Matrix;
use crate::model::{Ending, ExpertMatrix, RowPlaces, SharedExpert, Transformer};
use crate::recording::{Recording, Step};
use crate::tensor::Tensor;

/// Tensors outside of layers have no importances, as in llama.cpp.
const OF_LAYERS: &str = "blk.";

/// A measurement over the windows of a text.
pub struct ImportanceRun {
    session: Session,
    windows: TextWindows,
    bos: Option<u32>,
    inputs: Inputs,
    /// By number of rows.
    recordings: HashMap<u32, Recording>,
    n_done: usize,
}

impl ImportanceRun {
    /// A run over a text with a session of the model. Load the model as
    /// [`exact`](crate::LoadOptions::exact), so that inputs are not rounded.
    ///
    /// # Errors
    /// [`Error::Option`] if layers or experts are not on the device; as [`Model::session`].
    pub fn new(model: &Model, windows: TextWindows) -> Result<ImportanceRun, Error> {
        model.expect_resident("imatrix")?;
        Ok(ImportanceRun {
            session: model.session()?,
            windows,
            bos: window_bos(model),
            inputs: Inputs::of(model.transformer()),
            recordings: HashMap::new(),
            n_done: 0,
        })
    }

    /// Measures the next window and returns the number of windows so far; `None` after the last one.
    ///
    /// # Errors
    /// As [`Session::logits`]; [`Error::NonFinite`] if an input is not finite.
    pub async fn next_window(&mut self) -> Result<Option<usize>, Error> {
        let Some(window) = self.windows.window(self.n_done, self.bos) else { return Ok(None) };
        self.session.clear();
        let measured = self.measure(&window).await;
        if measured.is_err() {
            self.session.sequence.forget_cache();
        }
        measured?;
        self.n_done += 1;
        Ok(Some(self.n_done))
    }

    async fn measure(&mut self, ids: &[u32]) -> Result<(), Error> {
        let model = self.session.model.clone();
        let device = model.device();
        self.session.check_ids(ids)?;
        self.session.sequence.append(ids);
        self.session.choose_rope_offset();
        device.write(&self.session.passes.io.tokens, 0, ids)?;
        while !self.session.sequence.uncached().is_empty() {
            let size = self.session.passes.size(self.session.sequence.uncached().len() as u32);
            let n_tokens = self.session.sequence.uncached().len().min(size as usize);
            self.session.ready(size, n_tokens, Ending::Cache).await?;
            if !self.recordings.contains_key(&size) {
                let recorded = self.session.passes.record_unfolded(device, model.transformer(), size).await?;
                self.recordings.insert(size, recorded);
            }
            if let Some(recording) = self.recordings.get(&size) {
                let position = self.session.sequence.n_cached();
                self.inputs.add_pass(device, recording, n_tokens, position).await?;
            }
            self.session.submitted(n_tokens, size);
        }
        Ok(())
    }

    /// The windows.
    pub fn windows(&self) -> &TextWindows {
        &self.windows
    }

    /// The sums so far.
    pub fn sums(&self) -> ImportanceSums {
        ImportanceSums { entries: self.inputs.entries(), n_windows: self.n_done, n_ctx: self.windows.n_ctx() }
    }
}

/// Sums of squares per input of each matrix of a model's layers.
#[derive(Clone, Debug, Default)]
pub struct ImportanceSums {
    entries: BTreeMap<String, TensorSums>,
    n_windows: usize,
    n_ctx: usize,
}

/// The sums of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TensorSums {
    /// Sum of the squares of each column's inputs, expert by expert.
    pub sums: Vec<f64>,
    /// Number of inputs per expert; one number for a tensor without experts.
    pub counts: Vec<u64>,
}

impl ImportanceSums {
    /// The sums by GGUF name of the tensor.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &TensorSums)> {
        self.entries.iter().map(|(name, sums)| (name.as_str(), sums))
    }

    /// Experts that had no input, and the number of all experts.
    pub fn experts_without_inputs(&self) -> (usize, usize) {
        let counts = || self.entries.values().flat_map(|sums| &sums.counts);
        (counts().filter(|&&count| count == 0).count(), counts().count())
    }

    /// Renames tensors, for a file with other names than GGUF's usual ones. Tensors of single experts that keep their
    /// name become one, as in files of llama.cpp's converter.
    pub fn renamed(self, name_in_file: impl Fn(&str) -> Option<String>) -> ImportanceSums {
        let mut entries = BTreeMap::new();
        let mut single: BTreeMap<String, BTreeMap<u32, TensorSums>> = BTreeMap::new();
        for (name, sums) in self.entries {
            match (name_in_file(&name), of_expert(&name)) {
                (Some(in_file), _) => _ = entries.insert(in_file, sums),
                (None, Some((all, expert))) => _ = single.entry(all).or_default().insert(expert, sums),
                (None, None) => _ = entries.insert(name, sums),
            }
        }
        for (name, experts) in single {
            let joined: &mut TensorSums = entries.entry(name).or_default();
            for sums in experts.into_values() {
                joined.sums.extend(sums.sums);
                joined.counts.extend(sums.counts);
            }
        }
        ImportanceSums { entries, ..self }
    }

    /// Writes a GGUF file in llama.cpp's format, which [`ImportanceMatrix`](crate::load::convert::ImportanceMatrix)
    /// and `llama-quantize` read. `dataset`: the name of the text.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written, [`Error::Format`] for a tensor's name that GGUF cannot hold.
    pub fn write(&self, path: &Path, dataset: &str) -> Result<(), Error> {
        let mut header = GgufHeader::new(DEFAULT_ALIGNMENT);
        header.set("general.type", Value::Str("imatrix"))?;
        header.set_array("imatrix.datasets", ValueType::String, [Value::Str(dataset)].into_iter())?;
        header.set("imatrix.chunk_count", Value::U32(self.n_windows as u32))?;
        header.set("imatrix.chunk_size", Value::U32(self.n_ctx as u32))?;
        let mut data: Vec<u8> = Vec::new();
        let mut add = |name: String, shape: [u64; 2], values: &mut dyn Iterator<Item = f32>| {
            header.add_tensor(&name, &shape, BlockType::F32)?;
            data.extend(values.flat_map(f32::to_le_bytes));
            data.resize(data.len() + header.padding(data.len() as u64), 0);
            Ok::<_, Error>(())
        };
        for (name, TensorSums { sums, counts }) in &self.entries {
            let n_matrices = counts.len() as u64;
            let shape = [n_matrices, sums.len() as u64 / n_matrices.max(1)];
            add(format!("{name}.in_sum2"), shape, &mut sums.iter().map(|&sum| sum as f32))?;
            add(format!("{name}.counts"), [n_matrices, 1], &mut counts.iter().map(|&count| count as f32))?;
        }
        let bytes = [header.to_bytes(), data].concat();
        cache::write(path, &bytes)
    }
}

/// The inputs of all products of a model's layers.
struct Inputs {
    matrices: Vec<MatrixInputs>,
    /// Matrices by the address of their weights' storage, which the model keeps.
    by_weights: HashMap<usize, usize>,
}

/// The inputs of a matrix on the device, which may be several tensors of the file.
struct MatrixInputs {
    kind: MatrixKind,
    n_columns: usize,
    sums: Vec<f64>,
    counts: Vec<u64>,
}

enum MatrixKind {
    /// Tensors that have the same inputs.
    Dense(Vec<String>),
    Experts {
        first: usize,
        /// Rows of an expert.
        n_rows: usize,
        members: Vec<ExpertMember>,
    },
}

/// A tensor of some experts.
struct ExpertMember {
    name: String,
    places: RowPlaces,
    /// Columns of a shared expert, which is cut into several; `None` for routed experts.
    shared_columns: Option<usize>,
    /// Number of experts.
    n_experts: usize,
}

impl Inputs {
    fn of(transformer: &Transformer) -> Inputs {
        let mut inputs = Inputs { matrices: Vec::new(), by_weights: HashMap::new() };
        for (matrix, members) in transformer.weights.dense_parts() {
            let names: Vec<String> = members.iter().map(|(name, _)| name.clone()).collect();
            if names.iter().all(|name| name.starts_with(OF_LAYERS)) {
                inputs.add(MatrixKind::Dense(names), 1, matrix);
            }
        }
        for (block, weights) in transformer.config.blocks.iter().zip(&transformer.weights.blocks) {
            let (Some(experts), Some(weights)) = (&block.feed_forward.experts, &weights.experts) else { continue };
            for ExpertMatrix { first_expert, rows, matrix, members } in weights.expert_parts() {
                let member = |(name, places): &(String, RowPlaces)| {
                    let is_shared = name.ends_with("_shexp.weight");
                    let is_one = !is_shared && !name.ends_with("_exps.weight");
                    let shared = experts.shared.as_ref().filter(|_| is_shared);
                    // The inputs of a shared expert's downs are its own columns, those of the others everyone's.
                    let columns = |shared: &SharedExpert| match name.contains("ffn_down") {
                        true => shared.dim as usize,
                        false => matrix.cols() as usize,
                    };
                    let n_experts = if is_one { 1 } else { experts.n as usize };
                    ExpertMember { name: name.clone(), places: *places, shared_columns: shared.map(columns), n_experts }
                };
                let kind = MatrixKind::Experts {
                    first: *first_expert as usize,
                    n_rows: *rows as usize,
                    members: members.iter().map(member).collect(),
                };
                inputs.add(kind, (matrix.rows() / rows) as usize, matrix);
            }
        }
        inputs
    }

    fn add(&mut self, kind: MatrixKind, n_matrices: usize, matrix: &Matrix) {
        let n_columns = matrix.cols() as usize;
        for slab in matrix.slabs() {
            self.by_weights.insert(address(&slab.words), self.matrices.len());
        }
        let (sums, counts) = (vec![0.0; n_matrices * n_columns], vec![0; n_matrices]);
        self.matrices.push(MatrixInputs { kind, n_columns, sums, counts });
    }

    /// Runs a pass over `n_tokens` tokens and adds the inputs of its products.
    async fn add_pass(
        &mut self,
        device: &Device,
        recording: &Recording,
        n_tokens: usize,
        position: usize,
    ) -> Result<(), Error> {
        let (mut done, mut seen, mut routes) = (0, HashSet::new(), None);
        for (i, step) in recording.steps.iter().enumerate() {
            if let Some(chosen) = operand(step, "routes") {
                routes = Some(chosen.clone());
            }
            let (Some(w), Some(x)) = (operand(step, "w"), operand(step, "x")) else { continue };
            let Some(&matrix) = self.by_weights.get(&address(w)) else { continue };
            // A product may take several dispatches.
            if !seen.insert(matrix) {
                continue;
            }
            device.run_steps(recording, done..i)?;
            done = i;
            let rows: Vec<f32> = device.read(x).await?;
            if !rows[..n_tokens * rows.len() / x.shape()[0] as usize].iter().all(|value| value.is_finite()) {
                return Err(Error::NonFinite { pos: position as u32 });
            }
            let inputs = &mut self.matrices[matrix];
            match (&inputs.kind, &routes) {
                (MatrixKind::Dense(_), _) => inputs.add_rows(0, rows.chunks_exact(inputs.n_columns).take(n_tokens)),
                (MatrixKind::Experts { .. }, Some(routes)) => {
                    let chosen: Vec<u32> = device.read(routes).await?;
                    let n_used = routes.shape()[1] as usize;
                    inputs.add_routed(&rows, &chosen[..2 * n_tokens * n_used], x.shape()[0] as usize, routes);
                }
                (MatrixKind::Experts { .. }, None) => {
                    let (expected, found) = ("the experts of each token".into(), "none".into());
                    return Err(Error::Operand { kernel: "imatrix", operand: "routes", expected, found });
                }
            }
        }
        device.run_steps(recording, done..recording.n_dispatches())
    }

    fn entries(&self) -> BTreeMap<String, TensorSums> {
        let mut entries: BTreeMap<String, TensorSums> = BTreeMap::new();
        for inputs in &self.matrices {
            match &inputs.kind {
                MatrixKind::Dense(names) => {
                    let sums = TensorSums { sums: inputs.sums.clone(), counts: inputs.counts.clone() };
                    entries.extend(names.iter().map(|name| (name.clone(), sums.clone())));
                }
                MatrixKind::Experts { n_rows, members, .. } => {
                    let of = |member: &ExpertMember| (member.name.clone(), inputs.of_member(member, *n_rows));
                    entries.extend(members.iter().map(of));
                }
            }
        }
        entries
    }
}

impl MatrixInputs {
    /// Adds rows that matrix `i` of this one was multiplied with.
    fn add_rows<'r>(&mut self, i: usize, rows: impl Iterator<Item = &'r [f32]>) {
        let sums = &mut self.sums[i * self.n_columns..][..self.n_columns];
        for row in rows {
            self.counts[i] += 1;
            sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value) * f64::from(value));
        }
    }

    /// Adds the rows of experts: `chosen` has an expert and its weight for each slot of a token. `rows` has a row per
    /// token or per slot, `n_rows` in all.
    fn add_routed(&mut self, rows: &[f32], chosen: &[u32], n_rows: usize, routes: &Tensor) {
        let MatrixKind::Experts { first, .. } = self.kind else { return };
        let n_slots = (routes.shape()[0] * routes.shape()[1]) as usize;
        let slots_per_row = (n_slots / n_rows.max(1)).max(1);
        let n_columns = self.n_columns;
        for (slot, route) in chosen.chunks_exact(2).enumerate() {
            let own = (route[0] as usize).checked_sub(first).filter(|&expert| expert < self.counts.len());
            if let Some(own) = own {
                self.add_rows(own, std::iter::once(&rows[slot / slots_per_row * n_columns..][..n_columns]));
            }
        }
    }

    fn of_member(&self, member: &ExpertMember, n_rows: usize) -> TensorSums {
        let ExpertMember { places, shared_columns, n_experts, .. } = member;
        let first = places.first as usize / n_rows;
        let sums = &self.sums[first * self.n_columns..];
        let Some(n_columns) = *shared_columns else {
            let n = (*n_experts).min(self.counts.len() - first);
            return TensorSums {
                sums: sums[..n * self.n_columns].to_vec(),
                counts: self.counts[first..first + n].to_vec(),
            };
        };
        // Experts that a shared one was cut into have `run` of its columns each.
        let run = places.slice.map_or(n_columns, |run| run as usize);
        let of_experts = sums.chunks_exact(self.n_columns).flat_map(|sums| &sums[..run.min(sums.len())]);
        TensorSums { sums: of_experts.take(n_columns).copied().collect(), counts: vec![self.counts[first]] }
    }
}

/// The name of all experts' tensor and the expert, of the tensor of one: `blk.0.ffn_up_exps.3.weight`.
fn of_expert(name: &str) -> Option<(String, u32)> {
    let (all, expert) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let expert = expert.parse().ok().filter(|_| all.ends_with("_exps"))?;
    Some((format!("{all}.weight"), expert))
}

/// Address of a tensor's storage.
fn address(tensor: &Tensor) -> usize {
    Arc::as_ptr(&tensor.storage) as usize
}

/// The operand of a kernel that has this name.
fn operand<'s>(step: &'s Step, name: &str) -> Option<&'s Tensor> {
    let at = step.kernel.bindings.iter().position(|binding| binding.name == name)?;
    step.operands.get(at)
}
