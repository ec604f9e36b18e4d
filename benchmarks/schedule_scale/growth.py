#!/usr/bin/env python3
"""Runs schedule_scale over growing schedules, and keeps a table and a plot of the seconds and the memory.

    growth.py PROGRAM OUT     prints the table and writes OUT.json (the lines) and OUT.svg (the plot)
"""

import json
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = [(64, 512), (128, 1024), (256, 2048), (512, 4096), (1024, 8192)]
SCHEDULES = [("1f1b", "fill"), ("1f1b", "cooldown"), ("zb-h1", "placed"), ("zb-v", "placed")]
PARTS = ["generate", "validate", "simulate"]


def measure(program, ranks, micro_batches, name, policy):
    command = [program, str(ranks), str(micro_batches), name, policy]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(rows):
    lines = [f"{'schedule':<9} {'p2':<9} {'N':>5} {'M':>5} {'compute':>9} {'messages':>9} "
             f"{'generate':>9} {'validate':>9} {'simulate':>9} {'CPU s':>8} {'ns each':>8} {'peak GiB':>9}"]
    for r in rows:
        parts = [r[f"{part}_seconds"] for part in PARTS]
        each = sum(parts) / (r["compute"] + r["messages"]) * 1e9
        lines.append(f"{r['schedule']:<9} {r['p2']:<9} {r['ranks']:>5} {r['micro_batches']:>5} {r['compute']:>9} "
                     f"{r['messages']:>9} {parts[0]:>9.2f} {parts[1]:>9.2f} {parts[2]:>9.2f} {sum(parts):>8.2f} "
                     f"{each:>8.0f} {r['peak_gib']:>9.2f}")
    return "\n".join(lines) + "\n"


def plot(rows, path):
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4))
    for name, policy in SCHEDULES:
        of = [r for r in rows if (r["schedule"], r["p2"]) == (name, policy)]
        count = [r["compute"] + r["messages"] for r in of]
        seconds = [sum(r[f"{part}_seconds"] for part in PARTS) for r in of]
        time.plot(count, seconds, "o-", label=f"{name}, {policy}")
        memory.plot(count, [r["peak_gib"] for r in of], "o-", label=f"{name}, {policy}")
    first = rows[0]
    scale = sum(first[f"{part}_seconds"] for part in PARTS) / (first["compute"] + first["messages"])
    time.plot([1e5, 1.2e8], [1e5 * scale, 1.2e8 * scale], "k:", linewidth=1, label="linear")
    for axes, unit in ((time, "CPU seconds: generate, validate, simulate"), (memory, "peak resident GiB")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("instructions, messages included")
        axes.set_ylabel(unit)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    program, out = sys.argv[1:]
    rows = [measure(program, n, m, name, policy) for name, policy in SCHEDULES for n, m in SIZES]
    with open(out + ".json", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows), end="")
    plot(rows, out + ".svg")


if __name__ == "__main__":
    main()
