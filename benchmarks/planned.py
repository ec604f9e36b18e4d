"""Arguments to run a model as `twobp plan --search` advises. They are for comparisons with the best choice of the program itself."""
import json


def plan_arguments(costs, micro_batches, csv):
    """`costs` is a file of `twobp profile --json`. Its first micro-batch size is the one that will run. The schedule goes to `csv`."""
    size = json.loads(costs.read_text())["micro_batch_sizes"][0]
    return ["plan", "--costs", costs, "--ranks", 2, "--micro-batches", micro_batches, "--micro-batch-sizes", size, "--search", "--csv", csv]


def settings_of(choice, csv):
    """Settings for a row of `plan`. `csv` contains its schedule and is read if the schedule has no name."""
    keys = {"split": ",".join(map(str, choice["split"])), "memory_cap": choice["memory_cap"], "p2": choice["p2"],
            "recompute": json.dumps([mode for mode in [choice["recompute"]] if mode != "none"]),
            **({"schedule": csv, "ranks": 0, "stages": 0, "micro_batches": 0} if choice["schedule"] == "auto" else
               {"schedule": choice["schedule"], "ranks": 2, "stages": choice["stages"]})}
    return [f"pipeline.{key}={value}" for key, value in keys.items()]


def bench_arguments(choice, csv):
    """Arguments of `twobp bench` for one row of `plan`."""
    return ["--ways", " ".join(settings_of(choice, csv))]
