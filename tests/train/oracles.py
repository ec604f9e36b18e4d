"""Answers the calls of the comparisons with transformers. One process imports transformers for all of them.

    oracles.py FOLDER     the folder of the modules *_oracle.py

Prints "ok", or "skip: ..." if a package is missing. Then each line of the input, "MODULE FUNCTION FOLDER", is a call. The answer
is "ok". If the call fails, the process ends.
"""
import importlib
import importlib.util
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
missing = [name for name in ("numpy", "torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
print(f"skip: {sys.executable} has no {', '.join(missing)}" if missing else "ok", flush=True)
for line in sys.stdin:
    module, function, folder = line.rstrip("\n").split(" ", 2)
    getattr(importlib.import_module(module), function)(pathlib.Path(folder))
    print("ok", flush=True)
