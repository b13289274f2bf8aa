"""A float64 NumPy Llama over the weights of a GGUF file: the reference for the engine's tests.

    python scripts/train_builtin/reference.py assets/stories.gguf --out tests/data/builtin/reference.json
    python scripts/train_builtin/reference.py OTHER.gguf --check CASES.json --variant q8_0

It shares nothing with model.py: one token at a time with a KV cache, RoPE as a rotation of complex numbers, weights
and vocabulary from the file alone, its own tokenizer. `--check` compares it with another implementation's greedy ids:
a list `cases` of `ids` and `greedy[variant].ids` and `.margins`.
"""

import argparse
import hashlib
import json
from pathlib import Path

import gguf
import numpy as np

PROMPTS = [
    "Once upon a time",
    'Anna had a red ball. One day, the red ball was gone. "Where is my ball?"',
    "The little robot was named Zoë-7.",  # byte tokens
]
N_GREEDY = 64


class Model:
    """A file's weights as float64, its sizes, and its vocabulary."""

    def __init__(self, path: Path):
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.weights = {
            tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.n_layers = self.fields["llama.block_count"]
        self.n_heads = self.fields["llama.attention.head_count"]
        self.n_kv_heads = self.fields["llama.attention.head_count_kv"]
        self.eps = self.fields["llama.attention.layer_norm_rms_epsilon"]
        self.head_dim = self.fields["llama.embedding_length"] // self.n_heads
        self.freqs = self.fields["llama.rope.freq_base"] ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.output = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def tokenize(self, text: str) -> list[int]:
        """BOS, then the characters of the text merged pairwise, best score first, leftmost on a tie."""
        tokens, scores = self.fields["tokenizer.ggml.tokens"], self.fields["tokenizer.ggml.scores"]
        ids = {token: i for i, token in enumerate(tokens)}
        pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
        while True:
            pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])) if a + b in ids]
            if not pairs:
                break
            _, i = min(pairs)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        out = [self.fields["tokenizer.ggml.bos_token_id"]]
        for piece in pieces:
            out += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return out

    def text(self, ids: list[int]) -> str:
        """Text of token ids: pieces joined, byte tokens as UTF-8, control tokens omitted."""
        out = b""
        for i in ids:
            token, kind = self.fields["tokenizer.ggml.tokens"][i], self.fields["tokenizer.ggml.token_type"][i]
            if kind == gguf.TokenType.BYTE:
                out += bytes([int(token[3:5], 16)])
            elif kind != gguf.TokenType.CONTROL:
                out += token.replace("▁", " ").encode()
        return out.decode(errors="replace")


class Run:
    """One sequence: its keys and values so far."""

    def __init__(self, model: Model):
        self.model = model
        self.keys = [[] for _ in range(model.n_layers)]
        self.values = [[] for _ in range(model.n_layers)]

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x**2) + self.model.eps) * self.model.weights[f"{name}.weight"]

    def rotate(self, heads, pos):
        """Rotates each pair (2i, 2i+1), as a complex number, by pos * freqs[i]."""
        pairs = heads[:, 0::2] + 1j * heads[:, 1::2]
        turned = pairs * np.exp(1j * pos * self.model.freqs)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)

    def step(self, token: int) -> np.ndarray:
        """Processes one token, returns the logits of the next."""
        m = self.model
        x = m.weights["token_embd.weight"][token]
        pos = len(self.keys[0])
        for layer_idx in range(m.n_layers):
            w = lambda name: m.weights[f"blk.{layer_idx}.{name}.weight"]  # noqa: E731
            h = self.norm(x, f"blk.{layer_idx}.attn_norm")
            q = self.rotate((w("attn_q") @ h).reshape(m.n_heads, m.head_dim), pos)
            self.keys[layer_idx].append(self.rotate((w("attn_k") @ h).reshape(m.n_kv_heads, m.head_dim), pos))
            self.values[layer_idx].append((w("attn_v") @ h).reshape(m.n_kv_heads, m.head_dim))
            keys, values = np.array(self.keys[layer_idx]), np.array(self.values[layer_idx])
            mixed = []
            for head in range(m.n_heads):
                kv_head = head * m.n_kv_heads // m.n_heads
                scores = keys[:, kv_head] @ q[head] / np.sqrt(m.head_dim)
                probs = np.exp(scores - scores.max())
                mixed.append(probs / probs.sum() @ values[:, kv_head])
            x = x + w("attn_output") @ np.concatenate(mixed)
            h = self.norm(x, f"blk.{layer_idx}.ffn_norm")
            gate = w("ffn_gate") @ h
            x = x + w("ffn_down") @ (gate / (1 + np.exp(-gate)) * (w("ffn_up") @ h))
        return m.output @ self.norm(x, "output_norm")


def greedy(model: Model, ids: list[int], n: int):
    """The logits after the prompt, then `n` greedy tokens with their margins, without stopping at EOS."""
    run = Run(model)
    for token in ids:
        logits = run.step(token)
    first, out, margins = logits, [], []
    for _ in range(n):
        runner_up, best = np.sort(logits)[-2:]
        out.append(int(logits.argmax()))
        margins.append(float(best - runner_up))
        logits = run.step(out[-1])
    return first, out, margins


def check(model: Model, cases: Path, variant: str):
    """Compares greedy ids up to the first step that float32 rounding may change, and the margins there."""
    n_steps, worst = 0, 0.0
    for case in json.loads(cases.read_text())["cases"]:
        want = case["greedy"][variant]
        _, ids, margins = greedy(model, case["ids"], len(want["ids"]))
        for i, (a, b) in enumerate(zip(ids, want["ids"])):
            if want["margins"][i] < 1e-3:
                break
            assert a == b, f"{case['name']}: step {i} gives {a}, expected {b}"
            worst = max(worst, abs(margins[i] - want["margins"][i]))
            n_steps += 1
        if case.get("text") is not None and case["ids"][:1] == [model.fields["tokenizer.ggml.bos_token_id"]]:
            got = model.tokenize(case["text"])
            assert got == case["ids"], f"{case['name']}: {case['text']!r} becomes {got}, expected {case['ids']}"
    print(f"{n_steps} greedy steps agree, the margins within {worst:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--out", type=Path, help="the reference file to write")
    parser.add_argument("--check", type=Path, help="cases to compare with instead")
    parser.add_argument("--variant", default="q8_0")
    args = parser.parse_args()
    model = Model(args.gguf)
    if args.check:
        return check(model, args.check, args.variant)

    cases = []
    for prompt in PROMPTS:
        ids = model.tokenize(prompt)
        logits, out, margins = greedy(model, ids, N_GREEDY)
        cases.append({
            "prompt": prompt,
            "ids": ids,
            "greedy_ids": out,
            "greedy_text": model.text(out),
            "greedy_margins": [round(margin, 6) for margin in margins],
            "logits_first_16": [round(float(value), 9) for value in logits[:16]],
            "argmax": int(logits.argmax()),
        })  # fmt: skip
    digest = hashlib.sha256(args.gguf.read_bytes()).hexdigest()
    rows = [",\n".join(f"   {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in c.items()) for c in cases]
    head = f'{{\n "model": "{args.gguf.name}",\n "sha256": "{digest}",\n "cases": [\n  {{\n'
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(head + "\n  },\n  {\n".join(rows) + "\n  }\n ]\n}\n", encoding="utf-8")
    smallest = min(min(case["greedy_margins"]) for case in cases)
    print(f"{args.out}: {len(cases)} prompts, smallest greedy margin {smallest}")


if __name__ == "__main__":
    main()
