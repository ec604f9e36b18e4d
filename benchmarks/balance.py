#!/usr/bin/env python3
"""What the balanced order of packed documents brings (twobp/core/balanced_order.h), and how far predictions are from steps on real batches: those that take all
micro-batches as equal, and those of the planner, which simulates a typical batch (twobp/plan/cost_model.h). The documents are paragraphs of real text,
packed whole into samples. A micro-batch takes 1 - A of its time for any documents, and A times its pairs of positions within documents over their mean: a
third of that in F, two thirds in I. `twobp profile` shows A, attention's time without its projections in a sample of one document. Everything is simulated,
so no machine's speed matters.

    benchmarks/balance.py [--text 'docs/*.md'] [--sequence 2048] [--attention 0.3] [--ranks 4]

Needs the Python package: PYTHONPATH=build/release/python. With --program, real steps on two ranks instead: how idle ranks are, and were predicted to be.

    benchmarks/balance.py --program build/release/twobp
"""
import argparse
import glob
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

import twobp

BATCHES = 40


def pack(lengths, sequence):
    """Best fit, as --packing whole of scripts/texts_to_arrays.py."""
    samples = []
    for length in sorted(lengths, reverse=True):
        fits = [sample for sample in samples if sum(sample) + length <= sequence]
        max(fits, key=sum).append(length) if fits else samples.append([length])
    return samples


def fill(costs, bins, capacity):
    filled = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min((one for one in filled if len(one) < capacity), key=lambda one: sum(costs[i] for i in one)).append(item)
    return [sorted(one) for one in filled]


def costliest_in_the_middle(items, costs):
    rising = sorted(items, key=lambda i: costs[i])
    return rising[::2] + rising[1::2][::-1]


def balanced(costs, replicas, micro_batches, size):
    samples = fill(costs, replicas * micro_batches, size)
    sums = [sum(costs[i] for i in one) for one in samples]
    return [i for replica in fill(sums, replicas, micro_batches) for one in costliest_in_the_middle(replica, sums) for i in samples[one]]


class Steps:
    """Simulates steps whose micro-batches have these pairs, relative to the mean of all samples."""

    def __init__(self, name, p2, ranks, attention):
        self.name, self.p2, self.ranks, self.attention = name, p2, ranks, attention

    def __call__(self, pairs):
        schedule = twobp.schedule(self.name, ranks=self.ranks, micro_batches=len(pairs), p2=self.p2)
        part = self.ranks / schedule.stages
        products = 1 - self.attention
        return schedule.simulate([[part * (products + self.attention * one)] for one in pairs], [[part * (products + 2 * self.attention * one)] for one in pairs],
                                 part * products, p2_units=4)


def pairs_of(costs, order, size):
    return [sum(costs[i] for i in order[at:at + size]) / size for at in range(0, len(order), size)]


def over_replicas(costs, options):
    print(f"\n1F1B without 2BP on {options.ranks} ranks, over the batches of an epoch\n{'replicas':>8} {'micro-batches':>14} {'size':>5}   step as they come / balanced")
    steps = Steps("1f1b", "off", options.ranks, options.attention)
    for replicas, micro_batches, size in ((1, 8, 1), (1, 8, 4), (2, 8, 1), (4, 8, 1), (4, 8, 4)):
        batch = replicas * micro_batches * size
        sums = [0.0, 0.0]
        for begin in range(0, len(costs) - batch + 1, batch):
            of = costs[begin:begin + batch]
            for which, order in enumerate((list(range(batch)), balanced(of, replicas, micro_batches, size))):
                pairs = pairs_of(of, order, size)
                sums[which] += max(steps(pairs[r * micro_batches:(r + 1) * micro_batches]).step for r in range(replicas))
        print(f"{replicas:8} {micro_batches:14} {size:5}   {sums[0] / sums[1]:.3f}" if sums[1] else f"{replicas:8} {micro_batches:14} {size:5}   too few samples")


def means_of_parts(values, parts):
    """As core/balanced_order.h."""
    length = len(values) / parts
    ends = [(length * part, length * (part + 1)) for part in range(parts)]
    return [sum(values[i] * max(0, min(i + 1, end) - max(i, begin)) for i in range(int(begin), min(len(values), int(end) + 1))) / length for begin, end in ends]


def against_predictions(costs, options):
    parts = means_of_parts(sorted(costs), 64)
    print(f"\nThe mean step of {BATCHES} batches drawn at random: as they come and balanced, over that of equal micro-batches; balanced, over that of a typical "
          f"batch; idle, balanced less typical\n{'schedule':12} {'ranks':>5} {'size':>4}   {'M = N':28}{'M = 2 N':28}M = 4 N")
    for name, p2 in (("1f1b", "off"), ("1f1b", "fill"), ("zb-h1", "placed"), ("zb-v", "fill")):
        for ranks in (2, 4, 8):
            for size in (1, 2, 4):
                cells = []
                for micro_batches in (ranks, 2 * ranks, 4 * ranks):
                    draw = random.Random(1)
                    steps = Steps(name, p2, ranks, options.attention)
                    samples = means_of_parts(parts, micro_batches * size)
                    typical = steps(pairs_of(samples, balanced(samples, 1, micro_batches, size), size))
                    sums, idle = [0.0, 0.0, 0.0], 0
                    for _ in range(BATCHES):
                        of = draw.choices(costs, k=micro_batches * size)
                        orders = pairs_of(of, list(range(len(of))), size), pairs_of(of, balanced(of, 1, micro_batches, size), size)
                        done = [steps(pairs) for pairs in (*orders, [1.0] * micro_batches)]
                        sums = [a + one.step for a, one in zip(sums, done)]
                        idle += (done[1].bubble - typical.bubble) / BATCHES
                    cells.append(f"{sums[0] / sums[2]:.3f} {sums[1] / sums[2]:.3f} {sums[1] / BATCHES / typical.step:.3f}; {idle:+.3f}")
                print(f"{name + '@' + p2:12} {ranks:5} {size:4}   {''.join(f'{cell:28}' for cell in cells)}".rstrip())


def measure(documents, options):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "documents.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        subprocess.run([sys.executable, pathlib.Path(__file__).resolve().parents[1] / "scripts/texts_to_arrays.py", folder / "documents.jsonl",
                        folder / "arrays", "--sequence", str(options.sequence)], check=True)
        settings = {"model.type": "llama", "model.dim": 256, "model.layers": 8, "model.heads": 8, "model.hidden": 704, "data.arrays": folder / "arrays",
                    "data.sequence": options.sequence, "data.held_out": 0, "pipeline.ranks": 2, "pipeline.micro_batch_size": 1}
        command = [options.program.resolve(), "bench", "--schedules", "1f1b,zb-v", "--p2", "off,fill", "--micro-batches", "2,4,8", "--json", folder / "rows.json",
                   "--set", *(f"{key}={value}" for key, value in settings.items())]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        rows = json.loads((folder / "rows.json").read_text())["rows"]
    print(f"{'schedule':12} {'M':>2}  idle  predicted (medians of {len(rows[0]['step_seconds_all'])} steps, means of the ranks)")
    for row in rows:
        idle, predicted = statistics.mean(row["idle_fraction"]), statistics.mean(row["idle_predicted"])
        print(f"{row['schedule'] + '@' + row['p2']:12} {row['micro_batches']:2}  {idle:.3f} {predicted:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="docs/*.md")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--attention", type=float, default=0.3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--program", type=pathlib.Path)
    options = parser.parse_args()
    texts = [pathlib.Path(name).read_text() for name in sorted(glob.glob(options.text))]
    documents = [part for text in texts for part in text.split("\n\n") if part.strip()]
    if options.program:
        measure([one for one in documents if len(one.encode()) <= options.sequence], options)
        return
    lengths = [len(part.encode()) for part in documents]
    samples = pack([min(length, options.sequence) for length in lengths], options.sequence)
    pairs = [sum(length ** 2 for length in sample) for sample in samples]
    costs = [one / statistics.mean(pairs) for one in pairs]
    random.Random(1).shuffle(costs)
    print(f"{len(lengths)} documents in {len(costs)} samples of {options.sequence}; pairs of a sample {min(costs):.2f} to {max(costs):.2f} of the mean, "
          f"deviation {statistics.pstdev(costs):.2f}; attention {options.attention}")
    over_replicas(costs, options)
    against_predictions(costs, options)


if __name__ == "__main__":
    main()
