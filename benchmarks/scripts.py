#!/usr/bin/env python3
"""Times the ten scripts of tests/python/scripts, with larger sizes, on one device, and then with the import changed and two arguments: a
pipeline of two ranks, with equally many threads. Prints the ratio of the median seconds of a step, without the first two.

    benchmarks/scripts.py [NAME ...] [--sizes WIDTH LAYERS LENGTH STEPS]
"""
import argparse
import contextlib
import importlib.util
import io
import os
import pathlib
import runpy
import statistics
import sys
import tempfile
import time
import warnings

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests/python"
CORES, FIRST = 2, 2  # the first steps are not timed: one captures


def seconds_of(text: str, name: str) -> list[float]:
    """Runs a script in a folder of its own."""
    import torch
    import transformers
    torch.set_num_threads(CORES)
    seconds, begin, before = [], [0.0], os.getcwd()

    class Timed(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            begin[0] = time.monotonic()

        def on_step_end(self, *_, **__):
            seconds.append(time.monotonic() - begin[0])

    usual = transformers.Trainer.__init__

    def timed(self, *args, **keywords):
        usual(self, *args, **keywords)
        self.add_callback(Timed())

    transformers.Trainer.__init__ = timed
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            os.chdir(folder)
            path = pathlib.Path(folder, f"{name}.py")
            path.write_text(text)
            runpy.run_path(str(path))
    finally:
        os.chdir(before)
        transformers.Trainer.__init__ = usual
    return seconds[FIRST:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sizes", nargs=4, default=["256", "4", "64", "16"])
    given = parser.parse_args()
    os.environ.update(TWOBP_SCRIPT_SIZES=" ".join(given.sizes), HF_HUB_OFFLINE="1", TWOBP_CACHE="off")
    sys.path[0:1] = [str(FOLDER / "scripts"), str(FOLDER)]
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location("test_scripts", FOLDER / "test_scripts.py")
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    for name in given.names or tests.NAMES:
        text = (FOLDER / f"scripts/{name}.py").read_text()
        theirs, ours = (statistics.median(seconds_of(one, name)) for one in (text, tests.in_pipeline(text)))
        print(f"{name:24} {theirs:.3f} s a step, in the pipeline {ours:.3f} s, ratio {ours / theirs:.2f}", flush=True)
