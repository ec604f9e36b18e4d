#!/usr/bin/env python3
"""Injects faults into training runs under mpirun, at random moments, and checks the required properties. No process hangs or is left over. The first failure is
reported once. The run resumes from the newest complete checkpoint. It ends with the weights and losses of an undisturbed run, bit for bit. It prints a table with
one row per kind of fault.

    benchmarks/fault_tests/study.py build/release/twobp --count 50 --json benchmarks/results/faults.json
    benchmarks/fault_tests/study.py build/release/twobp --count 2 --kinds SIGSTOP W
"""
import argparse
import json
import os
import pathlib
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time

import kinds
import rounds

SKIPPED = 77  # CTest's exit code for skipped tests


def launcher(processes):
    flags = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*shlex.split(os.environ.get("TWOBP_MPIRUN", "mpirun --oversubscribe")), *flags, "-n", str(processes)]


class Study:
    def __init__(self, program, folder, seed):
        self.program, self.folder, self.seed = program, pathlib.Path(folder), seed
        self.reference = rounds.Reference(folder, program, random.Random(seed))
        run = rounds.Run(self.folder / "processes", kinds.LONG, random.Random(seed))
        job = run.start(launcher(2), program)
        if job.wait_gone(job.begin + 300) is None or job.exit_code() != 0:
            raise SystemExit(f"the undisturbed run of two processes failed: {job.err.read_text()}")
        problems = self.reference.problems_at_end(run)
        if problems:
            raise SystemExit(f"the undisturbed run of two processes differs from that of one: {problems}")
        self.seconds = job.seconds()

    def one_start(self, kind, run, trial, strikes):
        """Starts the run, injects the fault, and returns a list of problems."""
        whole = [step for step in run.steps() if kind.is_whole(run.checkpoint(step))]
        newest = max(whole, default=0)
        passed_over = len(whole) != len(run.steps())
        environment = kind.environment(trial) if strikes else {}
        trial.job = run.start(kind.launcher(launcher(kind.processes)), self.program, environment)
        if strikes:
            kind.strike(trial)
        allowed = kinds.GRACE + (kind.timeout if kind.waits else 0) if trial.struck else 120 + self.seconds
        gone = trial.job.wait_gone((trial.struck or time.monotonic()) + allowed, self.program,
                                   kind.launcher_seconds if trial.struck else 0)
        problems = []
        if gone is None:
            problems.append(f"processes left after {allowed:.0f} s: {trial.job.left}")
        elif trial.struck:
            trial.gone = gone - trial.struck
            problems += kind.problems(trial)
        if trial.struck is None and trial.job.exit_code() != 0:
            problems.append(f"exit code {trial.job.exit_code()} without a fault: {trial.job.err.read_text()[-500:]}")
        problems += self.reference.problems_of_losses(run)
        trial.resumed = rounds.resumed_step(trial.job.out.read_text(errors="replace"))
        if trial.resumed is not None and trial.resumed != newest:
            problems.append(f"resumed after step {trial.resumed}, the newest whole checkpoint was of step {newest}")
        if trial.resumed and passed_over and "warning" not in trial.job.err.read_text(errors="replace"):
            problems.append("skipped a damaged checkpoint without a warning")
        return problems

    def run_kind(self, kind, count):
        dice = random.Random(f"{self.seed} {kind.name}")
        trials, problems, left, compared, missed = [], [], 0, 0, 0
        begin = time.monotonic()
        while len(trials) < count and not (left or len(problems) > 5):
            number = compared
            make = lambda **more: rounds.Run(self.folder / f"{kind.name} {number}".replace(" ", "-"), kind.timeout, dice,
                                             **more)
            run = kind.make_run(make)
            for _ in range(10 * count + 20):
                strikes = len(trials) < count
                trial = kinds.Trial(run, dice, self.seconds)
                wrong = self.one_start(kind, run, trial, strikes)
                where = f"{kind.name}, seed {self.seed}, fault {len(trials) + 1} ({trial.moment}): "
                problems += [where + one for one in wrong]
                left += bool(trial.job.left)
                if trial.struck:
                    kind.after(trial)
                    trials.append({"moment": trial.moment, "gone_seconds": getattr(trial, "gone", None),
                                   "exit_code": trial.job.exit_code(), "resumed_after_step": trial.resumed})
                elif strikes:
                    missed += 1
                if wrong:
                    keep = pathlib.Path(tempfile.mkdtemp(prefix="twobp-fault-"))
                    shutil.copytree(run.folder, keep / "run")
                    problems[-1] += f" (kept in {keep})"
                if (trial.struck is None and trial.job.exit_code() == 0) or trial.job.left or len(problems) > 5:
                    break
            if not left and len(problems) <= 5:
                problems += [f"{kind.name}, seed {self.seed}: " + one for one in self.reference.problems_at_end(run)]
                compared += 1
            kind.remove_run()
            run.remove()
        gone = [trial["gone_seconds"] for trial in trials if trial["gone_seconds"] is not None]
        return {"kind": kind.name, "blows": len(trials), "done_before_the_blow": missed, "runs_compared": compared,
                "left_over": left, "gone_median_seconds": statistics.median(gone) if gone else None,
                "gone_most_seconds": max(gone, default=None), "timeout_seconds": kind.timeout if kind.waits else 0,
                "limit_seconds": kinds.GRACE + (kind.timeout if kind.waits else 0),
                "seconds": time.monotonic() - begin, "problems": problems, "trials": trials}


def row(result):
    text = lambda value: "" if value is None else f"{value:.1f}"
    return (f"{result['kind']:32}{result['blows']:6}{text(result['gone_median_seconds']):>9}"
            f"{text(result['gone_most_seconds']):>7}{result['limit_seconds']:7}{result['left_over']:7}{result['runs_compared']:10}"
            f"{len(result['problems']):10}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=50, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("TWOBP_SEED", 1)))
    parser.add_argument("--kinds", nargs="+", default=[], help="only those with one of these words in their names")
    parser.add_argument("--streamed", action="store_true", help="without clipping, with streamed or kept gradients by chance")
    parser.add_argument("--experts", action="store_true", help="with two replicas that share experts in place of a pipeline")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rounds.streamed, rounds.experts = options.streamed, options.experts
    program = options.program.resolve()
    if shutil.which(launcher(2)[0]) is None:
        print(f"skipped: there is no {launcher(2)[0]}")
        sys.exit(SKIPPED)
    results = []
    with tempfile.TemporaryDirectory(prefix="twobp-faults-") as folder:
        study = Study(program, folder, options.seed)
        print(f"{rounds.STEPS} steps of a small model under mpirun -n 2, with a checkpoint every {rounds.EVERY} steps; an undisturbed "
              f"run: {study.seconds:.1f} s; seed {options.seed}\n")
        print(f"{'':32}{'':6}{'until all have ended, s':>23}{'':7}{'runs':>10}")
        print(f"{'':32}{'times':>6}{'median':>9}{'max':>7}{'limit':>7}{'left':>7}{'compared':>10}{'problems':>10}")
        for kind in kinds.all_kinds(program):
            if options.kinds and not any(word in kind.name.split() for word in options.kinds):
                continue
            if kind.missing:
                print(f"{kind.name:32}skipped: {kind.missing}")
                continue
            results.append(study.run_kind(kind, options.count))
            print(row(results[-1]), flush=True)
            for problem in results[-1]["problems"]:
                print(f"  {problem}", flush=True)
    blows = sum(result["blows"] for result in results)
    problems = sum(len(result["problems"]) for result in results)
    print(f"\n{blows} faults, {sum(r['runs_compared'] for r in results)} runs compared with the undisturbed one to the bit, "
          f"{problems} problems")
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "count": options.count, "steps": rounds.STEPS,
                                            "undisturbed_seconds": study.seconds, "results": results}, indent=1) + "\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
