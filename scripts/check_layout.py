#!/usr/bin/env python3
"""The rules of docs/architecture.md that no tool knows: which folder may include which, how long a file may be."""
import re
import subprocess
import sys

# folder -> the folders under twobp/ it may include, beside itself
ALLOWED = {
    "core": set(),
    "schedule": {"core"},
    "plan": {"core", "schedule"},
    "nn": {"core"},
    "transport": {"core", "nn"},  # nn/values.h: what a message carries; nn/device: where it is
    "pipeline": {"core", "schedule", "plan", "nn", "transport"},
    "autograd": {"core", "nn"},
    "train": {"core", "schedule", "plan", "nn", "transport", "pipeline"},
    "trace": {"core", "schedule", "pipeline"},  # pipeline/observer.h: what a step reports
}
TORCH_FREE = {"core", "schedule", "plan"}
MOST_LINES = 400

problems = []
files = subprocess.run(["git", "ls-files", "*.cpp", "*.h"], check=True, capture_output=True, text=True).stdout.split()
for path in files:
    with open(path, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if len(lines) > MOST_LINES:
        problems.append(f"{path}: {len(lines)} lines, more than {MOST_LINES}: one idea a file")
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
print("\n".join(problems) or "layout: ok")
sys.exit(bool(problems))
