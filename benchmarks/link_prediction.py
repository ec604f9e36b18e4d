#!/usr/bin/env python3
"""Compares the simulator's step time on a slow link with a real run across that link. Two hosts are made of network namespaces
(scripts/two_hosts.py), and several links are tried. The simulator's inputs are measured separately from the run that it predicts: F, I, W and the
optimizer in one process, and the time of a message by a probe across the link. What two processes and the passing of packets cost this machine's
cores is in a run across a link without delay and limit, before each run: the simulator's seconds are scaled by that run's over those simulated for
it. It needs root and prints a table of medians over rounds.

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


def simulated(program, policy, costs, times, folder, scale=1.0):
    """The seconds of a step with these times of a message, by its bytes, and all computations `scale` times as long."""
    stages, optimizer = costs
    (_, latency), (_, message) = sorted((int(size), seconds) for size, seconds in times.items())
    answer = folder / "simulated.json"
    column = lambda key: ",".join(f"{scale * stage[key]:.6g}" for stage in stages)
    run([program, "plan", "--schedule", "1f1b", "--p2", policy, "--stages", len(stages), "--micro-batches", MICRO_BATCHES,
         "--forward", column("F"), "--backward-p1", column("I"), "--backward-p2", column("W"),
         "--p2-units", 28, "--latency", f"{latency:.6g}", "--message-seconds", f"{message - latency:.6g}", "--json", answer])
    answer = json.loads(answer.read_text())
    return next(plan for plan in answer["plans"] if plan["p2"] == policy)["step_time"] + scale * optimizer


def fitted(program, policy, costs, times, measured, folder):
    """The scale at which a step takes the measured time."""
    scale = 1.0
    for _ in range(3):
        scale *= measured / simulated(program, policy, costs, times, folder, scale)
    return scale


def measured_step(hosts, program, policy, steps, folder):
    told = folder / "there.jsonl"
    run([*hosts.mpirun(), "-n", "2", program, "train", CONFIG, *settings(policy, steps), "--metrics", told])
    return statistics.median(step["step_seconds"] for step in metrics(told))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("probe", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--p2", nargs="+", default=["off", "fill"])
    parser.add_argument("--links", type=int, nargs="+", default=range(len(LINKS)), help="indices of LINKS")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if two_hosts.missing():
        print(f"skipped: {two_hosts.missing()}")
        sys.exit(77)
    program, probe = options.program.resolve(), options.probe.resolve()
    config = json.loads(CONFIG.read_text())
    message_bytes = (config["pipeline"]["micro_batch_size"] * config["data"]["sequence"] * config["model"]["dim"] * 4)
    print(f"{CONFIG.name}, 1f1b, 2 ranks, {MICRO_BATCHES} micro-batches, messages of {message_bytes / 2**20:g} MiB; medians of "
          f"{options.rounds} rounds of {options.steps} steps\n")
    print(f"{'delay':>8}{'Mbit/s':>8}{'loss':>7}{'message':>11}  {'p2':6}{'no limit':>11}{'predicted':>11}{'measured':>11}{'difference':>12}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        costs = {policy: measured_costs(program, policy, options.steps, folder) for policy in options.p2}

        def probed(hosts):
            return json.loads(run([*hosts.mpirun(), "-n", "2", probe, 16, message_bytes]))

        with two_hosts.TwoHosts() as hosts:
            free = probed(hosts)
        for delay, mbit, loss in [LINKS[i] for i in options.links]:
            with two_hosts.TwoHosts(delay, mbit, loss) as hosts:
                times = probed(hosts)
            for policy in options.p2:
                rounds = []
                for _ in range(options.rounds):
                    with two_hosts.TwoHosts() as hosts:
                        alone = measured_step(hosts, program, policy, options.steps, folder)
                    with two_hosts.TwoHosts(delay, mbit, loss) as hosts:
                        measured = measured_step(hosts, program, policy, options.steps, folder)
                    scale = fitted(program, policy, costs[policy], free, alone, folder)
                    predicted = simulated(program, policy, costs[policy], times, folder, scale)
                    rounds.append({"without_limit_seconds": alone, "scale": scale, "predicted_seconds": predicted, "measured_seconds": measured,
                                   "difference": predicted / measured - 1})
                row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
                rows.append({"delay_seconds": delay, "mbit": mbit, "loss": loss, "message_seconds": times, "p2": policy, **row, "rounds": rounds})
                print(f"{1e3 * delay:5.1f} ms{mbit:8}{loss:7.1%}{1e3 * times[str(message_bytes)]:8.1f} ms  {policy:6}"
                      f"{1e3 * row['without_limit_seconds']:8.0f} ms{1e3 * row['predicted_seconds']:8.0f} ms"
                      f"{1e3 * row['measured_seconds']:8.0f} ms{row['difference']:+12.1%}", flush=True)
    print(f"\nlargest difference: {max(abs(row['difference']) for row in rows):.1%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
