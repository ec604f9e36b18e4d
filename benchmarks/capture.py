#!/usr/bin/env python3
"""Times the capture of a 12-layer GPT-2 of transformers, and that of one met before in a new process. Says where the time of the first goes.

    PYTHONPATH=build/release/python benchmarks/capture.py [--layers 12]
"""
import argparse
import subprocess
import sys
import tempfile
import time

import torch
import transformers

SEQUENCE, WIDTH, SAMPLES = 256, 512, 2


def model_of(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=4096, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=layers, n_head=8,
                                                                bos_token_id=0, eos_token_id=0)).train()


def timed(owner, name: str, spent: dict[str, float]) -> None:
    """Adds the seconds in a function to `spent`."""
    function = getattr(owner, name)

    def wrapper(*arguments, **options):
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0) + time.perf_counter() - begin
    setattr(owner, name, wrapper)


def measure(layers: int, cache: str) -> None:
    from twobp.capture import Captured, capture, trace
    model = model_of(layers)
    ids = torch.randint(4096, (SAMPLES, SEQUENCE))
    spent: dict[str, float] = {}
    for owner, name in ((trace, "export"), (trace, "cut"), (trace, "programs_of"), (Captured, "_dry_run")):
        timed(owner, name, spent)
    begin = time.perf_counter()
    captured = capture(model, {"input_ids": ids, "labels": ids}, cache=cache)
    print(f"{time.perf_counter() - begin:6.2f} s, {captured.cached[0]}" + "".join(f", {name} {seconds:.2f}" for name, seconds in spent.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--cache", help="the folder of the measurement that this process makes")
    arguments = parser.parse_args()
    if arguments.cache:
        measure(arguments.layers, arguments.cache)
        return
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            subprocess.run([sys.executable, __file__, "--layers", str(arguments.layers), "--cache", folder], check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
