"""From the results of `harness.py` to a table of targets, and to the text of a record.

A target is met only by a number that was measured in these results; whatever is missing makes it NOT RUN, with the
reason.
"""
import math
from dataclasses import dataclass

MET, MISSED, NOT_RUN = "met", "missed", "NOT RUN"

# Bytes from which a matrix counts as large.
LARGE_BYTES = 8_000_000
# The runs of `tilewright bench kernels` that must be there: by width, and one whose prompt is as long as it is wide.
WIDTHS = ["2048", "4096"]
CUBE = 4096
CUBED = "4096 cubed"
# A product that stages F32 in half precision is none of F32.
HALVES_TIERS = ("f16", "matrix8", "matrix16")
SHAPES = ["llama-3.2-1b", "llama-3.1-8b"]
TYPES = ["Q4_0", "Q4_K_M"]
DRY_RUN = "a dry run on a software adapter"
PEERS = ["llama-vulkan", "llama-cuda", "llama-cpu"]


class Missing(Exception):
    """A number that a target needs and that was not measured; the text says why."""


@dataclass
class Target:
    """One line of the table."""

    text: str
    measured: str
    verdict: str
    reason: str = ""


def part(results, stage, key):
    """What a stage measured under `key`, or `Missing`."""
    found = results["stages"].get(stage)
    if found is None:
        raise Missing(f"{stage}: no such stage in these results")
    if key in found["parts"]:
        return found["parts"][key]
    raise Missing(f"{stage}: {found['missing'].get(key) or found['reason'] or f'no {key}'}")


def measured(results, stage):
    """All that a stage measured, by key; nothing if it did not run."""
    return results["stages"].get(stage, {"parts": {}})["parts"]


def targets(results):
    """All targets, in the order of the goal."""
    found = [
        judge("matvec, matrices of 8 MB and more, by copy", 0.70, lambda: share_of_copy(results, is_head=False)),
        judge("matvec of the head, by copy", 0.85, lambda: share_of_copy(results, is_head=True)),
        judge("matmul 4096 cubed, F32, by cuBLAS without tensor cores", 0.70, lambda: f32_product(results)),
        judge("matmul 4096 cubed, F16, by cuBLAS F16", 0.60, lambda: f16_product(results)),
    ]
    for backend in ["vulkan", "cuda"]:
        for model in [f"{shape}-{kind}" for shape in SHAPES for kind in TYPES]:
            text = f"decode {model}, by llama.cpp {backend}"
            found.append(judge(text, 1.0, lambda: against_llama(results, model, backend, "decode"), is_strict=True))
    for model in [f"{shape}-{kind}" for shape in SHAPES for kind in TYPES]:
        text = f"prefill {model}, by llama.cpp cuda"
        found.append(judge(text, 0.80, lambda: against_llama(results, model, "cuda", "prefill")))
    for target in found:
        if target.verdict == MET and (reason := failures(results)):
            target.verdict, target.reason = MISSED, reason
        if target.verdict != NOT_RUN and results["is_software"]:
            target.verdict, target.reason = NOT_RUN, DRY_RUN
    return [correctness(results), *found]


def judge(text, least, measure, is_strict=False):
    """Compares what `measure` returns, a ratio and a remark, with the least that is good enough."""
    sign = ">" if is_strict else ">="
    text = f"{text} {sign} {least:.2f}"
    try:
        ratio, remark = measure()
    except Missing as missing:
        return Target(text, "", NOT_RUN, str(missing))
    if not (math.isfinite(ratio) and ratio > 0):
        return Target(text, "", NOT_RUN, f"measured {ratio}")
    is_met = ratio > least if is_strict else ratio >= least
    return Target(text, f"{ratio:.3f} ({remark})", MET if is_met else MISSED)


def failures(results):
    """Why no number of these results counts, however high; empty if they do."""
    failed = [name for name, test in measured(results, "tests").items() if not test["is_passed"]]
    return f"tests failed: {', '.join(failed)}" if failed else ""


def correctness(results):
    """Whether all tests passed, none of them in part."""
    text = "tests of kernels, generation and models"
    if reason := failures(results):
        return Target(text, "", MISSED, reason)
    try:
        tests = {name: part(results, "tests", name) for name in ["kernels", "generate", "model"]}
    except Missing as missing:
        return Target(text, "", NOT_RUN, str(missing))
    cases = ", ".join(f"{count} {tier}" for tier, count in tests["kernels"]["tiers"].items())
    passed = f"{sum(test['n_passed'] for test in tests.values())} passed, cases of kernels: {cases}"
    picked = [name for name, test in tests.items() if test["case"]]
    skipped = sorted({note for test in tests.values() for note in test["skipped"]})
    if picked:
        return Target(text, passed, NOT_RUN, f"only some cases of {', '.join(picked)}")
    if any(test["is_short"] for test in tests.values()):
        return Target(text, passed, NOT_RUN, "only the cases of CI")
    if results["is_software"]:
        return Target(text, passed, NOT_RUN, DRY_RUN)
    return Target(text, passed, MET, f"skipped: {'; '.join(skipped)}" if skipped else "")


def copy_bytes_per_second(results):
    """The highest rate of copying that anything reached, and who did: our own probe may be slow itself."""
    rates = {}
    for width in WIDTHS:
        rates[f"tilewright {width}"] = part(results, "kernels", width)["probes"]["copy_bytes_per_second"]
    try:
        rates["PyTorch"] = part(results, "torch", "copy")["bytes_per_second"]
    except Missing:
        pass
    who = max(rates, key=rates.get)
    return rates[who], who


def products(results):
    """Rows of `tilewright bench kernels` that multiply a matrix by one vector, of all widths."""
    for width in WIDTHS:
        for row in part(results, "kernels", width)["rows"]:
            if row["n_tokens"] == 1 and row["vs_f16"] is not None:
                yield width, row


def share_of_copy(results, is_head):
    """The lowest share of the copy rate among large matrices."""
    copy, who = copy_bytes_per_second(results)
    shares = {}
    for width, row in products(results):
        if (row["operation"] == "head") == is_head and row["bytes"] >= LARGE_BYTES:
            name = f"{row['kernel']} {row['operation']} {width}"
            shares[name] = row["bytes"] / row["seconds"] / copy
    if not shares:
        raise Missing(f"kernels: no matrix of {LARGE_BYTES} bytes")
    lowest, highest = min(shares, key=shares.get), max(shares, key=shares.get)
    return shares[lowest], (
        f"lowest of {len(shares)}: {lowest}; highest {shares[highest]:.3f}: {highest}; "
        f"copy {copy / 1e9:.0f} GB/s by {who}"
    )


def f32_product(results):
    """The probe of `tilewright bench kernels` at 4096, by PyTorch's product."""
    run = part(results, "kernels", str(CUBE))
    if run["device"]["tier"] in HALVES_TIERS:
        raise Missing("kernels: the tier stages F32 in half precision")
    rates = {product["size"]: product["flop_per_second"] for product in run["probes"]["matmul"]}
    if CUBE not in rates:
        raise Missing(f"kernels: no product of F32 of {CUBE}, the largest is {max(rates, default=0)}")
    return against_cublas(results, "f32", rates[CUBE], f"tier {run['device']['tier']}")


def f16_product(results):
    """The fastest product of F16 weights with as many rows, of all tiers that were measured."""
    part(results, "kernels", CUBED)
    rates = {}
    for name, run in measured(results, "kernels").items():
        for row in run["rows"]:
            is_cube = row["operation"] == "attn_output" and run["shapes"]["dim"] == row["n_tokens"] == CUBE
            if is_cube and ".F16" in row["kernel"]:
                rates[f"{row['kernel']}, run {name}"] = row["flop"] / row["seconds"]
    if not rates:
        raise Missing(f"kernels: no product of F16 over {CUBE} tokens")
    fastest = max(rates, key=rates.get)
    return against_cublas(results, "f16", rates[fastest], fastest)


def against_cublas(results, kind, rate, remark):
    peer = part(results, "torch", f"matmul {kind}")["flop_per_second"]
    return rate / peer, f"{rate / 1e12:.1f} by {peer / 1e12:.1f} TFLOP/s, {remark}"


def against_llama(results, model, backend, phase):
    """Our rate by the faster of llama.cpp's settings; medians."""
    ours = our_rate(results, model, phase)
    settings = part(results, f"llama-{backend}", model)["settings"]
    rates = {name: setting[phase]["median"] for name, setting in settings.items()}
    best = max(rates, key=rates.get)
    return ours / rates[best], f"{ours:.1f} by {rates[best]:.1f} tokens/s, {best}"


def our_rate(results, model, phase):
    rows = [row for row in part(results, "bench", model)["rows"] if row["phase"] == phase]
    if len(rows) != 1:
        raise Missing(f"bench: {len(rows)} rows of {phase} for {model}")
    return rows[0]["tokens_per_second"]["median"]


def record(results):
    """The text for benches/record: what was measured on what, then targets, stages and rates."""
    lines = [f"{name:<9} {results[name]}" for name in ["date", "command", "commit", "machine"]]
    adapter = results["adapter"]
    lines.append(f"adapter   {adapter['name']} ({adapter['backend']}, {adapter['driver']}), tier {adapter['tier']}")
    lines += [f"{name:<9} {text}" for name, text in results["drivers"].items()]
    lines += ["", "target, measured, verdict"]
    for target in targets(results):
        reason = f": {target.reason}" if target.reason else ""
        lines.append(f"{target.text:<62} {target.measured or '-':<12} {target.verdict}{reason}")
    lines += ["", "stages"]
    for name, stage in results["stages"].items():
        lines.append(f"{name:<12} {state(stage)}")
    lines += rates(results) + kernels(results) + torch_rates(results)
    return "\n".join(lines) + "\n"


def state(stage):
    """One line about a stage: what it has, and each thing that it has not."""
    when = f", kept from {stage['date']}" if stage["is_kept"] else ""
    missing = [f"{key} NOT RUN: {reason}" for key, reason in stage["missing"].items()]
    if stage["reason"]:
        missing.insert(0, f"NOT RUN: {stage['reason']}")
    names = [f"{key}{'' if part.get('is_passed', True) else ' FAILED'}" for key, part in stage["parts"].items()]
    done = f"{', '.join(names)} in {stage['seconds']:.0f} s{when}" if names else ""
    return "; ".join(filter(None, [done, *missing]))


def rates(results):
    """Tokens per second of every engine on every model; medians, lowest to highest."""
    lines = ["", f"{'model':<22} {'engine':<34} {'prefill tokens/s':>30} {'decode tokens/s':>30}"]

    def show(rate):
        return f"{rate['median']:.1f} ({rate['lowest']:.1f} to {rate['highest']:.1f})"

    # In the order of their first appearance.
    models = dict.fromkeys(model for stage in ["bench", *PEERS] for model in measured(results, stage))
    for model in models:
        engines = {}
        if model in measured(results, "bench"):
            rows = measured(results, "bench")[model]["rows"]
            engines["tilewright"] = {row["phase"]: row["tokens_per_second"] for row in rows}
        for stage in PEERS:
            settings = measured(results, stage).get(model, {"settings": {}})["settings"]
            engines.update({f"{stage}, {name}": by_phase for name, by_phase in settings.items()})
        for engine, by_phase in engines.items():
            prefill, decode = (show(by_phase[phase]) if phase in by_phase else "-" for phase in ["prefill", "decode"])
            lines.append(f"{model:<22} {engine:<34} {prefill:>30} {decode:>30}")
    lines += [f"{engine:<22} {about}" for engine, about in builds(results)]
    return lines if len(lines) > 2 else []


def builds(results):
    """llama.cpp's versions and what its backends say about the GPU, once for each build."""
    for name in PEERS:
        peers = list(measured(results, name).values())
        if peers:
            peer = peers[0]
            yield name, "; ".join([f"llama-cpp-python {peer['version']}", peer["device"], *peer["remarks"]])


def kernels(results):
    """Products with one vector, and with many, of each run of `tilewright bench kernels`."""
    lines = []
    for name, run in measured(results, "kernels").items():
        probes = run["probes"]
        copy = probes["copy_bytes_per_second"]
        lines += [
            "",
            f"kernels {name}, tier {run['device']['tier']}: copy {copy / 1e9:.1f} GB/s, "
            f"F32 {probes['flop_per_second'] / 1e12:.3f} TFLOP/s at {probes['matmul_size']}",
            f"{'kernel':<28} {'operation':<12} {'tokens':>6} {'MB':>8} {'us':>10} {'GB/s':>8} {'of copy':>8} "
            f"{'TFLOP/s':>8}",
        ]
        for row in run["rows"]:
            if row["vs_f16"] is None:
                continue
            rate = row["bytes"] / row["seconds"]
            lines.append(
                f"{row['kernel']:<28} {row['operation']:<12} {row['n_tokens']:>6} {row['bytes'] / 1e6:>8.1f} "
                f"{row['seconds'] * 1e6:>10.1f} {rate / 1e9:>8.1f} {100 * rate / copy:>7.1f}% "
                f"{row['flop'] / row['seconds'] / 1e12:>8.3f}"
            )
    return lines


def torch_rates(results):
    parts = measured(results, "torch")
    lines = ["", "PyTorch"] if parts else []
    for name, row in parts.items():
        if "flop_per_second" in row:
            lines.append(f"{name:<28} {row['flop_per_second'] / 1e12:>8.2f} TFLOP/s")
        elif "bytes_per_second" in row:
            lines.append(f"{name:<28} {row['bytes_per_second'] / 1e9:>8.1f} GB/s")
        else:
            lines.append(f"{name:<28} {', '.join(f'{key} {value}' for key, value in row.items())}")
    return lines
