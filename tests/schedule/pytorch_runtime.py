"""Runs schedules in PyTorch's own pipeline runtime, on CPU over Gloo, a process per rank.

    pytorch_runtime.py FILE [FILE...]

_PipelineScheduleRuntime._load_csv loads every file, which runs one step of a small MLP. A stage is a Linear and a
Tanh. The gradients are compared with autograd's on the whole model and batch. The script prints a line per file: name,
ranks, and the largest difference of a gradient relative to its largest value. Exit code 77: this Python has no PyTorch.
"""

import csv
import os
import sys
import tempfile
import traceback

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

WIDTH = 6
SAMPLES = 3  # per micro-batch


def actions_of(path):
    with open(path, newline="") as file:
        rows = [[schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    return dict(enumerate(rows))


def module_of(stage):
    torch.manual_seed(100 + stage)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def loss_of(output, target):
    return torch.nn.functional.mse_loss(output, target)


def run_file(rank, ranks, path):
    compute = actions_of(path)
    rank_of_stage = {a.stage_index: r for r, row in compute.items() for a in row}
    stages = len(rank_of_stage)
    micro_batches = 1 + max(a.microbatch_index for row in compute.values() for a in row)
    generator = torch.Generator().manual_seed(1)
    shape = (micro_batches * SAMPLES, WIDTH)
    inputs = torch.randn(shape, generator=generator, dtype=torch.double)
    target = torch.randn(shape, generator=generator, dtype=torch.double)

    whole = [module_of(stage) for stage in range(stages)]
    loss_of(torch.nn.Sequential(*whole)(inputs), target).backward()

    mine = [stage for stage in range(stages) if rank_of_stage[stage] == rank]
    modules = {stage: module_of(stage) for stage in mine}
    pipeline_stages = [PipelineStage(modules[stage], stage, stages, torch.device("cpu")) for stage in mine]
    runtime = schedules._PipelineScheduleRuntime(pipeline_stages, micro_batches, loss_fn=loss_of)
    runtime._load_csv(path, format="compute_only")
    arguments = [inputs] if 0 in mine else []
    runtime.step(*arguments, target=target if stages - 1 in mine else None)

    error = 0.0
    for stage in mine:
        for ours, theirs in zip(modules[stage].parameters(), whole[stage].parameters()):
            assert ours.grad is not None, f"stage {stage} has no gradient"
            error = max(error, ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
    worst = torch.tensor(error, dtype=torch.double)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(os.path.basename(path), ranks, worst.item(), flush=True)


def run_rank(rank, ranks, store, files):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    try:
        for path in files:
            run_file(rank, ranks, path)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others wait for messages
    dist.destroy_process_group()


def main():
    by_ranks = {}
    for path in sys.argv[1:]:
        by_ranks.setdefault(len(actions_of(path)), []).append(path)
    for ranks, files in by_ranks.items():
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            # No thread has started yet, so a fork is safe. Importing torch again in every rank takes seconds.
            multiprocessing.start_processes(run_rank, (ranks, store, files), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main()
