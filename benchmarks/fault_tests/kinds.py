"""The kinds of faults, and the required reaction of a run to each. A kind may prepare the start of a run (environment). It strikes while the run goes on, and it
reports what is wrong with the end of the run."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))

import rounds
import two_hosts
from jobs import send

# Time-outs (pipeline.timeout, seconds). The short one is for runs that the time-out ends.
SHORT, LONG = 4, 60
GRACE = 5  # all processes must be gone this many seconds after the time-out or the fault
ERROR = "twobp: error: "


class Trial:
    """One start of a run. `struck` is the time of the fault on the monotonic clock, or None if the run ended before."""

    def __init__(self, run, random, expected_seconds):
        self.run, self.random = run, random
        self.expected_seconds = expected_seconds
        self.job = None
        self.struck = None
        self.moment = ""

    def told(self):
        return self.run.metrics.read_text().count("\n") if self.run.metrics.exists() else 0

    def wait(self, condition, poll=0.0005):
        """Waits for the condition. Returns False if the job ends before."""
        while not condition():
            if self.job.ended():
                return False
            time.sleep(poll)
        return True

    def wait_moment(self):
        """Waits for a random moment. In one of three cases it is a moment in the whole life of the process, otherwise in its training."""
        if self.random.random() < 1 / 3:
            return self.wait_from(self.job.begin, 1)
        return self.wait_moment_of_training(0.5)

    def wait_moment_of_training(self, share):
        """Waits for a random moment after the first step, within that share of the expected time."""
        before = self.told()
        return self.wait(lambda: self.told() > before) and self.wait_from(time.monotonic(), share)

    def wait_from(self, begin, share):
        at = begin + self.random.uniform(0, share * self.expected_seconds)
        return self.wait(lambda: time.monotonic() >= at)

    def strike(self, action):
        if not self.job.ended() and action():
            self.struck = time.monotonic()
            self.moment = f"after {self.struck - self.job.begin:.2f} s, {self.told()} steps reported"

    def some_rank(self, program):
        """The process id of a random rank, or None if there is none at the moment."""
        ranks = self.job.ranks(program)
        self.rank = self.random.choice(sorted(ranks)) if ranks else None
        self.pid = ranks.get(self.rank)
        return self.pid


class Kind:
    name = ""
    timeout = LONG
    processes = 2
    # Whether the run notices the fault only by its time-out.
    waits = False
    # Why this machine cannot run this kind, or None if it can.
    missing = None
    # How many seconds the launcher's processes may outlive those of the program.
    launcher_seconds = 0

    def __init__(self, program):
        self.program = program

    def make_run(self, make):
        return make()

    def launcher(self, usual):
        return usual

    def environment(self, trial):
        return {}

    def strike(self, trial):
        raise NotImplementedError

    def problems(self, trial):
        return []

    def after(self, trial):
        """Changes the run before it is resumed."""

    def is_whole(self, folder):
        """Whether this kind has left the checkpoint undamaged."""
        return True

    def remove_run(self):
        pass


def errors_of(trial):
    return [line for line in trial.job.err.read_text(errors="replace").splitlines() if line.startswith(ERROR)]


def one_report(trial, parts):
    errors = errors_of(trial)
    problems = [] if len(errors) == 1 else [f"{len(errors)} reports instead of one: {errors}"]
    return problems + [f"no '{part}' in: {errors[0]}" for part in parts if errors and part not in errors[0]]


class KillRank(Kind):
    name = "kill -9 of a rank"

    def strike(self, trial):
        if trial.wait_moment():
            trial.strike(lambda: (pid := trial.some_rank(self.program)) and send(pid, signal.SIGKILL))

    def problems(self, trial):
        return [] if trial.job.exit_code() != 0 else ["exit code 0"]


class KillAll(Kind):
    name = "kill -9 of the launcher"

    def strike(self, trial):
        if trial.wait_moment():
            trial.strike(lambda: send(trial.job.process.pid, signal.SIGKILL))


class StopRank(Kind):
    name = "SIGSTOP of a rank"
    timeout = SHORT
    waits = True

    def strike(self, trial):
        # Only from the first step on, because earlier the launcher's own library waits.
        if trial.wait_moment_of_training(0.4):
            trial.strike(lambda: (pid := trial.some_rank(self.program)) and send(pid, signal.SIGSTOP))
        if trial.struck:
            time.sleep(0.3)
            # After the end of all work, only the launcher waits for the rank, and it waits for ever.
            if "\nsaved " in trial.job.out.read_text(errors="replace"):
                send(trial.pid, signal.SIGCONT)
                trial.struck = None

    def problems(self, trial):
        problems = one_report(trial, ["pipeline.timeout"])
        # The waiting one may be training or writing a checkpoint.
        named = [f"from rank {trial.rank}", f"to rank {trial.rank}", f"no part of process {trial.rank}"]
        if not any(name in error for error in errors_of(trial) for name in named):
            problems.append(f"the frozen rank {trial.rank} is not named: {errors_of(trial)}")
        return problems


class Terminate(Kind):
    name = "SIGTERM to all ranks"
    one = False

    def strike(self, trial):
        if not trial.wait_moment_of_training(0.4):
            return
        ranks = trial.job.ranks(self.program)
        chosen = [trial.random.choice(sorted(ranks))] if self.one and ranks else sorted(ranks)
        trial.strike(lambda: any([send(ranks[rank], signal.SIGTERM) for rank in chosen]))

    def problems(self, trial):
        text = trial.job.err.read_text(errors="replace")
        told = [line for line in text.splitlines() if "stopped by SIGTERM after step" in line]
        if trial.job.exit_code() == 0 and not told:
            trial.struck = None  # it was in the very last step
            return []
        problems = [] if trial.job.exit_code() == 143 else [f"exit code {trial.job.exit_code()} instead of 143"]
        if len(told) != 1 or "checkpoint written" not in told[0]:
            return problems + [f"not exactly one line reports the stop: {told}"]
        step = int(told[0].split("after step ")[1].split()[0])
        newest = max(trial.run.steps(), default=0)
        return problems if newest == step else problems + [f"stopped after step {step}, newest checkpoint {newest}"]


class TerminateOne(Terminate):
    name = "SIGTERM to one rank"
    one = True


class Throw(Kind):
    """Throws an exception at a random step and micro-batch of a random rank."""

    def __init__(self, program, where):
        super().__init__(program)
        self.where = where
        self.name = f"exception in {where}"

    def environment(self, trial):
        last = max(trial.run.steps(), default=0)
        trial.step = last + trial.random.randint(1, 30)
        trial.rank = trial.random.randrange(self.processes)
        fault = f"{self.where}:step={trial.step}:{'replica' if rounds.experts else 'rank'}={trial.rank}"
        if self.where in "FIW":
            fault += f":micro_batch={2 * trial.rank * rounds.experts + trial.random.randrange(2 if rounds.experts else 4)}"
        trial.fault = fault
        return {"TWOBP_FAIL": fault}

    def strike(self, trial):
        trial.wait(lambda: errors_of(trial) or trial.job.ended())
        if errors_of(trial):
            trial.struck = time.monotonic()
            trial.moment = trial.fault

    def problems(self, trial):
        parts = ["a failure on demand", f"(process {trial.rank} of {self.processes}, on "]
        if self.where != "loader":
            parts += [f"rank {0 if rounds.experts else trial.rank}, step {trial.step}, "]
        problems = one_report(trial, parts)
        return problems if trial.job.exit_code() == 1 else problems + [f"exit code {trial.job.exit_code()}"]


class KillWriter(Kind):
    name = "kill -9 in a checkpoint's write"

    def strike(self, trial):
        folder = trial.run.checkpoints

        def writing():
            try:
                return any(".new" in name for name in os.listdir(folder))
            except FileNotFoundError:
                return False

        before, skip = trial.told(), trial.random.randint(0, 20)
        if trial.wait(lambda: trial.told() > before + skip) and trial.wait(writing, 0.0001):
            time.sleep(trial.random.uniform(0, 0.006))
            trial.strike(lambda: (pid := trial.some_rank(self.program)) and send(pid, signal.SIGKILL))

    def problems(self, trial):
        return [] if trial.job.exit_code() != 0 else ["exit code 0"]


class FullDisk(Kind):
    """Gives the run a file system of its own, which fills up at a random moment."""

    name = "disk full"
    megabytes = 8
    missing = None if os.geteuid() == 0 else "a file system of its own needs root"

    def make_run(self, make):
        self.disk = pathlib.Path(tempfile.mkdtemp(prefix="twobp-disk-"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.megabytes}m", "tmpfs", self.disk], check=True)
        return make(checkpoints=self.disk / "checkpoints")

    def remove_run(self):
        subprocess.run(["umount", self.disk], check=True)
        self.disk.rmdir()

    def strike(self, trial):
        if trial.wait_moment():
            trial.strike(self.fill)

    def fill(self):
        with open(self.disk / "ballast", "wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
        return True

    def problems(self, trial):
        if trial.job.exit_code() == 0:  # its last checkpoint was already on the disk
            trial.struck = None
            return []
        errors = errors_of(trial)
        full = any("No space left" in error or "disk" in error for error in errors)
        problems = [] if full and trial.job.exit_code() == 1 else [f"exit code {trial.job.exit_code()}, {errors}"]
        return problems + ([] if len(errors) == 1 else [f"{len(errors)} reports"])

    def after(self, trial):
        (self.disk / "ballast").unlink(missing_ok=True)


class Damage(KillRank):
    """Damages the newest checkpoint after a kill. The run must skip it and say so."""

    def __init__(self, program, how):
        super().__init__(program)
        self.how = how
        self.name = f"{how} checkpoint"
        self.damaged = set()  # folders; a folder that was written again counts as another one

    @staticmethod
    def which(folder):
        at = folder.stat()
        return at.st_ino, at.st_ctime_ns  # inodes are reused

    def is_whole(self, folder):
        return self.which(folder) not in self.damaged

    def after(self, trial):
        whole = [folder for folder in map(trial.run.checkpoint, trial.run.steps()) if self.is_whole(folder)]
        if len(whole) < 2:
            return
        folder = whole[-1]
        file = trial.random.choice(sorted(p for p in folder.iterdir() if p.is_file()))
        size = file.stat().st_size
        # The file must be its own, because checkpoints share frozen weights.
        copy = folder / "copy"
        shutil.copy(file, copy)
        copy.replace(file)
        if self.how == "torn":
            if trial.random.random() < 0.2:
                file.unlink()
            else:
                os.truncate(file, trial.random.randrange(size))
        else:
            data = bytearray(file.read_bytes())
            data[trial.random.randrange(size)] ^= 1 << trial.random.randrange(8)
            file.write_bytes(data)
        self.damaged.add(self.which(folder))
        trial.moment += f"; {self.how}: {folder.name}/{file.name}"


class CutLink(Kind):
    """Cuts the link between two hosts. No packet arrives any more, and there is no error message."""

    name = "link cut between two hosts"
    timeout = SHORT
    waits = True
    missing = two_hosts.missing()
    # mpirun itself waits for its other half until TCP times out.
    launcher_seconds = 20

    def make_run(self, make):
        self.hosts = two_hosts.TwoHosts(delay=0.2e-3, mbit=1000)
        self.hosts.__enter__()
        return make()

    def remove_run(self):
        self.hosts.__exit__()

    def launcher(self, usual):
        self.hosts.mend()
        return [*self.hosts.mpirun(), "-n", str(self.processes)]

    def strike(self, trial):
        if trial.wait_moment_of_training(0.4):
            trial.strike(lambda: self.hosts.cut() or True)
        if trial.struck:
            time.sleep(0.3)
            # After the end of all work, there is nothing to report.
            if "\nsaved " in trial.job.out.read_text(errors="replace"):
                self.hosts.mend()
                trial.struck = None

    def problems(self, trial):
        errors = errors_of(trial)
        # The two hosts can no longer reach each other.
        problems = [] if 1 <= len(errors) <= 2 else [f"{len(errors)} reports: {errors}"]
        return problems + [f"no time-out in: {error}" for error in errors if "pipeline.timeout" not in error]


def all_kinds(program):
    return [KillRank(program), KillAll(program), StopRank(program), Terminate(program), TerminateOne(program),
            *[Throw(program, where) for where in ("F", "I", "W", "optimizer", "loader")], KillWriter(program),
            FullDisk(program), Damage(program, "torn"), Damage(program, "bit-flipped"), CutLink(program)]
