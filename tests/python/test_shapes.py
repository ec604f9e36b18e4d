"""One capture for all sizes: programs for many shapes of a micro-batch, against torch.autograd in float64."""
import copy
import os
import subprocess
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import twobp
from twobp.capture import capture

WORDS, DIM = 97, 32
COMMON = {"vocab_size": WORDS, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 128}
NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# The first one is captured as it is; at the second one, programs for many shapes are.
SHAPES = [(3, 13), (2, 7), (5, 67), (9, 31), (1, 65), (7, 3), (6, 33), (1, 1), (4, 1)]


@pytest.fixture
def wide(monkeypatch):
    """Models of transformers compute norms, rotary tables and losses in float32 whatever their dtype. Within a test,
    they compute all in float64, so that errors are rounding."""
    to = torch.Tensor.to

    def double(one):
        return torch.float64 if one is torch.float32 else one

    monkeypatch.setattr(torch.Tensor, "float", lambda self: self.double())
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: to(self, *map(double, a), **{n: double(v) for n, v in k.items()}))


def ids(samples, positions, seed=0):
    return torch.randint(1, WORDS, (samples, positions), generator=torch.Generator().manual_seed(seed + 1000 * samples + positions))


def texts(samples, positions):
    tokens = ids(samples, positions)
    return {"input_ids": tokens, "labels": tokens}


def padded(side, samples, positions, seed=0):
    """Texts of different lengths. At least two tokens of each count."""
    lengths = torch.randint(min(2, positions), positions + 1, (samples,), generator=torch.Generator().manual_seed(seed + 77 * samples + positions))
    at = torch.arange(positions).expand(samples, positions)
    mask = (at < lengths[:, None] if side == "right" else at >= positions - lengths[:, None]).long()
    tokens = ids(samples, positions, seed) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def seq2seq(samples, positions):
    return {**padded("right", samples, positions), "labels": padded("right", samples, positions // 2 + 3, 5)["labels"]}


def images(samples, positions):
    pixels = torch.randn(samples, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(positions))
    return {"pixel_values": pixels, "labels": ids(samples, 1)[:, 0] % 5}


def gpt2(**settings):
    import transformers
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, n_positions=128, n_embd=DIM, n_layer=2, n_head=4, **{
        "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0, **settings}))


def lora():
    import peft
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True))


def make(name, **settings):
    import transformers
    return getattr(transformers, f"{name}")(getattr(transformers, name.split("For")[0] + "Config")(**settings))


MODELS = {
    "gpt2": (gpt2, texts),
    "gpt2-right": (gpt2, lambda *sizes: padded("right", *sizes)),
    "gpt2-left": (gpt2, lambda *sizes: padded("left", *sizes)),
    "llama": (lambda: make("LlamaForCausalLM", **COMMON, num_key_value_heads=2), texts),
    "llama-right": (lambda: make("LlamaForCausalLM", **COMMON, num_key_value_heads=2), lambda *sizes: padded("right", *sizes)),
    "bert": (lambda: make("BertForMaskedLM", **COMMON, **NONE), lambda *sizes: padded("right", *sizes)),
    "t5": (lambda: make("T5ForConditionalGeneration", vocab_size=WORDS, d_model=DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                        decoder_start_token_id=0), seq2seq),
    "vit": (lambda: make("ViTForImageClassification", hidden_size=DIM, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         image_size=16, patch_size=4, num_labels=5, **NONE), images),
    "resnet": (lambda: make("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                            num_labels=5), images),
    "lora": (lora, texts),
}


def check_step(trainer, module, batch):
    """Compares the gradients of a step with those of the module, which gets the weights after it."""
    before = {name: one.clone() for name, one in trainer.state_dict().items()}
    module.load_state_dict(before)
    module.train()
    loss = module(**batch).loss
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    wanted = dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True)))
    result = trainer.step([batch])
    after = trainer.state_dict()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    largest = max(one.norm() for one in wanted.values() if one is not None)
    for name, gradient in wanted.items():
        if gradient is not None:
            error = (before[name] - after[name]) / RATE - gradient
            assert error.norm() <= 1e-10 * max(gradient.norm(), largest * 1e-3), (name, error.norm() / gradient.norm())
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name in after:
            torch.testing.assert_close(after[name], buffer, rtol=1e-12, atol=1e-14)


RATE = 2.0 ** -4


def trainer_of(module, example, **settings):
    return twobp.Trainer(copy.deepcopy(module), example, micro_batches=1, optimizer=twobp.SGD(lr=RATE, momentum=0.0), cache=False,
                         **{"ranks": 2, **settings})


@pytest.mark.parametrize("name", MODELS)
def test_gradients_at_all_shapes_are_autograd_s(name, wide):
    torch.manual_seed(0)
    build, batch_of = MODELS[name]
    module = build().double().train()
    trainer = trainer_of(module, batch_of(*SHAPES[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of a shape that needs a capture of its own
        for samples, positions in SHAPES:
            batch = batch_of(samples, positions)
            if batch_of is not images and not (batch["labels"][:, 1:] != -100).any():
                continue  # no next token to predict
            check_step(trainer, module, batch)
    assert trainer.captures == 2


@pytest.mark.parametrize("name", ["gpt2-left", *(pytest.param(one, marks=pytest.mark.slow) for one in ("t5", "vit", "resnet", "lora"))])
def test_several_examples_take_one_capture(name, wide, tmp_path):
    torch.manual_seed(0)
    build, batch_of = MODELS[name]
    module = build().double().train()
    trainer = trainer_of(module, [batch_of(*sizes) for sizes in SHAPES[:2]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples, positions in SHAPES[:5]:
            check_step(trainer, module, batch_of(samples, positions))
    assert trainer.captures == 1
    graph = trainer._captured.graph
    assert ["sizes" in shape for shape in graph["shapes"][:2]] == [False, True]
    assert graph["parameters"] == capture(build().double().train(), batch_of(*SHAPES[0]), slices=False, cache=False).graph["parameters"]
    trainer.save(tmp_path)
    again = twobp.Trainer(model={"from": str(tmp_path)}, example=batch_of(*SHAPES[2]), micro_batches=1, optimizer=twobp.SGD(lr=RATE))
    batch = batch_of(*SHAPES[1])
    assert again.step([batch]).loss == pytest.approx(trainer.step([batch]).loss, rel=1e-12)


def test_wrong_examples_are_refused():
    module = Tokens().double().train()
    for examples, message in (([], "give one example"), ([texts(2, 4), {"input_ids": ids(2, 4)}], "an example has the keys"),
                              ([texts(2, 4), 3], "the example is a int, but must be a dict")):
        with pytest.raises(twobp.Error, match=message):
            twobp.Trainer(module, examples, cache=False)
    with pytest.raises(twobp.Error, match="several micro-batches are for a module"):
        twobp.Trainer(model={"type": "mlp", "dim": 4, "layers": 2}, example=[{"input": torch.ones(2, 4), "target": torch.ones(2, 4)}] * 2)
    with pytest.warns(UserWarning, match=r"something else for each input_ids.size\(1\) and labels.size\(1\)"):
        trainer = trainer_of(Looped().double().train(), [texts(2, 4), texts(2, 5)])
    assert trainer.captures == 1
    check_loss(trainer, Looped().double().train(), texts(2, 5))
    assert trainer.captures == 2


@pytest.mark.slow
def test_dropout_at_all_shapes(wide):
    """The module gets the programs' masks."""
    torch.manual_seed(0)
    captured = capture(gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).double().train(), texts(*SHAPES[0]), slices=False, cache=False)
    for sizes in SHAPES[1:-2]:
        fields = texts(*sizes)
        captured.add_shape(fields)
        with captured.leaving_as_before(captured.variant.walk):
            found = captured._dry_run(fields, None, captured.shape_number(fields))
        assert max(found.loss, found.gradients, found.evaluation) < 1e-10, sizes
    assert len(captured.variant.batches) == 2


class Tokens(nn.Module):
    """Means of embeddings, with another course for sequences of `window` or more."""

    def __init__(self, window=0):
        super().__init__()
        self.embed, self.head, self.window = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), window

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        x = x * 2 if input_ids.shape[1] >= self.window else x - 1
        return functional.cross_entropy(self.head(x.cumsum(1)).flatten(0, 1), labels.flatten())


class Looped(Tokens):
    """Unrolled over the positions."""

    def forward(self, input_ids, labels):
        x, state, states = self.embed(input_ids), 0, []
        for position in range(input_ids.shape[1]):
            state = torch.tanh(state + x[:, position])
            states.append(state)
        return functional.cross_entropy(self.head(torch.stack(states, 1)).flatten(0, 1), labels.flatten())


def check_loss(trainer, module, batch):
    module.load_state_dict(trainer.state_dict())
    expected = module(**batch).item()
    assert trainer.step([batch]).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("examples", [[(4, 500), (3, 40)], [(4, 500)]], ids=["two examples", "one example"])
def test_300_lengths_take_a_capture_for_each_example_at_most(examples):
    module = Tokens().double().train()
    trainer = trainer_of(module, [texts(*sizes) for sizes in examples])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for positions in range(2, 302):
            check_loss(trainer, module, texts(1 + positions % 4, positions))
    assert trainer.captures == 3 - len(examples)


def test_steps_are_compared_at_any_shape():
    module = Tokens().double().train()
    trainer = trainer_of(module, texts(4, 5), check_every=1)
    for positions in (9, 6, 40):
        check_loss(trainer, module, texts(3, positions))
    (sum_,) = (one for p in trainer._captured.graph["shapes"][1]["programs"] for one in p["forward"] if one["op"] == "aten::cumsum")
    sum_["args"][1] = 0  # as if programs for many shapes were wrong
    with pytest.raises(twobp.Error, match="step 4 was not made, because the programs differ from the module"):
        trainer.step([texts(3, 7)])


def test_guards_choose_the_programs():
    module = Tokens(window=9).double().train()
    trainer = trainer_of(module, texts(2, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_loss(trainer, module, texts(3, 20))
    with pytest.warns(UserWarning, match=r"sizes .*\[2, 5\].* on its own.*programs so far are for input_ids.size\(1\) >= 9"):
        check_loss(trainer, module, texts(2, 5))
    assert trainer.captures == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for positions in (2, 8, 9, 10, 50, 3):
            check_loss(trainer, module, texts(3, positions))
    assert trainer.captures == 3


@pytest.mark.slow
def test_a_module_that_specialises_is_captured_for_each_size():
    module = Looped().double().train()
    trainer = trainer_of(module, texts(2, 4))
    with pytest.warns(UserWarning, match=r"something else for each input_ids.size\(1\) and labels.size\(1\)"):
        check_loss(trainer, module, texts(2, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples, positions in ((2, 6), (2, 4), (2, 5)):
            check_loss(trainer, module, texts(samples, positions))
    assert trainer.captures == 3
    for samples in (3, 4, 1, 5):  # programs for any number of samples, but for this length
        check_loss(trainer, module, texts(samples, 5))
    assert trainer.captures == 4


class Choosing(Tokens):
    """Sizes that values decide: the old way takes those of the example."""

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        kept = x[labels > 0]
        return functional.cross_entropy(self.head(kept), labels[labels > 0])


def test_what_symbols_cannot_say_is_captured_for_each_shape():
    module = Choosing().double().train()
    trainer = trainer_of(module, texts(2, 4))
    with pytest.warns(UserWarning, match="on its own"):
        check_loss(trainer, module, texts(2, 5))
    check_loss(trainer, module, texts(2, 6))
    assert trainer.captures == 3


class Windowed(nn.Module):
    """Attention to the last `window` positions, by a mask that is causal in short sequences."""

    def __init__(self, window):
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, WORDS)
        self.register_buffer("mask", torch.ones(200, 200).tril().triu(1 - window)[None, None], persistent=False)

    def forward(self, input_ids, labels):
        samples, positions = input_ids.shape
        q, k, v = (one.view(samples, positions, 4, 8).transpose(1, 2) for one in self.qkv(self.embed(input_ids)).split(DIM, -1))
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(self.mask[:, :, :positions, :positions] == 0, float("-inf"))
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, positions, DIM)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("window", [40, 1000])
def test_a_mask_is_what_it_is_for_long_sequences(window):
    """At the sizes of the captures, the window of 40 hides nothing."""
    module = Windowed(window).double().train()
    trainer = trainer_of(module, texts(2, 12))
    for positions in (20, 41, 39, 150):
        check_loss(trainer, module, texts(3, positions))
    assert trainer.captures == 2
    captured = trainer._captured
    operators = {one["op"] for shape in captured.graph["shapes"][1:] for p in shape["programs"] for one in p["forward"]}
    assert ("twobp::attention" in operators) == (window == 1000)


class Scaled(Tokens):
    """Has an attribute that the programs depend on."""

    scale = 1.0

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) * self.scale
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_each_variant_has_its_own_programs():
    module = Scaled().double().train()
    trainer = twobp.Trainer(module, texts(2, 4), micro_batches=1, optimizer=twobp.SGD(lr=RATE), cache=False)
    for scale in (1.0, 3.0, 1.0):
        module.scale = scale
        for positions in (5, 9, 6):
            batch = texts(2, positions)
            reference = copy.deepcopy(module)
            reference.load_state_dict(trainer.state_dict())
            assert trainer.step([batch]).loss == pytest.approx(reference(**batch).item(), rel=1e-12)
        assert trainer.captures == 2


def test_the_cache_keeps_programs_for_many_shapes(tmp_path):
    states = []
    for first, second in (((2, 4), (3, 7)), ((2, 4), (5, 9))):
        captured = capture(Tokens().double().train(), texts(*first), slices=False, cache=tmp_path)
        captured.add_shape(texts(*second))
        captured.add_shape(texts(6, 20))
        states.append(captured.cached)
    assert states == [["kept", "kept"], ["hit", "hit"]]


def test_a_bundle_serves_all_lengths(tmp_path):
    module = Tokens().double().train()
    trainer = trainer_of(module, texts(2, 4))
    check_loss(trainer, module, texts(2, 9))
    trainer.save(tmp_path / "bundle")
    for sizes in ((2, 4), (5, 30)):
        again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example=texts(*sizes), micro_batches=1, optimizer=twobp.SGD(lr=RATE))
        for other in (sizes, (3, 17), (2, 4)):
            check_loss(again, module, texts(*other))


def test_the_program_trains_a_bundle_at_other_sizes(tmp_path):
    module = Tokens().train()
    trainer = twobp.Trainer(copy.deepcopy(module), texts(2, 4), micro_batches=1, optimizer=twobp.SGD(lr=RATE), cache=False)
    trainer.step([texts(2, 9)])
    trainer.load_state_dict(module.state_dict())
    trainer.save(tmp_path / "bundle")
    batch = texts(6, 21)
    for name, tensor in batch.items():
        (tmp_path / "arrays").mkdir(exist_ok=True)
        numpy.save(tmp_path / "arrays" / f"{name}.npy", tensor.numpy())
    settings = [f"model.from={tmp_path / 'bundle'}", f"data.arrays={tmp_path / 'arrays'}", "data.held_out=0", "data.shuffle=false",
                "pipeline.micro_batches=2", "pipeline.ranks=2", "pipeline.pin=false", "train.steps=1"]

    def train(size):
        return subprocess.run([os.environ["TWOBP_PROGRAM"], "train", "--set", *settings, f"pipeline.micro_batch_size={size}"], capture_output=True,
                              text=True)

    run, refused = train(3), train(1)
    assert run.returncode == 0, run.stderr
    assert f"loss {module(**batch).item():.4f}" in run.stdout
    assert refused.returncode != 0 and "captured with micro-batches of 2" in refused.stderr


class Scores(nn.Module):
    """Its bytes grow with the square of the length."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(WORDS, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, WORDS)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            y = layer(x)
            x = x + (torch.tanh(y @ y.transpose(1, 2)) / 100) @ y
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_longer_batches_hold_what_a_trainer_for_them_holds():
    def trainer_of(example):
        return twobp.Trainer(Scores().train(), example, micro_batches=8, ranks=2, schedule="1f1b", p2="end", threads=1,
                             optimizer=twobp.SGD(lr=RATE), cache=False)

    def most(trainer, batch):
        return max(trainer.step([batch] * 8).peak_bytes)

    short, own = trainer_of(texts(2, 16)), trainer_of(texts(2, 128))
    for _ in range(2):
        peaks = most(short, texts(2, 128)), most(own, texts(2, 128))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)
    plans = [twobp.plan(one, ranks=2, micro_batches=8, schedule="1f1b", p2="off", example=texts(2, 128), seconds=0.05, top=None)[0]
             for one in (short, own)]
    assert plans[0].peak_bytes == pytest.approx(plans[1].peak_bytes, rel=0.02)
    assert plans[0].peak_bytes == pytest.approx(peaks[1], rel=0.1) and plans[0].micro_batch_size == 2
    assert plans[0].peak_bytes > 2 * twobp.plan(short, ranks=2, micro_batches=8, schedule="1f1b", p2="off", seconds=0.05)[0].peak_bytes


def test_a_wrong_program_for_many_shapes_is_refused(monkeypatch):
    """The comparison at the second batch finds it, and the old way is taken."""
    from twobp.capture import sizes

    module = Tokens().double().train()
    monkeypatch.setitem(sizes.DO, "mul", lambda a, b: a * b + 1)
    trainer = trainer_of(module, texts(2, 4))
    with pytest.warns(UserWarning, match="on its own"):
        check_loss(trainer, module, texts(2, 9))
    assert "sizes" not in trainer._captured.graph["shapes"][1]


def test_slices_are_captured_for_each_shape():
    captured = capture(Tokens().double().train(), texts(2, 8), cache=False)
    captured.add_shape(texts(2, 9))
    assert ["sizes" in shape for shape in captured.graph["shapes"]] == [False, False]
    assert captured.why == "programs over slices are for sequences of one length"
