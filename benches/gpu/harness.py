"""Measures tilewright on this machine's GPU, next to PyTorch and llama.cpp, and says which targets are met.

usage: benches/gpu/run [--out DIR] [--skip STAGE,..] [--only STAGE,..] [options]

Stages, in order; one that cannot run says why and the others go on:
  checks        the Vulkan loader and a GPU; builds tilewright
  tests         tests of kernels, generation and models on every tier
  models        GGUF files of random weights
  kernels       tilewright bench kernels
  bench         tilewright bench of each model
  torch         PyTorch: copies, products, matrices times vectors
  llama-cuda    llama.cpp with CUDA on the same files
  llama-vulkan  llama.cpp with Vulkan on the same files
  llama-cpu     llama.cpp on the CPU, in a dry run alone

DIR gets results.json, record.txt and the output of every command in logs/. What an earlier run left there is kept for
stages that are not run this time, if it is of the same commit, adapter and sizes: stages can be run one by one.
The exit code is 0 if every target was measured and all tests passed, 1 if not, 2 for an error in the command line.
"""
import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import summary

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODELS = "134m:Q4_0,llama-3.2-1b:Q4_0,llama-3.2-1b:Q4_K_M,llama-3.2-1b:Q8_0,llama-3.1-8b:Q4_0,llama-3.1-8b:Q4_K_M"
# Of a dry run: seconds on a software adapter.
SMALL = {"models": "134m:Q4_0", "prompt": 32, "decode": 4, "rounds": 1}
FULL = {"models": MODELS, "prompt": 512, "decode": 128, "rounds": 5}
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
            try:
                return process.wait(self.args.limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise Unavailable(f"{name} took longer than {self.args.limit} s") from None

    def command(self, name, command, **env):
        """Runs a command that must go well."""
        if code := self.attempt(name, command, **env):
            why = blame(self.log(name, "err")) or blame(self.log(name, "out"))
            raise Unavailable(f"{name} ended with {code}: {why}")

    def measure(self, name, command):
        """The JSON that a command prints."""
        self.command(name, command)
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
            collect(parts, missing, name, lambda: measure(name, path))

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
            collect(parts, missing, name, lambda: self.test(name, command))

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

    def make_models(self, parts, missing):
        files = self.model_files()
        parts.update({name: {"bytes": path.stat().st_size} for name, path in files.items() if path.exists()})
        absent = [name for name in files if name not in parts]
        if absent:
            python = self.python("models", ["gguf", "numpy"], "import gguf, numpy")
        for name in absent:
            collect(parts, missing, name, lambda: self.make_model(python, name, files[name]))

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
            collect(parts, missing, name, lambda: self.measure(f"kernels {name}", self.bench(*words)))

    def bench_models(self, parts, missing):
        self.need_adapter()
        sizes = ["-p", self.args.prompt, "-n", self.args.decode, "-r", self.args.rounds]
        self.each_model(parts, missing, lambda name, path: self.measure(f"bench {name}", self.bench(path, *sizes)))

    def torch(self, parts, missing):
        self.need_gpu()
        python = self.python("torch", ["torch", "numpy"], "import torch")
        parts.update(self.measure("torch", [python, HERE / "torch_rates.py"]))

    def llama_cuda(self, parts, missing):
        self.need_gpu()
        env = {}
        if not self.is_provided("llama-cuda"):
            cuda = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
            if cuda is None:
                raise Unavailable("no nvcc: install the CUDA toolkit, or give --wheels or --python")
            flags = "-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native"
            env = {"CMAKE_ARGS": flags, "CUDACXX": cuda, "FORCE_CMAKE": "1"}
        self.llama("llama-cuda", parts, missing, ["--gpu", "CUDA"], env)

    def llama_vulkan(self, parts, missing):
        self.need_gpu()
        if not self.is_provided("llama-vulkan") and shutil.which("glslc") is None:
            self.apt("glslc", "libvulkan-dev", "spirv-headers", "g++", "make")
        env = {"CMAKE_ARGS": "-DGGML_VULKAN=on", "FORCE_CMAKE": "1"}
        self.llama("llama-vulkan", parts, missing, ["--gpu", "Vulkan"], env)

    def llama_cpu(self, parts, missing):
        self.llama("llama-cpu", parts, missing, ["--threads", os.cpu_count()], {})

    def llama(self, stage, parts, missing, words, env):
        # pip would take the other backend's build from its cache.
        source = [] if self.args.wheels else ["--no-cache-dir", "--no-binary", "llama-cpp-python"]
        python = self.python(stage, [*source, "llama-cpp-python"], "import llama_cpp", **env)
        script = ROOT / "benches" / "peers" / "llama_rates.py"
        sizes = ["--prompt", self.args.prompt, "--decode", self.args.decode, "--rounds", self.args.rounds]
        words = [*sizes, *words]
        self.each_model(
            parts, missing, lambda name, path: self.measure(f"{stage} {name}", [python, script, path, *words])
        )

    def is_provided(self, stage):
        return bool(self.args.wheels) or stage in self.args.python

    def need_gpu(self):
        if self.args.software:
            raise Unavailable(summary.DRY_RUN)


STAGES = {
    "checks": Harness.checks,
    "tests": Harness.tests,
    "models": Harness.make_models,
    "kernels": Harness.kernels,
    "bench": Harness.bench_models,
    "torch": Harness.torch,
    "llama-cuda": Harness.llama_cuda,
    "llama-vulkan": Harness.llama_vulkan,
    "llama-cpu": Harness.llama_cpu,
}


def blame(path):
    """The line that tells why a command failed: a compiler's first error, else the last line of all."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    # pip announces with the same word that a command failed, ahead of that command's output.
    errors = [line for line in lines if "error: " in line and "subprocess-exited-with-error" not in line]
    return (errors or lines[-1:] or [""])[0][-300:]


def collect(parts, missing, key, measure):
    """What `measure` returns is a part of its stage; that it could not be measured concerns no other part."""
    try:
        parts[key] = measure()
        print(f"   {key} ran", flush=True)
    except Unavailable as reason:
        missing[key] = str(reason)
        print(f"   {key} NOT RUN: {reason}", flush=True)


def model_names(args):
    return [spec.replace(":", "-") for spec in args.models.split(",")]


def run_stage(harness, name):
    """Runs a stage and returns its results; whatever goes wrong in it is its own affair."""
    print(f"== {name}", flush=True)
    start, parts, missing, reason = time.monotonic(), {}, {}, ""
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
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of the prompt: 512")
    parser.add_argument("--decode", type=int, metavar="N", help="tokens decoded: 128")
    parser.add_argument("--rounds", type=int, metavar="N", help="repetitions: 5")
    parser.add_argument("--limit", type=int, default=3600, metavar="SECONDS", help="that a command may take: 3600")
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
    harness = Harness(args)
    sizes = {"prompt": args.prompt, "decode": args.decode, "rounds": args.rounds}
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
    rest = [name for name in STAGES if name != "checks" and (args.software or name != "llama-cpu")]
    wanted = [name for name in rest if name not in args.skip and (not args.only or name in args.only)]
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
