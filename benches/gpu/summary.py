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
# Models whose rates in Node are compared with the native ones.
IN_NODE = ["llama-3.2-1b-Q4_0", "llama-3.1-8b-Q4_0"]


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
    for model in IN_NODE:
        for phase in ["decode", "prefill"]:
            text = f"{phase} {model} in Node on Dawn, by native"
            found.append(judge(text, 0.80, lambda: in_node(results, model, phase)))
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


def first_prompt(results):
    """The length of the prompts that targets are about, as text."""
    return results["sizes"]["prompt"].split(",")[0]


def phase_of(setting, phase, prompt):
    """The rate of one of llama.cpp's settings."""
    return setting["decode"] if phase == "decode" else setting["prefill"][prompt]


def against_llama(results, model, backend, phase):
    """Our rate by the faster of llama.cpp's settings; medians."""
    ours = our_rate(results, "bench", model, phase)
    settings = part(results, f"llama-{backend}", model)["settings"]
    prompt = first_prompt(results)
    rates = {name: phase_of(setting, phase, prompt)["median"] for name, setting in settings.items()}
    best = max(rates, key=rates.get)
    return ours / rates[best], f"{ours:.1f} by {rates[best]:.1f} tokens/s, {best}"


def in_node(results, model, phase):
    """The npm package's rate by our native one; medians."""
    node, native = (our_rate(results, stage, model, phase) for stage in ["dawn", "bench"])
    if not native > 0:
        raise Missing(f"bench: measured {native} for {model}")
    return node / native, f"{node:.1f} by {native:.1f} tokens/s"


def our_rate(results, stage, model, phase):
    sizes = results["sizes"]
    test = f"tg{sizes['decode']}" if phase == "decode" else f"pp{first_prompt(results)}"
    rows = [row for row in part(results, stage, model)["rows"] if row["test"] == test]
    if len(rows) != 1:
        raise Missing(f"{stage}: {len(rows)} rows of {test} for {model}")
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
    for table in [rates, sequences, cold, ablations, encoders, mixtures, kernels, torch_rates]:
        lines += table(results)
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
    lines = ["", f"{'model':<22} {'engine':<32} {'test':<14} {'tokens/s':>32}"]

    def show(model, engine, test, rate):
        found = f"{rate['median']:.1f} ({rate['lowest']:.1f} to {rate['highest']:.1f})"
        lines.append(f"{model:<22} {engine:<32} {test:<14} {found:>32}")

    # In the order of their first appearance.
    ours = {"bench": "tilewright", "depth": "tilewright", "dawn": "tilewright in Node, Dawn"}
    for model in dict.fromkeys(model for stage in [*ours, *PEERS] for model in measured(results, stage)):
        for stage, engine in ours.items():
            for row in measured(results, stage).get(model, {"rows": []})["rows"]:
                show(model, engine, row["test"], row["tokens_per_second"])
        for stage in PEERS:
            peer = measured(results, stage).get(model, {"settings": {}, "depth": {}})
            for name, setting in peer["settings"].items():
                for n, rate in setting["prefill"].items():
                    show(model, f"{stage}, {name}", f"pp{n}", rate)
                show(model, f"{stage}, {name}", f"tg{results['sizes']['decode']}", setting["decode"])
            for depth, rate in peer["depth"].items():
                show(model, stage, f"tg @ d{depth}", rate)
    lines += [f"{engine:<22} {about}" for engine, about in builds(results)]
    return lines if len(lines) > 2 else []


def sequences(results):
    """Tokens per second of all sequences together."""
    found = {}
    for model, run in measured(results, "sequences").items():
        found[model, "tilewright"] = run["rates"]
    for stage in PEERS:
        for model, run in measured(results, stage).items():
            if run["sequences"]:
                found[model, stage] = {n: rate["median"] for n, rate in run["sequences"].items()}
    lines = ["", "sequences at once, tokens/s of all of them"] if found else []
    for (model, engine), by_number in found.items():
        rates = "".join(f"{n:>4}: {rate:>8.1f}" for n, rate in by_number.items())
        lines.append(f"{model:<22} {engine:<14}{rates}")
    return lines


def cold(results):
    lines = []
    for model, run in measured(results, "cold").items():
        peak = f"{run['peak_mib']} MiB at most" if run["peak_mib"] else "unknown"
        lines.append(f"{model:<22} {run['first_seconds']:>8.2f} s {run['second_seconds']:>8.2f} s   {peak}")
    title = "from the command to one token: without compiled pipelines, with them; the GPU's memory in use"
    return ["", title, *lines] if lines else []


def ablations(results):
    """Where the kernels' time goes: times, and ratios to the kernel as it is, measured and predicted for an H100."""
    run = measured(results, "ablate").get("ablate")
    if run is None:
        return []
    lines = ["", f"{'ablation':<50} {'us':>10} {'of as is':>9} {'predicted':>9} {'predicted us':>13}"]
    for row in run["rows"]:
        name = f"{row['part']}: {row['case']}"
        lines.append(
            f"{name:<50} {1e6 * row['seconds']:>10.1f} {row['of_as_is']:>9.2f} {row['predicted_of_as_is']:>9.2f} "
            f"{1e6 * row['predicted_seconds']:>13.1f}"
        )
    for left in run["left_out"]:
        lines.append(f"left out: {left['part']}: {left['case'] or 'altogether'}: {left['reason']}")
    return lines


def encoders(results):
    """Texts per second by batch size, ours and PyTorch's."""
    found = {
        name: [(row["n_texts"], row["texts_per_second"]["median"]) for row in run["rows"]]
        for name, run in measured(results, "embed").items()
    }
    for name, row in measured(results, "torch").items():
        if "texts_per_second" in row:
            encoder, n, _ = name.split()
            found.setdefault(f"{encoder} PyTorch", []).append((int(n), row["texts_per_second"]))
    lines = ["", "encoders, texts/s by texts in a batch"] if found else []
    for name, by_batch in sorted(found.items()):
        lines.append(f"{name:<34}" + "".join(f"{n:>5}: {rate:>10.1f}" for n, rate in by_batch))
    return lines


def mixtures(results):
    """A mixture of logits in one kernel and as a chain of kernels."""
    run = measured(results, "mol").get("mol")
    lines = ["", f"{'mixture of logits':<36} {'fused ms':>10} {'chain ms':>10} {'ratio':>7}"] if run else []
    for table in run["tables"] if run else []:
        shape, rows = table["shape"], {row["operation"]: row["seconds"] for row in table["rows"]}
        name = f"{shape['query_components']} x {shape['item_components']} x {shape['dim']}, {run['strip']} items"
        fused, chain = rows["mixture"], rows["chain"]
        lines.append(f"{name:<36} {1e3 * fused:>10.3f} {1e3 * chain:>10.3f} {chain / fused:>6.2f}x")
    return lines


def builds(results):
    """llama.cpp's versions and what its backends say about the GPU, once for each build."""
    for name in PEERS:
        peers = list(measured(results, name).values())
        if peers:
            peer = peers[0]
            yield name, "; ".join([peer["version"], peer["device"], *peer["remarks"]])


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
        elif "texts_per_second" in row:
            continue
        elif "bytes_per_second" in row:
            lines.append(f"{name:<28} {row['bytes_per_second'] / 1e9:>8.1f} GB/s")
        else:
            lines.append(f"{name:<28} {', '.join(f'{key} {value}' for key, value in row.items())}")
    return lines
