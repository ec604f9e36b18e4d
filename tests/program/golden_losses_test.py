#!/usr/bin/env python3
"""Compares the losses of short runs of every model type with stored ones, to find changes of the code that change training by
mistake. Stored figures hold to 1e-4 on any machine (bf16: 1e-2). On one machine, two schedules give the same losses and norms to
the bit. `golden_losses_test.py PROGRAM --write` stores new figures. `--out FILE` writes all bits, to compare two builds."""
import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

KEPT = pathlib.Path(__file__).resolve().parents[1] / "golden/losses.json"
TOKENS = ["data.synthetic=tokens", "data.sequence=32", "pipeline.micro_batch_size=2", "model.dim=64"]
MODELS = {
    "llama": [*TOKENS, "model.layers=3", "model.heads=4", "model.kv_heads=2", "train.clip_norm=0.5"],
    "llama, tied, bf16": [*TOKENS, "model.layers=2", "model.heads=4", "model.tied=true", "train.precision=bf16"],
    "llama, LoRA": [*TOKENS, "model.layers=2", "model.heads=4", "model.lora=4"],
    "bert": [*TOKENS, "model.type=bert", "model.layers=2", "model.heads=4", "model.vocab=260", "model.positions=64",
             "model.dropout=0.1", "model.attention_dropout=0.1", "model.tied=true"],
    "mamba": [*TOKENS, "model.type=mamba", "model.layers=3", "model.tied=true"],
    "resnet": ["model.type=resnet", "model.depths=2,2", "model.widths=32,64", "model.stem=16", "model.classes=10",
               "model.small_images=true", "data.synthetic=images", "data.image_size=16", "optimizer.type=sgd",
               "optimizer.momentum=0.9", "optimizer.lr=0.05"],
    "mlp": ["model.type=mlp", "model.dim=64", "data.synthetic=vectors"],
}


def train(program, settings, schedule, gradients="kept"):
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder, "metrics.jsonl")
        command = [program, "train", "--metrics", metrics, "--set", *settings, f"pipeline.schedule={schedule}",
                   f"pipeline.gradients={gradients}", "pipeline.ranks=2", "pipeline.micro_batches=4", "train.steps=4", "data.held_out=0"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command}: {done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [[line["loss"], line["grad_norm"]] for line in lines if "grad_norm" in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    found = {}
    for name, settings in MODELS.items():
        found[name] = train(options.program, settings, "1f1b")
        if len(found[name]) != 4 or train(options.program, settings, "zb-v") != found[name]:
            sys.exit(f"{name}: 1f1b and zb-v do not give the same bits: {found[name]}")
        clips = any(setting.startswith("train.clip_norm") for setting in settings)
        if not clips and train(options.program, settings, "1f1b", "streamed") != found[name]:
            sys.exit(f"{name}: kept and streamed gradients do not give the same bits")
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    if options.write:
        KEPT.write_text(json.dumps({name: [[round(x, 7) for x in step] for step in steps] for name, steps in found.items()}) + "\n")
        return
    kept = json.loads(KEPT.read_text())
    for name, steps in found.items():
        for number, (step, expected) in enumerate(zip(steps, kept[name], strict=True)):
            for value, other in zip(step, expected, strict=True):
                if not math.isclose(value, other, rel_tol=1e-2 if "bf16" in name else 1e-4):
                    sys.exit(f"{name}, step {number + 1}: {step}, kept are {expected}")


if __name__ == "__main__":
    main()
