#!/usr/bin/env python3
"""Times a training step of captured transformers models on one rank with one thread against PyTorch's eager step of the same module
(forward, backward, fused AdamW), in turns. The captured LLaMa is also compared with the hand-split one: time of a step, and the most bytes that a
rank holds.

    PYTHONPATH=build/release/python benchmarks/captured_step.py [--models gpt2 qwen3 llama vit resnet] [--layers 8] [--rounds 7]
"""
import argparse
import copy
import statistics
import time

import torch
import transformers

import twobp

VOCABULARY, SEQUENCE = 4096, 256
MODELS = ("gpt2", "qwen3", "llama", "vit", "resnet")


def model_of(name: str, layers: int, width: int) -> torch.nn.Module:
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    rows = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1408,
            "max_position_embeddings": SEQUENCE, **common}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=SEQUENCE, n_embd=width, n_layer=layers, n_head=8, attn_pdrop=0.0, resid_pdrop=0.0,
                                         embd_pdrop=0.0, **common)
    elif name == "qwen3":
        config = transformers.Qwen3Config(head_dim=width // 8, **rows)
    elif name == "llama":
        config = transformers.LlamaConfig(**rows)
    elif name == "vit":
        config = transformers.ViTConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=8, intermediate_size=4 * width, num_labels=10)
        return transformers.ViTForImageClassification(config).train()
    else:
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10)).train()
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch_of(name: str, samples: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    if name in ("vit", "resnet"):
        size = 224 if name == "vit" else 128
        return {"pixel_values": torch.randn(samples, 3, size, size, generator=random), "labels": torch.randint(10, (samples,), generator=random)}
    ids = torch.randint(VOCABULARY, (samples, SEQUENCE), generator=random)
    return {"input_ids": ids, "labels": ids}


class Eager:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.item()


def hand_split(layers: int, width: int, batch: dict[str, torch.Tensor]) -> twobp.Trainer:
    """The same shape as the LLaMa above. It predicts every token of the batch; the other one shifts its labels itself."""
    model = {"type": "llama", "dim": width, "layers": layers, "heads": 8, "hidden": 1408, "vocab": VOCABULARY, "norm_eps": 1e-6}
    return twobp.Trainer(model=model, example=batch, ranks=1, micro_batches=1, threads=1, optimizer=twobp.AdamW(lr=1e-4))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def options_of(doc: str, models: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models), choices=models)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main():
    options = options_of(__doc__, MODELS)
    torch.set_num_threads(1)
    print(f"{options.layers} layers of width {options.width}, sequence {SEQUENCE}, {options.samples} samples, one thread")
    for name in options.models:
        model, batch = model_of(name, options.layers, options.width), batch_of(name, options.samples)
        begin = time.perf_counter()
        captured = twobp.Trainer(model, batch, ranks=1, micro_batches=1, threads=1, optimizer=twobp.AdamW(lr=1e-4))
        made = time.perf_counter() - begin
        contenders = {"eager": Eager(copy.deepcopy(model)), "captured": captured}
        if name == "llama":
            contenders["hand-split"] = hand_split(options.layers, options.width, batch)
        seconds = {key: [] for key in contenders}
        python, peaks = [], {}
        for turn in range(options.rounds + 1):
            for key, one in contenders.items():
                begin = time.perf_counter()
                result = one.step(batch)
                seconds[key].append(time.perf_counter() - begin)
                if key != "eager":
                    peaks[key] = result.peak_bytes[0]
                if key == "captured":
                    python.append(seconds[key][-1] - result.step_seconds)
        ratios = {key: [a / b for a, b in zip(seconds["captured"][1:], seconds[key][1:])] for key in contenders}  # the first turn is a warm-up
        print(f"{name:6} eager {statistics.median(seconds['eager'][1:]):.3f} s, captured {statistics.median(seconds['captured'][1:]):.3f} s, "
              f"captured / eager {spread(ratios['eager'])}, outside the step {1e3 * statistics.median(python[1:]):.2f} ms, "
              f"capture and set-up {made:.1f} s", flush=True)
        if name == "llama":
            print(f"       captured / hand-split {spread(ratios['hand-split'])}, peaks {peaks['captured'] / 2**20:.0f} and "
                  f"{peaks['hand-split'] / 2**20:.0f} MiB, {peaks['captured'] / peaks['hand-split']:.3f}", flush=True)


if __name__ == "__main__":
    main()
