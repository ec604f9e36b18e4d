"""Compares LoRA with full fine-tuning, and twobp with PEFT on PyTorch eager. It prints memory and time of a step as a Markdown table.

    examples/smollm2/get                                        fetches the model, once
    python benchmarks/rivals/lora.py --json lora.json           one stage on one pinned core; twobp also on two

It needs twobp (build/release/twobp) and a Python with torch, transformers and peft (requirements.txt here and in tests/). Every contender runs once per repeat, and
they take turns. Ratios are taken within each repeat.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

import probe

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MIB = 2**20
TIMEOUT_SECONDS = 900

CONTENDERS = {  # name -> (title, stages or None for PyTorch, LoRA)
    "twobp_full": ("twobp, full", 1, False), "twobp_lora": ("twobp, LoRA", 1, True),
    "eager_full": ("PyTorch eager, full", None, False), "peft_lora": ("PEFT on PyTorch eager, LoRA", None, True),
    "twobp_full_2": ("twobp, full, two stages", 2, False), "twobp_lora_2": ("twobp, LoRA, two stages", 2, True),
}


def twobp_command(args, stages, lora, metrics):
    config = "lora.json" if lora else "finetune.json"
    settings = {"model.from": args.model, "pipeline.ranks": stages, "pipeline.micro_batches": args.micro_batches,
                "pipeline.micro_batch_size": args.micro_batch_size, "data.sequence": args.sequence,
                "train.steps": args.steps + args.warmup, "train.precision": "fp32", "data.held_out": 0,
                "optimizer.schedule": "constant", "optimizer.warmup": 0, "save.model": ""}
    if lora:
        settings["model.lora"] = args.rank
    command = [REPOSITORY / "build/release/twobp", "train", REPOSITORY / "examples/smollm2" / config, "--metrics", metrics]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def pytorch_command(args, lora):
    return [sys.executable, HERE / "peft_lora.py", args.model, "--rank", args.rank if lora else 0, "--micro-batches",
            args.micro_batches, "--micro-batch-size", args.micro_batch_size, "--sequence", args.sequence, "--steps",
            args.steps + args.warmup]


def run_once(args, name):
    _, stages, lora = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = twobp_command(args, stages, lora, metrics) if stages else pytorch_command(args, lora)
        cores = args.cores[: stages or 1]
        outcome = probe.run([str(word) for word in command], cores, args.patience, TIMEOUT_SECONDS)
        if outcome.exit_code != 0:
            raise SystemExit(f"{name}: exit code {outcome.exit_code}: {outcome.stderr.strip()[-2000:]}")
        lines = metrics.read_text().splitlines() if stages else outcome.stdout.strip().splitlines()[-args.steps - args.warmup:]
        steps = [json.loads(line) for line in lines]
    seconds = statistics.median(step["step_seconds"] for step in steps[args.warmup:])
    return {"seconds": seconds, "resident": sum(m.peak_resident for m in outcome.memory.values()),
            "losses": [step["loss"] for step in steps], "foreign_share": outcome.foreign_share}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(REPOSITORY / "data/smollm2-135m"))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the measured ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for quiet cores")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--json")
    args = parser.parse_args()
    args.cores = sorted(os.sched_getaffinity(0))
    names = args.contenders.split(",")
    runs = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            runs[name].append(run_once(args, name))
            print(f"repeat {repeat + 1}/{args.repeats}, {name}: {runs[name][-1]['seconds']:.3f} s/step", file=sys.stderr)
    print("| | seconds per step (min–max) | / twobp full (min–max) | resident, MiB |\n|---|---|---|---|")
    for name in names:
        seconds = [run["seconds"] for run in runs[name]]
        ratios = [run["seconds"] / base["seconds"] for run, base in zip(runs[name], runs[names[0]])]
        resident = statistics.median(run["resident"] for run in runs[name]) / MIB
        print(f"| {CONTENDERS[name][0]} | {statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f}) | "
              f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}) | {resident:.0f} |")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"arguments": vars(args), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
