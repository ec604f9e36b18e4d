#!/usr/bin/env python3
"""Compares runs with one process per rank with ranks that are threads of one process: `twobp train` over MPI, and the Python package over a
c10d process group (Gloo); and two replicas with shards of the optimizer with the same without. It measures the seconds of a step and the idle
share of the ranks. The runs take turns, in reversed order every other round. Ratios are those of a round.

    PYTHONPATH=build/release/python benchmarks/transports.py build/release/twobp
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from train_runs import FIRST, MPIRUN, ROOT, metrics_of

REPLICAS = {"pipeline__ranks": 1, "pipeline__data_parallel": 2}
SHARDS = {**REPLICAS, "optimizer__shard": "true"}
# The way to which it is compared, whether under mpirun, and settings of `twobp train`; None: the package.
WAYS = {"threads": ("threads", False, {}), "mpi": ("threads", True, {}),
        "python": ("python", False, None), "c10d": ("python", True, None),
        "replicas": ("replicas", False, REPLICAS), "shards": ("replicas", False, SHARDS),
        "mpi-replicas": ("mpi-replicas", True, REPLICAS), "mpi-shards": ("mpi-replicas", True, SHARDS)}


def run(options, way, schedule, folder):
    _, mpi, settings = WAYS[way]
    if settings is None:
        worker = [sys.executable, __file__, "--worker", schedule, options.program, "--config", options.config,
                  "--micro-batches", options.micro_batches, "--steps", options.steps]
        command = list(map(str, [*(MPIRUN if mpi else []), *worker]))
        steps = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    else:
        steps = [(step["step_seconds"], step["idle_fraction"]) for step in metrics_of(options, schedule, folder, mpi, **settings)]
    steps = steps[FIRST:]
    return {"seconds": statistics.median(seconds for seconds, _ in steps),
            "idle": [statistics.median(idle[rank] for _, idle in steps) for rank in range(len(steps[0][1]))]}


def work(options):
    """A rank, or both, in Python. Prints the seconds and the idle shares of the steps."""
    import torch
    import twobp

    processes = twobp.init_process_group()
    config = json.loads(options.config.read_text())
    pipeline, model = config["pipeline"], config["model"]
    shape = (pipeline["micro_batch_size"] * options.micro_batches, config["data"]["sequence"])
    ids = torch.randint(model["vocab"], shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    example = {name: tensor[:pipeline["micro_batch_size"]] for name, tensor in batch.items()}
    trainer = twobp.Trainer(model=model, example=example, ranks=2, schedule=options.worker, p2="fill", micro_batches=options.micro_batches,
                            memory_cap=pipeline["memory_cap"], threads=pipeline["threads"], pin=pipeline["pin"])
    results = [trainer.step(batch) for _ in range(FIRST + options.steps)]
    if processes == 1 or torch.distributed.get_rank() == 0:
        print(json.dumps([(result.step_seconds, result.idle) for result in results]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "configs/bench_llama.json")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-v"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:4])
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    rows = {schedule: {way: [] for way in options.ways} for schedule in options.schedules}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for schedule, row in rows.items():
                for way in options.ways if repeat % 2 == 0 else reversed(options.ways):
                    row[way].append(run(options, way, schedule, folder))
    print(f"{options.config.name}, {options.micro_batches} micro-batches, p2 fill; {options.repeats} rounds of {options.steps} steps\n")
    print(f"{'schedule':12}{'ranks':13}{'seconds':>9}{'idle, by rank':>17}{'ratio':>11}  (min - max)")
    for schedule, row in rows.items():
        for way, runs in row.items():
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs, row.get(WAYS[way][0], runs))]
            idle = " / ".join(f"{statistics.median(idle):.3f}" for idle in zip(*(r["idle"] for r in runs)))
            print(f"{schedule:12}{way:13}{statistics.median(r['seconds'] for r in runs):9.4f}{idle:>17}"
                  f"{statistics.median(ratios):10.3f}x  ({min(ratios):.3f} - {max(ratios):.3f})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
