//! The self-test: each pipeline that was recorded for a model, on small operands, compared with the CPU's. Drivers
//! miscompile shaders, some of them only with certain values of the overrides; a variant that computes wrongly is banned,
//! and another takes its place before a result is given out.

use super::compare;
use super::operands::{input, keys, latent_keys, matrix, uniform};
use crate::cpu::cached::{read_row, write_row};
use crate::device::Device;
use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::kernels::{
    Activation, AttentionConfig, BatchRow, CachedKeys, Combination, Decay, DeltaRule, Embedding, ExpertDown,
    ExpertGateUp, ExpertProduct, ExpertRows, ExpertScore, ExpertTiles, Gate, Gates, Gelu, HeadColumns, HeadMatrices,
    Heads, Input, KvType, LatentKey, LayerNorm, Linear, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands,
    MolScores, N_STATES, Norm, PAGE, PackedTiles, Pairing, Pooling, QkNorm, RopeConfig, RopeStyle, Router, Sampling,
    SelectiveScan, SharedExperts, ShortConv, StepState, TopStrip, add, advance, argmax, attention, attention_next,
    attention_packed, clip, embed, embed_sum, expert_sum, gate_up, gated, geglu, gelu, grid_conv, last_row, layer_norm,
    linear_norm, mask_logits, matmul, matmul_plain, matvec, max_sim, merge_top, mol, penalize, pool, relu, rms_norm,
    rope, rope_kv, rope_packed, rope_table, route, sample, scale, select_top, sigmoid_gate, silu, softmax, split_sum,
    up_gated,
};
#[cfg(feature = "lora")]
use crate::kernels::{LowRank, add_lora, gate_up_lora, matvec_lora, up_gated_lora};
use crate::platform::{IS_BROWSER, MaybeSend, while_computing};
use crate::recording::{PipelineKey, Recorder, Recording, Step, Workspace};
use crate::shaders::{self, Kernel, Tier, Variant};
use crate::target::{Choice, TileForm, Tuning};
use crate::tensor::Tensor;

/// What `record` records, once the self-test has nothing against its pipelines; `of` gives the recording.
///
/// # Errors
/// As [`self_test`]; errors of `record`.
pub(crate) async fn record_tested<T>(
    device: &Device,
    mut record: impl FnMut() -> Result<T, Error>,
    of: impl Fn(&T) -> &Recording,
) -> Result<T, Error> {
    loop {
        let recorded = record()?;
        if self_test(device, of(&recorded)).await? {
            return Ok(recorded);
        }
    }
}

/// Does a loader's work while another thread tests what was recorded, so that the first result need not wait for it. In a
/// browser there is no such thread: there the first result waits.
///
/// # Errors
/// Those of `work`, then those of `test`.
pub(crate) fn while_testing(
    test: impl Future<Output = Result<(), Error>> + MaybeSend,
    work: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    while_computing(test, work)
}

/// Tests the pipelines of a recording that have not been tested on this driver. If one computes wrongly its variant is
/// banned and this is `false`: recorded again, the same kernels take another.
///
/// # Errors
/// [`Error::Gpu`] if a variant of the baseline computes wrongly, because nothing could take its place; errors of
/// [`Device::run`].
pub(crate) async fn self_test(device: &Device, recording: &Recording) -> Result<bool, Error> {
    if !device.is_gpu() || recording.tested.get().is_some() {
        return Ok(true);
    }
    let tested = device.tested();
    let (mut is_any, mut is_right) = (false, true);
    for step in recording.steps.iter() {
        let pipeline = step.pipeline();
        if tested.has_passed(&pipeline) {
            continue;
        }
        // It was recorded before the variant was banned.
        if tested.is_banned(pipeline.label) {
            is_right = false;
            break;
        }
        is_any = true;
        is_right = test(device, step, pipeline).await?;
        if !is_right {
            break;
        }
    }
    if is_any {
        device.free_unused();
        if !IS_BROWSER && let Err(error) = super::write(device, None) {
            tested.note(format!("the self-test's outcome was not saved: {error}"));
        }
    }
    if is_right {
        // Another thread may have been first.
        let _ = recording.tested.set(());
    }
    Ok(is_right)
}

/// Tests the pipeline of a step; `false` if its variant is banned from now on.
async fn test(device: &Device, step: &Step, pipeline: PipelineKey) -> Result<bool, Error> {
    let tested = device.tested();
    let Some(check) = Check::new(device, step)? else {
        tested.leave_untested(pipeline);
        return Ok(true);
    };
    let suspects = check.recording.steps.iter().filter(|step| !tested.has_passed(&step.pipeline()));
    let suspects: Vec<&Step> = suspects.collect();
    let Err(found) = check.outcome(device).await? else {
        tested.pass(suspects.iter().map(|step| step.pipeline()));
        return Ok(true);
    };
    let variants = suspects.iter().map(|step| step.variant).filter(|variant| variant.tier != Tier::Baseline);
    let labels: Vec<&'static str> = variants.map(|variant| variant.label).collect();
    if labels.is_empty() {
        return Err(Error::Gpu {
            context: format!("the self-test of `{pipeline}`"),
            message: format!("{found}; nothing could take its place"),
        });
    }
    labels.iter().for_each(|label| tested.ban(label, &found));
    Ok(false)
}

type Record = fn(&mut Recorder, &CheckInputs<'_>) -> Result<Vec<Tensor>, Error>;

/// What decides which pipeline a kernel becomes.
struct CheckInputs<'a> {
    /// Where it runs, with the tensors.
    device: &'a Device,
    weight: WeightType,
    constants: &'a [(&'static str, f64)],
}

impl CheckInputs<'_> {
    fn get(&self, name: &str) -> Option<u32> {
        self.constants.iter().find(|(known, _)| *known == name).map(|&(_, value)| value as u32)
    }

    /// What keys and values are cached as.
    fn kind(&self) -> KvType {
        KvType::of(Some(self.weight)).unwrap_or_default()
    }

    fn is(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value != 0)
    }

    /// Rows and columns of a product's tile.
    fn tile(&self) -> Option<[u32; 2]> {
        let of_lanes = |tile| {
            let width = self.get("WIDTH").unwrap_or(16);
            [tile * 16 / width, tile * width / 16]
        };
        self.get("TILE").map(of_lanes).or_else(|| Some([self.get("ROWS")?, self.get("COLS")?]))
    }

    /// Tokens of a product with vectors: one column is left over where there are more than two. Invocations that stand alone
    /// have one column for any number of tokens.
    fn few(&self) -> u32 {
        match self.get("COLUMNS") {
            Some(columns) => {
                if columns > 2 {
                    columns - 1
                } else {
                    columns
                }
            }
            None if self.get("LANES").is_some() => 1,
            None => 2,
        }
    }

    /// Columns of a matrix whose product is with vectors: a quad less where blocks go past the row's end.
    fn dim(&self) -> u32 {
        if self.is("RAGGED") { DIM - 4 } else { DIM }
    }

    /// Slots of a cache, in whole pages where it has pages: one more than are needed.
    fn slots(&self, n: u32) -> u32 {
        if self.is("PAGE_TABLE") { (n.div_ceil(PAGE) + 1) * PAGE } else { n }
    }

    /// The state of a pass over tokens of a sequence, whose pages, if it has any, are the last ones first.
    fn state(&self, pos: u32, n_tokens: u32, slots: u32) -> Result<StepState, Error> {
        if !self.is("PAGE_TABLE") {
            return state(self.device, pos, n_tokens);
        }
        let shared = self.shared_state(None, slots)?;
        let pages = (0..slots / PAGE).rev().collect();
        shared.set_rows(self.device, &[self.row(BatchRow { pos, n_tokens, pages, ..BatchRow::default() })])?;
        Ok(shared)
    }

    /// A state of sequences with pages, in one table or two.
    fn shared_state(&self, n_rows: Option<u32>, slots: u32) -> Result<StepState, Error> {
        let table = self.get("PAGE_TABLE").unwrap_or(1);
        let shared = StepState::declare_shared(n_rows, slots / PAGE, table > 1)?;
        Ok(if table > 2 { shared.of_window() } else { shared })
    }

    /// The row with its pages in the table that is read.
    fn row(&self, row: BatchRow) -> BatchRow {
        match self.get("PAGE_TABLE") {
            Some(3) => BatchRow { pages: Vec::new(), window_pages: row.pages, ..row },
            _ => row,
        }
    }

    /// Attention of such heads, which are larger where keys hold values that would not fit.
    fn config(&self, [n_heads, n_kv_heads, head_dim]: [u32; 3]) -> AttentionConfig {
        let values_from = self.get("VALUES_FROM").filter(|&quads| quads > 0).map(|quads| 4 * quads);
        let head_dim = head_dim.max(values_from.map_or(0, |from| from + 32));
        AttentionConfig { values_from, ..config([n_heads, n_kv_heads, head_dim]) }
    }

    /// Cached keys, and values where they are apart.
    fn keys(&self, shape: [u32; 3]) -> Result<CachedKeys, Error> {
        match self.is("VALUES_FROM") {
            true => latent_keys(self.device, self.kind(), shape),
            false => keys(self.device, self.kind(), shape),
        }
    }

    fn gate(&self) -> Gate {
        match self.activation() {
            _ if self.is("CLAMPED") => Gate::Clamped,
            Some(Activation::Gelu(form)) => Gate::Gelu(form),
            _ => Gate::Silu,
        }
    }

    fn activation(&self) -> Option<Activation> {
        match (self.is("GELU"), self.is("GELU_TANH"), self.is("TANH")) {
            (true, ..) if self.is("GELU_QUICK") => Some(Activation::Gelu(Gelu::Quick)),
            (_, true, _) => Some(Activation::Gelu(Gelu::Tanh)),
            (true, ..) => Some(Activation::Gelu(Gelu::Exact)),
            (.., true) => Some(Activation::Tanh),
            _ => None,
        }
    }
}

/// Kernels on small operands, among whose pipelines is the one to be tested.
struct Check<'a> {
    record: Record,
    form: CheckInputs<'a>,
    recording: Recording,
    outputs: Vec<Tensor>,
}

impl Check<'_> {
    /// The check of a step's pipeline; `None` if there is none that would record it.
    fn new<'a>(device: &'a Device, step: &'a Step) -> Result<Option<Check<'a>>, Error> {
        let Some(&(_, record)) = CHECKS.iter().find(|(kernel, _)| kernel.name == step.kernel.name) else {
            return Ok(None);
        };
        let Variant { tier, weight, .. } = *step.variant;
        let form = CheckInputs { device, weight: weight.unwrap_or(WeightType::F32), constants: &step.constants };
        let tile = form.tile().map(|[rows, _]| rows);
        let size = form.get("LANES").or(tile).or(form.get("QUERIES")).unwrap_or(1);
        // Of the variants of the kernel this one alone.
        let others = step.kernel.variants.iter().filter(|v| v.weight == weight && v.label != step.variant.label);
        let mut banned = device.tested().banned();
        banned.extend(others.map(|variant| variant.label));
        let tile_form = match (form.get("STAGES"), form.get("SUBGROUPS")) {
            (Some(_), _) => TileForm::TwoStages,
            (_, Some(_)) => TileForm::EightSubgroups,
            _ => TileForm::Plain,
        };
        let tuning = Tuning::forcing(step.kernel, Choice { tier, size, form: tile_form });
        let mut rec = Recorder::new(device.target().with_tuning(tuning).without(banned));
        let outputs = record(&mut rec, &form)?;
        let recording = rec.finish(&mut Workspace::default());
        let has_it = recording.steps.iter().any(|recorded| recorded.pipeline() == step.pipeline());
        Ok(has_it.then_some(Check { record, form, recording, outputs }))
    }

    /// Whether the device computes what the CPU does, or what it does instead.
    async fn outcome(&self, device: &Device) -> Result<Result<(), String>, Error> {
        let cpu = Device::cpu();
        let mut rec = cpu.recorder();
        let tensors = (self.record)(&mut rec, &CheckInputs { device: &cpu, ..self.form })?;
        let want = self.outputs(&cpu, &rec.finish(&mut Workspace::default()), &tensors).await?;
        match self.outputs(device, &self.recording, &self.outputs).await {
            Ok(got) => Ok(got.iter().zip(&want).try_for_each(|(got, want)| compare(got, want))),
            Err(error @ (Error::DeviceLost { .. } | Error::OutOfMemory { .. })) => Err(error),
            // A compiler may also refuse a variant.
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    /// What the tensors hold after a run. Cached rows are numbers: their last digit may differ.
    async fn outputs(
        &self,
        device: &Device,
        recording: &Recording,
        tensors: &[Tensor],
    ) -> Result<Vec<(DType, Vec<u32>)>, Error> {
        device.run(recording)?;
        let mut outputs = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let words: Vec<u32> = device.read(tensor).await?;
            outputs.push(match *tensor.shape() {
                [_, _, row] if tensor.is_cache() => (DType::F32, unpacked(self.form.kind(), &words, row as usize)),
                _ => (tensor.dtype(), words),
            });
        }
        Ok(outputs)
    }
}

/// The floats of rows of so many words.
fn unpacked(kind: KvType, words: &[u32], row: usize) -> Vec<u32> {
    let dim = (1..=row * 4).rev().find(|&dim| kind.row_words(dim as u32) == row as u32).unwrap_or(row);
    let mut head = vec![0.0f32; dim];
    let rows = words.chunks_exact(row).flat_map(|words| {
        read_row(kind, words, &mut head);
        head.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    rows.collect()
}

/// How the kernels of forward passes and searches are recorded, and what of it is compared.
static CHECKS: &[(&Kernel, Record)] = &[
    (&shaders::RMS_NORM.kernel, |rec, form| {
        let y = blank(form.device, &[3, 260])?;
        rms_norm(rec, &input(form.device, &[3, 260])?, &input(form.device, &[260])?, &y, 1e-5)?;
        Ok(vec![y])
    }),
    (&shaders::LAYER_NORM.kernel, |rec, form| {
        let (x, vector, y) =
            (input(form.device, &[3, 260])?, input(form.device, &[260])?, blank(form.device, &[3, 260])?);
        layer_norm(rec, &x, &LayerNorm { weight: &vector, bias: Some(&vector), eps: 1e-5 }, &y)?;
        Ok(vec![y])
    }),
    (&shaders::SOFTMAX.kernel, |rec, form| {
        let y = blank(form.device, &[3, 260])?;
        softmax(rec, &input(form.device, &[3, 260])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::ADD.kernel, |rec, form| {
        let y = blank(form.device, &[300])?;
        add(rec, &input(form.device, &[300])?, &y)?;
        let rows = blank(form.device, &[3, 70])?;
        add(rec, &input(form.device, &[70])?, &rows)?;
        Ok(vec![y, rows])
    }),
    (&shaders::SCALE.kernel, |rec, form| {
        let y = blank(form.device, &[300])?;
        scale(rec, &input(form.device, &[300])?, &y, 0.5)?;
        Ok(vec![y])
    }),
    (&shaders::SILU.kernel, |rec, form| {
        let y = blank(form.device, &[300])?;
        silu(rec, &input(form.device, &[300])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::GELU.kernel, |rec, form| {
        let x = input(form.device, &[300])?;
        let of_form = |gelu_form| {
            let y = blank(form.device, &[300])?;
            gelu(rec, &x, &y, gelu_form)?;
            Ok(y)
        };
        [Gelu::Exact, Gelu::Tanh, Gelu::Quick].into_iter().map(of_form).collect()
    }),
    (&shaders::SWIGLU.kernel, |rec, form| {
        let y = blank(form.device, &[2, 36])?;
        gated(rec, form.gate(), &input(form.device, &[2, 72])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::GEGLU.kernel, |rec, form| {
        let y = blank(form.device, &[2, 36])?;
        geglu(rec, &input(form.device, &[2, 72])?, &y, Gelu::Exact)?;
        Ok(vec![y])
    }),
    (&shaders::ROPE.kernel, |rec, form| {
        let table = form.device.upload("table", &[8, 8, 2], &rope_table(&ROPE, 8))?;
        let (x, y) = (input(form.device, &[3, 2, 16])?, blank(form.device, &[3, 2, 16])?);
        rope(rec, &state(form.device, 2, 3)?, &ROPE, &table, &x, &y)?;
        Ok(vec![y])
    }),
    (&shaders::ROPE_KV.kernel, |rec, form| {
        let table = form.device.upload("table", &[8, 8, 2], &rope_table(&ROPE, 8))?;
        let slots = form.slots(8);
        let (q, cached) = (blank(form.device, &[3, 32])?, keys(form.device, form.kind(), [1, slots, 16])?);
        let weight = head_norms(form)?;
        rope_kv(
            rec,
            &form.state(2, 3, slots)?,
            &heads(form, &table, &weight),
            &input(form.device, &[3, 64])?,
            &q,
            &cached,
        )?;
        Ok([q, cached.k].into_iter().chain(cached.v).collect())
    }),
    (&shaders::ROPE_PACKED.kernel, |rec, form| {
        let table = form.device.upload("table", &[8, 8, 2], &rope_table(&ROPE, 8))?;
        let tokens = form.device.upload("tokens", &[3, 3], &[19u32, 0, 1, 0, 3, 0, 7, 1, 1])?;
        let qkv = input(form.device, &[3, 64])?;
        let weight = head_norms(form)?;
        rope_packed(rec, &heads(form, &table, &weight), &tokens, &qkv)?;
        Ok(vec![qkv])
    }),
    (&shaders::ATTENTION_DECODE.kernel, decode),
    (&shaders::ATTENTION_MERGE.kernel, decode),
    (&shaders::ATTENTION_PREFILL.kernel, |rec, form| {
        // As many rows to a key and its value as the scalar tier takes eight of, or four, or those of a single token.
        let n_kv_heads = if form.get("ROWS") == Some(8) { 4 } else { 2 };
        let (n_tokens, share) = form.get("ROWS").filter(|&rows| rows < 4).map_or((16, 2), |rows| (1, rows));
        let head_dim = form.get("PARTS").map_or(32, |parts| 64 * parts);
        let config = form.config([share * n_kv_heads, n_kv_heads, head_dim]);
        if form.is("BIASES") {
            return Ok(vec![attend_packed(rec, form, &config, &[10, 6])?]);
        }
        let cached = form.keys([n_kv_heads, form.slots(64), config.head_dim])?;
        let y = attend(rec, form, n_tokens, &config, &cached)?;
        // Packed sequences are of f32.
        let is_latent = config.values_from.is_some();
        if form.is("SINKS") || form.is("PAGE_TABLE") || is_latent || form.kind() != KvType::F32 {
            return Ok(vec![y]);
        }
        match form.get("ROWS") {
            Some(..8) => Ok(vec![y]),
            _ => Ok(vec![y, attend_packed(rec, form, &config, &[10, 6])?]),
        }
    }),
    (&shaders::HEAD_MATMUL.kernel, |rec, form| {
        let (is_transposed, is_latent) = (form.is("TRANSPOSED"), form.is("LATENT"));
        let (n_heads, n_out, dim): (u32, u32, u32) = (2, 40, 32);
        let [rows, cols] = if is_transposed { [dim, n_out] } else { [n_out, dim] };
        // Whole super-blocks of any weight type.
        let cols = cols.next_multiple_of(256);
        let (n_out, dim) = if is_transposed { (cols, dim) } else { (n_out, cols) };
        let w = matrix(form.device, form.weight, n_heads * (rows + 8), cols)?;
        let n_turned = if is_latent { 8 } else { 0 };
        let (columns, kv) = (input(form.device, &[3, 4 + n_heads * (dim + 8)])?, input(form.device, &[3, n_out + 16])?);
        let norm_weight = input(form.device, &[n_out])?;
        let norm = Norm { weight: &norm_weight, eps: 1e-5 };
        let key = is_latent.then_some(LatentKey { columns: &kv, start: 4, n_turned, norm });
        let y = blank(form.device, &[3, (n_heads + u32::from(is_latent)) * (n_turned + n_out)])?;
        let matrices = HeadMatrices { w: &w, n_heads, start: 8, n_out, dim, transposed: is_transposed };
        matrices.record(rec, HeadColumns { columns: &columns, start: 4, stride: dim + 8 }, key, &y)?;
        Ok(vec![y])
    }),
    (&shaders::ATTENTION_HALF.kernel, |rec, form| {
        let head_dim = form.get("HEAD_DIM").unwrap_or(64);
        // Small scores, which rounding moves little.
        let config = AttentionConfig { scale: (head_dim as f32).sqrt().recip(), ..config([4, 2, head_dim]) };
        let cached = keys(form.device, form.kind(), [2, 64, head_dim])?;
        // A key of the second tile outweighs those before it, so that sums are rescaled.
        let mut row = vec![0; form.kind().row_words(head_dim) as usize];
        let key: Vec<f32> = uniform(head_dim as usize).iter().map(|x| 24.0 * x).collect();
        write_row(form.kind(), &key, &mut row);
        for head in [0, 64] {
            form.device.write(&cached.k, (head + 32) * row.len(), &row)?;
        }
        Ok(vec![attend(rec, form, 16, &config, &cached)?])
    }),
    (&shaders::ARGMAX.kernel, choose),
    (&shaders::ARGMAX_MERGE.kernel, choose),
    (&shaders::CANDIDATES.kernel, draw),
    (&shaders::SAMPLE.kernel, draw),
    (&shaders::PENALIZE.kernel, |rec, form| {
        let sampling = sampling(form.device, Sampling { repeat_penalty: 1.5, ..SAMPLING })?;
        let tokens = form.device.upload("tokens", &[8], &[3u32, 0, 19, 7, 2999, 18, 2, 4])?;
        let logits = input(form.device, &[1, 3000])?;
        let biases = form.device.upload("biases", &[1, 4], &[17u32, 2.5f32.to_bits(), 2048, (-1.5f32).to_bits()])?;
        penalize(rec, &sampling, &state(form.device, 4, 1)?, &tokens, &biases, &logits)?;
        Ok(vec![logits])
    }),
    (&shaders::MASK_LOGITS.kernel, |rec, form| {
        // Each time one token is allowed, which is then the likeliest.
        let mut outputs = Vec::new();
        for id in [1234, 2999] {
            let mut words = [0u32; 94];
            words[id / 32] = 1 << (id % 32);
            let (logits, ids) = (input(form.device, &[1, 3000])?, form.device.upload("ids", &[1], &[0u32])?);
            mask_logits(rec, &form.device.upload("allowed", &[1, 94], &words)?, &logits)?;
            argmax(rec, &logits, &ids)?;
            outputs.push(ids);
        }
        Ok(outputs)
    }),
    (&shaders::ADVANCE.kernel, |rec, form| {
        let (ids, state) = (form.device.upload("ids", &[1], &[5u32])?, state(form.device, 2, 3)?);
        let tokens = form.device.upload("tokens", &[8], &[9u32; 8])?;
        advance(rec, &state, &ids, &tokens)?;
        let (many, rows) =
            (form.device.upload("ids", &[4], &[5u32, 6, 7, 8])?, StepState::declare_shared(Some(4), 1, false)?);
        let all = form.device.upload("tokens", &[4, 8], &[9u32; 32])?;
        let row = |i: u32| BatchRow { pos: 2 * i, n_tokens: 3, token: 1, slot: 3 - i, ..BatchRow::default() };
        rows.set_rows(form.device, &[0, 1, 2, 3].map(row))?;
        advance(rec, &rows, &many, &all)?;
        Ok(vec![state.tensor().clone(), tokens, rows.tensor().clone(), all])
    }),
    (&shaders::LAST_ROW.kernel, |rec, form| {
        let y = blank(form.device, &[1, 260])?;
        last_row(rec, &state(form.device, 2, 3)?, &input(form.device, &[3, 260])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::POOL.kernel, |rec, form| {
        let (x, y) = (input(form.device, &[70, 260])?, blank(form.device, &[2, 260])?);
        let spans = form.device.upload("spans", &[2, 2], &[0u32, 3, 3, 70])?;
        pool(rec, Pooling::Mean, true, &spans, &x, &y)?;
        Ok(vec![y])
    }),
    (&shaders::MAX_SIM.kernel, |rec, form| {
        let (x, y) = (input(form.device, &[20, 70])?, blank(form.device, &[2, 3])?);
        let queries = form.device.upload("queries", &[2, 2], &[0u32, 3, 3, 20])?;
        let documents = form.device.upload("documents", &[3, 2], &[0u32, 40, 40, 40, 41, 70])?;
        max_sim(rec, &queries, &documents, &x, 0, &y)?;
        Ok(vec![y])
    }),
    (&shaders::SELECT_TOP.kernel, best),
    (&shaders::MERGE_TOP.kernel, best),
    (&shaders::SPLIT_SUM.kernel, |rec, form| {
        let y = blank(form.device, &[3, 70])?;
        let (parts, bias) = (input(form.device, &[12, 70])?, input(form.device, &[70])?);
        split_sum(rec, &parts, Some(&bias), form.activation(), 0, true, &y)?;
        Ok(vec![y])
    }),
    (&shaders::MATVEC.kernel, |rec, form| {
        let (n_tokens, dim) = (form.few(), form.dim());
        let (w, vector) = (matrix(form.device, form.weight, 22, dim)?, input(form.device, &[dim])?);
        let (x, y) = (input(form.device, &[n_tokens, dim])?, blank(form.device, &[n_tokens, 22])?);
        let linear = Linear { norm: norm(form, &vector), activation: form.activation(), ..Linear::new(&w) };
        matvec(rec, &linear, &x, &y)?;
        Ok(vec![y])
    }),
    (&shaders::GATE_UP.kernel, |rec, form| {
        let (n_tokens, dim) = (form.few(), form.dim());
        let (x, vector) = (input(form.device, &[n_tokens, dim])?, input(form.device, &[dim])?);
        let norm = norm(form, &vector);
        if form.is("UPS") {
            let (w, y) = (matrix(form.device, form.weight, 11, dim)?, input(form.device, &[n_tokens, 11])?);
            up_gated(rec, &w, norm, form.gate(), &x, &y)?;
            return Ok(vec![y]);
        }
        let (w, y) = (matrix(form.device, form.weight, 22, dim)?, blank(form.device, &[n_tokens, 11])?);
        gate_up(rec, &w, norm, form.gate(), &x, &y)?;
        Ok(vec![y])
    }),
    #[cfg(feature = "lora")]
    (&shaders::MATVEC_LORA.kernel, |rec, form| {
        let (n_tokens, dim) = (form.few(), form.dim());
        let (w, vector) = (matrix(form.device, form.weight, 22, dim)?, input(form.device, &[dim])?);
        let (x, y) = (input(form.device, &[n_tokens, dim])?, blank(form.device, &[n_tokens, 22])?);
        let (inner, b) = (input(form.device, &[n_tokens, 24])?, input(form.device, &[22, 8])?);
        let low = LowRank { inner: &inner, b: &b, starts: &[0, 7, 14] };
        matvec_lora(rec, &Linear { norm: norm(form, &vector), ..Linear::new(&w) }, &low, &x, &y)?;
        Ok(vec![y])
    }),
    #[cfg(feature = "lora")]
    (&shaders::GATE_UP_LORA.kernel, |rec, form| {
        let (n_tokens, dim) = (form.few(), form.dim());
        let (x, vector) = (input(form.device, &[n_tokens, dim])?, input(form.device, &[dim])?);
        let (inner, b) = (input(form.device, &[n_tokens, 16])?, input(form.device, &[22, 8])?);
        let (norm, low) = (norm(form, &vector), LowRank { inner: &inner, b: &b, starts: &[0, 11] });
        if form.is("UPS") {
            let (w, y) = (matrix(form.device, form.weight, 11, dim)?, input(form.device, &[n_tokens, 11])?);
            up_gated_lora(rec, &w, norm, form.gate(), &low, &x, &y)?;
            return Ok(vec![y]);
        }
        let (w, y) = (matrix(form.device, form.weight, 22, dim)?, blank(form.device, &[n_tokens, 11])?);
        gate_up_lora(rec, &w, norm, form.gate(), &low, &x, &y)?;
        Ok(vec![y])
    }),
    #[cfg(feature = "lora")]
    (&shaders::ADD_LORA.kernel, |rec, form| {
        let (inner, b, y) =
            (input(form.device, &[7, 16])?, input(form.device, &[60, 8])?, input(form.device, &[7, 64])?);
        add_lora(rec, &LowRank { inner: &inner, b: &b, starts: &[0, 33] }, &y)?;
        Ok(vec![y])
    }),
    (&shaders::SHORT_CONV.kernel, |rec, form| {
        let (weight, past) = (input(form.device, &[70, 3])?, input(form.device, &[N_STATES, 2, 70])?);
        let (x, y, plain) =
            (input(form.device, &[3, 210])?, blank(form.device, &[3, 70])?, blank(form.device, &[3, 70])?);
        let gated = ShortConv { weight: &weight, bias: None, gated: true, first_column: 0 };
        gated.record(rec, &state(form.device, 5, 3)?, &x, &past, &y)?;
        ShortConv { gated: false, first_column: 5, ..gated }.record(
            rec,
            &state(form.device, 2, 3)?,
            &x,
            &past,
            &plain,
        )?;
        Ok(vec![y, plain, past])
    }),
    (&shaders::DELTA_RULE.kernel, |rec, form| {
        let mut results = Vec::new();
        for decay in [Decay::Heads, Decay::Channels { bound: -5.0 }] {
            let (n_key_heads, n_heads, key_dim, value_dim) = (1, 2, 20, 12);
            let rule = DeltaRule { n_key_heads, n_heads, key_dim, value_dim, grouped: true, beta_scale: 1.0, decay };
            let (qkv, x) = (input(form.device, &[3, rule.channels()])?, input(form.device, &[3, rule.inputs()])?);
            let heads = input(form.device, &[n_heads + rule.n_decays() + value_dim])?;
            let y = blank(form.device, &[3, 24])?;
            let matrices = input(form.device, &[N_STATES, 2, 20, 12])?;
            rule.record(rec, &state(form.device, 5, 3)?, [&qkv, &x, &heads], 1e-5, &matrices, &y)?;
            results.extend([y, matrices]);
        }
        Ok(results)
    }),
    (&shaders::SELECTIVE_SCAN.kernel, |rec, form| {
        let scan = SelectiveScan { n_groups: 1, n_heads: 2, state_dim: 20, head_dim: 12 };
        let (vbc, x) = (input(form.device, &[3, scan.channels()])?, input(form.device, &[3, scan.inputs()])?);
        let (heads, y) = (input(form.device, &[6])?, blank(form.device, &[3, 24])?);
        let matrices = input(form.device, &[N_STATES, 2, 20, 12])?;
        scan.record(rec, &state(form.device, 5, 3)?, [&vbc, &x, &heads], &matrices, &y)?;
        Ok(vec![y, matrices])
    }),
    (&shaders::GRID_CONV.kernel, |rec, form| {
        // A row of three patches.
        let neighbours = form.device.upload::<u32>("neighbours", &[3, 3], &[3, 0, 1, 0, 1, 2, 1, 2, 3])?;
        let (x, weight) = (input(form.device, &[3, 60])?, input(form.device, &[20, 3])?);
        let y = blank(form.device, &[3, 20])?;
        grid_conv(rec, &neighbours, &x, &weight, &y)?;
        Ok(vec![y])
    }),
    (&shaders::RELU.kernel, |rec, form| {
        let y = blank(form.device, &[1000])?;
        relu(rec, &input(form.device, &[1000])?, &y, true)?;
        Ok(vec![y])
    }),
    (&shaders::CLIP.kernel, |rec, form| {
        let (x, y) = (input(form.device, &[3, 50])?, blank(form.device, &[3, 50])?);
        let bounds = form.device.upload::<f32>("bounds", &[6], &[-0.5, 0.25, -0.25, 0.5, -0.1, 0.1])?;
        clip(rec, &bounds, &[7, 30, 13], &x, &y)?;
        Ok(vec![y])
    }),
    (&shaders::SIGMOID_GATE.kernel, |rec, form| {
        let (gates, y) = (input(form.device, &[3, 50])?, input(form.device, &[3, 40])?);
        sigmoid_gate(rec, Gates { columns: &gates, start: 7, size: 1 }, &y)?;
        Ok(vec![y])
    }),
    (&shaders::ROUTE.kernel, |rec, form| {
        let routes = form.device.upload::<u32>("routes", &[3, 4, 2], &[0; 24])?;
        let router = Router { score: ExpertScore::Softmax, shares: true, scale: 1.0, groups: None };
        route(rec, &router, SharedExperts { n: 1, gated: true }, &input(form.device, &[3, 71])?, [None; 2], &routes)?;
        // Experts that are nearly as good may change places: only what their weights make of numbers is compared.
        let (w, x, y) = (
            matrix(form.device, WeightType::F32, 71 * 4, DIM)?,
            input(form.device, &[12, DIM])?,
            blank(form.device, &[3, 4])?,
        );
        ExpertDown { w: &w, first_expert: 0, bias: None, accumulate: false }.record(rec, &x, &routes, &y)?;
        Ok(vec![y])
    }),
    (&shaders::EXPERT_GATE_UP.kernel, |rec, form| {
        let dim = form.dim();
        let rows = match (form.is("APART"), form.is("UPS")) {
            (false, _) => ExpertRows::Both,
            (true, false) => ExpertRows::Gates,
            (true, true) => ExpertRows::Ups,
        };
        let n_rows = if rows == ExpertRows::Both { 22 } else { 11 };
        let (w, vector) = (matrix(form.device, form.weight, 3 * n_rows, dim)?, input(form.device, &[dim])?);
        let (x, y, routes) = (input(form.device, &[2, dim])?, input(form.device, &[4, 11])?, some_routes(form.device)?);
        let (norm, gate) = (norm(form, &vector), form.gate());
        let gate_up = ExpertGateUp { w: &w, rows, first_expert: 0, bias: None, norm, gate };
        gate_up.record(rec, &x, &routes, &y)?;
        Ok(vec![y])
    }),
    (&shaders::EXPERT_DOWN.kernel, |rec, form| {
        let dim = form.dim();
        let (w, x, y) = (
            matrix(form.device, form.weight, 3 * 10, dim)?,
            input(form.device, &[4, dim])?,
            blank(form.device, &[2, 10])?,
        );
        ExpertDown { w: &w, first_expert: 0, bias: None, accumulate: false }.record(
            rec,
            &x,
            &some_routes(form.device)?,
            &y,
        )?;
        Ok(vec![y])
    }),
    (&shaders::EXPERT_TILES.kernel, |rec, form| {
        let [slots, tiles] = ExpertTiles::record(rec, &some_routes(form.device)?, 3)?.tensors().map(Tensor::clone);
        Ok(vec![slots, tiles])
    }),
    (&shaders::EXPERT_MATMUL.kernel, |rec, form| {
        // Tiles of 64 rows where experts have as many on average.
        let n_tokens = if form.get("WIDTH").is_none() { 100 } else { 2 };
        let pairs = (0..2 * n_tokens).flat_map(|slot| [slot % 3, 0]).collect::<Vec<u32>>();
        let routes = form.device.upload("routes", &[n_tokens, 2, 2], &pairs)?;
        let w = matrix(form.device, form.weight, 3 * 70, TILED_DIM)?;
        let (x, y) = (input(form.device, &[n_tokens, TILED_DIM])?, blank(form.device, &[2 * n_tokens, 70])?);
        let tiles = ExpertTiles::record(rec, &routes, 3)?;
        let product = ExpertProduct { w: &w, rows: 70, first_expert: 0, bias: None, y_start: 0 };
        product.record(rec, &tiles, &x, &y)?;
        Ok(vec![y])
    }),
    (&shaders::EXPERT_SUM.kernel, |rec, form| {
        let (x, y) = (input(form.device, &[4, 70])?, input(form.device, &[2, 70])?);
        expert_sum(rec, &x, &some_routes(form.device)?, true, &y)?;
        Ok(vec![y])
    }),
    (&shaders::MATMUL_PLAIN.kernel, |rec, form| {
        // Rows that choose the tile; the largest needs many tiles, and whole ones have no guards.
        let [m, n] = match (form.tile(), form.is("GUARDED")) {
            (Some([rows, cols]), true) if rows > 64 => [3 * rows + 6, 24 * cols + 6],
            (Some([rows, cols]), false) if rows > 64 => [rows, 96 * cols],
            (Some([rows, cols]), true) => [rows - 2, cols + 6],
            (Some(tile), false) => tile,
            (None, _) => [20, 72],
        };
        let (x, y) = (input(form.device, &[m, 64])?, blank(form.device, &[m, n])?);
        matmul_plain(rec, &x, &input(form.device, &[64, n])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::MATMUL.kernel, product),
    (&shaders::MATMUL_HALF.kernel, product),
    (&shaders::HALF_ROWS.kernel, |rec, form| {
        // What becomes of rows in half precision shows in a product alone: the CPU takes it without them.
        let (w, y) = (matrix(form.device, WeightType::F16, 70, TILED_DIM)?, blank(form.device, &[20, 70])?);
        let weight = input(form.device, &[TILED_DIM])?;
        let x = input(form.device, &[20, if form.is("GATED") { 2 * TILED_DIM } else { TILED_DIM }])?;
        let mut input = match form.is("GATED") {
            true => Input::gated(&x, form.gate()),
            false => Input::normed(&x, norm(form, &weight)),
        };
        Linear::new(&w).record_input(rec, &mut input, &y)?;
        Ok(vec![y])
    }),
    (&shaders::LINEAR_NORM.kernel, |rec, form| {
        let n = form.get("WG").map_or(68, |invocations| 8 * invocations);
        let (w, y) = (matrix(form.device, form.weight, n, TILED_DIM)?, blank(form.device, &[20, n])?);
        let norm = LayerNorm { weight: &input(form.device, &[n])?, bias: None, eps: 1e-5 };
        linear_norm(rec, &Linear::new(&w), &norm, &input(form.device, &[20, TILED_DIM])?, &y)?;
        Ok(vec![y])
    }),
    (&shaders::EMBED.kernel, |rec, form| {
        let (w, y) = (matrix(form.device, form.weight, 20, TILED_DIM)?, blank(form.device, &[3, TILED_DIM])?);
        let tokens = form.device.upload("tokens", &[8], &[3u32, 0, 19, 7, 1, 18, 2, 4])?;
        let positions = input(form.device, &[9, TILED_DIM])?;
        let embedding = Embedding { w: &w, factor: 2.0, positions: Some(&positions) };
        embed(rec, &state(form.device, 2, 3)?, &tokens, &embedding, &y)?;
        Ok(vec![y])
    }),
    (&shaders::EMBED_SUM.kernel, |rec, form| {
        let (w, y) = (matrix(form.device, form.weight, 20, TILED_DIM)?, blank(form.device, &[3, TILED_DIM])?);
        let tokens = form.device.upload("tokens", &[3, 3], &[19u32, 0, 1, 0, 3, 0, 7, 1, 1])?;
        let (positions, types) = (input(form.device, &[4, TILED_DIM])?, input(form.device, &[2, TILED_DIM])?);
        embed_sum(rec, &tokens, &w, Some(&positions), Some(&types), &y)?;
        Ok(vec![y])
    }),
    (&shaders::MOL.kernel, mixture),
];

/// A product by tiles, and one whose K is split.
fn product(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    // Whole tiles have no guards.
    let [m, n] = match form.tile() {
        Some(tile) if !form.is("GUARDED") => tile,
        tile => [20, tile.map_or(64, |[_, cols]| cols) + 6],
    };
    // An odd number of blocks is not walked two at a time.
    let k = if form.get("DEPTH") == Some(32) { TILED_DIM - BLOCK as u32 } else { TILED_DIM };
    let w = matrix(form.device, form.weight, n, k)?;
    let (x, y) = (input(form.device, &[m, k])?, blank(form.device, &[m, n])?);
    let linear = Linear { activation: form.activation(), splits: Some(1), ..Linear::new(&w) };
    matmul(rec, &linear, &x, &y)?;
    if linear.activation.is_some() {
        return Ok(vec![y]);
    }
    let sum = blank(form.device, &[m, n])?;
    matmul(rec, &Linear { splits: Some(2), ..linear }, &x, &sum)?;
    Ok(vec![y, sum])
}

/// Columns of the matrices of products with vectors: more blocks than lanes, in whole super-blocks.
const DIM: u32 = 2304;

/// The same of products by tiles, which are long enough to be walked twice.
const TILED_DIM: u32 = 512;

static ROPE: RopeConfig = RopeConfig::new(16, 1e4, RopeStyle::Interleaved);

const SAMPLING: Sampling = Sampling {
    temperature: 0.8,
    top_k: 40,
    top_p: 0.95,
    min_p: 0.05,
    seed: [1, 0],
    repeat_penalty: 1.0,
    repeat_last_n: 64,
    presence_penalty: 0.5,
    frequency_penalty: 0.25,
    generated_from: 3,
    n_biases: 2,
};

/// An output, so that a kernel that writes nothing is seen not to.
#[inline(never)]
fn blank(device: &Device, shape: &[u32]) -> Result<Tensor, Error> {
    device.upload("y", shape, &vec![0f32; shape.iter().product::<u32>() as usize])
}

/// Two of three experts for each of two tokens.
#[inline(never)]
fn some_routes(device: &Device) -> Result<Tensor, Error> {
    let routes = [(2, 0.5f32), (0, 0.25), (1, 1.5), (2, -0.75)];
    let words: Vec<u32> = routes.iter().flat_map(|&(expert, weight)| [expert, weight.to_bits()]).collect();
    device.upload("routes", &[2, 2, 2], &words)
}

#[inline(never)]
fn state(device: &Device, pos: u32, n_tokens: u32) -> Result<StepState, Error> {
    let state = StepState::declare()?;
    // Its last word means nothing, but it is compared.
    device.write(state.tensor(), 0, &[pos, n_tokens, 0, 0])?;
    Ok(state)
}

#[inline(never)]
fn sampling(device: &Device, settings: Sampling) -> Result<Tensor, Error> {
    device.upload::<u32>("sampling", &[1, Sampling::WORDS], bytemuck::cast_slice(&[settings]))
}

/// The norm in front of a product, if the pipeline has it.
#[inline(never)]
fn norm<'a>(form: &CheckInputs<'_>, weight: &'a Tensor) -> Option<Norm<'a>> {
    form.is("NORM").then_some(Norm { weight, eps: 1e-5 })
}

fn config([n_heads, n_kv_heads, head_dim]: [u32; 3]) -> AttentionConfig {
    AttentionConfig {
        n_heads,
        n_kv_heads,
        head_dim,
        window: None,
        scale: 1.0,
        soft_cap: None,
        values_from: None,
        causal: true,
        whole_pass: false,
    }
}

#[inline(never)]
fn attend(
    rec: &mut Recorder,
    form: &CheckInputs<'_>,
    n_tokens: u32,
    config: &AttentionConfig,
    cached: &CachedKeys,
) -> Result<Tensor, Error> {
    let q = input(form.device, &[n_tokens, config.n_heads * config.head_dim])?;
    let y = blank(form.device, &[n_tokens, config.n_heads * config.value_dim()])?;
    let state = form.state(21, n_tokens, cached.k.shape()[1])?;
    let sinks = if form.is("SINKS") { Some(input(form.device, &[config.n_heads])?) } else { None };
    attention(rec, &state, config, sinks.as_ref(), &q, cached, &y)?;
    Ok(y)
}

#[inline(never)]
fn attend_packed(
    rec: &mut Recorder,
    form: &CheckInputs<'_>,
    config: &AttentionConfig,
    lengths: &[u32],
) -> Result<Tensor, Error> {
    let AttentionConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
    let n_tokens = lengths.iter().sum();
    let sizes = [n_tokens, lengths.len() as u32, n_tokens];
    let tiles = PackedTiles::declare(rec.target(), config, sizes)?;
    form.device.write(tiles.tensor(), 0, &tiles.of(lengths)?)?;
    let qkv = input(form.device, &[n_tokens, (n_heads + 2 * n_kv_heads) * head_dim])?;
    let y = blank(form.device, &[n_tokens, n_heads * head_dim])?;
    let biases = if form.is("BIASES") { Some(input(form.device, &[7, n_heads])?) } else { None };
    attention_packed(rec, &tiles, config, biases.as_ref(), &qkv, &y)?;
    Ok(y)
}

/// One token, with a cache that is cut into parts and with one that is not.
fn decode(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    let rows = form.get("ROWS").unwrap_or(2);
    let config = form.config([2 * rows, 2, form.get("HEAD_DIM").unwrap_or(32)]);
    let AttentionConfig { n_heads, n_kv_heads, head_dim, .. } = config;
    let table = form.device.upload("table", &[1200, 8, 2], &rope_table(&ROPE, 1200))?;
    let norm = QkNorm::of(form.get("NORM").unwrap_or(0));
    let weight = input(
        form.device,
        &[if norm == Some(QkNorm::Whole) { (n_heads + n_kv_heads) * head_dim } else { 2 * head_dim }],
    )?;
    let norm = norm.map(|norm| (norm, &weight, 1e-5));
    let rope = (head_dim >= ROPE.rot_dims).then_some((&ROPE, &table));
    let keys_hold_values = config.values_from.is_some();
    let heads = Heads { n_heads, n_kv_heads, head_dim, keys_hold_values, first_column: 0, rope, norm };
    // With pages two sequences, one of which has every page but the last; or two tokens of that one.
    let runs = form.get("STORE").is_some();
    let n_tokens = if form.is("PAGE_TABLE") { 2 } else { 1 };
    let n_kinds = if keys_hold_values { 1 } else { 2 };
    let qkv = input(form.device, &[n_tokens, (n_heads + n_kinds * n_kv_heads) * head_dim])?;
    let sinks = if form.is("SINKS") { Some(input(form.device, &[n_heads])?) } else { None };
    let mut outputs = Vec::new();
    for (slots, pos) in [(1500, 1100), (100, 70)] {
        let (slots, y) = (form.slots(slots), blank(form.device, &[n_tokens, n_heads * config.value_dim()])?);
        let state = match form.is("PAGE_TABLE") {
            true => {
                let state = form.shared_state(Some(2), slots)?;
                let row = |pos, pages: Vec<u32>| form.row(BatchRow { pos, n_tokens: 1, pages, ..BatchRow::default() });
                let last = slots / PAGE - 1;
                let pages: Vec<u32> = (0..last).rev().collect();
                let second = if runs { row(pos + 1, pages.clone()) } else { row(30, vec![last]) };
                state.set_rows(form.device, &[row(pos, pages), second])?;
                if runs { state.with_runs() } else { state }
            }
            false => state(form.device, pos, 1)?,
        };
        let cached = form.keys([n_kv_heads, slots, head_dim])?;
        attention_next(rec, &state, &config, &heads, sinks.as_ref(), &qkv, &cached, &y)?;
        outputs.extend([y, cached.k].into_iter().chain(cached.v));
    }
    Ok(outputs)
}

/// The highest of more logits than a workgroup has.
fn choose(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    let ids = form.device.upload("ids", &[1], &[0u32])?;
    argmax(rec, &input(form.device, &[1, 5000])?, &ids)?;
    Ok(vec![ids])
}

/// A draw from the parts of a vocabulary.
fn draw(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    // A draw among one: which token it is depends on no rounding.
    let sampling = sampling(form.device, Sampling { top_k: 1, ..SAMPLING })?;
    let ids = form.device.upload("ids", &[1], &[0u32])?;
    sample(rec, &sampling, &state(form.device, 2, 1)?, &input(form.device, &[1, 5000])?, &ids)?;
    Ok(vec![ids])
}

/// The best of two strips of scores.
fn best(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    let lists = form.device.upload("lists", &[2, 2, 8, 2], &[0u32; 64])?;
    let best = form.device.upload("best", &[2, 8, 2], &[0u32; 32])?;
    for (first_id, n_cols) in [(0, 600), (600, 300)] {
        let strip = TopStrip { first_id, begins: first_id == 0, allowed: None };
        select_top(rec, &input(form.device, &[2, n_cols])?, &strip, &lists)?;
    }
    merge_top(rec, &lists, &best)?;
    Ok(vec![best])
}

/// Two query heads and one for keys and values, normalised as the overrides say.
fn heads<'a>(form: &CheckInputs<'_>, table: &'a Tensor, weight: &'a Tensor) -> Heads<'a> {
    let norm = QkNorm::of(form.get("NORM").unwrap_or(0));
    let (rope, norm) = (Some((&ROPE, table)), norm.map(|norm| (norm, weight, 1e-5)));
    Heads { n_heads: 2, n_kv_heads: 1, head_dim: 16, keys_hold_values: false, first_column: 0, rope, norm }
}

/// The weights of those heads' norms.
fn head_norms(form: &CheckInputs<'_>) -> Result<Tensor, Error> {
    let is_whole = QkNorm::of(form.get("NORM").unwrap_or(0)) == Some(QkNorm::Whole);
    input(form.device, &[if is_whole { 48 } else { 32 }])
}

/// A mixture of logits of the form that the overrides say, for as many queries as an invocation takes side by side.
fn mixture(rec: &mut Recorder, form: &CheckInputs<'_>) -> Result<Vec<Tensor>, Error> {
    const HIDDEN: usize = 12;
    const ITEMS: u32 = 70;
    let [n4, blocks, queries] = ["N4", "BLOCKS", "QUERIES"].map(|name| form.get(name).unwrap_or(1));
    let (pairing, [query_components, item_components]) = match form.is("ALIGNED") {
        true => (Pairing::Aligned, [16 * blocks; 2]),
        false => (Pairing::Cross, [4 * n4, 4 * (blocks / n4.max(1))]),
    };
    let combination = match form.get("COMBINE") {
        Some(1) => Combination::GluSilu,
        Some(2) => Combination::GluSiluLn,
        _ => Combination::Sum,
    };
    let activation = match form.get("ACT") {
        Some(1) => MolActivation::Relu,
        Some(2) => MolActivation::Identity,
        _ => MolActivation::Silu,
    };
    let hidden = HIDDEN as u32;
    let form_of_gate = MolForm { query_components, item_components, hidden, pairing, combination, activation };
    let pairs = form_of_gate.n_pairs() as usize;
    let first = if pairing == Pairing::Cross { HIDDEN } else { 0 };
    let weights = uniform(HIDDEN * pairs);
    let gate = MolGate::new(
        form.device,
        form_of_gate,
        &MolGateWeights { w1: &weights[..first * pairs], b1: &weights[..first], w2: &weights, b2: &weights[..pairs] },
    )?;
    let dim = 256;
    let columns = form_of_gate.gate_columns().max(4);
    let items = matrix(form.device, form.weight, item_components * ITEMS, dim)?;
    let item_gates = input(form.device, &[ITEMS, columns])?;
    let (vectors, query_gates) =
        (input(form.device, &[queries, query_components * dim])?, input(form.device, &[queries, columns])?);
    let operands = MolOperands { items: &items, item_gates: &item_gates, queries: &vectors, query_gates: &query_gates };
    let ids: Vec<u32> = (0..queries * 9).map(|i| i * 37 % ITEMS).collect();
    let ids = form.device.upload("ids", &[queries, 9], &ids)?;
    let (what, n_scores) = match (form.is("GATHERED"), form.is("BOUND")) {
        (true, _) => (MolScores::Of(&ids), 9),
        (_, true) => (MolScores::Bounds, ITEMS),
        _ => (MolScores::All, ITEMS),
    };
    let scores = blank(form.device, &[queries, n_scores])?;
    mol(rec, &gate, &operands, what, &scores)?;
    Ok(vec![scores])
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::*;
    use crate::device::DeviceChoice;
    use crate::kernels::microbench::probe_copy;
    use crate::matrix::Matrix;

    /// The operands of each weight type are such that a GPU and the CPU agree on what they stand for.
    #[test]
    fn matvec_self_test_passes_for_every_weight_type() {
        let Ok(device) = pollster::block_on(Device::open_in(&DeviceChoice::Gpu, Some(Tier::Baseline), None)) else {
            assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set and there is no adapter");
            println!("skipped: no adapter");
            return;
        };
        for weight in WeightType::ALL {
            let w = Matrix::declare(&device.target(), "w", weight, 8, 64).expect("the shape is valid");
            let mut rec = device.recorder();
            let (x, y) = (input(&device, &[1, 64]).expect("x fits"), blank(&device, &[1, 8]).expect("y fits"));
            matvec(&mut rec, &Linear::new(&w), &x, &y).expect("the operands fit");
            let recording = rec.finish(&mut Workspace::default());
            let is_right = pollster::block_on(self_test(&device, &recording));
            assert!(matches!(is_right, Ok(true)), "{weight}: {is_right:?}");
        }
    }

    #[test]
    fn every_model_or_search_kernel_has_a_self_test() {
        // Of benches, and of calls of single kernels.
        let others = ["by_head", "matmul_naive", "mol_gate", "top_k", "weighted_sum"];
        for kernel in shaders::ALL {
            let has_check = CHECKS.iter().any(|(known, _)| known.name == kernel.name);
            let is_other = others.contains(&kernel.name) || kernel.name.starts_with("probe_");
            assert_eq!(has_check, !is_other, "{}", kernel.name);
        }
    }

    /// What there is no test for is used, and each process says so: it has not passed.
    #[test]
    fn untested_kernel_is_reported_at_every_start() {
        let folder = std::env::temp_dir().join(format!("tilewright-untested-{}", std::process::id()));
        for start in 0..2 {
            let Ok(device) = block_on(Device::open_in(&DeviceChoice::Gpu, None, Some(&folder))) else {
                assert!(
                    std::env::var_os("REQUIRE_ADAPTER").is_none(),
                    "REQUIRE_ADAPTER is set and there is no adapter"
                );
                println!("skipped: no adapter");
                return;
            };
            let x = device.upload("x", &[256], &[1u32; 256]).unwrap();
            let y = device.upload("y", &[256], &[0u32; 256]).unwrap();
            let mut rec = device.recorder();
            probe_copy(&mut rec, &x, &y).unwrap();
            let recording = rec.finish(&mut Workspace::default());
            assert!(block_on(self_test(&device, &recording)).unwrap());
            let notices = device.take_notices();
            assert!(notices.len() == 1 && notices[0].contains("is used untested"), "start {start}: {notices:?}");
            assert_eq!(device.n_passed(), 0, "start {start}");
            // Once in a process.
            assert!(block_on(self_test(&device, &recording)).unwrap() && device.take_notices().is_empty());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
