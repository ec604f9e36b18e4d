#!/usr/bin/env python3
"""Times the training step of captured models in two builds of the Python package, step by step in turns, so that a busy machine slows both. Each build
runs in a process of its own, with one rank and one thread.

    benchmarks/two_builds.py BEFORE/build/release/python build/release/python [--models gpt2 llama] [--pairs 60] [--lengths]
"""
import argparse
import os
import statistics
import subprocess
import sys
import time


def serve(name: str, layers: int, lengths: bool):
    """Makes a step for each line of the input, and prints its seconds. With `lengths`, each has another length than the last."""
    import captured_step
    import torch
    import twobp

    torch.set_num_threads(1)
    batch = captured_step.batch_of(name, 2)
    trainer = twobp.Trainer(captured_step.model_of(name, layers, 512), batch, ranks=1, micro_batches=1, threads=1, optimizer=twobp.AdamW(lr=1e-4))
    batches = [batch] if not lengths else [{key: value[:, :64 + 53 * i % 191].contiguous() for key, value in batch.items()} for i in range(191)]
    for one in batches[:3]:
        trainer.step(one)
    print("ready", flush=True)
    for i, _ in enumerate(sys.stdin):
        begin = time.perf_counter()
        trainer.step(batches[i % len(batches)])
        print(time.perf_counter() - begin, flush=True)


class Build:
    def __init__(self, package: str, name: str, options: argparse.Namespace):
        lengths = ["--lengths"] * options.lengths
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", name, "--layers", str(options.layers), *lengths], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": package})
        while self.process.stdout.readline() != "ready\n":
            if self.process.poll() is not None:
                sys.exit(f"{package}: the process ended")

    def seconds(self) -> float:
        print(file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="two folders for PYTHONPATH: before, after")
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--lengths", action="store_true", help="each step has another length than the last")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.layers, options.lengths)
    if len(options.packages) != 2:
        parser.error("give two packages: before, after")
    for name in options.models:
        before, after = (Build(package, name, options) for package in options.packages)
        pairs = []
        for turn in range(options.pairs):
            order = [before, after] if turn % 2 else [after, before]
            seconds = {one: one.seconds() for one in order}
            pairs.append((seconds[before], seconds[after]))
        ratios = sorted(b / a for a, b in pairs)
        quarter = len(ratios) // 4
        print(f"{name:6} before {statistics.median(a for a, _ in pairs):.3f} s, after {statistics.median(b for _, b in pairs):.3f} s, after / before "
              f"{statistics.median(ratios):.3f} (half of the pairs: {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})", flush=True)
        for one in (before, after):
            one.process.stdin.close()
            one.process.wait()


if __name__ == "__main__":
    main()
