#!/usr/bin/env python3
"""Compares `twobp train` with one process per rank, over MPI, with ranks that are threads of one process. It measures the seconds of a step and the idle share
of the ranks. The runs take turns, in reversed order every other round. The figures are medians over rounds.

    benchmarks/transports.py build/release/twobp
"""
import argparse
import json
import pathlib
import statistics
import tempfile

from train_runs import FIRST, ROOT, metrics_of


def run(options, way, schedule, folder):
    steps = metrics_of(options, schedule, folder, way == "mpi")[FIRST:]
    return {"seconds": statistics.median(step["step_seconds"] for step in steps),
            "idle": [statistics.median(step["idle_fraction"][rank] for step in steps) for rank in range(2)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "configs/bench_llama.json")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-v"])
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = {schedule: {"threads": [], "mpi": []} for schedule in options.schedules}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for schedule, row in rows.items():
                for way in ("threads", "mpi") if repeat % 2 == 0 else ("mpi", "threads"):
                    row[way].append(run(options, way, schedule, folder))
    print(f"{options.config.name}, {options.micro_batches} micro-batches, p2 fill; {options.repeats} rounds of {options.steps} steps\n")
    print(f"{'schedule':12}{'ranks':10}{'seconds':>9}{'idle, by rank':>17}{'/ threads':>11}  (min - max)")
    for schedule, row in rows.items():
        for way, runs in row.items():
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs, row["threads"])]
            idle = " / ".join(f"{statistics.median(r['idle'][rank] for r in runs):.3f}" for rank in range(2))
            print(f"{schedule:12}{way:10}{statistics.median(r['seconds'] for r in runs):9.4f}{idle:>17}"
                  f"{statistics.median(ratios):10.3f}x  ({min(ratios):.3f} - {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
