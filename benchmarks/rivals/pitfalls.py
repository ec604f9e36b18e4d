"""Finds errors of PyTorch's pipeline schedules. It runs one step of a tiny model under each and compares it with PyTorch eager.

    python pitfalls.py --model bert         prints a Markdown table

It compares the loss, every gradient and, after one step, BatchNorm's running statistics. "As timed" is the way that compare.py measures. The other rows show
ways in which a user would write the model first.
"""
import argparse
import json
import multiprocessing
import os
import pathlib
import tempfile

import configuration
import sizes

SCHEDULES = ("1f1b", "interleaved_zb", "zbv", "dualpipev")
BOTH_ENDS_ON_A_RANK = ("zbv", "dualpipev")
MICRO_BATCHES = 4
TOLERANCE = 1e-3  # relative, and far above the effect of another order of summation
ONE_MATRIX = (["--set", "model.tied=true"], ["--tied", "shared"])
VARIANTS = {  # options of the model (for eager too), and of the pipeline
    "llama": {"as timed": ([], [])},
    "bert": {"as timed": ([], []), "head on all positions": (["--variant", "all"], []),
             "tied matrix as one parameter": ONE_MATRIX},
    "mamba": {"as timed": ([], []), "scan as a loop": (["--variant", "loop"], []),
              "tied matrix, one copy per stage": (["--set", "model.tied=true"], []), "tied matrix as one parameter": ONE_MATRIX},
    "resnet": {"as timed": ([], []), "shapes found by PyTorch": ([], ["--shapes", "inferred"]),
               "channels_last": (["--variant", "channels_last"], [])},
}


def run_step(model, config, schedule, options):
    """The loss, gradients and running statistics of the first step by name, or the first line of the error."""
    import torch
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", config, "--schedule", schedule, "--micro-batches", MICRO_BATCHES, "--steps", 1, "--warmup", 0,
                     "--start", "fork", "--timeout", 60, "--keep", folder, *options]
        for setting in sizes.as_settings(sizes.QUICK[model]):
            arguments += ["--set", setting]
        said = pathlib.Path(folder, "said.txt")
        process = multiprocessing.get_context("fork").Process(target=run_pipeline, args=([str(word) for word in arguments], said))
        process.start()
        process.join()
        if process.exitcode != 0:
            message = said.read_text().strip().splitlines() or ["no message"]
            return message[-1].removeprefix("pytorch_pipeline.py: ")
        state = {"loss": None, "gradients": {}, "buffers": {}}
        for path in sorted(pathlib.Path(folder).glob("*.pt")):
            kept = torch.load(path)
            state["loss"] = kept["loss"] if kept["loss"] is not None else state["loss"]
            state["gradients"] |= kept["gradients"]
            state["buffers"] |= kept["buffers"]
        return state


def run_pipeline(arguments, said):
    """pytorch_pipeline.py in a fork, which has imported torch already."""
    import pytorch_pipeline
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    pytorch_pipeline.main(arguments)


def relative_error(got, expected):
    error = (got - expected).norm() / expected.norm().clamp_min(1e-30)
    return error.item() if error.isfinite() else float("inf")


def worst(got, expected):
    """The name with the largest error, and the error."""
    errors = {name: relative_error(got[name].double(), value.double()) for name, value in expected.items()}
    name = max(errors, key=errors.get)
    return name, errors[name]


def verdict(got, expected):
    """`right`, or a short description of the errors."""
    if isinstance(got, str):
        return f"fails: {got}"
    wrong = []
    if abs(got["loss"] - expected["loss"]) > TOLERANCE * abs(expected["loss"]):
        wrong.append(f"loss {got['loss']:.4g} instead of {expected['loss']:.4g}")
    missing = [name for name, value in expected["gradients"].items() if got["gradients"].get(name) is None]
    if missing:
        wrong.append(f"no gradient of {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
    else:
        name, error = worst(got["gradients"], expected["gradients"])
        if error > TOLERANCE:
            value, right = got["gradients"][name].double(), expected["gradients"][name].double()
            share = ((value * right).sum() / (right * right).sum()).item()
            wrong.append(f"gradient of {name} off by {error:.2g} ({share:.2f} of eager's)")
    if expected["buffers"]:
        name, error = worst(got["buffers"], expected["buffers"])
        if error > TOLERANCE:
            wrong.append(f"running statistics: {name} off by {error:.2g}")
    return "; ".join(wrong) or "right"


def check(model, config, schedules=SCHEDULES, variants=None):
    """{variant: {schedule: verdict}}"""
    import pytorch_pipeline  # before any fork
    from torch.distributed import pipelining
    results = {}
    for variant in variants or VARIANTS[model]:
        of_model, of_pipeline = VARIANTS[model][variant]
        expected = run_step(model, config, "single", of_model)
        results[variant] = {}
        for schedule in schedules:
            if "shared" in of_pipeline and schedule not in BOTH_ENDS_ON_A_RANK:
                results[variant][schedule] = "impossible: used on both ranks"
            elif isinstance(expected, str):
                results[variant][schedule] = f"PyTorch eager fails: {expected}"
            else:
                results[variant][schedule] = verdict(run_step(model, config, schedule, [*of_model, *of_pipeline]), expected)
    return results


def markdown_table(model, results):
    schedules = list(next(iter(results.values())))
    lines = [f"### {model}: PyTorch's schedules against PyTorch eager, one step of a tiny model, M = {MICRO_BATCHES}", "",
             "| | " + " | ".join(f"`{schedule}`" for schedule in schedules) + " |", "|---" * (len(schedules) + 1) + "|"]
    for variant, row in results.items():
        lines.append(f"| {variant} | " + " | ".join(text.replace("|", "\\|") for text in row.values()) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=configuration.MODELS, default="llama")
    parser.add_argument("--config", type=pathlib.Path, help="default configs/bench_MODEL.json")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = check(args.model, args.config or configuration.default_config(args.model))
    print(json.dumps(results, indent=1) if args.json else markdown_table(args.model, results))


if __name__ == "__main__":
    main()
