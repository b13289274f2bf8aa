"""The cost of rounding: Kullback-Leibler divergence from --exact, and how often the most likely token is the same.

usage: divergence.py [--tilewright target/release/tilewright --data ../shared/data --text FILE --ctx 256 --tiers f16,..] [MODEL ..]

Without MODEL, the story models of the data folder. Predictions of the CPU with --exact are compared with those of the CPU
by default, which rounds activations to bytes (with AMX, to BF16 in prompts), and of the GPU in each tier; tiers that the
adapter lacks are left out. The text is stories by the built-in model unless there is a FILE.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

STORIES = [
    "stories260k/stories260k-f16.gguf",
    "stories260k/stories260k-q8_0.gguf",
    "stories260k/stories260k-q4_0.gguf",
    "stories260k-wide/stories260k-wide-q6_k.gguf",
    "stories260k-wide/stories260k-wide-q5_k_m.gguf",
    "stories260k-wide/stories260k-wide-q4_k_m.gguf",
    "stories260k-wide/stories260k-wide-q3_k_m.gguf",
    "stories260k-wide/stories260k-wide-q2_k.gguf",
    "tinystories656k/tinystories656k-q8_0.gguf",
    "tinystories656k/tinystories656k-q5_0.gguf",
]

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("models", nargs="*", type=Path)
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--data", type=Path, default=Path("../shared/data"))
parser.add_argument("--text", type=Path)
parser.add_argument("--ctx", default="256")
parser.add_argument("--tiers", type=lambda text: text.split(","), default=["subgroups", "f16", "matrix8", "matrix16"])
args = parser.parse_args()


def run(*arguments):
    return subprocess.run([args.tilewright, *map(str, arguments)], capture_output=True, text=True)


def story(seed):
    done = run("run", "-p", "Once upon a time", "-n", 300, "--temperature", 0.8, "--seed", seed, "--device", "cpu", "--quiet")
    done.check_returncode()
    return done.stdout


with tempfile.TemporaryDirectory() as scratch:
    text, base = args.text or Path(scratch) / "stories.txt", Path(scratch) / "base.kld"
    if not args.text:
        text.write_text("\n".join(story(seed) for seed in range(16)))
    ways = {"cpu": ["--device", "cpu"]} | {tier: ["--device", "gpu", "--tier", tier] for tier in args.tiers}
    print(f"{'model':<34} {'way':<10} {'tokens':>7} {'divergence':>11} {'99.9 %':>9} {'same token':>10}")
    for model in args.models or [args.data / story for story in STORIES]:
        run("perplexity", model, "-f", text, "--ctx", args.ctx, "--device", "cpu", "--exact", "--kl-save", base).check_returncode()
        for name, way in ways.items():
            done = run("perplexity", model, "--kl", base, "--json", *way)
            if done.returncode:
                print(f"left out: {name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            report = json.loads(done.stdout)
            found = report["divergence"]
            high = next(row["value"] for row in found["kl_quantiles"] if row["share"] == 0.999)
            same = f"{100 * found['same_top']['value']:.2f} %"
            print(f"{model.name:<34} {name:<10} {report['tokens']:>7} {found['kl']['value']:>11.1e} {high:>9.1e} {same:>10}")
