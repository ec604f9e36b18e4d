"""The program trains Hugging Face directories of architectures that it has no layers of, and transformers loads what it saves."""
import json
import os
import pathlib
import subprocess

import numpy
import pytest
import torch

import fresh

transformers = pytest.importorskip("transformers")
VOCAB, SEQUENCE, SAMPLES = 60, 16, 8
PROGRAM = os.environ["TWOBP_PROGRAM"]


def bigcode():
    return transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(
        vocab_size=VOCAB, n_positions=SEQUENCE, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0))


def olmo():
    return transformers.OlmoForCausalLM(transformers.OlmoConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=2 * SEQUENCE, pad_token_id=None, eos_token_id=None))


def phi():
    return transformers.PhiForCausalLM(transformers.PhiConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=2 * SEQUENCE,
        bos_token_id=0, eos_token_id=0))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, image_size=16, patch_size=8, num_labels=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def mobile():
    """Convolutions with BatchNorm, whose statistics training changes."""
    return transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config(
        image_size=32, num_labels=4, depth_multiplier=0.1, classifier_dropout_prob=0.0))


def samples(model):
    source = numpy.random.default_rng(1)
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        return {"pixel_values": source.standard_normal((SAMPLES, 3, size, size), dtype=numpy.float32), "labels": source.integers(0, 4, SAMPLES)}
    ids = source.integers(0, VOCAB, (SAMPLES, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    with fresh.interpreter(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture
def run(tmp_path, python):
    """Runs a command of the program on the model in tmp_path/model and the arrays in tmp_path/data."""
    def run(command, *settings, succeeds=True, **environment):
        settings = (f"model.from={tmp_path}/model", f"data.arrays={tmp_path}/data", "data.held_out=0", "pipeline.ranks=2",
                    "pipeline.micro_batches=2", "pipeline.micro_batch_size=2", "pipeline.pin=false", "optimizer.lr=0.01",
                    "optimizer.schedule=constant", "train.steps=2", *settings)
        done = subprocess.run([PROGRAM, *command.split(), "--set", *[one for one in settings if one]], capture_output=True, text=True,
                              env={**os.environ, "TWOBP_CACHE": "", "XDG_CACHE_HOME": str(tmp_path / "cache"), "TWOBP_PYTHON": python,
                                   **environment})
        assert (done.returncode == 0) == succeeds, done.stderr
        return done.stdout if succeeds else done.stderr
    return run


@pytest.fixture
def prepare(tmp_path):
    def prepare(make):
        torch.manual_seed(1)
        model = make()
        model.save_pretrained(tmp_path / "model")
        (tmp_path / "data").mkdir(exist_ok=True)
        for name, array in samples(model).items():
            numpy.save(tmp_path / f"data/{name}.npy", array)
        return model
    return prepare


def losses(path):
    return [json.loads(line)["loss"] for line in pathlib.Path(path).read_text().splitlines()]


@pytest.mark.slow
def test_sequences_of_a_captured_model_are_cut_into_slices(prepare, run, tmp_path):
    prepare(phi)
    for slices in (1, 2):
        run(f"train --metrics {tmp_path}/{slices}", f"pipeline.slices={slices}")
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    prepare(vit)
    assert "pipeline.slices is 2" in (message := run("train", "pipeline.slices=2", succeeds=False)) and "the field 'labels' of sizes [2] has no positions" in message


@pytest.mark.parametrize("make", [bigcode, olmo, phi, vit, mobile])
def test_a_model_is_trained_and_transformers_loads_it(prepare, run, tmp_path, make):
    model = prepare(make)
    (tmp_path / "model/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    batch = {name: torch.from_numpy(array[:4]) for name, array in samples(model).items()}
    run(f"train --metrics {tmp_path}/metrics", f"save.model={tmp_path}/saved", "data.shuffle=false")
    with torch.no_grad():
        if make is not mobile:  # whose norms see each micro-batch by itself
            assert losses(tmp_path / "metrics")[0] == pytest.approx(model.train()(**batch).loss.item(), rel=1e-5)
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert saved.config.architectures == [type(model).__name__]
    assert (tmp_path / "saved/tokenizer_config.json").exists() and not (tmp_path / "saved/graph.json").exists()
    before, after = model.state_dict(), saved.state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    # The program and transformers find the same loss in the saved model.
    (tmp_path / "model").rename(tmp_path / "first")
    (tmp_path / "saved").rename(tmp_path / "model")
    run(f"train --metrics {tmp_path}/metrics", "data.shuffle=false", "train.steps=1")
    with torch.no_grad():
        if make is not mobile:
            assert losses(tmp_path / "metrics")[0] == pytest.approx(saved.train()(**batch).loss.item(), rel=1e-5)
        evaluated = run("eval", "data.held_out=0.5").rsplit("held-out loss ", 1)[1].split()[0].rstrip(",")
        held_out = {name: torch.from_numpy(array[4:]) for name, array in samples(model).items()}
        assert float(evaluated) == pytest.approx(saved.eval()(**held_out).loss.item(), abs=1e-4)


@pytest.mark.slow
def test_a_model_is_captured_for_the_precision_of_the_run(prepare, run, tmp_path):
    model = prepare(olmo)
    batch = {name: torch.from_numpy(array[:4]) for name, array in samples(model).items()}
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        run(f"train --metrics {tmp_path}/{precision}", f"train.precision={precision}", "data.shuffle=false")
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=precision != "fp32"):
            wanted = [model.train()(**{name: one[i:i + 2] for name, one in batch.items()}).loss.item() for i in (0, 2)]
        assert losses(tmp_path / precision)[0] == pytest.approx(sum(wanted) / 2, rel=2e-5)
    assert len({losses(tmp_path / one)[0] for one in ("bf16", "fp16", "fp32")}) == 3


def test_a_capture_is_kept_and_needs_no_python_again(prepare, run, tmp_path):
    prepare(bigcode)
    none = {"TWOBP_PYTHON": "/nobody/python"}
    assert "cannot start" in run("train", succeeds=False, **none)
    run(f"train --metrics {tmp_path}/one")
    run(f"train --metrics {tmp_path}/two", **none)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    run("profile --seconds 0.05", **none)
    (tmp_path / "config.json").write_text("{}")
    assert "samples/s" in run(f"plan {tmp_path}/config.json --ranks 1,2 --seconds 0.05", **none)
    # Another shape, changed weights and a damaged entry are captured again.
    assert "cannot start" in run("train", "pipeline.micro_batch_size=1", succeeds=False, **none)
    (entry,) = (tmp_path / "cache/twobp/models").glob("model-*")
    graph = (entry / "graph.json").read_text()
    (entry / "graph.json").write_text(graph[:-10])
    assert "cannot start" in run("train", succeeds=False, **none)
    run(f"train --metrics {tmp_path}/two")
    assert losses(tmp_path / "one") == losses(tmp_path / "two") and (entry / "graph.json").read_text() == graph
    prepare(bigcode)
    assert "cannot start" in run("train", succeeds=False, **none)
    assert "cannot start" in run("train", succeeds=False, **none, TWOBP_CACHE="off")


def test_a_run_is_resumed(prepare, run, tmp_path):
    prepare(olmo)
    run(f"train --metrics {tmp_path}/whole", "train.steps=4")
    where = (f"save.checkpoints={tmp_path}/checkpoints", "save.every=2")
    run(f"train --metrics {tmp_path}/parts", *where)
    run(f"train --resume --metrics {tmp_path}/parts", *where, "train.steps=4", "pipeline.ranks=1")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_text_is_read_by_the_model_s_tokenizer(prepare, run, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    prepare(bigcode)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    words = {word: i for i, word in enumerate("the quick brown fox jumps over lazy dog [UNK]".split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    output = run("train", "data.arrays=", f"data.text={tmp_path}/text.txt", f"data.sequence={SEQUENCE}", "data.held_out=0.2", "train.steps=30",
                 f"save.model={tmp_path}/saved")
    assert "held-out loss" in output and (tmp_path / "saved/tokenizer.json").exists()


@pytest.mark.parametrize("change, settings, message", [
    (lambda config: config.update(model_type="martian"), (), "martian"),
    (lambda config: config.update(architectures=["MartianForCausalLM"], auto_map={"AutoModelForCausalLM": "martian.Martian"}), (),
     "code that comes with a model"),
    (lambda config: config.update(architectures=["GPTBigCodeModel"]), (), "loss"),
    (lambda config: config.update(quantization_config={"quant_method": "x"}), (), "quantized"),
    (lambda config: config.update(n_layer=3), (), "have no tensor"),
    (lambda config: None, (f"data.sequence={2 * SEQUENCE}", "data.arrays=", "data.synthetic=tokens"), "longer than the model's 16 positions"),
    (lambda config: None, ("data.arrays=",), "data.arrays"),
    (lambda config: None, ("data.arrays=", "data.synthetic=images"), "data.arrays"),
    (lambda config: None, ("data.arrays=nowhere",), "nowhere")])
def test_what_cannot_be_captured_is_one_clear_error(prepare, run, tmp_path, change, settings, message):
    prepare(bigcode)
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    error = run("train", *settings, succeeds=False)
    assert message in error and error.startswith("twobp: error: ") and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "cache/twobp/models").exists() or not list((tmp_path / "cache/twobp/models").glob("model-*"))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=12, d_ff=40, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0))


@pytest.mark.parametrize("make", [bigcode, mobile, t5])
def test_transformers_loads_what_a_trainer_saves(tmp_path, make):
    import twobp
    torch.manual_seed(1)
    model = make().train()
    batch = {name: torch.from_numpy(array[:4]) for name, array in samples(model).items()}
    trainer = twobp.Trainer(model, {name: tensor[:2] for name, tensor in batch.items()}, ranks=1, micro_batches=2, optimizer=twobp.AdamW(lr=1e-2))
    trainer.step(batch)
    trainer.save(tmp_path / "saved")
    again, found = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values()), found
    state = trainer.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    with torch.no_grad():
        assert again.eval()(**batch).loss.item() == pytest.approx(trainer.evaluate([batch]).loss, rel=1e-5)


def test_backward_passes_of_installed_packages_are_compared_with_autograd():
    """Bloom's GELU has its own, which is the derivative."""
    from twobp.capture import capture
    torch.manual_seed(0)
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0))
    ids = torch.randint(VOCAB, (2, SEQUENCE))
    run, = capture(bloom.train(), {"input_ids": ids, "labels": ids}, cache=False).dry_runs
    assert 0 < run.gradients < 1e-5
