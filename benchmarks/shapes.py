#!/usr/bin/env python3
"""What programs for many shapes cost. Prints the seconds until a 12-layer GPT-2 of transformers has made its first
step, and its first step at a second length, whose programs serve all later ones. Then compares steps of these programs
with steps of programs for one shape, in turns. With --cpu, seconds are those of the processor, for a busy machine.

    PYTHONPATH=build/release/python benchmarks/shapes.py [--cpu] [--models gpt2 llama] [--layers 4] [--pairs 40]
"""

import argparse
import statistics
import time

import captured_step
import torch

import twobp

LENGTHS = (96, 160, captured_step.SEQUENCE)


def of_length(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    return {name: field[:, :length].contiguous() for name, field in batch.items()}


def trainer_of(name: str, options: argparse.Namespace, layers: int, example: dict[str, torch.Tensor]) -> twobp.Trainer:
    return twobp.Trainer(
        captured_step.model_of(name, layers, options.width),
        example,
        ranks=1,
        micro_batches=1,
        threads=1,
        optimizer=twobp.AdamW(lr=1e-4),
        cache=False,
    )


def first_steps(options: argparse.Namespace) -> None:
    batch = captured_step.batch_of("gpt2", 2)
    begin = options.clock()
    trainer = trainer_of("gpt2", options, 12, of_length(batch, LENGTHS[0]))
    seconds = []
    for length in LENGTHS:
        trainer.step(of_length(batch, length))
        seconds.append(options.clock() - begin)
        begin = options.clock()
    assert trainer.captures == 2
    print(
        f"gpt2, 12 layers: first step after {seconds[0]:.1f} s, at a second length {seconds[1]:.1f} s, at a third "
        f"{seconds[2]:.2f} s",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["gpt2", "llama"], choices=["gpt2", "qwen3", "llama"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--cpu", dest="clock", action="store_const", const=time.process_time, default=time.perf_counter)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first_steps(options)
    for name in options.models:
        batch = captured_step.batch_of(name, 2)
        examples = (of_length(batch, length) for length in (LENGTHS[-1], LENGTHS[0]))
        one, many = (trainer_of(name, options, options.layers, example) for example in examples)
        for length in LENGTHS:
            many.step(of_length(batch, length))
        one.step(batch)
        assert many.captures == 2
        pairs = []
        for turn in range(options.pairs):
            seconds = {}
            for trainer in (one, many) if turn % 2 else (many, one):
                begin = options.clock()
                trainer.step(batch)
                seconds[trainer] = options.clock() - begin
            pairs.append((seconds[one], seconds[many]))
        ratios = sorted(b / a for a, b in pairs)
        quarter = len(ratios) // 4
        first, second = (statistics.median(one) for one in zip(*pairs))
        print(
            f"{name:6} one shape {first:.4f} s, many {second:.4f} s, many / one {statistics.median(ratios):.3f} (half "
            f"of the pairs: {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
