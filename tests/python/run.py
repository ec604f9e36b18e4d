"""Runs pytest on files of this folder: run.py [--cases first|others] FILE ... [--beside FILE ...], or run.py [...] --except FILE ... Files
after --beside mostly wait, so they run in a process of their own, beside the others. Exit code 77: there is no pytest."""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

if importlib.util.find_spec("pytest") is None:
    sys.exit(77)
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
cases = [words.pop(0), words.pop(0)] if words[0] == "--cases" else []
if words[0] == "--except":
    parts = [sorted({one.name for one in here.glob("test_*.py")} - set(words))]
else:
    parts = [part.split() for part in " ".join(words).split("--beside")]
with tempfile.TemporaryDirectory() as folder:
    started = [subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", f"--basetemp={folder}/{i}",
                                 *cases, *(here / name for name in part)]) for i, part in enumerate(parts)]
    codes = [one.wait() for one in started]
sys.exit(next((code for code in codes if code and not (cases and code == 5)), 0))  # 5: no test of these files has another case
