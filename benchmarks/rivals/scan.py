#!/usr/bin/env python3
"""Compares implementations of the selective scan on one thread, forward and backward. twobp's kernel (through build/release/benchmarks/scan_benchmark) and two
formulations in PyTorch take turns in one run. Medians are compared.

  loop     position by position
  chunked  position by position too, but the (batch, position, channel, state) tensors are made for a few positions at a time

  benchmarks/rivals/scan.py [--rounds N] [--json FILE]
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F

from mamba import scan_chunked, scan_loop

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = {"dim512": (2, 256, 1024, 16), "dim256": (2, 128, 512, 16)}  # batch, sequence, channels, state
SCANS = {"loop": scan_loop, "chunked": scan_chunked}


def whole(scan, x, raw, b, c, z, a_log, d, bias):
    """The scan with all that twobp's kernel includes. x, raw, z (B, S, C); b, c (B, S, N); a_log (C, N)."""
    return (scan(x, F.softplus(raw + bias), -torch.exp(a_log), b, c) + d * x) * F.silu(z)


def inputs(size):
    batch, sequence, channels, state = size
    torch.manual_seed(1)
    tensors = [torch.randn(batch, sequence, n) for n in (channels, channels, state, state, channels)]
    a_log = torch.log(torch.arange(1.0, state + 1)).expand(channels, state).clone()
    steps = torch.exp(torch.empty(channels).uniform_(-6.9, -2.3))  # 0.001 to 0.1
    tensors += [a_log, torch.ones(channels), steps + torch.log(-torch.expm1(-steps))]
    return [t.requires_grad_(True) for t in tensors]


def seconds(scan, tensors):
    begin = time.perf_counter()
    y = whole(scan, *tensors)
    middle = time.perf_counter()
    y.backward(torch.ones_like(y))
    end = time.perf_counter()
    for tensor in tensors:
        tensor.grad = None
    return middle - begin, end - middle


def own(size):
    """The seconds of forward and backward, from the benchmark program."""
    program = ROOT / "build/release/benchmarks/scan_benchmark"
    result = subprocess.run([program, f"--benchmark_filter=^{size}/scan/", "--benchmark_format=json",
                             "--benchmark_min_time=0.3"], check=True, capture_output=True, text=True)
    times = {run["name"].split("/")[2]: run["real_time"] / 1000 for run in json.loads(result.stdout)["benchmarks"]}
    return times["forward"], times["backward"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, size in SIZES.items():
        tensors = inputs(size)
        with torch.no_grad():  # both must compute the same scan
            torch.testing.assert_close(whole(scan_chunked, *tensors), whole(scan_loop, *tensors), rtol=1e-4, atol=1e-4)
        rounds = {which: [] for which in ("twobp", *SCANS)}
        for _ in range(options.rounds):
            rounds["twobp"].append(own(name))
            for which, scan in SCANS.items():
                rounds[which].append(seconds(scan, tensors))
        ours = sum(statistics.median(part) for part in zip(*rounds["twobp"]))
        results[name] = {}
        print(f"{name}: batch {size[0]}, sequence {size[1]}, channels {size[2]}, state {size[3]}")
        for which, times in rounds.items():
            forward, backward = (statistics.median(part) for part in zip(*times))
            results[name][which] = {"forward": forward, "backward": backward, "rounds": times}
            print(f"  {which:8} forward {forward * 1e3:9.2f} ms  backward {backward * 1e3:9.2f} ms  "
                  f"{(forward + backward) / ours:6.1f} x")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
