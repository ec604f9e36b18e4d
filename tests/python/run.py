"""Runs pytest on files of this folder: run.py FILE ..., or run.py --except FILE ... Exit code 77: there is no pytest."""
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("pytest") is None:
    sys.exit(77)
here = pathlib.Path(__file__).parent
given = [here / name for name in sys.argv[1:] if name != "--except"]
files = sorted(set(here.glob("test_*.py")) - set(given)) if "--except" in sys.argv else given
sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", *files]).returncode)
