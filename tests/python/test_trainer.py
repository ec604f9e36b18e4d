"""The trainer on a configured model."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import twobp


def losses(trainer, batch, steps=4):
    return [trainer.step(batch).loss for _ in range(steps)]


def test_schedules_and_cuts_give_the_same_bits(make, vectors):
    one = make(ranks=1, micro_batches=4)
    reference = losses(one, vectors)
    weights = one.state_dict()
    assert reference[-1] < reference[0]
    for settings in ({"schedule": "1f1b"}, {"schedule": "zb-v"}, {"schedule": "gpipe", "p2": "off"}, {"ranks": 3}):
        other = make(**settings)
        assert losses(other, vectors) == reference
        assert all(torch.equal(tensor, weights[name]) for name, tensor in other.state_dict().items())


def test_a_result_has_its_figures(make, vectors):
    result = make().step(vectors)
    assert result.step == 1 and result.grad_norm > 0 and result.step_seconds > 0
    assert len(result.idle) == 2 and all(0 <= idle < 1 for idle in result.idle)
    assert len(result.peak_bytes) == 2 and min(result.peak_bytes) > 0


def test_micro_batches_may_be_given_one_by_one(make, vectors):
    parts = [{name: tensor[i:i + 2] for name, tensor in vectors.items()} for i in range(0, 8, 2)]
    assert make().step(parts).loss == make().step(vectors).loss


def test_a_last_smaller_batch_works(make, vectors):
    trainer = make()
    small = {name: tensor[:5] for name, tensor in vectors.items()}
    assert trainer.step(small).loss == make(ranks=1).step(small).loss
    assert trainer.step(vectors).step == 2


def test_batches_come_from_a_data_loader(make, vectors):
    samples = [{name: tensor[i] for name, tensor in vectors.items()} for i in range(8)]
    trainer = make()
    for batch in torch.utils.data.DataLoader(samples, batch_size=8):
        assert trainer.step(batch).loss == make().step(vectors).loss
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    assert trainer.evaluate(loader).loss == pytest.approx(trainer.evaluate([vectors]).loss, rel=1e-6)


def test_an_evaluation_changes_nothing(make, vectors):
    trainer, other = make(), make()
    before = trainer.evaluate([vectors]).loss
    assert trainer.evaluate(iter([vectors, vectors])).loss == before
    assert before == pytest.approx(other.step(vectors).loss, rel=1e-6)
    assert trainer.step(vectors).loss == make().step(vectors).loss


@pytest.mark.parametrize("change, message", [
    (lambda b: {"input": b["input"]}, "keys"),
    (lambda b: {**b, "more": b["input"]}, "keys"),
    (lambda b: {**b, "input": b["input"].double()}, "float64"),
    (lambda b: {**b, "input": b["input"][:, :3]}, r"\[3\]"),
    (lambda b: {**b, "input": b["input"][:3]}, "numbers of samples"),
    (lambda b: {name: torch.cat([tensor, tensor]) for name, tensor in b.items()}, "16 samples"),
    (lambda b: {**b, "input": b["input"].tolist()}, "must be a tensor"),
    (lambda b: {**b, "input": torch.tensor(1.0)}, "first dimension"),
    (lambda b: {}, "empty"), (lambda b: [], "list of 0"), (lambda b: None, "NoneType"), (lambda b: [b] * 5, "list of 5")])
def test_a_wrong_batch_is_one_clear_error(make, vectors, change, message):
    trainer = make()
    with pytest.raises(twobp.Error, match=message):
        trainer.step(change(vectors))
    assert trainer.steps_done == 0 and trainer.step(vectors).step == 1


@pytest.mark.parametrize("settings, message", [
    ({"shedule": "1f1b"}, "did you mean 'schedule'"), ({"schedule": "1f1bb"}, 'did you mean "1f1b"'),
    ({"ranks": 1000}, "too few"), ({"ranks": "two"}, "ranks"), ({"clip_norm": -1}, "clip_norm"),
    ({"optimizer": twobp.AdamW(lr=-1)}, "optimizer.lr"), ({"optimizer": twobp.AdamW(schedule="cos")}, "cosine"),
    ({"micro_batch_size": 3}, "leave it out"), ({"data_parallel": 2}, "data_parallel"), ({"loss_fn": max}, "loss_fn"),
    ({"device": "cuda"}, "cuda")])
def test_a_wrong_setting_is_one_clear_error(make, settings, message):
    with pytest.raises(twobp.Error, match=message):
        make(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device, message", [("cuda", "cuda.*compute on CPUs: pipeline.device = \"cpu\""), ("gpu", "no device is called 'gpu': use cpu or cuda"),
                                             ("cuda:1", "name a device by its kind alone, not as 'cuda:1'")])
def test_a_device_that_is_not_there_is_one_clear_error_before_capture(vectors, device, message, monkeypatch):
    import twobp.capture
    monkeypatch.setattr(twobp.capture, "capture", lambda *_, **named: pytest.fail("the module is captured"))
    with pytest.raises(twobp.Error, match=message):
        twobp.Trainer(torch.nn.Linear(16, 16), vectors, device=device)


def test_a_wrong_model_is_one_clear_error(vectors):
    with pytest.raises(twobp.Error, match="mlp"):
        twobp.Trainer(model={"type": "mpl"}, example=vectors)
    with pytest.raises(twobp.Error, match="model"):
        twobp.Trainer(example=vectors)
    with pytest.raises(twobp.Error, match="example"):
        twobp.Trainer(model={"type": "mlp"})


def test_a_loss_that_is_not_finite_is_an_error(make, vectors):
    trainer = make()
    with pytest.raises(twobp.Error, match="not finite.*look at the data"):
        trainer.step({**vectors, "input": torch.full_like(vectors["input"], float("inf"))})
    with pytest.raises(twobp.Error):
        trainer.step(vectors)


def test_state_goes_out_and_in(make, vectors):
    first = make()
    first.step(vectors)
    state = first.state_dict()
    copy = {name: tensor.clone() for name, tensor in state.items()}
    second = make(seed=4, schedule="zb-v")
    second.load_state_dict(state)
    assert second.evaluate([vectors]) == first.evaluate([vectors])
    first.step(vectors)
    assert all(torch.equal(state[name], copy[name]) for name in state)  # copies
    name = next(iter(state))
    with pytest.raises(twobp.Error, match=name):
        second.load_state_dict({key: tensor for key, tensor in state.items() if key != name})
    with pytest.raises(twobp.Error, match="nobody"):
        second.load_state_dict({**state, "nobody": torch.zeros(1)})
    with pytest.raises(twobp.Error, match="shape"):
        second.load_state_dict({**state, name: torch.zeros(1)})
    assert second.evaluate([vectors]) != first.evaluate([vectors])


def test_a_checkpoint_goes_on_to_the_bit_on_other_ranks(make, vectors, tmp_path):
    first = make()
    losses(first, vectors, 2)
    first.checkpoint(tmp_path / "checkpoints")
    expected = losses(first, vectors, 2)
    del first
    second = make(schedule="zb-v")
    second.resume(tmp_path / "checkpoints")
    assert second.steps_done == 2
    assert losses(second, vectors, 2) == expected
    third = make(ranks=1)
    with pytest.raises(twobp.Error):
        third.checkpoint(tmp_path / "checkpoints")  # another run's


def test_the_next_step_is_traced(make, vectors, tmp_path):
    trainer = make()
    trainer.trace(tmp_path / "step.json")
    assert not (tmp_path / "step.json").exists()
    trainer.step(vectors)
    names = {event["name"] for event in json.loads((tmp_path / "step.json").read_text())}
    assert {"step 1", "F0", "I0", "optimizer"} <= names
    (tmp_path / "step.json").unlink()
    trainer.step(vectors)
    assert not (tmp_path / "step.json").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profiler_of_torch_sees_a_step_and_changes_nothing(make, vectors, ranks, capfd):
    expected = make(ranks=ranks).step(vectors)
    trainer = make(ranks=ranks)
    with torch.profiler.profile(profile_memory=True) as profiler:
        found = trainer.step(vectors)
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert "RecordFunction" not in capfd.readouterr().err
    seen = {one.key: one.count for one in profiler.key_averages()}
    assert seen["F"] >= 4 * ranks and seen["I"] >= 4 * ranks and seen["W"] > 0 and "aten::empty" in seen
    assert ranks > 1 or found.peak_bytes == expected.peak_bytes  # that of several ranks depends on when messages come
    assert trainer.step(vectors).peak_bytes[0] > 0, "the meter still sees the ranks"


def test_two_trainers_live_side_by_side(make, vectors):
    reference = losses(make(), vectors)
    first, second = make(), make(schedule="zb-v")
    pairs = [(first.step(vectors).loss, second.step(vectors).loss) for _ in range(4)]
    assert pairs == [(loss, loss) for loss in reference]


def test_other_threads_run_during_a_step(make, vectors):
    """Two trainers step in two threads. Neither holds the GIL while the other needs it."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(losses(make(pin=False), vectors))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2 and results[0] == results[1] == losses(make(), vectors)


def test_a_forked_process_is_told_to_make_its_own(make, vectors):
    trainer = make()
    trainer.step(vectors)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trainer.step(vectors)
        except twobp.Error as error:
            code = 0 if "forked" in str(error) else 2
        del trainer
        os._exit(code)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert trainer.step(vectors).step == 2


def test_a_cap_that_the_schedule_exceeds_is_a_warning(make):
    with pytest.warns(UserWarning, match="memory_cap is 1 bytes, but the fullest rank of 1f1b needs ") as caught:
        make(memory_cap=1)
    least = int(str(caught[0].message).split("needs ")[1].split(" ")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(memory_cap=least)


IMPORT = """
import os, signal, sys, threading, warnings
import torch
def state():
    return (torch.get_num_threads(), torch.get_num_interop_threads(), dict(os.environ), list(warnings.filters), threading.active_count(),
            signal.getsignal(signal.SIGINT), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(),
            sorted(os.sched_getaffinity(0)))
before = state()
import twobp
assert state() == before and "transformers" not in sys.modules
example = {name: torch.zeros(1, 8) for name in ("input", "target")}
trainer = twobp.Trainer(model={"type": "mlp", "dim": 8, "layers": 2}, example=example, ranks=2, micro_batches=2)
trainer.step([example, example])
assert state() == before
"""


def test_import_and_training_leave_the_process_as_it_was():
    subprocess.run([sys.executable, "-c", IMPORT], check=True)


def test_threads_are_those_of_the_setting_whatever_torch_s_number(make, vectors):
    before = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(layer_norm_norms(threads=1))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]
    assert layer_norm_norms(threads=2) != results[0], "the sums of LibTorch's LayerNorm depend on the threads, or this test shows nothing"


def layer_norm_norms(threads):
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
    batch = {"x": torch.randn(48, 24), "wanted": torch.randn(48, 24)}
    trainer = twobp.Trainer(Sequence(module), batch, loss_fn=lambda output, batch: (output - batch["wanted"]).square().mean(),
                            ranks=1, micro_batches=1, threads=threads)
    return [trainer.step(batch).grad_norm for _ in range(3)]


class Sequence(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)
