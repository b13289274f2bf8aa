#!/usr/bin/env python3
"""Makes tests/data/tiny-random-lora: LoRA adapters of tiny random models, and the logits that PEFT computes with them.

Each folder is an adapter as saved by PEFT. Its `refs.safetensors` has the ids of a text and the logits of all
positions, computed in float64 by PEFT on the model of tests/data/tiny-random with the folder's name. Two of them also
have the adapter as a GGUF file, with the keys, names and row order of llama.cpp's convert_lora_to_gguf.py; in one the
first factors are Q8_0, and its references use the rounded ones.

    python3 -m venv /tmp/lora && /tmp/lora/bin/pip install peft==0.21.2 transformers==5.24.0 torch gguf safetensors
    /tmp/lora/bin/python scripts/lora_data.py
"""

import json
import pathlib
import shutil

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch
from transformers import AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
OUT = ROOT / "tiny-random-lora"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
N_TOKENS = 13

# Folder, model, adapter.
ADAPTERS = [
    ("llama3-rope", "llama3-rope", dict(r=4, lora_alpha=10, target_modules=ALL)),
    # Some matrices, with their own ranks and alphas, rank-stabilised.
    (
        "llama3-rope-rs",
        "llama3-rope",
        dict(
            r=3,
            lora_alpha=2,
            target_modules=["q_proj", "v_proj", "down_proj"],
            use_rslora=True,
            rank_pattern={"v_proj": 5, "layers.1.self_attn.q_proj": 8},
            alpha_pattern={"down_proj": 3},
        ),
    ),
    ("qwen2", "qwen2", dict(r=4, lora_alpha=8, target_modules=ALL)),
    ("qwen3", "qwen3", dict(r=6, lora_alpha=6, target_modules=ALL)),
    ("gemma3", "gemma3", dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"])),
    ("phi3", "phi3", dict(r=4, lora_alpha=4, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
]

# GGUF names of modules.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def randomise(model, seed):
    """Fills both factors; PEFT initialises the second ones to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            scale = 0.5 / parameter.shape[1] ** 0.5
            values = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values.half().double()


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def references(path, model, ids):
    save_file({"ids": np.array(ids, dtype=np.uint32), "logits": logits(model, ids)}, path)


def permuted(rows, n_heads):
    """llama.cpp's row order of queries and keys."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, tensors, alpha, config, first_type):
    """Writes factors by module names and returns the rounded first ones."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    rounded = {}
    for name in sorted(name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        _, _, layer, part = module.split(".", 3)
        ours = f"blk.{layer}.{NAMES[part]}.weight"
        a = tensors[name].float().numpy()
        b = tensors[name.replace("lora_A", "lora_B")].float().numpy()
        if part == "self_attn.q_proj":
            b = permuted(b, config["num_attention_heads"])
        if part == "self_attn.k_proj":
            b = permuted(b, config["num_key_value_heads"])
        if first_type is None or a.shape[1] % 32:
            writer.add_tensor(f"{ours}.lora_a", a)
        else:
            blocks = gguf.quants.quantize(a, first_type)
            writer.add_tensor(f"{ours}.lora_a", blocks, raw_dtype=first_type)
            rounded[name] = torch.from_numpy(gguf.quants.dequantize(blocks, first_type))
        writer.add_tensor(f"{ours}.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    for seed, (folder, base, options) in enumerate(ADAPTERS):
        model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny-random" / base, dtype=torch.float64)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
        randomise(model, seed)
        out = OUT / folder
        model.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)
        config = json.loads((out / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base
        config["target_modules"] = sorted(config["target_modules"])
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        weights = out / "adapter_model.safetensors"
        tensors = {name: tensor.half() for name, tensor in load_file(weights).items()}
        save_torch(tensors, weights)
        generator = np.random.default_rng(seed)
        ids = [int(id) for id in generator.integers(3, 293, N_TOKENS)]
        references(out / "refs.safetensors", model, ids)
        with model.disable_adapter():
            without = logits(model, ids)
        print(f"{folder}: logits up to {np.abs(logits(model, ids)).max():.2f}, "
              f"moved by up to {np.abs(logits(model, ids) - without).max():.2f}")
        if folder == "llama3-rope":
            shape = json.loads((ROOT / "tiny-random" / base / "config.json").read_text())
            write_gguf(OUT / "llama3-rope.gguf", tensors, options["lora_alpha"], shape, None)
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            rounded = write_gguf(OUT / "llama3-rope-q8_0.gguf", tensors, options["lora_alpha"], shape, q8_0)
            state = dict(model.named_parameters())
            for name, values in rounded.items():
                state[name.replace(".weight", ".default.weight")].data = values.double()
            references(OUT / "llama3-rope-q8_0.safetensors", model, ids)


if __name__ == "__main__":
    main()
