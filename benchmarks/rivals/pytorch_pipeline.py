"""Trains a benchmark's model with PyTorch and prints one JSON line. This is PyTorch's side of compare.py.

One call is one run of one configuration. Two ranks over Gloo (or one, with `--ranks 1`) run one of the schedules of torch.distributed.pipelining. Each is pinned to its own
cores, in the order of those that this process may use. `single` is one process with the whole model. It accumulates gradients over the micro-batches, or takes the batch as a whole,
eager or compiled. `replicas` is DistributedDataParallel with a process for each half of the batch. All runs use
fp32, the fused optimizer that the configuration names, and the same seeded batch at every step.

    python pytorch_pipeline.py --config configs/bench_bert.json --schedule zbv --micro-batches 4

The time of a step counts from the first rank's start to the last rank's end. It includes the optimizer, but not making the batch or reading the loss.
"""
import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

try:
    import torch
except ImportError:
    sys.exit(f"pytorch_pipeline.py: no torch in {sys.executable}; run it with a Python that has torch==2.13.0")

import balance
import work as work_module
from rank import RANKS, STAGES_PER_RANK, WHOLE_MODEL, run_rank, stages_of_rank


def first_cause(error):
    """The first error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def rank_main(rank, args, layers, cuts, cores, folder):
    try:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(args.threads)
        torch.set_num_interop_threads(1)
        result = run_rank(rank, args, layers, cuts, folder)
    except BaseException as error:
        result = {"error": first_cause(error), "traceback": traceback.format_exc()}
    with open(f"{folder}/{rank}.json.new", "w") as file:
        json.dump(result, file)
    os.rename(f"{folder}/{rank}.json.new", f"{folder}/{rank}.json")
    if "error" in result:
        os._exit(1)  # a Gloo group that lost a peer can hang in its destructors


# ---------------------------------------------------------------- all ranks
def run_all(args, ranks, layers, cuts):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * args.threads:
        sys.exit(f"pytorch_pipeline.py: {ranks} ranks of {args.threads} threads need {ranks * args.threads} cores, "
                 f"this process may use {len(cores)}")
    context = multiprocessing.get_context(args.start)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            own = cores[rank * args.threads:(rank + 1) * args.threads]
            processes.append(context.Process(target=rank_main, args=(rank, args, layers, cuts, own, folder),
                                             daemon=True))
            processes[-1].start()
        deadline, running = time.monotonic() + args.timeout, list(processes)
        while running and time.monotonic() < deadline and not any(p.exitcode for p in processes):
            left = max(0.0, deadline - time.monotonic())
            multiprocessing.connection.wait([p.sentinel for p in running], left)
            running = [p for p in processes if p.is_alive()]
        for process in running:
            process.kill()
        results = []
        for rank, process in enumerate(processes):
            process.join()
            path = f"{folder}/{rank}.json"
            if not os.path.exists(path):
                why = f"out of time ({args.timeout:g} s), or its peer failed" if process in running else "it ended"
                results.append({"error": f"no result: {why}"})
            else:
                with open(path) as file:
                    results.append(json.load(file))
    failed = [(rank, r) for rank, r in enumerate(results) if "error" in r]
    if failed:
        failed.sort(key=lambda item: "traceback" not in item[1])  # the error of a terminated rank is the least informative
        print(*(f"rank {rank}: {r['traceback']}" for rank, r in failed if "traceback" in r), sep="\n", file=sys.stderr)
        sys.exit(f"pytorch_pipeline.py: --schedule {args.schedule}, rank {failed[0][0]}: {failed[0][1]['error']}")
    return results


def summarise(args, work, layers, cuts, results):
    by_step = list(zip(*(r["times"] for r in results)))
    seconds = [max(t["end"] for t in step) - min(t["begin"] for t in step) for step in by_step]
    median = statistics.median(seconds)
    per_sample, item = work.module.items(work)
    ranks = []
    for result in results:
        idle = [1 - (t["end"] - t["begin"] - t["waited"]) / s for t, s in zip(result["times"], seconds)]
        ranks.append({"pid": result["pid"], "stages": result["stages"], "parameters": result["parameters"],
                      "peak_bytes": result["peak_bytes"],
                      "peak_bytes_added": result["peak_bytes"] - result["bytes_before"],
                      "idle_fraction": statistics.median(idle)})
    return {"schedule": args.schedule, "micro_batches": args.micro_batches, "torch": torch.__version__,
            "model": work.name, "variant": work.variant, "cut_at": work.cut_at, "layers_at_cuts": cuts,
            "layer_seconds": [layer["seconds"] for layer in layers], "step_seconds": median, "step_seconds_all": seconds,
            f"{item}_per_second": args.micro_batches * work.micro_batch_size * per_sample / median,
            "losses": next(r["losses"] for r in results if r["losses"][0] is not None), "ranks": ranks}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=STAGES_PER_RANK, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    work_module.add_options(parser)
    parser.add_argument("--tied", choices=("copies", "shared"), default="copies",
                        help="how two stages share a matrix: with one copy each and summed gradients, or as one parameter (on one rank only)")
    parser.add_argument("--shapes", choices=("given", "inferred"), default="given",
                        help="shapes of the tensors between stages: given to PyTorch, or inferred by its pass over uninitialised input")
    parser.add_argument("--layers", type=pathlib.Path, help="output of balance.py (default: measure the layers)")
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=RANKS,
                        help="1 puts all stages of a schedule on one rank, with equally many layers each and inferred shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs a single rank")
    parser.add_argument("--precision", choices=("fp32", "bf16", "bf16_weights"), default="fp32",
                        help="bf16 uses autocast on weights in fp32, bf16_weights has weights and optimizer state in bf16; both need a single rank")
    parser.add_argument("--batch", choices=("parts", "whole"), default="parts", help="single: micro-batch by micro-batch, or the whole batch at once")
    parser.add_argument("--compile", action="store_true", help="single: torch.compile the model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", help="folder for the first step's gradients and running statistics")
    parser.add_argument("--start", choices=("spawn", "fork"), default="spawn",
                        help="fork: ranks need not import torch again, but their memory is partly that of this process")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until the ranks are terminated")
    args = parser.parse_args(arguments)
    work = work_module.work_of(args)
    layers, stages = [], STAGES_PER_RANK[args.schedule]
    if args.schedule == "single":
        args.ranks = 1
    elif args.ranks == 1 and stages == 1:
        sys.exit(f"pytorch_pipeline.py: --schedule {args.schedule} has one stage per rank, so it needs two ranks")
    if args.ranks > 1 and (args.device != "cpu" or args.precision != "fp32"):
        sys.exit("pytorch_pipeline.py: --device and --precision need one rank: use --schedule single or --ranks 1")
    if args.schedule == "replicas":
        cuts = [0, len(work.module.units(work))]
    elif args.ranks == 1:
        args.shapes = "inferred"
        units = len(work.module.units(work))
        cuts = [units * stage // stages for stage in range(stages + 1)]
    else:
        torch.set_num_threads(args.threads)
        layers = json.loads(args.layers.read_text()) if args.layers else balance.measure_layers(work, args.seed)
        cuts = balance.balanced_cuts([layer["seconds"] for layer in layers],
                                     [stages_of_rank(args.schedule, rank) for rank in range(args.ranks)])
    print(json.dumps(summarise(args, work, layers, cuts, run_all(args, args.ranks, layers, cuts))))


if __name__ == "__main__":
    main()
