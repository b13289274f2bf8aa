#!/usr/bin/env python3
"""Logits of the tiny random gpt-oss with gates and ups of experts in MXFP4, in float64, from its definition.

    scripts/references_gpt_oss.py       writes refs_mxfp4.safetensors beside refs.safetensors

They are for model-mxfp4.gguf, written by `scripts/gguf_twins.py`. Published files have MXFP4 in all expert matrices;
here rows of the second one are not whole blocks. First checks that the unquantised weights give the float32
references' logits. Needs NumPy and gguf.
"""
import json
import struct

import gguf
import numpy as np
from gguf_twins import TINY, tensors

FOLDER = TINY / "gpt-oss"
CONFIG = json.loads((FOLDER / "config.json").read_text())
WEIGHTS = {name: values.astype(np.float64) for name, values in tensors(FOLDER / "model.safetensors")}


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def angles(n):
    """YaRN's frequencies, arXiv:2309.00071, without rounding the range between high and low; and its magnitude."""
    rope, dims = CONFIG["rope_parameters"], CONFIG["head_dim"]
    theta, factor = rope["rope_theta"], rope["factor"]
    plain = theta ** (-np.arange(0, dims, 2) / dims)

    def pair(turns):
        return dims * np.log(rope["original_max_position_embeddings"] / (turns * 2 * np.pi)) / (2 * np.log(theta))

    fast, slow = max(pair(rope["beta_fast"]), 0), min(pair(rope["beta_slow"]), dims - 1)
    kept = 1 - np.clip((np.arange(dims // 2) - fast) / (slow - fast), 0, 1)
    frequencies = kept * plain + (1 - kept) * plain / factor
    return np.arange(n)[:, None, None] * frequencies, 0.1 * np.log(factor) + 1


def attention(x, of, window):
    n, heads, kv_heads, dim = len(x), CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
    q, k, v = (x @ of(f"{name}_proj.weight").T + of(f"{name}_proj.bias") for name in "qkv")
    q, k, v = q.reshape(n, heads, dim), k.reshape(n, kv_heads, dim), v.reshape(n, kv_heads, dim)
    turned, magnitude = angles(n)
    cos, sin = magnitude * np.cos(turned), magnitude * np.sin(turned)

    def rotated(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
    distance = np.arange(n)[:, None] - np.arange(n)
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    sinks = np.broadcast_to(of("sinks")[:, None, None], (heads, n, 1))
    scores = np.concatenate([scores, sinks], axis=-1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = (shares / shares.sum(-1, keepdims=True))[..., :-1]
    return np.einsum("hts,shd->thd", shares, v).reshape(n, -1) @ of("o_proj.weight").T + of("o_proj.bias")


def experts(x, of, gate_up):
    n_used, out = CONFIG["num_experts_per_tok"], np.zeros_like(x)
    scores = x @ of("router.weight").T + of("router.bias")
    for t, row in enumerate(scores):
        chosen = np.argsort(-row)[:n_used]
        shares = np.exp(row[chosen] - row[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum()):
            both = x[t] @ gate_up[expert] + of("experts.gate_up_proj_bias")[expert]
            gate, up = np.minimum(both[::2], CONFIG["swiglu_limit"]), np.clip(both[1::2], -7, CONFIG["swiglu_limit"])
            activated = (up + 1) * gate / (1 + np.exp(-CONFIG["swiglu_alpha"] * gate))
            out[t] += share * (activated @ of("experts.down_proj")[expert] + of("experts.down_proj_bias")[expert])
    return out


def forward(ids, gate_ups):
    """The residual stream after the embedding and each layer, the last after the final norm; and the logits."""
    h = WEIGHTS["model.embed_tokens.weight"][ids]
    hidden = [h]
    for layer, kind in enumerate(CONFIG["layer_types"]):
        def of(name, layer=layer):
            return WEIGHTS[f"model.layers.{layer}.{name}"]

        window = CONFIG["sliding_window"] if kind == "sliding_attention" else len(ids)
        x = normed(h, of("input_layernorm.weight"))
        h = h + attention(x, lambda name: of(f"self_attn.{name}"), window)
        x = normed(h, of("post_attention_layernorm.weight"))
        h = h + experts(x, lambda name: of(f"mlp.{name}"), gate_ups[layer])
        hidden.append(h)
    hidden[-1] = normed(h, WEIGHTS["model.norm.weight"])
    return np.stack(hidden), hidden[-1] @ WEIGHTS["lm_head.weight"].T


def rounded(gate_up):
    """A matrix of experts `[E, K, N]` in blocks of 32 along K."""
    kind = gguf.GGMLQuantizationType.MXFP4
    rows = np.ascontiguousarray(gate_up.swapaxes(1, 2), np.float32)
    return gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind).astype(np.float64).swapaxes(1, 2)


def write(path, values):
    """A safetensors file; 16-bit words are BF16."""
    header, at = {}, 0
    for name, array in values.items():
        kind = {np.dtype(np.int32): "I32", np.dtype(np.uint16): "BF16"}.get(array.dtype, "F32")
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(array.tobytes() for array in values.values()))


def main():
    layers = range(CONFIG["num_hidden_layers"])
    plain = [WEIGHTS[f"model.layers.{layer}.mlp.experts.gate_up_proj"] for layer in layers]
    references = dict(tensors(FOLDER / "refs.safetensors"))
    for i in range(4):
        off = abs(forward(references[f"{i}.ids"], plain)[1] - references[f"{i}.logits"]).max()
        print(f"{i}: the float32 references are off by {off:.1e}")
        assert off < 5e-5
    gate_ups = [rounded(matrix) for matrix in plain]
    found = {}
    for i in range(4):
        ids = references[f"{i}.ids"]
        hidden, logits = forward(ids, gate_ups)
        found |= {f"{i}.ids": ids, f"{i}.logits": logits.astype(np.float32)}
        if i == 1:
            found["1.hidden"] = hidden.astype(np.float32)
    ids, margins = list(references["greedy.prompt"]), []
    for _ in references["greedy.ids"]:
        last = forward(ids, gate_ups)[1][-1]
        best = np.sort(last)
        margins.append(best[-1] - best[-2])
        ids.append(int(last.argmax()))
    prompt = references["greedy.prompt"]
    greedy = np.array(ids[len(prompt) :], np.int32)
    found |= {"greedy.prompt": prompt, "greedy.ids": greedy, "greedy.margins": np.array(margins, np.float32)}
    write(FOLDER / "refs_mxfp4.safetensors", found)


if __name__ == "__main__":
    main()
