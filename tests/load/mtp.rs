//! The MTP heads of Qwen3.5 and Qwen3-Next: loading from both formats, comparison with its definition in f64, and speculative decoding.

use tilewright::engine::{Engine, EngineOptions, Request, Stream};
use tilewright::generate::Speculation;
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::builder::{F32, GgufFile, STRING, U32, text};
use super::checkpoint::{Checkpoint, Stored, checkpoint};
use super::common::shared::executors;
use super::common::{self, Rng, block_on};
use super::{Folder, TinyGguf};

const DIM: usize = 64;
const FFN_DIM: usize = 112;
const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const ROT_DIMS: usize = 8;
const EPS: f64 = 1e-6;

/// A tensor in BF16, the upper half of each number.
pub fn stored(shape: &[usize], values: impl IntoIterator<Item = f64>) -> Stored {
    let data: Vec<u8> =
        values.into_iter().flat_map(|value| (((value as f32).to_bits() >> 16) as u16).to_le_bytes()).collect();
    assert_eq!(data.len(), 2 * shape.iter().product::<usize>(), "{shape:?}");
    Stored { dtype: "BF16".into(), shape: shape.iter().map(|&n| n as u64).collect(), data }
}

pub fn values(stored: &Stored) -> Vec<f64> {
    let halves = stored.data.chunks_exact(2);
    match stored.dtype.as_str() {
        "BF16" => {
            halves.map(|half| f32::from_bits(u32::from(half[1]) << 24 | u32::from(half[0]) << 16).into()).collect()
        }
        _ => stored.data.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()).into()).collect(),
    }
}

/// The head's tensors, by their names in folders.
const HEAD: [(&str, &[usize]); 15] = [
    ("mtp.fc", &[DIM, 2 * DIM]),
    ("mtp.pre_fc_norm_embedding", &[DIM]),
    ("mtp.pre_fc_norm_hidden", &[DIM]),
    ("mtp.norm", &[DIM]),
    ("mtp.layers.0.input_layernorm", &[DIM]),
    ("mtp.layers.0.self_attn.q_proj", &[2 * N_HEADS * HEAD_DIM, DIM]),
    ("mtp.layers.0.self_attn.k_proj", &[N_KV_HEADS * HEAD_DIM, DIM]),
    ("mtp.layers.0.self_attn.v_proj", &[N_KV_HEADS * HEAD_DIM, DIM]),
    ("mtp.layers.0.self_attn.o_proj", &[DIM, N_HEADS * HEAD_DIM]),
    ("mtp.layers.0.self_attn.q_norm", &[HEAD_DIM]),
    ("mtp.layers.0.self_attn.k_norm", &[HEAD_DIM]),
    ("mtp.layers.0.post_attention_layernorm", &[DIM]),
    ("mtp.layers.0.mlp.gate_proj", &[FFN_DIM, DIM]),
    ("mtp.layers.0.mlp.up_proj", &[FFN_DIM, DIM]),
    ("mtp.layers.0.mlp.down_proj", &[DIM, FFN_DIM]),
];

/// The tiny random Qwen3.5 with a random head.
fn with_head() -> Option<Checkpoint> {
    let mut model = checkpoint("qwen35")?;
    let mut rng = Rng::new(18);
    HEAD.into_iter().for_each(|(name, shape)| put(&mut model, &mut rng, name, shape));
    model.config["mtp_num_hidden_layers"] = 1.into();
    Some(model)
}

fn put(model: &mut Checkpoint, rng: &mut Rng, name: &str, shape: &[usize]) {
    let n = shape.iter().product::<usize>();
    let scale = if shape.len() == 1 { 0.5 } else { 2.0 * (shape[1] as f64).powf(-0.5) };
    model.tensors.insert(format!("{name}.weight"), stored(shape, (0..n).map(|_| scale * rng.uniform())));
}

const N_EXPERTS: usize = 5;
const N_USED: usize = 2;

/// The tiny random Qwen3-Next with a random head, which has experts, a tensor each as published.
fn with_head_of_experts() -> Option<Checkpoint> {
    const DIMS: [(&str, usize); 2] = [("experts", 16), ("shared_expert", 24)];
    let mut model = checkpoint("qwen3-next")?;
    let mut rng = Rng::new(19);
    let dense = |name: &str| name.contains(".mlp.");
    HEAD.into_iter().filter(|(name, _)| !dense(name)).for_each(|(name, shape)| put(&mut model, &mut rng, name, shape));
    let mlp = "mtp.layers.0.mlp";
    put(&mut model, &mut rng, &format!("{mlp}.gate"), &[N_EXPERTS, DIM]);
    put(&mut model, &mut rng, &format!("{mlp}.shared_expert_gate"), &[1, DIM]);
    let of_experts = (0..N_EXPERTS).map(|expert| (format!("{mlp}.{}.{expert}", DIMS[0].0), DIMS[0].1));
    for (expert, dim) in of_experts.chain([(format!("{mlp}.{}", DIMS[1].0), DIMS[1].1)]) {
        put(&mut model, &mut rng, &format!("{expert}.gate_proj"), &[dim, DIM]);
        put(&mut model, &mut rng, &format!("{expert}.up_proj"), &[dim, DIM]);
        put(&mut model, &mut rng, &format!("{expert}.down_proj"), &[DIM, dim]);
    }
    Some(model)
}

/// The same model as GGUF. Heads of the delta rules are not reordered, so it is another model with the same head.
fn gguf(model: &Checkpoint) -> TinyGguf {
    let mut file = TinyGguf { file: GgufFile::empty(), data: Vec::new() };
    file.set("general.architecture", STRING, text("qwen35"));
    file.set("tokenizer.ggml.model", STRING, text("no_vocab"));
    let numbers = [
        ("embedding_length", DIM),
        ("feed_forward_length", FFN_DIM),
        ("block_count", 5),
        ("nextn_predict_layers", 1),
        ("attention.head_count", N_HEADS),
        ("attention.head_count_kv", N_KV_HEADS),
        ("attention.key_length", HEAD_DIM),
        ("attention.value_length", HEAD_DIM),
        ("context_length", 256),
        ("rope.dimension_count", ROT_DIMS),
        ("full_attention_interval", 4),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 64),
    ];
    for (key, number) in numbers {
        file.set(&format!("qwen35.{key}"), U32, (number as u32).to_le_bytes());
    }
    file.set("qwen35.attention.layer_norm_rms_epsilon", F32, (EPS as f32).to_le_bytes());
    file.set("qwen35.rope.freq_base", F32, 1e6_f32.to_le_bytes());
    const NAMES: [(&str, &str); 28] = [
        ("mtp.fc.", "blk.4.nextn.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "blk.4.nextn.enorm."),
        ("mtp.pre_fc_norm_hidden.", "blk.4.nextn.hnorm."),
        ("mtp.norm.", "blk.4.nextn.shared_head_norm."),
        ("mtp.layers.0.", "blk.4."),
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt_bias", "ssm_dt.bias"),
        ("linear_attn.", "ssm_"),
    ];
    for (name, tensor) in &model.tensors {
        let renamed = NAMES.iter().fold(name.clone(), |name, (theirs, ours)| name.replace(theirs, ours));
        let renamed = renamed.replace("ssm_out_proj", "ssm_out");
        let change = |value: f64| match name {
            _ if name.ends_with("A_log") => -value.exp(),
            _ if name.ends_with("norm.weight") && !name.contains("linear_attn") => 1.0 + value,
            _ if name.starts_with("mtp.pre_fc_norm") => 1.0 + value,
            _ => value,
        };
        let mut shape = tensor.shape.clone();
        shape.retain(|&n| n != 1);
        let data = values(tensor).into_iter().flat_map(|value| (change(value) as f32).to_le_bytes()).collect();
        file.put(&renamed, &shape, 0, data);
    }
    file
}

fn options<'a>() -> LoadOptions<'a> {
    LoadOptions { kv_type: KvType::F32, mtp_tokens: true, ..LoadOptions::default() }
}

/// The model of a folder, with its MTP head.
fn load(device: &Device, folder: &Folder) -> Model {
    Model::load(device, &folder.0, options()).unwrap_or_else(|e| panic!("{e}"))
}

/// `x w^T` for rows of x.
pub fn product(x: &[Vec<f64>], w: &[f64]) -> Vec<Vec<f64>> {
    let dot = |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(a, b)| a * b).sum();
    x.iter().map(|row| w.chunks_exact(row.len()).map(|w| dot(row, w)).collect()).collect()
}

/// Normalised and multiplied by one plus the weight.
fn normed(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + EPS).sqrt() * (1.0 + w)).collect()
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// A query or key head, normalised and rotated for its position.
fn turned(x: &[f64], weight: &[f64], pos: usize) -> Vec<f64> {
    let mut x = normed(x, weight);
    for i in 0..ROT_DIMS / 2 {
        let angle = pos as f64 * 1e6_f64.powf(-2.0 * i as f64 / ROT_DIMS as f64);
        let (a, b) = (x[i], x[i + ROT_DIMS / 2]);
        x[i] = a * angle.cos() - b * angle.sin();
        x[i + ROT_DIMS / 2] = b * angle.cos() + a * angle.sin();
    }
    x
}

/// The head's logits after each token but the last, by its definition. `hidden`: the model's rows after its last
/// layer.
fn definition(model: &Checkpoint, hidden: &[f32], ids: &[u32]) -> Vec<Vec<f64>> {
    let weight = |name: &str| values(&model.tensors[&format!("{name}.weight")]);
    let of = |name: &str| weight(&format!("mtp.layers.0.{name}"));
    let embedding = weight("model.embed_tokens");
    let n = ids.len() - 1;
    let inputs: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let next = ids[i + 1] as usize;
            let embedded = normed(&embedding[next * DIM..][..DIM], &weight("mtp.pre_fc_norm_embedding"));
            let row: Vec<f64> = hidden[i * DIM..][..DIM].iter().map(|&x| x.into()).collect();
            let row = normed(&row, &weight("model.norm"));
            [embedded, normed(&row, &weight("mtp.pre_fc_norm_hidden"))].concat()
        })
        .collect();
    let mut h = product(&inputs, &weight("mtp.fc"));
    let norm_all = |h: &[Vec<f64>], w: &[f64]| h.iter().map(|row| normed(row, w)).collect::<Vec<_>>();
    let x = norm_all(&h, &of("input_layernorm"));
    let [q, k, v] = ["q", "k", "v"].map(|name| product(&x, &of(&format!("self_attn.{name}_proj"))));
    let (q_norm, k_norm) = (of("self_attn.q_norm"), of("self_attn.k_norm"));
    let mixed: Vec<Vec<f64>> = (0..n)
        .map(|t| {
            let heads = (0..N_HEADS).flat_map(|head| {
                let [query, gate] = [0, 1].map(|kind| &q[t][(2 * head + kind) * HEAD_DIM..][..HEAD_DIM]);
                let query = turned(query, &q_norm, t);
                let first = head / (N_HEADS / N_KV_HEADS) * HEAD_DIM;
                let scores: Vec<f64> = (0..=t)
                    .map(|s| {
                        let key = turned(&k[s][first..][..HEAD_DIM], &k_norm, s);
                        query.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>() / (HEAD_DIM as f64).sqrt()
                    })
                    .collect();
                let highest = scores.iter().copied().fold(f64::MIN, f64::max);
                let shares: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
                let sum: f64 = shares.iter().sum();
                let column =
                    |c: usize| shares.iter().enumerate().map(|(s, share)| share * v[s][first + c]).sum::<f64>() / sum;
                (0..HEAD_DIM).map(|c| column(c) * sigmoid(gate[c])).collect::<Vec<_>>()
            });
            heads.collect()
        })
        .collect();
    let add = |h: &mut [Vec<f64>], more: Vec<Vec<f64>>| {
        h.iter_mut().flatten().zip(more.into_iter().flatten()).for_each(|(h, more)| *h += more);
    };
    add(&mut h, product(&mixed, &of("self_attn.o_proj")));
    let x = norm_all(&h, &of("post_attention_layernorm"));
    let gated = |name: &str, x: &[Vec<f64>]| {
        let [gate, up] = ["gate", "up"].map(|part| product(x, &of(&format!("{name}.{part}_proj"))));
        let activated: Vec<Vec<f64>> = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| gate.iter().zip(up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect())
            .collect();
        product(&activated, &of(&format!("{name}.down_proj")))
    };
    let has_experts = model.tensors.contains_key("mtp.layers.0.mlp.gate.weight");
    let fed = match has_experts {
        false => gated("mlp", &x),
        true => x.iter().map(|row| of_experts(row, of, gated)).collect(),
    };
    add(&mut h, fed);
    let head = if model.tensors.contains_key("lm_head.weight") { weight("lm_head") } else { embedding };
    product(&norm_all(&h, &weight("mtp.norm")), &head)
}

/// A row of a mixture of experts with a shared one: the likeliest experts' results by their shares, which add up to 1.
fn of_experts(
    row: &[f64],
    of: impl Fn(&str) -> Vec<f64>,
    gated: impl Fn(&str, &[Vec<f64>]) -> Vec<Vec<f64>>,
) -> Vec<f64> {
    let row = [row.to_vec()];
    let logits = product(&row, &of("mlp.gate")).concat();
    let mut order: Vec<usize> = (0..N_EXPERTS).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(N_USED);
    let sum: f64 = order.iter().map(|&expert| logits[expert].exp()).sum();
    let shared = sigmoid(product(&row, &of("mlp.shared_expert_gate")).concat()[0]);
    let parts = order.iter().map(|&expert| (format!("mlp.experts.{expert}"), logits[expert].exp() / sum));
    let mut y = vec![0.0; DIM];
    for (name, share) in parts.chain([("mlp.shared_expert".into(), shared)]) {
        y.iter_mut().zip(&gated(&name, &row)[0]).for_each(|(y, x)| *y += share * x);
    }
    y
}

#[test]
fn mtp_head_with_experts_matches_its_definition() {
    let Some(checkpoint) = with_head_of_experts() else { return };
    let folder = checkpoint.write();
    let mut rng = Rng::new(7);
    for device in executors() {
        let model = load(&device, &folder);
        for n in [2, 9, 40] {
            let ids: Vec<u32> = (0..n).map(|_| rng.below(293) as u32).collect();
            let worst = difference(&checkpoint, &model, &ids);
            println!("{}: {n} tokens: {worst:.1e}", device.info().name);
            assert!(worst <= 2e-4, "{n} tokens: {worst:.1e}");
        }
        let (want, _) = ids_of(&mut model.session().unwrap(), &[9, 50, 3], &guessing(0, 20));
        let (ids, guessed) = ids_of(&mut model.session().unwrap(), &[9, 50, 3], &guessing(3, 20));
        assert_eq!(ids, want);
        assert!(guessed.drafted > 0, "{guessed:?}");
    }
}

/// Maximum difference between a model's head and the definition.
fn difference(checkpoint: &Checkpoint, model: &Model, ids: &[u32]) -> f64 {
    let trace = block_on(model.trace(ids)).unwrap();
    let want = definition(checkpoint, trace.hidden.last().unwrap(), ids).concat();
    let found = trace.mtp.unwrap();
    assert_eq!(found.len(), want.len());
    want.iter().zip(&found).map(|(want, &found)| (want - f64::from(found)).abs()).fold(0.0, f64::max)
}

#[test]
fn mtp_head_matches_its_definition() {
    let Some(checkpoint) = with_head() else { return };
    let folder = checkpoint.write();
    let mut rng = Rng::new(6);
    for device in executors() {
        let gguf = ModelFile::from_gguf_bytes(gguf(&checkpoint).bytes()).unwrap_or_else(|e| panic!("{e}"));
        let of_gguf = Model::from_file(&device, gguf, options()).unwrap_or_else(|e| panic!("{e}"));
        for model in [load(&device, &folder), of_gguf] {
            for n in [2, 3, 9, 40] {
                let ids: Vec<u32> = (0..n).map(|_| rng.below(293) as u32).collect();
                let worst = difference(&checkpoint, &model, &ids);
                println!("{}: {n} tokens within {worst:.1e}", device.info().name);
                assert!(worst < 2e-4, "{}: {n} tokens: {worst}", device.info().name);
            }
        }
    }
}

/// Input by which a copier's head predicts the token after the next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Embedding,
    Hidden,
}

/// A model of the same shapes with one token per channel that always continues with token `t + 7`: its layers add
/// nothing. Its head predicts the same, but a wrong token after a multiple of `wrong_every`.
fn copier(by: By, wrong_every: Option<usize>) -> Option<Checkpoint> {
    let mut model = with_head()?;
    let is_end =
        |name: &str| ["o_proj.weight", "out_proj.weight", "down_proj.weight"].iter().any(|end| name.ends_with(end));
    for (name, tensor) in &mut model.tensors {
        if is_end(name) {
            tensor.data.fill(0);
        }
    }
    // Row `to(t)` of a matrix meets channel t.
    let matrix = |to: &dyn Fn(usize) -> usize| {
        let mut values = vec![0.0; DIM * DIM];
        (0..DIM).for_each(|t| values[to(t) * DIM + t] = 1.0);
        values
    };
    let next = |t: usize| (t + 7) % DIM;
    model.tensors.insert("model.embed_tokens.weight".into(), stored(&[DIM, DIM], matrix(&|t| t)));
    model.tensors.insert("lm_head.weight".into(), stored(&[DIM, DIM], matrix(&next)));
    // The head's output depends on its latest token, or on the one before.
    let guessed = |t: usize| if wrong_every.is_some_and(|every| t.is_multiple_of(every)) { (t + 1) % DIM } else { t };
    let (zero, one) = (
        vec![0.0; DIM * DIM],
        match by {
            By::Embedding => matrix(&guessed),
            By::Hidden => matrix(&|t| guessed(next(t))),
        },
    );
    let halves = if by == By::Embedding { [one, zero] } else { [zero, one] };
    let rows = (0..DIM).flat_map(|row| halves.each_ref().map(|half| half[row * DIM..][..DIM].to_vec()).concat());
    model.tensors.insert("mtp.fc.weight".into(), stored(&[DIM, 2 * DIM], rows));
    model.config["vocab_size"] = DIM.into();
    model.config["tie_word_embeddings"] = false.into();
    Some(model)
}

pub fn guessing(n: u32, n_tokens: usize) -> GenerateOptions {
    GenerateOptions { mtp_tokens: n, ..GenerateOptions::greedy(n_tokens) }
}

pub fn ids_of(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Speculation) {
    let mut generation = session.generate_ids(prompt, options).unwrap_or_else(|e| panic!("{e}"));
    let mut ids = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        ids.push(piece.unwrap_or_else(|e| panic!("{e}")).id);
    }
    (ids, generation.speculation())
}

#[test]
fn correct_mtp_drafts_are_accepted_and_chained() {
    for by in [By::Embedding, By::Hidden] {
        let Some(checkpoint) = copier(by, None) else { return };
        let folder = checkpoint.write();
        for device in executors() {
            let model = load(&device, &folder);
            let want: Vec<u32> = (1..=40).map(|i| (3 + 7 * i) % DIM as u32).collect();
            // One of three draft tokens has no room: the state before them may be needed again.
            for (n, n_right) in [(1, 1), (2, 2), (3, 2), (5, 5)] {
                let (ids, guessed) = ids_of(&mut model.session().unwrap(), &[9, 50, 3], &guessing(n, 40));
                assert_eq!(ids, want, "{by:?}, {n} at a time");
                println!("{}: {by:?}, {n} at a time: {guessed:?}", device.info().name);
                assert!(
                    guessed.accepted == guessed.drafted && guessed.drafted > 0,
                    "{by:?}, {n} at a time: {guessed:?}"
                );
                // Prefill produces the first token; each pass gives the accepted draft tokens and one more.
                assert!(guessed.passes <= 39_usize.div_ceil(n_right + 1) + 1, "{by:?}, {n} at a time: {guessed:?}");
            }
        }
    }
}

#[test]
fn wrong_mtp_drafts_do_not_change_output() {
    let random = with_head();
    let models = [copier(By::Embedding, Some(3)), copier(By::Hidden, Some(4)), random];
    for (i, checkpoint) in models.into_iter().enumerate() {
        let Some(checkpoint) = checkpoint else { return };
        let folder = checkpoint.write();
        for device in executors() {
            let model = load(&device, &folder);
            // Longer than a software adapter's largest pass.
            let long: Vec<u32> = (0..140).map(|t| t * 5 % 64).collect();
            // A software GPU is a hundred times slower.
            let takes_all = !device.is_gpu() || common::is_full();
            if !takes_all && i > 0 {
                continue;
            }
            for prompt in [&[9, 50, 3][..], &long] {
                let (want, none) = ids_of(&mut model.session().unwrap(), prompt, &guessing(0, 30));
                assert_eq!(none, Speculation::default());
                let counts = if takes_all { &[1, 3, 7][..] } else { &[3] };
                for &n in counts {
                    let (ids, guessed) = ids_of(&mut model.session().unwrap(), prompt, &guessing(n, 30));
                    println!("{}: model {i}, {n} at a time: {guessed:?}", device.info().name);
                    assert_eq!(ids, want, "model {i}, {n} at a time");
                    assert!(i == 2 || (guessed.accepted > 0 && guessed.accepted < guessed.drafted), "{guessed:?}");
                    // Alternating with prompt lookup.
                    let options = GenerateOptions { prompt_lookup: 2, ..guessing(n, 30) };
                    assert_eq!(ids_of(&mut model.session().unwrap(), prompt, &options).0, want, "model {i}");
                }
            }
        }
    }
}

/// The MTP head drafts for several sequences of an engine, beside sampled ones: output equals that without drafts,
/// even after states with rejected drafts and for sequences that waited for pages.
#[test]
fn mtp_drafts_do_not_change_engine_output() {
    let random = with_head();
    let models = [copier(By::Embedding, None), copier(By::Hidden, Some(4)), random];
    for (i, checkpoint) in models.into_iter().enumerate() {
        let Some(checkpoint) = checkpoint else { return };
        let folder = checkpoint.write();
        for device in executors() {
            // A software GPU is a hundred times slower.
            if device.is_gpu() && i == 2 && !common::is_full() {
                continue;
            }
            let model = load(&device, &folder);
            let prompts: [Vec<u32>; 4] = [
                vec![9, 50, 3],
                (0..90).map(|t| t * 5 % 64).collect(),
                vec![11],
                (0..64).map(|t| t * 3 % 64).collect(),
            ];
            let requests: Vec<Request> = prompts
                .iter()
                .enumerate()
                .map(|(at, ids)| {
                    let greedy = GenerateOptions { ignore_eos: true, logprobs: Some(2), ..GenerateOptions::greedy(40) };
                    let drawn = GenerateOptions { temperature: 1.0, seed: Some(0), ..greedy.clone() };
                    Request::new(ids.clone(), if at == 3 { drawn } else { greedy })
                })
                .collect();
            let texts = |mtp_tokens: u32| {
                let options = EngineOptions { max_sequences: 8, mtp_tokens, ..EngineOptions::default() };
                let (engine, mut driver) = Engine::new(&model, &options).unwrap_or_else(|e| panic!("{e}"));
                let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
                while block_on(driver.step()).unwrap_or_else(|e| panic!("{e}")) {}
                let pieces = |mut stream: Stream| {
                    let mut pieces = Vec::new();
                    while let Some(piece) = block_on(stream.next()) {
                        pieces.push(piece.unwrap_or_else(|e| panic!("{e}")));
                    }
                    pieces
                };
                (streams.into_iter().map(pieces).collect::<Vec<_>>(), engine.stats())
            };
            let (want, without) = texts(0);
            assert_eq!(without.drafted_tokens, 0);
            for n in [1, 2, 6] {
                let (found, stats) = texts(n);
                let case = format!("{}: model {i}, {n} at a time: {stats:?}", device.info().name);
                println!("{case}");
                for (at, (found, want)) in found.iter().zip(&want).enumerate() {
                    assert_eq!(found, want, "text {at} on {case}");
                }
                assert!(stats.drafted_tokens > 0, "{case}");
                match i {
                    0 => assert_eq!(stats.accepted_tokens, stats.drafted_tokens, "{case}"),
                    1 => assert!(0 < stats.accepted_tokens && stats.accepted_tokens < stats.drafted_tokens, "{case}"),
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn mtp_session_continues_after_any_operation() {
    let Some(checkpoint) = copier(By::Hidden, Some(5)) else { return };
    let folder = checkpoint.write();
    for device in executors() {
        let model = load(&device, &folder);
        let follows = |last: u32, n: usize| (1..=n as u32).map(|i| (last + 7 * i) % DIM as u32).collect::<Vec<_>>();
        let mut session = model.session().unwrap();
        let guesses = |session: &mut Session, prompt: &[u32], n: u32| {
            let last = *prompt.last().or(session.tokens().last()).unwrap();
            let (ids, guessed) = ids_of(session, prompt, &guessing(n, 12));
            assert_eq!(ids, follows(last, 12));
            guessed.accepted
        };
        assert!(guesses(&mut session, &[1, 2, 3], 3) > 0);
        // No drafts were requested here, and the gap costs none later.
        guesses(&mut session, &[9], 0);
        assert!(guesses(&mut session, &[], 3) > 0);
        let before = session.snapshot().unwrap();
        session.truncate(7);
        assert!(guesses(&mut session, &[40, 41], 2) > 0);
        session.restore(&before).unwrap();
        assert!(guesses(&mut session, &[], 7) > 0);
        let saved = Folder::new();
        let path = saved.0.join("session");
        block_on(session.save(&path, "")).unwrap();
        let mut other = model.session().unwrap();
        other.load(&path).unwrap();
        assert!(guesses(&mut other, &[], 3) > 0);
        // A session file also fits the model without its head.
        let plain = LoadOptions { mtp_tokens: false, ..options() };
        let mut plain = Model::load(&device, &folder.0, plain).unwrap().session().unwrap();
        plain.load(&path).unwrap();
        guesses(&mut plain, &[], 0);
        // Leaves unread draft tokens.
        let mut generation = session.generate_ids(&[11], &guessing(7, 30)).unwrap();
        let ids: Vec<u32> = (0..5).map(|_| block_on(generation.next()).unwrap().unwrap().id).collect();
        assert_eq!(ids, follows(11, 5));
        assert!(guesses(&mut session, &[], 3) > 0);
    }
}

/// Unless requested, the head uses no memory, and session files are as without one.
#[test]
fn unrequested_mtp_head_is_not_loaded() {
    let Some(checkpoint) = with_head() else { return };
    let folder = checkpoint.write();
    let bytes = gguf(&checkpoint).bytes();
    let device = common::cpu();
    let open = |is_gguf| match is_gguf {
        true => ModelFile::from_gguf_bytes(bytes.clone()).unwrap(),
        false => ModelFile::open(&folder.0).unwrap(),
    };
    for is_gguf in [false, true] {
        let plain = LoadOptions { mtp_tokens: false, ..options() };
        let plans =
            [&plain, &options()].map(|options| Model::plan_file(&device.target(), &open(is_gguf), options).unwrap());
        // Rows are padded to whole blocks.
        let bytes_of = |shape: &[usize]| match (shape, is_gguf) {
            (&[rows, cols], false) => 2 * rows * cols.next_multiple_of(32),
            (&[rows, cols], true) => 4 * rows * cols.next_multiple_of(32),
            (shape, _) => 4 * shape[0],
        };
        let head: usize = HEAD.iter().map(|(_, shape)| bytes_of(shape)).sum();
        let more = plans[1].weights_bytes - plans[0].weights_bytes;
        assert_eq!(more, head as u64);
        assert!(plans[1].total_bytes() > plans[0].total_bytes() + more);
        let model = Model::from_file(&device, open(is_gguf), plain).unwrap();
        assert_eq!((model.config().n_layers(), model.config().blocks.len()), (4, 4));
        let notices = device.take_notices();
        assert!(notices.iter().any(|notice| notice.contains("multi-token prediction")), "{notices:?}");
        let refused = model.session().unwrap().generate_ids(&[1], &guessing(3, 4)).err().unwrap();
        assert!(matches!(&refused, Error::Option { option: "mtp_tokens", .. }), "{refused}");
        let model = Model::from_file(&device, open(is_gguf), options()).unwrap();
        assert_eq!((model.config().n_layers(), model.config().blocks.len()), (4, 5));
        assert_eq!(device.take_notices(), Vec::<String>::new());
    }
    let sampled = GenerateOptions { mtp_tokens: 2, seed: Some(0), ..GenerateOptions::default() };
    for (options, named) in [(sampled, "temperature 0"), (guessing(8, 4), "0 to 7")] {
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("mtp_tokens") && error.contains(named), "{error}");
    }
}

/// The head's tensors are validated like the model's.
#[test]
fn incomplete_mtp_head_is_refused_by_name() {
    let Some(checkpoint) = with_head() else { return };
    let refused = |named: &[&str], change: &dyn Fn(&mut Checkpoint)| {
        let mut changed = checkpoint.clone();
        change(&mut changed);
        let folder = changed.write();
        let error = match ModelFile::open(&folder.0) {
            Ok(file) => Model::plan_file(&Device::cpu().target(), &file, &options()).err(),
            Err(error) => Some(error),
        };
        let error = error.unwrap_or_else(|| panic!("{named:?} is not refused")).to_string();
        assert!(named.iter().all(|name| error.contains(name)), "`{error}` does not name {named:?}");
    };
    for (theirs, ours) in [
        ("mtp.pre_fc_norm_embedding", "blk.4.nextn.enorm.weight"),
        ("mtp.pre_fc_norm_hidden", "blk.4.nextn.hnorm.weight"),
        ("mtp.layers.0.self_attn.k_proj", "blk.4.attn_k.weight"),
        ("mtp.layers.0.mlp.up_proj", "blk.4.ffn_up.weight"),
    ] {
        let name = format!("{theirs}.weight");
        refused(&[ours, "missing"], &|changed| drop(changed.tensors.remove(&name)));
        refused(&[ours, "[4, 4]"], &|changed| drop(changed.tensors.insert(name.clone(), stored(&[4, 4], [0.0; 16]))));
    }
    refused(&["blk.4.nextn.eh_proj.weight", "[64, 64]"], &|changed| {
        drop(changed.tensors.insert("mtp.fc.weight".into(), stored(&[DIM, DIM], [0.0; DIM * DIM])));
    });
    // A head with unknown tensors is ignored.
    for name in ["mtp.layers.0.self_attn.gates.weight", "mtp.layers.1.input_layernorm.weight", "mtp.scale"] {
        let mut changed = checkpoint.clone();
        changed.tensors.insert(name.into(), stored(&[4], [0.0; 4]));
        let header = ModelFile::open(&changed.write().0).unwrap_or_else(|e| panic!("{e}")).header;
        assert!(header.mtp.is_none() && header.unread == ["multi-token prediction"], "{name}");
    }
    // Without its own norm it uses the model's.
    let mut changed = checkpoint.clone();
    changed.tensors.insert("mtp.norm.weight".into(), changed.tensors["model.norm.weight"].clone());
    let same = changed.clone().write();
    changed.tensors.remove("mtp.norm.weight");
    let without = changed.write();
    let mtp = |folder: &Folder| block_on(load(&common::cpu(), folder).trace(&[5, 6, 7])).unwrap().mtp;
    assert_eq!(mtp(&without), mtp(&same));
}
