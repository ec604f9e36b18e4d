"""Trains the benchmark's LLaMa with PyTorch and prints one JSON line: the rival side of compare.py.

One call is one run of one configuration. Two ranks over Gloo, each pinned to cores of its own (taken in order from
those this process may use), run one of the schedules of torch.distributed.pipelining; `single` is one process with
the whole model, eager, accumulating gradients over the micro-batches. fp32, fused AdamW with the settings of
configs/bench_llama.json, the same seeded batch at every step.

    python pytorch_pipeline.py --schedule zbv --micro-batches 4

Seconds of a step run from the first rank's start to the last rank's end, optimizer included, making the batch and
reading the loss left out.
"""
import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
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

import llama

RANKS = 2
STAGES_PER_RANK = {"single": 1, "1f1b": 1, "gpipe": 1, "interleaved_zb": 2, "zbv": 2, "dualpipev": 2}
V_SHAPED = ("zbv", "dualpipev")
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01


# ---------------------------------------------------------------- model and data
def stages_of_rank(schedule, rank):
    if STAGES_PER_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * RANKS - 1 - rank] if schedule in V_SHAPED else [rank, RANKS + rank]


def balanced_cuts(costs, stages_by_rank):
    """The layers where stages begin, and the end: largest stage and busiest rank weighed alike, then even stages."""
    parts = sum(len(stages) for stages in stages_by_rank)
    if len(costs) < parts:
        sys.exit(f"pytorch_pipeline.py: {len(costs)} layers do not fill {parts} stages; raise --layers")
    start = [0, *itertools.accumulate(costs)]

    def unevenness(cuts):
        stage = [start[end] - start[begin] for begin, end in itertools.pairwise(cuts)]
        rank = [sum(stage[i] for i in stages) / len(stages) for stages in stages_by_rank]
        return max(stage) + max(rank), sum(cost**2 for cost in stage)

    inner = itertools.combinations(range(1, len(costs)), parts - 1)
    return min(([0, *cuts, len(costs)] for cuts in inner), key=unevenness)


def build_stage(makers, begin, end, seed):
    """Layers begin..end, with weights that depend on the seed and the layer's index alone."""
    modules = []
    for index in range(begin, end):
        torch.manual_seed(seed * 1000 + index)
        modules.append(makers[index][0]())
    return torch.nn.Sequential(*modules)


def make_batch(args):
    generator = torch.Generator().manual_seed(args.seed)
    shape = (args.micro_batches * args.micro_batch_size, args.sequence + 1)
    tokens = torch.randint(args.vocab, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---------------------------------------------------------------- one rank
def memory_bytes(key):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


class WaitClock:
    """Seconds that the schedules spend waiting for messages."""

    def __init__(self):
        self.seconds = 0.0
        from torch.distributed.pipelining import schedules
        wait = schedules._wait_batch_p2p

        def timed_wait(*args, **kwargs):
            begin = time.monotonic()
            result = wait(*args, **kwargs)
            self.seconds += time.monotonic() - begin
            return result

        schedules._wait_batch_p2p = timed_wait


class EagerTrainer:
    def __init__(self, modules, args):
        self.model, self.micro_batches = modules[0], args.micro_batches

    def step(self, inputs, labels):
        losses = []
        for x, y in zip(inputs.chunk(self.micro_batches), labels.chunk(self.micro_batches)):
            loss = llama.loss_function(self.model(x), y) / self.micro_batches
            loss.backward()
            losses.append(loss.detach())
        return losses

    def loss(self, losses):
        return sum(loss.item() for loss in losses)


class PipelineTrainer:
    def __init__(self, modules, args, rank):
        from torch.distributed.pipelining import PipelineStage, schedules
        stages_here = stages_of_rank(args.schedule, rank)
        stage_count = RANKS * STAGES_PER_RANK[args.schedule]
        self.has_first, self.has_last = 0 in stages_here, stage_count - 1 in stages_here
        stages = [PipelineStage(module, index, stage_count, torch.device("cpu"))
                  for index, module in zip(stages_here, modules)]
        kind = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
                "interleaved_zb": schedules.ScheduleInterleavedZeroBubble,
                "zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}[args.schedule]
        self.schedule = kind(stages if len(stages) > 1 else stages[0], args.micro_batches,
                             loss_fn=llama.loss_function)

    def step(self, inputs, labels):
        losses = []
        target = {"target": labels, "losses": losses} if self.has_last else {}
        self.schedule.step(*([inputs] if self.has_first else []), return_outputs=False, **target)
        return [loss.detach() for loss in losses]  # a loss that is kept would keep its step's graph

    def loss(self, losses):
        return sum(loss.item() for loss in losses) / len(losses) if self.has_last else None


def run_rank(rank, args, cuts, rendezvous):
    import torch.distributed as dist
    single = args.schedule == "single"
    ranks = 1 if single else RANKS
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)

    # Touch the libraries once, so that their own memory counts as theirs and not as the run's.
    touched = torch.nn.Linear(64, 64)
    llama.loss_function(touched(torch.randn(8, 64)), torch.zeros(8, dtype=torch.long)).backward()
    del touched
    wait_clock = WaitClock()
    memory_before = memory_bytes("VmRSS")

    makers = llama.layer_makers(args, args.cut_at)
    stages = stages_of_rank(args.schedule, rank)
    modules = [build_stage(makers, cuts[i], cuts[i + 1], args.seed) for i in stages]
    parameters = [p for module in modules for p in module.parameters()]
    trainer = EagerTrainer(modules, args) if single else PipelineTrainer(modules, args, rank)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    inputs, labels = make_batch(args)
    times, losses = [], []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        wait_clock.seconds = 0.0
        begin = time.monotonic()
        step_losses = trainer.step(inputs, labels)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end = time.monotonic()
        losses.append(trainer.loss(step_losses))
        if step >= args.warmup:
            times.append({"begin": begin, "end": end, "waited": wait_clock.seconds})
    result = {"pid": os.getpid(), "stages": stages,
              "parameters": sum(p.numel() for p in parameters), "times": times, "losses": losses,
              "peak_bytes": memory_bytes("VmHWM"), "bytes_before": memory_before}
    dist.barrier()
    dist.destroy_process_group()
    return result


def rank_main(rank, args, cuts, cores, folder):
    try:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(args.threads)
        torch.set_num_interop_threads(1)
        result = run_rank(rank, args, cuts, f"{folder}/rendezvous")
    except Exception:
        result = {"error": traceback.format_exc()}
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(result, file)
    if "error" in result:
        os._exit(1)  # a Gloo group that lost a peer can hang in its destructors


# ---------------------------------------------------------------- all ranks
def run_all(args, ranks, cuts):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * args.threads:
        sys.exit(f"pytorch_pipeline.py: {ranks} ranks of {args.threads} threads need {ranks * args.threads} cores, "
                 f"this process may use {len(cores)}")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            own = cores[rank * args.threads:(rank + 1) * args.threads]
            processes.append(spawn.Process(target=rank_main, args=(rank, args, cuts, own, folder), daemon=True))
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
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(results) if "error" in r]
    if errors:
        sys.exit("pytorch_pipeline.py: --schedule " + args.schedule + " failed\n" + "\n".join(errors))
    return results


def summarise(args, cuts, results):
    by_step = list(zip(*(r["times"] for r in results)))
    seconds = [max(t["end"] for t in step) - min(t["begin"] for t in step) for step in by_step]
    median = statistics.median(seconds)
    tokens = args.micro_batches * args.micro_batch_size * args.sequence
    ranks = []
    for result in results:
        idle = [1 - (t["end"] - t["begin"] - t["waited"]) / s for t, s in zip(result["times"], seconds)]
        ranks.append({"pid": result["pid"], "stages": result["stages"], "parameters": result["parameters"],
                      "peak_bytes": result["peak_bytes"],
                      "peak_bytes_added": result["peak_bytes"] - result["bytes_before"],
                      "idle_fraction": statistics.median(idle)})
    return {"schedule": args.schedule, "micro_batches": args.micro_batches, "torch": torch.__version__,
            "cut_at": args.cut_at, "layers_at_cuts": cuts, "step_seconds": median,
            "step_seconds_all": seconds, "tokens_per_second": tokens / median,
            "losses": next(r["losses"] for r in results if r["losses"][0] is not None), "ranks": ranks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=STAGES_PER_RANK, default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=4)
    llama.add_size_options(parser)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cut-at", choices=("blocks", "halves"), default="blocks",
                        help="stages may start at whole blocks, or also between the halves of one")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds before the ranks are ended")
    args = parser.parse_args()
    ranks = 1 if args.schedule == "single" else RANKS
    costs = [cost for _, cost in llama.layer_makers(args, args.cut_at)]
    cuts = balanced_cuts(costs, [stages_of_rank(args.schedule, rank) for rank in range(ranks)])
    print(json.dumps(summarise(args, cuts, run_all(args, ranks, cuts))))


if __name__ == "__main__":
    main()
