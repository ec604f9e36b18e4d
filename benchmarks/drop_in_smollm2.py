#!/usr/bin/env python3
"""Fine-tunes SmolLM2-135M as examples/smollm2/finetune.json does, once by transformers.Trainer on one device and once by its drop-in on
two ranks, with equally many cores, and prints losses and times of steps side by side. First: examples/smollm2/get

    benchmarks/drop_in_smollm2.py [--steps 6]       both, each in a process of its own, and the table
    benchmarks/drop_in_smollm2.py --only drop-in    one of them; the table then has what the files of earlier runs hold
"""
import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "runs/drop_in_smollm2"
KINDS = ("transformers", "drop-in")
SEQUENCE, SAMPLES, MICRO_BATCHES, CORES = 256, 2, 4, 2
BAR = 1e-4


def run(kind: str, steps: int) -> None:
    import torch
    import transformers

    class Record(transformers.TrainerCallback):
        """Keeps the results after every step, so that a run that is cut short has some."""

        def __init__(self):
            self.ends = []

        def on_train_begin(self, *_, **__):
            self.begin = time.monotonic()

        def on_step_end(self, *_, **__):
            self.ends.append(time.monotonic())

        def on_log(self, args, state, *_, **__):
            lines = [line for line in state.log_history if "loss" in line]
            seconds = [end - start for start, end in zip([self.begin, *self.ends], self.ends)]
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{kind}.json").write_text(json.dumps({
                "losses": [line["loss"] for line in lines], "norms": [line["grad_norm"] for line in lines], "seconds": seconds,
                "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}))

    torch.set_num_threads(CORES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "data/smollm2-135m")
    ids = tokenizer((ROOT / "data/kjv.txt").read_text()[:1_000_000])["input_ids"]
    data = [{"input_ids": ids[i:i + SEQUENCE], "labels": ids[i:i + SEQUENCE]} for i in range(0, len(ids) - SEQUENCE + 1, SEQUENCE)]
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "data/smollm2-135m", dtype=torch.float32)
    arguments = transformers.TrainingArguments(
        str(RESULTS / kind), use_cpu=True, seed=1, max_steps=steps, per_device_train_batch_size=SAMPLES, gradient_accumulation_steps=MICRO_BATCHES,
        learning_rate=5e-5, weight_decay=0.01, warmup_steps=3, lr_scheduler_type="linear", max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True)
    if kind == "drop-in":
        from twobp.transformers import Trainer
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Record], ranks=CORES, schedule="1f1b", p2="fill")
    else:
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Record])
    trainer.train()


def table() -> None:
    results = {kind: json.loads((RESULTS / f"{kind}.json").read_text()) for kind in KINDS if (RESULTS / f"{kind}.json").exists()}
    print("step" + "".join(f"  {kind + ' loss':>18} {'norm':>9} {'s':>6}" for kind in results))
    for step in range(min(len(of["losses"]) for of in results.values())):
        print(f"{step + 1:4}" + "".join(f"  {of['losses'][step]:18.6f} {of['norms'][step]:9.5f} {of['seconds'][step]:6.2f}"
                                        for of in results.values()))
    for kind, of in results.items():  # the first one captures, or warms up
        print(f"{kind}: median {statistics.median(of['seconds'][1:]):.2f} s a step, the first {of['seconds'][0]:.2f} s; peak resident memory "
              f"{of['gib']:.2f} GiB")
    if len(results) == 2:
        theirs, ours = (results[kind] for kind in KINDS)
        worst = max(abs(one - other) for one, other in zip(theirs["losses"], ours["losses"]))
        print(f"largest difference of losses: {worst:.1e} (bar: {BAR:.0e})")
        print(f"a step of the drop-in takes {statistics.median(ours['seconds'][1:]) / statistics.median(theirs['seconds'][1:]):.2f} of the time")
        sys.exit(worst > BAR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        run(options.only, options.steps)
        return
    for kind in [options.only] if options.only else KINDS:
        subprocess.run([sys.executable, __file__, "--only", kind, "--steps", str(options.steps), "--in-this-process"], check=True)
    table()


if __name__ == "__main__":
    main()
