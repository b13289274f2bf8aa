//! An adapter's products, added to the matrices of a model's files.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::architectures::Architecture;
use super::huggingface::missing;
use super::tasks::{ADAPTERS, Place, Tasks, factor};
use super::tensor_index::floats;
use super::{AdapterFile, FileBytes, ModelFile, ModelShape, folder_of};
use crate::error::Error;
use crate::formats::{BlockType, TensorInfo};
use crate::platform::{n_cores, on_threads};

/// The task of a folder whose weights lack an adapter, if none is chosen.
const USUAL: &str = "retrieval";

/// A change of a matrix, `b a`.
pub(super) struct Delta {
    /// The matrix's GGUF name.
    pub name: String,
    /// The name of factor A in its file.
    pub factor: String,
    pub rank: usize,
    /// `[r, K]`.
    pub a: Vec<f32>,
    /// `[N, r]`, scaled.
    pub b: Vec<f32>,
}

impl Tasks {
    /// The number of a task; `None` for the weights as they are.
    fn number(&self, task: Option<&str>) -> Result<Option<usize>, Error> {
        let find = |task: &str| self.names.iter().position(|name| name == task);
        match (task, &self.place) {
            (None, Place::Stacked { .. }) => Ok(None),
            (None, Place::Folders) if self.names.is_empty() => Err(missing("task_names")),
            (None, Place::Folders) => Ok(Some(find(USUAL).unwrap_or(0))),
            (Some(task), _) => find(task).map(Some).ok_or_else(|| Error::Option {
                option: "task",
                expected: self.names.join(", "),
                found: format!("`{}`", task.escape_debug()),
            }),
        }
    }
}

impl ModelFile {
    /// The model with the adapter of a task merged into its weights; without a task, that of Jina's embeddings 5 for
    /// retrieval, and other models as they are. A prompt of the task's name is the default. `path` is the model's.
    ///
    /// # Errors
    /// [`Error::Option`] for a task that the model does not have; those of opening an adapter; [`Error::Adapter`] for
    /// one that does not fit.
    pub(crate) fn for_task(mut self, path: &Path, task: Option<&str>) -> Result<ModelFile, Error> {
        let shape = match &mut self.header.shape {
            ModelShape::Encoder(shape) => Some(shape),
            ModelShape::Decoder(_) => None,
        };
        let Some((shape, tasks)) = shape.and_then(|shape| shape.tasks.take().map(|tasks| (shape, tasks))) else {
            return match task {
                None => Ok(self),
                Some(task) => {
                    let (expected, found) =
                        ("none: the model has no tasks".into(), format!("`{}`", task.escape_debug()));
                    Err(Error::Option { option: "task", expected, found })
                }
            };
        };
        let Some(number) = tasks.number(task)? else { return Ok(self) };
        let name = &tasks.names[number];
        if shape.default_prompt.is_none() && shape.prompts.contains_key(name) {
            shape.default_prompt = Some(name.clone());
        }
        let deltas = match &tasks.place {
            Place::Folders => deltas_of_folder(&self, &folder_of(path).join(ADAPTERS).join(name))?,
            Place::Stacked { factors, alpha } => self.stacked_deltas(factors, *alpha, [number, tasks.names.len()])?,
        };
        self.merge(&deltas)?;
        Ok(self)
    }

    /// The changes for task `i` of `n`.
    fn stacked_deltas(
        &self,
        factors: &[(usize, TensorInfo)],
        alpha: f32,
        [i, n]: [usize; 2],
    ) -> Result<Vec<Delta>, Error> {
        let architecture = Architecture::of_model(self.header.shape.config())?;
        let mut deltas = Vec::new();
        for (file, a) in factors {
            let Some((module, false)) = factor(&a.name) else { continue };
            // The pooler is not read.
            let name = architecture.gguf_name(&format!("{module}.weight"));
            let Some(name) = name.filter(|name| !name.starts_with("cls.")) else { continue };
            let is_other = |(_, tensor): &&(usize, TensorInfo)| factor(&tensor.name) == Some((module, true));
            let (other_file, b) =
                factors.iter().find(is_other).ok_or_else(|| wrong(&a.name, "a pair of factors", "one"))?;
            let rank = match (&a.shape[..], &b.shape[..]) {
                (&[of_a, rank, _], &[of_b, _, rank_b])
                    if of_a == n as u64 && of_b == of_a && rank == rank_b && rank > 0 =>
                {
                    rank
                }
                _ => {
                    let expected = format!("factors of {n} tasks and one rank");
                    return Err(wrong(&a.name, &expected, &format!("shapes {:?} and {:?}", a.shape, b.shape)));
                }
            };
            let of_task = |file: usize, tensor: &TensorInfo| {
                let all = floats(tensor, tensor.bytes(&self.files[file])?)?;
                let size = all.len() / n;
                Ok::<_, Error>(all[i * size..][..size].to_vec())
            };
            let (a_values, mut b_values) = (of_task(*file, a)?, of_task(*other_file, b)?);
            b_values.iter_mut().for_each(|value| *value *= alpha / rank as f32);
            deltas.push(Delta { name, factor: a.name.clone(), rank: rank as usize, a: a_values, b: b_values });
        }
        Ok(deltas)
    }

    /// Adds changes to matrices, which keep their type.
    fn merge(&mut self, deltas: &[Delta]) -> Result<(), Error> {
        let mut seen = HashSet::new();
        if let Some(Delta { name, factor, .. }) = deltas.iter().find(|delta| !seen.insert(&delta.name)) {
            return Err(wrong(factor, &format!("`{name}` once"), "a duplicate"));
        }
        let n_taken = AtomicUsize::new(0);
        let merge = || {
            let mut merged = Vec::new();
            while let Some(delta) = deltas.get(n_taken.fetch_add(1, Ordering::Relaxed)) {
                merged.push(self.merged(delta).map(|bytes| (delta.name.as_str(), bytes)));
            }
            merged
        };
        let all = on_threads(n_cores().min(deltas.len()), merge);
        for merged in all.into_iter().flatten() {
            let (name, bytes) = merged?;
            self.header.tensor_index.move_to(name, self.files.len());
            self.files.push(FileBytes::Owned(bytes));
        }
        Ok(())
    }

    /// The bytes of a matrix with its change.
    fn merged(&self, Delta { name, factor, rank, a, b }: &Delta) -> Result<Vec<u8>, Error> {
        let found = self.header.tensor_index.find(name);
        let (file, info) = found.ok_or_else(|| wrong(factor, "for a matrix of the model", &format!("for `{name}`")))?;
        let [rows, cols] = [b.len() / rank, a.len() / rank];
        if cols == 0 || info.shape != [rows as u64, cols as u64] {
            return Err(wrong(
                factor,
                &format!("factors of a matrix of shape {:?}", info.shape),
                &format!("[{rows}, {cols}]"),
            ));
        }
        let mut values = floats(info, info.bytes(&self.files[file])?)?;
        for (row, b) in values.chunks_exact_mut(cols).zip(b.chunks_exact(*rank)) {
            for (a, &b) in a.chunks_exact(cols).zip(b) {
                row.iter_mut().zip(a).for_each(|(value, &a)| *value += b * a);
            }
        }
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(wrong(factor, "finite numbers", &format!("a sum of {} at {at}", values[at])));
        }
        match info.block_type {
            BlockType::F32 => Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            BlockType::F16 => Ok(values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect()),
            BlockType::BF16 => Ok(values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect()),
            other => Err(Error::Unsupported {
                format: "safetensors",
                field: format!("type of tensor `{}`", info.name.escape_debug()),
                found: format!("{other}, with an adapter"),
                supported: "F32, F16, BF16".into(),
            }),
        }
    }
}

fn deltas_of_folder(model: &ModelFile, folder: &Path) -> Result<Vec<Delta>, Error> {
    let adapter = AdapterFile::open(folder)?;
    let architecture = Architecture::of_model(model.header.shape.config())?;
    adapter.deltas(architecture).map_err(|error| error.in_folder(folder))
}

fn wrong(field: &str, expected: &str, found: &str) -> Error {
    Error::Adapter { field: field.escape_debug().to_string(), expected: expected.into(), found: found.into() }
}
