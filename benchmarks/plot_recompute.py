#!/usr/bin/env python3
"""Draws memory against time of recomputation, from the rows of `twobp bench --recompute ... --json`.

    benchmarks/plot_recompute.py results/recompute.json results/recompute.svg

There is one line for each schedule and p2 policy, and one point for each mode. A point shows the median step time and the peak of activations and stash
on the fullest rank. The table is also printed, as Markdown, relative to the first row.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

MARKERS = {"none": "o", "activations": "s", "derivatives": "^", "both": "D"}
MIB = 2**20


def lines_of(rows):
    """(schedule, policy) -> its rows, in the order of the file."""
    lines = {}
    for row in rows:
        lines.setdefault((row["schedule"], row["p2"]), []).append(row)
    return lines


def held(row):
    return max(row["peak_held_bytes"]) / MIB


def print_table(rows):
    first = rows[0]
    print("| schedule | p2 | recomputed | step, s | time | activations and stash, MiB | memory |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        time = row["step_seconds"] / first["step_seconds"]
        print(
            f"| {row['schedule']} | {row['p2']} | {row['recompute']} | {row['step_seconds']:.3f} | {time:.2f} "
            f"| {' , '.join(f'{b / MIB:.0f}' for b in row['peak_held_bytes'])} | {held(row) / held(first):.2f} |"
        )


def plot(rows, path, title):
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for colour, ((schedule, policy), points) in enumerate(lines_of(rows).items()):
        points = sorted(points, key=held)
        axes.plot(
            [held(p) for p in points],
            [p["step_seconds"] for p in points],
            color=f"C{colour}",
            linewidth=1,
            label=f"{schedule}, p2 {policy}",
        )
        for point in points:
            axes.plot(held(point), point["step_seconds"], MARKERS[point["recompute"]], color=f"C{colour}")
    for mode, marker in MARKERS.items():
        axes.plot([], [], marker, color="0.4", label=f"recomputes {mode}")
    axes.set_xlabel("peak of activations and stash on the fullest stage, MiB")
    axes.set_ylabel("step, s")
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("figure", type=Path)
    options = parser.parse_args()
    report = json.loads(options.rows.read_text())
    rows = report["rows"]
    unknown = {row["recompute"] for row in rows} - MARKERS.keys()
    if unknown:
        parser.error(f"{options.rows}: rows of recomputation {', '.join(sorted(unknown))}: plots single modes alone")
    print_table(rows)
    model = report["config"]["model"]
    title = f"{model['type']}, dim {model['dim']}, {model['layers']} blocks, {rows[0]['stages']} stages, "
    plot(rows, options.figure, title + f"{rows[0]['micro_batches']} micro-batches")


if __name__ == "__main__":
    main()
