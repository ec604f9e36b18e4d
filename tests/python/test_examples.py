"""Runs the examples, each of which has fewer than 80 lines, and the notebook."""
import json
import pathlib
import subprocess

import pytest

import fresh

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples/python").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    if "data/fashion-mnist" in text and subprocess.run([ROOT / "examples/fashion_mnist/get"]).returncode != 0:
        pytest.skip("examples/fashion_mnist/get has failed: its pictures are a package of Debian's")
    fresh.run(path, tmp_path)


def test_the_notebook_runs():
    notebook = json.loads((ROOT / "examples/python/schedules.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # those of a reader's machine
    names: dict = {}
    for cell in cells:
        exec(compile(cell, "schedules.ipynb", "exec"), names)
    assert names["split"].step < names["plain"].step and names["found"]["zb-v"].bubble < names["found"]["1f1b"].bubble
