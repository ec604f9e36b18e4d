"""Losses of subclasses of transformers.Trainer in the pipeline, against transformers' own training."""
import copy
import math
import pathlib
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import twobp  # noqa: E402
import twobp.transformers  # noqa: E402
from twobp.transformers import pipelined  # noqa: E402

VOCABULARY, LENGTH, CLASSES = 40, 10, 3
SEEN: list = []  # a global that a loss appends to
SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
             max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def causal(seed=1, **more):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))


def classifier(seed=1):
    torch.manual_seed(seed)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_labels=CLASSES))


def texts(samples=24, seed=0):
    """Sentences of which the first few labels do not count, more in some than in others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4, VOCABULARY, (samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": torch.where(torch.arange(LENGTH) < 2 + i % 5, -100, row)} for i, row in enumerate(rows)]


def classes(samples=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, VOCABULARY, (LENGTH,), generator=generator), "attention_mask": torch.ones(LENGTH, dtype=torch.long),
             "labels": torch.randint(CLASSES, (), generator=generator)} for _ in range(samples)]


def arguments(folder, **more):
    return transformers.TrainingArguments(str(folder), **{
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 3, "learning_rate": 1e-2,
        "adam_epsilon": 1e-6, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "remove_unused_columns": False, **more})


def train(kind, model, data, folder, *, ranks=2, prepare=None, own=None, **settings):
    pipeline = {name: settings.pop(name) for name in ("schedule", "loss_reduction", "recompute", "slices") if name in settings}
    if issubclass(kind, twobp.transformers.Trainer):
        pipeline["ranks"] = ranks
    else:
        pipeline = {}
    trainer = kind(model(), arguments(folder, **settings), train_dataset=data, **pipeline, **(own() if own else {}))
    if prepare:
        prepare(trainer)
    trainer.train()
    return trainer


def both(kind, model, data, folder, **settings):
    """Trainers after the same training, of transformers and ours."""
    theirs = train(kind, model, data, folder / "theirs", **settings)
    SEEN.clear()
    return theirs, train(pipelined(kind), model, data, folder / "ours", **settings)


def compare(theirs, ours, rel=1e-5):
    """Checks that the logs have the same lines and numbers, and that the weights are the same."""
    for expected, line in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert line.keys() - {"captured_shapes"} == expected.keys()
        for name in expected:
            if not name.endswith(("runtime", "per_second")):
                assert line[name] == pytest.approx(expected[name], rel=1e-4 if name == "grad_norm" else rel, abs=1e-7), (name, expected["step"])
    got = ours.model.state_dict()
    for name, tensor in theirs.model.state_dict().items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=2e-5)


class Weighted(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))(outputs.logits.view(-1, CLASSES), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class Focal(transformers.Trainer):
    """Logs numbers of its own, from within the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        entropy = F.cross_entropy(outputs.logits, labels, reduction="none")
        loss = (0.25 * (1 - torch.exp(-entropy)) ** 2 * entropy).mean()
        self.log({"focal": loss.item(), "hardest": float(entropy.max()), "text": len(f"{loss:.2f}")})
        self.seen = [*getattr(self, "seen", []), int((outputs.logits.argmax(-1) == labels).sum())]
        SEEN.append(entropy.tolist())
        return (loss, outputs) if return_outputs else loss


class Distils(transformers.Trainer):
    def __init__(self, *args, teacher=None, **keywords):
        super().__init__(*args, **keywords)
        self.teacher = teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            teacher = self.teacher(**inputs)
        distance = F.kl_div(F.log_softmax(outputs.logits / 2, -1), F.softmax(teacher.logits / 2, -1), reduction="batchmean") * 4
        loss = 0.5 * outputs.loss + 0.05 * distance
        return (loss, outputs) if return_outputs else loss


class Twice(transformers.Trainer):
    """R-drop: calls the model twice."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        a, b = model(**inputs), model(**inputs)
        p, q = F.log_softmax(a.logits, -1), F.log_softmax(b.logits, -1)
        return (a.loss + b.loss) / 2 + 0.25 * (F.kl_div(p, q.exp(), reduction="batchmean") + F.kl_div(q, p.exp(), reduction="batchmean"))


class Contrasts(transformers.Trainer):
    """InfoNCE: the loss is of the micro-batch, and calls a part of the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hidden = model.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        a, b = F.normalize(hidden.mean(1), dim=-1), F.normalize(hidden[:, -1], dim=-1)
        return F.cross_entropy(a @ b.t() / 0.05, torch.arange(len(a)))


class Masks(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, outputs = inputs["labels"], model(input_ids=inputs["input_ids"])
        logs = F.log_softmax(outputs.logits[:, :-1], -1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return -logs[labels[:, 1:] != -100].mean()


class ComesBack(transformers.Trainer):
    """A number of Python comes back into the loss, and one that the fields decide."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        other = outputs.logits.pow(2).mean()
        scale = outputs.loss.item() / (other.item() + 1e-8)
        count = (inputs["labels"] != -100).sum().item()
        return outputs.loss + 0.1 * scale * other + other / count


class Keeps(transformers.Trainer):
    """Leaves a tensor in an attribute, and reads it when it logs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.parts = {"kept": outputs.loss.detach() * 2}
        return outputs.loss

    def log(self, logs, *args, **keywords):
        if "loss" in logs:
            logs["kept"] = self.parts["kept"].item()
        super().log(logs, *args, **keywords)


class Chooses(transformers.Trainer):
    """Compares numbers, which changes what it logs, but not the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.high = getattr(self, "high", 0) + (1 if outputs.logits.max() > 0.2 else 0)
        self.mean = outputs.loss.item() / 2 if outputs.loss > 0 else 0.0
        return outputs.loss

    def log(self, logs, *args, **keywords):
        super().log({**logs, "high": self.high, "mean": self.mean} if "loss" in logs else logs, *args, **keywords)


class Flips(Chooses):
    """The comparison turns out otherwise in a later step, which only the log tells."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.mean, self.high = 0.0, getattr(self, "high", 0) + (1 if outputs.loss > 3.68 else 0)
        return outputs.loss


class Catches(transformers.Trainer):
    """An error that Python catches is none, as in accelerate's gather_for_metrics at the end of the data."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        try:
            return loss[:2].mean()
        except Exception:
            return loss


def summed(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


CASES = {
    "class weights": (Weighted, classifier, classes, {}),
    "focal loss with its own log": (Focal, classifier, classes, {}),
    "a teacher": (Distils, causal, texts, {"own": lambda: {"teacher": causal(3, num_hidden_layers=2)}}),
    "R-drop": (Twice, causal, texts, {}),
    "InfoNCE": (Contrasts, classifier, classes, {}),
    "x[mask].mean()": (Masks, causal, texts, {}),
    "item() comes back": (ComesBack, causal, texts, {}),
    "a tensor in an attribute": (Keeps, causal, texts, {}),
    "comparisons for the log": (Chooses, causal, texts, {}),
    "a comparison that turns out otherwise": (Flips, causal, texts, {}),
    "label_smoothing_factor": (transformers.Trainer, causal, texts, {"label_smoothing_factor": 0.1}),
    "label_smoothing_factor of classes": (transformers.Trainer, classifier, classes, {"label_smoothing_factor": 0.1}),
    "compute_loss_func": (transformers.Trainer, causal, texts, {"own": lambda: {"compute_loss_func": summed}}),
    "the model's loss": (transformers.Trainer, causal, texts, {}),
    "the model's loss of classes": (transformers.Trainer, classifier, classes, {}),
    "an error that is caught": (Catches, causal, texts, {}),
    "one micro-batch": (Focal, classifier, classes, {"gradient_accumulation_steps": 1}),
    "an incomplete last step": (Focal, classifier, lambda: classes(21), {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_logs_are_those_of_transformers(name, tmp_path):
    kind, model, data, settings = CASES[name]
    trainers = both(kind, model, data(), tmp_path, **settings)
    compare(*trainers)
    if kind is Focal:
        assert trainers[0].seen == trainers[1].seen and len(SEEN) == len(trainers[0].seen)


class Anneals(transformers.Trainer):
    """The loss has a factor that changes from step to step, and a weight that a subclass sets."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return outputs.loss * (1 / (1 + self.state.global_step // 2)) + self.weight * outputs.logits.pow(2).mean()

    weight = 0.1


@pytest.mark.slow
def test_values_of_python_that_change_between_steps(tmp_path):
    trainers = both(Anneals, causal, texts(), tmp_path, max_steps=4)
    compare(*trainers)
    assert trainers[1].pipeline.captures == 2


def test_too_many_values_of_python_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(twobp.losses.script, "MOST_COURSES", 1)
    with pytest.raises(twobp.Error, match="Anneals.compute_loss has computed with other values of Python in 1 steps.* as a tensor of the batch"):
        train(pipelined(Anneals), causal, texts(), tmp_path, max_steps=4)


class Counts(transformers.Trainer):
    """Takes a whole number that float32 does not have."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.large = (outputs.logits.argmax(-1) * 0 + (1 << 24) + 1).sum().item()
        return outputs.loss


class KeepsWeights(transformers.TrainerCallback):
    """Those at the begin of the last step."""

    steps = 0

    def on_step_begin(self, args, state, control, model=None, **_):
        self.steps, self.weights = self.steps + 1, copy.deepcopy(model.state_dict())

    def are_those_of(self, model):
        return all(torch.equal(one, self.weights[key]) for key, one in model.state_dict().items())


class CountsTooMuch(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        each = inputs.pop("each")
        outputs = model(**inputs)
        self.large = (outputs.logits.argmax(-1) * 0 + each).sum().item()
        return outputs.loss


@pytest.mark.parametrize("step", [1, 2])
def test_whole_numbers_beyond_float64_are_refused(step, tmp_path):
    """From the step on, each of 30 is 2^50."""
    model, calls, kept = causal(), [], KeepsWeights()

    def collate(samples):
        calls.append(len(samples))
        return {**transformers.default_data_collator(samples), "each": torch.tensor(1 << (50 if len(calls) > 2 * step - 2 else 20))}

    def prepare(trainer):
        trainer.data_collator = collate
        trainer.add_callback(kept)

    message = "a number" if step == 1 else "step 2 was not made, because a number"
    with pytest.raises(twobp.Error, match=message + r" of compute_loss is 2\^53 or more \(.*test_own_losses.py:\d+\): divide it"):
        train(pipelined(CountsTooMuch), lambda: model, texts(), tmp_path, prepare=prepare)
    assert kept.steps == step and kept.are_those_of(model)


def test_whole_numbers_beyond_float32_are_exact(tmp_path):
    theirs, ours = both(Counts, causal, texts(), tmp_path, max_steps=1)
    assert ours.large == theirs.large == 30 * ((1 << 24) + 1)


@pytest.mark.slow
def test_other_rows_scalars_and_other_values_in_the_inputs(tmp_path):
    """Documents in one row with where they begin, a scalar, and a number that is no tensor."""
    def collate(samples):
        ids = torch.cat([one["input_ids"] for one in samples])[None]
        return {"input_ids": ids, "position_ids": torch.arange(LENGTH).repeat(len(samples))[None], "labels": ids.clone(),
                "begins": torch.arange(len(samples) + 1) * LENGTH, "factor": torch.tensor(0.5), "nested": {"weights": torch.ones(len(samples))}, "power": 2}

    class Documents(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits
            losses = F.cross_entropy(logits[0, :-1], inputs["labels"][0, 1:], reduction="none")
            first = losses[inputs["begins"][:-1]] * inputs["nested"]["weights"]
            return losses.mean() + inputs["factor"] * first.mean() ** inputs["power"]

    def prepare(trainer):
        trainer.data_collator = collate

    compare(*both(Documents, causal, texts(), tmp_path, prepare=prepare))


@pytest.mark.slow
def test_sizes_that_the_fields_decide(tmp_path):
    class Picks(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            entropy = F.cross_entropy(model(**inputs).logits, labels, reduction="none")
            rare = torch.nonzero(labels == 0).view(-1)
            return entropy.mean() + entropy.index_select(0, rare).sum() / (1 + rare.shape[0])

    theirs, ours = both(Picks, classifier, classes(), tmp_path)
    compare(theirs, ours)
    assert ours.pipeline.captures > 1


class Drops(transformers.Trainer):
    """Calls the model also without gradients."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            before = model(**inputs)
        outputs = model(**inputs)
        with torch.no_grad():
            after = model(**inputs)
        target = F.softmax((before.logits + after.logits) / 2, -1)
        return outputs.loss + 0.1 * F.kl_div(F.log_softmax(outputs.logits, -1), target, reduction="batchmean")


@pytest.mark.slow
def test_a_model_that_is_also_called_without_gradients(tmp_path):
    """No gradient comes through these calls, though the weights are those that are trained."""
    compare(*both(Drops, causal, texts(), tmp_path))


@pytest.mark.slow
def test_a_loss_in_evaluation_is_that_of_the_trainer(tmp_path):
    trainers = both(Focal, classifier, classes(), tmp_path)
    theirs, ours = (trainer.evaluate(classes(6, seed=1)) for trainer in trainers)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


def test_a_mean_that_claims_to_be_divided_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="loss of Weighted does not divide by num_items_in_batch.*loss_is_scaled_for_ga = False"):
        train(pipelined(Weighted), classifier, classes(), tmp_path, max_steps=1)
    kind = type("Says", (Weighted,), {"loss_is_scaled_for_ga": False})
    compare(*both(kind, classifier, classes(), tmp_path))


@pytest.mark.slow
def test_one_capture_for_one_shape_and_the_cache(tmp_path):
    """Another process would find the programs by the code and the values of the loss."""
    first = train(pipelined(Focal), classifier, classes(), tmp_path)
    again = train(pipelined(Focal), classifier, classes(), tmp_path)
    assert first.pipeline.captures == again.pipeline.captures == 1
    assert again.pipeline._captured.cached == ["hit"], again.pipeline._captured.cached

    class Other(Focal):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0.5 * super().compute_loss(model, inputs)

    other = train(pipelined(Other), classifier, classes(), tmp_path)
    assert other.pipeline._captured.cached != ["hit"]
    losses = [next(line["loss"] for line in trainer.state.log_history if "loss" in line) for trainer in (first, other)]
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)


# What is refused, before a weight changes.

class Branches(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss if loss > 3.5 else 2 * loss


class ComparesNumbers(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss if loss.item() * 2 > 7 else 2 * loss


class ComparesOther(transformers.Trainer):
    """The loss stays, but a number that is logged is another one."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.shown = (loss if loss > 3.5 else -loss).item()
        return loss


@pytest.mark.parametrize("kind", [Branches, ComparesNumbers, ComparesOther])
def test_a_comparison_with_another_outcome_is_named(kind, tmp_path):
    model, kept = causal(), KeepsWeights()
    with pytest.raises(twobp.Error, match=r"step \d+ was not made, because a comparison of compute_loss \(.*test_own_losses.py:\d+( \(\d+\))?\) is False in micro-batch \d, "
                       r"but was True when it was captured.*torch.where"):
        train(pipelined(kind), lambda: model, texts(), tmp_path, max_steps=40, learning_rate=0.1, prepare=lambda one: one.add_callback(kept))
    assert kept.steps > 1 and kept.are_those_of(model)


class ComputesInPython(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss * math.exp(-loss.item())


class NeedsTheSize(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**inputs).logits
        chosen = logits[logits > 0]
        return chosen.sum() / chosen.numel()


class NoScalar(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).logits.mean(-1)


class AddsTensors(transformers.Trainer):
    total = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.total = self.total + loss.detach()
        return loss


class Writes(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        with open(pathlib.Path(self.args.output_dir) / "losses", "a") as file:
            file.write(f"{loss.item()}\n")
        return loss


class DrawsByPython(transformers.Trainer):
    draw = staticmethod(random.random)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.draw() * model(**inputs).loss


class DrawsByNumPy(DrawsByPython):
    draw = staticmethod(numpy.random.rand)


class Generates(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = model.generate(inputs["input_ids"], max_new_tokens=2)
        return model(input_ids=ids, labels=ids).loss


class Inside(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **more):
        output = super().forward(input_ids=input_ids, labels=labels, **more)
        output.loss = output.loss * output.logits.max().item()
        return output


def inside():
    model = causal()
    model.__class__ = Inside
    return model


def positions():
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH - 1, n_embd=16, n_layer=1, n_head=2))


REFUSED = {
    "math.exp of a number": (ComputesInPython, causal, texts, r"a number that Python computed from one .*test_own_losses.py:\d+.*torch.exp"),
    "the size of x[mask]": (NeedsTheSize, causal, texts, r"number of elements of x\[mask\] depends on values.*test_own_losses.py:\d+"),
    "no scalar": (NoScalar, causal, texts, r"NoScalar.compute_loss returned a tensor of shape \[3, 10\], but must return one scalar"),
    "files": (Writes, causal, texts, "compute_loss writes a file.*test_own_losses.py"),
    "random numbers of Python": (DrawsByPython, causal, texts, "compute_loss draws by Python's random or NumPy's.*torch.where"),
    "random numbers of NumPy": (DrawsByNumPy, causal, texts, "compute_loss draws by Python's random or NumPy's"),
    "generation": (Generates, causal, texts, r"compute_loss calls generate\(\).*_prepare_inputs"),
    "numbers inside modules": (transformers.Trainer, inside, texts, r"test_own_losses.py:\d+, in forward.*\.item\(\)|leave out .item"),
    "a sequence beyond the positions": (transformers.Trainer, positions, texts, r"the module itself fails on this batch: IndexError: index out of range.*"
                                        r"sequences of 10 positions, and the model takes 9.*max_length=9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(name, tmp_path):
    kind, model, data, message = REFUSED[name]
    made = model()
    before = {key: one.clone() for key, one in made.state_dict().items()}
    with pytest.raises(twobp.Error, match=message):
        train(pipelined(kind), lambda: made, data(), tmp_path)
    assert all(torch.equal(one, before[key]) for key, one in made.state_dict().items())
    assert not (tmp_path / "losses").exists()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "RobertaForMaskedLM"])
def test_a_later_batch_beyond_the_positions_is_refused(name, tmp_path):
    """The first batches are shorter, so the capture for them serves, or does not (BERT)."""
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    model = kind(kind.config_class(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                   max_position_embeddings=LENGTH, pad_token_id=1, bos_token_id=0, eos_token_id=2))
    most = LENGTH - 2 if name.startswith("Roberta") else LENGTH
    kept = KeepsWeights()
    rows = [row for length in [6, 7, most, LENGTH + 2] for row in torch.randint(4, VOCABULARY, (6, length)).split(1)]
    data = [{"input_ids": row[0], "labels": row[0]} for row in rows]
    with pytest.raises(twobp.Error, match=f"sequences of {LENGTH + 2} positions, and the model takes {most} .*truncation=True, max_length={most}$"):
        train(pipelined(transformers.Trainer), lambda: model, data, tmp_path, max_steps=4, train_sampling_strategy="sequential",
              prepare=lambda one: one.add_callback(kept))
    assert kept.steps == 4 and kept.are_those_of(model)


def test_sums_of_tensors_are_refused(tmp_path):
    with pytest.raises(twobp.Error, match=r"AddsTensors.compute_loss reads a tensor that it left in an attribute before.*self.total \+= loss.item\(\)"):
        train(pipelined(AddsTensors), causal, texts(), tmp_path)


@pytest.mark.slow
def test_a_reference_that_changes(tmp_path):
    class Moves(transformers.TrainerCallback):
        def __init__(self, teacher):
            self.teacher = teacher

        def on_step_end(self, args, state, control, **_):
            with torch.no_grad():
                next(self.teacher.parameters()).mul_(0.5)

    def own():
        teacher = causal(3)
        return {"teacher": teacher, "callbacks": [Moves(teacher)]}

    theirs, ours = both(Distils, causal, texts(), tmp_path, own=own)
    compare(theirs, ours)
    assert all(one.requires_grad for one in ours.teacher.parameters())


def test_a_reference_computes_ahead(tmp_path, monkeypatch):
    """For the next micro-batch of the epoch, also if the teacher then changes, or an evaluation comes between."""
    class Moves(transformers.TrainerCallback):
        def __init__(self, teacher):
            self.teacher = teacher

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 6:
                with torch.no_grad():
                    next(self.teacher.parameters()).mul_(0.5)

    def sized(seed=1):  # so that a step has waits, and F in them a gain
        return causal(seed, hidden_size=128, intermediate_size=256, num_hidden_layers=4)

    def own():
        teacher = sized(3)
        return {"teacher": teacher, "callbacks": [Moves(teacher)], "eval_dataset": texts(6, seed=9)}

    ahead, known = [], twobp.Trainer._ahead
    monkeypatch.setattr(twobp.Trainer, "_ahead", lambda *given: ahead.append(len(known(*given))) or known(*given))
    theirs, ours = both(Distils, sized, texts(21), tmp_path, own=own, max_steps=8, eval_strategy="steps", eval_steps=2,
                        learning_rate=3e-3)
    compare(theirs, ours)
    count = ours.pipeline._native.forwards_ahead
    assert count > 0
    assert ahead == [count, count, min(count, 1), 0] * 2, "the last step of an epoch has one micro-batch"


def test_batches_are_read_ahead_unless_that_draws_random_numbers():
    accelerate = pytest.importorskip("accelerate")

    class Rows(torch.utils.data.Dataset):
        def __init__(self, draw):
            self.draw = draw

        def __len__(self):
            return 5

        def __getitem__(self, i):
            return torch.tensor(i) + self.draw()

    for draw, reads in ((lambda: 0, True), (lambda: torch.rand(()), False), (random.random, False), (numpy.random.rand, False)):
        accelerator = accelerate.Accelerator(cpu=True)
        loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(draw), batch_size=1, shuffle=True))
        state, seen = accelerator.gradient_state, []
        upcoming = twobp.transformers.evaluation.Upcoming(iter(loader), state)
        assert upcoming.next(1) == [], "the loader has not begun"
        for batch in upcoming:
            seen.append(batch)
            assert state.end_of_dataloader == (len(seen) == 5), "when the last one is handed out"
            if len(seen) > 1:
                assert len(upcoming.next(2)) == (min(2, 5 - len(seen)) if reads else 0)
        assert len(seen) == 5


def test_a_loss_that_calls_other_modules_later_is_refused(tmp_path):
    class Later(Distils):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if self.state.global_step == 0:
                return model(**inputs).loss
            return super().compute_loss(model, inputs)

    with pytest.raises(twobp.Error, match="Later.compute_loss calls teacher, which it did not call in the first step"):
        train(pipelined(Later), causal, texts(), tmp_path, own=lambda: {"teacher": causal(3)})


def test_pipelined_takes_subclasses_of_the_trainer():
    assert pipelined(transformers.Trainer) is twobp.transformers.Trainer
    assert pipelined(Focal) is pipelined(Focal) and pipelined(pipelined(Focal)) is pipelined(Focal)
    for wrong in (int, nn.Module, "Trainer"):
        with pytest.raises(twobp.Error, match="pipelined takes a subclass of transformers.Trainer"):
            pipelined(wrong)


# Arguments.

@pytest.mark.slow
def test_noise_of_neftune(tmp_path):
    """The noise is drawn by the programs, with the size that transformers gives it."""
    quiet, loud = (train(twobp.transformers.Trainer, causal, texts(), tmp_path, max_steps=2, learning_rate=0.0, neftune_noise_alpha=alpha)
                   for alpha in (1e-6, 20.0))
    plain = train(transformers.Trainer, causal, texts(), tmp_path, max_steps=2, learning_rate=0.0)
    one, other, noisy = ([line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (plain, quiet, loud))
    assert other == pytest.approx(one, rel=1e-5) and noisy != pytest.approx(one, rel=1e-3)
    assert not loud.model.get_input_embeddings()._forward_hooks


@pytest.mark.slow
def test_names_of_adamw_with_small_states_and_torch_compile_are_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="optim is 'paged_adamw_8bit': the pipeline's AdamW has its state in 32 bits"):
        small = train(twobp.transformers.Trainer, causal, texts(), tmp_path, optim="paged_adamw_8bit")
    with pytest.warns(UserWarning, match="torch_compile has no effect"):
        compiled = train(twobp.transformers.Trainer, causal, texts(), tmp_path, torch_compile=True)
    plain = train(twobp.transformers.Trainer, causal, texts(), tmp_path)
    assert [one["loss"] for one in small.state.log_history[:3]] == [one["loss"] for one in plain.state.log_history[:3]]
    assert [one["loss"] for one in compiled.state.log_history[:3]] == [one["loss"] for one in plain.state.log_history[:3]]


@pytest.mark.slow
def test_tokens_that_are_counted_and_data_that_streams(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{name: one.tolist() for name, one in row.items()} for row in texts()]
    logs = []
    for kind in (transformers.Trainer, twobp.transformers.Trainer):
        data = datasets.Dataset.from_list(rows).to_iterable_dataset()
        logs.append(train(kind, causal, data, tmp_path, include_num_input_tokens_seen="all", auto_find_batch_size=True).state.log_history)
    assert [one["num_input_tokens_seen"] for one in logs[0]] == [one["num_input_tokens_seen"] for one in logs[1]] and logs[1][0]["num_input_tokens_seen"] > 0
    assert [one["loss"] for one in logs[1][:3]] == pytest.approx([one["loss"] for one in logs[0][:3]], rel=1e-5)


@pytest.mark.slow
def test_a_smaller_batch_after_running_out_of_memory(tmp_path, monkeypatch):
    sizes, step = [], twobp.Trainer.step

    def without_memory(self, batch, **keywords):
        sizes.append(len(batch[0]["input_ids"]))
        if sizes[-1] == 4:
            raise twobp.Error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return step(self, batch, **keywords)

    monkeypatch.setattr(twobp.Trainer, "step", without_memory)
    trainer = train(twobp.transformers.Trainer, causal, texts(), tmp_path, auto_find_batch_size=True, per_device_train_batch_size=4)
    assert sizes[0] == 4 and 4 not in sizes[1:] and len(sizes) == 4 and trainer.state.global_step == 3


@pytest.mark.slow
def test_a_trainer_that_generates_to_evaluate(tmp_path):
    torch.manual_seed(1)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0,
                                   decoder_start_token_id=0)
    state = transformers.T5ForConditionalGeneration(config).state_dict()
    rows = [{"input_ids": one["input_ids"], "labels": one["input_ids"].flip(0)} for one in texts()]
    found = []
    for kind, own in ((transformers.Seq2SeqTrainer, {}), (pipelined(transformers.Seq2SeqTrainer), {"ranks": 2})):
        model = transformers.T5ForConditionalGeneration(config)
        model.load_state_dict(state)
        args = transformers.Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=3, learning_rate=0.1,
                                                     adam_epsilon=1e-6, per_device_train_batch_size=3, gradient_accumulation_steps=2, predict_with_generate=True,
                                                     generation_max_length=6, logging_steps=1)
        trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:4], compute_metrics=lambda out: {"sum": float(out.predictions.sum())}, **own)
        trainer.train()
        found.append((trainer.evaluate()["eval_sum"], trainer.predict(rows[:4]).predictions.tolist(), [one["loss"] for one in trainer.state.log_history if "loss" in one]))
    assert found[0][:2] == found[1][:2] and found[1][2] == pytest.approx(found[0][2], rel=1e-5)
