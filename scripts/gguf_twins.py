#!/usr/bin/env python3
"""GGUF files of tiny random models, in the layout of llama.cpp's converter.

    scripts/gguf_twins.py [NAME..]          writes model-bf16.gguf beside each model.safetensors, and model-mxfp4.gguf
    scripts/gguf_twins.py --check [NAME..]  compares llama.cpp's logits for files expanded to F32 with the references

Names of keys and tensors come from PyPI's `gguf`; permutations, offsets and splits follow the converter's sources
(`conversion/` of llama.cpp): interleaved rows of queries and keys for ministral3, Qwen3.5's value heads alternating
instead of grouped, its norms with the one added, `A_log` as `-exp`, stacked experts, separate gates and ups, Gemma 4's
frequencies as `rope_freqs.weight`. Matrices stay BF16; tensors that the converter keeps in F32 are F32. There is no
vocabulary.

Needs NumPy and gguf, and for `--check` cyllama, which includes a built llama.cpp. tests/data/README.md lists the
agreement.
"""
import json
import struct
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

TINY = Path(__file__).parent.parent / "tests/data/tiny-random"


def tensors(path):
    """Tensors of a safetensors file; BF16 as float32."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    types = {"F32": np.float32, "I32": np.int32}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data[begin:end], types[entry["dtype"]])
        yield name, values.reshape(entry["shape"])


# Names within a layer, and outside the layers.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def interleaved(rows, n_heads):
    """Interleaves the halves of each head."""
    return rows.reshape(n_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Twin:
    """A file under construction. Architectures override their differences."""

    arch = ""
    file = "model-bf16.gguf"
    layer, top = LAYER, TOP

    def __init__(self, folder):
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.experts = {}

    def write(self, path, expand):
        writer = gguf.GGUFWriter(path, self.arch)
        writer.add_name(f"tiny-random-{self.folder.name}")
        writer.add_file_type(gguf.LlamaFileType.ALL_F32 if expand else gguf.LlamaFileType.MOSTLY_BF16)
        self.keys(writer)
        writer.add_tokenizer_model("no_vocab")
        for name, values in self.tensors():
            self.add(writer, name, np.ascontiguousarray(values, np.float32), expand)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @staticmethod
    def add(writer, name, values, expand):
        parts = ["norm", "ffn_gate_inp.", "conv", "ssm_a", "ssm_d", ".bias"]
        if expand or values.ndim == 1 or any(part in name for part in parts):
            writer.add_tensor(name, values)
            return
        bits = values.view(np.uint32)
        assert not (bits & 0xFFFF).any(), name
        halves = (bits >> 16).astype(np.uint16)
        writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def keys(self, writer):
        config = self.config
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_feed_forward_length(self.feed_forward_lengths())
        writer.add_head_count_kv(self.head_counts_kv())
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
        rope = config.get("rope_parameters", {"rope_type": "default"} | config)
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if head_dim := config.get("head_dim"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        for key, add in [
            ("num_experts", writer.add_expert_count),
            ("num_local_experts", writer.add_expert_count),
            ("num_experts_per_tok", writer.add_expert_used_count),
        ]:
            if (value := config.get(key)) is not None:
                add(value)

    def feed_forward_lengths(self):
        return self.config["intermediate_size"]

    def head_counts_kv(self):
        return self.config["num_key_value_heads"]

    def windows(self, writer):
        writer.add_sliding_window(self.config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in self.config["layer_types"]])

    def named(self, name):
        """A tensor's layer number, its name there without suffix, and the suffix."""
        name = name.removeprefix("model.")
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, "weight"
        if not stem.startswith("layers."):
            return None, stem, suffix
        _, number, stem = stem.split(".", 2)
        return int(number), stem, suffix

    def tensors(self):
        for name, values in tensors(self.folder / "model.safetensors"):
            number, stem, suffix = self.named(name)
            if number is None:
                found = {self.top[stem]: values}
            else:
                found = self.in_layer(number, stem, suffix, values)
            for ours, values in found.items():
                prefix = "" if number is None else f"blk.{number}."
                # Per-head numbers have no suffix.
                yield prefix + ours + ("" if ours in ("ssm_a", "ssm_d") else "." + suffix), values

    def in_layer(self, number, stem, suffix, values):
        """A layer's tensors converted from one."""
        return {self.layer[stem]: values}


class Ernie(Twin):
    arch = "ernie4_5"


class Hunyuan(Twin):
    arch = "hunyuan-dense"
    layer = LAYER | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}


class Exaone(Twin):
    arch = "exaone4"
    layer = LAYER | AFTER

    def keys(self, writer):
        super().keys(writer)
        self.windows(writer)


class Olmo3(Exaone):
    arch = "olmo2"


class Olmoe(Twin):
    arch = "olmoe"

    def in_layer(self, number, stem, suffix, values):
        if not stem.startswith("mlp.experts."):
            return super().in_layer(number, stem, suffix, values)
        _, _, expert, matrix = stem.split(".")
        found = self.experts.setdefault((number, matrix), {})
        found[int(expert)] = values
        if len(found) < self.config["num_experts"]:
            return {}
        stacked = np.stack([found[expert] for expert in range(len(found))])
        return {self.layer["mlp." + matrix] + "_exps": stacked}


class Ministral(Twin):
    arch = "mistral3"

    def keys(self, writer):
        super().keys(writer)
        rope = self.config["rope_parameters"]
        writer.add_rope_dimension_count(self.config["head_dim"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])

    def in_layer(self, number, stem, suffix, values):
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
        if stem in heads:
            values = interleaved(values, self.config[heads[stem]])
        return super().in_layer(number, stem, suffix, values)


class GptOss(Twin):
    arch = "gpt-oss"
    layer = LAYER | {
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks",
    }

    def keys(self, writer):
        super().keys(writer)
        writer.add_sliding_window(self.config["sliding_window"])
        writer.add_expert_feed_forward_length(self.config["intermediate_size"])

    def named(self, name):
        number, stem, suffix = super().named(name)
        return (number, stem.removesuffix("_bias"), "bias") if stem.endswith("_bias") else (number, stem, suffix)

    def in_layer(self, number, stem, suffix, values):
        if not stem.startswith("mlp.experts."):
            return super().in_layer(number, stem, suffix, values)
        if suffix == "weight":
            values = values.swapaxes(1, 2)
        if stem == "mlp.experts.down_proj":
            return {"ffn_down_exps": values}
        return {"ffn_gate_exps": values[:, ::2], "ffn_up_exps": values[:, 1::2]}


class GptOssMxfp4(GptOss):
    """With gates and ups of experts in MXFP4; rows of the second matrix are not whole blocks."""

    file = "model-mxfp4.gguf"

    @staticmethod
    def add(writer, name, values, expand):
        kind = gguf.GGMLQuantizationType.MXFP4
        if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            GptOss.add(writer, name, values, expand)


class Lfm2(Twin):
    arch = "lfm2"
    top = TOP | {"embedding_norm": "token_embd_norm"}
    layer = LAYER | {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "self_attn.out_proj": "attn_output",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    }

    def keys(self, writer):
        super().keys(writer)
        writer.add_shortconv_l_cache(self.config["conv_L_cache"])

    def head_counts_kv(self):
        n = self.config["num_key_value_heads"]
        return [n if kind == "full_attention" else 0 for kind in self.config["layer_types"]]

    def in_layer(self, number, stem, suffix, values):
        return super().in_layer(number, stem, suffix, values[:, 0] if stem == "conv.conv" else values)


class Qwen35(Twin):
    arch = "qwen35"
    layer = LAYER | {
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt": "ssm_dt",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    }

    def keys(self, writer):
        super().keys(writer)
        config, rope = self.config, self.config["rope_parameters"]
        value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_rope_dimension_sections(rope["mrope_section"] + [0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_inner_size(value_heads * value_dim)
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_time_step_rank(value_heads)
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)

    def named(self, name):
        number, stem, suffix = super().named(name)
        return (number, "linear_attn.dt", "bias") if stem == "linear_attn.dt_bias" else (number, stem, suffix)

    def by_turns(self, values, axis=0):
        """Spreads value heads that share a key head, instead of grouping them."""
        keys, heads = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        values = np.moveaxis(values, axis, 0)
        turned = values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(turned.reshape(values.shape), 0, axis)

    def in_layer(self, number, stem, suffix, values):
        part = stem.removeprefix("linear_attn.")
        if "norm" in stem and stem != "linear_attn.norm":
            values = values + 1
        elif part == "conv1d":
            values = values[:, 0]
        elif part == "A_log":
            values = -np.exp(values)
        if part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt"):
            values = self.by_turns(values)
        elif part == "out_proj":
            values = self.by_turns(values, 1)
        elif part in ("in_proj_qkv", "conv1d"):
            n = 2 * self.config["linear_num_key_heads"] * self.config["linear_key_head_dim"]
            values = np.concatenate([values[:n], self.by_turns(values[n:])])
        return super().in_layer(number, stem, suffix, values)

    def tensors(self):
        for name, values in super().tensors():
            yield name, values + 1 if name == "output_norm.weight" else values


class GraniteMoe(Twin):
    arch = "granitemoe"
    layer = LAYER | {
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.output_linear": "ffn_down_exps",
        "shared_mlp.output_linear": "ffn_down_shexp",
    }

    def keys(self, writer):
        super().keys(writer)
        config = self.config
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])

    def in_layer(self, number, stem, suffix, values):
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
        if stem.endswith("input_linear"):
            gate, up = np.split(values, 2, axis=-2)
            kind = "exps" if stem.startswith("block_sparse_moe") else "shexp"
            return {f"ffn_gate_{kind}": gate, f"ffn_up_{kind}": up}
        if stem in heads:
            values = interleaved(values, self.config[heads[stem]])
        return super().in_layer(number, stem, suffix, values)


class GraniteHybrid(GraniteMoe):
    arch = "granitehybrid"
    layer = GraniteMoe.layer | {
        "mamba.in_proj": "ssm_in",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.A_log": "ssm_a",
        "mamba.D": "ssm_d",
        "mamba.dt": "ssm_dt",
        "mamba.norm": "ssm_norm",
        "mamba.out_proj": "ssm_out",
    }

    def keys(self, writer):
        super().keys(writer)
        config = self.config
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(False)

    def head_counts_kv(self):
        n = self.config["num_key_value_heads"]
        return [n if kind == "full_attention" else 0 for kind in self.config["layer_types"]]

    def named(self, name):
        number, stem, suffix = super().named(name)
        return (number, "mamba.dt", "bias") if stem == "mamba.dt_bias" else (number, stem, suffix)

    def in_layer(self, number, stem, suffix, values):
        if stem == "mamba.conv1d" and suffix == "weight":
            values = values[:, 0]
        elif stem == "mamba.A_log":
            values = -np.exp(values[:, None])
        elif stem == "mamba.D":
            values = values[:, None]
        elif stem == "mamba.norm":
            values = values.reshape(self.config["mamba_n_groups"], -1)
        return super().in_layer(number, stem, suffix, values)


class Mamba2(Twin):
    arch = "mamba2"
    top = {"embeddings": "token_embd", "norm_f": "output_norm", "lm_head": "output"}

    def keys(self, writer):
        config = self.config
        # The converter writes these where there is no attention.
        writer.add_context_length(2**20)
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])

    def named(self, name):
        number, stem, suffix = super().named(name.removeprefix("backbone."))
        return (number, "mixer.dt", "bias") if stem == "mixer.dt_bias" else (number, stem, suffix)

    def in_layer(self, number, stem, suffix, values):
        if stem == "norm":
            return {"attn_norm": values}
        part = stem.removeprefix("mixer.")
        ours = {"in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d", "A_log": "ssm_a", "D": "ssm_d"}.get(part, f"ssm_{part}")
        if part == "conv1d" and suffix == "weight":
            values = values[:, 0]
        elif part == "A_log":
            values = -np.exp(values[:, None])
        elif part == "D":
            values = values[:, None]
        elif part == "norm":
            values = values.reshape(self.config["n_groups"], -1)
        return {ours: values}


class Ling2(Olmoe):
    arch = "bailingmoe2"
    top = {"word_embeddings": "token_embd", "norm": "output_norm", "lm_head": "output"}
    layer = LAYER | {
        "attention.query_key_value": "attn_qkv",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
        "attention.dense": "attn_output",
        "mlp.gate.expert_bias": "exp_probs_b",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    }

    def keys(self, writer):
        config = self.config
        super().keys(writer)
        writer.add_rope_dimension_count(config.get("rotary_dim") or config["qk_rope_head_dim"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def named(self, name):
        number, stem, suffix = super().named(name)
        return number, stem, "bias" if stem.endswith("_bias") else suffix


class Ling3(Ling2):
    arch = "bailingmoe3"
    layer = Ling2.layer | {
        "attention.q_a_proj": "attn_q_a",
        "attention.q_a_layernorm": "attn_q_a_norm",
        "attention.q_b_proj": "attn_q_b",
        "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "attention.kv_a_layernorm": "attn_kv_a_norm",
        "attention.q_proj": "attn_q",
        "attention.k_proj": "attn_k",
        "attention.v_proj": "attn_v",
        "attention.b_proj": "ssm_beta",
        "attention.f_proj": "ssm_f_a",
        "attention.q_conv1d": "ssm_conv1d_q",
        "attention.k_conv1d": "ssm_conv1d_k",
        "attention.v_conv1d": "ssm_conv1d_v",
        "attention.A_log": "ssm_a",
        "attention.dt_bias": "ssm_dt",
        "attention.o_norm": "ssm_norm",
        "attention.o_proj": "attn_output",
    }

    def keys(self, writer):
        config = self.config
        rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
        self.config = config | {"head_dim": None}
        super().keys(writer)
        self.config = config
        writer.add_ssm_conv_kernel(config["short_conv_kernel_size"])
        writer.add_uint32("bailingmoe3.kda.head_dim", config["head_dim"])
        writer.add_bool("bailingmoe3.kda.safe_gate", config["kda_safe_gate"])
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + turned)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
        writer.add_value_length_mla(config["v_head_dim"])

    def attends(self, number):
        return (number + 1) % self.config["layer_group_size"] == 0

    def head_counts_kv(self):
        return [int(self.attends(number)) for number in range(self.config["num_hidden_layers"])]

    def in_layer(self, number, stem, suffix, values):
        if stem == "attention.g_proj":
            return {"attn_gate" if self.attends(number) else "ssm_g_a": values}
        if stem == "attention.kv_b_proj":
            nope, heads = self.config["qk_nope_head_dim"], self.config["num_attention_heads"]
            keys, values = np.split(values.reshape(heads, -1, values.shape[-1]), [nope], axis=1)
            return {"attn_k_b": keys.swapaxes(1, 2), "attn_v_b": values}
        if stem == "attention.A_log":
            values = np.exp(values[:, None])
        elif stem.endswith("_conv1d"):
            values = values[None]
        return super().in_layer(number, stem, suffix, values)


class Gemma4(Twin):
    arch = "gemma4"
    top = TOP | {
        "embed_tokens_per_layer": "per_layer_token_embd",
        "per_layer_model_projection": "per_layer_model_proj",
        "per_layer_projection_norm": "per_layer_proj_norm",
    }
    layer = LAYER | AFTER | {
        "pre_feedforward_layernorm": "ffn_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    }

    def global_head_dim(self):
        number = self.config["layer_types"].index("full_attention")
        return self.config["per_layer_config"][str(number)]["head_dim"]

    def keys(self, writer):
        config, rope = self.config, self.config["rope_parameters"]
        head_dim = config["head_dim"]
        self.config = config | {"head_dim": self.global_head_dim()}
        super().keys(writer)
        self.config = config
        self.windows(writer)
        writer.add_key_length_swa(head_dim)
        writer.add_value_length_swa(head_dim)
        writer.add_rope_dimension_count(self.global_head_dim())
        writer.add_rope_dimension_count_swa(head_dim)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])

    def feed_forward_lengths(self):
        n, n_shared = self.config["num_hidden_layers"], self.config["num_kv_shared_layers"]
        width = self.config["intermediate_size"]
        return [width * (2 if number >= n - n_shared else 1) for number in range(n)]

    def tensors(self):
        share = self.config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        n = self.global_head_dim() // 2
        n_turning = int(n * share)
        yield "rope_freqs.weight", np.array([1.0] * n_turning + [1e30] * (n - n_turning))
        yield from super().tensors()


TWINS = {
    "ernie4-5": Ernie,
    "exaone4": Exaone,
    "gemma4": Gemma4,
    "gpt-oss": GptOss,
    "granite-hybrid": GraniteHybrid,
    "granite-moe": GraniteMoe,
    "hunyuan-dense": Hunyuan,
    "lfm2": Lfm2,
    "mamba2": Mamba2,
    "ling2": Ling2,
    "ling3": Ling3,
    "ministral3": Ministral,
    "olmo3": Olmo3,
    "olmoe": Olmoe,
    "qwen35": Qwen35,
}


def logits(path, prompts):
    """llama.cpp's logits at all positions of each prompt, in float32."""
    from cyllama.llama import llama_cpp as llama

    class Model(llama.LlamaModel):
        """Required by `get_logits_ith`, but missing in the class."""

        n_vocab = 293

    llama.disable_logging()
    params = llama.LlamaModelParams()
    # Repacked weights would be multiplied by rounded activations.
    params.use_extra_bufts, params.n_gpu_layers = False, 0
    model = Model(str(path), params, False)
    for prompt in prompts:
        params = llama.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 256, 1, 1
        # Keys and values in F32, which flash attention would round.
        params.flash_attn_type, params.type_k, params.type_v = 0, 0, 0
        context = llama.LlamaContext(model, params, False)
        batch = llama.LlamaBatch(n_tokens=len(prompt), embd=0, n_seq_max=1)
        for position, token in enumerate(prompt):
            batch.add(token, position, [0], True)
        context.decode(batch)
        yield np.array([context.get_logits_ith(i) for i in range(len(prompt))])


def check(name):
    """Maximum difference from the references."""
    folder = TINY / name
    references = folder / "refs_f64.safetensors"
    references = dict(tensors(references if references.exists() else folder / "refs.safetensors"))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        TWINS[name](folder).write(path, True)
        found = list(logits(path, [references[f"{i}.ids"].tolist() for i in range(4)]))
    worst = [float(np.abs(found[i] - references[f"{i}.logits"]).max()) for i in range(4)]
    print(name, *(f"{difference:.1e}" for difference in worst), flush=True)


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--check"] or list(TWINS)
    for name in names:
        if "--check" in sys.argv:
            check(name)
        else:
            for twin in [TWINS[name]] + ([GptOssMxfp4] if name == "gpt-oss" else []):
                twin(TINY / name).write(TINY / name / twin.file, False)
