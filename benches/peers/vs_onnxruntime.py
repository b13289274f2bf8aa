"""Embeddings next to ONNX Runtime on the CPU: the same model, texts, batches and number of threads, alternating rounds.

usage: vs_onnxruntime.py FOLDER MODEL.onnx [--tilewright target/release/tilewright --threads 2 --rounds 5]

MODEL.onnx is FOLDER's model, see minilm_onnx.py. Needs `pip install onnxruntime tokenizers numpy`. Both sides take texts,
which they encode anew each time, and give normalised means; ONNX Runtime's batches are made as sentence-transformers makes
them: texts sorted by length, each batch padded to its longest. Ours come from `tilewright bench embed`, whose rate is the
median of five times through all texts. Loading and a first round are not counted.
"""
import argparse
import json
import os
import subprocess
import tempfile
import time

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("folder")
parser.add_argument("onnx")
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()

WORDS = "the river runs quietly past an old engine that nobody has repaired since the spring flood".split()
# No two are the same: those of one length begin elsewhere or go on in other steps.
texts = [" ".join(WORDS[(i + j * (7 if i < 32 else 5)) % 16] for j in range(3 + i * i % 58)) for i in range(64)]
SIZES = [1, 8, 32]

options = ort.SessionOptions()
options.intra_op_num_threads = args.threads
session = ort.InferenceSession(args.onnx, options, providers=["CPUExecutionProvider"])
tokenizer = Tokenizer.from_file(os.path.join(args.folder, "tokenizer.json"))
tokenizer.enable_truncation(256)
tokenizer.enable_padding()


def embed(batch):
    encoded = tokenizer.encode_batch(batch)
    ids = np.array([e.ids for e in encoded], np.int64)
    mask = np.array([e.attention_mask for e in encoded], np.int64)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    hidden = session.run(None, inputs)[0]
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def onnxruntime_rates():
    rates = {}
    for size in SIZES:
        start = time.perf_counter()
        # Sorted within a call of 64 texts, as encode() does; one text at a time has no order.
        order = sorted(texts, key=len) if size > 1 else texts
        for i in range(0, len(order), size):
            embed(order[i : i + size])
        rates[size] = len(texts) / (time.perf_counter() - start)
    return rates


def tilewright_rates():
    env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    rates = {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(texts))
        file.flush()
        for size in SIZES:
            command = [args.tilewright, "bench", "embed", args.folder, "--device", "cpu", "--texts", file.name, "--json"]
            command += ["--batch", str(size), "--repetitions", str(5 * len(texts) // size), "--in-flight", "0", "--no-naive"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
            rates[size] = json.loads(done.stdout)["rows"][0]["texts_per_second"]["median"]
    return rates


engines = {"onnxruntime": onnxruntime_rates, "tilewright": tilewright_rates}
for measure in engines.values():
    measure()
rates = {name: [] for name in engines}
for _ in range(args.rounds):
    for name, measure in engines.items():
        rates[name].append(measure())

print(f"{os.path.basename(os.path.abspath(args.folder))}, {args.threads} threads, {args.rounds} rounds, onnxruntime {ort.__version__}")
for size in SIZES:
    medians = {name: float(np.median([rate[size] for rate in rates[name]])) for name in engines}
    print(f"batches of {size:>2}: onnxruntime {medians['onnxruntime']:8.1f}, tilewright {medians['tilewright']:8.1f} texts/s,"
          f" ratio {medians['tilewright'] / medians['onnxruntime']:.2f}")
