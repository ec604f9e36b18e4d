#!/usr/bin/env python3
"""Times a training step of captured transformers models on one rank with one thread against PyTorch's eager step of the same module
(forward, backward, fused AdamW), in turns.

    PYTHONPATH=build/release/python benchmarks/captured_step.py [--models gpt2 qwen3 llama] [--layers 8] [--rounds 7]
"""
import argparse
import statistics
import time

import torch
import transformers

import twobp

VOCABULARY, SEQUENCE = 4096, 256


def model_of(name: str, layers: int, width: int) -> torch.nn.Module:
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    rows = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408,
            "max_position_embeddings": SEQUENCE, **common}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=SEQUENCE, n_embd=width, n_layer=layers, n_head=8, attn_pdrop=0.0, resid_pdrop=0.0,
                                         embd_pdrop=0.0, **common)
    elif name == "qwen3":
        config = transformers.Qwen3Config(head_dim=width // 8, **rows)
    else:
        config = transformers.LlamaConfig(**rows)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def eager_step(model, optimizer, batch) -> float:
    begin = time.perf_counter()
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "qwen3", "llama"], choices=["gpt2", "qwen3", "llama"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.layers} layers of width {options.width}, sequence {SEQUENCE}, {options.samples} samples, one thread")
    for name in options.models:
        model = model_of(name, options.layers, options.width)
        ids = torch.randint(VOCABULARY, (options.samples, SEQUENCE), generator=torch.Generator().manual_seed(1))
        batch = {"input_ids": ids, "labels": ids}
        begin = time.perf_counter()
        trainer = twobp.Trainer(model, batch, ranks=1, micro_batches=1, threads=1, optimizer=twobp.AdamW(lr=1e-4))
        made = time.perf_counter() - begin
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        eager, ours, ratios, python = [], [], [], []
        for turn in range(options.rounds + 1):
            reference = eager_step(model, optimizer, batch)
            begin = time.perf_counter()
            result = trainer.step(batch)
            whole = time.perf_counter() - begin
            if turn > 0:  # the first is a warm-up
                eager.append(reference)
                ours.append(whole)
                ratios.append(whole / reference)
                python.append(whole - result.step_seconds)
        print(f"{name:6} eager {statistics.median(eager):.3f} s, captured {statistics.median(ours):.3f} s, "
              f"captured / eager {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
              f"outside the step {1e3 * statistics.median(python):.2f} ms, capture and set-up {made:.1f} s", flush=True)


if __name__ == "__main__":
    main()
