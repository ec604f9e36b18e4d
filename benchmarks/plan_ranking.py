#!/usr/bin/env python3
"""Measures the first rows of `twobp plan --search` against each other, and against 1F1B and ZB-V with p2 `fill`. It shows how far the
schedule that a plan recommends is from the fastest measured one. All ways of a model and a number of micro-batches take turns.

    benchmarks/plan_ranking.py                                    all four models, M = 2, 4, 8
    benchmarks/plan_ranking.py --models llama --micro-batches 4   one case

It needs two quiet cores.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from planned import bench_arguments, plan_arguments

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ["llama", "bert", "mamba", "resnet"]
NAMED = ["1f1b@fill", "zb-v@fill"]


def call(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stderr.strip()}")


def step_seconds(program, config, arguments, micro_batches, steps, folder):
    answer = folder / "bench.json"
    call(program, "bench", config, *arguments, "--micro-batches", micro_batches, "--repeat", 1, "--steps", steps, "--json", answer)
    return statistics.median(json.loads(answer.read_text())["rows"][0]["step_seconds_all"])


def ways_of(program, costs, micro_batches, rows, folder):
    """(name, simulated seconds or None, arguments of `twobp bench`) of each way."""
    answer = folder / "plan.json"
    call(program, *plan_arguments(costs, micro_batches, folder / "first.csv"), "--top", rows, "--json", answer)
    ways = []
    for place, choice in enumerate(json.loads(answer.read_text())["choices"]):
        if choice["schedule"] == "auto" and place > 0:
            continue  # --csv keeps the first row's schedule only
        name = f"{place + 1}. {choice['schedule']}@{choice['p2']}, {choice['stages']} stages"
        ways.append((name, choice["step_seconds"], bench_arguments(choice, folder / "first.csv")))
    return ways + [(name, None, ["--set", "pipeline.ranks=2", "--schedules", name]) for name in NAMED]


def compare(program, model, micro_batches, options, folder):
    config = ROOT / f"configs/bench_{model}.json"
    costs = folder / f"{model}.json"
    if not costs.exists():
        call(program, "profile", config, "--json", costs)
    ways = ways_of(program, costs, micro_batches, options.rows, folder)
    seconds = {name: [] for name, _, _ in ways}
    for _ in range(options.repeats):
        for name, _, arguments in ways:
            seconds[name].append(step_seconds(program, config, arguments, micro_batches, options.steps, folder))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(medians.values())
    print(f"\n{model}, M = {micro_batches}")
    for name, simulated, _ in ways:
        low, high = min(seconds[name]), max(seconds[name])
        print(f"  {name:42} {medians[name]:.3f} s ({low:.3f} to {high:.3f}), simulated {f'{simulated:.3f} s' if simulated else '-':>8}, "
              f"{medians[name] / best:.3f} of the fastest", flush=True)
    return medians[ways[0][0]] / best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/twobp", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rows", type=int, default=6, help="rows of the plan")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        lost = {(model, count): compare(options.program, model, count, options, pathlib.Path(name))
                for model in options.models for count in options.micro_batches}
    print("\nThe plan's first row over the fastest: " +
          ", ".join(f"{model} M = {count} {ratio:.3f}" for (model, count), ratio in lost.items()))


if __name__ == "__main__":
    main()
