"""Trainers whose ranks, or replicas, are processes that torch.distributed connected. Processes share a cache of captures."""
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

import fresh
import twobp

PROGRAM = """
import sys, torch, twobp
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_module import make
if len(sys.argv) > 3: twobp.init_process_group()
ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
batch = {"ids": ids, "labels": ids.roll(-1, dims=1)}
module, trainer = make(batch)
losses = [trainer.step(batch).loss for _ in range(3)]
trainer.save(sys.argv[2] + "/bundle")
trainer.checkpoint(sys.argv[2] + "/checkpoints")
losses.append(trainer.evaluate([batch]).loss)
trainer.load_state_dict({name: tensor if name == "scale" else tensor * 2 for name, tensor in trainer.state_dict().items()})
losses.append(trainer.step(batch).loss)
rank = dist.get_rank() if dist.is_initialized() else "alone"
torch.save((losses, trainer.state_dict()), f"{sys.argv[2]}/{rank}.pt")
"""


HERE = pathlib.Path(__file__).parent


def write_program(folder):
    script = folder / "train.py"
    script.write_text(PROGRAM)
    return script


def test_two_processes_have_the_bits_of_one(tmp_path):
    script = write_program(tmp_path)
    fresh.run(script, tmp_path, HERE, tmp_path)
    (tmp_path / "bundle").rename(tmp_path / "bundle_alone")
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints_alone")
    codes, said = fresh.run_ranks(2, script, tmp_path, HERE, tmp_path, "connected")
    assert codes == [0, 0], said
    losses, state = torch.load(tmp_path / "alone.pt")
    for rank in range(2):
        other_losses, other_state = torch.load(tmp_path / f"{rank}.pt")
        assert other_losses == losses
        assert other_state.keys() == state.keys() and all(torch.equal(state[name], other_state[name]) for name in state)
    for name in ("model.safetensors", "graph.json"):
        assert (tmp_path / "bundle" / name).read_bytes() == (tmp_path / "bundle_alone" / name).read_bytes()


REPLICAS = """
import sys, torch, twobp
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_module import make
count = twobp.init_process_group()
ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
labels = ids.roll(-1, dims=1)
labels[:3, 2:] = -100   # the replicas count unequally
batch = {"ids": ids, "labels": labels}
_, trainer = make(batch, ranks=1, micro_batches=4 // count, data_parallel=count)
small = {name: tensor[:3] for name, tensor in batch.items()}   # nothing for the second replica
losses = [trainer.step(one).loss for one in (batch, small, batch)] + [trainer.evaluate([batch, small]).loss]
torch.save((trainer.micro_batches, losses, trainer.state_dict(), trainer.optimizer_state()),
           f"{sys.argv[2]}/{dist.get_rank() if count > 1 else 'alone'}.pt")
"""


def test_replicas_share_a_batch(tmp_path):
    script = tmp_path / "replicas.py"
    script.write_text(REPLICAS)
    fresh.run(script, tmp_path, HERE, tmp_path)
    codes, said = fresh.run_ranks(2, script, tmp_path, HERE, tmp_path, launcher=fresh.as_mpirun)
    assert codes == [0, 0], said
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "0", "1"))
    assert alone[0] == first[0] == 4
    assert first[1] == second[1] and first[1] == pytest.approx(alone[1], rel=1e-5)
    for name, tensor in alone[2].items():
        torch.testing.assert_close(first[2][name], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(first[2][name], second[2][name])
    assert first[3].keys() == alone[3].keys() == second[3].keys()


EXPERTS = """
import sys, torch, twobp
import torch.distributed as dist
twobp.init_process_group()
ids = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(2))
batch, sample = {"input_ids": ids, "labels": ids}, {"input_ids": ids[:2], "labels": ids[:2]}
model = {"type": "qwen3_moe", "dim": 16, "layers": 2, "heads": 2, "hidden": 16, "experts": 4, "vocab": 20}
found = []
for experts in (1, 2):
    trainer = twobp.Trainer(model=model, example=sample, ranks=1, micro_batches=2, data_parallel=2, experts=experts)
    losses = [trainer.step(batch).loss for _ in range(2)] + [trainer.evaluate([batch]).loss]
    trainer.save(f"{sys.argv[1]}/model{experts}")
    again = twobp.Trainer(model={"from": f"{sys.argv[1]}/model{experts}"}, example=sample, ranks=1, micro_batches=2,
                          data_parallel=2, experts=experts)
    losses.append(again.evaluate([batch]).loss)
    found.append((losses, trainer.state_dict(), trainer.optimizer_state()))
try:
    trainer.step({name: tensor[:6] for name, tensor in batch.items()})
except twobp.Error as error:
    found.append(str(error))
torch.save(found, f"{sys.argv[1]}/{dist.get_rank()}.pt")
"""


def test_replicas_share_experts(tmp_path):
    script = tmp_path / "experts.py"
    script.write_text(EXPERTS)
    codes, said = fresh.run_ranks(2, script, tmp_path, tmp_path)
    assert codes == [0, 0], said
    for rank in range(2):
        apart, shared, refused = torch.load(tmp_path / f"{rank}.pt")
        assert shared[0] == apart[0] and apart[0][2] == apart[0][3]
        torch.testing.assert_close(shared[1:], apart[1:], rtol=0, atol=0)
        assert "3 micro-batches" in refused and "give 4" in refused
    whole, parts = (tmp_path / f"model{experts}/model.safetensors" for experts in (1, 2))
    assert whole.exists() and not parts.exists()  # each process has written its own


def test_replicas_need_processes(make):
    with pytest.raises(twobp.Error, match="each rank of a replica is a process: start 4"):
        make(data_parallel=2)


def test_processes_that_are_not_connected_are_told_how(tmp_path):
    codes, said = fresh.run_ranks(2, write_program(tmp_path), tmp_path, HERE, tmp_path)
    assert 0 not in codes and "twobp.init_process_group" in said


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)
"""

CAPTURE = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from net import Net
from twobp.capture import capture
torch.manual_seed(1)
x = {"x": torch.ones(6, 4), "y": torch.zeros(6, 4)}
captured = capture(Net().train(), x, loss_fn=lambda output, batch: torch.nn.functional.mse_loss(output, batch["y"]), cache=sys.argv[2])
print(*captured.cached, hash("text"))
"""


def test_processes_share_entries(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(NET)
    script = tmp_path / "process.py"
    script.write_text(CAPTURE)
    arguments = [str(tmp_path), str(tmp_path / "cache")]
    said = [tmp_path / "one", tmp_path / "other"]
    assert fresh.finish([fresh.start(script, *arguments, said=file) for file in said], timeout=120) == [0, 0]  # at once
    states, hashes = zip(*(file.read_text().split() for file in said))
    assert set(states) <= {"kept", "hit"}
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    runpy.run_path(str(script), run_name="__main__")
    state, own_hash = capsys.readouterr().out.split()
    assert state == "hit" and own_hash not in hashes  # keys do not depend on Python's seed of hashes
    assert len(list((tmp_path / "cache").iterdir())) == 1


LATE = """
import os, sys, time, twobp
if int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) in map(int, sys.argv[1].split(",")):
    time.sleep(float(sys.argv[2]))
    os._exit(0)
twobp.init_process_group(timeout=2)
"""


@pytest.mark.parametrize("launcher", [fresh.as_torchrun, fresh.as_mpirun])
@pytest.mark.parametrize("late, message", [("1", "rank 1 of 4 did not connect to 127.0.0.1:"), ("1,3", "ranks 1, 3 of 4 did not connect"),
                                           ("0", "got no answer from rank 0 at 127.0.0.1:")])
def test_a_rank_that_never_comes_is_named(tmp_path, launcher, late, message):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    codes, said = fresh.run_ranks(4, script, tmp_path, late, 0, launcher=launcher, timeout=60)
    others = 4 - len(late.split(","))
    assert codes.count(1) == said.count("twobp.Error: ") == said.count(message) == others, said


def test_torchrun_s_own_store_names_it_too(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), "1", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "twobp.Error: rank 1 of 2 did not connect to " in done.stderr, done.stderr


SILENT = """
import os, time, torch, twobp
twobp.init_process_group()
if os.environ["RANK"] == "1":
    time.sleep(6)
    os._exit(0)
example = {name: torch.zeros(2, 8) for name in ("input", "target")}
twobp.Trainer(model={"type": "mlp", "dim": 8, "layers": 4}, example=example, ranks=2, micro_batches=2, timeout=2)
"""


def test_a_rank_that_makes_no_trainer_is_named(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    codes, said = fresh.run_ranks(2, script, tmp_path, timeout=60)
    assert codes[0] == 1 and "twobp.Error: " in said and "rank 1" in said, said


SIGNALLED = """
import os, signal, sys, threading, torch, twobp
signal.signal(signal.SIGINT, signal.default_int_handler)
twobp.init_process_group()
rank = int(os.environ["RANK"])
torch.manual_seed(1)
example = {name: torch.randn(2, 8) for name in ("input", "target")}
trainer = twobp.Trainer(model={"type": "mlp", "dim": 8, "layers": 4}, example=example, ranks=2, micro_batches=2, schedule="1f1b")
trainer.step([example] * 2)
if rank == 1:
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    trainer.step([example] * 2)
    said = "none"
except KeyboardInterrupt as error:
    said = str(error)
assert trainer.last_result.step == trainer.steps_done == 2
third = trainer.step([example] * 2)   # both go on
print(rank, said, third.step, trainer.evaluate([[example] * 2]).loss, flush=True)
"""


def test_ctrl_c_in_one_of_several_processes_waits_for_the_step(tmp_path):
    script = tmp_path / "signalled.py"
    script.write_text("import os; os.environ['TWOBP_FAIL'] = 'F:step=2:rank=0:micro_batch=0:seconds=0.8'\n" + SIGNALLED)
    codes, said = fresh.run_ranks(2, script, tmp_path, timeout=60)
    assert codes == [0, 0], said
    first, second = sorted(said.splitlines())
    assert first.startswith("0 none 3 ") and second.startswith("1 step 2 counts: trainer.last_result has its result 3 "), said
    assert first.split()[-1] == second.split()[-1]
