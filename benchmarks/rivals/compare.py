"""Compares twobp with PyTorch's pipelining. One command runs both alternately and prints a Markdown table.

    python benchmarks/rivals/compare.py --model bert --json bert.json    two stages on two pinned cores
    python benchmarks/rivals/compare.py --model bert --single            one stage and one thread, against PyTorch eager
    python benchmarks/rivals/compare.py --model bert --quick             tiny sizes, to check that the script works

For each size and number of micro-batches, every contender runs once per repeat. The contenders run one after another on the same cores, in reversed order every other
repeat. Each run waits until the machine is quiet. Ratios are taken within each repeat. It needs twobp (build/release/twobp) and a Python with torch.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import contenders
import pitfalls
import probe
import report
import sizes
from configuration import CAPTURED, MODELS, REPOSITORY, default_config, read_config

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import planned

TIMEOUT_SECONDS = 600
SLOW_TIMEOUT_SECONDS = 3600
FOREIGN_LIMIT = 0.03  # share of the cores that other programs may use during a run; above it, the run is repeated
ATTEMPTS = 3
RIVALS = (*contenders.PIPELINES, *contenders.UNDIVIDED, *contenders.SINGLES)


# ---------------------------------------------------------------- one run
def run_once(args, name, size, setting, layers, way):
    """The results of one run of one contender, or an `error`."""
    slow = contenders.ALL[name].slow
    with tempfile.TemporaryDirectory() as folder:
        json_path = pathlib.Path(folder) / "twobp.json"
        args.timeout = SLOW_TIMEOUT_SECONDS if slow else TIMEOUT_SECONDS
        command = [str(word) for word in
                   contenders.command(args, name, size, setting["micro_batches"], layers, way, json_path)]
        outcome = probe.run(command, args.cores, args.patience, args.timeout)
        result = {"contender": name, "command": without_machine_paths(command, folder, layers),
                  "quiet": outcome.quiet, "foreign_share": outcome.foreign_share}
        result["disturbed"] = not outcome.quiet or outcome.foreign_share > FOREIGN_LIMIT
        if outcome.exit_code != 0:
            lines = outcome.stderr.strip().splitlines() or [f"exit code {outcome.exit_code}"]
            return result | {"error": lines[-1], "stderr": outcome.stderr.strip()[-4000:]}
        try:
            if contenders.ALL[name].schedule is None:
                (row,) = json.loads(json_path.read_text())["rows"]
                idle, processes = row["idle_fraction"], list(outcome.memory)
            else:
                row = json.loads(outcome.stdout.strip().splitlines()[-1])
                idle = [rank["idle_fraction"] for rank in row["ranks"]]
                processes = [rank["pid"] for rank in row["ranks"]]  # without their parent process
            memory = [outcome.memory[pid] for pid in processes]
        except (ValueError, KeyError, IndexError, OSError) as error:
            return result | {"error": f"its result cannot be read: {type(error).__name__}: {error}"}
        return result | {"step_seconds": row["step_seconds"],
                         "items_per_second": setting["items_per_step"] / row["step_seconds"], "idle_fraction": idle,
                         "peak_resident_bytes": sum(m.peak_resident for m in memory),
                         "peak_anonymous_bytes": sum(m.peak_anonymous for m in memory), "reported": row}


def without_machine_paths(command, folder, layers):
    text = shlex.join(command)
    places = {f"{REPOSITORY}/": "", f"{folder}/": "", f"{layers.parent}/": "", sys.executable: "python"}
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def run_undisturbed(args, name, size, setting, layers, way):
    """The first of a few attempts that no other program disturbed, or else the least disturbed one."""
    runs = []
    for _ in range(1 if args.quick or contenders.ALL[name].slow else ATTEMPTS):
        runs.append(run_once(args, name, size, setting, layers, way))
        if "error" in runs[-1] or not runs[-1]["disturbed"]:
            return runs[-1] | {"attempts": len(runs)}
    return min(runs, key=lambda run: (not run["quiet"], run["foreign_share"])) | {"attempts": len(runs)}


# ---------------------------------------------------------------- one setting
def measured(args, command):
    """The output of a command that measures layers, undisturbed if possible."""
    for _ in range(1 if args.quick else ATTEMPTS):
        outcome = probe.run([str(word) for word in command], args.cores, args.patience, TIMEOUT_SECONDS)
        if outcome.exit_code != 0:
            sys.exit(f"compare.py: cannot measure the layers:\n{outcome.stderr.strip()}")
        if outcome.quiet and outcome.foreign_share <= FOREIGN_LIMIT:
            break
    return outcome.stdout


def measure_layers(args, size, path):
    """Writes the costs of the model's layers, as balance.py measures them, to `path`."""
    path.write_text(measured(args, contenders.balance_command(args, size)))
    return [layer["seconds"] for layer in json.loads(path.read_text())]


def plan(args, costs, micro_batches):
    """The options of `twobp bench` that `twobp plan` chooses from its own costs."""
    csv, answer = (costs.with_name(f"planned_{micro_batches}{suffix}") for suffix in (".csv", ".json"))
    words = [args.twobp, *planned.plan_arguments(costs, micro_batches, csv), "--json", answer]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode != 0:
        sys.exit(f"compare.py: twobp has no plan:\n{done.stderr.strip()}")
    return planned.bench_arguments(json.loads(answer.read_text())["choices"][0], csv)


def new_setting(args, size, micro_batches):
    config = read_config(default_config(args.model), sizes.as_settings(size))
    sequence = config.get("data", {}).get("sequence") if args.model != "resnet" else None
    return {"title": sizes.describe(args.model, size), "model": args.model, "size": size, "micro_batches": micro_batches,
            "item": "tokens" if sequence else "images",
            "items_per_step": micro_batches * config["pipeline"]["micro_batch_size"] * (sequence or 1),
            "contenders": contenders.names_of(args, micro_batches), "runs": []}


def run_setting(args, size, setting, layers, way, save):
    """Fills `setting` and saves it after every run, so that an interruption loses no run."""
    names = setting["contenders"]
    failed = set()
    for repeat in range(args.repeats):
        for name in names if repeat % 2 == 0 else names[::-1]:
            if name in failed or (contenders.ALL[name].slow and repeat >= args.slow_repeats):
                continue
            run = run_undisturbed(args, name, size, setting, layers, way) | {"repeat": repeat}
            setting["runs"].append(run)
            if "error" in run and name not in contenders.BASES:
                failed.add(name)  # it would fail again
            what = run.get("error") or f"{run['step_seconds']:.4f} s/step"
            note = ", disturbed" if run["disturbed"] else ""
            print(f"{args.model}, M = {setting['micro_batches']}, repeat {repeat + 1}/{args.repeats}, {name}: {what}{note}",
                  file=sys.stderr, flush=True)
            setting["summary"] = report.summarise(setting)
            save()


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
    parser.add_argument("--model", choices=MODELS + CAPTURED, default="llama")
    parser.add_argument("--sizes", type=list_of(str), help=f"sizes from sizes.py (default: all sizes of the model except {', '.join(sizes.NOT_BY_DEFAULT)})")
    parser.add_argument("--micro-batches", type=list_of(int), help="default 2,4; with --quick 2")
    parser.add_argument("--rivals", type=list_of(str, RIVALS),
                        help=f"some of {','.join([*contenders.PIPELINES, *contenders.UNDIVIDED])}; with --single, some of {','.join(contenders.SINGLES)} "
                             f"(default: all for the model except {', '.join(contenders.NOT_BY_DEFAULT)})")
    parser.add_argument("--repeats", type=int, help="default 5; with --quick 1")
    parser.add_argument("--slow-repeats", type=int, default=1,
                        help="repeats of contenders that take minutes per step (a scan as a loop), default 1")
    parser.add_argument("--steps", type=int, help="measured steps of each run, default 6; with --quick 2")
    parser.add_argument("--warmup", type=int, help="steps before the measured ones, default 2; with --quick 1")
    parser.add_argument("--cut-at", choices=("blocks", "halves"), default="blocks",
                        help="where PyTorch's stages may start: at whole blocks (default), or, for llama and bert, also "
                             "between the halves of a block")
    parser.add_argument("--cores", type=list_of(int), help="default: the first two cores that this process may use")
    parser.add_argument("--patience", type=float, help="seconds to wait for a quiet machine, default 400")
    parser.add_argument("--twobp", type=pathlib.Path, default=REPOSITORY / "build" / "release" / "twobp")
    parser.add_argument("--json", type=pathlib.Path, help="file for all runs and the summary")
    parser.add_argument("--no-pitfalls", action="store_true", help="skip the check of PyTorch's schedules against eager")
    parser.add_argument("--mpi", action="store_true", help="also run twobp with one process per stage, over MPI")
    parser.add_argument("--slices", type=int, default=1, help="also run twobp with each sequence cut into this many slices (llama, mamba)")
    parser.add_argument("--single", action="store_true", help="run one stage and one thread, against PyTorch eager")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and no waiting; the figures mean nothing")
    args = parser.parse_args()
    check_arguments(parser, args)
    return args


def check_arguments(parser, args):
    if args.model in CAPTURED and (args.mpi or args.single):
        parser.error(f"--model {args.model} is compared in one process on two ranks: leave out --mpi and --single "
                     "(benchmarks/captured_step.py compares one rank)")
    if args.mpi and args.single:
        parser.error("--mpi needs two stages: leave out --single")
    if args.quick and args.sizes:
        parser.error("--quick has its own size: leave out --sizes")
    allowed = contenders.SINGLES if args.single else contenders.PIPELINES | contenders.UNDIVIDED
    for name in args.rivals or ():
        if name not in allowed or not allowed[name].takes_part(args.model, sys.maxsize):
            parser.error(f"{name} is not available with --model {args.model}{' --single' if args.single else ''}")
    table = sizes.SIZES[args.model]
    for name in args.sizes or ():
        if name not in table:
            parser.error(f"--sizes {name} is unknown; use one of {', '.join(table)} with --model {args.model}")
    if args.slices > 1 and (args.single or args.model not in ("llama", "mamba")):
        parser.error("--slices needs --model llama or mamba, and two stages")
    defaults = {"sizes": [name for name in table if name not in sizes.NOT_BY_DEFAULT], "micro_batches": [2, 4], "repeats": 5, "steps": 6, "warmup": 2, "patience": 400.0}
    if args.quick:
        defaults |= {"sizes": ["quick"], "micro_batches": [2], "repeats": 1, "steps": 2, "warmup": 1, "patience": 0.0}
    for key, value in (defaults | {"rivals": contenders.default_rivals(args)}).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if min(args.repeats, args.slow_repeats, args.steps, *args.micro_batches) < 1 or args.warmup < 0:
        parser.error("--repeats, --slow-repeats, --steps and --micro-batches must be at least 1, --warmup at least 0")
    for package in ("torch", *(["transformers"] if "transformers" in args.rivals or args.model in CAPTURED else [])):
        if importlib.util.find_spec(package) is None:
            parser.error(f"no {package} in {sys.executable}; use a Python that has torch==2.13.0 and, for --model mamba "
                         "--single, the packages in tests/requirements.txt")
    if not default_config(args.model).is_file():
        parser.error(f"{default_config(args.model)} does not exist")
    if not os.access(args.twobp, os.X_OK):
        parser.error(f"{args.twobp} is missing or not executable: build twobp first, or give --twobp PATH")
    args.twobp = args.twobp.resolve()
    usable = sorted(os.sched_getaffinity(0))
    args.cores = args.cores or usable[:2]
    if len(set(args.cores)) != 2 or not set(args.cores) <= set(usable):
        parser.error(f"two cores are needed, but this process may use only these: {usable}")


def main():
    args = parse_arguments()
    os.sched_setaffinity(0, args.cores)  # all measured programs inherit this
    machine = report.describe_machine(args)
    result = {"machine": machine, "settings": []}

    def save():
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    for size in [sizes.QUICK[args.model] if args.quick else sizes.SIZES[args.model][name] for name in args.sizes]:
        with tempfile.TemporaryDirectory() as folder:
            layers = pathlib.Path(folder) / "layers.json"
            costs = pathlib.Path(folder) / "costs.json"
            seconds = None if args.single else measure_layers(args, size, layers)
            if not args.single and args.model not in CAPTURED:
                measured(args, contenders.profile_command(args, size, costs))
            for micro_batches in args.micro_batches:
                setting = new_setting(args, size, micro_batches) | ({"layer_seconds": seconds} if seconds else {})
                result["settings"].append(setting)
                way = None if args.single or args.model in CAPTURED else plan(args, costs, micro_batches)
                run_setting(args, size, setting, layers, way, save)
                print(report.markdown_table(setting) + "\n", flush=True)
    schedules = [name for name in args.rivals if name in pitfalls.SCHEDULES and args.model not in CAPTURED]
    if schedules and not args.no_pitfalls:
        result["pitfalls"] = pitfalls.check(args.model, default_config(args.model), schedules)
        print(pitfalls.markdown_table(args.model, result["pitfalls"]) + "\n", flush=True)
        save()
    for key, value in machine.items():
        print(f"- {key}: {value if not isinstance(value, list) else ', '.join(map(str, value))}")
    if any("error" in run for setting in result["settings"] for run in setting["runs"]
           if run["contender"] in contenders.BASES):
        sys.exit("compare.py: some of twobp's runs failed; the messages are above")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("compare.py: interrupted; the --json file, if given, has all completed runs")
