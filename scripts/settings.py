#!/usr/bin/env python3
"""Writes docs/settings.md. Keys, types, defaults and meanings come from the program, whose code has them once, next to each key. What a key
is good for, where a measurement shows it, comes from MEASURED below.

    scripts/settings.py [--program build/release/twobp] [--out docs/settings.md]
"""
import argparse
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]
TITLES = {"pipeline": "How ranks share the work ([schedules.md](schedules.md), [memory.md](memory.md), [distributed.md](distributed.md)).",
          "train": "The run ([training.md](training.md)).", "optimizer": "The update ([optimizers.md](optimizers.md)).",
          "model": "Architecture and start ([decoders.md](decoders.md), [training.md](training.md)).", "data": "The source of samples ([data.md](data.md)).",
          "save": "Files that a run writes ([training.md](training.md))."}
NAMES = {"bert": "BERT", "mamba": "Mamba", "resnet": "ResNet", "mlp": "MLP", "captured": "captured models"}
MOST_CHOICES, LONGEST = 6, 10  # longer lists and details are in --help

INTRODUCTION = """# Settings

Every key with its default, made from the program by `scripts/settings.py`. `twobp train --help` also prints types, units, bounds, the other defaults of some models, and
details. A key that nothing reads, such as one of another model type, is an error."""

# key: what a measurement shows. Every setting that only tunes speed or memory has an entry.
MEASURED = {
    "pipeline.schedule": "LLaMA, M = 2: 1F1B with `fill` is 1.26x and ZB-V 1.35x as fast as 1F1B without 2BP ([section 1](results.md#1-throughput))",
    "pipeline.slices": "LLaMA, 2048 positions, M = 1: 8 slices are 1.67x (`off`) and 1.53x (`fill`) as fast ([more](long_sequences.md#measurements))",
    "pipeline.p2": "LLaMA, 1F1B, M = 2: `fill` is 1.26x as fast as `off`; in zero-bubble schedules 1.03x to 1.12x as fast as `placed` "
                   "(`twobp bench configs/bench_llama.json --schedules zb-h1,zb-v --p2 placed,fill --micro-batches 4 --repeat 6 --steps 1`, and `bench_bert.json`, beside other work)",
    "pipeline.p2_batching": "`concat` over `loop`: ResNet 1.026x to 1.049x, LLaMA 0.968x to 0.978x ([section 5](results.md#5-concatenation))",
    "pipeline.p2_order": "slow link: a step waits 8.2 ms for sums with `bucket`, 35.4 ms with `oldest` ([section 9](results.md#9-data-parallelism))",
    "pipeline.run_ahead": "on 4 to 32 emulated ranks, ZB-H2 gains 1.12x to 1.15x, ZB-V 1.06x to 1.08x, 1F1B nothing; two ranks: nothing ([section 14](results.md#14-steps-without-a-barrier))",
    "pipeline.memory_cap": "LLaMA, 1F1B, M = 4: peak 1.37x without a cap, 1.00x with `auto`, at 0.97 (0.97 to 1.01) of the throughput ([section 2](results.md#2-peak-memory))",
    "pipeline.recompute": "LLaMA, 1F1B, p2 `off`: `activations` keeps 29 MiB instead of 146 and takes 1.31x as long ([section 7](results.md#7-intermediate-derivative-checkpointing))",
    "pipeline.bucket": "slow link: a step waits 8.8 ms with a bucket for each of 8 layers, 64.3 ms with one for all "
                       "(`benchmarks/data_parallel/exposed_communication --schedules 1f1b --milliseconds 32 --links 2 --bucket-layers 1`, or `8`)",
    "pipeline.device": "an H100, W in a stream of its own: 0.65 of PyTorch's time ([section 12](results.md#12-four-stages-on-one-gpu))",
    "pipeline.graphs": "likewise: 0.97 of the time without ([section 12](results.md#12-four-stages-on-one-gpu))",
    "pipeline.pin": "turn it off for several runs on a machine: two at once take 2.02x (1.97 to 2.02) as long with it; alone it changes nothing (1.006, 0.962 to 1.050)",
    "pipeline.sums": "`nccl`, and `gpu_parts` against none: not measured",
    "pipeline.stash": "half the bytes of the stash ([losses](memory.md#streamed-gradients))",
    "train.precision": "loss after 200 steps: fp32 1.9607, bf16 1.9566, fp16 1.9613 ([output](../benchmarks/results/precision_loss.txt)). bf16 on a CPU without its instructions: 0.87x the speed",
    "optimizer.shard": "two replicas of LLaMA: AdamW's state takes 114 instead of 228 MiB on each, the peak 488 instead of 598 MiB",
    "model.lora": "SmolLM2-135M: 0.705 of the time of training all weights, 1982 instead of 4154 MiB ([lora.txt](../benchmarks/results/lora.txt))",
    "data.workers": "one thread: ranks wait 0.004 % of a step for text ([section 10](results.md#10-real-data))",
    "save.every": "a checkpoint every 6 steps: a step takes 1.017x as long ([checkpoint.txt](../benchmarks/results/checkpoint.txt))",
}


def rows_of(program):
    """section -> key -> (type, default, meaning, models) as `train --help` prints them; the first of several alternatives."""
    text = subprocess.run([program, "train", "--help"], check=True, capture_output=True, text=True).stdout.partition("Configuration keys:\n")[2]
    sections = {}
    for line in text.splitlines():
        if not re.match(r"\w+\.\w+ ", line):
            continue
        name, kind, default, _, meaning = re.split(r" {2,}", line.rstrip(), maxsplit=4)
        section, key = name.split(".")
        models = ""
        if section == "model":
            found = re.match(r"((?:decoders|[a-z0-9_]+)(?:(?:, | except | and )[a-z0-9_]+)*): ", meaning)
            if found:
                models, meaning = found[1], meaning[found.end():]
        sections.setdefault(section, {}).setdefault(key, []).append((kind, default, meaning, models))
    return sections


def short(meaning, default):
    """The meaning up to its details, what the default means, and the choices if they are few."""
    choices = re.search(r" \(one of ([^()]*)\)$", meaning)
    text = re.sub(r" \((?:one of|from|above|at least|at most) [^()]*\)$", "", meaning)
    whole = text.split("; ")[0]
    first, *details = re.sub(r" \((?!\*)[^()]*\)", "", text).split("; ")
    text = "; ".join([first, *(one for one in details if one.startswith((f"{default}:", f"{default.strip(chr(34))}:", f"{default.removesuffix('.0')}:")) and one[0] != ":" and len(one.split()) <= LONGEST)])
    if choices and choices[1].count(",") < MOST_CHOICES and not all(re.search(rf"\b{re.escape(one)}\b", whole) for one in choices[1].split(", ")):
        text += f" ({choices[1]})"
    return text.replace("*", "\\*")


def models_text(alternatives):
    """Which models have a key: families of decoders are not named one by one."""
    decoders, others = [], []
    for *_, models in alternatives:
        for name in re.split(r", ", models):
            if name in NAMES:
                others.append(NAMES[name])
            elif name:
                decoders.append("decoders" if name == "decoders" else "some decoders")
    named = ["decoders"] if "decoders" in decoders else decoders[:1]
    return ", ".join(dict.fromkeys(named + others))


def page(program):
    parts = [INTRODUCTION]
    sections = rows_of(program)
    for section, title in TITLES.items():
        groups = {}  # of models -> lines
        for key, alternatives in sections.pop(section).items():
            kind, default, meaning, _ = alternatives[0]
            kind = "number " if kind.endswith(("number", "numbers")) else ""  # other defaults show their type
            line = f"- `{key}` ({kind}`{default}`): {short(meaning, default)}"
            groups.setdefault(models_text(alternatives), []).append(line)
        parts.append(f"## {section}\n\n{title}")
        parts += [(f"{of[0].upper()}{of[1:]}:\n\n" if of else "") + "\n".join(lines) for of, lines in groups.items()]
        measured = [f"- `{name.split('.')[1]}`: {text}" for name, text in MEASURED.items() if name.startswith(f"{section}.")]
        parts += ["Measured:\n\n" + "\n".join(measured)] if measured else []
    if sections:
        raise SystemExit(f"scripts/settings.py has no title for {', '.join(sections)}")
    return "\n\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=os.environ.get("TWOBP_PROGRAM", ROOT / "build/release/twobp"))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/settings.md")
    arguments = parser.parse_args()
    arguments.out.write_text(page(arguments.program))


if __name__ == "__main__":
    main()
