#!/usr/bin/env python3
"""Measures how long training waits for pictures with 1, 2 and 4 threads that read ahead (data.workers). It makes a folder of JPEG files of 500 x 375
pixels and trains a small ResNet on them, on one thread. The counts of threads take turns.

    benchmarks/image_workers.py [build/release/twobp]

It needs numpy, Pillow and two quiet cores.
"""
import argparse
import json
import pathlib
import statistics
import tempfile

import numpy
from PIL import Image

from plan_ranking import ROOT, call

CLASSES, PICTURES, STEPS, WARMUP = 4, 100, 20, 5
SETTINGS = ["model.type=resnet", "model.block=basic", "model.widths=[16,32]", "model.depths=[1,1]", f"model.classes={CLASSES}", "data.image_size=112",
            "data.crop=resized", "pipeline.ranks=1", "pipeline.micro_batches=2", "pipeline.micro_batch_size=8", f"train.steps={STEPS}"]


def write_pictures(folder, generator):
    for number in range(CLASSES * PICTURES):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=numpy.uint8)).resize((500, 375), Image.BICUBIC)
        noise = generator.normal(0, 6, (375, 500, 3))
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((numpy.asarray(coarse) + noise).clip(0, 255).astype(numpy.uint8)).save(path, quality=90)


def steps(program, folder, workers):
    """(seconds, share spent waiting for pictures) of a step, medians after the first steps."""
    metrics = folder / "steps.jsonl"
    metrics.unlink(missing_ok=True)
    call(program, "train", "--metrics", metrics, "--set", *SETTINGS, f"data.images={folder / 'pictures'}", f"data.workers={workers}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][WARMUP:]
    whole = [row["step_seconds"] + row["input_wait_seconds"] for row in rows]
    return statistics.median(whole), statistics.median(row["input_wait_seconds"] / seconds for row, seconds in zip(rows, whole))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default=ROOT / "build/release/twobp", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "pictures").mkdir()
        write_pictures(folder / "pictures", numpy.random.default_rng(0))
        measured = {workers: [] for workers in (1, 2, 4)}
        for _ in range(options.repeats):
            for workers, runs in measured.items():
                runs.append(steps(options.program, folder, workers))
    for workers, runs in measured.items():
        seconds, waiting = zip(*runs)
        print(f"{workers} threads: {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}) a step of 16 pictures, "
              f"{statistics.median(waiting):.2f} of it waiting ({min(waiting):.2f} to {max(waiting):.2f})")


if __name__ == "__main__":
    main()
