#!/usr/bin/env python3
"""A user's session from an empty virtual environment: pip install ., and README's block of Python in an empty folder.

    session.py                   everything as docs/python.md says, with a build of the package from nothing (minutes)
    session.py BUILD_FOLDER      takes the compiled module from a build folder, and torch from this Python (seconds)
"""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = re.search(r"^pip install (torch==.*)$", (ROOT / "docs/python.md").read_text(), re.MULTILINE).group(1).split()


def run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(list(map(str, command)), check=True, env=environment, **options)


def main(built: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        venv.create(folder / "venv", with_pip=built is None)
        python, install = folder / "venv/bin/python", ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if built is None:
            run(python, *install, *PACKAGES)
            run(python, *install, "--no-build-isolation", ROOT)
        else:
            site = next(folder.glob("venv/lib/python*/site-packages"))
            (site / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
            run(sys.executable, "-m", "pip", "--python", python, *install[2:], "--no-deps", "--no-build-isolation", "--ignore-installed",
                "-C", f"cmake.define.TWOBP_BUILT={pathlib.Path(built).resolve()}", "-C", f"build-dir={folder / 'build'}", ROOT)
        (folder / "empty").mkdir()
        (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        where = "import twobp; print(twobp.__file__)\n"
        output = run(python, "-c", where + block, cwd=folder / "empty", stdout=subprocess.PIPE, text=True).stdout.split()
        print(*output)
        assert output[0].startswith(str(folder / "venv")), "another twobp than the installed one was imported"
        assert 0 < float(output[1]) < 10, "README's block prints the loss of a step"


if __name__ == "__main__":
    if len(sys.argv) > 1 and importlib.util.find_spec("scikit_build_core") is None:
        sys.exit(77)  # skipped, as other tests without their packages
    main(sys.argv[1] if len(sys.argv) > 1 else None)
