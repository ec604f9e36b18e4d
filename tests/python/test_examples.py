"""Runs the examples, each of which has fewer than 80 lines."""
import pathlib

import pytest

import fresh

EXAMPLES = sorted((pathlib.Path(__file__).resolve().parents[2] / "examples/python").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    assert len(path.read_text().splitlines()) < 80
    fresh.run(path, tmp_path)
