"""The package is refused by another torch than that of its build, and capture by one that it does not know."""
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import twobp
from twobp import torch_versions


def test_capture_refuses_a_torch_that_it_does_not_know(monkeypatch):
    module = torch.nn.Linear(3, 1).train()
    batch = {"input": torch.ones(4, 3)}
    for version in ("2.11.2", "2.15.0+cpu", "3.12.0", "2.1.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(twobp.Error, match=rf"other versions than 2.12, 2.13 and 2.14 may change; this is torch {version.replace('+', '.')}\. Install"):
            twobp.Trainer(module, batch, loss_fn=lambda output, batch: output.mean(), ranks=1)


@pytest.mark.parametrize("kept, here", [("2.14.1\n", "2.14.1+cu130"), ("2.13.0", "2.13.0"), ("2.14.0", "2.14.0a0+git1")])
def test_the_torch_of_the_build_is_taken(tmp_path, monkeypatch, kept, here):
    (tmp_path / "_native.torch").write_text(kept)
    monkeypatch.setattr(torch, "__version__", here)
    torch_versions.check_built_with(tmp_path)


@pytest.mark.parametrize("kept, here, built", [("2.14.1", "2.14.0+cpu", "2.14.1"), ("2.1.0", "2.1.01", "2.1.0"), (None, "2.14.0", "an unknown version")])
def test_another_torch_is_refused(tmp_path, monkeypatch, kept, here, built):
    if kept is not None:
        (tmp_path / "_native.torch").write_text(kept)
    monkeypatch.setattr(torch, "__version__", here)
    with pytest.raises(ImportError) as caught:
        torch_versions.check_built_with(tmp_path)
    assert str(caught.value) == (
        f"twobp was built with torch {built}, but this is torch {here}. Build it again with this one: pip install --no-build-isolation . (docs/python.md)")


def test_import_refuses_before_it_loads_the_module(tmp_path):
    (tmp_path / "twobp").mkdir()
    for path in pathlib.Path(twobp.__file__).parent.iterdir():
        (tmp_path / "twobp" / path.name).symlink_to(path)
    for path in (tmp_path / "twobp").glob("_native.*"):
        path.unlink()
    (tmp_path / "twobp/_native.torch").write_text("2.10.0")
    (tmp_path / "twobp/_native.py").write_text("print('loaded')")
    done = subprocess.run([sys.executable, "-c", "import twobp"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: twobp was built with torch 2.10.0" in done.stderr and done.stdout == ""
