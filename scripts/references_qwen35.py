#!/usr/bin/env python3
"""Logits of the tiny random Qwen3.5 in float64, from its definition.

    scripts/references_qwen35.py [FOLDER]      writes refs_f64.safetensors beside refs.safetensors

The references beside the model are in float32. This model divides short vectors by their lengths: a single rounding of
its projections changes logits by 1e-4, and the float32 references are off by 8e-5 themselves. So this recomputes the
logits and copies the rest. Needs NumPy.
"""
import json
import struct
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/tiny-random/qwen35")


def read(path):
    """The header, the data's offset, and the whole file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length, data


def tensors(path):
    header, start, data = read(path)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            values = np.frombuffer(raw, {"F32": np.float32, "I32": np.int32}[entry["dtype"]])
        found[name] = values.reshape(entry["shape"])
    return found


CONFIG = json.loads((FOLDER / "config.json").read_text())
WEIGHTS = tensors(FOLDER / "model.safetensors")
EPS = CONFIG["rms_norm_eps"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def delta_net(x, weights):
    """Gated delta rule, arXiv:2412.06464, token by token."""
    key_heads, heads = CONFIG["linear_num_key_heads"], CONFIG["linear_num_value_heads"]
    key_dim, value_dim = CONFIG["linear_key_head_dim"], CONFIG["linear_value_head_dim"]
    n, taps = len(x), CONFIG["linear_conv_kernel_dim"]
    qkv = x @ weights("in_proj_qkv.weight").T
    kernel = weights("conv1d.weight")[:, 0, :]
    padded = np.vstack([np.zeros((taps - 1, qkv.shape[1])), qkv])
    qkv = silu(sum(padded[i : i + n] * kernel[:, i] for i in range(taps)))
    q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (np.repeat(part.reshape(n, key_heads, key_dim), heads // key_heads, axis=1) for part in (q, k))
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    v = v.reshape(n, heads, value_dim)
    beta = sigmoid(x @ weights("in_proj_b.weight").T)
    step = np.log1p(np.exp(x @ weights("in_proj_a.weight").T + weights("dt_bias")))
    decay = np.exp(-np.exp(weights("A_log")) * step)
    state, out = np.zeros((heads, key_dim, value_dim)), np.zeros((n, heads, value_dim))
    for t in range(n):
        state *= decay[t][:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += np.einsum("hk,hv->hkv", k[t], delta)
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) * key_dim**-0.5
    z = (x @ weights("in_proj_z.weight").T).reshape(n, heads, value_dim)
    out = normed(out, weights("norm.weight")) * silu(z)
    return out.reshape(n, -1) @ weights("out_proj.weight").T


def rotated(x):
    """Half-style RoPE on the first quarter of a head."""
    dims = int(x.shape[-1] * CONFIG["rope_parameters"]["partial_rotary_factor"])
    frequencies = CONFIG["rope_parameters"]["rope_theta"] ** (-np.arange(0, dims, 2) / dims)
    angles = (np.arange(len(x))[:, None] * frequencies)[:, None, :]
    a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dims:]], axis=-1)


def attention(x, weights):
    n, heads, kv_heads = len(x), CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    dim = CONFIG["head_dim"]
    q, gate = np.split((x @ weights("q_proj.weight").T).reshape(n, heads, 2 * dim), 2, axis=-1)
    k, v = ((x @ weights(f"{name}_proj.weight").T).reshape(n, kv_heads, dim) for name in "kv")
    q, k = rotated(normed(q, 1 + weights("q_norm.weight"))), rotated(normed(k, 1 + weights("k_norm.weight")))
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", shares, v) * sigmoid(gate)
    return out.reshape(n, -1) @ weights("o_proj.weight").T


def logits(ids):
    embedding = WEIGHTS["model.embed_tokens.weight"]
    h = embedding[ids]
    for layer, kind in enumerate(CONFIG["layer_types"]):
        def of(name, layer=layer):
            return WEIGHTS[f"model.layers.{layer}.{name}"]

        x = normed(h, 1 + of("input_layernorm.weight"))
        if kind == "linear_attention":
            h = h + delta_net(x, lambda name: of(f"linear_attn.{name}"))
        else:
            h = h + attention(x, lambda name: of(f"self_attn.{name}"))
        x = normed(h, 1 + of("post_attention_layernorm.weight"))
        gate, up = (x @ of(f"mlp.{name}_proj.weight").T for name in ("gate", "up"))
        h = h + (silu(gate) * up) @ of("mlp.down_proj.weight").T
    return normed(h, 1 + WEIGHTS["model.norm.weight"]) @ embedding.T


header, start, data = read(FOLDER / "refs.safetensors")
references, data = tensors(FOLDER / "refs.safetensors"), bytearray(data)
for i in range(4):
    found = logits(references[f"{i}.ids"])
    print(f"{i}: the float32 references are off by {abs(found - references[f'{i}.logits']).max():.1e}")
    begin, end = (start + offset for offset in header[f"{i}.logits"]["data_offsets"])
    data[begin:end] = found.astype(np.float32).tobytes()
(FOLDER / "refs_f64.safetensors").write_bytes(data)
