#!/usr/bin/env python3
"""The rules of docs/architecture.md that no tool knows: which folder may include which, that a header says what it is for, and that
the source files that the docs name exist."""
import os
import re
import subprocess
import sys

# folder -> the folders under twobp/ it may include, beside itself
ALLOWED = {
    "core": set(),
    "schedule": {"core"},
    "plan": {"core", "schedule"},
    "config": {"core"},
    "files": {"core"},
    "nn": {"core"},
    "data": {"core", "config", "files", "nn"},  # nn/context.h: what a batch is
    "models": {"core", "config", "files", "nn", "data"},  # data/model_input.h: what a model reads
    "transport": {"core", "nn"},  # nn/values.h: what a message carries; nn/device: where it is
    "pipeline": {"core", "schedule", "plan", "config", "nn", "models", "transport"},
    "autograd": {"core", "nn"},
    "train": {"core", "schedule", "plan", "config", "files", "nn", "data", "models", "transport", "pipeline"},
    "trace": {"core", "schedule", "pipeline"},  # pipeline/observer.h: what a step reports
}
TORCH_FREE = {"core", "schedule", "plan", "config"}

problems = []
files = subprocess.run(["git", "ls-files", "*.cpp", "*.h"], check=True, capture_output=True, text=True).stdout.split()
for path in files:
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if not lines or not lines[0].startswith("//"):
        if path.endswith(".h"):
            problems.append(f"{path}: a header opens with a few lines that say what it is for")
    parts = path.split("/")
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
            problems.append(f"{path}:{number}: {folder} is free of torch")
pages = subprocess.run(["git", "ls-files", "*.md"], check=True, capture_output=True, text=True).stdout.split()
for page in set(pages) - {"CHANGELOG.md"}:  # which tells of files that were
    with open(page, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            for name in re.findall(r"`([\w/.-]+/[\w.-]+\.(?:h|cpp|cu|py))`", line):
                if not any(os.path.exists(os.path.join(root, name)) for root in ("", "twobp", os.path.dirname(page))):
                    problems.append(f"{page}:{number}: {name} does not exist")
print("\n".join(problems) or "layout: ok")
sys.exit(bool(problems))
