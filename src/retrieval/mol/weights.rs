//! Weights of a mixture of logits and their file format.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::error::Error;
use crate::formats::arriving::{Arriving, Sink};
use crate::formats::block::dequantize;
use crate::formats::{BlockType, Safetensors, TensorInfo, UNKNOWN_LEN};
use crate::kernels::{Combination, MolActivation, MolForm, Pairing};

/// Gated activation of the hidden layer before components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glu {
    /// `gelu(x W + b) * (x V + c)`, with the exact (erf) GELU.
    GeGlu,
    /// `silu(x W + b) * (x V + c)`.
    SwiGlu,
}

/// Sizes and form of a mixture of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct MolConfig {
    /// Components, pairs and gate.
    pub form: MolForm,
    /// D: dimensions of a component.
    pub dim: u32,
    /// Dimensions of a query.
    pub query_dim: u32,
    /// Dimensions of an item.
    pub item_dim: u32,
    /// Divisor of logits.
    pub temperature: f32,
    /// Minimum norm by which a component is divided.
    pub eps: f32,
    /// Whether components are L2-normalised.
    pub l2_norm: bool,
    /// Activation of hidden layers before components.
    pub glu: Glu,
}

impl MolConfig {
    /// L2-normalises components if configured, and returns their norms afterwards.
    pub(super) fn normalise(&self, components: &mut [f32]) -> Vec<f32> {
        let scale = |row: &mut [f32]| {
            let norm = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            if !self.l2_norm {
                return norm as f32;
            }
            let by = norm.max(f64::from(self.eps));
            row.iter_mut().for_each(|x| *x = (f64::from(*x) / by) as f32);
            (norm / by) as f32
        };
        components.chunks_exact_mut(self.dim as usize).map(scale).collect()
    }
}

/// `y = x wᵀ + b`.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// `[n_out, n_in]`.
    pub w: Vec<f32>,
    pub b: Vec<f32>,
    pub n_in: u32,
    pub n_out: u32,
}

impl Layer {
    /// Slices inputs `first..first + n`, optionally with the bias.
    fn part(&self, first: u32, n: u32, with_bias: bool) -> Layer {
        let rows = self.w.chunks_exact(self.n_in as usize);
        let w = rows.flat_map(|row| &row[first as usize..(first + n) as usize]).copied().collect();
        let b = if with_bias { self.b.clone() } else { vec![0.0; self.b.len()] };
        Layer { w, b, n_in: n, n_out: self.n_out }
    }
}

/// Projects vectors to components.
#[derive(Clone, Debug)]
pub(super) struct Projection {
    /// Both halves of a gated hidden layer, the activated half first.
    pub glu: Option<Layer>,
    pub out: Layer,
}

impl Projection {
    fn n_in(&self) -> u32 {
        self.glu.as_ref().map_or(self.out.n_in, |layer| layer.n_in)
    }
}

/// The part of a gate that depends on the query or the item only.
#[derive(Clone, Debug)]
pub(super) enum PartialGate {
    None,
    Linear(Layer),
    /// SiLU between the layers.
    Perceptron(Layer, Layer),
}

/// The part of a gate that depends on logits.
#[derive(Clone, Debug, Default)]
pub(super) struct PairGate {
    pub w1: Vec<f32>,
    pub b1: Vec<f32>,
    pub w2: Vec<f32>,
    pub b2: Vec<f32>,
}

/// Weights of a mixture of logits.
///
/// Stored as a safetensors file in F32, F16 or BF16 with the names of `MoLSimilarity.state_dict()` in
/// [RAILS](https://github.com/bailuding/rails), optionally with a common prefix:
///
/// | tensor | shape | |
/// |---|---|---|
/// | `_query_embeddings_fn._query_emb_proj_module.1._w`, `._b` | `[D, 2 F]`, `[1, 2 F]` | gated hidden layer; may be absent |
/// | `_query_embeddings_fn._query_emb_proj_module.2.weight`, `.bias` | `[(N - U) d, F]` | components; `.1.` without a hidden layer |
/// | `_query_embeddings_fn._uid_embeddings_<i>.weight` | `[rows + 1, d]` | component of user `id % rows + 1`, for U such tables |
/// | `_item_embeddings_fn._item_emb_proj_module.1.weight`, `.bias` | `[M d, D']` | likewise; or `_item_proj_module` |
/// | `_gating_fn._query_only_partial_module.0`, `.2` | `[H, D]`, `[P, H]` | A; may be absent |
/// | `_gating_fn._item_only_partial_module.1`, `.3` | `[H, D']`, `[P, H]` | B; may be absent |
/// | `_gating_fn._qi_partial_module.1`, `.3` | `[H, P]`, `[P, H]` | C; `.1` alone is one layer; may be absent |
/// | `_gating_fn._pair_module.0`, `.2` | `[H, D + D']`, `[P, H]` | the gate of aligned pairs, which RAILS does not have |
///
/// Layers have a `.weight` and optionally a `.bias`. `__metadata__` has the rest:
///
/// | key | value |
/// |---|---|
/// | `mol.query_components`, `mol.item_components` | N, M |
/// | `mol.temperature` | number |
/// | `mol.combination` | `glu_silu` (if absent), `glu_silu_ln`, `none` |
/// | `mol.activation` | `geglu` (if absent), `swiglu` |
/// | `mol.pairing` | `cross` (if absent), `aligned` |
/// | `mol.gate_activation` | `silu` (if absent), `relu`; of aligned pairs' gate |
/// | `mol.l2_norm`, `mol.eps` | `true`, `1e-6` if absent |
/// | `model` | name of the encoder of queries and items, if there is one |
#[derive(Clone, Debug)]
pub struct MolWeights {
    pub(super) config: MolConfig,
    model: Option<String>,
    pub(super) query: Projection,
    pub(super) item: Projection,
    pub(super) users: Vec<Vec<f32>>,
    pub(super) query_gate: PartialGate,
    pub(super) item_gate: PartialGate,
    pub(super) pair_gate: PairGate,
}

impl MolWeights {
    /// Reads a whole file.
    ///
    /// # Errors
    /// [`Error::Format`] if the file breaks the format, or a tensor is missing or has the wrong shape;
    /// [`Error::Config`] if metadata is missing or wrong, or [`MolForm::check`] refuses the form.
    pub fn from_safetensors(file: &[u8]) -> Result<MolWeights, Error> {
        let mut filling = ArrivedFile::default();
        Arriving::read(file, &mut filling)?;
        filling.weights()
    }

    /// Sizes and form.
    pub fn config(&self) -> &MolConfig {
        &self.config
    }

    /// The encoder that computes the queries' and items' vectors, if the file names one.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }
}

/// Reads weights from a file that arrives in pieces. Keeps only the tensors' numbers in memory.
pub struct MolLoader {
    arriving: Arriving,
    filling: ArrivedFile,
}

impl MolLoader {
    /// A loader for a file of `file_len` bytes, if known.
    pub fn new(file_len: Option<u64>) -> MolLoader {
        MolLoader { arriving: Arriving::new(file_len.unwrap_or(UNKNOWN_LEN)), filling: ArrivedFile::default() }
    }

    /// Offset of the next bytes that the loader needs; `None` when complete. Offsets only grow.
    pub fn wanted(&self) -> Option<u64> {
        self.arriving.wanted()
    }

    /// Accepts bytes from the wanted offset on.
    ///
    /// # Errors
    /// As [`MolWeights::from_safetensors`]. The loader is unusable afterwards.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.arriving.push(self.wanted().unwrap_or_default(), bytes, &mut self.filling)
    }

    /// Ends the file.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Format`] if bytes are missing.
    pub fn end(&self) -> Result<(), Error> {
        self.arriving.end()
    }

    /// The weights, after all wanted bytes were pushed.
    ///
    /// # Errors
    /// As [`MolLoader::end`] and [`MolWeights::from_safetensors`].
    pub fn finish(self) -> Result<MolWeights, Error> {
        self.arriving.end()?;
        self.filling.weights()
    }
}

/// The common prefix of all names is the text before this in one of them.
const ANCHOR: &str = "_query_embeddings_fn.";

/// The part of the file that has arrived.
#[derive(Default)]
struct ArrivedFile(Option<WeightFile>);

struct WeightFile {
    header: Safetensors,
    prefix: String,
    /// Tensors' numbers by name; each is taken once.
    numbers: RefCell<HashMap<String, Vec<f32>>>,
}

impl ArrivedFile {
    fn weights(self) -> Result<MolWeights, Error> {
        match self.0 {
            Some(file) => file.weights(),
            None => Err(Error::Truncated { part: "its header".into(), needed_bytes: 1, found_bytes: 0 }),
        }
    }
}

impl Sink for ArrivedFile {
    fn begin(&mut self, header: Safetensors) -> Result<Vec<TensorInfo>, Error> {
        let prefix = header.tensors.iter().find_map(|tensor| tensor.name.find(ANCHOR).map(|at| &tensor.name[..at]));
        let prefix = prefix.unwrap_or_default().to_string();
        let mut wanted: Vec<TensorInfo> = header.tensors.iter().filter(|info| is_number(info)).cloned().collect();
        crate::sort::by_key(&mut wanted, |info| info.offset);
        self.0 = Some(WeightFile { header, prefix, numbers: RefCell::default() });
        Ok(wanted)
    }

    fn take(&mut self, info: &TensorInfo, _: u64, bytes: &[u8]) -> Result<usize, Error> {
        let number_bytes = info.block_type.block_bytes() as usize;
        let n = bytes.len() / number_bytes;
        if let Some(file) = &mut self.0 {
            let numbers = file.numbers.get_mut().entry(info.name.clone()).or_default();
            let known = numbers.len();
            numbers.resize(known + n, 0.0);
            dequantize(info.block_type, &bytes[..n * number_bytes], &mut numbers[known..])?;
        }
        Ok(n * number_bytes)
    }
}

fn is_number(info: &TensorInfo) -> bool {
    matches!(info.block_type, BlockType::F32 | BlockType::F16 | BlockType::BF16)
}

impl WeightFile {
    /// A metadata value parsed by `read`; `usual` if the key is absent.
    fn value<T>(
        &self,
        key: &str,
        expected: &str,
        usual: Option<T>,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<T, Error> {
        let found = self.header.text(key);
        let value = match found {
            Some(text) => read(text),
            None => usual,
        };
        value.ok_or_else(|| Error::Config {
            field: key.into(),
            expected: expected.into(),
            found: found.map_or("absent".into(), |text| format!("`{}`", text.escape_debug())),
        })
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensor(&format!("{}{name}", self.prefix))
    }

    fn missing(&self, name: &str) -> Error {
        Error::Format {
            format: "mol",
            field: format!("tensor `{}{name}`", self.prefix),
            offset: self.header.data_offset,
            expected: "one".into(),
            found: "absent".into(),
        }
    }

    fn refuse(&self, info: &TensorInfo, expected: String) -> Error {
        Error::Format {
            format: "mol",
            field: format!("shape of tensor `{}`", info.name),
            offset: info.offset,
            expected,
            found: format!("{:?}", info.shape),
        }
    }

    /// A tensor's numbers. Refuses non-finite ones.
    fn numbers(&self, info: &TensorInfo) -> Result<Vec<f32>, Error> {
        let error = |expected: &str, found: String| Error::Format {
            format: "mol",
            field: format!("tensor `{}`", info.name),
            offset: info.offset,
            expected: expected.into(),
            found,
        };
        if !is_number(info) {
            return Err(error("F32, F16 or BF16", info.block_type.to_string()));
        }
        let numbers = self.numbers.borrow_mut().remove(&info.name).unwrap_or_default();
        match numbers.iter().position(|x| !x.is_finite()) {
            Some(at) => Err(error("finite numbers", format!("{} at {at}", numbers[at]))),
            None => Ok(numbers),
        }
    }

    /// The dimensions of a matrix, each 1 to 2^24.
    fn dims(&self, info: &TensorInfo) -> Result<[u32; 2], Error> {
        match info.shape[..] {
            [rows, cols] if (1..=1 << 24).contains(&rows) && (1..=1 << 24).contains(&cols) => {
                Ok([rows as u32, cols as u32])
            }
            _ => Err(self.refuse(info, "two dimensions from 1 to 2^24".into())),
        }
    }

    /// The layer `name`, if present.
    fn layer(&self, name: &str) -> Result<Option<Layer>, Error> {
        let Some(info) = self.info(&format!("{name}.weight")) else { return Ok(None) };
        let [n_out, n_in] = self.dims(info)?;
        let b = match self.info(&format!("{name}.bias")) {
            Some(bias) if bias.shape == [u64::from(n_out)] => self.numbers(bias)?,
            Some(bias) => return Err(self.refuse(bias, format!("[{n_out}]"))),
            None => vec![0.0; n_out as usize],
        };
        Ok(Some(Layer { w: self.numbers(info)?, b, n_in, n_out }))
    }

    /// Checks a layer's outputs and, if given, its inputs.
    fn expect(&self, name: &str, layer: &Layer, n_out: u32, n_in: Option<u32>) -> Result<(), Error> {
        if layer.n_out == n_out && n_in.is_none_or(|n_in| layer.n_in == n_in) {
            return Ok(());
        }
        let n_in = n_in.unwrap_or(layer.n_in);
        Err(match self.info(&format!("{name}.weight")) {
            Some(info) => self.refuse(info, format!("[{n_out}, {n_in}]")),
            None => self.missing(name),
        })
    }

    fn projection(&self, name: &str) -> Result<Option<Projection>, Error> {
        let Some(info) = self.info(&format!("{name}.1._w")) else {
            return Ok(self.layer(&format!("{name}.1"))?.map(|out| Projection { glu: None, out }));
        };
        let [n_in, twice] = self.dims(info)?;
        if twice % 2 != 0 {
            return Err(self.refuse(info, "an even number of columns".into()));
        }
        let b_name = format!("{name}.1._b");
        let bias = self.info(&b_name).ok_or_else(|| self.missing(&b_name))?;
        if bias.n_elements() != u64::from(twice) {
            return Err(self.refuse(bias, format!("[1, {twice}]")));
        }
        // The file stores the transpose.
        let (stored, width) = (self.numbers(info)?, twice as usize);
        let w = (0..width).flat_map(|out| stored.iter().skip(out).step_by(width)).copied().collect();
        let glu = Layer { w, b: self.numbers(bias)?, n_in, n_out: twice };
        let out_name = format!("{name}.2");
        let out = self.layer(&out_name)?.ok_or_else(|| self.missing(&format!("{out_name}.weight")))?;
        self.expect(&out_name, &out, out.n_out, Some(twice / 2))?;
        Ok(Some(Projection { glu: Some(glu), out }))
    }

    /// Two layers, numbered `first` and `first + 2`.
    fn perceptron(&self, name: &str, first: u32, [n_in, n_out]: [u32; 2]) -> Result<PartialGate, Error> {
        let (one, two) = (format!("{name}.{first}"), format!("{name}.{}", first + 2));
        let Some(layer) = self.layer(&one)? else { return Ok(PartialGate::None) };
        let Some(second) = self.layer(&two)? else {
            self.expect(&one, &layer, n_out, Some(n_in))?;
            return Ok(PartialGate::Linear(layer));
        };
        self.expect(&one, &layer, layer.n_out, Some(n_in))?;
        self.expect(&two, &second, n_out, Some(layer.n_out))?;
        Ok(PartialGate::Perceptron(layer, second))
    }

    fn weights(&self) -> Result<MolWeights, Error> {
        let component = |text: &str| text.parse::<u32>().ok().filter(|n| (1..=64).contains(n));
        let query_components = self.value("mol.query_components", "1 to 64", None, component)?;
        let item_components = self.value("mol.item_components", "1 to 64", None, component)?;
        let positive = |text: &str| text.parse::<f32>().ok().filter(|x| x.is_finite() && *x > 0.0);
        let temperature = self.value("mol.temperature", "a number above 0", None, positive)?;
        let eps = self.value("mol.eps", "a number above 0", Some(1e-6), positive)?;
        let flag = |text: &str| text.parse::<bool>().ok();
        let l2_norm = self.value("mol.l2_norm", "true or false", Some(true), flag)?;
        let expected = "glu_silu, glu_silu_ln or none";
        let combination = self.value("mol.combination", expected, Some(Combination::GluSilu), |text| {
            Some(match text {
                "glu_silu" => Combination::GluSilu,
                "glu_silu_ln" => Combination::GluSiluLn,
                "none" => Combination::Sum,
                _ => return None,
            })
        })?;
        let glu = self.value("mol.activation", "geglu or swiglu", Some(Glu::GeGlu), |text| {
            Some(match text {
                "geglu" => Glu::GeGlu,
                "swiglu" => Glu::SwiGlu,
                _ => return None,
            })
        })?;
        let pairing = self.value("mol.pairing", "cross or aligned", Some(Pairing::Cross), |text| {
            Some(match text {
                "cross" => Pairing::Cross,
                "aligned" => Pairing::Aligned,
                _ => return None,
            })
        })?;
        let usual = Some(MolActivation::Silu);
        let activation = self.value("mol.gate_activation", "silu or relu", usual, |text| {
            Some(match text {
                "silu" => MolActivation::Silu,
                "relu" => MolActivation::Relu,
                _ => return None,
            })
        })?;

        let (query_name, item_name) =
            ("_query_embeddings_fn._query_emb_proj_module", "_item_embeddings_fn._item_emb_proj_module");
        let query = self.projection(query_name)?.ok_or_else(|| self.missing(&format!("{query_name}.2.weight")))?;
        let item = match self.projection(item_name)? {
            Some(item) => item,
            None => {
                self.projection("_item_proj_module")?.ok_or_else(|| self.missing(&format!("{item_name}.1.weight")))?
            }
        };
        let dim = item.out.n_out / item_components;
        let mut users = Vec::new();
        while let Some(info) = self.info(&format!("_query_embeddings_fn._uid_embeddings_{}.weight", users.len())) {
            let [rows, cols] = self.dims(info)?;
            if rows < 2 || cols != dim {
                return Err(self.refuse(info, format!("two rows or more of {dim}")));
            }
            users.push(self.numbers(info)?);
        }
        let mut form = MolForm { query_components, item_components, hidden: 0, pairing, combination, activation };
        let n_encoded = query_components.checked_sub(users.len() as u32).filter(|&n| n > 0);
        if query.out.n_out != n_encoded.unwrap_or_default() * dim
            || item.out.n_out != item_components * dim
            || !dim.is_multiple_of(4)
            || dim == 0
        {
            return Err(Error::Config {
                field: "components".into(),
                expected: format!(
                    "{query_components} of a query less {} of users, {item_components} of an item, of one size, a multiple of 4",
                    users.len()
                ),
                found: format!("{} numbers of a query and {} of an item", query.out.n_out, item.out.n_out),
            });
        }
        let (query_dim, item_dim, pairs) = (query.n_in(), item.n_in(), form.n_pairs());
        let (query_gate, item_gate, pair_gate) = match pairing {
            Pairing::Cross => {
                let name = "_gating_fn._query_only_partial_module";
                let query_gate = self.perceptron(name, 0, [query_dim, pairs])?;
                let name = "_gating_fn._item_only_partial_module";
                let item_gate = self.perceptron(name, 1, [item_dim, pairs])?;
                let pair_gate = match self.perceptron("_gating_fn._qi_partial_module", 1, [pairs, pairs])? {
                    PartialGate::None => PairGate { b2: vec![0.0; pairs as usize], ..PairGate::default() },
                    PartialGate::Linear(layer) => {
                        // Represented as an identity hidden layer.
                        form.hidden = pairs;
                        form.activation = MolActivation::Identity;
                        let n = pairs as usize;
                        let w2 = (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect();
                        PairGate { w1: layer.w, b1: layer.b, w2, b2: vec![0.0; n] }
                    }
                    PartialGate::Perceptron(first, second) => {
                        form.hidden = first.n_out;
                        form.activation = MolActivation::Silu;
                        PairGate { w1: first.w, b1: first.b, w2: second.w, b2: second.b }
                    }
                };
                let has_none = |gate: &PartialGate| matches!(gate, PartialGate::None);
                let is_product = combination != Combination::Sum;
                if is_product && (has_none(&query_gate) || has_none(&item_gate) || form.hidden == 0) {
                    return Err(Error::Config {
                        field: "mol.combination".into(),
                        expected: "`none`, because a part of the gate is absent".into(),
                        found: format!("{combination:?}"),
                    });
                }
                (query_gate, item_gate, pair_gate)
            }
            Pairing::Aligned => {
                let name = "_gating_fn._pair_module";
                let gate = self.perceptron(name, 0, [query_dim.saturating_add(item_dim), pairs])?;
                let PartialGate::Perceptron(first, second) = gate else {
                    return Err(self.missing(&format!("{name}.2.weight")));
                };
                form.hidden = first.n_out;
                let of_query = first.part(0, query_dim, true);
                let of_item = first.part(query_dim, item_dim, false);
                let pair_gate = PairGate { w2: second.w, b2: second.b, ..PairGate::default() };
                (PartialGate::Linear(of_query), PartialGate::Linear(of_item), pair_gate)
            }
        };
        form.check().map_err(|error| Error::Config {
            field: "mol.query_components and mol.item_components".into(),
            expected: "a form that the kernel supports".into(),
            found: error.to_string(),
        })?;
        let config = MolConfig { form, dim, query_dim, item_dim, temperature, eps, l2_norm, glu };
        let model = self.header.text("model").map(str::to_string);
        Ok(MolWeights { config, model, query, item, users, query_gate, item_gate, pair_gate })
    }
}
