#!/usr/bin/env python3
"""A tiny random Ling 2 and Ling 3 (inclusionAI 2025 and 2026), and their logits in float64, from their definitions.

    scripts/references_ling.py           writes config.json, model.safetensors and refs.safetensors
    scripts/references_ling.py --check   compares the references with transformers' float64 logits

in tests/data/tiny-random/ling2 and ling3, with the names and keys of published checkpoints. Weights are BF16. Ling 3 is
`bailing_hybrid` of transformers 5.24; Ling 2 is not part of it, but `sarvam_moe` has the same layers and names. Needs
numpy, gguf and safetensors, and for `--check` torch and transformers.
"""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf_twins import TINY, tensors
from references_falcon_h1 import references_of, rms, silu
from references_gpt_oss import write

SHARED = {
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 293,
}
LING2 = SHARED | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "head_dim": 16,
    "model_type": "bailing_moe",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 8,
    "use_rmsnorm": True,
}
LING3 = SHARED | {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "head_dim": 16,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 32,
    "layer_group_size": 2,
    "linear_silu": True,
    "model_type": "bailing_hybrid",
    "no_kda_lora": True,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_head_dim": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 600000, "rope_type": "default"},
    "short_conv_kernel_size": 4,
    "topk_method": "noaux_tc",
    "use_mla_nope": False,
    "v_head_dim": 16,
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def is_recurrent(config, l):
    return (l + 1) % config.get("layer_group_size", 1) != 0


def stored(config):
    """Random numbers exact in BF16, by the names of checkpoints."""
    random = np.random.default_rng(50)
    dim, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    found = {}

    def normal(name, shape, spread=None, centre=0.0):
        spread = shape[-1] ** -0.5 if spread is None else spread
        values = random.normal(centre, spread, shape).astype(np.float32)
        found[name] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    def feed_forward(prefix, width):
        normal(prefix + "gate_proj.weight", [width, dim])
        normal(prefix + "up_proj.weight", [width, dim])
        normal(prefix + "down_proj.weight", [dim, width], 1.5 * width**-0.5)

    normal("model.word_embeddings.weight", [config["vocab_size"], dim], 0.5)
    for l in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{l}."
        of = prefix + "attention."
        for name in ["input_layernorm", "post_attention_layernorm"]:
            normal(f"{prefix}{name}.weight", [dim], 0.2, 1.0)
        if config is LING2:
            normal(of + "query_key_value.weight", [(heads + 2 * config["num_key_value_heads"]) * head_dim, dim])
            for name in ["query_layernorm", "key_layernorm"]:
                normal(f"{of}{name}.weight", [head_dim], 0.3, 1.2)
        elif is_recurrent(config, l):
            inner = heads * head_dim
            for name in "qkv":
                normal(f"{of}{name}_proj.weight", [inner, dim])
                normal(f"{of}{name}_conv1d.weight", [inner, 1, 4], 0.5)
            for name, rows in [("f", inner), ("g", inner), ("b", heads)]:
                normal(f"{of}{name}_proj.weight", [rows, dim])
            normal(of + "A_log", [heads], 0.5)
            normal(of + "dt_bias", [inner], 1.0, -2.0)
            normal(of + "o_norm.weight", [head_dim], 0.2, 1.0)
        else:
            rank, turned, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
            normal(of + "q_a_proj.weight", [config["q_lora_rank"], dim])
            normal(of + "q_a_layernorm.weight", [config["q_lora_rank"]], 0.2, 1.0)
            normal(of + "q_b_proj.weight", [heads * (nope + turned), config["q_lora_rank"]], 0.4)
            normal(of + "kv_a_proj_with_mqa.weight", [rank + turned, dim])
            normal(of + "kv_a_layernorm.weight", [rank], 0.2, 1.0)
            normal(of + "kv_b_proj.weight", [heads * (nope + config["v_head_dim"]), rank])
            normal(of + "g_proj.weight", [heads, dim])
        recurs = config is LING3 and is_recurrent(config, l)
        normal(of + ("o_proj.weight" if recurs else "dense.weight"), [dim, heads * head_dim], 0.2)
        if l < config["first_k_dense_replace"]:
            feed_forward(prefix + "mlp.", config["intermediate_size"])
            continue
        normal(prefix + "mlp.gate.weight", [config["num_experts"], dim])
        normal(prefix + "mlp.gate.expert_bias", [config["num_experts"]], 0.2)
        for expert in range(config["num_experts"]):
            feed_forward(f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"])
        feed_forward(prefix + "mlp.shared_experts.", config["moe_intermediate_size"])
    normal("model.norm.weight", [dim], 0.2, 1.0)
    normal("lm_head.weight", [config["vocab_size"], dim])
    return found


class Ling:
    """A model that takes a token after the other."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        n_layers, heads, dim = config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"]
        self.cache = [([], []) for _ in range(n_layers)]
        self.past = [np.zeros((3, 3, heads * dim)) for _ in range(n_layers)]
        self.states = [np.zeros((heads, dim, dim)) for _ in range(n_layers)]
        self.position = 0

    def angles(self, dims):
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        return self.position * theta ** (-np.arange(0, dims, 2) / dims)

    def attended(self, l, q, k, v):
        """Heads of one query over all keys, [H, ..] each."""
        keys, values = self.cache[l]
        keys.append(k)
        values.append(v)
        scores = np.einsum("hd,shd->hs", q, np.array(keys)) * q.shape[-1] ** -0.5
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hs,shd->hd", shares / shares.sum(-1, keepdims=True), np.array(values))

    def grouped_queries(self, l, x, of):
        heads, kv_heads, dim = (self.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        qkv = (of("query_key_value.weight") @ x).reshape(-1, dim)
        turned = int(dim * self.config["partial_rotary_factor"])
        cos, sin = np.cos(self.angles(turned)), np.sin(self.angles(turned))

        def head(x, weight):
            x = rms(x, weight, self.config["rms_norm_eps"])
            a, b, rest = np.split(x, [turned // 2, turned])
            return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest])

        q = np.array([head(x, of("query_layernorm.weight")) for x in qkv[:heads]])
        k = np.array([head(x, of("key_layernorm.weight")) for x in qkv[heads : heads + kv_heads]])
        k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, qkv[heads + kv_heads :]))
        return of("dense.weight") @ self.attended(l, q, k, v).ravel()

    def latent(self, l, x, of):
        config = self.config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        turned, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        cos, sin = np.cos(self.angles(turned)), np.sin(self.angles(turned))

        def rotated(x):
            a, b = x[..., 0::2], x[..., 1::2]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        q = of("q_b_proj.weight") @ rms(of("q_a_proj.weight") @ x, of("q_a_layernorm.weight"), 1e-6)
        q = q.reshape(heads, nope + turned)
        q = np.concatenate([q[:, :nope], rotated(q[:, nope:])], axis=-1)
        down = of("kv_a_proj_with_mqa.weight") @ x
        kv = of("kv_b_proj.weight") @ rms(down[:rank], of("kv_a_layernorm.weight"), 1e-6)
        kv = kv.reshape(heads, nope + config["v_head_dim"])
        k = np.concatenate([kv[:, :nope], np.tile(rotated(down[rank:]), (heads, 1))], axis=-1)
        y = self.attended(l, q, k, kv[:, nope:]) * sigmoid(of("g_proj.weight") @ x)[:, None]
        return of("dense.weight") @ y.ravel()

    def delta_attention(self, l, x, of):
        """Kimi Delta Attention, arXiv:2510.26692, with the bounded gate."""
        config, shape = self.config, (self.config["num_attention_heads"], -1)
        mixed = []
        for i, name in enumerate("qkv"):
            inputs = np.vstack([self.past[l][i], of(f"{name}_proj.weight") @ x])
            self.past[l][i] = inputs[1:]
            mixed.append(silu((inputs * of(f"{name}_conv1d.weight")[:, 0].T).sum(0)).reshape(shape))
        q, k, v = mixed
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        step = (of("f_proj.weight") @ x + of("dt_bias")).reshape(shape)
        decay = np.exp(config["kda_lower_bound"] * sigmoid(np.exp(of("A_log"))[:, None] * step))
        state = self.states[l] * decay[:, :, None]
        beta = sigmoid(of("b_proj.weight") @ x)[:, None]
        delta = beta * (v - np.einsum("hkv,hk->hv", state, k))
        self.states[l] = state = state + np.einsum("hk,hv->hkv", k, delta)
        y = np.einsum("hkv,hk->hv", state, q) * q.shape[-1] ** -0.5
        y = y / np.sqrt((y * y).mean(-1, keepdims=True) + config["rms_norm_eps"]) * of("o_norm.weight")
        y *= sigmoid(of("g_proj.weight") @ x).reshape(shape)
        return of("o_proj.weight") @ y.ravel()

    def experts(self, x, of):
        config = self.config

        def fed(prefix):
            return of(prefix + "down_proj.weight") @ (
                silu(of(prefix + "gate_proj.weight") @ x) * (of(prefix + "up_proj.weight") @ x)
            )

        scores = sigmoid(of("gate.weight") @ x)
        choices = (scores + of("gate.expert_bias")).reshape(config["n_group"], -1)
        groups = np.argsort(-np.sort(choices, axis=-1)[:, -2:].sum(-1))[config["topk_group"] :]
        choices[groups] = -np.inf
        chosen = np.argsort(-choices.ravel())[: config["num_experts_per_tok"]]
        shares = scores[chosen] / scores[chosen].sum() * config["routed_scaling_factor"]
        return sum(share * fed(f"experts.{expert}.") for share, expert in zip(shares, chosen)) + fed("shared_experts.")

    def step(self, token):
        config, weights, eps = self.config, self.weights, self.config["rms_norm_eps"]
        h = weights["model.word_embeddings.weight"][token]
        stream = [h]
        for l in range(config["num_hidden_layers"]):
            of = lambda name, l=l: weights[f"model.layers.{l}.{name}"]
            in_attention = lambda name, of=of: of(f"attention.{name}")
            x = rms(h, of("input_layernorm.weight"), eps)
            if config["model_type"] == "bailing_moe":
                h = h + self.grouped_queries(l, x, in_attention)
            elif is_recurrent(config, l):
                h = h + self.delta_attention(l, x, in_attention)
            else:
                h = h + self.latent(l, x, in_attention)
            x = rms(h, of("post_attention_layernorm.weight"), eps)
            if l < config["first_k_dense_replace"]:
                gates = silu(of("mlp.gate_proj.weight") @ x)
                h = h + of("mlp.down_proj.weight") @ (gates * (of("mlp.up_proj.weight") @ x))
            else:
                h = h + self.experts(x, lambda name, of=of: of(f"mlp.{name}"))
            stream.append(h)
        self.position += 1
        h = rms(h, weights["model.norm.weight"], eps)
        return weights["lm_head.weight"] @ h, stream[:-1] + [h]


def check(name, config):
    """Maximum difference from transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    references = dict(tensors(TINY / name / "refs.safetensors"))
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        (scratch / "model.safetensors").symlink_to((TINY / name / "model.safetensors").resolve())
        if name == "ling3":
            config = config | {"kda_lower_bound": float(config["kda_lower_bound"])}
        else:
            config = config | {"model_type": "sarvam_moe", "architectures": ["SarvamMoEForCausalLM"]}
        (scratch / "config.json").write_text(json.dumps(config))
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float64, **eager)
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
        for i in range(4):
            with torch.no_grad():
                logits = model(torch.tensor(references[f"{i}.ids"].astype(np.int64))[None]).logits[0].numpy()
            print(f"{name}: transformers is within {abs(logits - references[f'{i}.logits']).max():.1e} of {i}.logits")


def main():
    for name, config in [("ling2", LING2), ("ling3", LING3)]:
        if "--check" in sys.argv:
            check(name, config)
            continue
        folder = TINY / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        found = stored(config)
        write(folder / "model.safetensors", {n: (values.view(np.uint32) >> 16).astype(np.uint16) for n, values in found.items()})
        weights = {n: values.astype(np.float64) for n, values in found.items()}
        # The other models' prompts.
        out = references_of(lambda: Ling(config, weights), dict(tensors(TINY / "granite-hybrid" / "refs.safetensors")))
        write(folder / "refs.safetensors", out)
        highest, margin = max(abs(out[f"{i}.logits"]).max() for i in range(4)), out["greedy.margins"].min()
        print(name, sum(v.size for v in found.values()), "weights, logits reach", highest, "least margin", margin)


if __name__ == "__main__":
    main()
