"""Rates of llama.cpp on one GGUF file, through llama-cpp-python: a prompt, and tokens one after the other.

usage: llama_rates.py MODEL.gguf [--prompt 512 --decode 128 --rounds 5 --threads N] [--gpu CUDA]

Prints one JSON object, with the rates of each setting: on a GPU with and without flash attention. A prompt is computed
with logits of its last token. Loading and a warm-up are not counted, and the choice of a token is spared, as in
llama-bench. `--gpu` names a backend, CUDA or Vulkan, and fails if a layer is elsewhere.
"""
import argparse
import contextlib
import io
import json
import re
import statistics
import time

import llama_cpp


class LlamaCpp:
    """A loaded model. Without `on_gpu` all layers stay on the CPU."""

    def __init__(self, path, n_prompt, n_decode, n_threads=None, on_gpu=False, flash_attention=False):
        self.n_prompt, self.n_decode = n_prompt, n_decode
        with contextlib.redirect_stderr(io.StringIO()) as log:
            self.llama = llama_cpp.Llama(
                path,
                n_gpu_layers=-1 if on_gpu else 0,
                n_ctx=n_prompt + n_decode + 1,
                n_batch=max(n_prompt, 32),
                n_ubatch=max(n_prompt, 32),
                n_threads=n_threads,
                n_threads_batch=n_threads,
                flash_attn=flash_attention,
            )
        self.log = log.getvalue()
        self.prompt = [3 + 7919 * i % (self.llama.n_vocab() - 3) for i in range(n_prompt)]

    def device(self, backend):
        """The backend's GPU that holds all layers, by llama.cpp's own account; `None` if some are elsewhere."""
        layers = re.search(r"offloaded (\d+)/(\d+) layers to GPU", self.log)
        used = re.findall(r"using device (.+?) - \d+ MiB", self.log)
        is_whole = layers is not None and int(layers[1]) == int(layers[2]) > 0
        is_known = used and all(name.startswith(backend) for name in used)
        return ", ".join(used) if is_whole and is_known else None

    def remarks(self):
        """What GPU backends say about themselves when they start, such as whether they use cooperative matrices."""
        says = re.compile(r"ggml_(vulkan|cuda)\w*: |\s+Device \d")
        return [line.strip() for line in self.log.splitlines() if says.match(line)]

    def rates(self):
        """Tokens per second of the prompt, and of decoding behind one token."""
        self.llama.reset()
        start = time.perf_counter()
        self._eval(self.prompt)
        prefill = self.n_prompt / (time.perf_counter() - start)
        self.llama.reset()
        self._eval(self.prompt[:1])
        start = time.perf_counter()
        for i in range(self.n_decode):
            self._eval([self.prompt[i % self.n_prompt]])
        return prefill, self.n_decode / (time.perf_counter() - start)

    def _eval(self, tokens):
        self.llama.eval(tokens)
        # A GPU may still be at it.
        llama_cpp.llama_synchronize(self.llama.ctx)


def spread(values):
    return {"lowest": min(values), "median": statistics.median(values), "highest": max(values)}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu", metavar="BACKEND")
    args = parser.parse_args()

    settings, device, remarks = {}, "CPU", []
    for flash_attention in [False, True] if args.gpu else [False]:
        engine = LlamaCpp(args.model, args.prompt, args.decode, args.threads, bool(args.gpu), flash_attention)
        if args.gpu:
            device, remarks = engine.device(args.gpu), remarks or engine.remarks()
            if device is None:
                raise SystemExit(f"{engine.log}\nerror: llama.cpp did not put all layers on a GPU of {args.gpu}")
        engine.rates()
        prefill, decode = zip(*(engine.rates() for _ in range(args.rounds)))
        name = "flash attention" if flash_attention else "plain attention"
        settings[name] = {"prefill": spread(prefill), "decode": spread(decode)}
        del engine
    about = {"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode().strip()}
    print(json.dumps({**about, "device": device, "remarks": remarks, "settings": settings}))


if __name__ == "__main__":
    main()
