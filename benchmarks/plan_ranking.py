#!/usr/bin/env python3
"""Measures the first rows of `twobp plan --search` against each other, and against 1F1B and ZB-V with p2 `fill`. It shows how far the
schedule that a plan recommends is from the fastest measured one.

All ways of a model and a number of micro-batches take turns in one process, because two starts of one way differ by 3 to 5 %. Ratios are taken
within each turn. A ratio's interval contains its true median with at least 95 %.

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

from planned import plan_arguments, settings_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "repro"))
from experiment import MODELS, ratios, spread

NAMED = ["1f1b", "zb-v"]


def call(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.stderr.strip()}")


def ways_of(program, costs, micro_batches, rows, folder):
    """(name, simulated seconds or None, settings) of each way."""
    answer = folder / "plan.json"
    call(program, *plan_arguments(costs, micro_batches, folder / "first.csv"), "--top", rows, "--json", answer)
    ways = []
    for place, choice in enumerate(json.loads(answer.read_text())["choices"]):
        if choice["schedule"] == "auto" and place > 0:
            continue  # --csv keeps the first row's schedule only
        name = f"{place + 1}. {choice['schedule']}@{choice['p2']}, {choice['stages']} stages"
        ways.append((name, choice["step_seconds"], settings_of(choice, folder / "first.csv")))
    return ways + [(f"{name}@fill", None, ["pipeline.ranks=2", f"pipeline.schedule={name}", "pipeline.p2=fill"]) for name in NAMED]


def in_turns(program, config, ways, micro_batches, options, folder):
    """The seconds of a step of each way, by turn: medians of a turn's steps."""
    answer = folder / "bench.json"
    call(program, "bench", config, "--ways", *(" ".join(settings) for _, _, settings in ways), "--micro-batches", micro_batches,
         "--repeat", options.repeats, "--steps", options.steps, "--warmup", 2, "--json", answer)
    rows = json.loads(answer.read_text())["rows"]
    assert len(rows) == len(ways)
    return [seconds_by_turn(row, options) for row in rows]


def seconds_by_turn(row, options):
    """Of a row of `twobp bench`: the medians of each turn's steps."""
    steps = options.steps
    return [statistics.median(row["step_seconds_all"][turn * steps:(turn + 1) * steps]) for turn in range(options.repeats)]


def compare(program, model, micro_batches, options, folder):
    """The first row over the fastest way, by turn."""
    config = ROOT / f"configs/bench_{model}.json"
    costs = folder / f"{model}.json"
    if not costs.exists():
        call(program, "profile", config, "--json", costs)
    ways = ways_of(program, costs, micro_batches, options.rows, folder)
    seconds = in_turns(program, config, ways, micro_batches, options, folder)
    fastest = min(seconds, key=statistics.median)
    print(f"\n{model}, M = {micro_batches}")
    for (name, simulated, _), own in zip(ways, seconds):
        print(f"  {name:42} {statistics.median(own):.3f} s ({min(own):.3f} to {max(own):.3f}), simulated "
              f"{f'{simulated:.3f} s' if simulated else '-':>8}, {text_of(spread(ratios(own, fastest)))} of the fastest", flush=True)
    return spread(ratios(seconds[0], fastest))


def text_of(figure):
    interval = f" [{figure['median_low']:.3f}, {figure['median_high']:.3f}]" if "median_low" in figure else ""
    return f"{figure['median']:.3f}{interval}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/twobp", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rows", type=int, default=6, help="rows of the plan")
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    parser.add_argument("--steps", type=int, default=2, help="steps of a way in each turn")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        lost = {(model, count): compare(options.program, model, count, options, pathlib.Path(name))
                for model in options.models for count in options.micro_batches}
    print("\nThe plan's first row over the fastest: " +
          ", ".join(f"{model} M = {count} {text_of(figure)}" for (model, count), figure in lost.items()))
    if options.json:
        options.json.write_text(json.dumps({f"{model} {count}": figure for (model, count), figure in lost.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
