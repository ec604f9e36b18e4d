"""One rank of pytorch_pipeline.py: its stages, its steps and its measurements."""
import os
import time

import torch
import torch.distributed as dist

import work as work_module
from work import loss_function

RANKS = 2
STAGES_PER_RANK = {"single": 1, "replicas": 1, "1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "interleaved_1f1b_4": 4, "interleaved_zb": 2, "zbv": 2,
                   "dualpipev": 2}
WHOLE_MODEL = ("single", "replicas")  # every rank has all layers
V_SHAPED = ("zbv", "dualpipev")


def stages_of_rank(schedule, rank, ranks=RANKS):
    if schedule in WHOLE_MODEL:
        return [0]
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(STAGES_PER_RANK[schedule])]


def memory_bytes(key):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


class WaitClock:
    """Counts the seconds that the schedules wait for messages."""

    def __init__(self):
        self.seconds = 0.0
        from torch.distributed.pipelining import schedules
        schedules._wait_batch_p2p = self.timed(schedules._wait_batch_p2p)

    def timed(self, wait):
        def timed_wait(*args, **kwargs):
            begin = time.monotonic()
            result = wait(*args, **kwargs)
            self.seconds += time.monotonic() - begin
            return result
        return timed_wait


# ---------------------------------------------------------------- stages
def examples(layers, begin, end, first_input):
    """A stage's input and output as tensors without data. With them, PyTorch needs no pass over uninitialised input to infer their shapes. Such a pass
    would change BatchNorm's running statistics."""
    def after(index):
        layer = layers[index]
        return torch.empty_strided(layer["shape"], layer["stride"], device="meta").requires_grad_()

    return {"input_args": first_input.to("meta") if begin == 0 else after(begin - 1), "output_args": after(end - 1)}


class TiedMatrix:
    """The matrix that a model uses at its beginning and at its end. It is one parameter, or one copy for each use with summed gradients."""

    def __init__(self, work, units, modules, share):
        self.here = []  # the uses on this rank
        for index, name in work.module.tied(work) or ():
            place = str(index % len(units))
            self.here += [(child, name) for module in modules for i, child in module.named_children() if i == place]
        if share and len(self.here) == 1:
            raise ValueError("the tied matrix is used on both ranks, so that it cannot be one parameter")
        if share and self.here:
            (first, name), (last, last_name) = self.here
            set_parameter(last, last_name, first.get_parameter(name))
            self.here = []

    def sum_gradients(self):
        gradients = [module.get_parameter(name).grad for module, name in self.here]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            dist.all_reduce(gradients[0])


def set_parameter(module, name, parameter):
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, parameter)


# ---------------------------------------------------------------- a step
def autocast(args):
    return torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")


class EagerTrainer:
    """Accumulates gradients over parts of the batch: its micro-batches, or the whole at once. A replica takes its share."""

    def __init__(self, modules, args, rank):
        self.model, self.args, self.rank = modules[0], args, rank
        self.parts = 1 if args.batch == "whole" or args.ranks > 1 else args.micro_batches
        if args.ranks > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        if args.compile:
            self.model = torch.compile(self.model)

    def step(self, inputs, labels):
        losses = []
        inputs, labels = (whole.chunk(self.args.ranks)[self.rank] for whole in (inputs, labels))
        for x, y in zip(inputs.chunk(self.parts), labels.chunk(self.parts)):
            with autocast(self.args):
                loss = loss_function(self.model(x, y), y) / self.parts
            loss.backward()
            losses.append(loss.detach())
        return losses

    def loss(self, losses):
        return sum(loss.item() for loss in losses)


class PipelineTrainer:
    def __init__(self, modules, args, rank, shapes):
        from torch.distributed.pipelining import PipelineStage, schedules
        stages_here = stages_of_rank(args.schedule, rank, args.ranks)
        stage_count = args.ranks * STAGES_PER_RANK[args.schedule]
        if args.precision == "bf16":
            for module in modules:
                module.forward = autocast(args)(module.forward)
        self.has_first, self.has_last = 0 in stages_here, stage_count - 1 in stages_here
        stages = [PipelineStage(module, index, stage_count, torch.device(args.device), **shape)
                  for index, module, shape in zip(stages_here, modules, shapes)]
        kind = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
                "interleaved_1f1b": schedules.ScheduleInterleaved1F1B, "interleaved_1f1b_4": schedules.ScheduleInterleaved1F1B,
                "interleaved_zb": schedules.ScheduleInterleavedZeroBubble,
                "zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}[args.schedule]
        self.schedule = kind(stages if len(stages) > 1 else stages[0], args.micro_batches, loss_fn=loss_function)

    def step(self, inputs, labels):
        losses = []
        target = {"target": labels, "losses": losses, "labels": labels} if self.has_last else {}
        self.schedule.step(*([inputs] if self.has_first else []), return_outputs=False, **target)
        return [loss.detach() for loss in losses]  # without detach(), a kept loss would keep the graph of its step

    def loss(self, losses):
        return sum(loss.item() for loss in losses) / len(losses) if self.has_last else None


def keep_state(modules, loss, path):
    """Gradients and running statistics by their place in the model, for pitfalls.py."""
    torch.save({"loss": loss,
                "gradients": {name: p.grad for module in modules
                              for name, p in module.named_parameters(remove_duplicate=False)},
                "buffers": {name: b.clone() for module in modules for name, b in module.named_buffers()}}, path)


def run_rank(rank, args, layers, cuts, folder):
    whole = args.schedule in WHOLE_MODEL
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                            world_size=args.ranks)

    # Use the libraries once, so that their own memory is not counted as memory of the run.
    touched = torch.nn.Linear(64, 64)
    loss_function(touched(torch.randn(8, 64)), torch.zeros(8, dtype=torch.long)).backward()
    del touched
    wait_clock = WaitClock()
    memory_before = memory_bytes("VmRSS")

    work = work_module.work_of(args)
    units = work.module.units(work)
    stages = stages_of_rank(args.schedule, rank, args.ranks)
    dtype = torch.bfloat16 if args.precision == "bf16_weights" else torch.float32
    modules = [work_module.build_stage(units, cuts[i], cuts[i + 1], args.seed).to(args.device, dtype) for i in stages]
    matrix = TiedMatrix(work, units, modules, share=whole or args.tied == "shared")
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    inputs, labels = (part.to(args.device) for part in work_module.make_batch(work, args.micro_batches, args.seed))
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    if whole:
        trainer = EagerTrainer(modules, args, rank)
    else:
        first = inputs[:work.micro_batch_size]
        shapes = [examples(layers, cuts[i], cuts[i + 1], first) if args.shapes == "given" else {} for i in stages]
        trainer = PipelineTrainer(modules, args, rank, shapes)
    optimizer = work_module.make_optimizer(work, parameters)
    sum_tied_gradients = wait_clock.timed(matrix.sum_gradients)

    times, losses = [], []
    for step in range(args.warmup + args.steps):
        dist.barrier()
        wait_clock.seconds = 0.0
        synchronize()
        begin = time.monotonic()
        step_losses = trainer.step(inputs, labels)
        sum_tied_gradients()
        if args.keep and step == 0:
            keep_state(modules, trainer.loss(step_losses), f"{args.keep}/{rank}.pt")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        end = time.monotonic()
        losses.append(trainer.loss(step_losses))
        if step >= args.warmup:
            times.append({"begin": begin, "end": end, "waited": wait_clock.seconds})
    result = {"pid": os.getpid(), "stages": stages,
              "parameters": sum(p.numel() for p in parameters), "times": times, "losses": losses,
              "peak_bytes": torch.cuda.max_memory_allocated() if args.device == "cuda" else memory_bytes("VmHWM"), "bytes_before": memory_before}
    dist.barrier()
    dist.destroy_process_group()
    return result
