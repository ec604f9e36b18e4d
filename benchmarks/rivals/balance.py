"""Cuts a model into stages by the measured costs of its layers.

    python balance.py --config configs/bench_resnet.json        prints the seconds and shape of every layer as JSON
"""
import argparse
import itertools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import work as work_module

REPEATS = 5


def measure_layers(work, seed=1):
    """For every unit: the median seconds of forward and backward of one micro-batch, and the shape and stride of its output. Units of one kind are
    timed once."""
    units = work.module.units(work)
    x, labels = work_module.make_batch(work, 1, seed)
    measured, layers = {}, []
    for index, unit in enumerate(units):
        last = index == len(units) - 1
        module = work_module.build_stage(units, index, index + 1, seed)
        if unit.kind not in measured:
            times = []
            for _ in range(REPEATS + 1):
                inputs = x.detach().requires_grad_(x.is_floating_point() and index > 0)
                begin = time.perf_counter()
                outputs = module(inputs, labels)
                if last:
                    work_module.loss_function(outputs, labels).backward()
                else:
                    outputs.backward(torch.ones_like(outputs))
                times.append(time.perf_counter() - begin)
            measured[unit.kind] = statistics.median(times[1:])
        with torch.no_grad():
            x = module(x, labels)
        layers.append({"kind": unit.kind, "seconds": measured[unit.kind], "shape": x.shape, "stride": x.stride()})
    return layers


def balanced_cuts(costs, stages_by_rank):
    """The units where stages begin, and the end. The largest stage and the busiest rank have equal weight. Among equals, even stages win."""
    parts = sum(len(stages) for stages in stages_by_rank)
    if len(costs) < parts:
        sys.exit(f"rivals: {len(costs)} layers do not fill {parts} stages; raise model.layers")
    start = [0, *itertools.accumulate(costs)]

    def unevenness(cuts):
        stage = [start[end] - start[begin] for begin, end in itertools.pairwise(cuts)]
        rank = [sum(stage[i] for i in stages) / len(stages) for stages in stages_by_rank]
        return max(stage) + max(rank), sum(cost**2 for cost in stage)

    inner = itertools.combinations(range(1, len(costs)), parts - 1)
    return min(([0, *cuts, len(costs)] for cuts in inner), key=unevenness)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work_module.add_options(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure_layers(work_module.work_of(args))))


if __name__ == "__main__":
    main()
