"""twobp against PyTorch's pipelining: one command that runs both in turn and prints a Markdown table.

    python benchmarks/rivals/compare.py --json rivals.json      two stages, two pinned cores
    python benchmarks/rivals/compare.py --single                one stage, one thread, against PyTorch eager
    python benchmarks/rivals/compare.py --quick                 tiny sizes: only shows that it works

For each size and number of micro-batches every contender runs once a repeat, one after another on the same cores,
in reversed order every other repeat, each after the machine has become quiet. Ratios are taken repeat by repeat.
Needs twobp built (build/release/twobp) and a Python with torch.
"""
import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile

import probe

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CONFIG = REPOSITORY / "configs" / "bench_llama.json"
TIMEOUT_SECONDS = 600
FOREIGN_LIMIT = 0.03  # share of the cores that others may use during a run; above it the run is repeated
ATTEMPTS = 3
MIB = 2**20

TITLES = {"twobp": "twobp 1F1B, 2BP `fill`", "twobp_single": "twobp, one stage, p2 `off`",
          "1f1b": "PyTorch `Schedule1F1B`", "gpipe": "PyTorch `ScheduleGPipe`",
          "interleaved_zb": "PyTorch `ScheduleInterleavedZeroBubble`",
          "zbv": "PyTorch `ScheduleZBVZeroBubble`", "dualpipev": "PyTorch `ScheduleDualPipeV`",
          "single": "PyTorch eager"}
RIVALS = ("1f1b", "gpipe", "interleaved_zb", "zbv", "dualpipev")
LEAST_MICRO_BATCHES = {"dualpipev": 4}  # with two ranks; PyTorch refuses fewer


@dataclasses.dataclass(frozen=True)
class Size:
    dim: int
    layers: int
    heads: int
    hidden: int
    sequence: int
    micro_batch_size: int
    vocab: int

    def __str__(self):
        return (f"dim {self.dim}, {self.layers} layers, {self.heads} heads, FF {self.hidden}, sequence "
                f"{self.sequence}, micro-batch size {self.micro_batch_size}, vocabulary {self.vocab}")


SIZES = {"512": Size(512, 8, 8, 1408, 256, 2, 4096), "256": Size(256, 8, 8, 704, 128, 2, 4096)}
QUICK_SIZE = Size(64, 4, 4, 128, 32, 2, 128)


# ---------------------------------------------------------------- one run
def twobp_command(args, size, micro_batches, json_path):
    settings = {"model.dim": size.dim, "model.layers": size.layers, "model.heads": size.heads,
                "model.hidden": size.hidden, "model.vocab": size.vocab, "data.sequence": size.sequence,
                "pipeline.micro_batch_size": size.micro_batch_size, "pipeline.threads": 1,
                "pipeline.stages": 1 if args.single else 2}
    command = [args.twobp, "bench", CONFIG]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command + ["--schedules", "1f1b", "--p2", "off" if args.single else "fill", "--micro-batches",
                      micro_batches, "--repeat", 1, "--steps", args.steps, "--warmup", args.warmup,
                      "--json", json_path]


def pytorch_command(args, schedule, size, micro_batches):
    command = [sys.executable, HERE / "pytorch_pipeline.py", "--schedule", schedule, "--threads", 1]
    for key, value in dataclasses.asdict(size).items():
        command += ["--" + key.replace("_", "-"), value]
    return command + ["--micro-batches", micro_batches, "--cut-at", args.cut_at, "--steps", args.steps,
                      "--warmup", args.warmup, "--timeout", TIMEOUT_SECONDS]


def run_once(args, contender, size, micro_batches):
    """What one run of one contender measured, or `error`."""
    is_twobp = contender.startswith("twobp")
    with tempfile.TemporaryDirectory() as folder:
        json_path = pathlib.Path(folder) / "twobp.json"
        command = [str(word) for word in (twobp_command(args, size, micro_batches, json_path) if is_twobp else
                                          pytorch_command(args, contender, size, micro_batches))]
        outcome = probe.run(command, args.cores, args.patience, TIMEOUT_SECONDS)
        result = {"contender": contender, "command": without_machine_paths(command, folder),
                  "quiet": outcome.quiet, "foreign_share": outcome.foreign_share}
        try:
            if outcome.exit_code != 0:
                raise ValueError(f"exit code {outcome.exit_code}: {outcome.stderr.strip()[-2000:]}")
            if is_twobp:
                (row,) = json.loads(json_path.read_text())["rows"]
                idle, processes = row["idle_fraction"], list(outcome.memory)
            else:
                row = json.loads(outcome.stdout.strip().splitlines()[-1])
                idle = [rank["idle_fraction"] for rank in row["ranks"]]
                processes = [rank["pid"] for rank in row["ranks"]]  # without the process that starts them
            memory = [outcome.memory[pid] for pid in processes]
            result |= {"step_seconds": row["step_seconds"], "tokens_per_second": row["tokens_per_second"],
                       "idle_fraction": idle, "peak_resident_bytes": sum(m.peak_resident for m in memory),
                       "peak_anonymous_bytes": sum(m.peak_anonymous for m in memory), "reported": row}
        except (ValueError, KeyError, IndexError, OSError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
        return result


def without_machine_paths(command, folder):
    text = shlex.join(command)
    for place, name in {f"{REPOSITORY}/": "", f"{folder}/": "", sys.executable: "python"}.items():
        text = text.replace(place, name)
    return text


def disturbed(run):
    return not run["quiet"] or run["foreign_share"] > FOREIGN_LIMIT


def run_undisturbed(args, contender, size, micro_batches):
    """The first of a few attempts that others did not disturb, else the least disturbed."""
    runs = []
    for _ in range(1 if args.quick else ATTEMPTS):
        runs.append(run_once(args, contender, size, micro_batches))
        if "error" in runs[-1] or not disturbed(runs[-1]):
            return runs[-1] | {"attempts": len(runs)}
    return min(runs, key=lambda run: (not run["quiet"], run["foreign_share"])) | {"attempts": len(runs)}


# ---------------------------------------------------------------- one setting
def contenders_of(args, micro_batches):
    if args.single:
        return ["twobp_single", "single"]
    return ["twobp"] + [r for r in args.rivals if micro_batches >= LEAST_MICRO_BATCHES.get(r, 1)]


def run_setting(args, size, micro_batches, setting, save):
    """Fills `setting` and saves it after every run, so that an interrupted comparison loses none."""
    contenders = contenders_of(args, micro_batches)
    setting |= {"size": dataclasses.asdict(size), "micro_batches": micro_batches, "contenders": contenders,
                "runs": []}
    for repeat in range(args.repeats):
        for contender in contenders if repeat % 2 == 0 else contenders[::-1]:
            run = run_undisturbed(args, contender, size, micro_batches) | {"repeat": repeat}
            setting["runs"].append(run)
            what = run.get("error") or f"{run['step_seconds']:.4f} s/step"
            note = ", disturbed" if disturbed(run) else ""
            print(f"dim {size.dim}, M = {micro_batches}, repeat {repeat + 1}/{args.repeats}, {contender}: {what}"
                  f"{note}", file=sys.stderr, flush=True)
            setting["summary"] = summarise(setting)
            save()


def summarise(setting):
    base = setting["contenders"][0]
    seconds = {(run["contender"], run["repeat"]): run["step_seconds"]
               for run in setting["runs"] if "error" not in run}
    summary = []
    for contender in setting["contenders"]:
        runs = [run for run in setting["runs"] if run["contender"] == contender and "error" not in run]
        row = {"contender": contender, "repeats": len(runs)}
        if runs:
            pairs = [run["repeat"] for run in runs if (base, run["repeat"]) in seconds]
            ratios = [seconds[contender, repeat] / seconds[base, repeat] for repeat in pairs]
            row |= {"step_seconds": spread([run["step_seconds"] for run in runs]), "ratio": spread(ratios),
                    "idle_fraction": [statistics.median(ranks)
                                      for ranks in zip(*(run["idle_fraction"] for run in runs))]}
            for key in ("tokens_per_second", "peak_resident_bytes", "peak_anonymous_bytes"):
                row[key] = statistics.median(run[key] for run in runs)
        summary.append(row)
    return summary


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


# ---------------------------------------------------------------- the report
def markdown_table(setting, size):
    lines = [f"### {size}, M = {setting['micro_batches']}", "",
             "| | seconds a step (min–max) | / twobp (min–max) | tokens/s | idle, by rank | resident, MiB "
             "| of it anonymous, MiB |", "|---|---|---|---|---|---|---|"]
    for row in setting["summary"]:
        title = TITLES[row["contender"]]
        if not row["repeats"]:
            lines.append(f"| {title} | failed | | | | | |")
            continue
        step, ratio = row["step_seconds"], row["ratio"]
        against = f"{ratio['median']:.3f} ({ratio['min']:.3f}–{ratio['max']:.3f})" if ratio else ""
        idle = " / ".join(f"{fraction:.3f}" for fraction in row["idle_fraction"])
        lines.append(f"| {title} | {step['median']:.4f} ({step['min']:.4f}–{step['max']:.4f}) | {against} "
                     f"| {row['tokens_per_second']:.0f} | {idle} | {row['peak_resident_bytes'] / MIB:.0f} "
                     f"| {row['peak_anonymous_bytes'] / MIB:.0f} |")
    unsteady = sum(disturbed(run) for run in setting["runs"])
    failed = sum("error" in run for run in setting["runs"])
    lines += ["", f"{len(setting['runs'])} runs, {unsteady} of them disturbed by other programs, {failed} failed."]
    return "\n".join(lines)


def first_line(path, key):
    with open(path) as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith(key)), "unknown")


def git(*words):
    done = subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def describe_machine(args):
    commit = git("rev-parse", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no"):
        commit += " and local changes"
    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "cpu": first_line("/proc/cpuinfo", "model name"), "cores": os.cpu_count(), "cores used": args.cores,
            "memory": first_line("/proc/meminfo", "MemTotal"), "system": f"Linux {platform.release()}",
            "python": platform.python_version(), "torch": importlib.metadata.version("torch"),
            "twobp commit": commit,
            "command": shlex.join(["compare.py", *sys.argv[1:]]).replace(f"{REPOSITORY}/", "")}


# ---------------------------------------------------------------- command line
def list_of(convert, allowed=None):
    def parse(text):
        items = [convert(item) for item in text.split(",")]
        for item in items:
            if allowed is not None and item not in allowed:
                raise argparse.ArgumentTypeError(f"{item} is none of {', '.join(map(str, allowed))}")
        return items
    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=list_of(str, SIZES), help="of: 512,256 (default: both)")
    parser.add_argument("--micro-batches", type=list_of(int), help="default 2,4; with --quick 2")
    parser.add_argument("--rivals", type=list_of(str, RIVALS),
                        help=f"of: {','.join(RIVALS)} (default: all but gpipe; with --quick 1f1b,zbv)")
    parser.add_argument("--repeats", type=int, help="default 5; with --quick 1")
    parser.add_argument("--steps", type=int, help="counted in each run, default 6; with --quick 2")
    parser.add_argument("--warmup", type=int, help="steps before them, default 2; with --quick 1")
    parser.add_argument("--cut-at", choices=("blocks", "halves"), default="blocks",
                        help="where PyTorch's stages may start: whole blocks (default), or also between their halves")
    parser.add_argument("--cores", type=list_of(int), help="default: the first two this process may use")
    parser.add_argument("--patience", type=float, help="seconds to wait for a quiet machine, default 400")
    parser.add_argument("--twobp", type=pathlib.Path, default=REPOSITORY / "build" / "release" / "twobp")
    parser.add_argument("--json", type=pathlib.Path, help="file for every run and the summary")
    parser.add_argument("--single", action="store_true", help="one stage, one thread, against PyTorch eager")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, no waiting: figures mean nothing")
    args = parser.parse_args()
    if args.single and args.rivals:
        parser.error("--single has one rival, PyTorch eager: leave --rivals out")
    if args.quick and args.sizes:
        parser.error("--quick has a size of its own: leave --sizes out")
    defaults = {"sizes": list(SIZES), "micro_batches": [2, 4], "repeats": 5, "steps": 6, "warmup": 2,
                "patience": 400.0, "rivals": [rival for rival in RIVALS if rival != "gpipe"]}
    if args.quick:
        defaults = {"sizes": ["quick"], "micro_batches": [2], "repeats": 1, "steps": 2, "warmup": 1, "patience": 0.0,
                    "rivals": ["1f1b", "zbv"]}
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if min(args.repeats, args.steps, *args.micro_batches) < 1 or args.warmup < 0:
        parser.error("--repeats, --steps and --micro-batches must be at least 1, --warmup at least 0")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"no torch in {sys.executable}; use a Python that has torch==2.13.0")
    if not os.access(args.twobp, os.X_OK):
        parser.error(f"{args.twobp} is not there: build twobp first, or give --twobp PATH")
    args.twobp = args.twobp.resolve()
    usable = sorted(os.sched_getaffinity(0))
    args.cores = args.cores or usable[:2]
    if len(set(args.cores)) != 2 or not set(args.cores) <= set(usable):
        parser.error(f"two cores are needed out of those this process may use: {usable}")
    return args


def main():
    args = parse_arguments()
    os.sched_setaffinity(0, args.cores)  # inherited by everything that is measured
    machine = describe_machine(args)
    report = {"machine": machine, "settings": []}

    def save():
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    sizes = [QUICK_SIZE if args.quick else SIZES[name] for name in args.sizes]
    tables = []
    for size in sizes:
        for micro_batches in args.micro_batches:
            setting = {}
            report["settings"].append(setting)
            run_setting(args, size, micro_batches, setting, save)
            tables.append(markdown_table(setting, size))
    print("\n\n".join(tables) + "\n")
    for key, value in machine.items():
        print(f"- {key}: {value if not isinstance(value, list) else ', '.join(map(str, value))}")
    if any("error" in run for setting in report["settings"] for run in setting["runs"]):
        sys.exit("compare.py: some runs failed; the messages are above")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("compare.py: interrupted; what was measured until then is in the --json file, if one was given")
