#!/usr/bin/env python3
"""What a level order of packed documents brings (twobp/data/balance.h): the simulated step of 1F1B, with samples as they come and in that order, over
the batches of an epoch. The documents are paragraphs of real text, packed whole into samples. A micro-batch takes 1 - A of its time for any
documents, and A times its pairs of positions within documents over their mean; `twobp profile` shows A, attention's time without its projections
in a sample of one document. No machine's speed matters.

    benchmarks/balance.py [--text 'docs/*.md'] [--sequence 2048] [--attention 0.3] [--ranks 4]
"""
import argparse
import glob
import pathlib
import random
import statistics


def pack(lengths, sequence):
    """Best fit, as data.packing whole."""
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


def level(costs, replicas, micro_batches, size):
    samples = fill(costs, replicas * micro_batches, size)
    order = fill([sum(costs[i] for i in one) for one in samples], replicas, micro_batches)
    return [i for replica in order for one in replica for i in samples[one]]


def step(times, ranks):
    """The time of 1F1B whose micro-batches take times[m] on each rank: a third for F and the rest for I and W."""
    count = len(times)
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank, count)
        order = [("F", m) for m in range(ahead)]
        for m in range(count):
            order += [("B", m)] + ([("F", m + ahead)] if m + ahead < count else [])
        orders.append(order)
    ends, now, at = {}, [0.0] * ranks, [0] * ranks
    while any(at[rank] < len(orders[rank]) for rank in range(ranks)):
        for rank in range(ranks):
            if at[rank] == len(orders[rank]):
                continue
            op, m = orders[rank][at[rank]]
            before = {"F": ("F", m, rank - 1) if rank else None, "B": ("B", m, rank + 1) if rank + 1 < ranks else ("F", m, rank)}[op]
            if before is not None and before not in ends:
                continue
            now[rank] = max(now[rank], ends.get(before, 0)) + times[m] * (1 / 3 if op == "F" else 2 / 3)
            ends[op, m, rank] = now[rank]
            at[rank] += 1
    return max(now)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="docs/*.md")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--attention", type=float, default=0.3)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    texts = [pathlib.Path(name).read_text() for name in sorted(glob.glob(options.text))]
    lengths = [len(part.encode()) for text in texts for part in text.split("\n\n") if part.strip()]
    samples = pack([min(length, options.sequence) for length in lengths], options.sequence)
    costs = [sum(length ** 2 for length in sample) for sample in samples]
    random.Random(1).shuffle(costs)
    mean = statistics.mean(costs)
    print(f"{len(lengths)} documents in {len(costs)} samples; pairs of a sample {min(costs) / mean:.2f} to {max(costs) / mean:.2f} of the mean; "
          f"attention {options.attention}, {options.ranks} ranks")
    print(f"{'replicas':>8} {'micro-batches':>14} {'size':>5}   step as they come / level")
    for replicas, micro_batches, size in ((1, 8, 1), (1, 8, 4), (2, 8, 1), (4, 8, 1), (4, 8, 4)):
        batch = replicas * micro_batches * size
        sums = [0.0, 0.0]
        for begin in range(0, len(costs) - batch + 1, batch):
            of = costs[begin:begin + batch]
            for which, order in enumerate((list(range(batch)), level(of, replicas, micro_batches, size))):
                pairs = [sum(of[i] for i in order[at:at + size]) / size for at in range(0, batch, size)]
                times = [1 - options.attention + options.attention * one / mean for one in pairs]
                sums[which] += max(step(times[r * micro_batches:(r + 1) * micro_batches], options.ranks) for r in range(replicas))
        print(f"{replicas:8} {micro_batches:14} {size:5}   {sums[0] / sums[1]:.3f}" if sums[1] else f"{replicas:8} {micro_batches:14} {size:5}   too few samples")


if __name__ == "__main__":
    main()
