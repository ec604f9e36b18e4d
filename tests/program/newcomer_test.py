#!/usr/bin/env python3
"""Does what a new user does: makes a tokenizer from own texts, writes a schedule by hand, kills and resumes a training, and
generates text from the trained model. A run that was never killed gives the same weights to the bit. Usage: `newcomer_test.py PROGRAM`. Exit code 77: a Python package is missing."""
import argparse
import importlib.util
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

for package in ("torch", "transformers", "tokenizers"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

STEPS, KILLED_AFTER, NEW_TOKENS = 150, 20, 24
# There are two ranks, two stages and three micro-batches. Rank 1 delays its W, rank 0 does not.
SCHEDULE = """0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
"""
WORDS = "the sea and a small boat went out at night under stars while many birds slept near old stones".split()


def write_texts(folder):
    dice = random.Random(1)
    (folder / "texts").mkdir()
    for name in ("one", "two", "three"):
        lines = (" ".join(dice.choice(WORDS) for _ in range(12)) + ".\n" for _ in range(120))
        (folder / f"texts/{name}.txt").write_text("".join(lines))


def make_tokenizer(folder):
    """Returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(path) for path in sorted(folder.glob("texts/*"))],
                    trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def train_command(program, folder, name, vocab, more=()):
    settings = [f"model.vocab={vocab}", "model.dim=32", "model.layers=2", "model.heads=2", "data.sequence=24",
                f"data.text={folder}/texts/*", f"data.tokenizer={folder}/tokenizer.json", f"data.cache={folder}/cache",
                "data.held_out=0", f"pipeline.schedule={folder}/mine.csv", "pipeline.micro_batch_size=2", "optimizer.lr=0.01",
                f"train.steps={STEPS}", f"save.model={folder}/{name}", f"save.checkpoints={folder}/{name}-checkpoints",
                "save.every=4"]
    return [program, "train", "--metrics", f"{folder}/{name}.jsonl", *more, "--set", *settings]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def kill_in_training(command, metrics):
    """Starts the command and kills it when the metrics have KILLED_AFTER lines."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < KILLED_AFTER):
        time.sleep(0.002)
    process.kill()
    if process.wait() != -9:
        sys.exit(f"{command}: ended before it was killed, exit code {process.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    program = parser.parse_args().program
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_texts(folder)
        (folder / "mine.csv").write_text(SCHEDULE)
        vocab = make_tokenizer(folder)
        run(train_command(program, folder, "whole", vocab))
        command = train_command(program, folder, "killed", vocab)
        kill_in_training(command, folder / "killed.jsonl")
        if "resumed after step" not in run(train_command(program, folder, "killed", vocab, ["--resume"])):
            sys.exit("the killed run began anew")
        models_of = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
        if models_of[0] != models_of[1]:
            sys.exit("the killed and resumed run has other weights than the whole one")
        losses = [json.loads(line)["loss"] for line in (folder / "whole.jsonl").read_text().splitlines()]
        if not losses[-1] < 0.7 * losses[0]:
            sys.exit(f"the model has not learnt: its loss went from {losses[0]} to {losses[-1]}")
        prompt = "the sea and"
        generate = pathlib.Path(__file__).resolve().parents[2] / "scripts/generate.py"
        text = run([sys.executable, generate, folder / "killed", "--prompt", prompt, "--tokens", str(NEW_TOKENS), "--temperature", "0"])
        if not text.startswith(prompt) or len(text) < len(prompt) + NEW_TOKENS:
            sys.exit(f"generate.py does not continue the prompt: {text!r}")

if __name__ == "__main__":
    main()
