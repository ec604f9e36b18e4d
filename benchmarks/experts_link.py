#!/usr/bin/env python3
"""Trains a mixture of experts in two processes that share its experts, one on each of two hosts (network namespaces),
by twobp over MPI and by PyTorch with transformers' experts over Gloo (rivals/experts_over_gloo.py), on the same link,
in turns. A link of 0 Mbit/s has no limit. The ratio on the slow link should be at least 1.3. It needs root.

    benchmarks/experts_link.py build/release/twobp [--mbit 2000] [--micro-batches 4] [--rounds 3] [--steps 5]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from mixture import SAMPLES, SEQUENCE, VOCABULARY, config_of
from train_runs import FIRST, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import two_hosts  # noqa: E402

LR = 1e-4
EAGER = "4194304"  # bytes that Open MPI sends without waiting for the receiver, see docs/distributed.md


def make(folder, options):
    """The model, and the samples of all steps."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_of(options.layers)).save_pretrained(folder / "model")
    samples = 2 * options.micro_batches * SAMPLES * (FIRST + options.steps)
    ids = numpy.random.default_rng(1).integers(VOCABULARY, size=(samples, SEQUENCE), dtype=numpy.int64)
    (folder / "data").mkdir()
    for name in ("input_ids", "labels"):
        numpy.save(folder / "data" / f"{name}.npy", ids)


def of_twobp(hosts, folder, options):
    metrics = folder / "metrics.jsonl"
    settings = {
        "model.from": folder / "model",
        "data.arrays": folder / "data",
        "data.sequence": SEQUENCE,
        "data.shuffle": "false",
        "data.held_out": 0,
        "pipeline.ranks": 1,
        "pipeline.data_parallel": 2,
        "pipeline.experts": 2,
        "pipeline.micro_batches": options.micro_batches,
        "pipeline.micro_batch_size": SAMPLES,
        "pipeline.threads": 1,
        "pipeline.p2": options.p2,
        "optimizer.type": "adamw",
        "optimizer.lr": LR,
        "optimizer.weight_decay": 0.01,
        "optimizer.schedule": "constant",
        "train.clip_norm": 0,
        "train.steps": FIRST + options.steps,
    }
    command = [
        *hosts.mpirun(),
        "--mca",
        "btl_tcp_eager_limit",
        EAGER,
        "-n",
        "2",
        options.program.resolve(),
        "train",
        "--metrics",
        metrics,
        "--set",
        *(f"{key}={value}" for key, value in settings.items()),
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [step["step_seconds"] for step in steps], steps[0]["loss"]


def of_torch(hosts, folder, options):
    processes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                "env",
                f"GLOO_SOCKET_IFNAME={device}",
                sys.executable,
                str(ROOT / "benchmarks/rivals/experts_over_gloo.py"),
                str(folder),
                "--rank",
                str(rank),
                "--micro-batches",
                str(options.micro_batches),
                "--samples",
                str(SAMPLES),
                "--steps",
                str(FIRST + options.steps),
                "--lr",
                str(LR),
                "--master",
                f"{two_hosts.SUBNET}.1",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (name, device) in enumerate(zip(hosts.names, hosts.devices))
    ]
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("experts_link.py: PyTorch's run failed")
    result = json.loads(texts[0])
    return result["seconds"], result["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--mbit", type=int, default=2000)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--p2", default="fill")
    options = parser.parse_args()
    if why_not := two_hosts.missing():
        print(f"skipped: {why_not}")
        sys.exit(77)
    runs = {"twobp": of_twobp, "PyTorch over Gloo": of_torch}
    seconds = {(mbit, name): [] for mbit in (0, options.mbit) for name in runs}
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        make(folder, options)
        for turn in range(options.rounds):
            for mbit, name in list(seconds) if turn % 2 == 0 else reversed(seconds):
                with two_hosts.HostsOfOneKernel(mbit=mbit) as hosts:
                    of_steps, loss = runs[name](hosts, folder, options)
                took = statistics.median(of_steps[FIRST:])
                seconds[mbit, name].append(took)
                print(f"round {turn + 1}, {mbit} Mbit/s, {name}: {took:.3f} s a step, loss {loss:.6f}", flush=True)
    print(f"\n{'link':>10}  {'':18}{'s a step':>9}  (min - max)")
    for (mbit, name), all_of in seconds.items():
        spread = f"({min(all_of):.3f} - {max(all_of):.3f})"
        print(f"{mbit or 'no limit':>10}  {name:18}{statistics.median(all_of):9.3f}  {spread}")
    for mbit in (0, options.mbit):
        ratios = [b / a for a, b in zip(seconds[mbit, "twobp"], seconds[mbit, "PyTorch over Gloo"])]
        spread = f"({min(ratios):.3f} - {max(ratios):.3f})"
        print(f"{mbit or 'no limit':>10}  PyTorch / twobp: {statistics.median(ratios):.3f}  {spread}")


if __name__ == "__main__":
    main()
