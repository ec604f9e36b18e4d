"""Muon beside AdamW: the time of the update at a step's end, and the held-out loss after equal time on real text.

    muon.py PROGRAM time [--repeat 5] [--config configs/bench_llama.json] [--micro-batches 8] [--micro-batch-size 4]
                         [--precision fp32]
    muon.py PROGRAM loss [--seconds 300] [--lrs 1e-3,3e-3] [--text 'docs/*.md'] [--dim 256]

`time` takes turns between the two. Muon's update costs the same for any batch, so its share of a step falls with the tokens of a step. `loss` gives each the same seconds of training at each learning rate, and compares the best: text is read as
bytes, and a tenth of it is held out."""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("1f1b", "zb-v")


def run(options, *arguments):
    subprocess.run([options.program.resolve(), *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def bench(options, folder, optimizer):
    """The rows of both schedules."""
    out = folder / "rows.json"
    run(options, "bench", options.config, "--schedules", "1f1b@fill,zb-v@placed", "--repeat", 1, "--steps", options.steps, "--json", out,
        "--micro-batches", options.micro_batches, "--set", f"optimizer.type={optimizer}", f"pipeline.micro_batch_size={options.micro_batch_size}",
        f"train.precision={options.precision}")
    return json.loads(out.read_text())["rows"]


def time(options, folder):
    rows = {}
    for _ in range(options.repeat):
        for optimizer in OPTIMIZERS:
            for row in bench(options, folder, optimizer):
                rows.setdefault((row["schedule"].partition("@")[0], optimizer), []).append(row)
    tokens = next(iter(rows.values()))[0]
    print(f"{tokens['tokens_per_second'] * tokens['step_seconds']:.0f} tokens a step")
    print(f"{'schedule':<10}{'optimizer':<11}{'step ms':>9}{'(min - max)':>20}   update ms by rank     slowest / step")
    for schedule in SCHEDULES:
        for optimizer in OPTIMIZERS:
            of = rows[schedule, optimizer]
            steps = [1e3 * row["step_seconds"] for row in of]
            updates = [1e3 * statistics.median(times) for times in zip(*(row["optimizer_seconds"] for row in of))]
            step = statistics.median(steps)
            print(f"{schedule:<10}{optimizer:<11}{step:>9.1f}{f'({min(steps):.1f} - {max(steps):.1f})':>20}   "
                  f"{'  '.join(f'{update:8.1f}' for update in updates):<22}{max(updates) / step:>8.1%}")


def train(options, folder, optimizer, lr):
    """(seconds, held-out loss) at each evaluation. The seconds are those of the steps alone."""
    metrics = folder / "metrics.jsonl"
    settings = {
        "model.dim": options.dim, "model.layers": 4, "model.heads": 4, "model.vocab": 256, "data.text": options.text, "data.sequence": 256,
        "data.held_out": 0.1, "pipeline.ranks": 2, "pipeline.micro_batches": 4, "pipeline.micro_batch_size": 4, "pipeline.memory_cap": "auto",
        "optimizer.type": optimizer, "optimizer.lr": lr, "optimizer.weight_decay": 0.1, "optimizer.warmup": 10, "optimizer.schedule": "constant",
        "train.clip_norm": 1, "train.eval_every": 10, "train.eval_batches": 8}
    arguments = [piece for key, value in settings.items() for piece in ("--set", f"{key}={value}")]

    def steps(count):
        run(options, "train", "--metrics", metrics, *arguments, "--set", f"train.steps={count}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    trial = statistics.median(step["step_seconds"] for step in steps(10)[3:])
    points, seconds = [], 0.0
    for step in steps(max(10, round(options.seconds / trial / 10) * 10)):
        seconds += step["step_seconds"]
        if "held_out_loss" in step:
            points.append((seconds, step["held_out_loss"]))
    return points


def loss(options, folder):
    shares = (0.25, 0.5, 0.75, 1)
    print(f"{'optimizer':<11}{'lr':>8}   held-out loss after " + "".join(f"{share * options.seconds:>9.0f} s" for share in shares))
    for optimizer in OPTIMIZERS:
        for lr in options.lrs.split(","):
            points = train(options, folder, optimizer, lr)
            # The last evaluation by then; the first one if there is none.
            losses = [[point[1] for point in points if point[0] <= share * options.seconds * 1.02] or [points[0][1]] for share in shares]
            print(f"{optimizer:<11}{lr:>8}{'':<23}" + "".join(f"{by[-1]:>11.4f}" for by in losses), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("what", choices=("time", "loss"))
    parser.add_argument("--config", default="configs/bench_llama.json")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--lrs", default="1e-3,3e-3")
    parser.add_argument("--text", default="docs/*.md")
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"time": time, "loss": loss}[options.what](options, pathlib.Path(folder))


if __name__ == "__main__":
    main()
