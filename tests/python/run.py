"""Runs pytest on files of this folder: run.py [--cases first|others] FILE ..., or run.py [...] --except FILE ... Exit code 77: there is
no pytest."""
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("pytest") is None:
    sys.exit(77)
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
cases = [words.pop(0), words.pop(0)] if words[0] == "--cases" else []
given = [here / name for name in words if name != "--except"]
files = sorted(set(here.glob("test_*.py")) - set(given)) if "--except" in words else given
code = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", *cases, *files]).returncode
sys.exit(0 if cases and code == 5 else code)  # no test of these files has another case
