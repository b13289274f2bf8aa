"""References of `falcon-h1/model-bf16.gguf`, whose weights have the model's multipliers, rounded to BF16.

A float64 NumPy Falcon-H1 (TII 2025, arXiv:2507.22448), token by token, first compared with `refs.safetensors` on the
published weights, then run on those of the GGUF file. Needs numpy, ml_dtypes, safetensors and gguf.

    python3 scripts/references_falcon_h1.py tests/data/tiny-random/falcon-h1
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file


def bf16(words):
    return (np.asarray(words, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def published(folder):
    """Weights of `model.safetensors` under GGUF names, times the configuration's multipliers."""
    config = json.loads((folder / "config.json").read_text())
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    found = {}
    for name, entry in head.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            found[name] = bf16(np.frombuffer(data[first:end], np.uint16)).reshape(entry["shape"])
    weights = {
        "token_embd": found["model.embed_tokens.weight"] * config["embedding_multiplier"],
        "output": found["lm_head.weight"] * config["lm_head_multiplier"],
        "output_norm": found["model.final_layernorm.weight"],
    }
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = [inner, inner, groups, groups, config["mamba_n_heads"]]
    of_input = np.repeat(np.array(config["ssm_multipliers"]) * config["ssm_in_multiplier"], rows)[:, None]
    of_attention = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    for l in range(config["num_hidden_layers"]):
        own = lambda name: found[f"model.layers.{l}.{name}"]
        layer = {
            "attn_norm": own("input_layernorm.weight"),
            "attn_q": own("self_attn.q_proj.weight") * of_attention,
            "attn_k": own("self_attn.k_proj.weight") * of_attention * config["key_multiplier"],
            "attn_v": own("self_attn.v_proj.weight") * of_attention,
            "attn_output": own("self_attn.o_proj.weight") * config["attention_out_multiplier"],
            "ssm_in": own("mamba.in_proj.weight") * of_input,
            "ssm_conv1d": own("mamba.conv1d.weight")[:, 0],
            "ssm_conv1d_bias": own("mamba.conv1d.bias"),
            "ssm_dt": own("mamba.dt_bias"),
            "ssm_a": -np.exp(own("mamba.A_log")),
            "ssm_d": own("mamba.D"),
            "ssm_out": own("mamba.out_proj.weight") * config["ssm_out_multiplier"],
            "ffn_norm": own("pre_ff_layernorm.weight"),
            "ffn_gate": own("feed_forward.gate_proj.weight") * gate,
            "ffn_up": own("feed_forward.up_proj.weight"),
            "ffn_down": own("feed_forward.down_proj.weight") * down,
        }
        weights.update({f"blk.{l}.{name}": value for name, value in layer.items()})
    return config, weights


def of_gguf(path):
    """Weights of a GGUF file, in float64."""
    weights = {}
    for tensor in GGUFReader(path).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        is_bf16 = tensor.tensor_type.name == "BF16"
        values = bf16(tensor.data.view(np.uint16)) if is_bf16 else np.array(tensor.data, np.float64)
        name = tensor.name.removesuffix(".weight")
        name = name.replace("ssm_conv1d.bias", "ssm_conv1d_bias").replace("ssm_dt.bias", "ssm_dt")
        values = values.reshape(shape)
        weights[name] = values.reshape(-1) if name.endswith(("ssm_a", "ssm_d")) else values
    return weights


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


class Model:
    def __init__(self, config, weights):
        self.config, self.weights = config, weights
        self.keys = [([], []) for _ in range(config["num_hidden_layers"])]
        channels = weights["blk.0.ssm_conv1d"].shape[0]
        heads, states = config["mamba_n_heads"], config["mamba_d_state"]
        self.past = [np.zeros((config["mamba_d_conv"] - 1, channels)) for _ in self.keys]
        self.matrices = [np.zeros((heads, states, config["mamba_d_head"])) for _ in self.keys]
        self.position = 0

    def attention(self, l, x):
        config, weights = self.config, self.weights
        n_heads, n_kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, k, v = (weights[f"blk.{l}.attn_{name}"] @ x for name in "qkv")
        angles = self.position * config["rope_parameters"]["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

        def turn(rows):
            a, b = np.split(rows.reshape(-1, dim), 2, axis=1)
            cos, sin = np.cos(angles), np.sin(angles)
            return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)

        keys, values = self.keys[l]
        keys.append(turn(k))
        values.append(v.reshape(n_kv, dim))
        mixed = []
        for head, query in enumerate(turn(q)):
            group = head // (n_heads // n_kv)
            scores = np.array([key[group] @ query for key in keys]) / np.sqrt(dim)
            shares = np.exp(scores - scores.max())
            mixed.append((shares / shares.sum()) @ np.array([value[group] for value in values]))
        return weights[f"blk.{l}.attn_output"] @ np.concatenate(mixed)

    def mamba(self, l, x):
        config, weights = self.config, self.weights
        inner, states, n_groups = config["mamba_d_ssm"], config["mamba_d_state"], config["mamba_n_groups"]
        n_heads, dim = config["mamba_n_heads"], config["mamba_d_head"]
        projected = weights[f"blk.{l}.ssm_in"] @ x
        z, channels, dt = np.split(projected, [inner, projected.size - n_heads])
        window = np.vstack([self.past[l], channels])
        self.past[l] = window[1:]
        channels = silu((window.T * weights[f"blk.{l}.ssm_conv1d"]).sum(1) + weights[f"blk.{l}.ssm_conv1d_bias"])
        values, b, c = np.split(channels, [inner, inner + n_groups * states])
        values, b, c = values.reshape(n_heads, dim), b.reshape(n_groups, states), c.reshape(n_groups, states)
        step = np.log1p(np.exp(dt + weights[f"blk.{l}.ssm_dt"]))
        out = np.zeros((n_heads, dim))
        for head in range(n_heads):
            group = head // (n_heads // n_groups)
            matrix = self.matrices[l][head]
            matrix *= np.exp(weights[f"blk.{l}.ssm_a"][head] * step[head])
            matrix += step[head] * np.outer(b[group], values[head])
            out[head] = c[group] @ matrix + weights[f"blk.{l}.ssm_d"][head] * values[head]
        mixed = out.reshape(-1) * silu(z)
        if (norm := weights.get(f"blk.{l}.ssm_norm")) is not None:
            # Mamba 2's; Falcon-H1 has none.
            groups = zip(mixed.reshape(n_groups, -1), norm.reshape(n_groups, -1))
            mixed = np.concatenate([rms(values, weight, config["rms_norm_eps"]) for values, weight in groups])
        return weights[f"blk.{l}.ssm_out"] @ mixed

    def step(self, token):
        """Logits after a token, and the residual stream after the embedding and each layer."""
        weights, eps = self.weights, self.config["rms_norm_eps"]
        h = weights["token_embd"][token]
        stream = [h]
        for l in range(len(self.keys)):
            x = rms(h, weights[f"blk.{l}.attn_norm"], eps)
            h = h + self.mamba(l, x) + self.attention(l, x)
            x = rms(h, weights[f"blk.{l}.ffn_norm"], eps)
            gated = silu(weights[f"blk.{l}.ffn_gate"] @ x) * (weights[f"blk.{l}.ffn_up"] @ x)
            h = h + weights[f"blk.{l}.ffn_down"] @ gated
            stream.append(h)
        self.position += 1
        h = rms(h, weights["output_norm"], eps)
        return weights["output"] @ h, stream[:-1] + [h]


def references_of(new_model, given):
    """The logits of new models for given tokens, and their answer to the given prompt."""
    out = {}
    for i in range(4):
        ids, model = given[f"{i}.ids"], new_model()
        steps = [model.step(int(id)) for id in ids]
        out |= {f"{i}.ids": ids, f"{i}.logits": np.array([logits for logits, _ in steps], np.float32)}
        if i == 1:
            out["1.hidden"] = np.array([stream for _, stream in steps], np.float32).transpose(1, 0, 2).copy()
    prompt, model, ids, margins = given["greedy.prompt"], new_model(), [], []
    for id in prompt:
        logits, _ = model.step(int(id))
    for _ in given["greedy.ids"]:
        first, second = np.sort(logits)[[-1, -2]]
        ids.append(int(np.argmax(logits)))
        margins.append(first - second)
        logits, _ = model.step(ids[-1])
    out |= {"greedy.prompt": prompt, "greedy.ids": np.array(ids, np.int32)}
    out["greedy.margins"] = np.array(margins, np.float32)
    return out


def main(folder):
    config, weights = published(folder)
    references = load_file(folder / "refs.safetensors")
    run = lambda weights, ids: [Model.step(model, int(id)) for model in [Model(config, weights)] for id in ids]
    worst = 0.0
    for i in range(4):
        logits = np.array([logits for logits, _ in run(weights, references[f"{i}.ids"])])
        worst = max(worst, np.abs(logits - references[f"{i}.logits"]).max())
    print(f"published weights: logits within {worst:.1e} of refs.safetensors")
    weights = of_gguf(folder / "model-bf16.gguf")
    out = references_of(lambda: Model(config, weights), references)
    save_file(out, folder / "refs_gguf.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
