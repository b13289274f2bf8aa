"""Trains a small mixture of logits on simulated clicks and exports it for tilewright.

    python examples/mol/train.py        # numpy alone; writes mol.safetensors beside this file

The world: items have hidden tastes, users have several interests, and a click is drawn by the best match of any
interest with an item. A single dot product cannot express "any of", a mixture can. The model sees users and items as
vectors of 36 and 16 numbers. Sampled softmax with in-batch negatives, Adam, one seed: the same file each time on one
version of numpy.
"""

import json
import struct
from pathlib import Path

import numpy as np

SEED, STEPS, BATCH = 7, 500, 64
INTERESTS, TASTE = 3, 12  # per user; numbers in each
Q, X = INTERESTS * TASTE, TASTE + 4  # sizes of a user's and an item's vector
N, M, D, H = 4, 4, 16, 32  # components, their size, width of the gate's hidden layers
P, TAU, RATE = N * M, 0.05, 8e-3

rng = np.random.default_rng(SEED)


def world(n):
    """Users, and the item that each clicked: near one of the interests, and of good quality."""
    interests = rng.normal(size=(n, INTERESTS, TASTE)).astype(np.float32)
    clicked = interests[np.arange(n), rng.integers(INTERESTS, size=n)]
    taste = clicked + 0.35 * rng.normal(size=(n, TASTE))
    extra = rng.normal(size=(n, X - TASTE))
    return interests.reshape(n, Q), np.concatenate([taste, extra], 1).astype(np.float32)


def sigmoid(z):
    return 1 / (1 + np.exp(-np.clip(z, -60, 60)))


def silu(z):
    s = sigmoid(z)
    return z * s, s * (1 + z * (1 - s))  # value, slope


def dense(n_out, n_in):
    bound = np.sqrt(6 / (n_in + n_out))
    return rng.uniform(-bound, bound, size=(n_out, n_in))


w = {
    "f_w": dense(N * D, Q), "f_b": np.zeros(N * D),
    "g_w": dense(M * D, X), "g_b": np.zeros(M * D),
    "a1": dense(H, Q), "a1b": np.zeros(H), "a2": dense(P, H),
    "b1": dense(H, X), "b1b": np.zeros(H), "b2": dense(P, H),
    "c1": dense(H, P) / 4, "c1b": np.zeros(H), "c2": dense(P, H) / 4, "c2b": np.zeros(P),
}


def normalised(x):
    norm = np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
    return x / norm, norm


def step(q, x):
    """Loss of a batch in which user i clicked item i, and its hand-written gradient."""
    b = len(q)
    f, f_norm = normalised((q @ w["f_w"].T + w["f_b"]).reshape(b, N, D))
    g, g_norm = normalised((x @ w["g_w"].T + w["g_b"]).reshape(b, M, D))
    l = (f.reshape(b * N, D) @ g.reshape(b * M, D).T).reshape(b, N, b, M).transpose(0, 2, 1, 3).reshape(b, b, P) / TAU
    a_h, a_slope = silu(q @ w["a1"].T + w["a1b"])
    b_h, b_slope = silu(x @ w["b1"].T + w["b1b"])
    a, bb = a_h @ w["a2"].T, b_h @ w["b2"].T
    c_h, c_slope = silu(l @ w["c1"].T + w["c1b"])
    zz = a[:, None] * bb[None] + c_h @ w["c2"].T + w["c2b"]
    gate, gate_slope = silu(zz)
    e = np.exp(gate - gate.max(-1, keepdims=True))
    pi = e / e.sum(-1, keepdims=True)
    score = (pi * l).sum(-1)
    top = score.max(1, keepdims=True)
    prob = np.exp(score - top)
    prob /= prob.sum(1, keepdims=True)
    loss = -np.log(np.maximum(prob[np.arange(b), np.arange(b)], 1e-30)).mean()

    d_score = (prob - np.eye(b, dtype=prob.dtype)) / b
    d_l = d_score[..., None] * pi
    d_z = d_l * (l - score[..., None]) * gate_slope
    d_a, d_b = (d_z * bb[None]).sum(1), (d_z * a[:, None]).sum(0)
    d_ch = d_z @ w["c2"] * c_slope
    d_l = d_l + d_ch @ w["c1"]
    d_l = d_l.reshape(b, b, N, M).transpose(0, 2, 1, 3).reshape(b * N, b * M) / TAU
    d_f = (d_l @ g.reshape(b * M, D)).reshape(b, N, D)
    d_g = (d_l.T @ f.reshape(b * N, D)).reshape(b, M, D)
    d_f = ((d_f - f * (d_f * f).sum(-1, keepdims=True)) / f_norm).reshape(b, N * D)
    d_g = ((d_g - g * (d_g * g).sum(-1, keepdims=True)) / g_norm).reshape(b, M * D)
    d_ah, d_bh = d_a @ w["a2"] * a_slope, d_b @ w["b2"] * b_slope
    flat = lambda t: t.reshape(-1, t.shape[-1])
    return loss, {
        "f_w": d_f.T @ q, "f_b": d_f.sum(0),
        "g_w": d_g.T @ x, "g_b": d_g.sum(0),
        "a1": d_ah.T @ q, "a1b": d_ah.sum(0), "a2": d_a.T @ a_h,
        "b1": d_bh.T @ x, "b1b": d_bh.sum(0), "b2": d_b.T @ b_h,
        "c1": flat(d_ch).T @ flat(l), "c1b": flat(d_ch).sum(0), "c2": flat(d_z).T @ flat(c_h), "c2b": flat(d_z).sum(0),
    }


def export(path):
    names = {
        "_query_embeddings_fn._query_emb_proj_module.1.weight": w["f_w"],
        "_query_embeddings_fn._query_emb_proj_module.1.bias": w["f_b"],
        "_item_embeddings_fn._item_emb_proj_module.1.weight": w["g_w"],
        "_item_embeddings_fn._item_emb_proj_module.1.bias": w["g_b"],
        "_gating_fn._query_only_partial_module.0.weight": w["a1"],
        "_gating_fn._query_only_partial_module.0.bias": w["a1b"],
        "_gating_fn._query_only_partial_module.2.weight": w["a2"],
        "_gating_fn._item_only_partial_module.1.weight": w["b1"],
        "_gating_fn._item_only_partial_module.1.bias": w["b1b"],
        "_gating_fn._item_only_partial_module.3.weight": w["b2"],
        "_gating_fn._qi_partial_module.1.weight": w["c1"],
        "_gating_fn._qi_partial_module.1.bias": w["c1b"],
        "_gating_fn._qi_partial_module.3.weight": w["c2"],
        "_gating_fn._qi_partial_module.3.bias": w["c2b"],
    }
    header, data = {"__metadata__": {
        "mol.query_components": str(N), "mol.item_components": str(M), "mol.temperature": str(TAU),
    }}, b""
    for name, value in names.items():
        value = np.ascontiguousarray(value, dtype="<f4")
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    print(f"{path.name}: {path.stat().st_size} bytes")


def check_gradient():
    """Compares the gradient with finite differences, for a few elements of each weight."""
    q, x = (v.astype(np.float64) for v in world(6))
    _, grad = step(q, x)
    for name, value in w.items():
        for at in rng.integers(value.size, size=3):
            keep = value.flat[at]
            value.flat[at] = keep + 1e-5
            high, _ = step(q, x)
            value.flat[at] = keep - 1e-5
            low, _ = step(q, x)
            value.flat[at] = keep
            assert abs((high - low) / 2e-5 - grad[name].flat[at]) < 1e-5, name


check_gradient()
w = {name: value.astype(np.float32) for name, value in w.items()}
mean, power = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
for i in range(1, STEPS + 1):
    loss, grad = step(*world(BATCH))
    for name, value in w.items():
        mean[name] += 0.1 * (grad[name] - mean[name])
        power[name] += 0.001 * (grad[name] ** 2 - power[name])
        rate = RATE * min(1, i / 50) * (0.05 + 0.95 * (1 - i / STEPS))
        value -= (rate * mean[name] / (1 - 0.9**i) / (np.sqrt(power[name] / (1 - 0.999**i)) + 1e-8)).astype(np.float32)
    if i % 100 == 0 or i == 1:
        print(f"step {i}: loss {loss:.3f}, chance {np.log(BATCH):.3f}", flush=True)
export(Path(__file__).with_name("mol.safetensors"))
