"""The trainer with ranks on a device other than a CPU: the stand-in (tests/nn/device/stand_in_device.h), which the native module of this test has. On the CPU,
the same operators compute (TWOBP_KERNELS)."""
import pathlib
import shutil

import pytest
import torch
from torch import nn

import fresh
import twobp
from test_module import make as blocks

STAND_IN = "privateuseone"
WIDTH = 8

try:
    twobp._native.check_device(STAND_IN)
except twobp.Error:
    pytest.skip("the native module has no stand-in device", allow_module_level=True)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, WIDTH, generator=generator) for name in ("input", "wanted")}


@pytest.fixture
def make(batch):
    """Makes a module and a trainer of it."""
    def make(device, **settings):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH)).train()
        settings = {"ranks": 2, "micro_batches": 4, "optimizer": twobp.AdamW(lr=1e-2, average=0.5), "device": device, **settings}
        example = {name: tensor[:2] for name, tensor in batch.items()}
        return module, twobp.Trainer(module, example, loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch["wanted"]), **settings)
    return make


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_module_trains_to_the_bits_of_the_cpu(make, batch, tmp_path):
    module, there = make(STAND_IN)
    _, here = make("cpu")
    assert [there.step(batch).loss for _ in range(3)] == [here.step(batch).loss for _ in range(3)]
    assert there.evaluate([batch]) == here.evaluate([batch])
    state = there.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    assert same(state, here.state_dict())
    module.load_state_dict(state)
    there.step(batch), here.step(batch)
    for trainer, name in ((there, "there"), (here, "here")):  # the running means
        trainer.save(tmp_path / name)
    assert (tmp_path / "there/model.safetensors").read_bytes() == (tmp_path / "here/model.safetensors").read_bytes()


def test_states_go_from_the_device_to_the_cpu_and_back(make, batch, tmp_path):
    _, there = make(STAND_IN)
    there.step(batch)
    there.checkpoint(tmp_path / "own")
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    state, optimizer = there.state_dict(), there.optimizer_state()
    assert all(tensor.device.type == "cpu" for of in optimizer.values() for tensor in of.values())
    expected = there.step(batch).loss
    _, here = make("cpu")
    here.load_state_dict(state)
    here.load_optimizer_state(optimizer, 1)
    _, resumed = make(STAND_IN, ranks=1)
    resumed.resume(tmp_path / "copy")
    _, loaded = make(STAND_IN, ranks=3)
    loaded.load_state_dict(state)
    loaded.load_optimizer_state(optimizer, 1)
    assert [trainer.step(batch).loss for trainer in (here, resumed, loaded)] == [expected] * 3


def test_a_batch_stays_on_the_cpu(make, batch):
    _, trainer = make(STAND_IN)
    with pytest.raises(twobp.Error, match="'input' is on meta, .*: give a dense tensor on the CPU"):
        trainer.step({name: tensor.to("meta") for name, tensor in batch.items()})


def test_plans_are_measured_on_the_device(make):
    _, trainer = make(STAND_IN)
    rows = twobp.plan(trainer, ranks=2, seconds=0.05)
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
def test_processes_with_a_device_each_have_the_bits_of_threads(tmp_path, settings):
    ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
    batch = {"ids": ids, "labels": ids.roll(-1, dims=1)}
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    torch.save(batch, tmp_path / "batch.pt")
    codes, said = fresh.run_ranks(2, script, tmp_path, pathlib.Path(__file__).parent, tmp_path, settings)
    assert codes == [0, 0], said
    losses, state, moments = torch.load(tmp_path / "0.pt")
    other_losses, other_state, other_moments = torch.load(tmp_path / "1.pt")
    assert losses == other_losses and same(state, other_state) and moments.keys() == other_moments.keys()
    threads = {**settings, "data_parallel": 1, "micro_batches": 4}
    _, trainer = blocks(batch, device=STAND_IN, **threads)
    expected = [trainer.step(batch).loss for _ in range(3)] + [trainer.evaluate([batch]).loss]
    if "data_parallel" in settings:  # sums have another order
        assert losses == pytest.approx(expected, rel=1e-5)
    else:
        assert losses == expected and same(state, trainer.state_dict())


def test_kernels_that_cuda_loads_late_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    with pytest.raises(twobp.Error, match="CUDA_MODULE_LOADING=EAGER"):
        twobp.processes.check_loading("cuda")
    twobp.processes.check_loading("cpu")


def test_a_transformers_trainer_keeps_to_the_cpu_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    from twobp.transformers import Trainer

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    texts = [{"input_ids": row, "labels": row.clone()} for row in torch.arange(8 * 6).view(8, 6) % 32]
    losses = []
    for device, given in ((STAND_IN, {}), ("cpu", {"use_cpu": True})):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=3,
                                                   per_device_train_batch_size=2, gradient_accumulation_steps=2, **given)
        if not given:
            arguments.__dict__["_setup_devices"] = torch.device("cuda", 0)  # as on a machine with a GPU
        trainer = Trainer(model, arguments, train_dataset=texts, ranks=2, device=device)
        assert trainer.args.device.type == "cpu" and trainer.args.use_cpu
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3
