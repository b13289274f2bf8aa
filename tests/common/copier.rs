//! A model that continues any passage of its one endless text, for tests and benches of prompt lookup: it copies from
//! the prompt at the cost of a model of its size.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value, json};

/// Sizes that determine the cost.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub dim: usize,
    pub ffn_dim: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub vocab_size: usize,
    pub context_length: usize,
}

/// A folder with config.json and model.safetensors, removed on drop.
///
/// Blocks compute like any Llama's with random matrices, but add nothing: their output products are zero. So the head
/// sees the token's embedding, which equals the head's row for the next token.
pub struct Copier {
    pub folder: PathBuf,
    /// All tokens in the order of the text, which wraps around.
    order: Vec<u32>,
}

impl Copier {
    /// Random words determine the order of its text and its matrices.
    pub fn new(within: &Path, sizes: Sizes, mut word: impl FnMut() -> u32) -> Copier {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("copier-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = within.join(name);
        fs::create_dir_all(&folder).expect("the folder can be created");
        let mut order: Vec<u32> = (0..sizes.vocab_size as u32).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, word() as usize % (i + 1));
        }
        fs::write(folder.join("config.json"), config(sizes).to_string()).expect("the folder is writable");
        fs::write(folder.join("model.safetensors"), weights(sizes, &order, &mut word)).expect("the folder is writable");
        Copier { folder, order }
    }

    /// `n` tokens of the text from position `from`.
    pub fn passage(&self, from: usize, n: usize) -> Vec<u32> {
        self.order.iter().cycle().skip(from % self.order.len()).take(n).copied().collect()
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // A leftover folder lies in the build's own temporary folder.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn config(sizes: Sizes) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
    })
}

/// The file in F16: 1, -1, or random bits below 2^-4.
fn weights(sizes: Sizes, order: &[u32], word: &mut impl FnMut() -> u32) -> Vec<u8> {
    let Sizes { dim, ffn_dim, n_layers, n_heads, n_kv_heads, vocab_size, .. } = sizes;
    let kv_dim = dim / n_heads * n_kv_heads;
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut put = |name: String, shape: &[usize], halves: Vec<u16>| {
        let begin = data.len();
        data.extend(halves.into_iter().flat_map(u16::to_le_bytes));
        header.insert(name, json!({ "dtype": "F16", "shape": shape, "data_offsets": [begin, data.len()] }));
    };
    let ones = |n: usize| vec![0x3c00u16; n];
    let embedding: Vec<u16> = (0..vocab_size * dim).map(|_| 0x3c00 | (word() as u16 & 0x8000)).collect();
    let mut head = vec![0; vocab_size * dim];
    for (&id, &next) in order.iter().zip(order.iter().cycle().skip(1)) {
        let [from, to] = [id, next].map(|id| id as usize * dim);
        head[to..to + dim].copy_from_slice(&embedding[from..from + dim]);
    }
    put("model.embed_tokens.weight".into(), &[vocab_size, dim], embedding);
    put("lm_head.weight".into(), &[vocab_size, dim], head);
    put("model.norm.weight".into(), &[dim], ones(dim));
    for l in 0..n_layers {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            put(format!("model.layers.{l}.{norm}.weight"), &[dim], ones(dim));
        }
        for (product, shape) in [
            ("self_attn.q_proj", [dim, dim]),
            ("self_attn.k_proj", [kv_dim, dim]),
            ("self_attn.v_proj", [kv_dim, dim]),
            ("self_attn.o_proj", [dim, dim]),
            ("mlp.gate_proj", [ffn_dim, dim]),
            ("mlp.up_proj", [ffn_dim, dim]),
            ("mlp.down_proj", [dim, ffn_dim]),
        ] {
            let ends_a_half = product.ends_with("o_proj") || product.ends_with("down_proj");
            let n = shape[0] * shape[1];
            let halves = match ends_a_half {
                true => vec![0; n],
                // Any sign and mantissa, an exponent of 2^-5.
                false => (0..n).map(|_| 0x2800 | (word() as u16 & 0x83ff)).collect(),
            };
            put(format!("model.layers.{l}.{product}.weight"), &shape, halves);
        }
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}
