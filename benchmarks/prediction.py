#!/usr/bin/env python3
"""Compares the simulator with real runs. It trains every model under every p2 policy on two ranks and writes a trace. `twobp plan --measured` then simulates
each run from its own measured F, I and W. It prints a table of predicted and measured step time, idle share and peak memory. --json keeps the table.

    benchmarks/prediction.py build/release/twobp --micro-batches 4 --json benchmarks/results/prediction.json
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

MODELS = ["llama", "bert", "mamba", "resnet"]
POLICIES = ["off", "end", "cooldown", "fill"]
# Earlier steps warm up caches and clocks.
FIRST_STEP = 4


def run(program, model, policy, micro_batches, steps, folder):
    config = pathlib.Path(__file__).parent.parent / "configs" / f"bench_{model}.json"
    trace, answer = folder / "trace.json", folder / "answer.json"
    last = FIRST_STEP + steps - 1
    subprocess.run([program, "train", config, "--set", f"pipeline.p2={policy}",
                    f"pipeline.micro_batches={micro_batches}", f"train.steps={last}", "train.eval_batches=1",
                    "--trace", trace, "--trace-steps", f"{FIRST_STEP}-{last}"],
                   check=True, stdout=subprocess.DEVNULL)
    subprocess.run([program, "plan", "--measured", trace, "--json", answer], check=True, stdout=subprocess.DEVNULL)
    return json.loads(answer.read_text())


def row(model, policy, answer):
    step = answer["step_seconds"]
    ratio = lambda value: value["predicted"] / value["measured"] - 1
    idle = [rank["idle_fraction"] for rank in answer["ranks"]]
    peak = [rank["peak_bytes"] for rank in answer["ranks"]]
    mean = lambda key: sum(value[key] for value in idle) / len(idle)
    return {"model": model, "p2": policy, "steps": answer["steps"], "replayed": answer["replayed"],
            "step_seconds": step, "step_difference": ratio(step),
            "idle": {"predicted": mean("predicted"), "measured": mean("measured")},
            "idle_difference": mean("predicted") - mean("measured"),
            "rank_idle_difference": max((i["predicted"] - i["measured"] for i in idle), key=abs),
            "peak_bytes": {key: max(p[key] for p in peak) for key in ("predicted", "measured")},
            "peak_difference": max((ratio(p) for p in peak), key=abs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--p2", nargs="+", default=POLICIES)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    print(f"1f1b, 2 ranks, {options.micro_batches} micro-batches, {options.steps} steps each; peak: of the rank where "
          "the difference is largest\n")
    print(f"{'model':8}{'p2':10}{'step: predicted, measured':>30}{'':9}{'idle: predicted, measured':>28}{'':8}"
          f"{'rank idle':>11}{'peak':>9}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for model in options.models:
            for policy in options.p2:
                answer = run(options.program, model, policy, options.micro_batches, options.steps, pathlib.Path(name))
                r = row(model, policy, answer)
                rows.append(r)
                step, idle = r["step_seconds"], r["idle"]
                print(f"{model:8}{policy:10}{1e3 * step['predicted']:18.1f}{1e3 * step['measured']:9.1f} ms"
                      f"{100 * r['step_difference']:+8.1f}%{idle['predicted']:20.3f}{idle['measured']:8.3f}"
                      f"{r['idle_difference']:+8.3f}{r['rank_idle_difference']:+11.3f}"
                      f"{100 * r['peak_difference']:+8.2f}%", flush=True)
    worst = lambda key: max((abs(r[key]) for r in rows))
    print(f"\nlargest difference: step {100 * worst('step_difference'):.1f}%, idle {worst('idle_difference'):.3f} (a rank "
          f"{worst('rank_idle_difference'):.3f}), peak {100 * worst('peak_difference'):.2f}%")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
