"""Tests the statistics in repro/experiment.py, and the text that repro/page makes from them.

    python tests/repro/spread_test.py
"""
import importlib.machinery
import importlib.util
import pathlib
import random
import sys
import unittest

REPRO = pathlib.Path(__file__).resolve().parents[2] / "repro"
sys.path.insert(0, str(REPRO))
import claims
from experiment import flatten, spread
from formulas import speed_up, text_of


def load_page():
    loader = importlib.machinery.SourceFileLoader("page", str(REPRO / "page"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("page", loader))
    loader.exec_module(module)
    return module


class Spread(unittest.TestCase):
    def test_interval_is_that_of_the_binomial_tables(self):
        for samples, rank in ((6, 1), (8, 1), (9, 2), (12, 3), (17, 5), (20, 6), (31, 10), (50, 18)):
            shuffled = random.Random(samples).sample(range(1, samples + 1), samples)
            figure = spread(shuffled)
            self.assertEqual((figure["median_low"], figure["median_high"]), (rank, samples + 1 - rank), samples)

    def test_few_samples_have_none(self):
        self.assertEqual(spread([3, 1, 2]), {"median": 2, "low": 1, "high": 3, "samples": 3})
        self.assertEqual(flatten({"gain": spread([3, 1, 2])}), {"gain": 2, "gain_low": 1, "gain_high": 3})

    def test_interval_holds_the_median_as_often_as_it_says(self):
        source = random.Random(1)
        held = 0
        for _ in range(2000):
            figure = spread([source.expovariate(1) for _ in range(17)])
            held += figure["median_low"] <= 0.6931 <= figure["median_high"]
        self.assertGreater(held / 2000, 0.94)
        self.assertLess(held / 2000, 0.97)  # the true share is 95.1 %


class ConcatAgainstLoop(unittest.TestCase):
    def row(self, model, samples):
        return {"key": {"model": model, "micro_batch_size": 1, "batching": "concat"}, "figures": {"w_gain": spread(samples)}}

    def test_names_those_beyond_the_interval(self):
        around = [0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03]
        rows = [self.row("even", around), self.row("fast", [x + 0.1 for x in around]), self.row("slow", [x - 0.1 for x in around])]
        text = load_page().concat_against_loop({"rows": rows}, "w")
        self.assertEqual(text, "faster in 1 of 3 cases (fast 1) and slower in 1 of 3 cases (slow 1)")

    def test_says_nothing_of_few_rounds(self):
        self.assertIsNone(load_page().concat_against_loop({"rows": [self.row("even", [1.0, 1.1])]}, "w"))


class Claims(unittest.TestCase):
    def throughput(self, *gains):
        keys = [{"model": f"m{i}", "schedule": "naive", "way": "2BP as in the paper"} for i in range(len(gains))]
        return {"rows": [{"key": key, "figures": {"gain": spread(samples)}} for key, samples in zip(keys, gains)]}

    def test_a_case_that_is_slower_in_a_round_spoils_the_claim(self):
        self.assertEqual(claims.every_case(self.throughput([1.1, 1.2], [1.05, 1.3]))[2], claims.REPRODUCED)
        self.assertEqual(claims.every_case(self.throughput([1.1, 1.2], [0.99, 1.3]))[2], claims.PARTLY)

    def test_the_range_needs_every_median(self):
        self.assertEqual(claims.range_of_gains(self.throughput([1.1, 1.2], [1.2, 1.3]))[2], claims.REPRODUCED)
        self.assertEqual(claims.range_of_gains(self.throughput([1.1, 1.2], [1.0, 1.1]))[2], claims.PARTLY)

    def test_formulas_are_the_limits(self):
        self.assertAlmostEqual(speed_up("1f1b-1", 4), 1.4)
        self.assertAlmostEqual(speed_up("naive", 2), 1.2)
        self.assertEqual(text_of(("gpipe", "end")), "2(N-1)/(5N-2)")


if __name__ == "__main__":
    unittest.main()
