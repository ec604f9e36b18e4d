#!/usr/bin/env python3
"""Times steps of TRL's SFTTrainer and DPOTrainer on one device, and of the same trainers in a pipeline of two ranks, with equally many
threads, step by step in turn. `reference` compares DPO, whose reference model computes F alone, with SFT on as many tokens, and `adapters` the same
with LoRA of rank 8, whose reference is the model without it. The model is a LLaMA of dim 512 with 8 layers and random weights.

    benchmarks/trl.py [--only sft dpo reference adapters] [--steps 8] [--memory-cap 1.02x]
"""
import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time

sys.path.pop(0)  # this folder, in which this file has the name of TRL
os.environ.setdefault("HF_HUB_OFFLINE", "1")
CORES, SAMPLES, MICRO_BATCHES, LENGTH, WORDS = 2, 2, 4, 128, 1000
FIRST = 2  # steps that are not timed: the first captures


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def model():
    import torch
    import transformers
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS + 4, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def samples(kind: str, count: int) -> list[dict]:
    rng = random.Random(0)

    def words(number):
        return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(number))

    half = LENGTH // 2
    if kind == "sft":
        return [{"prompt": words(half), "completion": " " + words(half - 1)} for _ in range(count)]
    return [{"prompt": words(half), "chosen": " " + words(half - 1), "rejected": " " + words(half - 1)} for _ in range(count)]


class Turns:
    """Lets two threads run in turn, a step each. Nothing of the other runs meanwhile: accelerate has one state for a process."""

    def __init__(self):
        self.turn, self.changed = 0, threading.Condition()

    def wait(self, number: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == number)

    def give(self, number: int) -> None:
        with self.changed:
            self.turn = number
            self.changed.notify_all()


def race(trainers: list[tuple[str, bool, int]], micro_batches: int, steps: int, lora: bool = False) -> list[list[float]]:
    """Trains by two trainers in turn, each given by its kind, whether it is in a pipeline, and the samples of a micro-batch. Returns the seconds
    of the timed steps of each, and their losses."""
    import datasets
    import peft
    import torch
    import transformers
    import trl

    import twobp.trl

    class Timed(transformers.TrainerCallback):
        def __init__(self, number: int, turns: Turns):
            self.number, self.turns, self.seconds = number, turns, []

        def on_step_begin(self, *_, **__):
            self.begin = time.monotonic()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.monotonic() - self.begin)
            self.turns.give(1 - self.number)
            self.turns.wait(self.number)

    configs, kinds = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}, {"sft": "SFTTrainer", "dpo": "DPOTrainer"}
    turns, made, timed = Turns(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, pipelined, size) in enumerate(trainers):
            data = datasets.Dataset.from_list(samples(kind, size * micro_batches * steps))
            arguments = configs[kind](folder, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=steps,
                                      logging_steps=1, gradient_checkpointing=False, max_length=LENGTH + 2, per_device_train_batch_size=size,
                                      gradient_accumulation_steps=micro_batches, learning_rate=1e-5)
            timed.append(Timed(number, turns))
            own = {"ranks": CORES, "schedule": "1f1b", "p2": "fill", "memory_cap": given.memory_cap} if pipelined else {}
            if lora:
                own["peft_config"] = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
            elif kind == "dpo":
                own["ref_model"] = model()
            place = twobp.trl if pipelined else trl
            made.append(getattr(place, kinds[kind])(model(), args=arguments, train_dataset=data, processing_class=tokenizer(),
                                                    callbacks=[timed[-1]], **own))
            made[-1].remove_callback(transformers.PrinterCallback)

        def train(number):
            turns.wait(number)
            torch.set_num_threads(CORES)
            try:
                made[number].train()
            finally:
                turns.give(1 - number)

        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    losses = [[one["loss"] for one in trainer.state.log_history if "loss" in one] for trainer in made]
    if any(len(one) != steps for one in losses):
        sys.exit("a trainer stopped")
    for trainer, (kind, pipelined, _) in zip(made, trainers):
        if pipelined and trainer.pipeline is not None:
            print(f"{kind}: layers of the stages {'+'.join(map(str, trainer.pipeline.split))}, {trainer.pipeline._native.forwards_ahead} F ahead", flush=True)
    return [*(one.seconds[FIRST:] for one in timed), *losses]


def line(names: tuple[str, str], seconds: list[list[float]]) -> str:
    ratios = [b / a for a, b in zip(*seconds)]
    first, second = map(statistics.median, seconds)
    return (f"{names[0]} {first:.3f} s a step, {names[1]} {second:.3f} s, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})")


def compare(kind: str, steps: int) -> None:
    *seconds, theirs, ours = race([(kind, False, SAMPLES), (kind, True, SAMPLES)], MICRO_BATCHES, steps)
    worst = max(abs(a - b) / abs(a) for a, b in zip(theirs, ours))
    print(f"{kind}  {line(('TRL', 'pipeline'), seconds)}, losses differ by {worst:.1e}", flush=True)


def reference(pipelined: bool, lora: bool, steps: int) -> None:
    seconds = race([("sft", pipelined, 2 * SAMPLES), ("dpo", pipelined, SAMPLES)], CORES, steps, lora)[:2]  # a pair is two sequences
    print(f"{'pipeline' if pipelined else 'TRL'}{', LoRA' if lora else ''}, M = {CORES}  {line(('SFT', 'DPO'), seconds)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["sft", "dpo", "reference", "adapters"], default=["sft", "dpo", "reference"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory-cap", default="auto", help="of the pipelines; see docs/memory.md")
    given = parser.parse_args()
    for name in given.only:
        if name in ("reference", "adapters"):
            for pipelined in (True, False):
                reference(pipelined, name == "adapters", given.steps)
        else:
            compare(name, given.steps)
