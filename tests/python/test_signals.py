"""Ctrl-C and other signals at chosen and at random moments: a call is whole or did not happen, and the exception says which."""
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import twobp

SLEEP = 0.8


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    yield
    signal.signal(signal.SIGINT, before)


def strike(after, times=1, number=signal.SIGINT):
    """Sends signals from another thread. Returns an event that is set after the last one."""
    sent = threading.Event()

    def send():
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        sent.set()
    threading.Timer(after, send).start()
    return sent


def wait_for(sent):
    """Waits for the last signal, which may come after the call. Not by Thread.join: an interrupted one returns at once from then on."""
    while True:
        try:
            sent.wait()
            return
        except KeyboardInterrupt:
            pass


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.fixture
def states(make, vectors):
    """The weights after 0, 1, ... steps that nothing disturbs."""
    trainer = make(schedule="1f1b", pin=False)
    states = [trainer.state_dict()]
    for _ in range(3):
        trainer.step(vectors)
        states.append(trainer.state_dict())
    return states


# One rank sleeps there while the signal comes. With 1f1b, the last rank ends first: rank 1 has ended when rank 0 is in its last W.
@pytest.mark.parametrize("place, counts", [
    ("F:rank=0:micro_batch=0", False), ("F:rank=1:micro_batch=0", False), ("I:rank=1:micro_batch=3", False), ("W:rank=1:micro_batch=0", False),
    ("W:rank=0:micro_batch=3", True), ("optimizer:rank=0", True), ("optimizer:rank=1", True)])
@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_at_each_place_of_a_step(make, vectors, states, monkeypatch, place, counts, times):
    where, *keys = place.split(":")
    monkeypatch.setenv("TWOBP_FAIL", ":".join([where, "step=2", *keys, f"seconds={SLEEP}"]))
    trainer = make(schedule="1f1b", pin=False)
    monkeypatch.delenv("TWOBP_FAIL")
    first = trainer.step(vectors)
    sent = strike(SLEEP / 2, times)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.step(vectors)
        pytest.fail("the signal was lost")
    wait_for(sent)
    if counts:
        assert str(raised.value) == "step 2 counts: trainer.last_result has its result"
        assert trainer.last_result.step == 2 and trainer.last_result.loss < first.loss
    else:
        assert str(raised.value) == "step 2 was given up: it has changed nothing"
        assert trainer.last_result == first
    assert trainer.steps_done == 1 + counts and same(trainer.state_dict(), states[1 + counts])
    assert trainer.step(vectors).step == 2 + counts and same(trainer.state_dict(), states[2 + counts])


def test_what_another_handler_raises_is_told_too(make, vectors, monkeypatch):
    def stop(*_):
        raise SystemExit(143)
    monkeypatch.setenv("TWOBP_FAIL", f"optimizer:step=1:rank=0:seconds={SLEEP}")
    trainer = make()
    before = signal.signal(signal.SIGTERM, stop)
    try:
        sent = strike(SLEEP / 2, number=signal.SIGTERM)
        with pytest.raises(SystemExit) as raised:
            trainer.step(vectors)
        sent.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 143 and trainer.last_result.step == trainer.steps_done == 1
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["step 1 counts: trainer.last_result has its result"]


def test_a_handler_that_raises_nothing_lets_the_step_run(make, vectors, states, monkeypatch):
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(trainer.steps_done))
    monkeypatch.setenv("TWOBP_FAIL", f"F:step=2:rank=0:micro_batch=0:seconds={SLEEP}")
    trainer = make(schedule="1f1b", pin=False)
    trainer.step(vectors)
    sent = strike(SLEEP / 2)
    assert trainer.step(vectors).step == 2
    sent.wait()
    assert seen == [1] and same(trainer.state_dict(), states[2])


@pytest.mark.parametrize("call, told", [
    (lambda native, folder, state: native.load(state), "the state is loaded"),
    (lambda native, folder, state: native.load_optimizer_state({}, 7), "the optimizer's state is loaded"),
    (lambda native, folder, state: native.checkpoint(f"{folder}/checkpoints", 3), "the checkpoint is written"),
    (lambda native, folder, state: native.resume(f"{folder}/old", 3), "the trainer has resumed, with 2 steps done"),
    (lambda native, folder, state: native.weights(), "")])
def test_ctrl_c_during_another_call(make, vectors, tmp_path, call, told):
    old = make(optimizer=twobp.SGD())
    for _ in range(2):
        old.step(vectors)
    old.checkpoint(tmp_path / "old")
    state = old.state_dict()
    del old  # which holds its folder of checkpoints
    for number in range(10):
        trainer, folder = make(optimizer=twobp.SGD()), tmp_path / str(number)
        trainer.step(vectors)
        folder.mkdir()
        (folder / "old").symlink_to(tmp_path / "old")
        error = struck(lambda: call(trainer._native, folder, state))
        if error is not None and (str(error) or not told):
            break  # else the signal came before or after the call
    assert str(error) == told
    steps = {"the trainer has resumed, with 2 steps done": 2, "the optimizer's state is loaded": 7}.get(told, 1)
    assert trainer.steps_done == steps and same(trainer.state_dict(), state) == (told.startswith("the state") or steps == 2)
    assert (folder / "checkpoints").is_dir() == ("written" in told)
    assert trainer.step(vectors).step == steps + 1


def struck(call):
    """Returns the KeyboardInterrupt of a call during which a signal comes, or None if it comes later."""
    go, error = threading.Event(), None

    def send():
        go.wait()
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=send)
    thread.start()
    interval = sys.getswitchinterval()
    gc.collect()
    gc.disable()  # Python drops what a signal raises in a callback of a weak reference
    sys.setswitchinterval(1e6)  # the other thread runs when this one gives up the GIL, and not before
    try:
        go.set()
        call()
        sys.setswitchinterval(interval)
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt as raised:
        error = raised
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
    thread.join()
    return error


def test_ctrl_c_during_an_evaluation():
    micro_batch = {name: torch.randn(64, 512) for name in ("input", "target")}
    trainer = twobp.Trainer(model={"type": "mlp", "dim": 512, "layers": 8}, example=micro_batch, ranks=2, micro_batches=64, pin=False,
                            optimizer=twobp.SGD(lr=0.1, average=0.9))
    trainer.step([micro_batch])
    state, sent = trainer.state_dict(), None

    def batches():
        nonlocal sent
        yield [micro_batch]
        sent = strike(0.05)
        yield [micro_batch] * 64  # takes longer
    with pytest.raises(KeyboardInterrupt, match="the evaluation was given up: it has changed nothing"):
        trainer.evaluate(batches())
    sent.wait()
    assert same(trainer.state_dict(), state) and trainer.evaluate([[micro_batch]]).loss > 0

    def batches():
        yield [micro_batch]
        signal.raise_signal(signal.SIGINT)
        yield [micro_batch]
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate(batches())
    assert same(trainer.state_dict(), state) and trainer.step([micro_batch]).step == 2


def texts_of(error):
    while error is not None:
        yield str(error)
        error = error.__context__


def test_random_moments(make, vectors):
    """The weights after a step are a matter of its number alone, so they say how many steps count."""
    generator, reference, trainer = random.Random(5), make(), make()
    states, begin = [reference.state_dict()], time.monotonic()
    for _ in range(60):
        reference.step(vectors)
        states.append(reference.state_dict())
    whole, armed, outcomes = (time.monotonic() - begin) / 60, False, []

    def handler(*_):
        if armed:
            raise KeyboardInterrupt
    signal.signal(signal.SIGINT, handler)
    for _ in range(60):
        before, times, results, error = trainer.steps_done, generator.choice([1, 1, 2]), [], None
        sent = strike(generator.uniform(0, whole), times)
        try:
            armed = True
            results.append(trainer.step(vectors))
            sent.wait()
        except KeyboardInterrupt as raised:
            error = raised
            armed = False
        armed = False
        wait_for(sent)
        done, texts = trainer.steps_done - before, list(texts_of(error))
        outcomes += texts
        assert same(trainer.state_dict(), states[trainer.steps_done])
        assert done == 1 if results else done in (0, 1)
        assert not done or trainer.last_result.step == trainer.steps_done
        assert not results or results == [trainer.last_result]
        if times == 1 and not results:
            assert any("counts" in text for text in texts) == (done == 1), texts
    assert any("given up" in text for text in outcomes), outcomes


EXIT = """
import os, sys, threading, time, torch, twobp

def begin(call):
    micro_batch = {name: torch.randn(64, 512) for name in ("input", "target")}
    trainer = twobp.Trainer(model={"type": "mlp", "dim": 512, "layers": 8}, example=micro_batch, ranks=2, micro_batches=16, pin=False)
    batch = [micro_batch] * 16
    work = {"step": lambda: trainer.step(batch), "evaluate": lambda: trainer.evaluate(batch for _ in range(1000)), "state_dict": trainer.state_dict,
            "between": lambda: (trainer.state_dict(), time.sleep(1e-4)), "plan": lambda: twobp.plan(trainer, seconds=0.2)}[call]
    begun = threading.Event()
    def again_and_again():
        while True:
            begun.set()
            work()
    threading.Thread(target=again_and_again, daemon=True).start()
    begun.wait()

def exit_code(call, after):
    child = os.fork()
    if child == 0:
        begin(call)
        time.sleep(after)
        sys.exit(0)  # Python's own exit
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for call in ("step", "evaluate", "state_dict", "between", "plan"):
    code = exit_code(call, float(sys.argv[1]))
    print(call, code, flush=True)
    if code != 0:
        os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.013, 0, 0.1])
def test_python_exits_while_a_daemon_thread_is_in_a_call(after):
    done = subprocess.run([sys.executable, "-c", EXIT, str(after)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_a_trace_whose_folder_has_gone_is_a_warning(make, vectors, tmp_path):
    trainer = make()
    (tmp_path / "folder").mkdir()
    for action in ("default", "error"):
        trainer.trace(tmp_path / "folder" / "step.json")
        (tmp_path / "folder").rmdir()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            if action == "default":
                assert trainer.step(vectors).step == 1
                assert len(caught) == 1 and "the trace was not written" in str(caught[0].message) and caught[0].filename == __file__
                (tmp_path / "folder").mkdir()
            else:
                with pytest.raises(UserWarning) as raised:
                    trainer.step(vectors)
                assert trainer.last_result.step == trainer.steps_done == 2
                if sys.version_info >= (3, 11):
                    assert raised.value.__notes__ == ["step 2 counts: trainer.last_result has its result"]
