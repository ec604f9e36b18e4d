"""Runs every experiment under repro/ in quick mode. Each must write results that follow the schema, a plot and a page.

    TWOBP_PROGRAM=... python tests/repro/quick_test.py
"""
import importlib.util
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPRO = ROOT / "repro"
MISSING = [name for name in ("torch", "matplotlib", "jsonschema") if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"skipped: {sys.executable} has no {', '.join(MISSING)}")
    sys.exit(77)
import jsonschema

PROGRAM = os.environ["TWOBP_PROGRAM"]
SCHEMA = json.loads((REPRO / "schema.json").read_text())
EXPERIMENTS = sorted(path.parent.name for path in REPRO.glob("*/run"))


class QuickMode(unittest.TestCase):
    def test_there_are_experiments(self):
        self.assertGreaterEqual(len(EXPERIMENTS), 10)

    def test_runs_plots_and_follows_the_schema(self):
        for name in EXPERIMENTS:
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.call(REPRO / name / "run", "--quick", "--program", PROGRAM, "--out", folder)
                self.plot(name, folder)
                result = json.loads(pathlib.Path(folder, "results.json").read_text())
                jsonschema.validate(result, SCHEMA)
                self.assertEqual(result["experiment"], name)
                for file in ("results.csv", "results.svg", "results.png"):
                    self.assertGreater(pathlib.Path(folder, file).stat().st_size, 100, file)
                lines = pathlib.Path(folder, "results.csv").read_text().splitlines()
                self.assertEqual(len(lines), len(result["rows"]) + 1)

    def test_runs_at_the_papers_size_are_ready(self):
        for name in ("throughput", "peak_memory", "concatenation", "scaling"):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                self.call(REPRO / name / "run", "--quick", "--gpus", "4", "--program", PROGRAM, "--out", folder)
                result = json.loads(pathlib.Path(folder, "results.json").read_text())
                jsonschema.validate(result, SCHEMA)
                self.assertIn("--gpus 4", result["provenance"]["command"])
        done = subprocess.run([sys.executable, REPRO / "throughput/run", "--gpus", "1000", "--program", PROGRAM, "--out",
                               tempfile.gettempdir()], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertIn("--gpus 1000 asks for more GPUs", done.stderr)

    def test_the_kept_results_follow_the_schema(self):
        for path in [*REPRO.glob("*/results.json"), *REPRO.glob("*/gpus/results.json"), *REPRO.glob("*/elsewhere/*.json")]:
            with self.subTest(path.parent.name):
                result = json.loads(path.read_text())
                jsonschema.validate(result, SCHEMA)
                self.assertFalse(result["quick"], "kept results are of whole runs")

    def test_the_pages_are_those_of_the_kept_results(self):
        with tempfile.TemporaryDirectory() as folder:
            self.call(REPRO / "page", "--out", folder)
            for name in ("docs/results.md", "docs/faults.md", "README.md", "benchmarks/results/README.md", *(f"repro/{name}/results.md" for name in EXPERIMENTS)):
                self.assertEqual(pathlib.Path(folder, name).read_text(), (ROOT / name).read_text(), "run repro/page")

    def plot(self, name, folder):
        """Runs a plot in this process, because importing matplotlib each time would take longer than the plot."""
        script = REPRO / name / "plot"
        sys.argv = [str(script), folder]
        runpy.run_path(str(script), run_name="__main__")

    def call(self, *command):
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    unittest.main()
