#!/usr/bin/env python3
"""Compiles each source of twobp/ and apps/ by itself, without making objects. The build joins several sources of a folder, so that one
that lacks an include may compile there until another source joins it. Takes the folder of a build: scripts/compile_alone.py build/release"""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def command_for(entry, source):
    """The compiler's command of a build, for another source."""
    words, command = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-o", "-MF", "-MT"):
            next(words)
        elif word not in ("-c", "-MD", entry["file"]):
            command.append(word)
    while "=" in command[0] or not re.search(r"(\+\+|cc|clang)[\d.-]*$", command[0]) or command[0].endswith("ccache"):
        command.pop(0)  # a launcher
    return [*command, "-fsyntax-only", str(source)]


def commands(build):
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"])
        sources = re.findall(r'^#include "(.*\.cpp)"$', file.read_text(), re.MULTILINE) if "Unity" in file.parts else [file]
        for source in map(pathlib.Path, sources):
            if source.is_relative_to(ROOT / "twobp") or source.is_relative_to(ROOT / "apps"):
                yield source, entry["directory"], command_for(entry, source)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    found = {source: (folder, command) for source, folder, command in commands(build)}  # some are in several targets

    def compile_one(source):
        folder, command = found[source]
        return source, subprocess.run(command, cwd=folder, capture_output=True, text=True)

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, run in pool.map(compile_one, sorted(found)):
            if run.returncode != 0:
                failed += 1
                print(f"{source.relative_to(ROOT)} does not compile by itself:\n{run.stderr}", file=sys.stderr)
    print(f"{len(found)} sources compiled by themselves, {failed} failed")
    sys.exit(failed > 0 or not found)


if __name__ == "__main__":
    main()
