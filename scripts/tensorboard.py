#!/usr/bin/env python3
"""Converts the lines of `twobp train --metrics FILE` to TensorBoard event files.

    scripts/tensorboard.py METRICS.jsonl LOGDIR            # convert the existing lines, then stop
    scripts/tensorboard.py METRICS.jsonl LOGDIR --follow   # also convert new lines, until Ctrl-C
    tensorboard --logdir LOGDIR

The script needs torch and the package "tensorboard".
"""
import argparse
import json
import math
import os
import signal
import sys
import time

# Python searches for modules beside the script first. It would find this file instead of the package.
sys.path = [folder for folder in sys.path if os.path.realpath(folder) != os.path.dirname(os.path.realpath(__file__))]

PACKAGE = "tensorboard==2.21.0"
SCALARS = ("loss", "held_out_loss", "held_out_accuracy", "lr", "grad_norm", "tokens_per_second", "step_seconds",
           "input_wait_seconds")
PER_STAGE = {"idle_fraction": "idle/rank {}", "peak_bytes": "peak_bytes/stage {}"}


def fail(message):
    sys.exit(f"tensorboard.py: {message}")


def scalars_of(line, where):
    """Returns (step, {tag: value}) of one line of metrics."""
    try:
        metrics = json.loads(line)
        step = metrics["step"]
    except (ValueError, KeyError, TypeError):
        fail(f"{where} is not a line of `twobp train --metrics`")
    if not isinstance(step, int) or isinstance(step, bool):
        fail(f"{where}: the step is not an integer")
    values = {name: metrics.get(name) for name in SCALARS}
    for name, tag in PER_STAGE.items():
        for index, value in enumerate(metrics.get(name) or []):
            values[tag.format(index)] = value
    # A loss that is not finite is null in the file.
    return step, {tag: float(value) for tag, value in values.items()
                  if isinstance(value, (int, float)) and math.isfinite(value)}


class Events:
    """The event files. If a step appears again (after a resume), it replaces all events from that step on."""

    def __init__(self, logdir, writer_class):
        self.logdir, self.writer_class = logdir, writer_class
        self.writer, self.last = None, None

    def add(self, step, values):
        if self.writer is None or step <= self.last:
            self.close()
            self.writer = self.writer_class(self.logdir, purge_step=step)
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)
        self.last = step

    def flush(self):
        if self.writer is not None:
            self.writer.flush()

    def close(self):
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def complete_lines(path, offset):
    """Returns the complete lines from the offset on, the offset used, and the offset after them."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < offset:  # restarted, or cut back to a checkpoint
            offset = 0
        file.seek(offset)
        text = file.read()
    end = text.rfind(b"\n") + 1
    return text[:end].decode("utf-8", "replace").splitlines(), offset, offset + end


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", metavar="METRICS.jsonl")
    parser.add_argument("logdir", metavar="LOGDIR")
    parser.add_argument("--follow", action="store_true", help="also convert lines that are written later, until Ctrl-C")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to check (default 1)")
    options = parser.parse_args()
    if not options.follow and not os.path.isfile(options.metrics):
        fail(f"no such file: {options.metrics}")
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(True))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fail(f"{error}: pip install {PACKAGE}")

    events, offset, number, steps = Events(options.logdir, SummaryWriter), 0, 0, 0
    try:
        while True:
            lines = []
            if os.path.isfile(options.metrics):
                lines, begin, offset = complete_lines(options.metrics, offset)
                number = number if begin else 0
            for line in lines:
                number += 1
                if line.strip():
                    events.add(*scalars_of(line, f"{options.metrics}, line {number}"))
                    steps += 1
            events.flush()
            if stopped or not options.follow:
                break
            time.sleep(options.interval)
    except OSError as error:
        fail(f"{error.filename or options.logdir}: {error.strerror}")
    finally:
        events.close()
    if steps == 0 and not options.follow:
        fail(f"{options.metrics} has no steps")
    print(f"{steps} steps in {options.logdir}")


if __name__ == "__main__":
    main()
