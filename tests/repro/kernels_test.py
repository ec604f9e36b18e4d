"""Tests repro/kernels.py with a trace that the program wrote. Without a GPU, the test adds kernels by hand.

    TWOBP_PROGRAM=... python tests/repro/kernels_test.py
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "repro"))
from experiment import TOY
from kernels import w_occupancy

MICRO_BATCHES = 3
OCCUPANCY = "est. achieved occupancy %"  # the key in Kineto's output_json.cpp


def launch(event, correlation):
    """A kernel launch in the middle of `event`, on its thread."""
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": event["tid"], "ts": event["ts"] + event["dur"] / 2,
            "dur": 0, "args": {"correlation": correlation}}


def kernel(correlation, duration, **args):
    return {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 0, "dur": duration,
            "args": {"correlation": correlation, **args}}


class Kernels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = pathlib.Path(cls.temporary.name)
        subprocess.run([os.environ["TWOBP_PROGRAM"], "bench", ROOT / "configs/bench_llama.json", "--set", *TOY["llama"], "--schedules", "gpipe",
                        "--p2", "end", "--p2-batching", "loop", "concat", "--micro-batches", str(MICRO_BATCHES), "--repeat", "1",
                        "--kernels", cls.folder], check=True, capture_output=True, timeout=120)
        cls.trace = json.loads((cls.folder / "0.json").read_text())

    def ranges(self, op):
        return [event for event in self.trace["traceEvents"] if event.get("cat") == "user_annotation" and event["name"] == op]

    def occupancy_with(self, *events):
        path = self.folder / "with_kernels.json"
        path.write_text(json.dumps({"traceEvents": [*self.trace["traceEvents"], *events]}))
        return w_occupancy(path)

    def test_a_trace_for_each_row(self):
        self.assertEqual(sorted(path.name for path in self.folder.glob("[0-9]*.json")), ["0.json", "1.json"])

    def test_ranges_are_those_of_the_step(self):
        for op in "FI":
            self.assertEqual(len(self.ranges(op)), 2 * MICRO_BATCHES, "two ranks")
        self.assertGreater(len(self.ranges("W")), 2 * MICRO_BATCHES, "of layers")
        self.assertEqual(len({event["tid"] for event in self.ranges("W")}), 2)

    def test_operators_are_within(self):
        operators = [event for event in self.trace["traceEvents"] if event.get("cat") == "cpu_op"]
        w = self.ranges("W")[0]
        self.assertTrue(any(one["tid"] == w["tid"] and w["ts"] <= one["ts"] <= w["ts"] + w["dur"] for one in operators))

    def test_no_kernel_no_occupancy(self):
        self.assertIsNone(self.occupancy_with())
        self.assertIsNone(self.occupancy_with(launch(self.ranges("F")[0], 1), kernel(1, 5, **{OCCUPANCY: 90})))

    def test_mean_by_time_of_the_kernels_that_w_launched(self):
        f, w = self.ranges("F")[0], self.ranges("W")
        self.assertAlmostEqual(self.occupancy_with(launch(w[0], 1), kernel(1, 30, **{OCCUPANCY: 80}),
                                                   launch(w[-1], 2), kernel(2, 10, **{OCCUPANCY: 40}),
                                                   launch(w[1], 3), kernel(3, 10),  # without an estimate
                                                   launch(f, 4), kernel(4, 50, **{OCCUPANCY: 10})), 0.7)


if __name__ == "__main__":
    unittest.main()
