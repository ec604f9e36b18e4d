#!/usr/bin/env python3
"""Reports benchmarks that have become slower. It measures ratios of step times on a quiet machine and compares them with the ratios kept
in benchmarks/ratios.json. The exit code is 1 if a ratio is more than 5 % below the kept one. Ratios vary less between machines than
times, so any machine with two cores is suitable.

    cmake --build build/release --target bench-check
    benchmarks/check_ratios.py --update         keeps the ratios measured now
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks/ratios.json"
ALLOWED = 0.95
# Runs of `twobp bench`. Each is compared with its first row.
RUNS = {
    "llama, M = 2": ("llama", ["--schedules", "1f1b", "zb-v@fill", "--p2", "off", "fill", "--micro-batches", "2"]),
    "llama, M = 4": ("llama", ["--schedules", "1f1b", "zb-v@fill", "--p2", "off", "fill", "--micro-batches", "4"]),
    "bert, M = 4": ("bert", ["--schedules", "1f1b", "zb-v@fill", "--p2", "off", "fill", "--micro-batches", "4"]),
    "mamba, M = 4": ("mamba", ["--schedules", "1f1b", "--p2", "off", "fill", "--micro-batches", "4"]),
    "resnet, M = 4": ("resnet", ["--schedules", "1f1b", "--p2", "off", "fill", "--micro-batches", "4"]),
    "llama, gpipe, W concatenated": ("llama", ["--schedules", "gpipe", "--p2", "end", "--micro-batches", "4", "--p2-batching",
                                               "loop", "concat", "--memory-cap", "0"]),
}


def measure(program, model, arguments, repeats):
    """Returns the speed-up of each row over the first row, by name. The speed-up is the median over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder, "bench.json")
        subprocess.run([program, "bench", ROOT / f"configs/bench_{model}.json", *arguments, "--repeat", str(repeats), "--steps", "1",
                        "--json", answer], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(answer.read_text())["rows"]
    first = rows[0]["step_seconds_all"]
    name = lambda row: f"{row['schedule']} {row['p2']} {row['p2_batching']}"
    return {name(row): statistics.median(a / b for a, b in zip(first, row["step_seconds_all"])) for row in rows[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/twobp")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    if not options.update and not KEPT.exists():
        sys.exit(f"{KEPT} is missing: --update creates it")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    slower = []
    for run in options.runs:
        model, arguments = RUNS[run]
        now = measure(options.program, model, arguments, options.repeats)
        for row, ratio in now.items():
            before = kept.get(run, {}).get(row)
            note = "" if before is None else f"{before:8.3f} kept"
            if before is not None and ratio < ALLOWED * before:
                slower.append(f"{run}: {row}")
                note += f"  SLOWER by {100 * (1 - ratio / before):.0f} %"
            print(f"{run:30}{row:24}{ratio:8.3f}x now{note}", flush=True)
        if options.update:
            kept[run] = {row: round(ratio, 4) for row, ratio in now.items()}
    if options.update:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    elif slower:
        sys.exit(f"more than 5 % slower than in {KEPT}: " + "; ".join(slower))


if __name__ == "__main__":
    main()
