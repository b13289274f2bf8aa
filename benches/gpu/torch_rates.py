"""What PyTorch, and with it cuBLAS or rocBLAS, reaches on the first GPU: copies, products, matrices times vectors, encoders.

usage: torch_rates.py [--encoders 1,10,32,100]

Prints one JSON object. Times are medians by the device's events. Single precision stays off the tensor cores.
Encoders are those of `transformers` with random weights, in the shapes of make_gguf.py, by texts in a batch. A text has
as many tokens as those of `tilewright bench embed` have on average; there are no texts, so nothing is tokenized.
"""
import argparse
import json
import statistics
import sys

import torch

SAMPLES = 15
SAMPLE_SECONDS = 0.02
CUBE = 4096
COPY_BYTES = 1 << 30
# Together more than any cache holds.
COLD_BYTES = 1 << 30
# Of each text of a batch.
TEXT_TOKENS = 34
# Rows and columns: projections, both ways through the feed-forward, and the head of a model of 8 billion parameters.
MATRICES = [(4096, 4096), (14_336, 4096), (4096, 14_336), (128_256, 4096)]


def seconds(run):
    """Of one run among many in flight."""

    def sample(n_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n_runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / n_runs

    sample(3)
    n_runs = max(1, int(SAMPLE_SECONDS / max(sample(3), 1e-7)))
    return statistics.median(sample(n_runs) for _ in range(SAMPLES))


def copy():
    x = torch.rand(COPY_BYTES // 4, device="cuda")
    y = torch.empty_like(x)
    return {"bytes_per_second": 2 * COPY_BYTES / seconds(lambda: y.copy_(x))}


def matmul(dtype):
    a, b = (torch.rand(CUBE, CUBE, device="cuda").sub_(0.5).to(dtype) for _ in range(2))
    out = torch.empty(CUBE, CUBE, device="cuda", dtype=dtype)
    return {"flop_per_second": 2 * CUBE**3 / seconds(lambda: torch.mm(a, b, out=out))}


def matvec(rows, cols, dtype):
    bytes_each = rows * cols * torch.finfo(dtype).bits // 8
    n_copies = -(-COLD_BYTES // bytes_each)
    matrices = [torch.rand(rows, cols, device="cuda").sub_(0.5).to(dtype) for _ in range(n_copies)]
    x = torch.rand(cols, device="cuda").to(dtype)
    out = torch.empty(rows, device="cuda", dtype=dtype)

    def run():
        for matrix in matrices:
            torch.mv(matrix, x, out=out)

    return {"bytes_per_second": bytes_each * n_copies / seconds(run)}


def encoders():
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    minilm = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    qwen3 = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151_669,
    )
    return {"minilm": BertModel(minilm), "qwen3-embedding-0.6b": Qwen3Model(qwen3)}


@torch.inference_mode()
def embed(model, n_texts):
    ids = torch.randint(5, 30_000, (n_texts, TEXT_TOKENS), device="cuda")

    def run():
        vectors = model(ids).last_hidden_state.mean(1)
        torch.nn.functional.normalize(vectors).cpu()

    return {"texts_per_second": n_texts / seconds(run)}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--encoders", default="", metavar="N,..")
    batches = [int(n) for n in parser.parse_args().encoders.split(",") if n]
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    parts = {
        "about": {
            "torch": torch.__version__,
            "runtime": torch.version.cuda or f"HIP {torch.version.hip}",
            "device": torch.cuda.get_device_name(),
        },
        "copy": copy(),
        "matmul f32": matmul(torch.float32),
        "matmul f16": matmul(torch.float16),
    }
    for rows, cols in MATRICES:
        for dtype in [torch.float32, torch.float16]:
            name = f"matvec {str(dtype).removeprefix('torch.float')} {rows}x{cols}"
            parts[name] = matvec(rows, cols, dtype)
    for name, model in encoders().items() if batches else ():
        for dtype, kind in [(torch.float32, "F32"), (torch.float16, "F16")]:
            model = model.to("cuda", dtype).eval()
            parts.update({f"{name}-{kind} {n} texts": embed(model, n) for n in batches})
    print(json.dumps(parts))


if __name__ == "__main__":
    main()
