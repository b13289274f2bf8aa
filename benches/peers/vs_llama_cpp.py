"""tilewright next to llama.cpp on the CPU: the same GGUF file, the same number of threads, alternating runs.

usage: vs_llama_cpp.py MODEL.gguf [--tilewright target/release/tilewright --prompt 128 --decode 64 --threads 2 --rounds 5]

Needs `pip install llama-cpp-python`. Each round measures one engine, then the other; a rate is the median of the rounds,
with the lowest and the highest. Both sides compute a prompt with logits of its last token, then tokens one after the
other. Loading and a warm-up are not counted. llama.cpp is spared the choice of a token, as in llama-bench; ours chooses
greedily. Both caches are in half precision, and both round activations to bytes.
"""
import argparse
import json
import os
import subprocess

import llama_cpp

from llama_rates import LlamaCpp, spread

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("model")
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--prompt", type=int, default=128)
parser.add_argument("--decode", type=int, default=64)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()

llama = LlamaCpp(args.model, args.prompt, args.decode, args.threads)


def tilewright_rates():
    command = [args.tilewright, "bench", args.model, "--device", "cpu", "--json", "-r", "1"]
    command += ["-p", str(args.prompt), "-n", str(args.decode)]
    env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    prefill, decode = (row["tokens_per_second"]["median"] for row in json.loads(done.stdout)["rows"])
    return prefill, decode


engines = {"llama.cpp": llama.rates, "tilewright": tilewright_rates}
rates = {name: [] for name in engines}
llama.rates()
for _ in range(args.rounds):
    for name, measure in engines.items():
        rates[name].append(measure())

print(f"{os.path.basename(args.model)}, {args.threads} threads, {args.rounds} rounds, llama-cpp-python {llama_cpp.__version__}")
print(llama_cpp.llama_print_system_info().decode().strip())
medians = {}
for name in engines:
    for phase, values in zip(["prefill", "decode"], zip(*rates[name])):
        rate = spread(values)
        medians[name, phase] = rate["median"]
        print(f"{name:<12} {phase:<8} {rate['median']:>9.1f} tokens/s ({rate['lowest']:.1f} to {rate['highest']:.1f})")
for phase in ["prefill", "decode"]:
    ratio = medians["tilewright", phase] / medians["llama.cpp", phase]
    print(f"{phase:<8} tilewright / llama.cpp = {ratio:.2f}")
