"""Writes all-MiniLM-L6-v2 as an ONNX graph, for engines that read nothing else: minilm_onnx.py FOLDER OUT.onnx

The graph is the one that exporters make of BERT, operator by operator: engines fuse it as they load it. Inputs `input_ids`,
`attention_mask` and `token_type_ids`, [B, T] of int64; output `last_hidden_state`, [B, T, C]. Weights are F32.
Needs `pip install onnx safetensors`.
"""
import json
import os
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

folder, out = sys.argv[1:]
config = json.load(open(os.path.join(folder, "config.json")))
weights = {name: w.astype(np.float32) for name, w in load_file(os.path.join(folder, "model.safetensors")).items()}
dim, heads = config["hidden_size"], config["num_attention_heads"]
head_dim = dim // heads
nodes, initializers = [], {}


def constant(name, value):
    initializers[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
    return name


def op(kind, *inputs, **attributes):
    name = f"{kind}_{len(nodes)}"
    nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
    return name


def linear(x, stem):
    w = constant(f"{stem}.weight.T", weights[f"{stem}.weight"].T)
    return op("Add", op("MatMul", x, w), constant(f"{stem}.bias", weights[f"{stem}.bias"]))


def norm(x, stem):
    scale = constant(f"{stem}.weight", weights[f"{stem}.weight"])
    shift = constant(f"{stem}.bias", weights[f"{stem}.bias"])
    return op("LayerNormalization", x, scale, shift, axis=-1, epsilon=config["layer_norm_eps"])


def gelu(x):
    erf = op("Erf", op("Div", x, constant("sqrt2", np.float32(np.sqrt(2)))))
    return op("Mul", op("Mul", x, op("Add", erf, constant("one", np.float32(1)))), constant("half", np.float32(0.5)))


def split(x, transposed=False):
    shape = constant("heads", np.array([0, 0, heads, head_dim], np.int64))
    return op("Transpose", op("Reshape", x, shape), perm=[0, 2, 3, 1] if transposed else [0, 2, 1, 3])


length = op("Gather", op("Shape", "input_ids"), constant("index1", np.int64(1)), axis=0)
end = op("Unsqueeze", length, constant("axis0", np.array([0], np.int64)))
all_positions = constant("position_ids", np.arange(config["max_position_embeddings"], dtype=np.int64)[None])
positions = op("Slice", all_positions, constant("first", np.array([0], np.int64)), end, constant("axis1", np.array([1], np.int64)))
table = lambda name: constant(name, weights[f"embeddings.{name}.weight"])
h = op("Gather", table("word_embeddings"), "input_ids", axis=0)
h = op("Add", h, op("Gather", table("token_type_embeddings"), "token_type_ids", axis=0))
h = op("Add", h, op("Gather", table("position_embeddings"), positions, axis=0))
h = norm(h, "embeddings.LayerNorm")
mask = op("Cast", op("Unsqueeze", "attention_mask", constant("axes", np.array([1, 2], np.int64))), to=TensorProto.FLOAT)
mask = op("Mul", op("Sub", constant("one", np.float32(1)), mask), constant("lowest", np.float32(-3.4028235e38)))
for layer in range(config["num_hidden_layers"]):
    p = f"encoder.layer.{layer}."
    q, k, v = (linear(h, f"{p}attention.self.{part}") for part in ["query", "key", "value"])
    scores = op("MatMul", split(q), split(k, transposed=True))
    scores = op("Add", op("Div", scores, constant("sqrt_d", np.float32(np.sqrt(head_dim)))), mask)
    mixed = op("Transpose", op("MatMul", op("Softmax", scores, axis=-1), split(v)), perm=[0, 2, 1, 3])
    mixed = op("Reshape", mixed, constant("merged", np.array([0, 0, dim], np.int64)))
    h = norm(op("Add", linear(mixed, f"{p}attention.output.dense"), h), f"{p}attention.output.LayerNorm")
    up = gelu(linear(h, f"{p}intermediate.dense"))
    h = norm(op("Add", linear(up, f"{p}output.dense"), h), f"{p}output.LayerNorm")
nodes.append(helper.make_node("Identity", [h], ["last_hidden_state"]))

text = ["batch", "sequence"]
inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, text) for n in ["input_ids", "attention_mask", "token_type_ids"]]
outputs = [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, text + [dim])]
graph = helper.make_graph(nodes, "minilm", inputs, outputs, list(initializers.values()))
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model)
onnx.save(model, out)
