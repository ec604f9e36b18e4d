#!/usr/bin/env python3
"""Computes the memory factor of 2BP from 100M to 10B parameters: the peak memory of every schedule and p2 policy over that of the same schedule with p2 off. It covers LLaMa,
BERT, Mamba and ResNet on 4 and 8 ranks.

    benchmarks/memory_study/study.py --out benchmarks/results/memory_study

`twobp profile` runs one layer of each kind of a model at its real size. No model is ever built whole, so 9 GiB of memory and half an hour on two cores suffice for all of
them. memory_peaks then simulates all schedules with the measured bytes. The study writes OUT.json (provenance and profiles), OUT.csv (all rows), OUT.md (tables) and OUT.svg,
and prints the tables.
"""

import argparse
import collections
import csv
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import models
import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
RANKS = [4, 8]
COLUMNS = ["family", "model", "parameters", "micro_batch_size", "schedule", "p2", "cap", "ranks", "stages",
           "micro_batches", "held_bytes", "total_bytes", "held_factor", "total_factor", "total_over_1f1b_off", "split"]


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(str(part) for part in command)}\nfailed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def profile(study, program, folder, threads):
    """The file of the cost model, and the origin of its figures. An existing file in the folder is reused."""
    name = f"{study.family}_{study.name.replace(' ', '_')}"
    costs = folder / f"{name}.json"
    kept = costs.exists()
    if not kept:
        print(f"profiling {study.family} {study.name}", file=sys.stderr)
        config = folder / f"{name}.config"
        config.write_text(json.dumps(study.config(threads)))
        part = folder / f"{name}.part"
        run([program, "profile", config, "--seconds", "0", "--json", part])  # bytes need no repetition
        part.rename(costs)
    return costs, "kept from before" if kept else "measured by this command"


def summary(study, costs):
    """The data of a cost model on the whole model and on each kind of layer."""
    layers = collections.Counter(layer["kind"] for layer in costs["layers"])
    kinds = {kind: {"layers": count, **costs["kinds"][kind]} for kind, count in layers.items()}
    total = sum(kind["layers"] * kind["parameters"] for kind in kinds.values())
    config = study.config(1)
    if config["model"].get("tied"):  # embedding and head share one table
        total -= config["model"]["vocab"] * config["model"]["dim"]
    return {"family": study.family, "model": study.name, "in_paper": study.in_paper, "parameters": total,
            "micro_batch_size": study.micro_batch_size, "made_on": costs.get("made_on", ""),
            "config": config, "kinds": kinds}


def with_factors(model, rows):
    """Adds the factor of each row over the same case with p2 off, and over 1F1B with p2 off."""
    def place(row, schedule):
        return schedule, row["ranks"], row["micro_batches"]

    off = {place(row, row["schedule"]): row for row in rows if row["p2"] == "off"}
    for row in rows:
        own = off[place(row, row["schedule"])]
        usual = off.get(place(row, "1f1b"))
        yield {**{name: model[name] for name in ("family", "model", "parameters", "micro_batch_size")}, **row,
               "held_factor": row["held_bytes"] / own["held_bytes"],
               "total_factor": row["total_bytes"] / own["total_bytes"],
               "total_over_1f1b_off": row["total_bytes"] / usual["total_bytes"] if usual else None}


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        cpu = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")
    with open("/proc/meminfo", encoding="utf-8") as info:
        memory = int(next(info).split()[1]) * 1024
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": memory}


def provenance():
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    command = ["benchmarks/memory_study/study.py", *sys.argv[1:]]
    return {"command": shlex.join(command), "machine": machine(), "commit": commit, "precision": "fp32"}


def csv_value(value):
    if isinstance(value, float):
        return f"{value:.5g}" if value < 1000 else f"{value:.0f}"
    return " ".join(str(v) for v in value) if isinstance(value, list) else value


def write(out, results, rows):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    with open(out.with_suffix(".csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([csv_value(row[column]) for column in COLUMNS])
    text = report.tables(results, rows)
    out.with_suffix(".md").write_text(text)
    report.plot(results, rows, out.with_suffix(".svg"))
    print(text, end="")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="path of the files without their suffix")
    parser.add_argument("--program", type=pathlib.Path, default=BUILD / "twobp")
    parser.add_argument("--peaks", type=pathlib.Path, default=BUILD / "benchmarks" / "memory_study" / "memory_peaks")
    parser.add_argument("--costs", type=pathlib.Path, help="folder for the profiles; existing ones are reused")
    parser.add_argument("--families", nargs="+", choices=models.FAMILIES, default=list(models.FAMILIES))
    parser.add_argument("--toy", action="store_true", help="use a tiny model of each family, to check that the study works")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    studies = [s for s in (models.TOY if options.toy else models.STUDIES) if s.family in options.families]
    results = {**provenance(), "models": []}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.costs or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for study in studies:
            costs, origin = profile(study, options.program, folder, options.threads)
            model = {**summary(study, json.loads(costs.read_text())), "profile": origin}
            results["models"].append(model)
            rows += with_factors(model, json.loads(run([options.peaks, costs, *RANKS])))
    write(options.out, results, rows)


if __name__ == "__main__":
    main()
