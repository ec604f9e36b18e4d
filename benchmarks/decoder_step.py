#!/usr/bin/env python3
"""Times a training step of each family of decoders, whose layers are split by hand, on one rank with one thread, in turns with PyTorch's
eager step of the same model (forward, backward, fused AdamW), and with our step of a LLaMa of the same shape.

    PYTHONPATH=build/release/python benchmarks/decoder_step.py [--models qwen3 gemma2] [--layers 8] [--rounds 7]
"""
import statistics
import tempfile
import time

import torch
import transformers

import twobp
from captured_step import VOCABULARY, Eager, batch_of, options_of, spread

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma", "gemma2", "gemma3_text", "smollm3", "gpt2", "gpt_neox", "granite",
            "stablelm", "starcoder2", "qwen3_moe")


def model_of(family: str, layers: int, width: int) -> torch.nn.Module:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": width // 8,
             "intermediate_size": 1408, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 0,
             "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(family)
    kept = {key: value for key, value in sizes.items() if hasattr(config, key)}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **kept, **dropout), dtype=torch.float32).train()


def split_by_hand(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> twobp.Trainer:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return twobp.Trainer(model={"from": folder}, example=batch, ranks=1, micro_batches=1, threads=1, optimizer=twobp.AdamW(lr=1e-4))


def main():
    options = options_of(__doc__, FAMILIES)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    batch = batch_of("decoder", options.samples)
    llama = split_by_hand(model_of("llama", options.layers, options.width), batch)
    for family in options.models:
        model = model_of(family, options.layers, options.width)
        contenders = {"ours": split_by_hand(model, batch), "eager": Eager(model), "llama": llama}
        seconds = {key: [] for key in contenders}
        for _ in range(options.rounds + 1):
            for key, one in contenders.items():
                begin = time.perf_counter()
                one.step(batch)
                seconds[key].append(time.perf_counter() - begin)
        ratios = {key: [a / b for a, b in zip(seconds["ours"][1:], seconds[key][1:])] for key in ("eager", "llama")}  # the first turn is a warm-up
        print(f"{family:12} {statistics.median(seconds['ours'][1:]):.3f} s, of eager's {spread(ratios['eager'])}, of our LLaMa's "
              f"{spread(ratios['llama'])}", flush=True)


if __name__ == "__main__":
    main()
