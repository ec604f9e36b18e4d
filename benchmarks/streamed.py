#!/usr/bin/env python3
"""Measures what streamed gradients (pipeline.gradients) bring: bytes of the fullest rank and seconds of a step, beside kept ones.

    benchmarks/streamed.py                  LLaMa of dim 1024, 8 layers, sequences of 64, 2 and 4 micro-batches of one sequence
    benchmarks/streamed.py --no-times       bytes alone, in less time (busy cores do not matter)
    benchmarks/streamed.py --shards         two replicas with optimizer.shard: weights, optimizer state and gradients of a rank
                                            (what their steps wait for each other is how far they drift apart; for sums over
                                            a link, see build/release/benchmarks/data_parallel/exposed_communication --shards)
    benchmarks/streamed.py --svg docs/gradients.svg    draws the memory over a step, kept and streamed, side by side

All ways of a case take turns in one process, and ratios are taken within each turn. Times need two quiet cores.
"""
import argparse
import json
import pathlib
import statistics
import tempfile

from plan_ranking import ROOT, call, ratios, seconds_by_turn, spread, text_of

MODEL = ["model.dim=1024", "model.hidden=2816", "model.heads=16", "model.layers=8", "model.vocab=1024", "data.sequence=64", "pipeline.micro_batch_size=1"]
# The last one has other bits: W of all micro-batches of a weight is one product.
WAYS = ["pipeline.gradients=kept", "pipeline.gradients=streamed", "pipeline.gradients=streamed pipeline.p2_batching=concat"]
BEST = "best"  # with kept and with streamed gradients, the schedule that twobp plan ranks first
PIPELINES = {"one rank": "pipeline.ranks=1 pipeline.threads=2", "1f1b on two": "pipeline.ranks=2", "best on two": BEST}
OPTIMIZERS = {"adamw": (["optimizer.type=adamw"], 0.82), "sgd": (["optimizer.type=sgd", "optimizer.weight_decay=0"], 0.65)}  # with the most bytes to reach


def best_schedules(options, optimizer, micro_batches, folder):
    """The settings of the first row with kept and of the first with streamed gradients."""
    answer = folder / "plan.json"
    call(options.program, "plan", ROOT / "configs/bench_llama.json", "--set", *MODEL, *OPTIMIZERS[optimizer][0], *options.set, "--ranks", 2,
         "--micro-batches", micro_batches, "--micro-batch-sizes", 1, "--recompute", "none", "--gradients", "kept,streamed", "--all", "--json", answer)
    choices = json.loads(answer.read_text())["choices"]
    best = [next(one for one in choices if one["gradients"] == gradients) for gradients in ("kept", "streamed")]
    for one in best:
        print(f"  {optimizer:6} M {micro_batches}  best on two  {one['gradients']:13} {one['schedule']}@{one['p2']}: {one['step_seconds']:.3f} s, "
              f"{one['peak_bytes'] / 2**20:.0f} MiB, as simulated", flush=True)
    return [f"pipeline.ranks=2 pipeline.stages={one['stages']} pipeline.schedule={one['schedule']} pipeline.p2={one['p2']} "
            f"pipeline.split=[{','.join(map(str, one['split']))}]" for one in best]


def measure(options, optimizer, pipelines, micro_batches, folder):
    answer = folder / "bench.json"
    ways = []
    for pipeline in pipelines:
        kept, streamed = best_schedules(options, optimizer, micro_batches, folder) if pipeline == BEST else (pipeline, pipeline)
        ways += [f"{streamed if 'streamed' in settings else kept} {settings}" for settings in WAYS]
    call(options.program, "bench", ROOT / "configs/bench_llama.json", "--set", *MODEL, *OPTIMIZERS[optimizer][0], *options.set, "--ways", *ways,
         "--micro-batches", micro_batches, "--repeat", options.repeats, "--steps", options.steps, "--warmup", 1, "--json", answer)
    rows = json.loads(answer.read_text())["rows"]
    return [rows[i:i + len(WAYS)] for i in range(0, len(rows), len(WAYS))]


def report(options, optimizer, micro_batches, name, rows):
    kept, *others = rows
    figures = {}
    for row, way in zip(others, ("streamed", "concatenated")):
        most = [max(one["peak_bytes"]) for one in (kept, row)]
        gradients = [max(one["peak_gradient_bytes"]) / 2**20 for one in (kept, row)]
        figures[way] = {"bytes": most[1] / most[0], "gradients": gradients}
        text = f"fullest rank {most[1] / most[0]:.3f}x (bar {OPTIMIZERS[optimizer][1]}), its gradients {gradients[0]:.1f} -> {gradients[1]:.1f} MiB"
        if not options.no_times:
            before, after = (seconds_by_turn(one, options) for one in (kept, row))
            figures[way]["time"] = spread(ratios(after, before))
            text += f", time {text_of(figures[way]['time'])} of {statistics.median(before):.3f} s"
        print(f"  {optimizer:6} M {micro_batches}  {name:12} {way:13} {text}", flush=True)
    if not options.no_times:
        share = statistics.median(kept["p2_seconds_all"]) / statistics.median(kept["step_seconds_all"]) / len(kept["peak_bytes"])
        print(f"  {'':10} {name:12} W takes {share:.2f} of a step of each rank with kept gradients", flush=True)
    return figures


def memory_over_a_step(options, gradients, folder, settings=()):
    """(seconds since the step's begin, bytes of weights, optimizer and gradients, those of activations and stash) after each event of one rank."""
    trace = folder / f"{gradients}.json"
    call(options.program, "train", ROOT / "configs/bench_llama.json", "--trace", trace, "--trace-steps", "3", "--set", *MODEL, "train.steps=3",
         "pipeline.ranks=1", "pipeline.micro_batches=4", f"pipeline.gradients={gradients}", *settings, *options.set)
    counters = sorted((event["ts"], *event["args"].values()) for event in json.loads(trace.read_text()) if event["ph"] == "C")
    return [((ts - counters[0][0]) / 1e6, fixed, held) for ts, fixed, held in counters]


def compare_shards(options, folder):
    settings = ["pipeline.data_parallel=2", "optimizer.shard=true", "optimizer.type=adamw"]
    most, least, seconds = {}, {}, {"kept": [], "streamed": []}
    if not options.no_times:
        answer = folder / "metrics.jsonl"
        for gradients in ("kept", "streamed", "streamed", "kept"):
            call(options.program, "train", ROOT / "configs/bench_llama.json", "--metrics", answer, "--set", *MODEL, "train.steps=12", "pipeline.ranks=1",
                 "pipeline.micro_batches=4", f"pipeline.gradients={gradients}", *settings, *options.set)
            steps = [json.loads(line) for line in answer.read_text().splitlines()]
            seconds[gradients] += [one["step_seconds"] for one in steps if "step_seconds" in one][2:]
            answer.unlink()
        kept, streamed = (statistics.median(seconds[gradients]) for gradients in ("kept", "streamed"))
        print(f"two replicas with shards, M 4: a step {kept:.3f} -> {streamed:.3f} s, {streamed / kept:.3f}x")
    for gradients in ("kept", "streamed"):
        fixed = [fixed for _, fixed, _ in memory_over_a_step(options, gradients, folder, settings)]
        most[gradients], least[gradients] = max(fixed), min(fixed)
    print(f"two replicas with shards, M 4: weights, optimizer state and gradients of a rank {most['kept'] / 2**20:.0f} -> {most['streamed'] / 2**20:.0f} MiB, "
          f"{most['streamed'] / most['kept']:.3f}x (bar 0.72); gradients at most {(most['streamed'] - least['streamed']) / 2**20:.1f} MiB")


def draw(options, folder):
    width, height, top, left = 330, 220, 30, 60
    curves = {gradients: memory_over_a_step(options, gradients, folder) for gradients in ("kept", "streamed")}
    most = max(fixed + held for curve in curves.values() for _, fixed, held in curve)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (width + left)} {height + 75}" font-family="sans-serif" font-size="12">',
             '<rect width="100%" height="100%" fill="white"/>']
    for place, (gradients, curve) in enumerate(curves.items()):
        x = lambda seconds: left + place * (width + left) + seconds / curve[-1][0] * (width - 20)
        y = lambda count: top + height * (1 - count / (1.05 * most))
        for colour, level in (("#9ecae1", lambda row: row[1] + row[2]), ("#3182bd", lambda row: row[1])):
            points, before = [], curve[0]
            for row in curve:
                points += [(x(row[0]), y(level(before))), (x(row[0]), y(level(row)))]
                before = row
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x(0), y(0)), *points, (points[-1][0], y(0))])
            parts.append(f'<polygon points="{line}" fill="{colour}"/>')
        peak = max(fixed + held for _, fixed, held in curve)
        parts.append(f'<text x="{x(0)}" y="{top - 10}">{gradients}: peak {peak / 2**20:.0f} MiB</text>')
        parts.append(f'<line x1="{x(0)}" x2="{x(curve[-1][0])}" y1="{y(0)}" y2="{y(0)}" stroke="black"/>')
        for share in (0.25, 0.5, 0.75, 1):
            parts.append(f'<text x="{x(0) - 6}" y="{y(share * most) + 4}" text-anchor="end">{share * most / 2**20:.0f}</text>')
    for place, (colour, text) in enumerate((("#3182bd", "weights, optimizer, gradients"), ("#9ecae1", "activations and stash"))):
        at = left + place * 230
        parts.append(f'<rect x="{at}" y="{height + top + 14}" width="12" height="12" fill="{colour}"/><text x="{at + 18}" y="{height + top + 24}">{text}</text>')
    options.svg.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/twobp", type=pathlib.Path)
    parser.add_argument("--pipelines", nargs="+", default=list(PIPELINES), choices=list(PIPELINES))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings")
    parser.add_argument("--repeats", type=int, default=9, help="turns")
    parser.add_argument("--steps", type=int, default=1, help="steps of a way in each turn")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    parser.add_argument("--shards", action="store_true")
    options = parser.parse_args()
    if options.svg or options.shards:
        with tempfile.TemporaryDirectory() as folder:
            return (draw if options.svg else compare_shards)(options, pathlib.Path(folder))
    if options.no_times:
        options.repeats = 1
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in options.optimizers:
            for count in options.micro_batches:
                rows = measure(options, optimizer, [PIPELINES[name] for name in options.pipelines], count, pathlib.Path(folder))
                for name, of_pipeline in zip(options.pipelines, rows):
                    figures[f"{optimizer} {count} {name}"] = report(options, optimizer, count, name, of_pipeline)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
