"""Trains the similarity of the demo page's search, a mixture of logits on the vectors of all-MiniLM-L6-v2.

    python scripts/train_search/train.py --tilewright target/release/tilewright --encoder FOLDER

Sampled softmax with in-batch and further negatives, Adam, one thread and one seed: one machine produces the same file
each time. See README.md beside this file.
"""

import argparse
import hashlib
import json
import os
import struct
import subprocess
import time
from pathlib import Path

for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"]:
    os.environ[name] = "1"

import numpy as np

import texts

ROOT = Path(__file__).resolve().parents[2]
TEXT_SEED, SEED = 1, 7
WIDTH = 384  # of the encoder's vectors
N, M, D, H = 4, 4, 96, 32  # components of a query and an item, their size, hidden units in each part of the gate
P, TAU, EPS = N * M, 0.05, 1e-6
BATCH, EXTRA, STEPS = 256, 256, 500  # pairs per step, further passages
RATE, GATE_RATE, WARM_UP = 2e-4, 2e-3, 100  # Adam's for components and the gate; steps
N_QUERIES = 1000  # compared with all passages
NAMES = {
    "f_w": "_query_embeddings_fn._query_emb_proj_module.1.weight",
    "f_b": "_query_embeddings_fn._query_emb_proj_module.1.bias",
    "g_w": "_item_embeddings_fn._item_emb_proj_module.1.weight",
    "g_b": "_item_embeddings_fn._item_emb_proj_module.1.bias",
    "a1": "_gating_fn._query_only_partial_module.0.weight",
    "a1b": "_gating_fn._query_only_partial_module.0.bias",
    "a2": "_gating_fn._query_only_partial_module.2.weight",
    "b1": "_gating_fn._item_only_partial_module.1.weight",
    "b1b": "_gating_fn._item_only_partial_module.1.bias",
    "b2": "_gating_fn._item_only_partial_module.3.weight",
    "c1": "_gating_fn._qi_partial_module.1.weight",
    "c1b": "_gating_fn._qi_partial_module.1.bias",
    "c2": "_gating_fn._qi_partial_module.3.weight",
    "c2b": "_gating_fn._qi_partial_module.3.bias",
}


def embed(args, lines: list[str]) -> np.ndarray:
    """Vectors of texts, `[n, WIDTH]`, by tilewright; cached in a folder, since they take most of the time."""
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    path = args.cache / f"{key}.npy"
    if not path.exists():
        args.cache.mkdir(parents=True, exist_ok=True)
        source = args.cache / f"{key}.jsonl"
        source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        subprocess.run([args.tilewright, "embed", args.encoder, source, "-o", path, "--device", "cpu"], check=True)
    vectors = np.load(path)
    assert vectors.shape == (len(lines), WIDTH), f"{path}: shape {vectors.shape}, expected {(len(lines), WIDTH)}"
    return vectors


def silu(z):
    """Value and slope."""
    s = 1 / (1 + np.exp(-np.clip(z, -60, 60)))
    return z * s, s * (1 + z * (1 - s))


def start(vectors, rng):
    """Initial weights whose score is close to the cosine.

    Components are slices of the vectors' principal directions, assigned in turn so that each slice has about the same
    share of a vector's length, and the gate starts with the pairs of equal slices.
    """
    values, directions = np.linalg.eigh((vectors.T @ vectors).astype(np.float64))
    order = np.argsort(-values)[: N * D]
    slices = np.concatenate([directions[:, order[n::N]] for n in range(N)], 1).T
    dense = lambda n_out, n_in, by=1.0: rng.normal(size=(n_out, n_in)) * by / np.sqrt(n_in)
    like = 4.0 * np.eye(N, M).reshape(P)  # leaves the others about a twentieth of the weight
    return {
        "f_w": slices.copy(), "f_b": np.zeros(N * D),
        "g_w": slices.copy(), "g_b": np.zeros(M * D),
        "a1": dense(H, WIDTH, 8), "a1b": np.zeros(H), "a2": dense(P, H, 0.3),
        "b1": dense(H, WIDTH, 8), "b1b": np.zeros(H), "b2": dense(P, H, 0.3),
        "c1": dense(H, P, 0.2), "c1b": np.zeros(H), "c2": dense(P, H, 0.1), "c2b": like,
    }


def encode(w, vectors, side):
    """Unit components, `[N, n, D]`, and their previous lengths."""
    x = (vectors @ w[f"{side}_w"].T + w[f"{side}_b"]).reshape(len(vectors), -1, D).transpose(1, 0, 2)
    norm = np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), EPS)
    return x / norm, norm


def gate(w, vectors, side):
    """A gate part with one side as input, `[P, n]`, its hidden units and their slopes."""
    hidden, slope = silu(vectors @ w[f"{side}1"].T + w[f"{side}1b"])
    return w[f"{side}2"] @ hidden.T, hidden, slope


def mixture(w, f, a, g, b):
    """Logits, outputs of the gate's layers, and scores, `[n queries, n items]`; elsewhere pairs come first."""
    shape = (P, f.shape[1], g.shape[1])
    l = np.stack([f[n] @ g[m].T for n in range(N) for m in range(M)]) / TAU
    hidden, slope = silu(w["c1"] @ l.reshape(P, -1) + w["c1b"][:, None])
    z = (w["c2"] @ hidden + w["c2b"][:, None]).reshape(shape) + a[:, :, None] * b[:, None, :]
    z, z_slope = silu(z)
    e = np.exp(z - z.max(0))
    pi = e / e.sum(0)
    return l, hidden, slope, z_slope, pi, (pi * l).sum(0)


def step(w, q, x):
    """Loss of a batch in which passage i answers only query i, and its hand-written gradient."""
    n_q, n_x = len(q), len(x)
    (f, f_norm), (g, g_norm) = encode(w, q, "f"), encode(w, x, "g")
    (a, a_h, a_slope), (b, b_h, b_slope) = gate(w, q, "a"), gate(w, x, "b")
    l, c_h, c_slope, z_slope, pi, score = mixture(w, f, a, g, b)
    e = np.exp(score - score.max(1, keepdims=True))
    prob = e / e.sum(1, keepdims=True)
    own = np.arange(n_q)
    loss = -np.log(np.maximum(prob[own, own], 1e-30)).mean()

    d_score = prob / n_q
    d_score[own, own] -= 1 / n_q
    d_l = d_score * pi
    d_z = d_l * (l - score) * z_slope
    d_a, d_b = np.einsum("pqx,px->pq", d_z, b), np.einsum("pqx,pq->px", d_z, a)
    d_z = d_z.reshape(P, -1)
    d_ch = w["c2"].T @ d_z * c_slope
    d_l = ((d_l.reshape(P, -1) + w["c1"].T @ d_ch) / TAU).reshape(N, M, n_q, n_x)
    d_f = np.stack([sum(d_l[n, m] @ g[m] for m in range(M)) for n in range(N)])
    d_g = np.stack([sum(d_l[n, m].T @ f[n] for n in range(N)) for m in range(M)])
    back = lambda d, y, norm: ((d - y * (d * y).sum(-1, keepdims=True)) / norm).transpose(1, 0, 2).reshape(y.shape[1], -1)
    d_f, d_g = back(d_f, f, f_norm), back(d_g, g, g_norm)
    d_ah, d_bh = d_a.T @ w["a2"] * a_slope, d_b.T @ w["b2"] * b_slope
    return loss, {
        "f_w": d_f.T @ q, "f_b": d_f.sum(0),
        "g_w": d_g.T @ x, "g_b": d_g.sum(0),
        "a1": d_ah.T @ q, "a1b": d_ah.sum(0), "a2": d_a @ a_h,
        "b1": d_bh.T @ x, "b1b": d_bh.sum(0), "b2": d_b @ b_h,
        "c1": d_ch @ l.reshape(P, -1).T, "c1b": d_ch.sum(1), "c2": d_z @ c_h.T, "c2b": d_z.sum(1),
    }


def check_gradient(w, q, x, rng):
    """Compares the gradient with finite differences, for a few elements of each weight."""
    w = {name: value + 0.02 * rng.normal(size=value.shape) for name, value in w.items()}
    q, x = q.astype(np.float64), x.astype(np.float64)
    _, grad = step(w, q, x)
    for name, value in w.items():
        for at in rng.integers(value.size, size=4):
            keep, losses = value.flat[at], []
            for by in [1e-5, -1e-5]:
                value.flat[at] = keep + by
                losses.append(step(w, q, x)[0])
            value.flat[at] = keep
            found, expected = grad[name].flat[at], (losses[0] - losses[1]) / 2e-5
            assert abs(found - expected) < 1e-6 + 1e-4 * abs(expected), f"{name}: gradient {found}, expected {expected}"


def train(w, queries, passages, rng):
    """Weights in float32 after all steps."""
    w = {name: value.astype(np.float32) for name, value in w.items()}
    mean, power = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    began, losses, order = time.monotonic(), [], np.empty(0, np.int64)
    for i in range(1, STEPS + 1):
        if len(order) < BATCH:
            order = rng.permutation(len(queries))
        batch, order = order[:BATCH], order[BATCH:]
        extra = np.setdiff1d(rng.integers(len(passages), size=EXTRA), batch)
        loss, grad = step(w, queries[batch], passages[np.concatenate([batch, extra])])
        losses.append(loss)
        slope = min(1, i / WARM_UP) * (0.02 + 0.98 * (1 - i / STEPS))
        for name, value in w.items():
            mean[name] += 0.1 * (grad[name] - mean[name])
            power[name] += 0.001 * (grad[name] ** 2 - power[name])
            by = mean[name] / (1 - 0.9**i) / (np.sqrt(power[name] / (1 - 0.999**i)) + 1e-8)
            value -= ((RATE if name[0] in "fg" else GATE_RATE) * slope * by).astype(np.float32)
        if i % 100 == 0:
            print(f"step {i}: loss {np.mean(losses[-100:]):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return w


def stored(w):
    """Weights in the file's layout."""
    return {name: value.astype(np.float16).astype(np.float32) for name, value in w.items()}


def export(w, path):
    """Writes the file for `MolWeights`."""
    header, data = {"__metadata__": {
        "model": "all-MiniLM-L6-v2",
        "mol.query_components": str(N), "mol.item_components": str(M), "mol.temperature": str(TAU), "mol.eps": str(EPS),
    }}, b""
    for name, value in w.items():
        value = np.ascontiguousarray(value, dtype="<f2")
        entry = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        header[NAMES[name]] = entry
        data += value.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{path.name}: {path.stat().st_size} bytes, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


def refer(w, queries, passages, path):
    """Writes a few vectors and their scores in float64, for the engine's tests."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    rows = {"queries": np.round(queries.astype(np.float64), 5), "items": np.round(passages.astype(np.float64), 5)}
    scores = mixture_scores(w, rows["queries"], rows["items"])
    rows = {name: [[round(x, 5) for x in row] for row in value.tolist()] for name, value in rows.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**rows, "scores": scores.tolist()}, separators=(",", ":")) + "\n")


def mixture_scores(w, queries, passages):
    """Scores in blocks that fit in the CPU's cache."""
    (f, _), (a, *_) = encode(w, queries, "f"), gate(w, queries, "a")
    (g, _), (b, *_) = encode(w, passages, "g"), gate(w, passages, "b")
    score = np.empty((len(queries), len(passages)), queries.dtype)
    for i in range(0, len(queries), 64):
        for j in range(0, len(passages), 512):
            rows, cols = slice(i, i + 64), slice(j, j + 512)
            score[rows, cols] = mixture(w, f[:, rows], a[:, rows], g[:, cols], b[:, cols])[-1]
    return score


def measures(score, own):
    """Hit rates at 1, 10 and 50 and the mean reciprocal rank; `own` holds the indices of the right passages."""
    rank = 1 + (score > score[np.arange(len(own)), own][:, None]).sum(1)
    return [*((rank <= k).mean() for k in [1, 10, 50]), (1 / rank).mean()]


def compare(title, w, queries, passages, own):
    for name, score in [("cosine", queries @ passages.T), ("mixture", mixture_scores(w, queries, passages))]:
        rates = " | ".join(f"{rate:.3f}" for rate in measures(score, own))
        print(f"| {title} | {len(passages)} | {name} | {rates} |", flush=True)
        title = ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilewright", default="tilewright", help="the engine's command")
    parser.add_argument("--encoder", required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="folder of the data files")
    parser.add_argument("--cache", type=Path, default=ROOT / "target/search-vectors", help="folder in which vectors are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "www/mol.safetensors")
    parser.add_argument("--reference", type=Path, default=ROOT / "tests/data/search/reference.json")
    args = parser.parse_args()

    rng = np.random.default_rng(TEXT_SEED)
    pairs = texts.wordnet(args.wordnet, rng)
    kinds, queries, passages = (list(column) for column in zip(*pairs))
    kinds, queries, passages = np.array(kinds), embed(args, queries), embed(args, passages)
    others = {}
    for name, (q, x, own) in {"documents": texts.documents(ROOT), "docstrings": texts.docstrings(rng)}.items():
        others[name] = (embed(args, q), embed(args, x), np.array(own))

    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(kinds))
    held, rest = order[: len(order) // 10], order[len(order) // 10 :]
    w = start(np.concatenate([queries[rest], passages[rest]]), rng)
    check_gradient(w, queries[rest[:5]], passages[rest[:9]], rng)

    def report(w):
        for kind in texts.KINDS:
            own = np.flatnonzero(kinds[held] == kind)
            compare(f"{kind}, held out", w, queries[held[own]], passages[held], own)
        for name, (q, x, own) in others.items():
            compare(name, w, q, x, own)

    print("| queries | passages | similarity | hit at 1 | at 10 | at 50 | reciprocal rank |\n|---|---|---|---|---|---|---|")
    report({name: value.astype(np.float32) for name, value in w.items()})
    w = stored(train(w, queries[rest], passages[rest], rng))
    export(w, args.out)
    print("As stored:")
    report(w)
    some = held[rng.permutation(len(held))[:N_QUERIES]]
    compare("all held out, all passages", w, queries[some], passages, some)
    refer(w, queries[held[:2]], passages[held[:4]], args.reference)


if __name__ == "__main__":
    main()
