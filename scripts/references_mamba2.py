#!/usr/bin/env python3
"""A tiny random Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), and its logits in float64, from its definition.

    scripts/references_mamba2.py       writes config.json, model.safetensors and refs.safetensors

in tests/data/tiny-random/mamba2, with the names of published checkpoints (Mamba2ForCausalLM). Weights are BF16. The norm
of a mixer's output is of each group of heads, as in the authors' program and llama.cpp: transformers' slow path has one
of all, which differs only with several groups. The mixer is that of `references_falcon_h1.py`, which is compared with
transformers' there. Needs numpy, gguf and safetensors.
"""
import json

import numpy as np
from gguf_twins import TINY, tensors
from references_falcon_h1 import Model, references_of, rms
from references_gpt_oss import write

FOLDER = TINY / "mamba2"
DIM, LAYERS, HEADS, HEAD_DIM, GROUPS, STATES, TAPS = 64, 4, 8, 16, 2, 16, 4
INNER = HEADS * HEAD_DIM
CHANNELS = INNER + 2 * GROUPS * STATES
CONFIG = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 1,
    "chunk_size": 16,
    "conv_kernel": TAPS,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": DIM,
    "initializer_range": 0.1,
    "intermediate_size": INNER,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": GROUPS,
    "norm_before_gate": False,
    "num_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": STATES,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 4,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 293,
}
# Names of checkpoints, and of GGUF files.
NAMES = {
    "norm.weight": "attn_norm",
    "mixer.in_proj.weight": "ssm_in",
    "mixer.conv1d.weight": "ssm_conv1d",
    "mixer.conv1d.bias": "ssm_conv1d_bias",
    "mixer.dt_bias": "ssm_dt",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm",
    "mixer.out_proj.weight": "ssm_out",
}


def stored():
    """Random numbers exact in BF16, by the names of checkpoints."""
    random = np.random.default_rng(2)

    def normal(shape, spread, centre=0.0):
        values = random.normal(centre, spread, shape).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    found = {
        "backbone.embeddings.weight": normal([293, DIM], 0.5),
        "backbone.norm_f.weight": normal([DIM], 0.2, 1.0),
        "lm_head.weight": normal([293, DIM], 0.3),
    }
    for layer in range(LAYERS):
        for name, values in {
            "norm.weight": normal([DIM], 0.2, 1.0),
            "mixer.in_proj.weight": normal([INNER + CHANNELS + HEADS, DIM], 0.15),
            "mixer.conv1d.weight": normal([CHANNELS, 1, TAPS], 0.4),
            "mixer.conv1d.bias": normal([CHANNELS], 0.1),
            "mixer.dt_bias": normal([HEADS], 0.5, -1.0),
            "mixer.A_log": normal([HEADS], 0.5),
            "mixer.D": normal([HEADS], 0.3, 1.0),
            "mixer.norm.weight": normal([INNER], 0.2, 1.0),
            "mixer.out_proj.weight": normal([DIM, INNER], 0.15),
        }.items():
            found[f"backbone.layers.{layer}.{name}"] = values
    return found


class Mamba2(Model):
    """The mixers alone."""

    def step(self, token):
        weights, eps = self.weights, self.config["rms_norm_eps"]
        h = weights["token_embd"][token]
        stream = [h]
        for l in range(LAYERS):
            h = h + self.mamba(l, rms(h, weights[f"blk.{l}.attn_norm"], eps))
            stream.append(h)
        self.position += 1
        h = rms(h, weights["output_norm"], eps)
        return weights["output"] @ h, stream[:-1] + [h]


def main():
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    found = stored()
    write(FOLDER / "model.safetensors", {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in found.items()})
    found = {name: values.astype(np.float64) for name, values in found.items()}
    weights = {
        "token_embd": found["backbone.embeddings.weight"],
        "output_norm": found["backbone.norm_f.weight"],
        "output": found["lm_head.weight"],
    }
    for l in range(LAYERS):
        weights |= {f"blk.{l}.{ours}": found[f"backbone.layers.{l}.{theirs}"] for theirs, ours in NAMES.items()}
        weights[f"blk.{l}.ssm_conv1d"] = weights[f"blk.{l}.ssm_conv1d"][:, 0]
        weights[f"blk.{l}.ssm_a"] = -np.exp(weights[f"blk.{l}.ssm_a"])
    shape = {
        "num_hidden_layers": LAYERS, "rms_norm_eps": CONFIG["layer_norm_epsilon"], "mamba_d_ssm": INNER,
        "mamba_d_state": STATES, "mamba_n_groups": GROUPS, "mamba_n_heads": HEADS, "mamba_d_head": HEAD_DIM,
        "mamba_d_conv": TAPS,
    }
    # The other models' prompts.
    others = dict(tensors(TINY / "granite-hybrid" / "refs.safetensors"))
    out = references_of(lambda: Mamba2(shape, weights), others)
    write(FOLDER / "refs.safetensors", out)
    print("logits reach", max(abs(out[f"{i}.logits"]).max() for i in range(4)), "least margin", out["greedy.margins"].min(), out["greedy.ids"].tolist())


if __name__ == "__main__":
    main()
