"""Code that the experiments share: the command line, calls of the program, results with their provenance, and plots.

An experiment is a folder with `run`, `plot` and a README. `run` measures and writes results.json and results.csv. `plot` draws results.svg and
results.png from them. results.json follows schema.json. `run --quick` runs the whole experiment with toy sizes, into a folder of its own, for
the tests.
"""
import argparse
import csv
import datetime
import json
import math
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys

from cores import speed_at_once

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = ["llama", "bert", "mamba", "resnet"]
# The paper's models, for experiments with on_gpus().
PRESETS = {"llama": "transformer_7b", "bert": "bert_large", "mamba": "mamba_1.4b", "resnet": "resnet_152"}
# Toy sizes for --quick, as --set options.
TOY = {
    "llama": ["model.dim=32", "model.heads=2", "model.hidden=64", "model.layers=2", "model.vocab=64", "data.sequence=16"],
    "bert": ["model.dim=32", "model.heads=2", "model.hidden=64", "model.layers=2", "model.vocab=64", "data.sequence=16"],
    "mamba": ["model.dim=32", "model.layers=2", "model.vocab=64", "data.sequence=16"],
    "resnet": ["model.depths=[1,1]", "model.widths=[8,16]", "model.stem=8", "model.classes=4", "data.image_size=16"],
}


def spread(samples):
    """A figure: the median of the samples, the lowest and highest one, and a confidence interval of the median."""
    return {"median": statistics.median(samples), "low": min(samples), "high": max(samples), "samples": len(samples),
            **median_interval(samples)}


def median_interval(samples):
    """The interval that contains the true median with at least 95 % confidence. It lies between the k-th lowest and the k-th highest of
    the n samples. k is the greatest number with P(fewer than k of n lie below the median) = sum over i < k of C(n, i) / 2^n <= 2.5 %. This
    assumes nothing about the distribution of the samples. It needs at least 6 samples; fewer give an empty result."""
    n, k, outside = len(samples), 0, 0.0
    while (outside := outside + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    ordered = sorted(samples)
    return {"median_low": ordered[k - 1], "median_high": ordered[-k]} if k else {}


def ratios(above, below):
    """The ratio of each round. Rounds are interleaved, so both sides ran under the same conditions."""
    return [a / b for a, b in zip(above, below)]


def first_line(command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def cpu_name():
    """The name of the CPU and its widest vectors. The speed of the libraries depends on both."""
    about = dict(line.split(":", 1) for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    widest = [f", {name}" for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in about.get("flags", "").split()]
    return about.get("model name", platform.processor() or "unknown") + "".join(widest[:1])


def gpu_names():
    """The names of the visible GPUs."""
    try:
        names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], check=True, capture_output=True,
                               text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [one.strip() for one in visible.split(",") if one.strip()]
    return [names[int(one)] if one.isdigit() and int(one) < len(names) else one for one in chosen]


def at_least_one(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1, but must be at least 1")
    return number


def on_gpus(parser):
    """Adds the option of an experiment that can run at the paper's size."""
    parser.add_argument("--gpus", type=at_least_one, metavar="N", help="run the paper's models (configs/presets) on N GPUs with one rank "
                        "on each; results go to `gpus` in this folder; with --quick, use toy sizes, and CPUs if there are no GPUs")


def on_device(parser):
    """Adds the option of an experiment that runs on one device."""
    parser.add_argument("--device", help="the kind of device (default: cuda, but with --quick a CPU); tests name their stand-in, which "
                        "then must be there")


def merged(rows):
    """Merges the rows of several rounds of `twobp bench`: all samples, the highest number of bytes, the median of other numbers."""
    row = dict(rows[0])
    for name, first in rows[0].items():
        values = [one[name] for one in rows]
        if name.endswith("_all"):
            row[name] = [sample for one in values for sample in one]
        elif name.endswith("_bytes"):
            row[name] = [max(ranks) for ranks in zip(*values)]
        elif isinstance(first, float):
            row[name] = statistics.median(values)
        elif isinstance(first, list) and all(isinstance(one, float) for one in first):
            row[name] = [statistics.median(ranks) for ranks in zip(*values)]
    return row


def text_of(result):
    """The result as JSON, with one line for each row."""
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    return json.dumps({**result, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n ]', 1) + "\n"


class Experiment:
    """One `run` with its options, its rows and its results."""

    def __init__(self, script, doc, options=lambda parser: None):
        self.folder = pathlib.Path(script).resolve().parent
        self.name = self.folder.name
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/twobp")
        parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
        parser.add_argument("--quick", action="store_true", help="one round with toy sizes, to see whether it runs at all")
        parser.add_argument("--out", type=pathlib.Path, help="folder for the results (default: this one; with --quick, "
                            "build/repro)")
        options(parser)
        self.options = parser.parse_args()
        if self.options.quick:
            self.options.repeats = 1
            self.options.out = self.options.out or ROOT / "build/repro" / self.name
        gpus = getattr(self.options, "gpus", None)
        self.options.out = (self.options.out or (self.folder / "gpus" if gpus else self.folder)).resolve()
        self.options.out.mkdir(parents=True, exist_ok=True)
        self.gpus = gpus
        self.ranks = gpus or 2
        self.device = self.find_gpus() if self.gpus else "cpu"
        self.rows = []
        self.not_measured = []
        self.cores_at_once = []
        self.check_cores()

    def check_cores(self):
        """Measures whether the cores are free, before and after an experiment."""
        self.cores_at_once.append(speed_at_once(0.01 if self.options.quick else 0.5))

    def call(self, *arguments):
        """Runs the program, or another command that starts with a path. Its output goes to stderr."""
        command = [str(a) for a in arguments]
        print("$ " + shlex.join(command), file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)

    def config(self, model):
        """The arguments that name a model's configuration: the benchmark's or the paper's. With --quick the model is small."""
        sets = TOY[model] if self.options.quick else []
        if self.gpus:
            sets = [*sets, f"pipeline.device={self.device}", f"pipeline.ranks={self.ranks}", "pipeline.split=[]"]
            if self.options.quick:  # two stages per rank
                sets.append(f"model.depths=[{self.ranks},{self.ranks}]" if model == "resnet" else f"model.layers={self.ranks}")
        file = f"presets/{PRESETS[model]}" if self.gpus else f"bench_{model}"
        return [ROOT / f"configs/{file}.json", *(["--set", *sets] if sets else [])]

    @staticmethod
    def preset(model):
        return json.loads((ROOT / f"configs/presets/{PRESETS[model]}.json").read_text())

    def find_gpus(self):
        here = len(gpu_names())
        if here >= self.gpus and self.has_gpu():
            return "cuda"
        if not self.options.quick:
            sys.exit(f"repro/{self.name}/run: --gpus {self.gpus} asks for more GPUs than this build can use here: "
                     f"{here if here < self.gpus else 'none'}")
        return "cpu"

    def bench(self, model, *arguments, rounds=None, steps=1):
        """Rows of `twobp bench`."""
        answer = self.options.out / "bench.json"
        self.call(self.options.program, "bench", *self.config(model), *arguments, "--repeat",
                  rounds or self.options.repeats, "--steps", steps, "--json", answer)
        rows = json.loads(answer.read_text())["rows"]
        answer.unlink()
        return rows

    def bench_in_turns(self, model, schedules, policies, *arguments):
        """Rows of `twobp bench` for several schedules, all interleaved. `1f1b` runs under every policy, and `zb-v@fill` runs under that one
        alone. One run of the program measures them all. A GPU may not hold a large model twice, so there each schedule has a run of its own, and
        these take turns."""
        if not self.gpus:
            return self.bench(model, "--schedules", *schedules, "--p2", *policies, *arguments)
        rows = {}
        for _ in range(self.options.repeats):
            for schedule in schedules:
                name, _, policy = schedule.partition("@")
                for row in self.bench(model, "--schedules", name, "--p2", *([policy] if policy else policies), *arguments, rounds=1):
                    rows.setdefault((row["schedule"], row["p2"], row["memory_cap"]), []).append(row)
        return [merged(one) for one in rows.values()]

    def one_device(self):
        """The device of an experiment with on_device(), or "cpu" if there is none that this build can use."""
        asked = self.options.device
        if self.options.quick and not asked:
            return "cpu"
        if self.has_gpu(asked or "cuda"):
            return asked or "cuda"
        if asked:
            sys.exit(f"repro/{self.name}/run: this build can use no {asked} here")
        return "cpu"

    def has_gpu(self, device="cuda"):
        """Whether there is a GPU, or another kind of device, that this build can use."""
        toy = [self.options.program.parent / "benchmarks/p2_on_device/p2_on_device", "--device", device, "--layers", "1", "--rows", "16",
               "--steps", "1"]
        done = subprocess.run(toy, capture_output=True, text=True)
        if done.returncode != 0 and "pipeline.device" not in done.stderr:  # otherwise it reports that there is none
            sys.exit(done.stderr)
        return done.returncode == 0

    def add(self, key, figures, paper=None):
        """Adds a row. `key` identifies it, `figures` maps names to numbers or spread()s, and `paper` is the paper's figure for the same case."""
        self.rows.append({"key": key, "figures": figures, **({"paper": paper} if paper is not None else {})})

    def skip(self, what, why):
        """Notes a measurement that this machine cannot make."""
        self.not_measured.append({"what": what, "why": why})

    def own_options(self):
        """The command line without paths, which differ between machines."""
        kept, skip = [], False
        for argument in sys.argv[1:]:
            if skip:
                skip = False
            elif argument.split("=")[0] in ("--out", "--program", "--costs"):
                skip = "=" not in argument
            else:
                kept.append(argument)
        return kept

    def provenance(self):
        gpus = gpu_names()
        git = lambda *a: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        packed = os.environ.get("TWOBP_COMMIT", "")  # what scripts/gpu/pack noted, for a machine without the repository
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        try:
            from importlib.metadata import version
            torch = version("torch")
        except ImportError:
            torch = "unknown"
        return {"machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1),
                            "system": platform.system(), **({"gpus": gpus} if gpus else {})},
                "versions": {"twobp": first_line([self.options.program, "--version"]), "torch": torch,
                             "compiler": first_line(["c++", "--version"])},
                "commit": packed.removesuffix("-dirty") or git("rev-parse", "--short", "HEAD") or "unknown",
                "modified": packed.endswith("-dirty") if packed else bool(
                    git("status", "--porcelain", "--untracked-files=no", "--", "twobp", "apps", "repro", "benchmarks", "configs",
                        ":(exclude)repro/*/results.*")),
                "command": f"repro/{self.name}/run " + shlex.join(self.own_options()),
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "repeats": self.options.repeats,
                "cores_at_once": self.cores_at_once}

    def save(self):
        del self.cores_at_once[1:]  # of an earlier save
        self.check_cores()
        result = {"experiment": self.name, "quick": self.options.quick, "provenance": self.provenance(),
                  "rows": self.rows, "not_measured": self.not_measured}
        path = self.options.out / "results.json"
        path.write_text(text_of(result))
        flat = [{**row["key"], **flatten(row["figures"]), "paper": row.get("paper", "")} for row in self.rows]
        names = list(dict.fromkeys(name for row in flat for name in row))
        with open(self.options.out / "results.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(flat)
        print(f"wrote {os.path.relpath(path)}", file=sys.stderr)


SPREAD = ["low", "high", "median_low", "median_high"]


def flatten(figures):
    flat = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat.update({name: value["median"], **{f"{name}_{of}": value[of] for of in SPREAD if of in value}})
        else:
            flat[name] = value
    return flat


class Plot:
    """One `plot`. It reads results.json from its own folder or from the given one, and writes results.svg and results.png."""

    def __init__(self, script, doc):
        import matplotlib
        matplotlib.use("Agg")
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("folder", type=pathlib.Path, nargs="?", default=pathlib.Path(script).resolve().parent)
        self.folder = parser.parse_args().folder
        self.result = json.loads((self.folder / "results.json").read_text())
        self.rows = self.result["rows"]

    def select(self, **key):
        return [row for row in self.rows if all(row["key"].get(name) == value for name, value in key.items())]

    @staticmethod
    def legend_above(axes):
        """Puts the legend in the upper left and makes room for it above the bars."""
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        axes.legend(fontsize=8, loc="upper left")

    def save(self, figure):
        figure.tight_layout()
        # Without a date and random ids, so that equal results give equal files.
        import matplotlib
        matplotlib.rcParams["svg.hashsalt"] = "twobp"
        figure.savefig(self.folder / "results.svg", metadata={"Date": None})
        figure.savefig(self.folder / "results.png", dpi=120)
        print(f"wrote {os.path.relpath(self.folder / 'results.svg')} and .png", file=sys.stderr)


def median(value):
    return value["median"] if isinstance(value, dict) else value
