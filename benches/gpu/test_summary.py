"""python3 -m unittest discover benches/gpu"""
import copy
import unittest

import summary
from summary import MET, MISSED, NOT_RUN

COPY = 1e12
# Of the goal: correctness, four of kernels, twelve of llama.cpp, four of Node.
N_TARGETS = 21
MODELS = [f"{shape}-{kind}" for shape in summary.SHAPES for kind in summary.TYPES]


def stage(**parts):
    return {"date": "", "seconds": 1, "parts": parts, "missing": {}, "reason": "", "is_kept": False}


def row(operation, kernel, n_tokens, rate, seconds=1e-3, flop=0):
    return {
        "operation": operation,
        "kernel": kernel,
        "n_tokens": n_tokens,
        "seconds": seconds,
        "bytes": rate * seconds,
        "flop": flop,
        "vs_f16": 1.0,
    }


def spread(rate):
    return {"lowest": rate, "median": rate, "highest": rate}


def good():
    """Results in which everything was measured and every target is met."""
    kernels = {
        name: {
            "device": {"tier": "subgroups"},
            "shapes": {"dim": int(name.split()[0])},
            "probes": {
                "copy_bytes_per_second": COPY,
                "flop_per_second": 41e12,
                "matmul_size": 2048,
                "matmul": [
                    {"size": 2048, "flop_per_second": 41e12},
                    {"size": 4096, "flop_per_second": 40e12},
                ],
            },
            "rows": [
                row("ffn_down", "matvec.Q4_0", 1, 0.8 * COPY),
                # Small ones do not count.
                row("attn_output", "matvec.Q4_0", 1, 0.1 * COPY, seconds=1e-6),
                row("head", "matvec.Q4_0", 1, 0.9 * COPY),
                row("attn_output", "matmul.F16", 4096 if name == summary.CUBED else 512, 1e9, flop=3e11),
            ],
        }
        for name in [*summary.WIDTHS, summary.CUBED]
    }
    rows = [{"test": test, "tokens_per_second": spread(100)} for test in ["pp512", "pp2048", "tg128"]]
    settings = {"plain attention": {"prefill": {"512": spread(90), "2048": spread(95)}, "decode": spread(90)}}
    peer = {"version": "1", "device": "a", "remarks": [], "settings": settings}
    peer |= {"depth": {"8192": spread(80)}, "sequences": {"8": spread(400)}}
    tests = {"is_passed": True, "is_short": False, "n_passed": 5, "case": None, "skipped": [], "tiers": {"baseline": 9}}
    return {
        "date": "2026-01-01 00:00 UTC",
        "command": "benches/gpu/run",
        "commit": "0000000",
        "machine": "one",
        "is_software": False,
        "sizes": {"prompt": "512,2048", "decode": 128},
        "adapter": {"name": "a", "backend": "vulkan", "driver": "d", "tier": "subgroups"},
        "drivers": {},
        "stages": {
            "tests": stage(kernels=dict(tests), generate=dict(tests), model=dict(tests)),
            "kernels": stage(**kernels),
            "bench": stage(**{model: {"rows": copy.deepcopy(rows)} for model in MODELS}),
            "dawn": stage(**{model: {"rows": copy.deepcopy(rows)} for model in summary.IN_NODE}),
            "torch": stage(
                **{
                    "copy": {"bytes_per_second": COPY},
                    "matmul f32": {"flop_per_second": 50e12},
                    "matmul f16": {"flop_per_second": 400e12},
                }
            ),
            "llama-cuda": stage(**{model: copy.deepcopy(peer) for model in MODELS}),
            "llama-vulkan": stage(**{model: copy.deepcopy(peer) for model in MODELS}),
        },
    }


def verdicts(results):
    return [target.verdict for target in summary.targets(results)]


def verdict(results, text):
    found = [target for target in summary.targets(results) if text in target.text]
    assert len(found) == 1, found
    return found[0].verdict


class Targets(unittest.TestCase):
    def test_all_met(self):
        self.assertEqual(verdicts(good()), [MET] * N_TARGETS)

    def test_nothing_measured_is_never_met(self):
        results = good()
        for name in results["stages"]:
            results["stages"][name] = {**stage(), "reason": "skipped"}
        self.assertEqual(verdicts(results), [NOT_RUN] * N_TARGETS)
        results["stages"] = {}
        self.assertEqual(verdicts(results), [NOT_RUN] * N_TARGETS)
        for target in summary.targets(results):
            self.assertTrue(target.reason)
            self.assertEqual(target.measured, "")

    def test_each_missing_part_is_missed_by_its_targets(self):
        concerned = {
            "tests": {"kernels": 1, "generate": 1, "model": 1},
            # The rate of copying needs both widths.
            "kernels": {"2048": 2, "4096": 3, "4096 cubed": 1},
            # By llama.cpp with Vulkan, and twice by that with CUDA; and what Node is compared with.
            "bench": {MODELS[0]: 5, MODELS[1]: 3},
            "dawn": {MODELS[0]: 2},
            "torch": {"copy": 0, "matmul f32": 1, "matmul f16": 1},
            "llama-cuda": {MODELS[1]: 2},
            "llama-vulkan": {MODELS[2]: 1},
        }
        for name, parts in concerned.items():
            for part, n_not_run in parts.items():
                results = good()
                del results["stages"][name]["parts"][part]
                results["stages"][name]["missing"][part] = "it broke"
                found = summary.targets(results)
                self.assertEqual([t.verdict for t in found].count(NOT_RUN), n_not_run, (name, part))
                self.assertEqual([t.verdict for t in found].count(MET), N_TARGETS - n_not_run, (name, part))
                self.assertTrue(all("it broke" in t.reason for t in found if t.verdict == NOT_RUN))

    def test_dry_run_is_never_met(self):
        results = {**good(), "is_software": True}
        self.assertEqual(verdicts(results), [NOT_RUN] * N_TARGETS)
        results["stages"]["tests"]["parts"]["model"]["is_passed"] = False
        self.assertEqual(verdicts(results), [MISSED] + [NOT_RUN] * (N_TARGETS - 1))

    def test_failed_tests_spoil_everything(self):
        results = good()
        results["stages"]["tests"]["parts"]["model"]["is_passed"] = False
        self.assertEqual(verdicts(results), [MISSED] * N_TARGETS)
        self.assertIn("model FAILED", summary.record(results))
        del results["stages"]["tests"]["parts"]["kernels"]
        self.assertEqual(verdicts(results), [MISSED] * N_TARGETS)

    def test_some_cases_are_not_all(self):
        results = good()
        results["stages"]["tests"]["parts"]["kernels"]["case"] = "argmax"
        self.assertEqual(verdicts(results)[0], NOT_RUN)
        results = good()
        results["stages"]["tests"]["parts"]["model"]["is_short"] = True
        self.assertEqual(verdicts(results)[0], NOT_RUN)

    def test_the_worst_matrix_counts(self):
        results = good()
        results["stages"]["kernels"]["parts"]["2048"]["rows"].append(row("qkv", "qkv.F16", 1, 0.6 * COPY))
        self.assertEqual(verdict(results, "matvec, matrices"), MISSED)
        self.assertEqual(verdict(results, "head"), MET)

    def test_no_large_matrix_is_not_run(self):
        results = good()
        for run in results["stages"]["kernels"]["parts"].values():
            run["rows"] = [r for r in run["rows"] if r["operation"] != "head"]
        self.assertEqual(verdict(results, "head"), NOT_RUN)

    def test_the_fastest_copy_counts(self):
        results = good()
        results["stages"]["torch"]["parts"]["copy"]["bytes_per_second"] = 2 * COPY
        self.assertEqual(verdict(results, "matvec, matrices"), MISSED)

    def test_products_of_another_size_or_precision_do_not_count(self):
        for place, key, value in [("probes", "matmul", []), ("device", "tier", "f16")]:
            results = good()
            results["stages"]["kernels"]["parts"]["4096"][place][key] = value
            self.assertEqual(verdict(results, "cubed, F32"), NOT_RUN)
        results = good()
        results["stages"]["kernels"]["parts"][summary.CUBED]["rows"][-1]["n_tokens"] = 512
        self.assertEqual(verdict(results, "cubed, F16"), NOT_RUN)

    def test_the_faster_setting_of_llama_counts(self):
        results = good()
        settings = results["stages"]["llama-cuda"]["parts"][MODELS[0]]["settings"]
        settings["flash attention"] = {"prefill": {"512": spread(126), "2048": spread(1)}, "decode": spread(100)}
        # Faster than means faster than.
        self.assertEqual(verdict(results, f"decode {MODELS[0]}, by llama.cpp cuda"), MISSED)
        self.assertEqual(verdict(results, f"prefill {MODELS[0]}, by"), MISSED)
        self.assertEqual(verdict(results, f"decode {MODELS[0]}, by llama.cpp vulkan"), MET)

    def test_a_rate_that_is_no_number_is_not_met(self):
        for rate in [float("nan"), float("inf"), 0.0]:
            results = good()
            for r in results["stages"]["bench"]["parts"][MODELS[0]]["rows"]:
                r["tokens_per_second"] = spread(rate)
            self.assertEqual(verdict(results, f"decode {MODELS[0]}, by llama.cpp cuda"), NOT_RUN)

    def test_node_is_compared_with_native(self):
        results = good()
        rows = results["stages"]["dawn"]["parts"][MODELS[0]]["rows"]
        rows[0]["tokens_per_second"], rows[2]["tokens_per_second"] = spread(79), spread(81)
        self.assertEqual(verdict(results, f"prefill {MODELS[0]} in Node"), MISSED)
        self.assertEqual(verdict(results, f"decode {MODELS[0]} in Node"), MET)

    def test_a_record_has_every_table(self):
        results = good()
        case = {"part": "matvec", "case": "Q4_0 no scale", "seconds": 25e-6, "of_as_is": 0.5}
        case |= {"predicted_of_as_is": 0.75, "predicted_seconds": 27e-6}
        left_out = {"part": "chain", "case": None, "reason": "no time was left"}
        embedded = [{"n_texts": 10, "texts_per_second": spread(1234)}]
        shape = {"query_components": 8, "item_components": 4, "dim": 64}
        rows = [{"operation": name, "seconds": seconds} for name, seconds in [("mixture", 0.002), ("chain", 0.005)]]
        results["stages"] |= {
            "ablate": stage(ablate={"rows": [case], "left_out": [left_out]}),
            "sequences": stage(**{MODELS[0]: {"rates": {"8": 640.0}}}),
            "depth": stage(**{MODELS[0]: {"rows": [{"test": "tg32 @ d8192", "tokens_per_second": spread(77)}]}}),
            "cold": stage(**{MODELS[0]: {"first_seconds": 3.25, "second_seconds": 1.5, "peak_mib": 4567}}),
            "embed": stage(**{"minilm-F16": {"rows": embedded}}),
            "mol": stage(mol={"strip": 16384, "tables": [{"shape": shape, "rows": rows}]}),
        }
        results["stages"]["torch"]["parts"]["minilm-F16 10 texts"] = {"texts_per_second": 987.0}
        lines = [" ".join(line.split()) for line in summary.record(results).splitlines()]
        for expected in [
            "matvec: Q4_0 no scale 25.0 0.50 0.75 27.0",
            "left out: chain: altogether: no time was left",
            f"{MODELS[0]} tilewright 8: 640.0",
            f"{MODELS[0]} llama-vulkan 8: 400.0",
            f"{MODELS[0]} tilewright tg32 @ d8192 77.0 (77.0 to 77.0)",
            f"{MODELS[0]} tilewright in Node, Dawn pp2048 100.0 (100.0 to 100.0)",
            f"{MODELS[0]} llama-cuda, plain attention pp2048 95.0 (95.0 to 95.0)",
            f"{MODELS[0]} llama-cuda tg @ d8192 80.0 (80.0 to 80.0)",
            f"{MODELS[0]} 3.25 s 1.50 s 4567 MiB at most",
            "minilm-F16 10: 1234.0",
            "minilm-F16 PyTorch 10: 987.0",
            "8 x 4 x 64, 16384 items 2.000 5.000 2.50x",
        ]:
            self.assertIn(expected, lines)

    def test_a_record_names_what_was_not_run(self):
        results = good()
        results["stages"]["torch"] = {**stage(), "reason": "PyTorch sees no GPU"}
        text = summary.record(results)
        self.assertIn("NOT RUN: torch: PyTorch sees no GPU", text)
        self.assertNotIn("\nPyTorch", text)

    def test_a_record_has_the_rates_of_peers_alone(self):
        results = good()
        results["stages"]["bench"] = {**stage(), "reason": "no adapter"}
        text = summary.record(results)
        self.assertIn("llama-cuda, plain attention", text)
        self.assertNotIn("tilewright  ", text)


if __name__ == "__main__":
    unittest.main()
