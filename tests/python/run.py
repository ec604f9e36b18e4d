"""Runs pytest on this folder. Exit code 77: there is no pytest."""
import importlib.util
import pathlib
import subprocess
import sys

if importlib.util.find_spec("pytest") is None:
    sys.exit(77)
here = pathlib.Path(__file__).parent
sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", *sys.argv[1:], here]).returncode)
