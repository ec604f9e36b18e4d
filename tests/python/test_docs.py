"""Runs each block of Python in docs/python.md in a process of its own."""
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path, timeout=120)


def test_the_page_has_blocks():
    assert len(BLOCKS) == 3
