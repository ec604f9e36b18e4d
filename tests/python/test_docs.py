"""Runs each block of Python in README.md and docs/python.md in a process of its own."""
import pathlib
import re

import pytest

import fresh

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCKS = [(page, block) for page in ("README.md", "docs/python.md")
          for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("page, block", BLOCKS, ids=[f"{page}-{i}" for i, (page, _) in enumerate(BLOCKS)])
def test_a_block_runs(page, block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block)
    fresh.run(script, tmp_path, cwd=tmp_path, timeout=120)


def test_both_pages_have_blocks():
    assert {page for page, _ in BLOCKS} == {"README.md", "docs/python.md"}
