"""python3 -m unittest discover benches/gpu"""
import argparse
import tempfile
import unittest

import harness
from harness import STAGES, Harness, Unavailable


def args(folder, **given):
    usual = {"out": folder, "models_dir": None, "tilewright": None, "budget": None, "limit": 60, "models": harness.MODELS}
    return argparse.Namespace(**usual | given)


class Budget(unittest.TestCase):
    def collected(self, **given):
        with tempfile.TemporaryDirectory() as folder:
            one, (parts, missing) = Harness(args(folder, **given)), ({}, {})
            one.stage = "bench"
            one.collect(parts, missing, "llama-3.1-8b-Q4_0", lambda: "large")
            one.collect(parts, missing, "llama-3.2-1b-Q4_0", lambda: "small")
            return parts, missing

    def test_parts_beyond_the_budget_are_left_out(self):
        self.assertEqual(self.collected(), ({"llama-3.1-8b-Q4_0": "large", "llama-3.2-1b-Q4_0": "small"}, {}))
        parts, missing = self.collected(budget=10)
        self.assertEqual(parts, {"llama-3.2-1b-Q4_0": "small"})
        self.assertIn("of the budget are left", missing["llama-3.1-8b-Q4_0"])

    def test_a_command_takes_no_longer_than_the_budget(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(Unavailable, "longer than 1 s"):
                Harness(args(folder, budget=1)).command("sleep", ["sleep", "20"])

    def test_every_stage_has_a_plan(self):
        given = args("", budget=300)
        stages = [name for name in STAGES if name != "checks"]
        lines = harness.plan(stages, given).splitlines()[1:]
        self.assertEqual([line.split()[0] for line in lines], stages)
        # Three parts of a minute fit, and so does the next stage.
        self.assertEqual(lines[0].split(), ["tests", "3", "180", "180"])
        self.assertNotIn("beyond", lines[1])
        self.assertIn("beyond", lines[-1])


if __name__ == "__main__":
    unittest.main()
