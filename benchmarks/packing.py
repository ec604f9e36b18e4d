#!/usr/bin/env python3
"""What packing documents brings on real text: verses of the King James Bible as documents, one a sample with padding (--packing none of scripts/texts_to_arrays.py) against whole
documents by best fit, in turns. Prints the seconds of an epoch, its batches, and the ratios of both. First: ./demo, which fetches the text.

    benchmarks/packing.py build/release/twobp [--sequence 512] [--rounds 3] [--dim 512]
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FIRST = 2  # earlier steps are warm-up


def run(options, packing, folder):
    metrics = folder / "metrics.jsonl"
    settings = {"model.type": "llama", "model.dim": options.dim, "model.layers": 4, "model.heads": 8, "model.hidden": 1408, "data.arrays": folder / packing,
                "data.sequence": options.sequence, "data.held_out": 0, "pipeline.ranks": 2, "pipeline.micro_batches": 4,
                "pipeline.micro_batch_size": 2, "pipeline.schedule": "zb-v", "train.steps": FIRST + options.steps}
    command = [options.program.resolve(), "train", "--metrics", metrics, "--set", *(f"{key}={value}" for key, value in settings.items())]
    said = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    batches = int(re.search(r"(\d+) batches an epoch", said).group(1))
    return batches, statistics.median(json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()[FIRST:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        verses = [line.split(" ", 1)[1] for line in (ROOT / "data/kjv.txt").read_text().splitlines() if " " in line][:4000]
        (folder / "verses.jsonl").write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
        runs = {packing: [] for packing in ("none", "whole")}
        for packing in runs:
            subprocess.run([sys.executable, ROOT / "scripts/texts_to_arrays.py", folder / "verses.jsonl", folder / packing, "--packing", packing,
                            "--sequence", str(options.sequence)], check=True)
        for turn in range(options.rounds):
            for packing in list(runs)[::1 if turn % 2 == 0 else -1]:
                runs[packing].append(run(options, packing, folder))
    print(f"{len(verses)} verses of {statistics.mean(map(len, verses)):.0f} bytes, sequence {options.sequence}, dim {options.dim}, ZB-V on two ranks")
    for packing, of in runs.items():
        seconds = [one for _, one in of]
        print(f"{packing:6} {of[0][0]:5} batches an epoch, {statistics.median(seconds):.3f} s a step ({min(seconds):.3f} to {max(seconds):.3f}), "
              f"{of[0][0] * statistics.median(seconds):.0f} s an epoch")
    ratios = [a[0] * a[1] / (b[0] * b[1]) for a, b in zip(runs["none"], runs["whole"])]
    print(f"an epoch padded takes {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as long as packed; it has "
          f"{runs['none'][0][0] / runs['whole'][0][0]:.2f} times as many batches")


if __name__ == "__main__":
    main()
