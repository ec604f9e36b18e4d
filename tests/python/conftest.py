"""Data and trainers for the tests of the Python package."""
import gc
import os
import tempfile

import pytest
import torch

import twobp

DIM = 16
# A module that one test has captured is not captured again by the next. Tests of the cache name their own folder.
CACHE = tempfile.TemporaryDirectory(prefix="twobp-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name
os.environ.pop("TWOBP_CACHE", None)


def pytest_addoption(parser):
    parser.addoption("--cases", choices=["first", "others"],
                     help="of a test with parameters, run the first case alone, and no test that is marked slow; or all others")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes over 5 s of a core")


def pytest_collection_modifyitems(config, items):
    if which := config.getoption("--cases"):
        first = {}
        for item in items:
            first.setdefault((item.path, item.originalname), item)
        first = {item for item in first.values() if item.get_closest_marker("slow") is None}
        chosen = [item for item in items if (item in first) == (which == "first")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_collection_finish():
    gc.freeze()  # tracing collects garbage often, and the objects of the imports stay anyway


@pytest.fixture
def vectors():
    """A batch of 8 samples."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, DIM, generator=generator) for name in ("input", "target")}


@pytest.fixture
def make(vectors):
    """Makes a trainer of a small configured model, with micro-batches of 2 samples."""
    def make(**settings):
        settings = {"ranks": 2, "micro_batches": 4, "optimizer": twobp.AdamW(lr=1e-2), "seed": 3, **settings}
        return twobp.Trainer(model={"type": "mlp", "dim": DIM, "layers": 6},
                             example={name: tensor[:2] for name, tensor in vectors.items()}, **settings)
    return make
