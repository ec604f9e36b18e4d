"""One run of twobp for compare.py with a captured module of transformers. It writes the same file as `twobp bench`. The time of a step is that of the
call in Python."""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

import work as work_module


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twobp", type=pathlib.Path, required=True, help="the program; the Python package is in the folder python beside it")
    work_module.add_options(parser)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--p2", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(args.twobp.parent / "python"))
    import twobp
    torch.set_num_threads(1)
    work = work_module.work_of(args)
    torch.manual_seed(1)
    inputs, labels = work_module.make_batch(work, args.micro_batches, seed=1)
    batch = {"input_ids": inputs, "targets": labels}
    example = {name: tensor[:work.micro_batch_size] for name, tensor in batch.items()}
    optimizer = twobp.AdamW(lr=work.optimizer.lr, weight_decay=work.optimizer.weight_decay)
    trainer = twobp.Trainer(work.module.whole(work).train(), example,
                            loss_fn=lambda output, batch: work_module.loss_function(output.logits, batch["targets"]), ranks=2, threads=1, pin=True,
                            schedule=args.schedule, p2=args.p2, micro_batches=args.micro_batches, optimizer=optimizer)
    seconds, idle, losses = [], [], []
    for _ in range(args.warmup + args.steps):
        begin = time.perf_counter()
        result = trainer.step(batch)
        seconds.append(time.perf_counter() - begin)
        idle.append(result.idle)
        losses.append(result.loss)
    row = {"step_seconds": statistics.median(seconds[args.warmup:]), "step_seconds_all": seconds[args.warmup:], "losses": losses,
           "idle_fraction": [statistics.median(column) for column in zip(*idle[args.warmup:])]}
    args.json.write_text(json.dumps({"rows": [row]}))


if __name__ == "__main__":
    main()
