#!/usr/bin/env python3
"""Times a training step of a mixture of experts (Qwen3-MoE: width 512, 16 experts of width 256, 4 for each token,
sequences of 256) on one rank with one thread, the captured module of transformers and model.type qwen3_moe, against
PyTorch's step of the same module, with transformers' implementations of experts, in turns. The ratio to the best of
them should be at most 0.85, and to the grouped one under torch.compile (--compiled) at most 1. With --cpu, seconds are
those of the processor, for a busy machine.

    PYTHONPATH=build/release/python benchmarks/experts.py [--cpu] [--layers 8] [--rounds 7] [--compiled]
        [--implementations eager grouped_mm batched_mm]
"""

import argparse
import statistics
import tempfile
import time

import captured_step
import torch
import transformers
from mixture import SAMPLES, SEQUENCE, VOCABULARY, config_of

import twobp


def model_of(implementation: str, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(layers), experts_implementation=implementation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--implementations", nargs="+", default=["eager", "grouped_mm"])
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    torch.set_num_threads(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}

    eager = {one: captured_step.Eager(model_of(one, options.layers)) for one in options.implementations}
    steps = {one: lambda of=of: of.step(batch) for one, of in eager.items()}
    if options.compiled:
        compiled = captured_step.Eager(model_of("grouped_mm", options.layers))
        compiled.model.compile()
        steps["compiled"] = lambda: compiled.step(batch)
    alike = {
        "ranks": 1,
        "micro_batches": 1,
        "threads": 1,
        "pin": False,
        "optimizer": twobp.AdamW(lr=1e-4, weight_decay=0.01),
    }
    model = model_of("grouped_mm", options.layers)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        trainers = {
            "captured": twobp.Trainer(model, batch, **alike),
            "by type": twobp.Trainer(model={"from": folder}, example=batch, **alike),
        }
    steps.update({one: lambda of=of: of.step(batch).loss for one, of in trainers.items()})
    seconds: dict[str, list[float]] = {one: [] for one in steps}
    for turn in range(options.rounds + 2):
        losses = {}
        for one, step in steps.items():
            begin = clock()
            losses[one] = step()
            if turn >= 2:
                seconds[one].append(clock() - begin)
        if max(losses.values()) - min(losses.values()) > 1e-3 * losses["captured"]:
            raise SystemExit(f"experts.py: losses differ: {losses}")
    for one in steps:
        print(f"{one:12} {captured_step.spread(seconds[one])} s")
    best = min(eager, key=lambda one: statistics.median(seconds[one]))
    for other, bar in [(best, 0.85)] + ([("compiled", 1)] if options.compiled else []):
        for one in trainers:
            ratios = [a / b for a, b in zip(seconds[one], seconds[other])]
            print(f"{one} / {other}: {captured_step.spread(ratios)} (bar {bar})")


if __name__ == "__main__":
    main()
