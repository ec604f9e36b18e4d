"""Training runs that are broken and resumed until they are complete. They are compared bit by bit with an undisturbed run."""
import hashlib
import json
import pathlib
import re
import shutil

from jobs import Job

STEPS = 120
EVERY = 4  # steps between checkpoints
streamed = False  # runs do not clip, and stream their gradients or keep them (study.py --streamed)
experts = False  # processes are replicas that share experts, not ranks of a pipeline (study.py --experts)
# Messages of the program, in the order of their appearance.
RESUMED = re.compile(r"resumed after step (\d+)")
ANEW = "starting from the beginning"


def config(folder, timeout, stages=2):
    """A model whose steps take milliseconds. Every few steps it writes a checkpoint."""
    result = {
        "model": {"type": "llama", "dim": 32, "layers": 2, "heads": 2, "hidden": 64, "vocab": 64, "tied": True},
        "data": {"synthetic": "tokens", "sequence": 16, "held_out": 0},
        "pipeline": {"stages": stages, "micro_batches": 4, "micro_batch_size": 2, "pin": False, "timeout": timeout},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": STEPS, "clip_norm": 0 if streamed else 0.5},
        "save": {"model": str(folder / "model"), "checkpoints": str(folder / "checkpoints"), "every": EVERY, "keep": 3},
    }
    if experts:
        result["model"] = {"type": "qwen3_moe", "dim": 32, "layers": 2, "heads": 2, "hidden": 16, "experts": 8, "experts_per_token": 2,
                           "vocab": 64}
        result["pipeline"] |= {"stages": 1, "data_parallel": 2, "experts": 2, "micro_batches": 2}
    return result


def tensors_in(folder):
    """Checksums of all tensors in the folder by name, no matter which file contains them."""
    found = {}
    for path in pathlib.Path(folder).glob("*.safetensors"):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, end = tensor["data_offsets"]
                content = hashlib.sha256(data[begin + first:begin + end]).hexdigest()
                found[name] = (tensor["dtype"], tensor["shape"], content)
    return found


def losses_in(path):
    """Step -> loss, from every complete line. A killed run may leave its last line incomplete."""
    losses = {}
    if pathlib.Path(path).exists():
        for line in pathlib.Path(path).read_text(errors="replace").splitlines():
            try:
                step = json.loads(line)
                losses[step["step"]] = step["loss"]
            except (ValueError, KeyError, TypeError):
                continue
    return losses


class Run:
    """One training run in a folder of its own, from its first start to its last step."""

    def __init__(self, folder, timeout, random, checkpoints=None):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True)
        self.random = random
        self.metrics = self.folder / "metrics.jsonl"
        self.content = config(self.folder, timeout)
        if checkpoints:
            self.content["save"]["checkpoints"] = str(checkpoints)
        self.checkpoints = pathlib.Path(self.content["save"]["checkpoints"])
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps(self.content))

    def steps(self):
        """The steps of its checkpoints, in ascending order."""
        if not self.checkpoints.exists():
            return []
        return sorted(int(p.name[5:]) for p in self.checkpoints.iterdir() if re.fullmatch(r"step-\d{8}", p.name))

    def checkpoint(self, step):
        return self.checkpoints / f"step-{step:08d}"

    def variation(self):
        """Random settings that do not change any bit of the results."""
        settings = [f"pipeline.schedule={self.random.choice(['naive', 'gpipe', '1f1b'])}",
                    f"pipeline.p2={self.random.choice(['off'] * (not streamed) + ['end', 'cooldown', 'fill'])}"]
        if streamed:
            settings.append(f"pipeline.gradients={self.random.choice(['kept', 'streamed'])}")
        return [part for setting in settings for part in ("--set", setting)]

    def start(self, launcher, program, environment=None, limits=None):
        command = [*launcher, program, "train", self.config, "--resume", "--metrics", self.metrics, *self.variation()]
        return Job(command, self.folder, environment, limits)

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


class Reference:
    """The undisturbed run. It is one process, and its ranks are threads."""

    def __init__(self, folder, program, random):
        run = Run(pathlib.Path(folder) / "reference", 60, random)
        job = run.start([], program)
        if job.wait_gone(job.begin + 300) is None or job.exit_code() != 0:
            raise SystemExit(f"the undisturbed run failed: {job.err.read_text()}")
        self.seconds = job.seconds()
        self.losses = losses_in(run.metrics)
        self.weights = tensors_in(run.folder / "model")
        if len(self.losses) != STEPS or not self.weights:
            raise SystemExit(f"the undisturbed run reported {len(self.losses)} steps instead of {STEPS}")

    def problems_of_losses(self, run):
        """Compares the losses that a run has reported so far with those of the undisturbed run."""
        told = losses_in(run.metrics)
        wrong = [step for step, loss in told.items() if self.losses.get(step) != loss]
        return [f"another loss in step {wrong[0]}"] if wrong else []

    def problems_at_end(self, run):
        problems = self.problems_of_losses(run)
        missing = set(self.losses) - set(losses_in(run.metrics))
        if missing:
            problems.append(f"step {min(missing)} is missing in the metrics")
        if tensors_in(run.folder / "model") != self.weights:
            problems.append("other weights")
        return problems


def resumed_step(text):
    """The step after which a run resumed. 0 if it started from the beginning. None if it ended earlier."""
    if ANEW in text:
        return 0
    found = RESUMED.search(text)
    return int(found.group(1)) if found else None
