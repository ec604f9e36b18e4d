#!/usr/bin/env python3
"""Measures what slices of sequences (pipeline.slices) bring: step time, idle time and memory, beside whole sequences.

    benchmarks/slices.py                    LLaMa of dim 512, 8 layers, sequences of 2048, one and two micro-batches of one sequence, 2 ranks
    benchmarks/slices.py --models mamba     Mamba, sequences of 4096
    benchmarks/slices.py --memory           bytes alone: LLaMa on 8 ranks, 8 micro-batches, sequences of 512, measured and planned (busy cores do not matter)

All ways of a case take turns in one process. Ratios are taken within each turn; a ratio above 1 says that the first way is faster.
It needs two quiet cores.
"""
import argparse
import json
import pathlib
import statistics
import tempfile

from plan_ranking import ROOT, call, ratios, seconds_by_turn, spread, text_of

SEQUENCE = {"llama": 2048, "mamba": 4096}
# (name, ranks, schedule, p2, slices)
WAYS = {
    1: [("1f1b off", 2, "1f1b", "off", 1), ("1f1b off, {k} slices", 2, "1f1b", "off", 0), ("1f1b fill", 2, "1f1b", "fill", 1),
        ("1f1b fill, {k} slices", 2, "1f1b", "fill", 0), ("zb-v fill", 2, "zb-v", "fill", 1), ("zb-v fill, {k} slices", 2, "zb-v", "fill", 0),
        ("one rank", 1, "1f1b", "off", 1), ("one rank, {k} slices", 1, "1f1b", "off", 0)],
    2: [("1f1b off", 2, "1f1b", "off", 1), ("1f1b off, {k} slices", 2, "1f1b", "off", 0), ("1f1b fill", 2, "1f1b", "fill", 1),
        ("1f1b fill, {k} slices", 2, "1f1b", "fill", 0), ("zb-v fill", 2, "zb-v", "fill", 1)],
}
# (faster, slower, the least ratio) and (less, more, the most bytes) that issue and docs speak of
TIMES = {1: [("1f1b off, {k} slices", "1f1b off", 1.70), ("1f1b fill, {k} slices", "1f1b fill", 1.35), ("one rank", "one rank, {k} slices", None)],
         2: [("1f1b off, {k} slices", "1f1b off", 1.33), ("1f1b fill, {k} slices", "zb-v fill", 0.99)]}
BYTES = {1: [("1f1b off, {k} slices", "1f1b off")], 2: [("1f1b off, {k} slices", "1f1b off"), ("1f1b fill, {k} slices", "zb-v fill")]}


def measure(options, model, micro_batches, folder):
    answer = folder / "bench.json"
    ways = WAYS[micro_batches]
    settings = [f"pipeline.ranks={ranks} pipeline.schedule={schedule} pipeline.p2={p2} pipeline.slices={slices or options.slices}"
                for _, ranks, schedule, p2, slices in ways]
    call(options.program, "bench", ROOT / f"configs/bench_{model}.json", "--set", f"data.sequence={options.sequence or SEQUENCE[model]}",
         "pipeline.micro_batch_size=1", *options.set, "--ways", *settings, "--micro-batches", micro_batches, "--repeat", options.repeats,
         "--steps", options.steps, "--warmup", 1, "--json", answer)
    rows = json.loads(answer.read_text())["rows"]
    names = [way[0].format(k=options.slices) for way in ways]
    assert len(rows) == len(names)
    result = {}
    for name, row in zip(names, rows):
        result[name] = {"seconds": seconds_by_turn(row, options), "idle": statistics.mean(row["idle_fraction"]), "simulated": statistics.mean(row["idle_predicted"]),
                        "bytes": max(row["peak_held_bytes"])}
    return result


def report(options, model, micro_batches, result):
    name = lambda text: text.format(k=options.slices)
    print(f"\n{model}, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} of one sequence of {options.sequence or SEQUENCE[model]}")
    for way, row in result.items():
        print(f"  {way:28} {statistics.median(row['seconds']):.3f} s ({min(row['seconds']):.3f} to {max(row['seconds']):.3f}), idle "
              f"{row['idle']:.3f}, simulated {row['simulated']:.3f}, activations and stash of the fullest rank {row['bytes'] / 2**20:.1f} MiB")
    figures = {}
    for fast, slow, least in TIMES[micro_batches]:
        figure = spread(ratios(result[name(slow)]["seconds"], result[name(fast)]["seconds"]))
        figures[f"{name(slow)} over {name(fast)}"] = figure
        print(f"  step of {name(slow)} over {name(fast)}: {text_of(figure)}" + (f" (bar {least})" if least else ""))
    for less, more in BYTES[micro_batches]:
        share = result[name(less)]["bytes"] / result[name(more)]["bytes"]
        figures[f"bytes of {name(less)} over {name(more)}"] = share
        print(f"  bytes of {name(less)} over {name(more)}: {share:.3f}", flush=True)
    return figures


def memory(options, folder):
    """Activations and stash of the fullest of 8 ranks, 1F1B off, in a real step and as planned."""
    ranks, answer = 8, folder / "answer.json"
    config = [ROOT / "configs/bench_llama.json", "--set", "data.sequence=512", "pipeline.micro_batch_size=1", f"pipeline.ranks={ranks}",
              "pipeline.split=[3,2,2,2,2,2,2,3]", *options.set]
    call(options.program, "bench", *config, "pipeline.schedule=1f1b", "pipeline.p2=off", "--ways", "pipeline.slices=1", f"pipeline.slices={options.slices}",
         "--micro-batches", ranks, "--repeat", 1, "--steps", 1, "--warmup", 0, "--json", answer)
    whole, slices = json.loads(answer.read_text())["rows"]
    call(options.program, "plan", *config, "--schedule", "1f1b", "--p2", "off", "--stages", ranks, "--recompute", "none", "--micro-batches", ranks,
         "--micro-batch-sizes", 1, "--slices", f"1,{options.slices}", "--all", "--json", answer)
    planned = {row["slices"]: row["peak_bytes"] for row in json.loads(answer.read_text())["choices"]}
    fullest = max(range(ranks), key=lambda rank: whole["peak_held_bytes"][rank])
    weights = whole["peak_bytes"][fullest] - whole["peak_held_bytes"][fullest]  # what the rank holds besides: the plan counts it, too
    result = {"measured": max(slices["peak_held_bytes"]) / max(whole["peak_held_bytes"]),
              "planned": (planned[options.slices] - weights) / (planned[1] - weights)}
    print(f"llama, {ranks} ranks, {ranks} micro-batches of one sequence of 512, 1f1b off, bytes of {options.slices} slices over whole sequences: "
          f"measured {result['measured']:.3f}, planned {result['planned']:.3f} (bar 0.27)")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/twobp", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", default=["llama"], choices=list(SEQUENCE))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2], choices=list(WAYS))
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--sequence", type=int, help="positions (default: 2048 for llama, 4096 for mamba)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--repeats", type=int, default=7, help="turns")
    parser.add_argument("--steps", type=int, default=1, help="steps of a way in each turn")
    parser.add_argument("--memory", action="store_true", help="only the bytes on 8 ranks")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.memory:
            figures["memory"] = memory(options, pathlib.Path(folder))
        for model in options.models if not options.memory else []:
            for count in options.micro_batches:
                result = measure(options, model, count, pathlib.Path(folder))
                figures[f"{model} {count}"] = {"ways": result, "figures": report(options, model, count, result)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
