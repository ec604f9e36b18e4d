"""Own losses over batches that are padded to the longest: one capture for all shapes, with the numbers of the original."""
import os
import random
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import twobp.transformers  # noqa: E402
from twobp.transformers import pipelined  # noqa: E402

VOCABULARY, CLASSES = 40, 3
MOST = 3  # captures: the first shape, all others, and perhaps those with a size of 1


def gpt2(**more):
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{
        **dict(vocab_size=VOCABULARY, n_positions=512, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2),
        **more}))


def distilbert(kind="SequenceClassification"):
    torch.manual_seed(1)
    return getattr(transformers, f"DistilBertFor{kind}")(transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, hidden_dim=24, n_layers=2, n_heads=2, max_position_embeddings=64, dropout=0, attention_dropout=0, seq_classif_dropout=0,
        num_labels=CLASSES, pad_token_id=0))


def collate(samples):
    """Pads to the longest."""
    longest = max(len(one["input_ids"]) for one in samples)
    batch = {"input_ids": torch.stack([F.pad(one["input_ids"], (0, longest - len(one["input_ids"]))) for one in samples])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    labels = [one["labels"] for one in samples]
    batch["labels"] = torch.stack([F.pad(one, (0, longest - len(one)), value=-100) if one.dim() else one for one in labels])
    return batch


def texts(lengths, labels=lambda ids: ids):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": labels(row)} for row in rows]


def classes(lengths):
    return texts(lengths, lambda ids: ids.sum() % CLASSES)


def words(lengths):
    return texts(lengths, lambda ids: torch.where(ids % 5 == 0, -100, ids % CLASSES))


def lengths(count=24, least=4, most=30, seed=0):
    rng = random.Random(seed)
    return [rng.randint(least, most) for _ in range(count)]


def train(kind, model, data, folder, own=None, **settings):
    args = transformers.TrainingArguments(str(folder), **{
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 4, "learning_rate": 1e-2,
        "adam_epsilon": 1e-6, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "remove_unused_columns": False, "max_grad_norm": 1e9,
        **settings})
    pipeline = {"ranks": 2} if issubclass(kind, twobp.transformers.Trainer) else {}
    trainer = kind(model(), args, train_dataset=data, data_collator=collate, **pipeline, **(own or {}))
    trainer.train()
    return trainer


def compare(theirs, ours, most=MOST):
    for expected, line in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert line.keys() - {"captured_shapes"} == expected.keys()
        for name, value in expected.items():
            if "time" not in name and not name.endswith("per_second"):
                assert line[name] == (pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value), (name, expected["step"])
    assert ours.pipeline.captures <= most, ours.pipeline.captures


def both(kind, model, data, folder, most=MOST, **settings):
    theirs, ours = train(kind, model, data, folder, **settings), train(pipelined(kind), model, data, folder, **settings)
    compare(theirs, ours, most)
    return theirs, ours


def summed(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / num_items_in_batch


class PerSample(transformers.Trainer):
    """Takes numbers for its log, as many as samples, and has numbers that sizes and fields decide."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logs = F.log_softmax(model(**inputs).logits[:, :-1], -1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        mask = labels[:, 1:] != -100
        each = -(logs * mask).sum(1) / mask.sum(1)
        self.hardest = max(each.tolist())
        self.seen = getattr(self, "seen", 0) + mask.sum().item() / labels.shape[1]
        count = labels.numel() - labels.shape[0] - (~mask).sum().item()
        return each.mean() + 0.1 * logs[mask].mean() ** 2 + logs.pow(2).sum() / labels.shape[1] ** 2 / max(count, 1)

    def log(self, logs, *args, **keywords):
        super().log({**logs, "hardest": self.hardest, "seen": self.seen} if "loss" in logs else logs, *args, **keywords)


CASES = {
    "label_smoothing_factor": (transformers.Trainer, gpt2, texts, {"label_smoothing_factor": 0.1}),
    "label_smoothing_factor of classes": (transformers.Trainer, distilbert, classes, {"label_smoothing_factor": 0.1}),
    "label_smoothing_factor of words": (transformers.Trainer, lambda: distilbert("TokenClassification"), words, {"label_smoothing_factor": 0.1}),
    "compute_loss_func": (transformers.Trainer, gpt2, texts, {"own": {"compute_loss_func": summed}}),
    "numbers for Python": (PerSample, gpt2, texts, {}),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("classes" not in name)) for name in CASES])
def test_padding_to_the_longest_takes_one_capture_more(name, tmp_path):
    kind, model, data, settings = CASES[name]
    both(kind, model, data(lengths()), tmp_path, **settings)


@pytest.mark.slow
def test_gradients_are_those_of_the_original(tmp_path, monkeypatch):
    """In float64, with SGD, over other numbers of samples, too."""
    settings = dict(optim="sgd", learning_rate=0.125, gradient_accumulation_steps=1, max_steps=-1, num_train_epochs=1)
    state = gpt2().double().state_dict()
    theirs, ours = both(PerSample, lambda: gpt2().double(), texts(lengths(23)), tmp_path, most=4, **settings)
    for (name, one), other in zip(theirs.model.state_dict().items(), ours.model.state_dict().values()):
        assert (other - one).norm() <= 1e-10 * (one - state[name]).norm().clamp(min=1e-3), name


@pytest.mark.slow
def test_300_lengths_take_one_capture(tmp_path):
    data = texts(random.Random(0).sample(range(3, 303), 300))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a micro-batch of the sizes")
        both(transformers.Trainer, lambda: gpt2(n_layer=1), data, tmp_path, most=1, label_smoothing_factor=0.1, per_device_train_batch_size=1,
             gradient_accumulation_steps=4, max_steps=75, logging_steps=5)


class Cuts(transformers.Trainer):
    """Values of the batch decide a size."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
        least = (labels != -100).sum(1).min().item()
        return F.cross_entropy(logits[:, : least - 1].flatten(0, 1), labels[:, 1:least].flatten())


@pytest.mark.slow
def test_numbers_of_the_batch_that_decide_sizes_are_captured_again(tmp_path):
    with pytest.warns(UserWarning, match=r"captured on its own.*Python of compute_loss computes something else for other sizes \(.*test_loss_shapes.py:\d+\)"):
        both(Cuts, gpt2, texts(lengths(12)), tmp_path, most=9, max_steps=2)


class Branches(transformers.Trainer):
    """Another loss for long batches."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss if inputs["input_ids"].shape[1] < 16 else 2 * loss


@pytest.mark.slow
def test_a_branch_on_sizes_is_captured_for_each_side(tmp_path):
    both(Branches, gpt2, texts(lengths(24, 4, 24)), tmp_path, most=4, per_device_train_batch_size=1)


class Anneals(transformers.Trainer):
    """A number of Python changes from step to step, as do the shapes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss * (1 / (1 + self.state.global_step // 3))


@pytest.mark.slow
def test_a_number_of_python_is_not_taken_for_that_of_another_shape(tmp_path):
    theirs, ours = both(Anneals, gpt2, texts(lengths(36)), tmp_path, most=6, max_steps=6)
    assert ours.pipeline.captures == 2, "one for each number"
