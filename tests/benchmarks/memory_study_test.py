"""Runs the memory study at toy size: all its steps with the real program, and its causes and factors against values
computed by hand.

    TWOBP_PROGRAM=... TWOBP_MEMORY_PEAKS=... python tests/benchmarks/memory_study_test.py
"""
import csv
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

STUDY = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "memory_study"
sys.path.insert(0, str(STUDY))
if importlib.util.find_spec("matplotlib") is None:
    print(f"skipped: no matplotlib in {sys.executable}")
    sys.exit(77)

import causes
import models
import study

PROGRAM = os.environ["TWOBP_PROGRAM"]
PEAKS = os.environ["TWOBP_MEMORY_PEAKS"]


class ToyStudy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        cls.out = cls.folder / "results" / "toy"
        command = [sys.executable, STUDY / "study.py", "--toy", "--out", cls.out, "--program", PROGRAM, "--peaks", PEAKS,
                   "--costs", cls.folder / "costs", "--threads", "1"]
        cls.command = [str(part) for part in command]
        cls.printed = subprocess.run(cls.command, check=True, capture_output=True, text=True).stdout
        cls.results = json.loads(cls.out.with_suffix(".json").read_text())
        with open(cls.out.with_suffix(".csv"), newline="") as file:
            cls.rows = [{name: float(value) if name.endswith(("_bytes", "_factor")) else value for name, value in row.items()}
                        for row in csv.DictReader(file)]

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def test_every_schedule_policy_and_number_of_ranks_has_a_row(self):
        self.assertEqual({row["family"] for row in self.rows}, set(models.FAMILIES))
        for family in models.FAMILIES:
            of = [row for row in self.rows if row["family"] == family]
            self.assertLessEqual({"naive", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-min", "dualpipe-v"},
                                 {row["schedule"] for row in of})
            self.assertEqual({(row["p2"], row["cap"]) for row in of},
                             {("off", "none")} | {(p2, cap) for p2 in ("end", "cooldown", "fill", "placed")
                                                  for cap in ("none", "auto")})
            for ranks in ("4", "8"):
                counts = {row["micro_batches"] for row in of if row["schedule"] == "1f1b" and row["ranks"] == ranks}
                self.assertEqual(counts, {ranks, str(2 * int(ranks))})

    def test_factors_are_over_the_same_schedule_with_p2_off(self):
        off = {}
        for row in self.rows:
            if row["p2"] == "off":
                off[tuple(row[name] for name in ("family", "schedule", "ranks", "micro_batches"))] = row
                self.assertEqual((row["held_factor"], row["total_factor"]), (1, 1))
        for row in self.rows:
            own = off[tuple(row[name] for name in ("family", "schedule", "ranks", "micro_batches"))]
            self.assertAlmostEqual(row["total_factor"], row["total_bytes"] / own["total_bytes"], delta=1e-4 * row["total_factor"])
            self.assertLess(row["held_bytes"], row["total_bytes"])

    def test_kept_until_the_end_1f1b_of_2n_holds_twice_as_many_micro_batches(self):
        for row in self.rows:
            if (row["schedule"], row["p2"], row["cap"], row["ranks"], row["micro_batches"]) == ("1f1b", "end", "none", "4", "8"):
                self.assertGreater(row["held_factor"], 1.5)

    def test_what_is_read_again_is_not_measured_again(self):
        self.assertEqual(subprocess.run(self.command, check=True, capture_output=True, text=True).stderr, "")

    def test_the_output_says_where_it_comes_from(self):
        for name in ("command", "machine", "commit", "models"):
            self.assertTrue(self.results[name], name)
        self.assertEqual(self.out.with_suffix(".md").read_text(), self.printed)
        self.assertIn("1.02 – 2.67", self.printed)
        svg = self.out.with_suffix(".svg").read_text()
        self.assertIn("<svg", svg)

    def test_what_w_reads_is_what_the_measurement_holds(self):
        """llama's mlp: W reads the output of the norm and the product of the gate (and two numbers per row from the
        norm)."""
        (llama,) = [model for model in self.results["models"] if model["family"] == "llama"]
        tokens, dim, hidden = 1024, 32, 64
        mlp = causes.cause(llama, "mlp")
        self.assertEqual(mlp["gradients"], 4 * 8 * tokens * (2 * hidden + dim))
        self.assertAlmostEqual(mlp["kept"] / (4 * 8 * tokens * (dim + hidden)), 1, delta=0.03)

    def test_costs_of_other_files_are_refused(self):
        for text, words in (("{}", "no cost model"), (None, "missing.json")):
            path = self.folder / "missing.json"
            if text is not None:
                path.write_text(text)
            done = subprocess.run([PEAKS, path, "4"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertIn(words, done.stderr)
            path.unlink(missing_ok=True)


class Arithmetic(unittest.TestCase):
    def test_factors(self):
        model = {"family": "llama", "model": "m", "parameters": 1, "micro_batch_size": 1}
        row = {"schedule": "gpipe", "ranks": 4, "micro_batches": 4, "p2": "off", "held_bytes": 10, "total_bytes": 40}
        end = {**row, "p2": "end", "held_bytes": 25, "total_bytes": 50}
        usual = {**row, "schedule": "1f1b", "total_bytes": 20}
        factors = list(study.with_factors(model, [row, end, usual]))
        self.assertEqual([f["held_factor"] for f in factors], [1, 2.5, 1])
        self.assertEqual([f["total_factor"] for f in factors], [1, 1.25, 1])
        self.assertEqual([f["total_over_1f1b_off"] for f in factors], [2, 2.5, 1])

    def test_outputs_of_resnets_convolutions(self):
        config = {"widths": [256, 512, 1024, 2048]}
        self.assertEqual(causes.conv_outputs(config, "stage 2 block"), (256 + 256 + 1024) * 14 * 14)
        self.assertEqual(causes.conv_outputs(config, "stage 2 first block"), 256 * 28 * 28 + (256 + 2 * 1024) * 14 * 14)
        self.assertEqual(causes.conv_outputs(config, "stage 0 first block"), (64 + 64 + 2 * 256) * 56 * 56)

    def test_sizes_go_from_100m_to_10b(self):
        names = [(s.family, s.name) for s in models.STUDIES]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({s.family for s in models.STUDIES if s.in_paper}, set(models.FAMILIES))


if __name__ == "__main__":
    unittest.main()
