//! Mixture of experts: weights and forward pass.

mod cached;

pub(crate) use cached::{CachedExperts, ExpertPart};

use super::block::{Between, Experts, FeedForward, SharedExpert};
use super::config::ModelConfig;
use super::forward::{Flow, Transformer};
use super::stack::{Joined, RowPlaces, Stack, TensorSlot, WeightSource, describe, table};
use super::weights::{HalfNorms, NormWeights};
use crate::dtype::WeightType;
use crate::error::Error;
use crate::kernels::{
    ExpertDown, ExpertGateUp, ExpertProduct, ExpertRows, ExpertTiles, Gate, Norm, SharedExperts, add, expert_sum,
    fold_norm, gated, gelu, relu, route, suits_few,
};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::Tensor;

/// A layer's experts and router. A shared expert is split into experts of the routed width, numbered after them: see
/// [`SharedExperts`].
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `[E, C]`, plus a row for the shared expert's gate.
    pub logits: Stack,
    /// Routing biases, `[E]`.
    pub(super) choice_bias: Option<Tensor>,
    /// What experts beside a dense feed-forward have.
    pub(super) beside: Option<BesideWeights>,
    shared: SharedExperts,
    matrices: Matrices,
    up_bias: Option<Joined>,
    down_bias: Option<Joined>,
    /// Bias of the sum of a token's experts, `[C]`: Nomic.
    pub(super) sum_bias: Option<Tensor>,
    /// Expert cache for passes over a few tokens.
    kept: Option<CachedExperts>,
}

/// Vectors of experts beside a dense feed-forward. Both read the residual stream, each with a norm of its own, and their
/// outputs are normalised before they are added: Gemma 4.
#[derive(Clone, Debug)]
pub(super) struct BesideWeights {
    /// Norm of the router's input, `[C]`.
    router_norm: Tensor,
    /// Factors of the experts, `[E]`.
    factors: Tensor,
    /// Norm of the experts' input.
    before: NormWeights,
    /// Norm of the experts' output.
    after: NormWeights,
    /// Norm of the dense feed-forward's output.
    dense_after: NormWeights,
}

impl BesideWeights {
    fn declare(
        source: &dyn WeightSource,
        prefix: &str,
        config: &ModelConfig,
        n_experts: u32,
    ) -> Result<BesideWeights, Error> {
        let norm = |name: &str| NormWeights::declare(source, &format!("{prefix}{name}"), config);
        Ok(BesideWeights {
            router_norm: table(source, &format!("{prefix}ffn_gate_inp_scale.weight"), &[config.dim])?,
            factors: table(source, &format!("{prefix}ffn_down_exps_scale.weight"), &[n_experts])?,
            before: norm("pre_ffw_norm_2")?,
            after: norm("post_ffw_norm_2")?,
            dense_after: norm("post_ffw_norm_1")?,
        })
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norms = [&self.before, &self.after, &self.dense_after].into_iter().flat_map(NormWeights::tensors);
        [&self.router_norm, &self.factors].into_iter().chain(norms)
    }
}

/// Matrices of all experts.
#[derive(Clone, Debug)]
struct Matrices {
    up: Vec<UpPart>,
    down: Vec<ExpertMatrix>,
}

/// Matrices of consecutive experts with one weight type.
#[derive(Clone, Debug)]
pub(crate) struct ExpertMatrix {
    pub first_expert: u32,
    /// Rows of an expert.
    pub rows: u32,
    pub matrix: Matrix,
    /// Source tensors and the positions of their rows.
    pub members: Vec<(String, RowPlaces)>,
}

/// Gates, ups or both of consecutive experts.
#[derive(Clone, Debug)]
struct UpPart {
    rows: ExpertRows,
    part: ExpertMatrix,
}

/// Tensors with the matrices of consecutive experts.
#[derive(Clone, Debug)]
struct Tensors {
    /// Number of experts.
    n: u32,
    /// Rows of gates and ups per expert together, and in total.
    run: u32,
    rows: u32,
    up: UpTensors,
    down: String,
    /// Rows and columns of `down`, whose columns may be those of several experts.
    down_shape: [u32; 2],
}

#[derive(Clone, Debug)]
enum UpTensors {
    /// Gates, then ups, per expert.
    Joint(String),
    /// Gates and ups.
    Apart(String, String),
    /// Ups alone.
    Plain(String),
}

impl ExpertWeights {
    /// Declares a layer's experts, of widths C and F, from tensors with this prefix.
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        config: &ModelConfig,
        (experts, feed_forward): (&Experts, &FeedForward),
    ) -> Result<ExpertWeights, Error> {
        let (dim, ffn_dim) = (config.dim, feed_forward.dim);
        let is_gated = feed_forward.is_gated();
        let mut tensors = routed(source, prefix, experts.n, [dim, ffn_dim], is_gated);
        let mut shared = SharedExperts::default();
        let mut logits = vec![("ffn_gate_inp", experts.n)];
        if let Some(of) = &experts.shared {
            let beside = cut(prefix, of, [dim, ffn_dim], is_gated);
            shared = SharedExperts { n: beside.n, gated: of.gated };
            tensors.push(beside);
            if of.gated {
                logits.push(("ffn_gate_inp_shexp", 1));
            }
        }
        let matrices = Matrices::declare(target, source, &tensors, [dim, ffn_dim])?;
        let of_all = |names: Vec<(String, RowPlaces, u32)>, len| {
            let named = names.iter().map(|(name, places, n)| (format!("{prefix}{name}.bias"), *places, *n)).collect();
            let is_there = names.iter().any(|(name, ..)| source.describe(&format!("{prefix}{name}.bias")).is_some());
            match (is_there, shared.n) {
                (false, _) => Ok(None),
                (true, 0) => Joined::declare_at(source, named, len).map(Some),
                (true, _) => Err(unsupported("biases of experts beside a shared expert")),
            }
        };
        let n_rows = experts.n * ffn_dim;
        let up_bias = match source.describe(&format!("{prefix}ffn_gate_up_exps.weight")) {
            Some(_) => vec![("ffn_gate_up_exps".to_owned(), RowPlaces::from(0), 2 * n_rows)],
            None => {
                let places = |first| RowPlaces::runs(first, ffn_dim, 2 * ffn_dim, ffn_dim);
                vec![
                    ("ffn_gate_exps".to_owned(), places(0), n_rows),
                    ("ffn_up_exps".to_owned(), places(ffn_dim), n_rows),
                ]
            }
        };
        let down_bias = vec![("ffn_down_exps".to_owned(), RowPlaces::from(0), experts.n * dim)];
        Ok(ExpertWeights {
            // Rounded scores would choose other experts.
            logits: Stack::declare(target, source, prefix, &logits, dim)?.in_full_precision(),
            choice_bias: match experts.choice_bias {
                true => Some(table(source, &format!("{prefix}exp_probs_b.bias"), &[experts.n])?),
                false => None,
            },
            beside: match experts.dense {
                Some(_) => Some(BesideWeights::declare(source, prefix, config, experts.n)?),
                None => None,
            },
            shared,
            matrices,
            up_bias: of_all(up_bias, 2 * n_rows)?,
            down_bias: of_all(down_bias, experts.n * dim)?,
            sum_bias: match source.describe(&format!("{prefix}ffn_exps.bias")) {
                Some(_) => Some(table(source, &format!("{prefix}ffn_exps.bias"), &[dim])?),
                None => None,
            },
            kept: None,
        })
    }

    /// Matrices of gates and ups, and of downs.
    pub(crate) fn matrices(&self) -> [impl Iterator<Item = &Matrix>; 2] {
        let Matrices { up, down } = &self.matrices;
        let (up, down): (Vec<_>, Vec<_>) =
            (up.iter().map(|up| &up.part.matrix).collect(), down.iter().map(|part| &part.matrix).collect());
        [up.into_iter(), down.into_iter()]
    }

    /// Matrices of gates and ups, and of downs, with their experts and source tensors.
    pub(crate) fn expert_parts(&self) -> impl Iterator<Item = &ExpertMatrix> {
        self.matrices.parts()
    }

    fn biases(&self) -> [Option<&Tensor>; 2] {
        [&self.up_bias, &self.down_bias].map(|bias| bias.as_ref().map(Joined::tensor))
    }

    /// All tensors except the router's.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let matrices = self.matrices.parts().flat_map(|part| part.matrix.tensors());
        matrices.chain(self.biases().into_iter().flatten())
    }

    /// Destinations of all tensors but the router's.
    pub(super) fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let rows = self.matrices.parts().flat_map(ExpertMatrix::tensor_slots);
        rows.chain(self.up_bias.iter().chain(&self.down_bias).flat_map(Joined::tensor_slots))
    }
}

impl Matrices {
    /// Declares the matrices of the experts in these tensors, of widths C and F.
    fn declare(
        target: &Target,
        source: &dyn WeightSource,
        tensors: &[Tensors],
        dims: [u32; 2],
    ) -> Result<Matrices, Error> {
        let up = up_parts(target, source, tensors, dims)?;
        Ok(Matrices { up, down: down_parts(target, source, tensors, dims)? })
    }

    fn parts(&self) -> impl Iterator<Item = &ExpertMatrix> {
        self.up.iter().map(|up| &up.part).chain(&self.down)
    }
}

/// Tensors of `n` experts of widths C and F; files store them together or one per expert.
fn routed(source: &dyn WeightSource, prefix: &str, n: u32, [dim, ffn_dim]: [u32; 2], is_gated: bool) -> Vec<Tensors> {
    let is_there = |name: &str| source.describe(&format!("{prefix}{name}.weight")).is_some();
    let name = |stem: &str, suffix: &str| format!("{prefix}{stem}{suffix}.weight");
    let tensors = |n: u32, suffix: &str| Tensors {
        n,
        run: ffn_dim,
        rows: n * ffn_dim,
        up: match is_there(&format!("ffn_gate_up_exps{suffix}")) {
            true => UpTensors::Joint(name("ffn_gate_up_exps", suffix)),
            false if !is_gated => UpTensors::Plain(name("ffn_up_exps", suffix)),
            false => UpTensors::Apart(name("ffn_gate_exps", suffix), name("ffn_up_exps", suffix)),
        },
        down: name("ffn_down_exps", suffix),
        down_shape: [n * dim, ffn_dim],
    };
    match is_there("ffn_down_exps.0") {
        true => (0..n).map(|e| tensors(1, &format!(".{e}"))).collect(),
        false => vec![tensors(n, "")],
    }
}

/// The shared expert as experts of width F, zero-padded to a whole number.
fn cut(prefix: &str, of: &SharedExpert, [dim, ffn_dim]: [u32; 2], is_gated: bool) -> Tensors {
    /// Columns that no quantised block crosses.
    const WHOLE: u32 = 256;
    let run = match ffn_dim {
        _ if of.dim <= ffn_dim => of.dim,
        WHOLE.. => ffn_dim / WHOLE * WHOLE,
        _ => ffn_dim,
    };
    let name = |stem: &str| format!("{prefix}{stem}.weight");
    Tensors {
        n: of.dim.div_ceil(run.max(1)),
        run,
        rows: of.dim,
        up: match is_gated {
            true => UpTensors::Apart(name("ffn_gate_shexp"), name("ffn_up_shexp")),
            false => UpTensors::Plain(name("ffn_up_shexp")),
        },
        down: name("ffn_down_shexp"),
        down_shape: [dim, of.dim],
    }
}

impl Tensors {
    /// Tensors of gates, ups or both, from row `first`, with `of_each` rows per expert.
    fn up_members(&self, rows: ExpertRows, first: u32, [of_each, ffn_dim]: [u32; 2]) -> Vec<(String, RowPlaces)> {
        let places = |first| RowPlaces::runs(first, self.run, of_each, ffn_dim);
        match (&self.up, rows) {
            (UpTensors::Joint(name), _) => vec![(name.clone(), RowPlaces::from(first))],
            (UpTensors::Plain(up), _) => vec![(up.clone(), places(first))],
            (UpTensors::Apart(gate, up), ExpertRows::Both) => {
                vec![(gate.clone(), places(first)), (up.clone(), places(first + ffn_dim))]
            }
            (UpTensors::Apart(gate, _), ExpertRows::Gates) => vec![(gate.clone(), places(first))],
            (UpTensors::Apart(_, up), ExpertRows::Ups) => vec![(up.clone(), places(first))],
        }
    }

    /// Tensor of downs, from row `first`.
    fn down_member(&self, first: u32, ffn_dim: u32) -> (String, RowPlaces) {
        let [rows, cols] = self.down_shape;
        let is_cut = cols != ffn_dim;
        let places = if is_cut { RowPlaces::slices(first, rows, self.run) } else { RowPlaces::from(first) };
        (self.down.clone(), places)
    }
}

/// Consecutive tensors with equal keys: their first expert, the key and the tensors.
type TensorGroup<'a, K> = (u32, K, Vec<&'a Tensors>);

/// Groups consecutive tensors by the key that `of` returns.
fn alike<K: PartialEq>(
    tensors: &[Tensors],
    of: impl Fn(&Tensors) -> Result<K, Error>,
) -> Result<Vec<TensorGroup<'_, K>>, Error> {
    let mut groups: Vec<TensorGroup<'_, K>> = Vec::new();
    let mut first = 0;
    for tensors in tensors {
        let kind = of(tensors)?;
        match groups.last_mut() {
            Some((_, of_group, members)) if *of_group == kind => members.push(tensors),
            _ => groups.push((first, kind, vec![tensors])),
        }
        first += tensors.n;
    }
    Ok(groups)
}

/// Declares gates and ups: one matrix per run of equal types, or two where gates and ups differ in type.
fn up_parts(
    target: &Target,
    source: &dyn WeightSource,
    tensors: &[Tensors],
    [dim, ffn_dim]: [u32; 2],
) -> Result<Vec<UpPart>, Error> {
    let types = |tensors: &Tensors| match &tensors.up {
        UpTensors::Joint(name) => {
            let weight = describe(source, name, &[2 * tensors.rows, dim])?.weight;
            Ok((Some(weight), weight))
        }
        UpTensors::Plain(up) => {
            let weight = describe(source, up, &[tensors.rows, dim])?.weight;
            Ok((None, weight))
        }
        UpTensors::Apart(gate, up) => {
            let weight = |name: &str| Ok::<_, Error>(describe(source, name, &[tensors.rows, dim])?.weight);
            Ok((Some(weight(gate)?), weight(up)?))
        }
    };
    let mut parts = Vec::new();
    for (first_expert, (gate, up), group) in alike(tensors, types)? {
        let kinds = match gate {
            // Without gates, ups are the rows that come first.
            None => vec![(ExpertRows::Gates, up)],
            Some(gate) if gate == up => vec![(ExpertRows::Both, gate)],
            Some(gate) => vec![(ExpertRows::Gates, gate), (ExpertRows::Ups, up)],
        };
        for (rows, weight) in kinds {
            let of_each = if rows == ExpertRows::Both { 2 * ffn_dim } else { ffn_dim };
            let mut members = Vec::new();
            let mut n = 0;
            for tensors in &group {
                members.extend(tensors.up_members(rows, n * of_each, [of_each, ffn_dim]));
                n += tensors.n;
            }
            let part = ExpertMatrix::declare(target, first_expert, (weight, members), n, [of_each, dim])?;
            parts.push(UpPart { rows, part });
        }
    }
    Ok(parts)
}

/// Declares downs: one matrix per run of equal types.
fn down_parts(
    target: &Target,
    source: &dyn WeightSource,
    tensors: &[Tensors],
    [dim, ffn_dim]: [u32; 2],
) -> Result<Vec<ExpertMatrix>, Error> {
    let weight = |tensors: &Tensors| Ok(describe(source, &tensors.down, &tensors.down_shape)?.weight);
    let part = |(first_expert, weight, group): TensorGroup<'_, WeightType>| {
        let mut n = 0;
        let mut members = Vec::new();
        for tensors in group {
            members.push(tensors.down_member(n * dim, ffn_dim));
            n += tensors.n;
        }
        ExpertMatrix::declare(target, first_expert, (weight, members), n, [dim, ffn_dim])
    };
    alike(tensors, weight)?.into_iter().map(part).collect()
}

impl ExpertMatrix {
    /// Declares the matrix of `n` experts with these rows and columns each.
    fn declare(
        target: &Target,
        first_expert: u32,
        (weight, members): (WeightType, Vec<(String, RowPlaces)>),
        n: u32,
        [rows, cols]: [u32; 2],
    ) -> Result<ExpertMatrix, Error> {
        let label = members.first().map_or("", |(name, _)| name);
        let matrix = Matrix::declare_whole(target, label, weight, n * rows, cols, rows)?;
        Ok(ExpertMatrix { first_expert, rows, matrix, members })
    }

    fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let to = |places: &RowPlaces| TensorSlot::Rows { matrix: self.matrix.clone(), places: *places };
        self.members.iter().map(move |(name, places)| (name.as_str(), to(places)))
    }
}

/// Norms that a mixture applies to its input.
#[derive(Clone, Copy)]
struct InputNorms<'a> {
    experts: Option<&'a NormWeights>,
    /// That of the router, if it differs.
    router: Option<&'a Tensor>,
}

impl Transformer {
    /// Records a feed-forward with experts, with the norms of its input and output: `[T, C]` to `[T, C]`.
    pub(super) fn record_experts(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        weights: &ExpertWeights,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let block = &self.config.blocks[l];
        let (HalfNorms { before, after }, factor) = (&self.weights.blocks[l].ffn_norms, self.output_scale(l));
        let (before, after) = (before.as_ref(), after.as_ref());
        if let Some(beside) = &weights.beside {
            let result = rec.temporary("result", h.shape())?;
            let both = rec.temporary("both", h.shape())?;
            let activated = self.record_activated(rec, flow, l, &h)?; // of [T, F]
            self.weights.blocks[l].ffn_down.record_input(rec, &mut activated.input(), &result, false)?; // [T, C]
            self.record_norm(rec, Some(&beside.dense_after), &result, &both)?;
            let norms = InputNorms { experts: Some(&beside.before), router: Some(&beside.router_norm) };
            self.record_mixture(rec, l, weights, norms, &h, (&result, false))?; // [T, C]
            self.add_normed(rec, &beside.after, None, &result, &both)?;
            let after = after.ok_or_else(|| unsupported("beside a dense half without a norm of the sum"))?;
            return self.add_normed(rec, after, factor, &both, &h).map(|()| h);
        }
        let norms = InputNorms { experts: before, router: None };
        match after.filter(|_| block.ffn_norm.is_on_result()) {
            Some(norm) => {
                let result = rec.temporary("result", h.shape())?;
                self.record_mixture(rec, l, weights, norms, &h, (&result, false))?; // [T, C]
                self.add_normed(rec, norm, factor, &result, &h).map(|()| h)
            }
            None => {
                self.record_mixture(rec, l, weights, norms, &h, (&h, true))?; // [T, C]
                self.normed(rec, after, &h)
            }
        }
    }

    /// Records the experts of `h` into a result, `[T, C]` each, or adds them to it.
    fn record_mixture(
        &self,
        rec: &mut Recorder,
        l: usize,
        weights: &ExpertWeights,
        norms: InputNorms<'_>,
        h: &Tensor,
        (result, accumulate): (&Tensor, bool),
    ) -> Result<(), Error> {
        let feed_forward = &self.config.blocks[l].feed_forward;
        let Some(experts) = &feed_forward.experts else { return Err(unsupported("weights without experts")) };
        let gate = match feed_forward.between {
            Between::Gate(gate) => Some(gate),
            Between::Relu | Between::SquaredRelu | Between::Gelu(_) => None,
        };
        let activate = |rec: &mut Recorder, up: &Tensor, activated: &Tensor| match feed_forward.between {
            Between::Gate(gate) => gated(rec, gate, up, activated),
            Between::Relu => relu(rec, up, activated, false),
            Between::SquaredRelu => relu(rec, up, activated, true),
            Between::Gelu(form) => gelu(rec, up, activated, form),
        };
        let (ffn_dim, n_tokens) = (feed_forward.dim, h.shape()[0]);
        let (matrices, [up_bias, down_bias]) = (&weights.matrices, weights.biases());
        // A few tokens may find all their experts in the cache.
        let kept = weights.kept.as_ref().filter(|kept| kept.suffices(n_tokens));
        let (matrices, [up_bias, down_bias]) = match kept {
            Some(kept) => (kept.matrices(), kept.biases()),
            None => (matrices, [up_bias, down_bias]),
        };

        let (x, norm) = self.before(rec, norms.experts, h)?;
        let (x, norm) = fold_norm(rec, &x, norm, up_bias.is_some() || weights.logits.bias().is_some())?; // [T, C]
        let logits = rec.temporary("router", &[n_tokens, experts.n + u32::from(weights.shared.gated)])?;
        match norms.router {
            None => weights.logits.record(rec, norm, &x, &logits, false)?, // [T, E]
            Some(weight) => {
                let norm = Some(Norm { weight, eps: self.eps() });
                let (x, norm) = fold_norm(rec, h, norm, weights.logits.bias().is_some())?; // [T, C]
                weights.logits.record(rec, norm, &x, &logits, false)?; // [T, E]
            }
        }
        let n_used = experts.n_used + weights.shared.n;
        let routes = rec.temporary_words("routes", &[n_tokens, n_used, 2])?;
        let vectors = [weights.choice_bias.as_ref(), weights.beside.as_ref().map(|beside| &beside.factors)];
        route(rec, &experts.router, weights.shared, &logits, vectors, &routes)?; // [T, K]
        if kept.is_some() {
            rec.end_choice(l as u32, &routes);
        }

        let (n_slots, n_experts) = (n_tokens * n_used, experts.n + weights.shared.n);
        let activated = rec.temporary("activated", &[n_slots, ffn_dim])?;
        if !suits_few(rec, &x) && ExpertTiles::suit(rec, n_slots, n_experts) {
            let tiles = ExpertTiles::record(rec, &routes, n_experts)?;
            let n_kinds = if gate.is_some() { 2 } else { 1 };
            let up = rec.temporary("up", &[n_slots, n_kinds * ffn_dim])?;
            for UpPart { rows: kind, part } in &matrices.up {
                let &ExpertMatrix { first_expert, rows, matrix: ref w, .. } = part;
                let y_start = if *kind == ExpertRows::Ups { ffn_dim } else { 0 };
                let product = ExpertProduct { w, rows, first_expert, bias: up_bias, y_start };
                product.record(rec, &tiles, &x, &up)?; // [T K, 2 F]
            }
            activate(rec, &up, &activated)?; // [T K, F]
            let each = rec.temporary("each", &[n_slots, self.config.dim])?;
            for &ExpertMatrix { first_expert, rows, matrix: ref w, .. } in &matrices.down {
                let product = ExpertProduct { w, rows, first_expert, bias: down_bias, y_start: 0 };
                product.record(rec, &tiles, &activated, &each)?; // [T K, C]
            }
            expert_sum(rec, &each, &routes, accumulate, result)?; // [T, C]
            return add_bias(rec, weights, result); // [T, C]
        }
        let up = if gate.is_some() { activated.clone() } else { rec.temporary("up", &[n_slots, ffn_dim])? };
        for UpPart { rows, part: ExpertMatrix { first_expert, matrix: w, .. } } in &matrices.up {
            let (rows, first_expert, gate) = (*rows, *first_expert, gate.unwrap_or(Gate::Silu));
            let product = ExpertGateUp { w, rows, first_expert, bias: up_bias, norm, gate };
            product.record(rec, &x, &routes, &up)?; // [T K, F]
        }
        if gate.is_none() {
            activate(rec, &up, &activated)?; // [T K, F]
        }
        for (i, ExpertMatrix { first_expert, matrix: w, .. }) in matrices.down.iter().enumerate() {
            let (first_expert, accumulate) = (*first_expert, accumulate || i > 0);
            let product = ExpertDown { w, first_expert, bias: down_bias, accumulate };
            product.record(rec, &activated, &routes, result)?; // [T, C]
        }
        add_bias(rec, weights, result) // [T, C]
    }
}

/// Adds the bias of the sum of experts.
fn add_bias(rec: &mut Recorder, weights: &ExpertWeights, result: &Tensor) -> Result<(), Error> {
    weights.sum_bias.as_ref().map_or(Ok(()), |bias| add(rec, bias, result))
}

fn unsupported(found: &str) -> Error {
    Error::Unsupported {
        format: "model",
        field: "experts".into(),
        found: found.into(),
        supported: "gated ones, without biases beside a shared expert".into(),
    }
}
