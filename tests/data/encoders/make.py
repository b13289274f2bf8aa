"""Makes the tiny random encoders of this folder and what they compute, in float64, from the published definitions.

    pip install numpy safetensors tokenizers gguf && python make.py

GGUF files have the keys and tensors that llama.cpp's converter writes (`conversion/{base,bert,qwen}.py`).
The forward passes follow transformers 5.23, `models/{bert,roberta,modernbert,qwen3,nomic_bert}/modeling_*.py`, and the weight
names of Nomic's own code; ids come from the tokenizers package. Nothing here is shared with the engine.
"""

import collections
import io
import json
import math
import pathlib
import pickle
import sys
import types
import zipfile

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

HERE = pathlib.Path(__file__).parent
WORDS = "the a of river engine quiet old tax law calm stream ran what is and ##s ##ly ##ing query : search document".split()
TEXTS = ["a quiet river", "", "the old engine ran quietly", "What is tax law?", "rivers and streams " * 9, "calm"]
PAIRS = [
    ("what is tax law", "the law of the old river"), ("what is tax law", "tax law"), ("what is tax law", ""),
    ("", "a calm stream"), ("a river", "the engine ran and ran " * 12), ("tax law and " * 9, "quiet rivers " * 11),
    ("engine " * 40, "old"), ("a calm stream", "a calm stream"),
]


def erf(x):
    return np.vectorize(math.erf)(x)


def gelu(x):
    return x / 2 * (1 + erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, theta, ntk=1):
    """x: [H, T, D]; halves are pairs. `ntk`: the factor of fixed NTK scaling, as GTE's code has it."""
    d = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * (theta * ntk) ** (-np.arange(0, d, 2) / d) / ntk ** (2 / d)
    cos, sin = np.cos(np.tile(angles, 2)), np.sin(np.tile(angles, 2))
    return x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin


def attention(q, k, v, heads, kv_heads, theta=None, seen=None, norm=None, bias=None, ntk=1):
    """q: [T, H D]; k, v: [T, Hkv D]; `seen` [T, T] is what a row may look at; `norm` is taken of queries and keys; `bias` [H, T, T]
    is added to the scores."""
    t = len(q)
    q, k, v = (x.reshape(t, n, -1).transpose(1, 0, 2) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    if norm:
        q, k = norm(q, k)
    if theta:
        q, k = rotate(q, theta, ntk), rotate(k, theta, ntk)
    k, v = np.repeat(k, heads // kv_heads, 0), np.repeat(v, heads // kv_heads, 0)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(t, -1)


class Weights(dict):
    """Random weights, rounded to what the file holds. `[]` gives them in float64."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def matrix(self, name, rows, cols, bias=False, scale=None):
        scale = 1.6 / math.sqrt(cols) if scale is None else scale
        self.put(name + ".weight", self.rng.normal(size=(rows, cols)) * scale)
        if bias:
            self.put(name + ".bias", self.rng.normal(size=rows) * 0.3)

    def norm(self, name, dim, bias=False):
        self.put(name + ".weight", 1 + self.rng.normal(size=dim) * 0.2)
        if bias:
            self.put(name + ".bias", self.rng.normal(size=dim) * 0.2)

    def put(self, name, values):
        super().__setitem__(name, values.astype(np.float16))

    def __getitem__(self, name):
        return super().__getitem__(name).astype(np.float64)

    def linear(self, name, x):
        y = x @ self[name + ".weight"].T
        return y + self[name + ".bias"] if name + ".bias" in self else y

    def normed(self, name, x, eps):
        return layer_norm(x, self[name + ".weight"], self[name + ".bias"] if name + ".bias" in self else None, eps)


def bert(w, c, prefix, ids, types, seen=None):
    first = c["pad_token_id"] + 1 if c["model_type"] != "bert" else 0
    e = prefix + "embeddings."
    h = w[e + "word_embeddings.weight"][ids] + w[e + "token_type_embeddings.weight"][types]
    h = h + w[e + "position_embeddings.weight"][first + np.arange(len(ids))]
    eps = c["layer_norm_eps"]
    h = w.normed(e + "LayerNorm", h, eps)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        q, k, v = (w.linear(p + "attention.self." + part, h) for part in ("query", "key", "value"))
        mixed = attention(q, k, v, c["num_attention_heads"], c["num_attention_heads"], seen=seen)
        h = w.normed(p + "attention.output.LayerNorm", h + w.linear(p + "attention.output.dense", mixed), eps)
        up = gelu(w.linear(p + "intermediate.dense", h))
        h = w.normed(p + "output.LayerNorm", h + w.linear(p + "output.dense", up), eps)
    return h


def bert_weights(w, c, prefix):
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    e = prefix + "embeddings."
    w.matrix(e + "word_embeddings", c["vocab_size"], dim, scale=1)
    w.matrix(e + "position_embeddings", c["max_position_embeddings"], dim, scale=0.5)
    w.matrix(e + "token_type_embeddings", c["type_vocab_size"], dim, scale=0.5)
    w.norm(e + "LayerNorm", dim, True)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            w.matrix(p + part, dim, dim, True)
        w.norm(p + "attention.output.LayerNorm", dim, True)
        w.matrix(p + "intermediate.dense", ffn, dim, True)
        w.matrix(p + "output.dense", dim, ffn, True)
        w.norm(p + "output.LayerNorm", dim, True)


def distance_bias(table, t, n_buckets, max_distance):
    """[H, T, T]: half of the buckets for keys after the query; of a side's, half for one distance each."""
    n = np.arange(t)[:, None] - np.arange(t)[None]
    half = n_buckets // 2
    exact = half // 2
    far = np.log(np.maximum(abs(n), 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (far * np.float32(half - exact)).astype(int), half - 1)
    return table[half * (n < 0) + np.where(abs(n) < exact, abs(n), far)].transpose(2, 0, 1)


def mpnet(w, c, prefix, ids):
    t, eps, heads, e = len(ids), c["layer_norm_eps"], c["num_attention_heads"], prefix + "embeddings."
    h = w[e + "word_embeddings.weight"][ids] + w[e + "position_embeddings.weight"][c["pad_token_id"] + 1 + np.arange(t)]
    h = w.normed(e + "LayerNorm", h, eps)
    bias = distance_bias(w[prefix + "encoder.relative_attention_bias.weight"], t, c["relative_attention_num_buckets"], 128)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        q, k, v = (w.linear(p + f"attention.attn.{part}", h) for part in "qkv")
        mixed = attention(q, k, v, heads, heads, bias=bias)
        h = w.normed(p + "attention.LayerNorm", h + w.linear(p + "attention.attn.o", mixed), eps)
        h = w.normed(p + "output.LayerNorm", h + w.linear(p + "output.dense", gelu(w.linear(p + "intermediate.dense", h))), eps)
    return h


def mpnet_weights(w, c, prefix):
    dim, ffn, e = c["hidden_size"], c["intermediate_size"], prefix + "embeddings."
    w.matrix(e + "word_embeddings", c["vocab_size"], dim, scale=1)
    w.matrix(e + "position_embeddings", c["max_position_embeddings"], dim, scale=0.5)
    w.norm(e + "LayerNorm", dim, True)
    w.matrix(prefix + "encoder.relative_attention_bias", c["relative_attention_num_buckets"], c["num_attention_heads"], scale=2)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        for part in "qkvo":
            w.matrix(p + f"attention.attn.{part}", dim, dim, True)
        w.norm(p + "attention.LayerNorm", dim, True)
        w.matrix(p + "intermediate.dense", ffn, dim, True)
        w.matrix(p + "output.dense", dim, ffn, True)
        w.norm(p + "output.LayerNorm", dim, True)


def modernbert(w, c, ids):
    t, eps, activation = len(ids), c["norm_eps"], {"gelu": gelu, "silu": silu}[c["hidden_activation"]]
    h = w.normed("model.embeddings.norm", w["model.embeddings.tok_embeddings.weight"][ids], eps)
    far = np.abs(np.arange(t)[:, None] - np.arange(t)[None])
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        x = h if n == 0 else w.normed(p + "attn_norm", h, eps)
        is_global = n % c.get("global_attn_every_n_layers", 3) == 0
        theta = c["global_rope_theta"] if is_global else c["local_rope_theta"]
        seen = None if is_global else far <= c["local_attention"] // 2
        q, k, v = np.split(w.linear(p + "attn.Wqkv", x), 3, -1)
        heads = c["num_attention_heads"]
        h = h + w.linear(p + "attn.Wo", attention(q, k, v, heads, heads, theta, seen))
        value, gate = np.split(w.linear(p + "mlp.Wi", w.normed(p + "mlp_norm", h, eps)), 2, -1)
        h = h + w.linear(p + "mlp.Wo", activation(value) * gate)
    return w.normed("model.final_norm", h, eps)


def modernbert_weights(w, c):
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    w.matrix("model.embeddings.tok_embeddings", c["vocab_size"], dim, scale=1)
    w.norm("model.embeddings.norm", dim)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        if n:
            w.norm(p + "attn_norm", dim)
        w.matrix(p + "attn.Wqkv", 3 * dim, dim)
        w.matrix(p + "attn.Wo", dim, dim)
        w.norm(p + "mlp_norm", dim)
        w.matrix(p + "mlp.Wi", 2 * ffn, dim)
        w.matrix(p + "mlp.Wo", dim, ffn)
    w.norm("model.final_norm", dim)


def qwen3(w, c, ids):
    t, eps, heads, kv_heads = len(ids), c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"]
    h = w["embed_tokens.weight"][ids]
    for n in range(c["num_hidden_layers"]):
        p = f"layers.{n}."
        x = rms_norm(h, w[p + "input_layernorm.weight"], eps)
        q, k, v = (w.linear(p + f"self_attn.{part}_proj", x) for part in "qkv")
        norms = [w[p + f"self_attn.{part}_norm.weight"] for part in "qk"]
        norm = lambda q, k: (rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps))  # noqa: E731, B023
        mixed = attention(q, k, v, heads, kv_heads, c["rope_theta"], np.tri(t, dtype=bool), norm)
        h = h + w.linear(p + "self_attn.o_proj", mixed)
        x = rms_norm(h, w[p + "post_attention_layernorm.weight"], eps)
        h = h + w.linear(p + "mlp.down_proj", silu(w.linear(p + "mlp.gate_proj", x)) * w.linear(p + "mlp.up_proj", x))
    return rms_norm(h, w["norm.weight"], eps)


def qwen3_weights(w, c):
    dim, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    w.matrix("embed_tokens", c["vocab_size"], dim, scale=1)
    for n in range(c["num_hidden_layers"]):
        p = f"layers.{n}."
        w.norm(p + "input_layernorm", dim)
        w.matrix(p + "self_attn.q_proj", c["num_attention_heads"] * d, dim)
        w.matrix(p + "self_attn.k_proj", c["num_key_value_heads"] * d, dim)
        w.matrix(p + "self_attn.v_proj", c["num_key_value_heads"] * d, dim)
        w.matrix(p + "self_attn.o_proj", dim, c["num_attention_heads"] * d)
        w.norm(p + "self_attn.q_norm", d)
        w.norm(p + "self_attn.k_norm", d)
        w.norm(p + "post_attention_layernorm", dim)
        w.matrix(p + "mlp.gate_proj", ffn, dim)
        w.matrix(p + "mlp.up_proj", ffn, dim)
        w.matrix(p + "mlp.down_proj", dim, ffn)
    w.norm("norm", dim)


def nomic(w, c, ids, types):
    eps, heads = c["layer_norm_epsilon"], c["n_head"]
    h = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][types]
    h = w.normed("emb_ln", h, eps)
    for n in range(c["n_layer"]):
        p = f"encoder.layers.{n}."
        q, k, v = np.split(w.linear(p + "attn.Wqkv", h), 3, -1)
        mixed = attention(q, k, v, heads, heads, c["rotary_emb_base"])
        h = w.normed(p + "norm1", h + w.linear(p + "attn.out_proj", mixed), eps)
        every = c.get("moe_every_n_layers", 0)
        if every and n % every == 1:
            made = nomic_experts(w, c, p + "mlp.", h)
        elif c["activation_function"] == "gelu":
            made = w.linear(p + "mlp.fc2", gelu(w.linear(p + "mlp.fc1", h)))
        else:
            made = w.linear(p + "mlp.fc2", w.linear(p + "mlp.fc11", h) * silu(w.linear(p + "mlp.fc12", h)))
        h = w.normed(p + "norm2", h + made, eps)
    return h


def nomic_experts(w, c, p, x):
    shares = softmax(w.linear(p + "router.layer", x))
    w1, w2 = (w[p + f"experts.mlp.w{i}"].reshape(c["num_experts"], c["n_inner"], c["n_embd"]) for i in (1, 2))
    y = np.zeros_like(x)
    for t, share in enumerate(shares):
        for e in np.argsort(-share, kind="stable")[: c["moe_top_k"]]:
            y[t] += share[e] * (gelu(w1[e] @ x[t]) @ w2[e])
    return y + w[p + "experts.bias"] if p + "experts.bias" in w else y


def nomic_weights(w, c):
    dim, ffn = c["n_embd"], c["n_inner"]
    w.matrix("embeddings.word_embeddings", c["vocab_size"], dim, scale=1)
    w.matrix("embeddings.token_type_embeddings", c["type_vocab_size"], dim, scale=0.5)
    w.norm("emb_ln", dim, True)
    for n in range(c["n_layer"]):
        p = f"encoder.layers.{n}."
        w.matrix(p + "attn.Wqkv", 3 * dim, dim)
        w.matrix(p + "attn.out_proj", dim, dim)
        w.norm(p + "norm1", dim, True)
        w.matrix(p + "mlp.fc11", ffn, dim)
        w.matrix(p + "mlp.fc12", ffn, dim)
        w.matrix(p + "mlp.fc2", dim, ffn)
        w.norm(p + "norm2", dim, True)


def nomic_moe_weights(w, c):
    dim, ffn = c["n_embd"], c["n_inner"]
    w.matrix("embeddings.word_embeddings", c["vocab_size"], dim, scale=1)
    w.matrix("embeddings.token_type_embeddings", c["type_vocab_size"], dim, scale=0.5)
    w.norm("emb_ln", dim, True)
    for n in range(c["n_layer"]):
        p = f"encoder.layers.{n}."
        w.matrix(p + "attn.Wqkv", 3 * dim, dim, True)
        w.matrix(p + "attn.out_proj", dim, dim, True)
        w.norm(p + "norm1", dim, True)
        if n % c["moe_every_n_layers"] == 1:
            w.matrix(p + "mlp.router.layer", c["num_experts"], dim)
            for i in (1, 2):
                w.put(p + f"mlp.experts.mlp.w{i}", w.rng.normal(size=(c["num_experts"] * ffn, dim)) * 0.3)
            w.put(p + "mlp.experts.bias", w.rng.normal(size=dim) * 0.3)
        else:
            w.matrix(p + "mlp.fc1", ffn, dim, True)
            w.matrix(p + "mlp.fc2", dim, ffn, True)
        w.norm(p + "norm2", dim, True)


def gte(w, c, prefix, ids):
    eps, heads = c["layer_norm_eps"], c["num_attention_heads"]
    h = w[prefix + "embeddings.word_embeddings.weight"][ids]
    if c["type_vocab_size"]:
        h = h + w[prefix + "embeddings.token_type_embeddings.weight"][0]
    h = w.normed(prefix + "embeddings.LayerNorm", h, eps)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        q, k, v = np.split(w.linear(p + "attention.qkv_proj", h), 3, -1)
        mixed = attention(q, k, v, heads, heads, c["rope_theta"], ntk=(c["rope_scaling"] or {"factor": 1})["factor"])
        h = w.normed(p + "attn_ln", h + w.linear(p + "attention.o_proj", mixed), eps)
        up, gate = np.split(w.linear(p + "mlp.up_gate_proj", h), 2, -1)
        h = w.normed(p + "mlp_ln", h + w.linear(p + "mlp.down_proj", gelu(gate) * up), eps)
    return h


def gte_weights(w, c, prefix):
    dim, ffn = c["hidden_size"], c["intermediate_size"]
    w.matrix(prefix + "embeddings.word_embeddings", c["vocab_size"], dim, scale=1)
    if c["type_vocab_size"]:
        w.matrix(prefix + "embeddings.token_type_embeddings", c["type_vocab_size"], dim, scale=0.5)
    w.norm(prefix + "embeddings.LayerNorm", dim, True)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}encoder.layer.{n}."
        w.matrix(p + "attention.qkv_proj", 3 * dim, dim, True)
        w.matrix(p + "attention.o_proj", dim, dim, True)
        w.norm(p + "attn_ln", dim, True)
        w.matrix(p + "mlp.up_gate_proj", 2 * ffn, dim)
        w.matrix(p + "mlp.down_proj", dim, ffn, True)
        w.norm(p + "mlp_ln", dim, True)


def eurobert(w, c, prefix, ids):
    eps, heads, kv_heads = c["rms_norm_eps"], c["num_attention_heads"], c["num_key_value_heads"]
    h = w[prefix + "embed_tokens.weight"][ids]
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}layers.{n}."
        x = rms_norm(h, w[p + "input_layernorm.weight"], eps)
        q, k, v = (w.linear(p + f"self_attn.{part}_proj", x) for part in "qkv")
        h = h + w.linear(p + "self_attn.o_proj", attention(q, k, v, heads, kv_heads, c["rope_theta"]))
        x = rms_norm(h, w[p + "post_attention_layernorm.weight"], eps)
        h = h + w.linear(p + "mlp.down_proj", silu(w.linear(p + "mlp.gate_proj", x)) * w.linear(p + "mlp.up_proj", x))
    return rms_norm(h, w[prefix + "norm.weight"], eps)


def eurobert_weights(w, c, prefix):
    dim, ffn, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    w.matrix(prefix + "embed_tokens", c["vocab_size"], dim, scale=1)
    for n in range(c["num_hidden_layers"]):
        p = f"{prefix}layers.{n}."
        w.norm(p + "input_layernorm", dim)
        for part, heads in zip("qkv", ("attention", "key_value", "key_value")):
            w.matrix(p + f"self_attn.{part}_proj", c[f"num_{heads}_heads"] * d, dim)
        w.matrix(p + "self_attn.o_proj", dim, c["num_attention_heads"] * d)
        w.norm(p + "post_attention_layernorm", dim)
        w.matrix(p + "mlp.gate_proj", ffn, dim)
        w.matrix(p + "mlp.up_proj", ffn, dim)
        w.matrix(p + "mlp.down_proj", dim, ffn)
    w.norm(prefix + "norm", dim)


def t5(w, c, ids):
    eps, heads, d = c["layer_norm_epsilon"], c["num_heads"], c["d_kv"]
    h = w["shared.weight"][ids]
    table = w["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    bias = distance_bias(table, len(ids), c["relative_attention_num_buckets"], c["relative_attention_max_distance"])
    for n in range(c["num_layers"]):
        p = f"encoder.block.{n}.layer.0."
        x = rms_norm(h, w[p + "layer_norm.weight"], eps)
        q, k, v = (w.linear(p + f"SelfAttention.{part}", x) for part in "qkv")
        # Scores are not divided.
        h = h + w.linear(p + "SelfAttention.o", attention(q * math.sqrt(d), k, v, heads, heads, bias=bias))
        p = f"encoder.block.{n}.layer.1."
        x = rms_norm(h, w[p + "layer_norm.weight"], eps)
        p += "DenseReluDense."
        if c["feed_forward_proj"] == "gated-gelu":
            gate = w.linear(p + "wi_0", x)
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            made = gate * w.linear(p + "wi_1", x)
        else:
            made = np.maximum(w.linear(p + "wi", x), 0)
        h = h + w.linear(p + "wo", made)
    return rms_norm(h, w["encoder.final_layer_norm.weight"], eps)


def t5_weights(w, c):
    dim, ffn, inner = c["d_model"], c["d_ff"], c["num_heads"] * c["d_kv"]
    w.matrix("shared", c["vocab_size"], dim, scale=1)
    for n in range(c["num_layers"]):
        p = f"encoder.block.{n}.layer.0."
        for part in "qkv":
            w.matrix(p + f"SelfAttention.{part}", inner, dim, scale=0.3)
        w.matrix(p + "SelfAttention.o", dim, inner)
        if n == 0:
            w.matrix(p + "SelfAttention.relative_attention_bias", c["relative_attention_num_buckets"], c["num_heads"], scale=2)
        w.norm(p + "layer_norm", dim)
        p = f"encoder.block.{n}.layer.1."
        for part in ("wi_0", "wi_1") if c["feed_forward_proj"] == "gated-gelu" else ("wi",):
            w.matrix(p + "DenseReluDense." + part, ffn, dim)
        w.matrix(p + "DenseReluDense.wo", dim, ffn)
        w.norm(p + "layer_norm", dim)
    w.norm("encoder.final_layer_norm", dim)


def wordpiece(*further):
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz?"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + WORDS + letters + ["##" + c for c in letters[:26]] + list(further)
    vocab = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"] + [token for token in further if token == "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def byte_level(special, further=()):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("Ġ", "the"), ("r", "i"), ("l", "y"), *further]
    tokens = special + alphabet + ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def write(name, config, weights, tokenizer, cases, **others):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    others = {"config.json": config} | ({"cases.json": cases} if cases else {}) | others
    for file, content in others.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(content, indent=1 if file == "config.json" else None) + "\n")
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer.to_str() + "\n")
    save_file({name: dict.__getitem__(weights, name) for name in weights}, folder / "model.safetensors")


def write_gguf(path, arch, n_layers, add_keys, weights, rename=lambda name: name):
    """`rename` gives the name that the converter looks up."""
    writer = gguf.GGUFWriter(HERE / path, gguf.MODEL_ARCH_NAMES[arch])
    add_keys(writer)
    names = gguf.get_tensor_name_map(arch, n_layers)
    for name in weights:
        values = dict.__getitem__(weights, name)
        plain = names.get_name(rename(name), try_suffixes=(".weight", ".bias")) or name
        is_table = plain.startswith(("token_types", "position_embd"))
        writer.add_tensor(plain, values if values.ndim >= 2 and not is_table else values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer, c):
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])


def add_vocab(writer, tokenizer, pre, **ids):
    """A byte-level vocabulary, or a WordPiece vocabulary if `pre` is None."""
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    if pre is None:
        # A space in front of what begins a word.
        phantom = lambda i, token: token if i in special else token[2:] if token.startswith("##") else "\u2581" + token  # noqa: E731
        tokens = [phantom(i, token) for i, token in enumerate(tokens)]
    writer.add_tokenizer_model("bert" if pre is None else "gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))])
    if pre is not None:
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(merge) for merge in merges])
    for name, id in ids.items():
        getattr(writer, f"add_{name}_token_id")(id)


def numbers(x):
    return [float(f"{v:.8g}") for v in np.ravel(x)]


def scored(tokenizer, max_tokens, score, sigmoid):
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    cases = []
    for a, b in PAIRS:
        encoding = tokenizer.encode(a, b)
        logit = score(np.array(encoding.ids), np.array(encoding.type_ids))
        value = 1 / (1 + math.exp(-logit)) if sigmoid else logit
        cases.append({"a": a, "b": b, "ids": encoding.ids, "logit": float(f"{logit:.9g}"), "score": float(f"{value:.9g}")})
    tokenizer.no_truncation()
    print([case["logit"] for case in cases])
    return {"pairs": cases}


def embedded(tokenizer, max_tokens, prompts, vector, texts=TEXTS):
    tokenizer.enable_truncation(max_tokens)
    cases = []
    for prompt in [None, *prompts]:
        for text in texts:
            ids = tokenizer.encode(prompts.get(prompt, "") + text).ids
            cases.append({"prompt": prompt, "text": text, "ids": ids, "vector": numbers(vector(np.array(ids)))})
    tokenizer.no_truncation()
    return {"texts": cases}


def unit(x):
    return x / np.linalg.norm(x)


def make_bert():
    tokenizer = wordpiece()
    c = {
        "architectures": ["BertForSequenceClassification"], "model_type": "bert", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "hidden_act": "gelu",
        "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        "id2label": {"0": "LABEL_0"},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"},
    }
    w = Weights(1)
    bert_weights(w, c, "bert.")
    w.matrix("bert.pooler.dense", 32, 32, True)
    w.matrix("classifier", 1, 32, True)

    def score(ids, types):
        first = bert(w, c, "bert.", ids, types)[0]
        return w.linear("classifier", np.tanh(w.linear("bert.pooler.dense", first)))[0]

    write("bert-reranker", c, w, tokenizer, scored(tokenizer, 40, score, False))

    def keys(writer):
        add_sizes(writer, c)
        writer.add_layer_norm_eps(1e-12)
        writer.add_causal_attention(False)
        writer.add_classifier_output_labels(["LABEL_0"])
        writer.add_token_type_count(2)
        add_vocab(writer, tokenizer, None, bos=2, eos=3, unk=1, sep=3, pad=0)

    # The converter leaves the pooler out, and with it what the scores are made of.
    kept = Weights(0)
    for name in w:
        if "pooler" not in name:
            new = name.replace("classifier.", "classifier.out_proj.").removeprefix("bert.")
            dict.__setitem__(kept, new, dict.__getitem__(w, name))
    write_gguf("bert-reranker/model.gguf", gguf.MODEL_ARCH.BERT, 2, keys, kept)


def make_roberta():
    tokenizer = byte_level(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    c = {
        "architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta",
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 40, "hidden_act": "gelu", "max_position_embeddings": 98, "type_vocab_size": 1,
        "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "id2label": {"0": "LABEL_0"},
    }
    w = Weights(2)
    bert_weights(w, c, "roberta.")
    w.matrix("classifier.dense", 24, 24, True)
    w.matrix("classifier.out_proj", 1, 24, True)

    def score(ids, types):
        assert not types.any()
        first = bert(w, c, "roberta.", ids, types)[0]
        return w.linear("classifier.out_proj", np.tanh(w.linear("classifier.dense", first)))[0]

    write("roberta-reranker", c, w, tokenizer, scored(tokenizer, 96, score, True))

    def keys(writer):
        # The converter cuts off what stands in front of the first position, rows and number.
        add_sizes(writer, c | {"max_position_embeddings": 96})
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_classifier_output_labels(["LABEL_0"])
        add_vocab(writer, tokenizer, "roberta-bpe", bos=0, eos=2, sep=2, pad=1)
        writer.add_token_type_count(1)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    cut = Weights(0)
    for name in w:
        values = dict.__getitem__(w, name)
        dict.__setitem__(cut, name, values[2:] if "position_embeddings" in name else values)
    write_gguf("roberta-reranker/model.gguf", gguf.MODEL_ARCH.BERT, 2, keys, cut, lambda name: name.removeprefix("roberta."))


def make_mpnet():
    """As all-mpnet-base-v2's files have it."""
    tokenizer = wordpiece()
    c = {
        "architectures": ["MPNetForMaskedLM"], "model_type": "mpnet", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "hidden_act": "gelu",
        "max_position_embeddings": 202, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "relative_attention_num_buckets": 32, "attention_probs_dropout_prob": 0.1,
    }
    w = Weights(9)
    mpnet_weights(w, c, "mpnet.")
    w.matrix("mpnet.pooler.dense", 24, 24, True)
    texts = [*TEXTS, "the old river ran " * 60]
    cases = embedded(tokenizer, 200, {}, lambda ids: unit(mpnet(w, c, "mpnet.", ids).mean(0)), texts)
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write("mpnet", c, w, tokenizer, cases, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling,
    })


def make_modernbert():
    tokenizer = wordpiece()
    c = {
        "architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert",
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 40, "hidden_activation": "gelu", "max_position_embeddings": 48, "norm_eps": 1e-5,
        "norm_bias": False, "attention_bias": False, "mlp_bias": False, "local_attention": 8, "global_attn_every_n_layers": 2,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 0, "classifier_pooling": "mean",
        "classifier_bias": False, "classifier_activation": "gelu", "id2label": {"0": "LABEL_0"},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"},
    }
    w = Weights(3)
    modernbert_weights(w, c)
    w.matrix("head.dense", 24, 24)
    w.norm("head.norm", 24)
    w.matrix("classifier", 1, 24, True, scale=0.3)

    def score(ids, types):
        pooled = modernbert(w, c, ids).mean(0)
        return w.linear("classifier", w.normed("head.norm", gelu(w.linear("head.dense", pooled)), c["norm_eps"]))[0]

    write("modernbert-reranker", c, w, tokenizer, scored(tokenizer, 48, score, True))

    def keys(writer):
        add_sizes(writer, c)
        add_modernbert(writer, c)
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["LABEL_0"])
        add_vocab(writer, tokenizer, None, bos=2, eos=3, unk=1, sep=3, pad=0)

    write_gguf("modernbert-reranker/model.gguf", gguf.MODEL_ARCH.MODERN_BERT, 2, keys, w, modernbert_name)


def add_modernbert(writer, c):
    writer.add_rope_freq_base(c["global_rope_theta"])
    writer.add_rope_freq_base_swa(c["local_rope_theta"])
    writer.add_layer_norm_rms_eps(c["norm_eps"])
    writer.add_layer_norm_eps(c["norm_eps"])
    writer.add_causal_attention(False)
    writer.add_sliding_window(c["local_attention"])
    if "global_attn_every_n_layers" in c:
        writer.add_sliding_window_pattern(c["global_attn_every_n_layers"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_vocab_size(c["vocab_size"])


def modernbert_name(name):
    return "classifier.out_proj." + name.removeprefix("classifier.") if name.startswith("classifier.") else name.removeprefix("model.")


def make_modernbert_bpe():
    """As ModernBERT's files have it: byte-level BPE, [CLS] and [SEP]. SiLU, as in some of its relatives."""
    tokenizer = byte_level(["[CLS]", "[SEP]", "[PAD]"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    c = {
        "architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert",
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 24, "hidden_activation": "silu", "max_position_embeddings": 64, "norm_eps": 1e-5, "local_attention": 6,
        "global_rope_theta": 80000.0, "local_rope_theta": 10000.0, "pad_token_id": 2, "classifier_pooling": "cls",
        "classifier_activation": "gelu", "id2label": {"0": "LABEL_0"},
    }
    w, head = Weights(6), Weights(7)
    modernbert_weights(w, c)
    head.matrix("head.dense", 16, 16)
    head.norm("head.norm", 16)
    head.matrix("classifier", 1, 16, True)

    def score(ids, types):
        first = modernbert(w, c, ids)[0]
        return head.linear("classifier", head.normed("head.norm", gelu(head.linear("head.dense", first)), c["norm_eps"]))[0]

    cases = embedded(tokenizer, 64, {}, lambda ids: unit(modernbert(w, c, ids)[0]), [*TEXTS, "cafe\u0301, 12 rivers\n"])
    both = Weights(0)
    for part in (w, head):
        for name in part:
            dict.__setitem__(both, name, dict.__getitem__(part, name))
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write("modernbert-bpe", c, both, tokenizer, cases | scored(tokenizer, 64, score, True), **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling,
    })

    def keys(pooling_type):
        def add(writer):
            add_sizes(writer, c)
            add_modernbert(writer, c)
            writer.add_string("modern-bert.hidden_activation", "silu")
            writer.add_pooling_type(pooling_type)
            if pooling_type == gguf.PoolingType.RANK:
                writer.add_classifier_output_labels(["LABEL_0"])
                writer.add_uint32("modern-bert.classifier.pooling_type", gguf.PoolingType.CLS)
            writer.add_add_bos_token(True)
            writer.add_add_eos_token(True)
            writer.add_add_sep_token(True)
            add_vocab(writer, tokenizer, "modern-bert", bos=0, eos=1, sep=1, pad=2)
        return add

    arch = gguf.MODEL_ARCH.MODERN_BERT
    write_gguf("modernbert-bpe/model.gguf", arch, 4, keys(gguf.PoolingType.CLS), w, modernbert_name)
    write_gguf("modernbert-bpe/reranker.gguf", arch, 4, keys(gguf.PoolingType.RANK), both, modernbert_name)


def modules(*kinds):
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [
        {"idx": i, "name": str(i), "path": places[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def make_qwen3():
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:0 <|endoftext|>:0", pair="$A:0 <|endoftext|>:0 $B:1 <|endoftext|>:1", special_tokens=[("<|endoftext|>", 0)]
    )
    c = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "max_position_embeddings": 160, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    w = Weights(4)
    qwen3_weights(w, c)
    prompts = {"query": "Instruct: find what answers\nQuery:", "document": ""}
    cases = embedded(tokenizer, 160, prompts, lambda ids: unit(qwen3(w, c, ids)[-1]))
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
               "pooling_mode_lasttoken": True, "include_prompt": True}
    write("qwen3-embedding", c, w, tokenizer, cases, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    })

    def keys(writer):
        add_sizes(writer, c)
        writer.add_head_count_kv(2)
        writer.add_key_length(12)
        writer.add_value_length(12)
        writer.add_rope_freq_base(1000000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_pooling_type(gguf.PoolingType.LAST)
        add_vocab(writer, tokenizer, "qwen2", bos=0, eos=0, eot=2, pad=0)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    write_gguf("qwen3-embedding/model.gguf", gguf.MODEL_ARCH.QWEN3, 2, keys, w, lambda name: "model." + name)


def make_qwen3_reranker():
    """As Qwen3-Reranker's model card computes scores; the head is not the embedding."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [("n", "o"), ("y", "e"), ("ye", "s")])
    no, yes = (tokenizer.token_to_id(answer) for answer in ("no", "yes"))
    c = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
        "attention_bias": False, "use_sliding_window": False, "sliding_window": None, "rope_scaling": None,
        "tie_word_embeddings": False,
    }
    w = Weights(8)
    qwen3_weights(w, c)
    w.matrix("lm_head", c["vocab_size"], 24)
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    prefix = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    usual = "Given a web search query, retrieve relevant passages that answer the query"
    around = [tokenizer.encode(text, add_special_tokens=False).ids for text in (prefix, suffix)]
    room = c["max_position_embeddings"] - sum(map(len, around))
    cases = []
    for instruction in (usual, "find what rhymes"):
        for a, b in PAIRS:
            text = f"<Instruct>: {instruction}\n<Query>: {a}\n<Document>: {b}"
            ids = around[0] + tokenizer.encode(text, add_special_tokens=False).ids[:room] + around[1]
            logits = w.linear("lm_head", qwen3(w, c, np.array(ids))[-1])
            logit = float(f"{logits[yes] - logits[no]:.9g}")
            score = float(f"{1 / (1 + math.exp(-logit)):.9g}")
            cases.append({"instruction": instruction, "a": a, "b": b, "ids": ids, "logit": logit, "score": score})
    named = Weights(0)
    for name in w:
        dict.__setitem__(named, name if name.startswith("lm_head") else "model." + name, dict.__getitem__(w, name))
    write("qwen3-reranker", c, named, tokenizer, {"pairs": cases}, **{
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
        ],
        "1_LogitScore/config.json": {"true_token_id": yes, "false_token_id": no},
    })

    def keys(writer):
        add_sizes(writer, c)
        writer.add_head_count_kv(2)
        writer.add_key_length(12)
        writer.add_value_length(12)
        writer.add_rope_freq_base(1000000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_chat_template([{
            "name": "rerank",
            "template": f"{prefix}<Instruct>: {usual}\n<Query>: {{query}}\n<Document>: {{document}}{suffix}",
        }])
        add_vocab(writer, tokenizer, "qwen2", bos=0, eos=2, pad=0)
        writer.add_add_bos_token(False)

    rows = dict.__getitem__(w, "lm_head.weight")[[yes, no]]
    kept = Weights(0)
    for name in named:
        if not name.startswith("lm_head"):
            dict.__setitem__(kept, name, dict.__getitem__(named, name))
    dict.__setitem__(kept, "cls.output.weight", rows)
    write_gguf("qwen3-reranker/model.gguf", gguf.MODEL_ARCH.QWEN3, 2, keys, kept)


def make_nomic():
    tokenizer = wordpiece()
    c = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": tokenizer.get_vocab_size(),
        "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 32, "n_positions": 64, "max_trained_positions": 48,
        "activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "prenorm": False,
        "use_rms_norm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": 2,
    }
    w = Weights(5)
    nomic_weights(w, c)
    prompts = {"query": "search query : ", "document": "search document : "}
    vector = lambda ids: unit(nomic(w, c, ids, np.zeros(len(ids), int)).mean(0))  # noqa: E731
    cases = embedded(tokenizer, 48, prompts, vector)
    write("nomic", c, w, tokenizer, cases, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    })
    # The same as transformers 5 writes it.
    v5 = Weights(5)
    for name in w:
        values = dict.__getitem__(w, name)
        for old, new in (
            ("encoder.layers", "layers"), ("emb_ln", "embeddings.LayerNorm"), ("attn.out_proj", "self_attn.o_proj"),
            ("fc11", "up_proj"), ("fc12", "gate_proj"), ("fc2", "down_proj"), ("norm1", "post_attention_layernorm"),
            ("norm2", "post_mlp_layernorm"),
        ):
            name = name.replace(old, new)
        if "attn.Wqkv" in name:
            for part, rows in zip("qkv", np.split(values, 3)):
                dict.__setitem__(v5, name.replace("attn.Wqkv", f"self_attn.{part}_proj"), np.ascontiguousarray(rows))
        else:
            dict.__setitem__(v5, name, values)
    write("nomic-v5", {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": c["vocab_size"], "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "hidden_act": "silu", "head_dim": 8,
        "max_position_embeddings": 48, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    }, v5, None, None)

    def keys(writer):
        writer.add_context_length(48)
        writer.add_embedding_length(24)
        writer.add_feed_forward_length(32)
        writer.add_block_count(2)
        writer.add_head_count(3)
        writer.add_layer_norm_eps(1e-12)
        writer.add_rope_freq_base(1000.0)
        writer.add_pooling_type(gguf.PoolingType.MEAN)

    write_gguf("nomic/model.gguf", gguf.MODEL_ARCH.NOMIC_BERT, 2, keys, w)


def late(tokenizer, markers, lengths, sees_masks, skipped, hidden, project):
    """What a late-interaction model makes of texts: ids with a marker behind the first, queries filled up with masks."""
    mask = tokenizer.token_to_id("[MASK]")
    skipped = {tokenizer.token_to_id(word) for word in skipped}
    kinds = []
    for kind, texts in enumerate((["What is tax law?", "", "rivers " * 20], TEXTS)):
        tokenizer.enable_truncation(lengths[kind] - 1)
        cases = []
        for text in texts:
            ids = tokenizer.encode(text).ids
            ids = [ids[0], markers[kind], *ids[1:]]
            n = len(ids)
            ids += [mask] * (lengths[0] - n) if kind == 0 else []
            seen = None if sees_masks else np.broadcast_to(np.arange(len(ids)) < n, (len(ids), len(ids)))
            vectors = project(hidden(np.array(ids), seen))
            kept = [i for i, id in enumerate(ids) if kind == 0 or id not in skipped]
            vectors = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))[kept]
            cases.append({"text": text, "ids": ids, "seen": len(ids) if sees_masks else n, "vectors": vectors})
        kinds.append(cases)
    tokenizer.no_truncation()
    scores = [[float((q["vectors"] @ d["vectors"].T).max(1).sum()) for d in kinds[1]] for q in kinds[0]]
    for case in kinds[0] + kinds[1]:
        case["vectors"] = numbers(case["vectors"])
    return {"queries": kinds[0], "documents": kinds[1], "scores": scores}


def make_colbert():
    """As colbertv2.0's files have it."""
    tokenizer = wordpiece("[MASK]", "[unused0]", "[unused1]")
    c = {
        "architectures": ["HF_ColBERT"], "model_type": "bert", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "hidden_act": "gelu",
        "max_position_embeddings": 40, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
    }
    w = Weights(10)
    bert_weights(w, c, "bert.")
    w.matrix("bert.pooler.dense", 24, 24, True)
    w.matrix("linear", 8, 24)
    hidden = lambda ids, seen: bert(w, c, "bert.", ids, 0 * ids, seen)  # noqa: E731
    markers = [tokenizer.token_to_id(f"[unused{i}]") for i in range(2)]
    cases = late(tokenizer, markers, [16, 24], False, "?", hidden, lambda h: w.linear("linear", h))
    write("colbert", c, w, tokenizer, cases, **{"artifact.metadata": {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]", "query_maxlen": 16,
        "doc_maxlen": 24, "attend_to_mask_tokens": False, "dim": 8, "mask_punctuation": True, "similarity": "cosine",
    }})


def make_pylate():
    """As PyLate writes a ModernBERT with two projections, whose mask tokens all see."""
    tokenizer = wordpiece("[MASK]")
    tokenizer.add_tokens(["[Q] ", "[D] "])
    c = {
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_activation": "gelu",
        "max_position_embeddings": 64, "norm_eps": 1e-5, "local_attention": 6, "global_rope_theta": 80000.0,
        "local_rope_theta": 10000.0, "pad_token_id": 0,
    }
    w = Weights(11)
    modernbert_weights(w, c)
    dense = [Weights(12), Weights(13)]
    dense[0].matrix("linear", 12, 16)
    dense[1].matrix("linear", 8, 12, True)
    project = lambda h: dense[1].linear("linear", gelu(dense[0].linear("linear", h)))  # noqa: E731
    markers = [tokenizer.token_to_id(marker) for marker in ("[Q] ", "[D] ")]
    cases = late(tokenizer, markers, [12, 20], True, ["river"], lambda ids, _: modernbert(w, c, ids), project)
    named = Weights(0)
    for name in w:
        dict.__setitem__(named, name.removeprefix("model."), dict.__getitem__(w, name))
    kinds = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense", "pylate.models.Dense.Dense"]
    identity, other = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.GELU"
    write("pylate", c, named, tokenizer, cases, **{
        "modules.json": [{"idx": i, "name": str(i), "path": f"{i}_Dense" if i else "", "type": kind} for i, kind in enumerate(kinds)],
        "1_Dense/config.json": {"in_features": 16, "out_features": 12, "bias": False, "activation_function": other},
        "2_Dense/config.json": {"in_features": 12, "out_features": 8, "bias": True, "activation_function": identity,
                                "module_input_name": "token_embeddings", "module_output_name": "token_embeddings", "use_residual": False},
        "config_sentence_transformers.json": {
            "model_type": "ColBERT", "prompts": {"query": "", "document": ""}, "default_prompt_name": None,
            "similarity_fn_name": "MaxSim", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12,
            "document_length": 20, "attend_to_expansion_tokens": True, "skiplist_words": ["river"], "do_query_expansion": True,
        },
    })
    for i, layer in enumerate(dense):
        save_file({name: dict.__getitem__(layer, name) for name in layer}, HERE / f"pylate/{i + 1}_Dense/model.safetensors")


def make_nomic_moe():
    """As nomic-embed-text-v2-moe's files have it. llama.cpp's converter leaves the bias of experts out."""
    tokenizer = wordpiece()
    c = {
        "activation_function": "gelu", "architectures": ["NomicBertModel"], "model_type": "nomic_bert",
        "vocab_size": tokenizer.get_vocab_size(), "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 32, "n_positions": 64,
        "max_trained_positions": 64, "layer_norm_epsilon": 1e-5, "type_vocab_size": 1, "prenorm": False, "use_rms_norm": None,
        "causal": False, "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": 8, "num_shared_experts": 0, "expert_choice_router": False,
        "moe_normalize_expert_weights": False, "moe_impl": "megablocks", "moe_resid_pdrop": 0.0, "ffn_div": 1,
        "router_aux_loss_coef": 0.1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "parallel_block": False,
        "fused_bias_fc": True, "pad_token_id": 1, "add_pooling_layer": False,
    }
    w = Weights(14)
    nomic_moe_weights(w, c)
    kept = Weights(0)
    for name in w:
        values = dict.__getitem__(w, name)
        if name.endswith("w2"):
            values = values.reshape(8, 32, 24).transpose(0, 2, 1)
        if name.endswith("w1"):
            values = values.reshape(8, 32, 24)
        if not name.endswith("experts.bias"):
            dict.__setitem__(kept, name + ".weight" * name.endswith(("w1", "w2")), np.ascontiguousarray(values))
    plain = Weights(0)
    for name in w:
        if not name.endswith("experts.bias"):
            dict.__setitem__(plain, name, dict.__getitem__(w, name))
    made = lambda w: embedded(tokenizer, 64, {}, lambda ids: unit(nomic(w, c, ids, 0 * ids).mean(0)))["texts"]  # noqa: E731
    write("nomic-moe", c, w, tokenizer, {"texts": made(w), "gguf": made(plain)}, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"),
    })

    def keys(writer):
        writer.add_context_length(64)
        writer.add_embedding_length(24)
        writer.add_feed_forward_length(32)
        writer.add_block_count(2)
        writer.add_head_count(3)
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_rope_freq_base(10000.0)
        add_vocab(writer, tokenizer, None, bos=2, eos=3, unk=1, sep=3, pad=0)

    write_gguf("nomic-moe/model.gguf", gguf.MODEL_ARCH.NOMIC_BERT_MOE, 2, keys, kept)


def make_gte():
    """As gte-multilingual's files have it, as an encoder and as a cross-encoder."""
    tokenizer = wordpiece()
    c = {
        "architectures": ["NewForSequenceClassification"], "model_type": "new", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32, "hidden_act": "gelu",
        "max_position_embeddings": 64, "type_vocab_size": 1, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
        "position_embedding_type": "rope", "rope_theta": 20000, "rope_scaling": {"factor": 8.0, "type": "ntk"}, "pack_qkv": True,
        "logn_attention_scale": False, "logn_attention_clip1": False, "unpad_inputs": True, "use_memory_efficient_attention": True,
        "pad_token_id": 1, "classifier_dropout": 0.0, "id2label": {"0": "LABEL_0"},
    }
    w = Weights(15)
    gte_weights(w, c, "new.")
    w.matrix("new.pooler.dense", 24, 24, True)
    w.matrix("classifier", 1, 24, True)
    score = lambda ids, _: w.linear("classifier", np.tanh(w.linear("new.pooler.dense", gte(w, c, "new.", ids)[0])))[0]  # noqa: E731
    cases = embedded(tokenizer, 64, {}, lambda ids: unit(gte(w, c, "new.", ids)[0])) | scored(tokenizer, 64, score, True)
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write("gte", c, w, tokenizer, cases, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling,
    })


def make_eurobert():
    """Llama's layers, without a causal mask."""
    tokenizer = wordpiece()
    c = {
        "architectures": ["EuroBertForMaskedLM"], "model_type": "eurobert", "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 32, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 250000,
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>", "mask_token": "<|mask|>",
        "clf_pooling": "late", "pretraining_tp": 1, "tie_word_embeddings": False,
    }
    w = Weights(16)
    eurobert_weights(w, c, "model.")
    w.matrix("lm_head", 4, c["hidden_size"])
    write("eurobert", c, w, tokenizer, embedded(tokenizer, 64, {}, lambda ids: unit(eurobert(w, c, "model.", ids).mean(0))))


def jina3(w, c, ids, task=None):
    """XLM-RoBERTa with rotated heads, by the names of Jina's code. With a task, factors of its number are added to all matrices,
    whose sums are rounded to their type: of layers B A, of embeddings A B."""

    def matrix(module):
        if module + ".parametrizations.weight.original" not in w:
            return w[module + ".weight"]
        stem = module + ".parametrizations.weight."
        values = w[stem + "original"]
        if task is not None:
            a, b = (w[stem + f"0.lora_{x}"][task] for x in "AB")
            change = a @ b if "embeddings." in module else b @ a
            values = (values + c["lora_alpha"] / c["lora_rank"] * change).astype(np.float16).astype(np.float64)
        return values

    def linear(module, x):
        return x @ matrix(module).T + w[module + ".bias"]

    eps, heads, r = c["layer_norm_eps"], c["num_attention_heads"], "roberta."
    h = matrix(r + "embeddings.word_embeddings")[ids] + matrix(r + "embeddings.token_type_embeddings")[0]
    h = w.normed(r + "emb_ln", h, eps)
    for n in range(c["num_hidden_layers"]):
        p = f"{r}encoder.layers.{n}."
        q, k, v = np.split(linear(p + "mixer.Wqkv", h), 3, -1)
        mixed = attention(q, k, v, heads, heads, c["rotary_emb_base"])
        h = w.normed(p + "norm1", h + linear(p + "mixer.out_proj", mixed), eps)
        h = w.normed(p + "norm2", h + linear(p + "mlp.fc2", gelu(linear(p + "mlp.fc1", h))), eps)
    return h


def jina3_weights(w, c):
    dim, ffn, rank, n_tasks = c["hidden_size"], c["intermediate_size"], c["lora_rank"], len(c["lora_adaptations"])

    def matrix(module, rows, cols, scale=None, bias=True):
        w.matrix(module, rows, cols, bias, scale)
        original = dict.pop(w, module + ".weight")
        stem = module + ".parametrizations.weight."
        dict.__setitem__(w, stem + "original", original)
        if "embeddings." in module:
            shapes = (n_tasks, rows, rank), (n_tasks, rank, cols)
        else:
            shapes = (n_tasks, rank, cols), (n_tasks, rows, rank)
        for x, shape in zip("AB", shapes):
            w.put(stem + f"0.lora_{x}", w.rng.normal(size=shape) * 0.7)

    r = "roberta."
    matrix(r + "embeddings.word_embeddings", c["vocab_size"], dim, 1, False)
    matrix(r + "embeddings.token_type_embeddings", c["type_vocab_size"], dim, 0.5, False)
    w.norm(r + "emb_ln", dim, True)
    for n in range(c["num_hidden_layers"]):
        p = f"{r}encoder.layers.{n}."
        matrix(p + "mixer.Wqkv", 3 * dim, dim)
        matrix(p + "mixer.out_proj", dim, dim)
        w.norm(p + "norm1", dim, True)
        matrix(p + "mlp.fc1", ffn, dim)
        matrix(p + "mlp.fc2", dim, ffn)
        w.norm(p + "norm2", dim, True)
    matrix(r + "pooler.dense", dim, dim)


def make_jina3():
    """As jina-embeddings-v3's files have it, and its port to transformers, whose weights are those of no task."""
    tokenizer = byte_level(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    tasks = ["retrieval.query", "retrieval.passage", "text-matching"]
    prompts = {"retrieval.query": "Represent the query: ", "retrieval.passage": "Represent: ", "text-matching": ""}
    c = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": tokenizer.get_vocab_size(),
        "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "hidden_act": "gelu",
        "max_position_embeddings": 96, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0,
        "eos_token_id": 2, "position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "lora_adaptations": tasks,
        "lora_alpha": 1, "lora_rank": 2, "lora_dropout_p": 0.0, "lora_main_params_trainable": False,
        "load_trained_adapters": False, "emb_pooler": "mean", "matryoshka_dimensions": [8, 16, 24], "truncate_dim": None,
        "task_instructions": prompts, "use_flash_attn": True, "use_reg_tokens": False, "use_cache": False,
    }
    w = Weights(17)
    jina3_weights(w, c)
    cases = []
    for number, task in enumerate([None, *tasks]):
        vector = lambda ids: unit(jina3(w, c, ids, number - 1 if task else None).mean(0))  # noqa: E731, B023
        cases += [case | {"task": task} for case in embedded(tokenizer, 96, prompts, vector, TEXTS[:3])["texts"]]
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    listed = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]}]
    others = {
        "modules.json": listed + modules("Transformer", "Pooling", "Normalize")[1:], "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    }
    write("jina3", c, w, tokenizer, {"texts": cases}, **others)

    plain = Weights(0)
    for name in w:
        if "lora_" not in name:
            new = name.replace(".parametrizations.weight.original", ".weight").removeprefix("roberta.")
            dict.__setitem__(plain, new, dict.__getitem__(w, name))

    def keys(writer):
        add_sizes(writer, c)
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_freq_base(20000.0)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        add_vocab(writer, tokenizer, "roberta-bpe", bos=0, eos=2, sep=2, pad=1)
        writer.add_token_type_count(1)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    for_gguf = Weights(0)
    for name in plain:
        if "pooler" not in name:
            dict.__setitem__(for_gguf, name, dict.__getitem__(plain, name))
    write_gguf("jina3/model.gguf", gguf.MODEL_ARCH.JINA_BERT_V3, 2, keys, for_gguf)

    ported = Weights(0)
    parts = {
        "emb_ln": "embeddings.LayerNorm", "encoder.": "", "mixer.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm",
    }
    for name in plain:
        new, values = name, dict.__getitem__(plain, name)
        for old, part in parts.items():
            new = new.replace(old, part)
        if "mixer.Wqkv" in new:
            for part, third in zip("qkv", np.split(values, 3)):
                dict.__setitem__(ported, new.replace("mixer.Wqkv", f"self_attn.{part}_proj"), third)
        else:
            dict.__setitem__(ported, new, values)
    c = {key: c[key] for key in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
        "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id",
    )} | {
        "architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3",
        "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"},
    }
    write("jina3-port", c, ported, tokenizer, None, **{"1_Pooling/config.json": pooling})


def write_adapter(path, rank, alpha, factors, targets):
    """A PEFT folder with these factors by module."""
    folder = HERE / path
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": "jinaai/jina-embeddings-v5", "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "lora_alpha": alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": rank, "target_modules": targets,
        "task_type": "FEATURE_EXTRACTION", "use_dora": False, "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {}
    for module, (a, b) in factors.items():
        tensors[f"base_model.model.{module}.lora_A.weight"], tensors[f"base_model.model.{module}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors")


def make_jina5(name, seed, weights, forward, tokenizer, c, kind):
    """As jina-embeddings-v5's files have it: a model and an adapter for each task."""
    prompts = {"query": "Query: ", "document": "Document: "}
    tasks = ["retrieval", "text-matching"]
    c = c | {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5", "task_names": tasks}
    w = Weights(seed)
    weights(w, c)
    for key in w:
        dict.__setitem__(w, key, dict.__getitem__(w, key).astype(kind))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    cases, of_task = [], {}
    for task in tasks:
        merged, factors = Weights(0), {}
        for key in w:
            values = w[key]
            module = key.removesuffix(".weight")
            if module.split(".")[-1] in targets:
                a, b = (w.rng.normal(size=shape).astype(np.float32) * 0.4 for shape in ((3, values.shape[1]), (values.shape[0], 3)))
                factors[module] = a, b
                values = values + 6 / 3 * b.astype(np.float64) @ a.astype(np.float64)
            dict.__setitem__(merged, key, values.astype(kind))
        write_adapter(f"{name}/adapters/{task}", 3, 6, factors, targets)
        of_task[task] = merged
        vector = lambda ids: unit(forward(merged, c, ids)[-1])  # noqa: E731, B023
        cases += [case | {"task": task} for case in embedded(tokenizer, 64, prompts, vector, TEXTS[:3])["texts"]]
    pooling = {"word_embedding_dimension": c["hidden_size"], "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
               "pooling_mode_lasttoken": True, "include_prompt": True}
    listed = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]}]
    write(name, c, w, tokenizer, {"texts": cases}, **{
        "modules.json": listed + modules("Transformer", "Pooling", "Normalize")[1:], "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": None},
    })
    return c, of_task


def make_jina5_small():
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:0 <|endoftext|>:0", pair="$A:0 <|endoftext|>:0 $B:1 <|endoftext|>:1", special_tokens=[("<|endoftext|>", 0)]
    )
    make_jina5("jina5-small", 18, qwen3_weights, qwen3, tokenizer, {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 3500000, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
    }, np.float16)


def make_jina5_nano():
    """The GGUF file is that of one task, as published."""
    tokenizer = byte_level(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|>:0 $A:0 <|end_of_text|>:0", pair="<|begin_of_text|>:0 $A:0 <|end_of_text|>:0 $B:1 <|end_of_text|>:1",
        special_tokens=[("<|begin_of_text|>", 0), ("<|end_of_text|>", 1)],
    )
    c, of_task = make_jina5(
        "jina5-nano", 19, lambda w, c: eurobert_weights(w, c, ""), lambda w, c, ids: eurobert(w, c, "", ids), tokenizer, {
            "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "hidden_act": "silu", "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 250000, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
            "attention_dropout": 0.0, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>",
            "pad_token": "<|end_of_text|>", "mask_token": "<|mask|>", "clf_pooling": "late", "is_decoder": False,
        }, np.float32)

    def keys(writer):
        add_sizes(writer, c)
        writer.add_head_count_kv(2)
        writer.add_key_length(8)
        writer.add_value_length(8)
        writer.add_rope_dimension_count(8)
        writer.add_rope_freq_base(250000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(c["vocab_size"])
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.LAST)
        add_vocab(writer, tokenizer, "jina-v5-nano", bos=0, eos=1, sep=1, pad=1)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    write_gguf("jina5-nano/model.gguf", gguf.MODEL_ARCH.EUROBERT, 2, keys, of_task["text-matching"])


def make_t5():
    """As sentence-t5's files have it, with a dense layer after pooling; and version 1.1 with gates, alone."""
    tokenizer = byte_level(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:0 </s>:0", pair="$A:0 </s>:0 $B:0 </s>:0", special_tokens=[("</s>", 1)]
    )
    c = {
        "architectures": ["T5EncoderModel"], "model_type": "t5", "vocab_size": tokenizer.get_vocab_size(), "d_model": 24, "d_kv": 12,
        "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3, "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128, "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0,
        "feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": False, "is_encoder_decoder": True, "use_cache": True,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "n_positions": 512, "output_past": True,
    }
    w = Weights(20)
    t5_weights(w, c)
    head = w.rng.normal(size=(16, 24)).astype(np.float32) * 0.3
    texts = [*TEXTS, "the old river ran " * 40]
    cases = embedded(tokenizer, 256, {}, lambda ids: unit(head.astype(np.float64) @ t5(w, c, ids).mean(0)), texts)
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    dense = {"in_features": 24, "out_features": 16, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    listed = modules("Transformer", "Pooling", "Normalize")
    listed.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    write("t5", c, w, tokenizer, cases, **{
        "modules.json": listed, "1_Pooling/config.json": pooling, "2_Dense/config.json": dense,
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
    })
    save_file({"linear.weight": head}, HERE / "t5/2_Dense/model.safetensors")

    c |= {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    w = Weights(21)
    t5_weights(w, c)
    write("t5-gated", c, w, tokenizer, embedded(tokenizer, 512, {}, lambda ids: unit(t5(w, c, ids).mean(0)), texts))

    def keys(writer):
        writer.add_context_length(512)
        writer.add_embedding_length(24)
        writer.add_feed_forward_length(40)
        writer.add_block_count(2)
        writer.add_head_count(3)
        writer.add_key_length(12)
        writer.add_value_length(12)
        writer.add_layer_norm_eps(1e-6)
        writer.add_relative_attn_buckets_count(32)
        writer.add_layer_norm_rms_eps(1e-6)
        add_vocab(writer, tokenizer, "gpt-2", bos=0, eos=1, unk=2, pad=0)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)

    write_gguf("t5-gated/model.gguf", gguf.MODEL_ARCH.T5ENCODER, 2, keys, w)


def save_torch(path, weights, kind):
    """A state dict as `torch.save` writes it, which does not run here: the same pickle, of stand-ins of its names."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    sys.modules.update({"torch": torch, "torch._utils": utils})
    storage = type(kind, (), {"__module__": "torch"})
    setattr(torch, kind, storage)
    exec("def _rebuild_tensor_v2(*_): pass", vars(utils))
    utils._rebuild_tensor_v2.__module__ = "torch._utils"

    class Stored:
        def __init__(self, key, n):
            self.id = ("storage", storage, key, "cpu", n)

    class Tensor:
        def __init__(self, key, values):
            strides = tuple(int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim))
            self.parts = (Stored(key, values.size), 0, values.shape, strides, False, collections.OrderedDict())

        def __reduce__(self):
            return utils._rebuild_tensor_v2, self.parts

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.id if isinstance(value, Stored) else None

    state = collections.OrderedDict()
    data = {}
    for i, name in enumerate(weights):
        values = dict.__getitem__(weights, name).astype({"FloatStorage": np.float32, "HalfStorage": np.float16}[kind])
        state[name], data[str(i)] = Tensor(str(i), values), values.tobytes()
    state._metadata = collections.OrderedDict([("", {"version": 1})])
    pickled = io.BytesIO()
    Pickler(pickled, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in [("data.pkl", pickled.getvalue()), ("byteorder", b"little"),
                              *((f"data/{key}", content) for key, content in data.items()), ("version", b"3\n")]:
            archive.writestr(zipfile.ZipInfo(f"{path.stem}/{name}"), content)
    del sys.modules["torch"], sys.modules["torch._utils"]


def make_bge():
    """As BGE-M3's files have it."""
    tokenizer = byte_level(["<s>", "<pad>", "</s>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    c = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "hidden_act": "gelu", "max_position_embeddings": 66,
        "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }
    w, colbert, sparse = Weights(17), Weights(18), Weights(19)
    bert_weights(w, c, "")
    colbert.put("weight", colbert.rng.normal(size=(12, 16)) * 0.4)
    colbert.put("bias", colbert.rng.normal(size=12))
    sparse.put("weight", sparse.rng.normal(size=(1, 16)) * 0.4)
    sparse.put("bias", sparse.rng.normal(size=1))
    cases = []
    tokenizer.enable_truncation(64)
    for text in ["a quiet river", "", "the old engine ran and ran"]:
        ids = np.array(tokenizer.encode(text).ids)
        h = bert(w, c, "", ids, 0 * ids)
        vectors = h[1:] @ colbert["weight"].T + colbert["bias"]
        highest = {}
        for id, weight in zip(ids.tolist(), (h @ sparse["weight"].T + sparse["bias"])[:, 0]):
            if weight > highest.get(id, 0) and id > 2:
                highest[id] = float(weight)
        cases.append({
            "text": text, "vector": numbers(unit(h[0])), "weights": sorted(highest.items()),
            "vectors": numbers(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)),
        })
    pooling = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write("bge-m3", c, w, tokenizer, {"texts": cases}, **{
        "modules.json": modules("Transformer", "Pooling", "Normalize"), "1_Pooling/config.json": pooling,
    })
    save_torch(HERE / "bge-m3/colbert_linear.pt", colbert, "HalfStorage")
    save_torch(HERE / "bge-m3/sparse_linear.pt", sparse, "FloatStorage")


MAKERS = (
    make_bge,
    make_gte, make_eurobert, make_jina3, make_jina5_small, make_jina5_nano, make_t5,
    make_nomic_moe,
    make_colbert, make_pylate, make_bert, make_roberta, make_mpnet, make_modernbert, make_modernbert_bpe, make_qwen3, make_qwen3_reranker, make_nomic,
)
for make in MAKERS:
    make()
