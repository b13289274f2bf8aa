//! MTP heads that are stored like a layer after the last one: those of GLM 4.5 to 4.7, DeepSeek V3 and Ling 3, in both
//! formats, against their definition in f64.

use serde_json::json;
use tilewright::formats::{BlockType, Gguf};
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{LoadOptions, Model};

use super::TinyGguf;
use super::builder::{ARRAY, BOOL, F32, GgufFile, STRING, U32, array, text};
use super::checkpoint::{Checkpoint, Stored, checkpoint};
use super::common::shared::executors;
use super::common::{self, Rng, block_on};
use super::mtp::{guessing, ids_of, product, sigmoid, stored, values};

const N_TOKENS: usize = 293;

/// A tiny random model with a random head.
struct Headed {
    model: Checkpoint,
    /// The model's layers, after which the head is.
    n_layers: usize,
    /// Where the published names of attention begin.
    attention: &'static str,
}

impl Headed {
    fn new(name: &str, seed: u64) -> Option<Headed> {
        let (mut model, mut rng) = (checkpoint(name)?, Rng::new(seed));
        let n_layers = model.config["num_hidden_layers"].as_u64().unwrap() as usize;
        let (last, own) = (format!("model.layers.{}.", n_layers - 1), format!("model.layers.{n_layers}."));
        let of_last: Vec<_> =
            model.tensors.range(last.clone()..).take_while(|(name, _)| name.starts_with(&last)).collect();
        let shapes = of_last.into_iter().map(|(name, of)| (name[last.len()..].to_owned(), of.shape.clone()));
        let mut shapes: Vec<(String, Vec<u64>)> = shapes.collect();
        let is_ling = name == "ling3";
        let norm = if is_ling { "final_layernorm" } else { "shared_head.norm" };
        let [n, c] = [N_TOKENS as u64, 64];
        shapes.push(("eh_proj.weight".into(), vec![c, 2 * c]));
        shapes.extend([norm, "enorm", "hnorm"].map(|name| (format!("{name}.weight"), vec![c])));
        // Copies of the model's own, random here: the head must not read them.
        shapes.extend(["embed_tokens", "shared_head.head"].map(|name| (format!("{name}.weight"), vec![n, c])));
        for (name, shape) in shapes {
            let shape: Vec<usize> = shape.into_iter().map(|n| n as usize).collect();
            let (scale, centre) = match name.contains("norm") {
                true => (0.5, 1.0),
                false => (2.0 * (shape[shape.len() - 1] as f64).powf(-0.5), 0.0),
            };
            let len = shape.iter().product();
            let random: Vec<f64> = std::iter::repeat_with(|| centre + scale * rng.uniform()).take(len).collect();
            model.tensors.insert(format!("{own}{name}"), stored(&shape, random));
        }
        model.config["num_nextn_predict_layers"] = 1.into();
        let attention = if is_ling { "attention" } else { "self_attn" };
        Some(Headed { model, n_layers, attention })
    }

    fn config(&self, key: &str) -> usize {
        self.model.config[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    }

    fn weight(&self, name: &str) -> Vec<f64> {
        values(self.model.tensors.get(name).unwrap_or_else(|| panic!("{name}")))
    }

    fn of(&self, name: &str) -> Vec<f64> {
        self.weight(&format!("model.layers.{}.{name}", self.n_layers))
    }

    fn has(&self, name: &str) -> bool {
        self.model.tensors.contains_key(&format!("model.layers.{}.{name}", self.n_layers))
    }

    fn normed(&self, x: &[f64], weight: &[f64]) -> Vec<f64> {
        normed(x, weight, self.model.config["rms_norm_eps"].as_f64().unwrap())
    }

    /// The head's logits after each token but the last. `hidden`: the model's rows after its last layer.
    fn definition(&self, hidden: &[f32], ids: &[u32]) -> Vec<f64> {
        let (n, dim) = (ids.len() - 1, self.config("hidden_size"));
        let first = |names: [&str; 2]| names.map(|name| self.model.tensors.get(name)).into_iter().flatten().next();
        let embedding = values(first(["model.embed_tokens.weight", "model.word_embeddings.weight"]).unwrap());
        let output_norm = self.weight("model.norm.weight");
        let rows = (0..n).map(|i| {
            let embedded = &embedding[ids[i + 1] as usize * dim..][..dim];
            let row: Vec<f64> = hidden[i * dim..][..dim].iter().map(|&x| x.into()).collect();
            let row = self.normed(&row, &output_norm);
            [self.normed(embedded, &self.of("enorm.weight")), self.normed(&row, &self.of("hnorm.weight"))].concat()
        });
        let mut h = product(&rows.collect::<Vec<_>>(), &self.of("eh_proj.weight"));
        let norm_all = |h: &[Vec<f64>], name: &str| {
            let weight = self.of(&format!("{name}.weight"));
            h.iter().map(|row| self.normed(row, &weight)).collect::<Vec<_>>()
        };
        let add = |h: &mut [Vec<f64>], more: Vec<Vec<f64>>| {
            h.iter_mut().flatten().zip(more.into_iter().flatten()).for_each(|(h, more)| *h += more);
        };
        let x = norm_all(&h, "input_layernorm");
        add(&mut h, if self.has("self_attn.q_norm.weight") { self.grouped(&x) } else { self.latent(&x) });
        let x = norm_all(&h, "post_attention_layernorm");
        add(&mut h, x.iter().map(|row| self.experts(row)).collect());
        let norm = if self.has("final_layernorm.weight") { "final_layernorm" } else { "shared_head.norm" };
        product(&norm_all(&h, norm), &self.weight("lm_head.weight")).concat()
    }

    fn angles(&self, pos: usize, dims: usize) -> Vec<(f64, f64)> {
        let theta = self.model.config["rope_parameters"]["rope_theta"].as_f64().unwrap();
        let angle = |i| pos as f64 * theta.powf(-2.0 * i as f64 / dims as f64);
        (0..dims / 2).map(|i| (angle(i).cos(), angle(i).sin())).collect()
    }

    /// Attention of GLM: halves of each head's first half are rotated, after its norm.
    fn grouped(&self, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let [heads, kv_heads, dim] =
            ["num_attention_heads", "num_key_value_heads", "head_dim"].map(|key| self.config(key));
        let of = |name: &str| self.of(&format!("self_attn.{name}"));
        let [q, k, v] = ["q", "k", "v"].map(|name| {
            let bias = of(&format!("{name}_proj.bias"));
            let mut rows = product(x, &of(&format!("{name}_proj.weight")));
            rows.iter_mut().for_each(|row| row.iter_mut().zip(&bias).for_each(|(y, bias)| *y += bias));
            rows
        });
        let half = dim / 4;
        let turned = |row: &[f64], head: usize, weight: &[f64], pos: usize| {
            let mut y = self.normed(&row[head * dim..][..dim], weight);
            for (i, (cos, sin)) in self.angles(pos, 2 * half).into_iter().enumerate() {
                (y[i], y[i + half]) = (y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin);
            }
            y
        };
        let (q_norm, k_norm) = (of("q_norm.weight"), of("k_norm.weight"));
        let mixed: Vec<Vec<f64>> = (0..x.len())
            .map(|t| {
                let of_head = |head: usize| {
                    let shared = head / (heads / kv_heads);
                    let keys: Vec<Vec<f64>> = (0..=t).map(|s| turned(&k[s], shared, &k_norm, s)).collect();
                    let values: Vec<&[f64]> = v[..=t].iter().map(|row| &row[shared * dim..][..dim]).collect();
                    attended(&turned(&q[t], head, &q_norm, t), &keys, &values)
                };
                (0..heads).flat_map(of_head).collect()
            })
            .collect();
        product(&mixed, &of("o_proj.weight"))
    }

    /// Latent attention, with keys and values of all heads made of latents; with a gate per head where there is one.
    fn latent(&self, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let keys = ["num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"];
        let [heads, rank, nope, turned, value_dim] = keys.map(|key| self.config(key));
        let of = |name: &str| self.of(&format!("{}.{name}.weight", self.attention));
        let norm_all = |rows: Vec<Vec<f64>>, weight: Vec<f64>, len: usize| -> Vec<Vec<f64>> {
            rows.iter().map(|row| normed(&row[..len], &weight, 1e-6)).collect()
        };
        let q_rank = self.config("q_lora_rank");
        let queries = norm_all(product(x, &of("q_a_proj")), of("q_a_layernorm"), q_rank);
        let queries = product(&queries, &of("q_b_proj"));
        let down = product(x, &of("kv_a_proj_with_mqa"));
        let made = product(&norm_all(down.clone(), of("kv_a_layernorm"), rank), &of("kv_b_proj"));
        let rotated = |x: &[f64], pos: usize| -> Vec<f64> {
            let pairs = self.angles(pos, turned).into_iter().zip(x.chunks_exact(2));
            pairs.flat_map(|((cos, sin), x)| [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]).collect()
        };
        let gates = self.has("attention.g_proj.weight").then(|| product(x, &of("g_proj")));
        let mixed: Vec<Vec<f64>> = (0..x.len())
            .map(|t| {
                let of_head = |head: usize| {
                    let query = &queries[t][head * (nope + turned)..][..nope + turned];
                    let query = [&query[..nope], &rotated(&query[nope..], t)].concat();
                    let own = |s: usize| &made[s][head * (nope + value_dim)..][..nope + value_dim];
                    let keys: Vec<Vec<f64>> =
                        (0..=t).map(|s| [&own(s)[..nope], &rotated(&down[s][rank..], s)].concat()).collect();
                    let values: Vec<&[f64]> = (0..=t).map(|s| &own(s)[nope..]).collect();
                    let gate = gates.as_ref().map_or(1.0, |gates| sigmoid(gates[t][head]));
                    attended(&query, &keys, &values).into_iter().map(move |y| y * gate).collect::<Vec<_>>()
                };
                (0..heads).flat_map(of_head).collect()
            })
            .collect();
        product(&mixed, &of(if self.attention == "attention" { "dense" } else { "o_proj" }))
    }

    fn experts(&self, row: &[f64]) -> Vec<f64> {
        let x = [row.to_vec()];
        let fed = |name: &str| {
            let [gate, up] =
                ["gate", "up"].map(|part| product(&x, &self.of(&format!("mlp.{name}.{part}_proj.weight"))));
            let activated = gate[0].iter().zip(&up[0]).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
            product(&[activated], &self.of(&format!("mlp.{name}.down_proj.weight"))).concat()
        };
        let scores: Vec<f64> = product(&x, &self.of("mlp.gate.weight"))[0].iter().map(|&x| sigmoid(x)).collect();
        let named = ["mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"];
        let bias = self.of(named.into_iter().find(|name| self.has(name)).unwrap());
        let choices: Vec<f64> = scores.iter().zip(&bias).map(|(score, bias)| score + bias).collect();
        let best = |mut of: Vec<(usize, f64)>, n: usize| {
            of.sort_by(|a, b| b.1.total_cmp(&a.1));
            of.truncate(n);
            of
        };
        let size = choices.len() / self.config("n_group");
        let of_groups = choices.chunks_exact(size).map(|group| {
            let two = best(group.iter().copied().enumerate().collect(), 2);
            two.into_iter().map(|(_, choice)| choice).sum::<f64>()
        });
        let groups = best(of_groups.enumerate().collect(), self.config("topk_group"));
        let open =
            choices.iter().copied().enumerate().filter(|(i, _)| groups.iter().any(|(group, _)| i / size == *group));
        let chosen = best(open.collect(), self.config("num_experts_per_tok"));
        let sum: f64 = chosen.iter().map(|&(i, _)| scores[i]).sum();
        let scale = self.model.config["routed_scaling_factor"].as_f64().unwrap();
        let mut y = fed("shared_experts");
        for (i, _) in chosen {
            let share = scores[i] / sum * scale;
            y.iter_mut().zip(fed(&format!("experts.{i}"))).for_each(|(y, x)| *y += share * x);
        }
        y
    }

    /// The model's GGUF file with the head.
    fn gguf(&self, model: &str) -> TinyGguf {
        // The head's layer has attention.
        let (mut file, architecture) = copied(model, &[1]);
        file.set(&format!("{architecture}.block_count"), U32, (self.n_layers as u32 + 1).to_le_bytes());
        file.set(&format!("{architecture}.nextn_predict_layers"), U32, 1_u32.to_le_bytes());
        const NAMES: [(&str, &str); 30] = [
            ("eh_proj.", "nextn.eh_proj."),
            ("enorm.", "nextn.enorm."),
            ("hnorm.", "nextn.hnorm."),
            ("shared_head.norm.", "nextn.shared_head_norm."),
            ("shared_head.head.", "nextn.shared_head_head."),
            ("embed_tokens.", "nextn.embed_tokens."),
            ("final_layernorm.", "layer_output_norm."),
            ("input_layernorm.", "attn_norm."),
            ("self_attn.", "attention."),
            ("attention.q_proj.", "attn_q."),
            ("attention.k_proj.", "attn_k."),
            ("attention.v_proj.", "attn_v."),
            ("attention.q_norm.", "attn_q_norm."),
            ("attention.k_norm.", "attn_k_norm."),
            ("attention.o_proj.", "attn_output."),
            ("attention.dense.", "attn_output."),
            ("attention.g_proj.", "attn_gate."),
            ("attention.q_a_proj.", "attn_q_a."),
            ("attention.q_a_layernorm.", "attn_q_a_norm."),
            ("attention.q_b_proj.", "attn_q_b."),
            ("attention.kv_a_proj_with_mqa.", "attn_kv_a_mqa."),
            ("attention.kv_a_layernorm.", "attn_kv_a_norm."),
            ("attention.kv_b_proj.", "attn_kv_b."),
            ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("mlp.gate.expert_bias", "exp_probs_b.bias"),
            ("mlp.gate.weight", "ffn_gate_inp.weight"),
            ("mlp.shared_experts.gate_proj.", "ffn_gate_shexp."),
            ("mlp.shared_experts.up_proj.", "ffn_up_shexp."),
            ("mlp.shared_experts.down_proj.", "ffn_down_shexp."),
            ("mlp.experts.", "ffn_exps."),
        ];
        let floats =
            |tensor: &Stored| values(tensor).iter().flat_map(|&x| (x as f32).to_le_bytes()).collect::<Vec<u8>>();
        let (prefix, mut stacks) = (format!("model.layers.{}.", self.n_layers), std::collections::BTreeMap::new());
        for (name, tensor) in &self.model.tensors {
            let Some(name) = name.strip_prefix(&prefix) else { continue };
            let ours = NAMES.iter().fold(name.to_owned(), |name, (theirs, ours)| name.replace(theirs, ours));
            match ours.strip_prefix("ffn_exps.").and_then(|rest| rest.split_once('.')) {
                Some((expert, kind)) => {
                    let stack: &mut Vec<(usize, &Stored)> =
                        stacks.entry(format!("ffn_{}_exps", kind.trim_end_matches("_proj.weight"))).or_default();
                    stack.push((expert.parse().unwrap(), tensor));
                }
                None => {
                    // GLM's second norm is named by its place.
                    let norm = if model == "glm4-moe" { "post_attention_norm." } else { "ffn_norm." };
                    let ours = ours.replace("post_attention_layernorm.", norm);
                    file.put(&format!("blk.{}.{ours}", self.n_layers), &tensor.shape, 0, floats(tensor));
                }
            }
        }
        for (kind, mut stack) in stacks {
            stack.sort_by_key(|(expert, _)| *expert);
            let shape = [&[stack.len() as u64], &stack[0].1.shape[..]].concat();
            let data = stack.iter().flat_map(|(_, tensor)| floats(tensor)).collect();
            file.put(&format!("blk.{}.{kind}.weight", self.n_layers), &shape, 0, data);
        }
        file
    }
}

/// A tiny random model's GGUF file, with `more` at the end of its lists for all layers, and its architecture.
pub fn copied(model: &str, more: &[u32]) -> (TinyGguf, String) {
    let path = common::find_data(std::path::Path::new("tiny-random").join(model).join("model-bf16.gguf").as_path());
    let bytes = std::fs::read(path.unwrap()).unwrap();
    let header = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let mut file = TinyGguf { file: GgufFile::empty(), data: Vec::new() };
    for (key, value) in header.metadata.iter() {
        match (value.as_bool(), value.as_integer(), value.as_float(), header.metadata.get_str(key)) {
            (Some(value), ..) => file.set(key, BOOL, [u8::from(value)]),
            (_, Some(value), ..) => file.set(key, U32, (value as u32).to_le_bytes()),
            (_, _, Some(value), _) => file.set(key, F32, value.to_le_bytes()),
            (.., Ok(Some(value))) => file.set(key, STRING, text(value)),
            _ => {
                let listed = [&header.metadata.get_u32_array(key).unwrap().unwrap(), more].concat();
                let values = listed.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
                file.set(key, ARRAY, array(U32, listed.len() as u64, values));
            }
        }
    }
    for tensor in &header.tensors {
        let number = if tensor.block_type == BlockType::F32 { 0 } else { 30 };
        file.put(&tensor.name, &tensor.shape, number, tensor.bytes(&bytes).unwrap().to_vec());
    }
    let architecture = header.metadata.get_str("general.architecture").unwrap().unwrap();
    (file, architecture.to_owned())
}

fn normed(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

/// Values by their keys' shares.
fn attended(query: &[f64], keys: &[Vec<f64>], values: &[&[f64]]) -> Vec<f64> {
    let score = |key: &Vec<f64>| query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (query.len() as f64).sqrt();
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let highest = scores.iter().copied().fold(f64::MIN, f64::max);
    let shares: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let sum: f64 = shares.iter().sum();
    let column = |c: usize| shares.iter().zip(values).map(|(share, value)| share * value[c]).sum::<f64>() / sum;
    (0..values[0].len()).map(column).collect()
}

#[test]
fn mtp_heads_stored_as_layers_match_their_definition() {
    for (seed, (name, of)) in (30..).zip([
        ("glm4-moe", None),
        ("glm4-moe-lite", None),
        ("glm4-moe-lite", Some("deepseek_v3")),
        ("ling3", None),
    ]) {
        let Some(mut headed) = Headed::new(name, seed) else { return };
        if let Some(model_type) = of {
            headed.model.config["model_type"] = json!(model_type);
        }
        let (folder, mut rng) = (headed.model.write(), Rng::new(seed));
        for device in executors() {
            let options = || LoadOptions { kv_type: KvType::F32, mtp_tokens: true, ..LoadOptions::default() };
            let plain = Model::load(&device, &folder.0, LoadOptions { mtp_tokens: false, ..options() }).unwrap();
            let own = Model::load(&device, &folder.0, options()).unwrap_or_else(|e| panic!("{name}: {e}"));
            let file = ModelFile::from_gguf_bytes(headed.gguf(name).bytes()).unwrap_or_else(|e| panic!("{name}: {e}"));
            for header in [&file.header, &ModelFile::open(&folder.0).unwrap().header] {
                assert_eq!(header.unread, ["the MTP head's own embedding and output head"], "{name}");
            }
            let of_gguf = Model::from_file(&device, file, options()).unwrap_or_else(|e| panic!("{name}: {e}"));
            for (format, model) in [("folder", own), ("GGUF", of_gguf)] {
                let mut worst = 0.0f64;
                for n in [2, 9, 40] {
                    let ids: Vec<u32> = (0..n).map(|_| rng.below(N_TOKENS) as u32).collect();
                    let trace = block_on(model.trace(&ids)).unwrap();
                    let want = headed.definition(trace.hidden.last().unwrap(), &ids);
                    let found = trace.mtp.unwrap();
                    assert_eq!(found.len(), want.len());
                    let differences = want.iter().zip(&found).map(|(want, &found)| (want - f64::from(found)).abs());
                    worst = differences.fold(worst, f64::max);
                }
                println!("{name}, {format}, {}: within {worst:.1e}", device.info().name);
                assert!(worst <= 2e-4, "{name}, {format}, {}: {worst:.1e}", device.info().name);
                let (want, _) = ids_of(&mut plain.session().unwrap(), &[9, 50, 3], &guessing(0, 20));
                let (ids, guessed) = ids_of(&mut model.session().unwrap(), &[9, 50, 3], &guessing(3, 20));
                assert_eq!(ids, want, "{name}, {format}");
                assert!(guessed.drafted > 0, "{name}, {format}: {guessed:?}");
            }
        }
    }
}
