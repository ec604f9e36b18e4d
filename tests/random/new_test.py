#!/usr/bin/env python3
"""Makes random new models of every type, trains them for three steps, and saves them. transformers must load each, and
find the same loss on the held-out samples. What a file of the type cannot say must be refused before training.

    tests/random/new_test.py PROGRAM                   a case of each model type
    tests/random/new_test.py PROGRAM --count 200       many
    tests/random/new_test.py PROGRAM --case 17         one of them again, with its settings

Exit code 77: a Python package is missing.
"""
import importlib.util
import json
import pathlib
import random
import subprocess
import sys
import tempfile

for package in ("torch", "transformers"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)
import numpy
import torch
import transformers
from command_line import options_of

TYPES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma", "gemma2", "gemma3_text", "smollm3", "gpt2", "gpt_neox", "granite",
         "stablelm", "starcoder2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2", "deepseek_v3",
         "bert", "mamba"]
VOCAB, SEQUENCE, SAMPLES, HELD_OUT = 40, 12, 24, 8
TOLERANCE = 2e-5  # of losses of about 4
# Settings of which a model type has some. The program says which it does not have.
SETTINGS = ["tied=true", "tied=false", "windows=[4,0]", "windows=[5]", "windows=[0]", "attention_scale=0.3", "attention_scale=0.25",
            "embedding_scale=2", "activation=gelu", "activation=gelu_tanh", "activation=silu", "attention_bias=true",
            "attention_bias=false", "mlp_bias=true", "kv_heads=1", "head_dim=16", "rope_theta=100", "rope_scaling=linear rope_factor=2",
            "rope_scaling=yarn rope_factor=4 rope_original_positions=8", "rope_scaling=longrope rope_factor=2 rope_original_positions=8 "
            "rope_short=[1,1,1,1,1,1,1,1] rope_long=[2,2,2,2,2,2,2,2]", "rope_part=0.5", "rope_layers=[1,0]", "rope_local_theta=50",
            "pad_token=5", "logit_cap=3", "attention_cap=3", "residual_scale=0.5", "logit_scale=0.5", "parallel=false", "norm_eps=0.01",
            "hidden=20", "state=3", "conv_kernel=3", "expand=1", "dt_rank=2", "token_types=1", "experts=4", "experts_per_token=1", "normalized_routing=true"]


def settings_of(kind, dice):
    out = ["model.layers=2"]
    if kind == "mamba":
        return [*out, "model.dim=24", *(" ".join(f"model.{part}" for part in one.split()) for one in dice.sample(SETTINGS, 3))]
    # The rotary embedding turns pairs, in some families of a quarter of a head.
    out += ["model.dim=32", "model.heads=2" if kind in ("stablelm", "gpt_neox") else dice.choice(["model.heads=2", "model.heads=4"])]
    if kind in ("gpt2", "bert"):
        out.append("model.positions=32")
    return out + [" ".join(f"model.{part}" for part in one.split()) for one in dice.sample(SETTINGS, 6)]


def train(program, folder, kind, settings):
    """Drops settings that the type does not have, or that do not fit it, one after the other with those that belong to it. Returns
    the last process and its settings."""
    while True:
        command = [program, "train", "--metrics", f"{folder}/metrics.jsonl", "--set", f"model.type={kind}", f"model.vocab={VOCAB}",
                   f"data.arrays={folder}/data", f"data.sequence={SEQUENCE}", "data.shuffle=false", f"data.held_out={HELD_OUT / SAMPLES}",
                   "train.steps=3", "train.eval_batches=0", "optimizer.lr=0.05", "pipeline.ranks=1", "pipeline.micro_batches=2",
                   "pipeline.micro_batch_size=2", "pipeline.pin=false", f"save.model={folder}/out", *" ".join(settings).split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return done, settings
        # The names of settings in the message, the offending one first.
        named = [(done.stderr.find(part.split("=")[0]), one) for one in settings for part in one.split()
                 if part.split("=")[0] not in ("model.dim", "model.heads", "model.layers", "model.positions")]
        wrong = [(place, one) for place, one in named if place >= 0]
        if not wrong:
            return done, settings
        settings = [one for one in settings if one != min(wrong)[1]]


def loss_of(folder, kind, ids):
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder).eval()
    targets = torch.from_numpy(ids)
    with torch.no_grad():
        logits = model(input_ids=targets).logits
    if kind != "bert":
        logits, targets = logits[:, :-1], targets[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def run_case(number, seed, program, verbose):
    """What is wrong, or None."""
    dice = random.Random(f"{seed} {number}")
    kind = TYPES[number % len(TYPES)]
    ids = numpy.random.default_rng(number).integers(0, VOCAB, (SAMPLES, SEQUENCE), dtype=numpy.int64)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "data").mkdir()
        numpy.save(folder / "data/input_ids.npy", ids)
        numpy.save(folder / "data/labels.npy", ids)
        done, settings = train(program, folder, kind, settings_of(kind, dice))
        if verbose:
            print(kind, *settings)
        if done.returncode != 0:
            return f"{settings}: exit code {done.returncode}: {done.stderr.strip()}"
        ours = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["held_out_loss"]
        try:
            theirs = loss_of(folder / "out", kind, ids[-HELD_OUT:])
        except Exception as error:  # of many kinds
            return f"{settings}: transformers: {str(error)[:300]}"
    return None if abs(ours - theirs) <= TOLERANCE * ours else f"{settings}: loss {ours}, in transformers {theirs}"


def main():
    options = options_of(__doc__, len(TYPES), "cases; the model types take turns")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    for number in options.numbers:
        wrong = run_case(number, options.seed, options.program, options.case is not None)
        if wrong:
            failed += 1
            print(f"case {number} of seed {options.seed}, {TYPES[number % len(TYPES)]}: {wrong}", flush=True)
    print(f"{len(options.numbers)} cases, {failed} differ")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
