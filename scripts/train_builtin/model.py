"""The Llama forward pass, the loss and AdamW, in jax.

Shapes: B sequences, T tokens, C model width, H heads, Hkv key/value heads, D head size, F feed-forward width,
V vocabulary. Matrices are stored as in GGUF, [rows out, columns in], with GGUF's tensor names.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Config:
    """Sizes of the network; all sides of matrices are multiples of 32, the Q8_0 block."""

    vocab_size: int = 1024
    dim: int = 128
    ffn_dim: int = 384
    n_layers: int = 5
    n_heads: int = 4
    n_kv_heads: int = 2
    max_seq_len: int = 512
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def init_params(cfg: Config, seed: int) -> dict[str, jax.Array]:
    """Normal weights of variance 1/columns; the two matrices that write to the residual stream start smaller."""
    rng = np.random.default_rng(seed)
    kv_dim = cfg.n_kv_heads * cfg.head_dim
    params = {"token_embd": rng.normal(0, 0.02, (cfg.vocab_size, cfg.dim)), "output_norm": np.ones(cfg.dim)}
    shapes = {
        "attn_q": (cfg.dim, cfg.dim),
        "attn_k": (kv_dim, cfg.dim),
        "attn_v": (kv_dim, cfg.dim),
        "attn_output": (cfg.dim, cfg.dim),
        "ffn_gate": (cfg.ffn_dim, cfg.dim),
        "ffn_up": (cfg.ffn_dim, cfg.dim),
        "ffn_down": (cfg.dim, cfg.ffn_dim),
    }
    for layer_idx in range(cfg.n_layers):
        for name, (rows, cols) in shapes.items():
            std = cols**-0.5
            if name in ("attn_output", "ffn_down"):
                std /= (2 * cfg.n_layers) ** 0.5
            params[f"blk.{layer_idx}.{name}"] = rng.normal(0, std, (rows, cols))
        for name in ("attn_norm", "ffn_norm"):
            params[f"blk.{layer_idx}.{name}"] = np.ones(cfg.dim)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def rms_norm(x, weight, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x, cos, sin):
    """Rotates the pairs (2i, 2i+1) of x [B, T, H, D], as GGUF's llama architecture does.

    The result holds all first halves of the pairs, then all second halves. Queries and keys are reordered alike, so
    their products equal those of the interleaved layout.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def forward(params, tokens, cfg: Config):
    """tokens [B, T] -> logits [B, T, V]."""
    B, T = tokens.shape
    group = cfg.n_heads // cfg.n_kv_heads
    freqs = cfg.rope_theta ** (-np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    angles = np.arange(T)[:, None] * freqs[None, :]
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None, :] for f in (np.cos, np.sin))
    hidden_from_query = jnp.asarray(np.triu(np.full((T, T), -1e9), 1), jnp.float32)

    x = params["token_embd"][tokens]
    for layer_idx in range(cfg.n_layers):
        w = {name: params[f"blk.{layer_idx}.{name}"] for name in
             ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
        h = rms_norm(x, w["attn_norm"], cfg.norm_eps)
        q = rope((h @ w["attn_q"].T).reshape(B, T, cfg.n_heads, cfg.head_dim), cos, sin)
        k = rope((h @ w["attn_k"].T).reshape(B, T, cfg.n_kv_heads, cfg.head_dim), cos, sin)
        v = (h @ w["attn_v"].T).reshape(B, T, cfg.n_kv_heads, cfg.head_dim)
        q = q.reshape(B, T, cfg.n_kv_heads, group, cfg.head_dim) * cfg.head_dim**-0.5
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) + hidden_from_query
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), v)
        x = x + mixed.reshape(B, T, cfg.dim) @ w["attn_output"].T
        h = rms_norm(x, w["ffn_norm"], cfg.norm_eps)
        x = x + (jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return rms_norm(x, params["output_norm"], cfg.norm_eps) @ params["token_embd"].T


def loss_fn(params, tokens, cfg: Config):
    """Mean cross-entropy in nats of each token given those before it; tokens [B, T + 1]."""
    logits = forward(params, tokens[:, :-1], cfg)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


def adamw_step(params, moments, grads, lr, step, beta1=0.9, beta2=0.98, eps=1e-9, decay=0.05, clip=1.0):
    """One AdamW update (Loshchilov & Hutter 2019, arXiv:1711.05101) after clipping the global gradient norm."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    new_params, new_moments = {}, {}
    for name, p in params.items():
        g = grads[name] * scale
        m = beta1 * moments[name][0] + (1 - beta1) * g
        v = beta2 * moments[name][1] + (1 - beta2) * g * g
        update = m / (1 - beta1**step) / (jnp.sqrt(v / (1 - beta2**step)) + eps)
        if p.ndim == 2:  # no decay for norms
            update = update + decay * p
        new_params[name], new_moments[name] = p - lr * update, (m, v)
    return new_params, new_moments
