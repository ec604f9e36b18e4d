"""Runs the commands of the documentation, so that they keep working.

    TWOBP_PROGRAM=build/release/twobp python tests/docs/commands_test.py [PAGE...]

A fenced block tagged `sh` is run. Blocks tagged `console` or `text` are not. `sh needs=NAME` is run only if NAME exists: a
program on the PATH, or a Python package. `sbatch` needs the same as scripts/slurm_node. The blocks of a page run one after
another in a scratch folder. In it, `build/release/twobp` is a stand-in that starts the real program with a small model and
few steps: it divides train.steps and save.every by 50. There are three more checks: links to files and headings must have a
target, docs/settings.md must list every key of the configuration, and it must be what scripts/settings.py writes.

Exit code 77 means that all commands that were run succeeded, but something was missing.
"""
import json
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/your_own_text.md", "docs/cluster.md", "docs/data.md", "docs/training.md")
LINKED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results/README.md",
          *sorted(str(path.relative_to(ROOT)) for folder in ("docs", "repro") for path in (ROOT / folder).rglob("*.md")))
SHARED = ("configs", "docs", "examples", "scripts")
SKIPPED = 77

STAND_IN = """#!/usr/bin/env python3
import os, re, sys
program, arguments = {program!r}, sys.argv[1:]
SLOW = re.compile("(train[.]steps|save[.]every)=([0-9]+)$")
SMALL = ["model.dim=64", "model.layers=2", "model.hidden=128", "data.sequence=64", "train.eval_batches=1"]
QUICK = {{"train": [*SMALL, "train.steps=4", "save.every=1", "train.eval_every=0"], "eval": SMALL}}
quick = [] if "--help" in arguments else QUICK.get(sys.argv[1], [])
if quick:
    arguments = [SLOW.sub(lambda key: f"{{key[1]}}={{max(1, int(key[2]) // 50)}}", text) for text in arguments]
    given = [text.split("=")[0] for text in arguments]
    arguments += ["--set", *(text for text in quick if text.split("=")[0] not in given)]
os.execv(program, [program, *arguments])
"""


def blocks(page):
    """Yields (line, requirement, commands) for each block that is run."""
    text = (ROOT / page).read_text()
    for match in re.finditer(r"^```sh(?: needs=(\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2]


def is_there(name):
    if name is None or shutil.which(name):
        return True
    python = os.environ["TWOBP_PYTHON"]
    return name.isidentifier() and subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0


def prepare(folder, program):
    for name in SHARED:
        (folder / name).symlink_to(ROOT / name)
    stand_in = folder / "build/release/twobp"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(STAND_IN.format(program=program))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    for text in ("my_texts/sample.txt", "data/kjv.txt"):
        (folder / text).parent.mkdir()
        (folder / text).write_text((ROOT / "docs/memory.md").read_text())


def run_page(page, program):
    """Returns the failures and the missing requirements."""
    failed, missing = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        prepare(folder, program)
        for line, needs, commands in blocks(page):
            where = f"{page}:{line}"
            if not is_there(needs):
                missing.append(f"{where} needs {needs}")
                continue
            command = ["bash", "-euo", "pipefail", "-c", commands]
            if needs == "sbatch":
                command = [ROOT / "scripts/slurm_node", *command]
            began = time.monotonic()
            environment = dict(os.environ, XDG_CACHE_HOME=str(folder / "cache"))  # of tokens
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", stdin=subprocess.DEVNULL,
                                  timeout=300)
            print(f"{where}: exit code {done.returncode}, {time.monotonic() - began:.1f} s", flush=True)
            if needs == "sbatch" and done.returncode == SKIPPED:
                missing.append(f"{where} needs a Slurm of one node: {done.stdout.strip()}")
            elif done.returncode != 0:
                failed.append(f"{where} failed:\n{commands}\n{done.stdout[-3000:]}")
                break
    return failed, missing


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors that GitHub makes of the headings."""
    for title in re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE):
        yield re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-")


def broken_links(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_code(ROOT / page)):
        if target.startswith(("http://", "https://")):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists():
            yield f"{page}: the link to {target} leads nowhere"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            yield f"{page}: {target or 'the page'} has no heading #{anchor}"


def undocumented_keys(program):
    text = (ROOT / "docs/settings.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    config = json.loads(subprocess.run([program, "train", "--print-config"], check=True, capture_output=True).stdout)
    for section, keys in config.items():
        for key in keys:
            if f"`{key}`" not in sections.get(section, "") and f"`{section}.{key}`" not in text:
                yield f"docs/settings.md says nothing of {section}.{key}"


def hand_written_settings(program):
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "settings.md"
        subprocess.run([sys.executable, ROOT / "scripts/settings.py", "--program", program, "--out", written], check=True)
        if written.read_text() != (ROOT / "docs/settings.md").read_text():
            yield "docs/settings.md is not what scripts/settings.py writes: run scripts/settings.py"


def main():
    program = os.path.abspath(os.environ["TWOBP_PROGRAM"])
    os.environ.setdefault("TWOBP_PYTHON", sys.executable)
    os.environ.update({"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                       "OMPI_MCA_rmaps_base_oversubscribe": "1"})
    failed = [problem for page in LINKED for problem in broken_links(page)]
    failed += [*undocumented_keys(program), *hand_written_settings(program)]
    missing = []
    for page in sys.argv[1:] or PAGES:
        problems, absent = run_page(page, program)
        failed += problems
        missing += absent
    print("\n".join([*failed, *(f"skipped: {what}" for what in missing)]))
    return 1 if failed else SKIPPED if missing else 0


if __name__ == "__main__":
    sys.exit(main())
