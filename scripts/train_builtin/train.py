"""Trains the built-in model from scratch and writes it as GGUF: grammar -> tokenizer -> training -> Q8_0 file.

    python scripts/train_builtin/train.py --out assets/stories.gguf

One thread, a fixed seed and number of steps: the same machine produces the same file. See README.md beside this file.
"""

import argparse
import io
import os
import time
from pathlib import Path

# XLA sizes its thread pool by the available cores and splits loops accordingly, so this is set before it starts.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece as spm

import grammar
from model import Config, adamw_step, forward, init_params, loss_fn

SEED = 7
BATCH, SEQ = 4, 288  # sequences per step, tokens per sequence: 99 of 100 stories fit
PEAK_LR, WARMUP = 4e-3, 200
N_TOKENIZER_STORIES, N_HELD_OUT = 20_000, 400
BOS, EOS = 1, 2


def train_tokenizer(vocab_size: int) -> spm.SentencePieceProcessor:
    """Byte-pair encoding on training stories; letters and digits are pieces even if no story uses them."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=(grammar.story("train", i)[0] for i in range(N_TOKENIZER_STORIES)),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        required_chars="ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,!?'\"-:;",
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def batches(tokenizer: spm.SentencePieceProcessor, n_steps: int):
    """Rows of SEQ + 1 tokens. A row begins with a story, and further stories follow until it is full.

    So most stories are seen whole, at the positions that they have in inference. No story repeats.
    """
    index = 0
    for _ in range(n_steps):
        rows = np.empty((BATCH, SEQ + 1), np.int32)
        for row in rows:
            ids: list[int] = []
            while len(ids) <= SEQ:
                ids += [BOS, *tokenizer.encode(grammar.story("train", index)[0]), EOS]
                index += 1
            row[:] = ids[: SEQ + 1]
        yield rows


def train(cfg: Config, tokenizer: spm.SentencePieceProcessor, n_steps: int):
    """AdamW, linear warm-up, then a cosine down to a fiftieth of the peak."""

    @jax.jit
    def update(params, moments, tokens, lr, step):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, cfg)
        return *adamw_step(params, moments, grads, lr, step), loss

    params = init_params(cfg, SEED)
    moments = {name: (jnp.zeros_like(p), jnp.zeros_like(p)) for name, p in params.items()}
    start, recent = time.time(), []
    for step, tokens in enumerate(batches(tokenizer, n_steps), 1):
        done = max(0.0, (step - WARMUP) / max(1, n_steps - WARMUP))
        lr = PEAK_LR * min(1.0, step / WARMUP) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * done)))
        params, moments, loss = update(params, moments, tokens, np.float32(lr), np.float32(step))
        recent.append(float(loss))
        if step % 100 == 0 or step == n_steps:
            rate = step * BATCH * SEQ / (time.time() - start)
            print(f"step {step}/{n_steps}  loss {np.mean(recent):.4f}  {rate:.0f} tokens/s", flush=True)
            recent = []
    return {name: np.asarray(p) for name, p in params.items()}


def write_gguf(path: Path, cfg: Config, params, tokenizer: spm.SentencePieceProcessor) -> dict[str, np.ndarray]:
    """Writes the file and returns the weights as read back from it, in float32.

    Matrices become Q8_0. The output matrix is the embedding, so the file has no `output.weight`.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tilewright stories")
    writer.add_author("tilewright")
    writer.add_description(
        "A very small Llama that tells children's stories, trained from nothing on text from tilewright's own grammar."
    )
    writer.add_license("MIT OR Apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(cfg.max_seq_len)
    writer.add_embedding_length(cfg.dim)
    writer.add_block_count(cfg.n_layers)
    writer.add_feed_forward_length(cfg.ffn_dim)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_heads)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_vocab_size(cfg.vocab_size)

    types = []
    for i in range(cfg.vocab_size):
        if tokenizer.is_unknown(i):
            types.append(gguf.TokenType.UNKNOWN)
        elif tokenizer.is_control(i):
            types.append(gguf.TokenType.CONTROL)
        elif tokenizer.is_byte(i):
            types.append(gguf.TokenType.BYTE)
        else:
            types.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokenizer.id_to_piece(i) for i in range(cfg.vocab_size)])
    writer.add_token_scores([tokenizer.get_score(i) for i in range(cfg.vocab_size)])
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)

    stored = {}
    for name, value in params.items():
        if value.ndim == 2:
            blocks = gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            stored[name] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", value)
            stored[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def held_out(cfg: Config, tokenizer: spm.SentencePieceProcessor, params) -> tuple[float, float, float]:
    """Nats per token, each story alone, and per character; and the nats per token of the grammar's choices."""

    @jax.jit
    def story_loss(params, tokens, mask):
        logits = forward(params, tokens[:, :-1], cfg)
        target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - target) * mask)

    nats = bits = n_tokens = n_chars = 0
    for index in range(N_HELD_OUT):
        text, story_bits = grammar.story("held-out", index)
        ids = [BOS, *tokenizer.encode(text), EOS]
        tokens = np.zeros((1, cfg.max_seq_len + 1), np.int32)
        tokens[0, : len(ids)] = ids
        mask = np.arange(cfg.max_seq_len)[None, :] < len(ids) - 1
        nats += float(story_loss(params, tokens, mask.astype(np.float32)))
        bits, n_tokens, n_chars = bits + story_bits, n_tokens + len(ids) - 1, n_chars + len(text)
    return nats / n_tokens, nats / n_chars, bits * np.log(2) / n_tokens


def sample(cfg: Config, tokenizer: spm.SentencePieceProcessor, params, prompt: str, temperature: float, seed: int) -> str:
    """Continues `prompt` until the end of the story or of the context; temperature 0 is greedy."""
    step = jax.jit(lambda params, tokens, last: forward(params, tokens, cfg)[0, last])
    rng = np.random.default_rng(seed)
    ids = [BOS, *tokenizer.encode(prompt)]
    while len(ids) < cfg.max_seq_len:
        tokens = np.zeros((1, cfg.max_seq_len), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.asarray(step(params, tokens, len(ids) - 1), np.float64)
        if temperature > 0:
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS:
            return tokenizer.decode(ids)
    return tokenizer.decode(ids) + " [no end]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--steps", type=int, default=4500, help=f"updates of {BATCH * SEQ} tokens each")
    parser.add_argument("--params", type=Path, help="trained float32 parameters (.npz): read if there, else written")
    args = parser.parse_args()

    cfg = Config()
    tokenizer = train_tokenizer(cfg.vocab_size)
    if args.params and args.params.exists():
        params = dict(np.load(args.params))
    else:
        params = train(cfg, tokenizer, args.steps)
        if args.params:
            np.savez(args.params, **params)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    stored = write_gguf(args.out, cfg, params, tokenizer)

    for label, weights in (("float32", params), ("as stored", stored)):
        nats, per_char, floor = held_out(cfg, tokenizer, weights)
        print(f"held-out, {label}: perplexity {np.exp(nats):.3f} per token, {per_char / np.log(2):.4f} bits per character")
    print(f"the grammar's own choices: perplexity {np.exp(floor):.3f} per token, at most")
    prompts = ["Once upon a time", "One day", "The little fox", "There was a robot named Bip"]
    for seed, prompt in enumerate(prompts):
        for temperature in (0.0, 0.8):
            print(f"\n[{temperature}] {sample(cfg, tokenizer, stored, prompt, temperature, seed)}")
    print(f"\n{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
