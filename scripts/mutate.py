#!/usr/bin/env python3
"""Mutation testing of the parts without LibTorch: changes one place of a source file, and runs the tests.

A mutant that no test notices survives: a test is missing there, or the change has no effect (an equivalent
mutant, which a person has to judge). Every file is compiled by itself in a folder of its own, so a mutant costs
one compiler run and one run of the tests. The source tree is never changed.

    scripts/mutate.py --sample 200 --seed 1                 # of all mutants of core, schedule and plan
    scripts/mutate.py --files twobp/plan/candidates.cpp     # all mutants of a file
    scripts/mutate.py --only 17,42                          # the mutants of these numbers
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ["TWOBP_EVERY_WAY"] = "1"  # all rounds of tests with random cases
FOLDERS = ["core", "schedule", "plan"]
FLAGS = ["-std=c++20", "-O1", "-D_GLIBCXX_ASSERTIONS", "-DTWOBP_SOURCE_DIR=\"%s\"" % ROOT, "-I", str(ROOT / "include"), "-I", str(ROOT)]
LIBRARIES = ["-lgtest_main", "-lgtest", "-lpthread"]
TIMEOUT = 3  # times the processor seconds of the tests without a mutant

# (pattern, replacements); a pattern with spaces around an operator leaves pointers, templates and signs alone.
OPERATORS = [
    (r" <= ", [" < ", " > "]), (r" >= ", [" > ", " < "]), (r" < ", [" <= ", " >= "]), (r" > ", [" >= ", " <= "]),
    (r" == ", [" != "]), (r" != ", [" == "]), (r" && ", [" || "]), (r" \|\| ", [" && "]),
    (r" \+ ", [" - "]), (r" - ", [" + "]), (r" \* ", [" / "]), (r" / ", [" * "]),
    (r" \+= ", [" -= "]), (r" -= ", [" += "]), (r"\+\+(?=\w)", ["--"]), (r"--(?=\w)", ["++"]),
    (r"(?<=if \()(?=[^;]*\)( \{| \w|$))", ["!!NOT!!"]),
    (r"(?<![\w.\"'])(0|1|2)(?![\w.\"'xe])", ["!!NUMBER!!"]),
    (r"std::max\(", ["std::min("]), (r"std::min\(", ["std::max("]),
    (r"\btrue\b", ["false"]), (r"\bfalse\b", ["true"]),
]
STATEMENT = re.compile(r"^\s+(?!return|const|auto|double|int|size_t|std::|case|using|break|throw|fail|bool|TWOBP)"
                       r"[\w.\[\]()+*>-]+.*;$")
SKIPPED = re.compile(r"^\s*(//|#|TWOBP_CHECK|fail\(|static_assert|template|using|namespace)|TWOBP_CHECK|std::string_view|\bfail\(")


def negated(line, at):
    """The line with the condition of the `if (` before `at` negated; None if it does not end on the line."""
    depth = 0
    for i in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth < 0:
            condition = line[at:i]
            head, _, condition = condition.rpartition("; ")  # if (init; condition)
            return line[:at] + (head + "; " if head else "") + "!(" + condition + ")" + line[i:]
    return None


def mutants_of(path):
    """(path, its lines, line number, old line, new line) for each change."""
    lines = path.read_text().split("\n")
    in_message = False
    for number, line in enumerate(lines):
        if "TWOBP_CHECK" in line or "fail(" in line:
            in_message = True
        skipped = in_message or SKIPPED.search(line)
        if in_message and line.rstrip().endswith(";"):
            in_message = False
        if skipped or not line.startswith("  "):
            continue
        code = line.split("  //")[0]
        seen = set()
        for pattern, replacements in OPERATORS:
            for match in re.finditer(pattern, code):
                if code[:match.start()].count('"') % 2 == 1:
                    continue  # within a text
                for replacement in replacements:
                    if replacement == "!!NOT!!":
                        new = negated(code, match.start())
                    elif replacement == "!!NUMBER!!":
                        new = code[:match.start()] + str(int(match.group()) + 1) + code[match.end():]
                    else:
                        new = code[:match.start()] + replacement + code[match.end():]
                    if new and new not in seen:
                        seen.add(new)
                        yield path, lines, number, line, new
        if STATEMENT.match(code) and code.count("(") == code.count(")") and "{" not in code:
            whole = number > 0 and lines[number - 1].rstrip().endswith((";", "{", "}"))
            if whole:
                yield path, lines, number, line, "  ;"


class Build:
    def __init__(self, folder, jobs, compiler_prefix):
        self.folder = folder
        self.jobs = jobs
        self.prefix = compiler_prefix
        self.sources = sorted(p for f in FOLDERS for p in (ROOT / "twobp" / f).rglob("*.cpp"))
        self.tests = sorted(p for f in FOLDERS for p in (ROOT / "tests" / f).glob("*.cpp"))
        self.reached = {}
        folder.mkdir(parents=True, exist_ok=True)

    def object(self, source):
        return self.folder / ("_".join(source.relative_to(ROOT).parts) + ".o")

    def compile(self, source, target=None, text=None):
        """Compiles a file, or `text` in its place. Returns whether it could."""
        target = target or self.object(source)
        command = self.prefix + ["g++", *FLAGS, "-DTWOBP_FILE=" + source.stem, "-MMD", "-c", "-o", str(target)]
        if text is None:
            command.append(str(source))
        else:
            command += ["-I", str(source.parent), "-x", "c++", "-"]
        run = subprocess.run(command, input=text, text=True, capture_output=True)
        return run.returncode == 0

    def is_old(self, source):
        target = self.object(source)
        depends = target.with_suffix(".d")
        if not target.exists() or not depends.exists():
            return True
        files = depends.read_text().replace("\\\n", " ").split()[1:]
        made = target.stat().st_mtime
        return any(not pathlib.Path(f).exists() or pathlib.Path(f).stat().st_mtime > made for f in files)

    def all(self):
        old = [s for s in self.sources + self.tests if self.is_old(s)]
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            for source, good in zip(old, pool.map(self.compile, old)):
                if not good:
                    sys.exit(f"{source} does not compile")
        self.link(self.folder / "tests", {})
        self.find_reached()

    def find_reached(self):
        """The sources that each test links: a mutant of another one cannot change it."""
        library = self.folder / "sources.a"
        library.unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", str(library), *(str(self.object(s)) for s in self.sources)], check=True)
        for test in self.tests:
            command = ["g++", "-Wl,--print-map", "-o", str(self.folder / "reached"), str(self.object(test))]
            run = subprocess.run([*command, str(library), *LIBRARIES], text=True, capture_output=True, check=True)
            members = set(re.findall(r"sources\.a\((\S+)\)", run.stdout))
            self.reached[test] = {s for s in self.sources if self.object(s).name in members}
        for source in self.sources:
            if not any(source in reached for reached in self.reached.values()):
                print(f"no test links {source}, so no test can notice its mutants")

    def tests_for(self, source):
        """The tests that reach the source, those of its header and folder first: they are the likeliest to notice a
        mutant, and GoogleTest runs tests in the order in which they are linked."""
        header = str(source.with_suffix(".h").relative_to(ROOT))
        folder = source.relative_to(ROOT).parts[1]
        return sorted((t for t in self.tests if source in self.reached[t]),
                      key=lambda t: (header not in t.read_text(), t.parent.name != folder, t))

    def link(self, program, replaced):
        tests = self.tests_for(next(iter(replaced))) if replaced else self.tests
        objects = [str(replaced.get(s, self.object(s))) for s in self.sources + tests]
        subprocess.run(["g++", "-o", str(program), *objects, *LIBRARIES], check=True)


def limited(seconds):
    """For subprocesses: a mutant that loops ends after this much processor time, one that fills memory at 4 GiB."""
    def set_limits():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    return set_limits


class Suite:
    """The tests in two parts, so that most mutants meet only the quick ones."""

    def __init__(self, program):
        run = subprocess.run([str(program)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if run.returncode != 0:
            sys.exit("the tests fail without a mutant:\n" + "\n".join(re.findall(r"\[  FAILED  \].*", run.stdout)))
        times = {name: int(ms) for name, ms in re.findall(r"OK \] (\S+) \((\d+) ms\)", run.stdout)}
        slow = [name for name, ms in times.items() if ms > 0.03 * sum(times.values())]
        quick_ms = sum(ms for name, ms in times.items() if name not in slow)
        self.parts = [("-" + ":".join(slow), quick_ms)]
        if slow:
            self.parts.append((":".join(slow), sum(times.values()) - quick_ms))

    def passes(self, program):
        for names, ms in self.parts:
            command = [str(program), "--gtest_fail_fast", "--gtest_brief=1", "--gtest_filter=" + names]
            run = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 preexec_fn=limited(5 + TIMEOUT * ms // 1000))
            if run.returncode != 0:
                return False
        return True


def verdict(build, suite, mutant, slot):
    path, lines, number, _, new = mutant
    lines = lines[:number] + [new] + lines[number + 1:]
    target = build.folder / f"mutant{slot}.o"
    if not build.compile(path, target, "\n".join(lines)):
        return "invalid"
    program = build.folder / f"mutant{slot}"
    build.link(program, {path: target})
    return "survived" if suite.passes(program) else "killed"


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sample", type=int, default=0, help="number of mutants, chosen at random; 0: all")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--files", nargs="*", default=[], help="only of these; default: all")
    options.add_argument("--only", default="", help="only the mutants of these numbers")
    options.add_argument("--list", action="store_true", help="print the mutants and stop")
    options.add_argument("--minutes", type=float, default=0, help="stop after this time; 0: never")
    options.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "mutants")
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--with", dest="prefix", default="", help="prefix of compiler commands, such as ccache")
    given = options.parse_args()

    build = Build(given.folder, given.jobs, given.prefix.split())
    mutants = [m for source in build.sources for m in mutants_of(source)]
    chosen = list(range(len(mutants)))
    if given.only:
        chosen = [int(n) for n in given.only.split(",")]
    if given.files:
        wanted = {str((ROOT / f).resolve()) for f in given.files}
        chosen = [n for n in chosen if str(mutants[n][0]) in wanted]
    if given.sample:
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    if given.list:
        for n in sorted(chosen):
            path, _, number, old, new = mutants[n]
            print(f"{n} {path.relative_to(ROOT)}:{number + 1}\n  - {old.strip()}\n  + {new.strip()}")
        return
    build.all()
    suite = Suite(build.folder / "tests")

    begin = time.time()
    counts = {"killed": 0, "survived": 0, "invalid": 0}
    slots = list(range(given.jobs))

    def judge(n):
        if given.minutes and time.time() - begin > 60 * given.minutes:
            return n, None
        slot = slots.pop()
        result = verdict(build, suite, mutants[n], slot)
        slots.append(slot)
        return n, result

    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for n, result in pool.map(judge, chosen):
            if result is None:
                continue
            counts[result] += 1
            if result == "survived":
                path, _, number, old, new = mutants[n]
                print(f"{n} {path.relative_to(ROOT)}:{number + 1}\n  - {old.strip()}\n  + {new.strip()}\n"
                      f"  ({counts['killed']} killed so far, {counts['survived']} survived)", flush=True)
    judged = counts["killed"] + counts["survived"]
    print(f"{len(mutants)} mutants; of {judged} that compile {counts['killed']} killed, {counts['survived']} survived "
          f"({100 * counts['killed'] / max(1, judged):.1f} % killed); {counts['invalid']} do not compile")


if __name__ == "__main__":
    main()
