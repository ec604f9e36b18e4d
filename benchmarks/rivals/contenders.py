"""The contenders of compare.py, and the command for one run of each. Both sides get the same configuration and settings."""
import dataclasses
import pathlib
import sys

from configuration import CAPTURED, default_config
from sizes import as_settings

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Contender:
    title: str
    schedule: str | None = None      # for pytorch_pipeline.py; None: twobp
    options: tuple = ()              # more options for pytorch_pipeline.py
    micro_batches: int = 1           # the minimum; PyTorch refuses fewer
    models: tuple | None = None      # None: all models
    slow: bool = False               # takes minutes per step, so it runs one step in few repeats
    plan: tuple = ()                 # twobp: schedule and p2 policy; if empty, `twobp plan` chooses
    processes: bool = False          # twobp: one process per stage, over MPI
    captured: bool = False           # twobp, from Python
    sliced: bool = False             # twobp, with the slices of --slices
    threads: int = 1                 # of each process or rank; with 2 there is one rank

    def takes_part(self, model, micro_batches):
        return (self.models is None or model in self.models) and micro_batches >= self.micro_batches


BASES = {
    "twobp": Contender("twobp ZB-V, 2BP `fill`", plan=("zb-v", "fill")),
    "twobp_1f1b": Contender("twobp 1F1B, 2BP `fill`", plan=("1f1b", "fill")),
    "twobp_planned": Contender("twobp, chosen by `twobp plan --search`"),
    "twobp_sliced": Contender("twobp ZB-V, 2BP `fill`, slices", plan=("zb-v", "fill"), sliced=True),
    "twobp_sliced_1f1b": Contender("twobp 1F1B, 2BP `fill`, slices", plan=("1f1b", "fill"), sliced=True),
    "twobp_mpi": Contender("twobp ZB-V, 2BP `fill`, over MPI", plan=("zb-v", "fill"), processes=True),
    "twobp_1f1b_mpi": Contender("twobp 1F1B, 2BP `fill`, over MPI", plan=("1f1b", "fill"), processes=True),
    "twobp_captured": Contender("twobp ZB-V, 2BP `fill`, captured", plan=("zb-v", "fill"), captured=True, models=CAPTURED),
    "twobp_captured_1f1b": Contender("twobp 1F1B, 2BP `fill`, captured", plan=("1f1b", "fill"), captured=True, models=CAPTURED),
    "twobp_single": Contender("twobp, one stage, p2 `off`", plan=("1f1b", "off")),
    "twobp_two_threads": Contender("twobp, one rank with two threads", plan=("1f1b", "off"), threads=2),
}
PIPELINES = {
    "1f1b": Contender("PyTorch `Schedule1F1B`", "1f1b"),
    "gpipe": Contender("PyTorch `ScheduleGPipe`", "gpipe"),
    "interleaved_1f1b": Contender("PyTorch `ScheduleInterleaved1F1B`, 2 stages a rank", "interleaved_1f1b"),
    "interleaved_1f1b_4": Contender("PyTorch `ScheduleInterleaved1F1B`, 4 stages a rank", "interleaved_1f1b_4"),
    "interleaved_zb": Contender("PyTorch `ScheduleInterleavedZeroBubble`", "interleaved_zb"),
    "zbv": Contender("PyTorch `ScheduleZBVZeroBubble`", "zbv"),
    "dualpipev": Contender("PyTorch `ScheduleDualPipeV`", "dualpipev", micro_batches=4),
    "1f1b_all": Contender("PyTorch `Schedule1F1B`, head on all positions", "1f1b", ("--variant", "all"), models=("bert",)),
    "1f1b_loop": Contender("PyTorch `Schedule1F1B`, scan as a loop", "1f1b", ("--variant", "loop"), models=("mamba",),
                           slow=True),
}
SINGLES = {
    "single": Contender("PyTorch eager", "single"),
    "single_all": Contender("PyTorch eager, head on all positions", "single", ("--variant", "all"), models=("bert",)),
    "single_channels_last": Contender("PyTorch eager, channels_last", "single", ("--variant", "channels_last"),
                                      models=("resnet",)),
    "single_loop": Contender("PyTorch eager, scan as a loop", "single", ("--variant", "loop"), models=("mamba",), slow=True),
    "transformers": Contender("`transformers` MambaForCausalLM on PyTorch eager", "single", ("--variant", "transformers"),
                              models=("mamba",), slow=True),
}
# The same two cores without a pipeline: one process with two threads, or two replicas.
UNDIVIDED = {
    "eager": Contender("PyTorch eager, two threads, whole batch", "single", ("--batch", "whole"), threads=2),
    "compiled": Contender("`torch.compile`, two threads, whole batch", "single", ("--batch", "whole", "--compile"), threads=2),
    "replicas": Contender("PyTorch DistributedDataParallel, two processes", "replicas"),
}
ALL = BASES | PIPELINES | SINGLES | UNDIVIDED
NOT_BY_DEFAULT = ("gpipe", "1f1b_loop")
QUICK = ("1f1b", "zbv", "compiled", "replicas", *SINGLES)


def names_of(args, micro_batches):
    """The names of the contenders. twobp is the first, and ratios are relative to it."""
    table = SINGLES if args.single else PIPELINES | UNDIVIDED
    ours = ["twobp_single"] if args.single else ["twobp", "twobp_1f1b", "twobp_planned", "twobp_two_threads"]
    if args.model in CAPTURED:
        ours = ["twobp_captured", "twobp_captured_1f1b"]
    if args.slices > 1:
        ours += ["twobp_sliced", "twobp_sliced_1f1b"]
    if args.mpi:
        ours += ["twobp_mpi", "twobp_1f1b_mpi"]
    return [*ours, *(name for name in args.rivals if name in table and table[name].takes_part(args.model, micro_batches))]


def default_rivals(args):
    table = SINGLES if args.single else PIPELINES | UNDIVIDED
    names = [name for name in table if table[name].takes_part(args.model, sys.maxsize) and name not in NOT_BY_DEFAULT]
    return [name for name in names if name in QUICK] if args.quick else names


def steps_of(args, name):
    """The numbers of measured steps and of warm-up steps of a run."""
    return (1, 0) if ALL[name].slow else (args.steps, args.warmup)


def balance_command(args, size):
    return [sys.executable, HERE / "balance.py", *shared_options(args, size), "--cut-at", args.cut_at]


def shared_options(args, size):
    options = ["--config", default_config(args.model)]
    for setting in as_settings(size):
        options += ["--set", setting]
    return options


def profile_command(args, size, costs):
    _, config, *settings = shared_options(args, size)
    return [args.twobp, "profile", config, *settings, "--set", "pipeline.threads=1", "--json", costs]


def command(args, name, size, micro_batches, layers, planned, json_path):
    """The command of one run. `layers` is a file with the output of balance.py. `planned` has the options of `twobp bench` that `twobp plan` chose.
    twobp writes its result to `json_path`."""
    contender = ALL[name]
    steps, warmup = steps_of(args, name)
    if contender.processes:
        schedule, policy = contender.plan
        return [sys.executable, HERE / "twobp_mpi.py", "--twobp", args.twobp, *shared_options(args, size),
                "--set", "pipeline.threads=1", "--set", "pipeline.ranks=2",
                "--set", f"pipeline.schedule={schedule}", "--set", f"pipeline.p2={policy}",
                "--set", f"pipeline.micro_batches={micro_batches}", "--steps", steps, "--warmup", warmup, "--json", json_path]
    if contender.captured:
        schedule, policy = contender.plan
        return [sys.executable, HERE / "captured.py", "--twobp", args.twobp, *shared_options(args, size), "--schedule", schedule, "--p2", policy,
                "--micro-batches", micro_batches, "--steps", steps, "--warmup", warmup, "--json", json_path]
    if contender.schedule is None:
        _, config, *settings = shared_options(args, size)
        way = planned if not contender.plan else ["--set", f"pipeline.ranks={1 if args.single or contender.threads > 1 else 2}", "--schedules",
                                                  contender.plan[0], "--p2", contender.plan[1]]
        if contender.sliced:
            settings += ["--set", f"pipeline.slices={args.slices}"]
        return [args.twobp, "bench", config, *settings, "--set", f"pipeline.threads={contender.threads}", *way, "--micro-batches", micro_batches,
                "--repeat", 1, "--steps", steps, "--warmup", warmup, "--json", json_path]
    stages = [] if args.single or name in UNDIVIDED else ["--layers", layers, "--cut-at", args.cut_at]
    return [sys.executable, HERE / "pytorch_pipeline.py", "--schedule", contender.schedule, "--threads", contender.threads,
            *shared_options(args, size), *stages, *contender.options, "--micro-batches", micro_batches,
            "--steps", steps, "--warmup", warmup, "--timeout", args.timeout, *(["--start", "fork"] if args.quick else [])]
