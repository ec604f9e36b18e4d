"""The output of compare.py: one Markdown table per setting, the errors of PyTorch's schedules, and the machine."""
import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys

from configuration import REPOSITORY
from contenders import ALL

MIB = 2**20


def summarise(setting):
    base = setting["contenders"][0]
    seconds = {(run["contender"], run["repeat"]): run["step_seconds"]
               for run in setting["runs"] if "error" not in run}
    summary = []
    for contender in setting["contenders"]:
        runs = [run for run in setting["runs"] if run["contender"] == contender]
        errors = [run["error"] for run in runs if "error" in run]
        runs = [run for run in runs if "error" not in run]
        row = {"contender": contender, "repeats": len(runs)} | ({"error": errors[0]} if errors else {})
        if runs:
            pairs = [run["repeat"] for run in runs if (base, run["repeat"]) in seconds]
            ratios = [seconds[contender, repeat] / seconds[base, repeat] for repeat in pairs]
            row |= {"step_seconds": spread([run["step_seconds"] for run in runs]), "ratio": spread(ratios),
                    "idle_fraction": [statistics.median(ranks)
                                      for ranks in zip(*(run["idle_fraction"] for run in runs))]}
            for key in ("items_per_second", "peak_resident_bytes", "peak_anonymous_bytes"):
                row[key] = statistics.median(run[key] for run in runs)
        summary.append(row)
    return summary


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def first_line(text):
    """The first line of an error, for a cell of a table."""
    return text.strip().splitlines()[0].replace("|", "\\|")[:300] if text.strip() else "no message"


def markdown_table(setting):
    lines = [f"### {setting['title']}, M = {setting['micro_batches']}", "",
             f"| | seconds per step (min–max) | / twobp (min–max) | {setting['item']}/s | idle, by rank | resident, MiB "
             "| of it anonymous, MiB |", "|---|---|---|---|---|---|---|"]
    for row in setting["summary"]:
        title = ALL[row["contender"]].title
        if not row["repeats"]:
            lines.append(f"| {title} | failed: {first_line(row.get('error', 'not run'))} | | | | | |")
            continue
        step, ratio = row["step_seconds"], row["ratio"]
        against = f"{ratio['median']:.3f} ({ratio['min']:.3f}–{ratio['max']:.3f})" if ratio else ""
        idle = " / ".join(f"{fraction:.3f}" for fraction in row["idle_fraction"])
        lines.append(f"| {title} | {step['median']:.4f} ({step['min']:.4f}–{step['max']:.4f}) | {against} "
                     f"| {row['items_per_second']:.0f} | {idle} | {row['peak_resident_bytes'] / MIB:.0f} "
                     f"| {row['peak_anonymous_bytes'] / MIB:.0f} |")
    runs = setting["runs"]
    lines += ["", f"{len(runs)} runs, {sum(run['disturbed'] for run in runs)} of them disturbed by other programs, "
              f"{sum('error' in run for run in runs)} failed."]
    if "layer_seconds" in setting:
        lines += ["", "PyTorch's stages were cut by these milliseconds of its layers, forward and backward: "
                  + ", ".join(f"{1000 * seconds:.1f}" for seconds in setting["layer_seconds"]) + "."]
    return "\n".join(lines)


def field(path, key):
    with open(path) as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith(key)), "unknown")


def git(*words):
    done = subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_machine(args):
    commit = git("rev-parse", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no"):
        commit += " and local changes"
    machine = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
               "cpu": field("/proc/cpuinfo", "model name"), "cores": os.cpu_count(), "cores used": args.cores,
               "memory": field("/proc/meminfo", "MemTotal"), "system": f"Linux {platform.release()}",
               "python": platform.python_version(), "torch": version("torch")}
    if "transformers" in args.rivals:
        machine["transformers"] = version("transformers")
    return machine | {"twobp commit": commit,
                      "command": shlex.join(["compare.py", *sys.argv[1:]]).replace(f"{REPOSITORY}/", "")}
