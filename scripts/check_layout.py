#!/usr/bin/env python3
"""Checks rules of docs/architecture.md that no tool checks: which folder may include which, that every header begins with a comment
about its purpose, and that the source files and tests named in the docs exist. Every test must be built, and tests/mutants.md must have
the waits of scripts/mutate_waits.py."""
import os
import re
import subprocess
import sys

# folder -> the folders under twobp/ that it may include, besides itself
ALLOWED = {
    "core": set(),
    "schedule": {"core"},
    "plan": {"core", "schedule"},
    "config": {"core"},
    "files": {"core"},
    "nn": {"core"},
    "data": {"core", "config", "files", "nn"},  # nn/context.h: the definition of a batch
    "graph": {"core", "files", "nn"},
    "models": {"core", "config", "files", "nn", "data", "graph"},  # data/data_config.h: the definition of a model's input
    "transport": {"core", "nn"},  # nn/values.h: the values in a message; nn/device: their device
    "pipeline": {"core", "schedule", "plan", "config", "nn", "data", "models", "transport"},  # data/data.h: typical samples, to measure on
    "autograd": {"core", "nn"},
    "train": {"core", "schedule", "plan", "config", "files", "nn", "data", "models", "transport", "pipeline"},
    "trace": {"core", "schedule", "pipeline"},  # pipeline/observer.h: the events of a step
}
TORCH_FREE = {"core", "schedule", "plan", "config"}
MOST_PUBLIC = 40

problems = []
files = subprocess.run(["git", "ls-files", "*.cpp", "*.h"], check=True, capture_output=True, text=True).stdout.split()
texts = {}
for path in files:
    with open(path, encoding="utf-8") as file:
        texts[path] = file.read()
for path in files:
    lines = texts[path].splitlines()
    if not lines or not lines[0].startswith("//"):
        if path.endswith(".h"):
            problems.append(f"{path}: a header must begin with a comment about its purpose")
    parts = path.removeprefix("include/").split("/")
    if parts[0] != "twobp" or len(parts) < 3:
        continue
    folder = parts[1]
    for number, line in enumerate(lines, 1):
        include = re.match(r'#include [<"]([^>"]+)[>"]', line)
        if not include:
            continue
        name = include.group(1)
        if name.startswith("twobp/"):
            target = name.split("/")[1]
            if target != folder and target not in ALLOWED[folder]:
                problems.append(f"{path}:{number}: {folder} must not include {target}")
        elif folder in TORCH_FREE and re.match(r"(ATen|c10|torch)/", name):
            problems.append(f"{path}:{number}: {folder} must not include torch")


includes = {path: re.findall(r'^#include [<"]([^">]+)[>"]', text, re.MULTILINE) for path, text in texts.items()}
includes = {path: ["include/" + name if "include/" + name in texts else name for name in names] for path, names in includes.items()}
for path, names in includes.items():  # what programs outside need must be installed
    for name in names:
        if path.startswith(("include/", "examples/", "tests/consumer/")) and name.startswith("twobp/"):
            problems.append(f"{path}: {name} is private: only headers in include/ are installed")
public = [path for path in files if path.startswith("include/")]
if len(public) > MOST_PUBLIC:
    problems.append(f"include/ has {len(public)} headers, but programs should need at most {MOST_PUBLIC}: move one beside its source")
for path in files:
    if path.startswith("tests/") and path.endswith("_test.cpp"):
        folder = os.path.dirname(path)
        while not os.path.exists(f"{folder}/CMakeLists.txt"):
            folder = os.path.dirname(folder)
        with open(f"{folder}/CMakeLists.txt", encoding="utf-8") as file:
            lists = file.read()
        if os.path.relpath(path, folder) not in lists and "FOLDER" not in lists:
            problems.append(f"{path}: {folder}/CMakeLists.txt does not name it, so it does not run")

tests = set()
for path in files:
    tests.update(re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", texts[path], re.MULTILINE))
pages = subprocess.run(["git", "ls-files", "*.md"], check=True, capture_output=True, text=True).stdout.split()
for page in set(pages) - {"CHANGELOG.md"}:  # it names files that no longer exist
    with open(page, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            for name in re.findall(r"`([\w/.-]+/[\w.-]+\.(?:h|cpp|cu|py))`", line):
                if not any(os.path.exists(os.path.join(root, name)) for root in ("", "include", "twobp", "include/twobp", os.path.dirname(page))):
                    problems.append(f"{page}:{number}: {name} does not exist")
            for suite, name in re.findall(r"`([A-Z]\w*)\.([A-Z]\w*)(?:/\w+)*`", line):
                if (suite, name) not in tests:
                    problems.append(f"{page}:{number}: there is no test {suite}.{name}")
with open("scripts/mutate_waits.py", encoding="utf-8") as script, open("tests/mutants.md", encoding="utf-8") as page:
    waits = re.findall(r'^    \("([^"]+)", ', script.read(), re.MULTILINE)
    rows = re.findall(r"^\| ([^|]+) \| `", page.read().partition("## Waits between streams")[2], re.MULTILINE)
    if waits != rows:
        problems.append(f"tests/mutants.md has other waits than scripts/mutate_waits.py: {sorted(set(waits) ^ set(rows)) or 'another order'}")
print("\n".join(problems) or "layout: ok")
sys.exit(bool(problems))
