"""Writes a Whisper model as ONNX graphs, for engines that read nothing else: whisper_onnx.py FOLDER OUT

FOLDER is a Hugging Face folder for English alone, as `scripts/whisper_from_ctranslate2.py` writes it. OUT gets what transformers.js
reads: `onnx/encoder_model.onnx` and `onnx/decoder_model_merged.onnx` with weights of F32, the same with weights of 8 bits
(`_quantized`), configurations and the tokenizer. Operators are those that exporters write; the decoder computes the encoder's keys and
values in its first pass alone. Needs `pip install onnx onnxruntime safetensors`.
"""
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors.numpy import load_file

folder, out = map(Path, sys.argv[1:])
config = json.loads((folder / "config.json").read_text())
generation = json.loads((folder / "generation_config.json").read_text())
weights = {name: w.astype(np.float32) for name, w in load_file(folder / "model.safetensors").items()}
dim = config["d_model"]


class Graph:
    def __init__(self, heads):
        self.heads, self.head_dim = heads, dim // heads
        self.nodes, self.initializers = [], {}

    def constant(self, name, value):
        self.initializers[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def ints(self, *values):
        return self.constant(f"ints_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def op(self, kind, *inputs, **attributes):
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def linear(self, x, stem):
        x = self.op("MatMul", x, self.constant(f"{stem}.weight.T", weights[f"{stem}.weight"].T))
        bias = weights.get(f"{stem}.bias")
        return x if bias is None else self.op("Add", x, self.constant(f"{stem}.bias", bias))

    def norm(self, x, stem):
        parts = [self.constant(f"{stem}.{part}", weights[f"{stem}.{part}"]) for part in ["weight", "bias"]]
        return self.op("LayerNormalization", x, *parts, axis=-1, epsilon=1e-5)

    def gelu(self, x):
        erf = self.op("Erf", self.op("Div", x, self.constant("sqrt2", np.float32(np.sqrt(2)))))
        half = self.op("Mul", x, self.op("Add", erf, self.constant("one", np.float32(1))))
        return self.op("Mul", half, self.constant("half", np.float32(0.5)))

    def split(self, x):
        return self.op("Transpose", self.op("Reshape", x, self.ints(0, -1, self.heads, self.head_dim)), perm=[0, 2, 1, 3])

    def keys(self, x, stem):
        return [self.split(self.linear(x, f"{stem}.{part}_proj")) for part in "kv"]

    def attention(self, x, stem, k, v, mask=None):
        q = self.op("Mul", self.linear(x, f"{stem}.q_proj"), self.constant("scale", np.float32(self.head_dim**-0.5)))
        scores = self.op("MatMul", self.split(q), self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = scores if mask is None else self.op("Add", scores, mask)
        mixed = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", mixed, self.ints(0, -1, dim)), f"{stem}.out_proj")

    def feed_forward(self, h, stem):
        up = self.gelu(self.linear(self.norm(h, f"{stem}.final_layer_norm"), f"{stem}.fc1"))
        return self.op("Add", h, self.linear(up, f"{stem}.fc2"))

    def save(self, name, inputs, outputs):
        value = lambda name, kind, shape: helper.make_tensor_value_info(name, kind, shape)
        graph = helper.make_graph(self.nodes, name, [value(*it) for it in inputs], [value(*it) for it in outputs], list(self.initializers.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        path = out / "onnx" / f"{name}.onnx"
        onnx.save(model, path)
        # Convolutions of integers are not in all engines.
        quantize_dynamic(path, path.with_stem(f"{name}_quantized"), weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gather"])


def encoder():
    g = Graph(config["encoder_attention_heads"])
    x = "input_features"
    for stem, stride in [("model.encoder.conv1", 1), ("model.encoder.conv2", 2)]:
        parts = [g.constant(f"{stem}.{part}", weights[f"{stem}.{part}"]) for part in ["weight", "bias"]]
        x = g.gelu(g.op("Conv", x, *parts, kernel_shape=[3], pads=[1, 1], strides=[stride]))
    positions = g.constant("positions", weights["model.encoder.embed_positions.weight"])
    h = g.op("Add", g.op("Transpose", x, perm=[0, 2, 1]), positions)
    for layer in range(config["encoder_layers"]):
        stem = f"model.encoder.layers.{layer}"
        x = g.norm(h, f"{stem}.self_attn_layer_norm")
        h = g.op("Add", h, g.attention(x, f"{stem}.self_attn", *g.keys(x, f"{stem}.self_attn")))
        h = g.feed_forward(h, stem)
    g.nodes.append(helper.make_node("Identity", [g.norm(h, "model.encoder.layer_norm")], ["last_hidden_state"]))
    n_rows = config["max_source_positions"]
    g.save(
        "encoder_model",
        [("input_features", TensorProto.FLOAT, ["batch", config["num_mel_bins"], 2 * n_rows])],
        [("last_hidden_state", TensorProto.FLOAT, ["batch", n_rows, dim])],
    )


def decoder():
    g = Graph(config["decoder_attention_heads"])
    inputs = [("input_ids", TensorProto.INT64, ["batch", "tokens"]), ("encoder_hidden_states", TensorProto.FLOAT, ["batch", "rows", dim])]
    outputs = [("logits", TensorProto.FLOAT, ["batch", "tokens", config["vocab_size"]])]
    size = lambda x, axis: g.op("Gather", g.op("Shape", x), g.constant(f"axis{axis}", np.int64(axis)), axis=0)
    n_past = size("past_key_values.0.decoder.key", 2)
    end = g.op("Add", n_past, size("input_ids", 1))
    step = g.constant("step", np.int64(1))
    own = g.op("Range", n_past, end, step)
    all_positions = g.op("Range", g.constant("axis0", np.int64(0)), end, step)
    is_later = g.op("Greater", g.op("Unsqueeze", all_positions, g.ints(0)), g.op("Unsqueeze", own, g.ints(1)))
    mask = g.op("Where", is_later, g.constant("lowest", np.float32(-3.4028235e38)), g.constant("zero", np.float32(0)))
    h = g.op("Gather", g.constant("tokens", weights["model.decoder.embed_tokens.weight"]), "input_ids", axis=0)
    h = g.op("Add", h, g.op("Gather", g.constant("positions", weights["model.decoder.embed_positions.weight"]), own, axis=0))
    for layer in range(config["decoder_layers"]):
        stem = f"model.decoder.layers.{layer}"
        names = {kind: [f"{layer}.{kind}.{part}" for part in ["key", "value"]] for kind in ["decoder", "encoder"]}
        for name in names["decoder"] + names["encoder"]:
            shape = ["batch", g.heads, "past" if "decoder" in name else "past_rows", g.head_dim]
            inputs.append((f"past_key_values.{name}", TensorProto.FLOAT, shape))
            outputs.append((f"present.{name}", TensorProto.FLOAT, ["batch", g.heads, None, g.head_dim]))
        x = g.norm(h, f"{stem}.self_attn_layer_norm")
        k, v = (g.op("Concat", f"past_key_values.{name}", new, axis=2) for name, new in zip(names["decoder"], g.keys(x, f"{stem}.self_attn")))
        h = g.op("Add", h, g.attention(x, f"{stem}.self_attn", k, v, mask))
        x = g.norm(h, f"{stem}.encoder_attn_layer_norm")
        before = len(g.nodes)
        first = g.keys("encoder_hidden_states", f"{stem}.encoder_attn")
        computed, g.nodes[before:] = g.nodes[before:], []
        branch = lambda name, nodes, found: helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(it, TensorProto.FLOAT, None) for it in found])
        kept = [f"kept.{name}" for name in names["encoder"]]
        identities = [helper.make_node("Identity", [f"past_key_values.{name}"], [to]) for name, to in zip(names["encoder"], kept)]
        cross = [f"present.{name}" for name in names["encoder"]]
        branches = {"then_branch": branch(f"kept{layer}", identities, kept), "else_branch": branch(f"computed{layer}", computed, first)}
        g.nodes.append(helper.make_node("If", ["use_cache_branch"], cross, name=f"If_{len(g.nodes)}", **branches))
        h = g.op("Add", h, g.attention(x, f"{stem}.encoder_attn", *cross))
        h = g.feed_forward(h, stem)
        g.nodes += [helper.make_node("Identity", [it], [f"present.{name}"]) for name, it in zip(names["decoder"], [k, v])]
    h = g.norm(h, "model.decoder.layer_norm")
    head = g.constant("tokens.T", weights["model.decoder.embed_tokens.weight"].T)
    g.nodes.append(helper.make_node("MatMul", [h, head], ["logits"], name="logits"))
    g.save("decoder_model_merged", inputs + [("use_cache_branch", TensorProto.BOOL, [1])], outputs)


(out / "onnx").mkdir(parents=True, exist_ok=True)
encoder()
decoder()
shutil.copy(folder / "tokenizer.json", out)
end, start = generation["eos_token_id"], generation["decoder_start_token_id"]
tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
no_timestamps = next(token["id"] for token in tokens if token["content"] == "<|notimestamps|>")
for name, content in {
    "config.json": dict(config, architectures=["WhisperForConditionalGeneration"], is_encoder_decoder=True, decoder_start_token_id=start, eos_token_id=end, pad_token_id=end),
    "generation_config.json": dict(generation, no_timestamps_token_id=no_timestamps, pad_token_id=end, bos_token_id=end, max_length=config["max_target_positions"]),
    "tokenizer_config.json": dict(tokenizer_class="WhisperTokenizer", model_max_length=1024),
    "preprocessor_config.json": dict(
        feature_extractor_type="WhisperFeatureExtractor", processor_class="WhisperProcessor", feature_size=config["num_mel_bins"], chunk_length=30,
        hop_length=160, n_fft=400, n_samples=480_000, nb_max_frames=3000, sampling_rate=16_000, padding_side="right", padding_value=0.0,
    ),
}.items():
    (out / name).write_text(json.dumps(content, indent=1) + "\n")
