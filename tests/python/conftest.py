"""Data and trainers for the tests of the Python package."""
import os

import pytest
import torch

import twobp

DIM = 16
os.environ["TWOBP_CACHE"] = "off"  # tests of the cache name their own folder


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
