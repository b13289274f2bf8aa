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
import statistics
import subprocess
import time

import llama_cpp

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("model")
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--prompt", type=int, default=128)
parser.add_argument("--decode", type=int, default=64)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()

llama = llama_cpp.Llama(
    args.model,
    n_ctx=args.prompt + args.decode + 1,
    n_batch=max(args.prompt, 32),
    n_ubatch=max(args.prompt, 32),
    n_threads=args.threads,
    n_threads_batch=args.threads,
    verbose=False,
)
prompt = [3 + 7919 * i % (llama.n_vocab() - 3) for i in range(args.prompt)]


def evaluate(tokens):
    llama.eval(tokens)
    llama_cpp.llama_synchronize(llama.ctx)


def llama_rates():
    """Tokens per second of the prompt, and of decoding behind one token."""
    llama.reset()
    start = time.perf_counter()
    evaluate(prompt)
    prefill = args.prompt / (time.perf_counter() - start)
    llama.reset()
    evaluate(prompt[:1])
    start = time.perf_counter()
    for i in range(args.decode):
        evaluate([prompt[i % args.prompt]])
    return prefill, args.decode / (time.perf_counter() - start)


def tilewright_rates():
    command = [args.tilewright, "bench", args.model, "--device", "cpu", "--json", "-r", "1"]
    command += ["-p", str(args.prompt), "-n", str(args.decode)]
    env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    prefill, decode = (row["tokens_per_second"]["median"] for row in json.loads(done.stdout)["rows"])
    return prefill, decode


engines = {"llama.cpp": llama_rates, "tilewright": tilewright_rates}
rates = {name: [] for name in engines}
llama_rates()
for _ in range(args.rounds):
    for name, measure in engines.items():
        rates[name].append(measure())

print(f"{os.path.basename(args.model)}, {args.threads} threads, {args.rounds} rounds, llama-cpp-python {llama_cpp.__version__}")
print(llama_cpp.llama_print_system_info().decode().strip())
medians = {}
for name in engines:
    for phase, values in zip(["prefill", "decode"], zip(*rates[name])):
        median = medians[name, phase] = statistics.median(values)
        print(f"{name:<12} {phase:<8} {median:>9.1f} tokens/s ({min(values):.1f} to {max(values):.1f})")
for phase in ["prefill", "decode"]:
    ratio = medians["tilewright", phase] / medians["llama.cpp", phase]
    print(f"{phase:<8} tilewright / llama.cpp = {ratio:.2f}")
