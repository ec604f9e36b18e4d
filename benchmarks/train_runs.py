"""Runs `twobp train` for comparisons, on two ranks (threads or processes), and returns their metrics."""
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
MPIRUN = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-n", "2"]
FIRST = 3  # earlier steps are warm-up


def metrics_of(options, schedule, folder, mpi=False, **settings):
    """One line for each step. `options` has program, config, micro_batches and the number of steps after FIRST. `settings` are keys of the
    configuration, with __ instead of the dot."""
    metrics = pathlib.Path(folder, "metrics.jsonl")
    command = [*(MPIRUN if mpi else []), options.program.resolve(), "train", options.config, "--metrics", metrics]
    settings = {"pipeline.schedule": schedule, "pipeline.p2": "fill", "pipeline.micro_batches": options.micro_batches,
                "pipeline.ranks": 2, "data.held_out": 0, "train.steps": FIRST + options.steps,
                **{key.replace("__", "."): value for key, value in settings.items()}}
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in metrics.read_text().splitlines()]
