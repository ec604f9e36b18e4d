#!/usr/bin/env python3
"""What pipeline.run_ahead brings: seconds between the ends of steps of `twobp train`, with ranks that begin the next step
when they have ended their part of this one, against ranks that wait for each other; with --clip also when they do not
wait for the norm either (pipeline.post_validation). Runs in turn; medians of rounds.

    benchmarks/run_ahead.py build/release/twobp
    benchmarks/run_ahead.py build/release/twobp --mpi            a process for each rank
    benchmarks/run_ahead.py build/release/twobp --clip 1000      a norm that is looked at and never too large
"""
import argparse
import json
import pathlib
import statistics
import tempfile

from train_runs import FIRST, ROOT, metrics_of


def seconds_a_step(options, schedule, folder, **settings):
    times = [step["time"] for step in metrics_of(options, schedule, folder, options.mpi, **settings)][FIRST - 1:]
    return (times[-1] - times[0]) / (len(times) - 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "configs/bench_llama.json")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-h2", "zb-v"])
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0, help="train.clip_norm")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    ways = {"waits": {}, "ahead": {"pipeline__run_ahead": "true"}}
    if options.clip > 0:
        ways["presumes"] = {"pipeline__run_ahead": "true", "pipeline__post_validation": "true"}
    rows = {schedule: {way: [] for way in ways} for schedule in options.schedules}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for schedule, row in rows.items():
                for way in sorted(ways, reverse=repeat % 2 == 0):
                    row[way].append(seconds_a_step(options, schedule, folder, train__clip_norm=options.clip, **ways[way]))
    print(f"{options.config.name}, {options.micro_batches} micro-batches, p2 fill, clip {options.clip:g}"
          f"{', over MPI' if options.mpi else ''}; {options.repeats} rounds of {options.steps} steps\n")
    print(f"{'schedule':12}{'ranks':12}{'seconds':>8}  {'faster':>9}  (min - max)")
    for schedule, row in rows.items():
        for way, seconds in row.items():
            ratios = [a / b for a, b in zip(row["waits"], seconds)]
            print(f"{schedule:12}{way:12}{statistics.median(seconds):8.4f}  {statistics.median(ratios):8.3f}x"
                  f"  ({min(ratios):.3f} - {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
