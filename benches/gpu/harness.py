"""Measures tilewright on this machine's GPU, next to PyTorch and llama.cpp, and says which targets are met.

usage: benches/gpu/run [--out DIR] [--skip STAGE,..] [--only STAGE,..] [options]

Stages, in order, the most valuable first; one that cannot run says why and the others go on:
  checks        the Vulkan loader and a GPU; builds tilewright
  tests         tests of kernels, generation and models on every tier
  ablate        tilewright bench ablate: where the kernels' time goes
  models        GGUF files of random weights
  bench         tilewright bench of each model
  llama-vulkan  llama.cpp with Vulkan on the same files
  sequences     many sequences at once in one engine
  depth         decoding behind long contexts
  dawn          the npm package in Node, through Dawn
  cold          from the command to the first token, and the GPU's memory
  embed         text encoders by batch size
  mol           a mixture of logits in one kernel, and as a chain of kernels
  torch         PyTorch: copies, products, matrices times vectors, the same encoders
  kernels       tilewright bench kernels
  llama-cuda    llama.cpp with CUDA on the same files
  llama-cpu     llama.cpp on the CPU, in a dry run alone

DIR gets results.json, record.txt and the output of every command in logs/. What an earlier run left there is kept for
stages that are not run this time, if it is of the same commit, adapter and sizes: stages can be run one by one.
The exit code is 0 if every target was measured and all tests passed, 1 if not, 2 for an error in the command line.
"""
import argparse
import ctypes
import datetime
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import summary

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODELS = "llama-3.2-1b:Q4_0,llama-3.1-8b:Q4_0,llama-3.1-8b:Q4_K_M,llama-3.2-1b:Q4_K_M,llama-3.2-1b:Q8_0,llama-3.1-8b:Q8_0"
ENCODERS = ["minilm-F32", "minilm-F16", "qwen3-embedding-0.6b-F32", "qwen3-embedding-0.6b-F16"]
# Of a dry run: little enough for a software adapter.
SMALL = {"models": "134m:Q4_0", "prompt": "16", "decode": 4, "rounds": 1, "depth": "64", "sequences": "1,2"}
SMALL_ENCODERS = ["minilm-F16"]
FULL = {
    "models": MODELS,
    "prompt": "512,2048",
    "decode": 128,
    "rounds": 5,
    "depth": "8192,32768",
    "sequences": "1,8,16,32,33,64",
}
# Tokens decoded at each depth.
AT_DEPTH = 32
EMBED_BATCHES = "1,10,32,100"
# The package with llama.cpp's libraries, and those packages that have them for a stage.
NODE_LLAMA = "3.22.1"
LLAMA_BUILDS = {"llama-cuda": "linux-x64-cuda", "llama-vulkan": "linux-x64-vulkan", "llama-cpu": "linux-x64"}
# Seconds that a part of a stage takes on an H100, of a model of 1 billion weights or less and of 8.
SECONDS = {
    "tests": (60, 60),
    "ablate": (100, 100),
    "models": (3, 12),
    "bench": (8, 25),
    "llama-vulkan": (20, 45),
    "sequences": (15, 40),
    "depth": (6, 20),
    "dawn": (15, 60),
    "cold": (6, 20),
    "embed": (10, 10),
    "mol": (20, 20),
    "torch": (40, 40),
    "kernels": (30, 30),
    "llama-cuda": (20, 45),
    "llama-cpu": (60, 600),
}
# Runs of `tilewright bench kernels`: name, width, tokens of the prefill pass, tier.
KERNEL_RUNS = [
    ("2048", 2048, 512, None),
    ("4096", 4096, 512, None),
    (summary.CUBED, summary.CUBE, summary.CUBE, None),
    (f"{summary.CUBED} f16", summary.CUBE, summary.CUBE, "f16"),
    (f"{summary.CUBED} matrix16", summary.CUBE, summary.CUBE, "matrix16"),
]
SMALL_KERNEL_RUNS = [("256", 256, 16, None)]
TESTS = ["kernels", "generate", "model"]
NVIDIA_SMI = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total"


class Unavailable(Exception):
    """Why something cannot run; it becomes the reason beside NOT RUN."""


class Harness:
    def __init__(self, args):
        self.args = args
        self.out = Path(args.out).resolve()
        self.logs = self.out / "logs"
        self.models = Path(args.models_dir).resolve() if args.models_dir else self.out / "models"
        for folder in [self.logs, self.models]:
            folder.mkdir(parents=True, exist_ok=True)
        self.env = dict(os.environ)
        # Pipelines of earlier runs stay out of this one; Mesa complains where it finds no folder of its own.
        self.env["TILEWRIGHT_CACHE_DIR"] = str(self.fresh_folder("pipelines"))
        self.env.setdefault("XDG_RUNTIME_DIR", str(self.fresh_folder("runtime")))
        self.tilewright = Path(args.tilewright).resolve() if args.tilewright else None
        self.adapter = None
        self.stage = "checks"
        self.end = time.monotonic() + args.budget if args.budget else math.inf

    def fresh_folder(self, name):
        folder = self.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def log(self, name, stream):
        return self.logs / f"{re.sub('[^A-Za-z0-9._]+', '-', name)}.{stream}"

    def attempt(self, name, command, **env):
        """Runs a command, keeps its output in logs/ and returns its exit code."""
        command = [str(word) for word in command]
        with open(self.log(name, "out"), "w") as stdout, open(self.log(name, "err"), "w") as stderr:
            try:
                # A session of its own, so that nothing of it outlives its limit.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=ROOT,
                    env={**self.env, **env},
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"{command[0]}: {error.strerror}") from error
            limit = max(1, min(self.args.limit, self.end - time.monotonic()))
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Unavailable(f"{name} took longer than {limit:.0f} s") from None

    def command(self, name, command, **env):
        """Runs a command that must go well."""
        if code := self.attempt(name, command, **env):
            why = blame(self.log(name, "err")) or blame(self.log(name, "out"))
            raise Unavailable(f"{name} ended with {code}: {why}")

    def measure(self, name, command, **env):
        """The JSON that a command prints."""
        self.command(name, command, **env)
        try:
            return json.loads(self.log(name, "out").read_text())
        except json.JSONDecodeError as error:
            raise Unavailable(f"{name} printed no JSON: {error}") from error

    def apt(self, *packages):
        self.command(f"apt-install {packages[0]}", ["scripts/apt-install", *packages])

    def python(self, stage, packages, check, **env):
        """An interpreter with `packages`: the one that was named, or of a virtual environment made for the stage."""
        if stage in self.args.python:
            return self.args.python[stage]
        python = self.out / "venv" / stage / "bin" / "python"
        if not python.exists():
            self.command(f"{stage} venv", [sys.executable, "-m", "venv", python.parents[1]])
        if self.attempt(f"{stage} check", [python, "-c", check]) == 0:
            return python
        install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
        if self.args.wheels:
            wheels = Path(self.args.wheels).resolve() / stage
            if not wheels.is_dir():
                raise Unavailable(f"no folder {stage} among the wheels")
            install += ["--no-index", "--find-links", wheels]
        self.command(f"{stage} install", [*install, *packages], **env)
        return python

    def bench(self, *words):
        return [self.tilewright, "bench", *words, "--device", self.adapter["name"], "--json"]

    def need_adapter(self):
        if self.adapter is None:
            raise Unavailable("no adapter: see checks")

    def model_files(self):
        """Model names and files; those that are not there are missing parts of the stage that asks."""
        return {name: self.models / f"{name}.gguf" for name in model_names(self.args)}

    def each_model(self, parts, missing, measure):
        for name, path in self.model_files().items():
            if not path.exists():
                missing[name] = "no such model file: see models"
                continue
            self.collect(parts, missing, name, lambda: measure(name, path))

    def need_time(self, key):
        wanted, left = seconds_of(self.stage, key), self.end - time.monotonic()
        if wanted > left:
            raise Unavailable(f"it takes about {wanted} s, and {max(left, 0):.0f} s of the budget are left")

    def collect(self, parts, missing, key, measure):
        """What `measure` returns is a part of its stage, if there is time for it; no other part depends on it."""
        try:
            self.need_time(key)
            parts[key] = measure()
            print(f"   {key} ran", flush=True)
        except Unavailable as reason:
            missing[key] = str(reason)
            print(f"   {key} NOT RUN: {reason}", flush=True)

    # Stages. Each fills `parts` and `missing`, or raises `Unavailable`.

    def checks(self, parts, missing):
        try:
            ctypes.CDLL("libvulkan.so.1")
        except OSError:
            # NVIDIA's driver loads the others.
            self.apt("libvulkan1", "libegl1", "libx11-6", "libxext6")
        if self.tilewright is None:
            if shutil.which("cargo") is None:
                raise Unavailable("no cargo: install Rust, or give --tilewright BIN")
            self.command("cargo build", ["cargo", "build", "--locked", "--release"])
            self.tilewright = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "tilewright"
        info = self.measure("tilewright info", [self.tilewright, "info", "--json"])
        self.adapter = self.pick(info["adapters"])
        parts["adapter"] = self.adapter

    def pick(self, adapters):
        wanted = (self.args.device or "").lower()
        found = [a for a in adapters if wanted in a["name"].lower() and a["is_software"] == self.args.software]
        if found:
            return found[0]
        kind = "a software adapter" if self.args.software else "a GPU"
        names = ", ".join(a["name"] for a in adapters) or "none"
        hint = "" if self.args.software else "; a dry run on a software adapter is --software"
        if not self.args.software and output_of("nvidia-smi", "-L"):
            hint += "; nvidia-smi sees one, so its Vulkan driver is not found: VK_DRIVER_FILES may name nvidia_icd.json"
        raise Unavailable(f"no adapter is {kind}{f' called {wanted}' if wanted else ''} (found: {names}){hint}")

    def tests(self, parts, missing):
        self.need_adapter()
        binaries = {Path(path).name.split("-")[0]: Path(path).resolve() for path in self.args.tests}
        for name in TESTS:
            # Kernels have a program of their own; the others are modules of one.
            program, of_module = ("kernels", []) if name == "kernels" else ("suite", [f"{name}::"])
            if program in binaries:
                command = [binaries[program], "--nocapture", *of_module]
            elif binaries:
                missing[name] = "not among the test binaries given"
                continue
            else:
                command = ["cargo", "test", "--locked", "--release", "--test", program, "--", "--nocapture", *of_module]
            self.collect(parts, missing, name, lambda: self.test(name, command))

    def test(self, name, command):
        full = {} if self.args.short_tests else {"TILEWRIGHT_FULL": "1"}
        code = self.attempt(f"test {name}", command, REQUIRE_ADAPTER="1", **full)
        text = self.log(f"test {name}", "out").read_text(errors="replace")
        if re.search(r"^running \d+ test", text, re.MULTILINE) is None:
            raise Unavailable(f"no test began: {blame(self.log(f'test {name}', 'err'))}")
        if name == "kernels" and self.adapter["name"] not in text:
            raise Unavailable("the test ran on another adapter: tests take the first")
        tiers = re.findall(r"^(\w+): (\d+) cases, \d+ failed", text, re.MULTILINE)
        return {
            # A crash leaves no result, and is a failure.
            "is_passed": code == 0,
            "is_short": self.args.short_tests,
            "n_passed": sum(map(int, re.findall(r"^test result: \S+ (\d+) passed", text, re.MULTILINE))),
            "tiers": {tier: int(count) for tier, count in tiers},
            "case": os.environ.get("TILEWRIGHT_CASE"),
            "skipped": sorted(set(re.findall(r"(?:skipped|left out): (.+)", text))),
        }

    def ablate(self, parts, missing):
        self.need_adapter()
        command = self.bench("ablate", *(["--quick", "--tier", "f16"] if self.args.software else []))
        self.collect(parts, missing, "ablate", lambda: self.measure("ablate", command))

    def make_models(self, parts, missing):
        self.make_files(self.model_files(), parts, missing)

    def make_files(self, files, parts, missing):
        parts.update({name: {"bytes": path.stat().st_size} for name, path in files.items() if path.exists()})
        absent = [name for name in files if name not in parts]
        if absent:
            python = self.python("models", ["gguf", "numpy"], "import gguf, numpy")
        for name in absent:
            self.collect(parts, missing, name, lambda: self.make_model(python, name, files[name]))

    def make_model(self, python, name, path):
        shape, _, kind = name.rpartition("-")
        # Under another name first, so that half a file is never taken for a whole one.
        half = path.with_suffix(".part")
        self.command(f"model {name}", [python, HERE / "make_gguf.py", shape, kind, half])
        half.rename(path)
        return {"bytes": path.stat().st_size}

    def kernels(self, parts, missing):
        self.need_adapter()
        for name, dim, n_prompt, tier in SMALL_KERNEL_RUNS if self.args.software else KERNEL_RUNS:
            words = ["kernels", "--dim", dim, "-p", n_prompt, "--texts", 10, *(["--tier", tier] if tier else [])]
            self.collect(parts, missing, name, lambda: self.measure(f"kernels {name}", self.bench(*words)))

    def bench_models(self, parts, missing):
        self.need_adapter()
        sizes = ["-p", self.args.prompt, "-n", self.args.decode, "-r", self.args.rounds]
        self.each_model(parts, missing, lambda name, path: self.measure(f"bench {name}", self.bench(path, *sizes)))

    def depth(self, parts, missing):
        self.need_adapter()
        sizes = ["-p", 0, "-n", min(self.args.decode, AT_DEPTH), "-d", self.args.depth, "-r", 2]
        self.each_model(parts, missing, lambda name, path: self.measure(f"depth {name}", self.bench(path, *sizes)))

    def sequences(self, parts, missing):
        self.need_adapter()
        if self.args.engine:
            command = [Path(self.args.engine).resolve()]
        elif self.args.tilewright:
            raise Unavailable("a binary of benches/engine.rs is needed beside that of tilewright: --engine BIN")
        else:
            command = ["cargo", "bench", "--locked", "--bench", "engine", "--"]
        self.each_model(parts, missing, lambda name, path: self.engine(name, [*command, path]))

    def engine(self, name, command):
        self.command(f"sequences {name}", [*command, self.adapter["name"], self.args.sequences])
        text = self.log(f"sequences {name}", "out").read_text()
        rates = re.findall(r"^ *(\d+) sequences: +([\d.]+) tokens/s", text, re.MULTILINE)
        if [int(n) for n, _ in rates] != numbers(self.args.sequences):
            raise Unavailable(f"sequences {name} printed no rate of each number")
        return {"rates": {n: float(rate) for n, rate in rates}}

    def dawn(self, parts, missing):
        self.need_adapter()
        env = {}
        if self.args.software:
            # Dawn refuses old software adapters.
            self.command("dawn driver", ["scripts/dawn-driver"])
            driver = self.log("dawn driver", "out").read_text().strip()
            env = {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
        sizes = ["--prompt", self.args.prompt, "--decode", self.args.decode, "--rounds", self.args.rounds]
        if self.args.package:
            sizes += ["--package", Path(self.args.package).resolve()]
        command = [self.args.node, HERE / "dawn.mjs", *sizes]
        self.each_model(parts, missing, lambda name, path: self.measure(f"dawn {name}", [*command, path], **env))

    def cold(self, parts, missing):
        self.need_adapter()
        self.each_model(parts, missing, self.cold_starts)

    def cold_starts(self, name, path):
        """Twice from the command to the end of a text of one token: without compiled pipelines, and with them."""
        folder = str(self.fresh_folder("cold"))
        words = ["run", path, "a", "-n", 1, "--temperature", 0, "--device", self.adapter["name"]]
        found = {}
        for which in ["first", "second"]:
            with GpuMemory() as memory:
                start = time.monotonic()
                self.command(f"cold {name} {which}", [self.tilewright, *words], TILEWRIGHT_CACHE_DIR=folder)
                found[f"{which}_seconds"] = time.monotonic() - start
            found["peak_mib"] = memory.peak_mib
        return found

    def embed(self, parts, missing):
        self.need_adapter()
        names = SMALL_ENCODERS if self.args.software else ENCODERS
        files = {name: self.models / f"{name}.gguf" for name in names}
        self.make_files(files, {}, missing)
        sizes = ["-b", EMBED_BATCHES]
        if self.args.software:
            texts = self.out / "texts.txt"
            texts.write_text("w100 w101\nw102\n")
            sizes = ["-b", "1,2", "--texts", texts]
        for name in names:
            if name in missing:
                continue
            for device, rounds in [(self.adapter["name"], 20), ("cpu", 3)]:
                words = [files[name], *sizes, "-r", 1 if self.args.software else rounds]
                command = [self.tilewright, "bench", "embed", *words, "--no-naive", "--in-flight", 0]
                key = f"{name} cpu" if device == "cpu" else name
                self.collect(
                    parts, missing, key, lambda: self.measure(f"embed {key}", [*command, "--device", device, "--json"])
                )

    def mol(self, parts, missing):
        self.need_adapter()
        small = ["--strip", 64, "--items", 1000] if self.args.software else []
        command = self.bench("mol", "--measured", 0, *small)
        self.collect(parts, missing, "mol", lambda: self.measure("mol", command))

    def torch(self, parts, missing):
        self.need_gpu()
        self.need_time("torch")
        python = self.python("torch", ["torch", "numpy", "transformers"], "import torch, transformers")
        parts.update(self.measure("torch", [python, HERE / "torch_rates.py", "--encoders", EMBED_BATCHES]))

    def llama_cuda(self, parts, missing):
        self.need_gpu()
        self.llama(parts, missing, ["--gpu", "cuda"])

    def llama_vulkan(self, parts, missing):
        self.need_adapter()
        self.llama(parts, missing, ["--gpu", "vulkan"])

    def llama_cpu(self, parts, missing):
        # Two threads, for they wait for each other spinning.
        self.llama(parts, missing, ["--threads", min(2, os.cpu_count())])

    def llama(self, parts, missing, words):
        root = self.llama_root()
        # Software adapters are left out unless they are named.
        env = {"GGML_VK_VISIBLE_DEVICES": "0"} if self.args.software else {}
        sizes = ["--prompt", self.args.prompt, "--decode", self.args.decode, "--rounds", self.args.rounds]
        sizes += ["--depth", self.args.depth, "--sequences", self.args.sequences, "--root", root]
        command = [self.args.node, HERE / "llama.mjs", *sizes, *words]
        self.each_model(
            parts, missing, lambda name, path: self.measure(f"{self.stage} {name}", [*command, path], **env)
        )

    def llama_root(self):
        """A folder with `node-llama-cpp` and the libraries of this stage: the one that was named, or one made here."""
        if self.args.node_llama:
            return Path(self.args.node_llama).resolve()
        root = self.out / "llama"
        build = f"@node-llama-cpp/{LLAMA_BUILDS[self.stage]}"
        if not (root / "node_modules" / build).is_dir():
            root.mkdir(exist_ok=True)
            (root / "package.json").write_text("{}")
            # Its script would compile where no library fits; each library is fetched by its own stage.
            options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--prefix", root]
            packages = [f"{package}@{NODE_LLAMA}" for package in ["node-llama-cpp", build]]
            self.command(f"{self.stage} install", ["npm", "install", *options, *packages])
        return root

    def need_gpu(self):
        if self.args.software:
            raise Unavailable(summary.DRY_RUN)


STAGES = {
    "checks": Harness.checks,
    "tests": Harness.tests,
    "ablate": Harness.ablate,
    "models": Harness.make_models,
    "bench": Harness.bench_models,
    "llama-vulkan": Harness.llama_vulkan,
    "sequences": Harness.sequences,
    "depth": Harness.depth,
    "dawn": Harness.dawn,
    "cold": Harness.cold,
    "embed": Harness.embed,
    "mol": Harness.mol,
    "torch": Harness.torch,
    "kernels": Harness.kernels,
    "llama-cuda": Harness.llama_cuda,
    "llama-cpu": Harness.llama_cpu,
}


class GpuMemory:
    """The most memory that is in use on the first NVIDIA GPU while this is entered; `None` without its tool."""

    def __enter__(self):
        self.peak_mib, self.ends = None, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self):
        while not self.ends.is_set():
            used = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
            if not used:
                return
            self.peak_mib = max(int(used[0]), self.peak_mib or 0)

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()


def parts_of(stage, args):
    """The parts of a stage, by name."""
    names = {
        "tests": TESTS,
        "embed": [f"{name}{on}" for name in ENCODERS for on in ["", " cpu"]],
        "kernels": [name for name, *_ in KERNEL_RUNS],
    }
    return names.get(stage, [stage] if stage in ["ablate", "mol", "torch"] else model_names(args))


def seconds_of(stage, part):
    """About how long a part takes on an H100."""
    return SECONDS[stage][1 if "8b" in part else 0]


def plan(wanted, args):
    """What the stages should take on an H100, one after the other."""
    lines, total = [f"{'stage':<14} {'parts':>5} {'seconds':>8} {'in all':>7}"], 0
    for stage in wanted:
        parts = parts_of(stage, args)
        seconds = sum(seconds_of(stage, part) for part in parts)
        total += seconds
        over = ", parts beyond the budget are left out" if args.budget and total > args.budget else ""
        lines.append(f"{stage:<14} {len(parts):>5} {seconds:>8} {total:>7}{over}")
    return "\n".join(lines)


def numbers(text):
    return [int(word) for word in words(text)]


def blame(path):
    """The line that tells why a command failed: a compiler's first error, else the last line of all."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    # pip announces with the same word that a command failed, ahead of that command's output.
    errors = [line for line in lines if "error: " in line and "subprocess-exited-with-error" not in line]
    return (errors or lines[-1:] or [""])[0][-300:]


def model_names(args):
    return [spec.replace(":", "-") for spec in args.models.split(",")]


def run_stage(harness, name):
    """Runs a stage and returns its results; whatever goes wrong in it is its own affair."""
    print(f"== {name}", flush=True)
    start, parts, missing, reason = time.monotonic(), {}, {}, ""
    harness.stage = name
    try:
        STAGES[name](harness, parts, missing)
    except Unavailable as why:
        reason = str(why)
    except Exception as error:  # A fault of this script must not cost what other stages measure.
        reason = f"{type(error).__name__}: {error}"
    stage = {
        "date": now(),
        "seconds": time.monotonic() - start,
        "parts": parts,
        "missing": missing,
        "reason": reason,
        "is_kept": False,
    }
    print(f"-- {name}: {summary.state(stage)}", flush=True)
    return stage


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def output_of(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def commit(args):
    if args.commit:
        return args.commit
    found = output_of("git", "rev-parse", "--short", "HEAD")
    # The binary need not be of this tree, which only whoever gave it knows.
    given = ", binary given by --tilewright" if args.tilewright else ""
    dirty = ", with changes" if output_of("git", "status", "--porcelain", "--untracked-files=no") else ""
    return f"{found}{dirty}{given}" if found else f"unknown: no git here{given}"


def machine():
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = model[1] if model else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def drivers():
    """What only NVIDIA's own tool tells; other adapters have their driver's name in `info`."""
    smi = output_of("nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader")
    return {"nvidia": "; ".join(f"{line} ({NVIDIA_SMI})" for line in smi.splitlines())} if smi else {}


def earlier(out, about):
    """Stages of results that an earlier run left, if they are comparable and were measured."""
    try:
        results = json.loads((out / "results.json").read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    is_same = all(results.get(key) == value for key, value in about.items())
    return {name: stage for name, stage in results["stages"].items() if stage["parts"]} if is_same else {}


def arguments():
    parser = argparse.ArgumentParser(usage=__doc__.partition("usage: ")[2])
    parser.add_argument("--out", default=ROOT / "target" / "gpu", metavar="DIR")
    parser.add_argument("--skip", type=stages, default=[], metavar="STAGE,..")
    parser.add_argument("--only", type=stages, default=[], metavar="STAGE,..", help="these, and checks")
    parser.add_argument("--software", action="store_true", help="a dry run on a software adapter, with small sizes")
    parser.add_argument("--device", help="part of the adapter's name, where there are several")
    parser.add_argument("--tilewright", metavar="BIN", help="a release binary instead of building one")
    parser.add_argument("--tests", type=words, default=[], metavar="BIN,..", help="test binaries instead of building")
    parser.add_argument("--short-tests", action="store_true", help="only the cases of CI, where there is little time")
    parser.add_argument("--models", metavar="SHAPE:TYPE,..", help=f"files to make and measure: {MODELS}")
    parser.add_argument("--models-dir", metavar="DIR", help="where model files are kept; OUT/models if absent")
    parser.add_argument("--wheels", metavar="DIR", help="install from DIR/STAGE instead of the network")
    parser.add_argument("--python", type=words, default=[], metavar="STAGE=PYTHON,..", help="that has what it takes")
    parser.add_argument("--engine", metavar="BIN", help="a binary of benches/engine.rs, beside --tilewright")
    parser.add_argument("--node", type=program, default="node", metavar="BIN", help="Node, for dawn and llama.cpp")
    parser.add_argument("--package", metavar="DIR", help="the built npm package; npm/dist if absent")
    parser.add_argument("--node-llama", metavar="DIR", help="that has node-llama-cpp in its node_modules")
    parser.add_argument("--prompt", metavar="N,..", help="tokens of prompts: 512,2048")
    parser.add_argument("--decode", type=int, metavar="N", help="tokens decoded: 128")
    parser.add_argument("--rounds", type=int, metavar="N", help="repetitions: 5")
    parser.add_argument("--depth", metavar="N,..", help="tokens before those decoded: 8192,32768")
    parser.add_argument("--sequences", metavar="N,..", help="sequences at once: 1,8,16,32,33,64")
    parser.add_argument("--limit", type=int, default=3600, metavar="SECONDS", help="that a command may take: 3600")
    parser.add_argument("--budget", type=int, metavar="SECONDS", help="that all may take: parts beyond are left out")
    parser.add_argument("--plan", action="store_true", help="print what the stages should take, and nothing else")
    parser.add_argument("--commit", metavar="ID", help="of the binary, where there is no git")
    args = parser.parse_args()
    for key, value in (SMALL if args.software else FULL).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    try:
        args.python = {stage: program(name) for stage, name in (word.split("=", 1) for word in args.python)}
    except ValueError:
        parser.error("--python: expected STAGE=PYTHON")
    return args


def program(name):
    """A path from any folder, or a name for PATH. A virtual environment's links stay what they are."""
    return str(Path(name).absolute()) if "/" in name else name


def words(text):
    return [word for word in text.split(",") if word]


def stages(text):
    known = [name for name in STAGES if name != "checks"]
    unknown = [name for name in words(text) if name not in known]
    if unknown:
        expected = f"some of {', '.join(known)}; checks always run"
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected {expected}")
    return words(text)


def main():
    args = arguments()
    rest = [name for name in STAGES if name != "checks" and (args.software or name != "llama-cpu")]
    wanted = [name for name in rest if name not in args.skip and (not args.only or name in args.only)]
    print(plan(wanted, args), flush=True)
    if args.plan:
        return 0
    harness = Harness(args)
    sizes = {key: getattr(args, key) for key in ["prompt", "decode", "rounds", "depth", "sequences"]}
    command = ["benches/gpu/run", *(["--software"] if args.software else [])]
    command += [f"--{key} {value}" for key, value in {"models": args.models, **sizes}.items()]
    results = {
        "date": now(),
        "command": " ".join(command),
        "commit": commit(args),
        "machine": machine(),
        "is_software": args.software,
        "sizes": sizes,
        "stages": {"checks": run_stage(harness, "checks")},
    }
    unknown = {"name": "none", "backend": "-", "driver": "-", "tier": "-"}
    results.update(adapter=harness.adapter or unknown, drivers=drivers())
    kept = earlier(harness.out, {key: results[key] for key in ["commit", "adapter", "sizes"]})
    for name in rest:
        reason = "not reached" if name in wanted else "skipped"
        results["stages"][name] = {**kept[name], "is_kept": True} if name in kept else left_out(reason)
    # After each stage, so that a run that is cut short leaves what it has.
    text = save(harness.out, results)
    for name in wanted:
        results["stages"][name] = run_stage(harness, name)
        text = save(harness.out, results)
    print(f"\n{text}\nin {harness.out}: results.json, record.txt, logs/")
    is_whole = all(target.verdict != summary.NOT_RUN for target in summary.targets(results))
    return 0 if is_whole and not summary.failures(results) else 1


def left_out(reason):
    return {"date": now(), "seconds": 0, "parts": {}, "missing": {}, "reason": reason, "is_kept": False}


def save(out, results):
    """Writes the results and returns the text of their record."""
    text = summary.record(results)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "record.txt").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
