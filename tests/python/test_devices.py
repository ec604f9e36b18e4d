"""Trainers whose ranks compute on devices other than a CPU: the stand-in of the C++ tests, with which this package's module is linked.
Its operators run late and in random order, and only LibTorch's operators reach its memory. The bits are those of the same operators on a CPU."""
import pathlib

import pytest
import torch

import fresh
import twobp
from test_module import make

HERE = pathlib.Path(__file__).parent
DEVICE = "privateuseone"


@pytest.fixture
def batch():
    ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.roll(-1, dims=1)}


def results_of(batch, folder, **settings):
    module, trainer = make(batch, **settings)
    results = [trainer.step(batch) for _ in range(2)]
    trainer.checkpoint(folder / "checkpoints")
    trainer.save(folder / "bundle")
    results.append(trainer.step({name: tensor[:5] for name, tensor in batch.items()}))
    loss = trainer.evaluate([batch]).loss
    return [(one.loss, one.grad_norm) for one in results], loss, trainer.state_dict(), trainer.optimizer_state()


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys() and all(torch.equal(tensor, other[2][name]) for name, tensor in one[2].items())
    assert one[3].keys() == other[3].keys()
    assert all(torch.equal(tensor, other[3][name][what]) for name, of in one[3].items() for what, tensor in of.items())


def test_a_device_gives_the_bits_of_its_operators_on_a_cpu(batch, tmp_path):
    expected = results_of(batch, tmp_path / "cpu")
    for i, settings in enumerate(({"schedule": "1f1b", "p2": "fill"}, {"schedule": "zb-v"}, {"ranks": 3, "p2": "off"}, {"ranks": 1})):
        folder = tmp_path / str(i)
        assert_same(expected, results_of(batch, folder, device=DEVICE, **settings))
        for name in ("model.safetensors", "graph.json"):
            assert (folder / "bundle" / name).read_bytes() == (tmp_path / "cpu/bundle" / name).read_bytes()
    _, trainer = make(batch, device=DEVICE)
    assert trainer.resume(tmp_path / "0/checkpoints") == []
    small = trainer.step({name: tensor[:5] for name, tensor in batch.items()})
    assert (small.loss, small.grad_norm) == expected[0][2]
    assert trainer.config["pipeline"]["device"] == DEVICE


def test_weights_go_to_the_device_and_back(batch):
    module, trainer = make(batch, device=DEVICE)
    state = trainer.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    doubled = {name: tensor if name == "scale" else tensor * 2 for name, tensor in state.items()}
    trainer.load_state_dict(doubled)
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in trainer.state_dict().items())
    trainer.step(batch)
    assert not torch.equal(trainer.state_dict()["head.weight"], doubled["head.weight"])


def test_configured_models_and_plans(vectors, make):
    losses = [[trainer.step(vectors).loss for _ in range(3)] for trainer in (make(), make(device=DEVICE))]
    assert losses[0] == losses[1]
    rows = twobp.plan(make(device=DEVICE), ranks=2, seconds=0.05)
    assert rows and all(row.step_seconds > 0 for row in rows)


PROGRAM = """
import ctypes, os, sys, torch, twobp
ctypes.CDLL(twobp._native.__file__, mode=os.RTLD_NOW | os.RTLD_GLOBAL)  # the stand-in for NCCL finds the device's functions there
sys.path.insert(0, sys.argv[1])
from test_module import make
twobp.init_process_group()
batch = torch.load(sys.argv[2] + "/batch.pt")
_, trainer = make(batch, device="privateuseone", **eval(sys.argv[3]))
losses = [trainer.step(batch).loss for _ in range(3)]
losses.append(trainer.evaluate([batch]).loss)
torch.save((losses, trainer.state_dict(), trainer.optimizer_state()), f"{sys.argv[2]}/{torch.distributed.get_rank()}.pt")
"""


@pytest.mark.parametrize("settings", [{"schedule": "zb-v"}, {"ranks": 1, "data_parallel": 2, "micro_batches": 2}])
def test_processes_with_a_device_each_have_the_bits_of_threads(batch, tmp_path, settings):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    torch.save(batch, tmp_path / "batch.pt")
    codes, said = fresh.run_ranks(2, script, tmp_path, HERE, tmp_path, settings)
    assert codes == [0, 0], said
    losses, state, moments = torch.load(tmp_path / "0.pt")
    other = torch.load(tmp_path / "1.pt")
    assert other[0] == losses and all(torch.equal(state[name], other[1][name]) for name in state)
    assert moments.keys() == other[2].keys()
    if "data_parallel" in settings:
        _, trainer = make(batch, device=DEVICE, ranks=1)
        assert losses == pytest.approx([trainer.step(batch).loss for _ in range(3)] + [trainer.evaluate([batch]).loss], rel=1e-5)
        return
    _, trainer = make(batch, device=DEVICE, **settings)
    assert losses == [trainer.step(batch).loss for _ in range(3)] + [trainer.evaluate([batch]).loss]
    assert all(torch.equal(tensor, state[name]) for name, tensor in trainer.state_dict().items())


def test_batches_and_modules_stay_on_the_cpu(batch):
    _, trainer = make(batch, device=DEVICE)
    with pytest.raises(twobp.Error, match="'ids' is on meta, .*: give a dense tensor on the CPU"):
        trainer.step({name: tensor.to("meta") for name, tensor in batch.items()})


def test_devices_that_are_not_there(batch):
    with pytest.raises(twobp.Error, match="this LibTorch has no cuda"):
        make(batch, device="cuda")
    with pytest.raises(twobp.Error, match="no device is called 'gpu': use cpu or cuda"):
        make(batch, device="gpu")
