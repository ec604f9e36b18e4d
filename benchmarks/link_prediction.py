#!/usr/bin/env python3
"""Compares the simulator's step time on a slow link with a real run across that link. Two hosts are made of network namespaces
(scripts/two_hosts.py), and several links are tried. The simulator's inputs are measured separately from the run that it predicts: F, I, W and the
optimizer in one process, and the time of a message by a probe across the link. It needs root and prints a table.

    benchmarks/link_prediction.py build/release/twobp build/release/benchmarks/link_probe
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import two_hosts

CONFIG = ROOT / "configs/bench_llama.json"
MICRO_BATCHES = 4
# Earlier steps warm up caches, clocks and TCP's windows.
FIRST_STEP = 4
# (one-way delay in seconds, megabits per second, share of lost packets)
LINKS = [(0.2e-3, 1000, 0), (5e-3, 200, 0), (20e-3, 100, 0), (5e-3, 200, 0.001)]


def settings(policy, steps, **more):
    values = {"pipeline.p2": policy, "pipeline.micro_batches": MICRO_BATCHES, "train.steps": FIRST_STEP + steps - 1,
              "data.held_out": 0, "pipeline.split": "[8,10]", **more}
    return ["--set", *[f"{key}={value}" for key, value in values.items()]]


def run(command):
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout


def metrics(path):
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return steps[FIRST_STEP - 1:]


def measured_costs(program, policy, steps, folder):
    """The seconds of F, I and W of each stage, and of the optimizer on the slower rank, measured in one process."""
    answer = folder / "answer.json"
    run([program, "bench", CONFIG, *settings(policy, steps), "--p2", policy, "--warmup", FIRST_STEP - 1, "--steps", steps,
         "--repeat", 1, "--json", answer])
    row = json.loads(answer.read_text())["rows"][0]
    return row["stage_seconds"], max(row["optimizer_seconds"])


def simulated(program, policy, stages, latency, message, folder):
    answer = folder / "simulated.json"
    column = lambda key: ",".join(f"{stage[key]:.6g}" for stage in stages)
    run([program, "plan", "--schedule", "1f1b", "--p2", policy, "--stages", len(stages), "--micro-batches", MICRO_BATCHES,
         "--forward", column("F"), "--backward-p1", column("I"), "--backward-p2", column("W"),
         "--p2-units", 28, "--latency", f"{latency:.6g}", "--message-seconds", f"{message:.6g}", "--json", answer])
    answer = json.loads(answer.read_text())
    return next(plan for plan in answer["plans"] if plan["p2"] == policy)["step_time"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("probe", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--p2", nargs="+", default=["off", "fill"])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if two_hosts.missing():
        print(f"skipped: {two_hosts.missing()}")
        sys.exit(77)
    program, probe = options.program.resolve(), options.probe.resolve()
    config = json.loads(CONFIG.read_text())
    message_bytes = (config["pipeline"]["micro_batch_size"] * config["data"]["sequence"] * config["model"]["dim"] * 4)
    print(f"{CONFIG.name}, 1f1b, 2 ranks, {MICRO_BATCHES} micro-batches, messages of {message_bytes / 2**20:g} MiB; medians of "
          f"{options.steps} steps\n")
    print(f"{'delay':>8}{'Mbit/s':>8}{'loss':>7}{'message':>11}  {'p2':6}{'without link':>14}{'predicted':>11}{'measured':>11}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        costs = {policy: measured_costs(program, policy, options.steps, folder) for policy in options.p2}
        for delay, mbit, loss in LINKS:
            with two_hosts.TwoHosts(delay, mbit, loss) as hosts:
                mpirun = [*hosts.mpirun(), "-n", "2"]
                times = json.loads(run([*mpirun, probe, 16, message_bytes]))
                latency, message = times["16"], times[str(message_bytes)]
                for policy in options.p2:
                    stages, optimizer = costs[policy]
                    predicted = simulated(program, policy, stages, latency, message - latency, folder) + optimizer
                    alone = simulated(program, policy, stages, 0, 0, folder) + optimizer
                    told = folder / "there.jsonl"
                    run([*mpirun, program, "train", CONFIG, *settings(policy, options.steps), "--metrics", told])
                    measured = statistics.median(step["step_seconds"] for step in metrics(told))
                    rows.append({"delay_seconds": delay, "mbit": mbit, "loss": loss, "message_seconds": message,
                                 "latency_seconds": latency, "p2": policy, "without_link_seconds": alone,
                                 "predicted_seconds": predicted, "measured_seconds": measured,
                                 "difference": predicted / measured - 1})
                    print(f"{1e3 * delay:5.1f} ms{mbit:8}{loss:7.1%}{1e3 * message:8.1f} ms  {policy:6}{1e3 * alone:11.0f} ms"
                          f"{1e3 * predicted:8.0f} ms{1e3 * measured:8.0f} ms{rows[-1]['difference']:+8.1%}", flush=True)
    print(f"\nlargest difference: {max(abs(row['difference']) for row in rows):.1%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
