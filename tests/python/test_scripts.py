"""Ten scripts shaped as public ones for fine-tuning: with the import changed and two more arguments, they have the numbers of the original."""
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
NEEDS = {"dpo": ["trl", "peft"], "reward": ["trl"], "qlora": ["trl", "peft", "bitsandbytes"]}
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "small")


def in_pipeline(text):
    """Changes the import, and adds two arguments."""
    text, imports = re.subn(r"^from (transformers|trl) import (\w*Trainer)$", r"from twobp.\1 import \2", text, flags=re.M)
    text, calls = re.subn(r"^trainer = (\w*Trainer)\(", r'trainer = \1(ranks=2, schedule="1f1b", ', text, flags=re.M)
    assert imports == calls == 1
    return text


def run(name, text, folder, monkeypatch):
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    path = folder / f"{name}.py"
    path.write_text(text)
    return runpy.run_path(str(path))["trainer"]


def test_there_are_ten():
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_with_the_import_changed_and_two_arguments(name, tmp_path, monkeypatch):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    text = (SCRIPTS / f"{name}.py").read_text()
    theirs, ours = run(name, text, tmp_path / "theirs", monkeypatch), run(name, in_pipeline(text), tmp_path / "ours", monkeypatch)
    assert ours.pipeline.steps_done == theirs.state.max_steps > 3
    for expected, line in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert line.keys() - {"captured_shapes"} == expected.keys()
        for key, value in expected.items():
            if "time" not in key and not key.endswith("per_second"):
                assert line[key] == (pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value), (key, expected["step"])


def test_accelerate_launch_on_one_machine(tmp_path, monkeypatch):
    """--num_processes of CPUs makes one process, whose threads are the ranks."""
    text = in_pipeline((SCRIPTS / "causal_lm.py").read_text())
    here = run("causal_lm", text, tmp_path / "here", monkeypatch).state.log_history
    script = tmp_path / "launched.py"
    script.write_text(text + "\nimport json, os\njson.dump([os.environ['ACCELERATE_USE_CPU'], trainer.state.log_history], open('log.json', 'w'))\n")
    said = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
                           "--dynamo_backend", "no", script], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])})
    assert said.returncode == 0, said.stderr[-2000:]
    launched, log = json.loads((tmp_path / "log.json").read_text())
    assert launched == "True" and [line.get("loss") for line in log] == [line.get("loss") for line in here]
