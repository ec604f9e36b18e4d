#!/usr/bin/env python3
"""Times what a step looks at to see whether the module has changed: its parameters, and the guards of its capture.

    PYTHONPATH=build/release/python python benchmarks/guards.py [--layers 12] [--rounds 2000]
"""
import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import twobp


def median_of(call, rounds: int, cold: bool) -> float:
    """Microseconds. `cold`: after other memory has gone through the caches, as in a step."""
    memory, times = torch.ones(16 << 20), []
    for _ in range(rounds):
        if cold:
            memory.add_(1)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[rounds // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    ids = torch.randint(50, (2, 16))
    models = {"GPT-2": GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=options.layers, n_head=2, bos_token_id=0, eos_token_id=0)),
              "LLaMA": LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=options.layers,
                                                    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))}
    for name, model in models.items():
        trainer = twobp.Trainer(model.train(), {"input_ids": ids, "labels": ids})
        guards = trainer._captured.variant.guards
        assert guards.change() is None
        print(f"{name} of {options.layers} layers, {len(guards)} guards: {median_of(guards.change, options.rounds, False):.0f} us, after other work "
              f"{median_of(guards.change, options.rounds // 10, True):.0f} us; parameters {median_of(trainer._watch.check, options.rounds, False):.0f} us, "
              f"after other work {median_of(trainer._watch.check, options.rounds // 10, True):.0f} us")


if __name__ == "__main__":
    main()
