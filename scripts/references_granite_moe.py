#!/usr/bin/env python3
"""A tiny random Granite with experts, and its logits in float64, from its definition.

    scripts/references_granite_moe.py       writes config.json, model.safetensors and refs.safetensors

in tests/data/tiny-random/granite-moe. Granite 3 with experts (GraniteMoeForCausalLM): Llama with four scale
factors, and experts weighted by a softmax over the selected ones. Weights are BF16. `scripts/gguf_twins.py --check
granite-moe` compares llama.cpp with the references. Needs NumPy.
"""
import json

import numpy as np
from gguf_twins import TINY, tensors
from references_gpt_oss import write

FOLDER = TINY / "granite-moe"
CONFIG = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.1,
    "bos_token_id": 1,
    "embedding_multiplier": 3.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "logits_scaling": 4.0,
    "max_position_embeddings": 256,
    "model_type": "granitemoe",
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "output_router_logits": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.3,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 293,
}
DIM, FFN, HEADS, KV_HEADS = 64, 32, 4, 2
HEAD_DIM = DIM // HEADS


def weights():
    """Random numbers exact in BF16."""
    random = np.random.default_rng(16)

    def normal(shape, spread, centre=0.0):
        values = random.normal(centre, spread, shape).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    found = {"model.embed_tokens.weight": normal([293, DIM], 0.15), "model.norm.weight": normal([DIM], 0.2, 1.0)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        n = CONFIG["num_local_experts"]
        for name, shape in {
            "self_attn.q_proj": [DIM, DIM],
            "self_attn.k_proj": [KV_HEADS * HEAD_DIM, DIM],
            "self_attn.v_proj": [KV_HEADS * HEAD_DIM, DIM],
            "self_attn.o_proj": [DIM, DIM],
            "block_sparse_moe.router.layer": [n, DIM],
            "block_sparse_moe.input_linear": [n, 2 * FFN, DIM],
            "block_sparse_moe.output_linear": [n, DIM, FFN],
        }.items():
            found[f"{prefix}{name}.weight"] = normal(shape, 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = normal([DIM], 0.2, 1.0)
    return found


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def attention(x, of):
    n = len(x)
    frequencies = CONFIG["rope_theta"] ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.arange(n)[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)

    def rotated(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k, v = ((x @ of(f"self_attn.{name}_proj").T).reshape(n, -1, HEAD_DIM) for name in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * CONFIG["attention_multiplier"]
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", shares, v).reshape(n, -1) @ of("self_attn.o_proj").T


def experts(x, of):
    out = np.zeros_like(x)
    for t, row in enumerate(x @ of("block_sparse_moe.router.layer").T):
        chosen = np.argsort(-row)[: CONFIG["num_experts_per_tok"]]
        shares = np.exp(row[chosen] - row[chosen].max())
        for expert, share in zip(chosen, shares / shares.sum()):
            gate, up = np.split(of("block_sparse_moe.input_linear")[expert] @ x[t], 2)
            out[t] += share * (of("block_sparse_moe.output_linear")[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def forward(ids, weights):
    """The residual stream after the embedding and each layer, the last after the final norm; and the logits."""
    embedding, factor = weights["model.embed_tokens.weight"], CONFIG["residual_multiplier"]
    h = CONFIG["embedding_multiplier"] * embedding[ids]
    hidden = [h]
    for layer in range(CONFIG["num_hidden_layers"]):
        def of(name, layer=layer):
            return weights[f"model.layers.{layer}.{name}.weight"]

        h = h + factor * attention(normed(h, of("input_layernorm")), of)
        h = h + factor * experts(normed(h, of("post_attention_layernorm")), of)
        hidden.append(h)
    hidden[-1] = normed(h, weights["model.norm.weight"])
    return np.stack(hidden), hidden[-1] @ embedding.T / CONFIG["logits_scaling"]


def main():
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    stored = weights()
    write(FOLDER / "model.safetensors", {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in stored.items()})
    double = {name: values.astype(np.float64) for name, values in stored.items()}
    # The other models' prompts.
    others = dict(tensors(TINY / "granite-hybrid" / "refs.safetensors"))
    found = {}
    for i in range(4):
        ids = others[f"{i}.ids"]
        hidden, logits = forward(ids, double)
        found |= {f"{i}.ids": ids, f"{i}.logits": logits.astype(np.float32)}
        if i == 1:
            found["1.hidden"] = hidden.astype(np.float32)
    prompt = others["greedy.prompt"]
    ids, margins = list(prompt), []
    for _ in others["greedy.ids"]:
        last = forward(ids, double)[1][-1]
        best = np.sort(last)
        margins.append(best[-1] - best[-2])
        ids.append(int(last.argmax()))
    greedy = np.array(ids[len(prompt) :], np.int32)
    found |= {"greedy.prompt": prompt, "greedy.ids": greedy, "greedy.margins": np.array(margins, np.float32)}
    write(FOLDER / "refs.safetensors", found)
    print("logits reach", max(abs(found[f"{i}.logits"]).max() for i in range(4)), "least margin", min(margins), greedy[:12])


if __name__ == "__main__":
    main()
