"""Evaluations on the ranks of the pipeline, against those of transformers."""
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import twobp  # noqa: E402
from test_own_losses import arguments, causal, texts  # noqa: E402
from twobp.transformers import pipelined  # noqa: E402

SAME = {"rel": 1e-6}


class Net(nn.Module):
    """It computes something else in evaluation: by dropout, by BatchNorm, and of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        hidden = F.dropout(self.norm(self.first(x)), 0.3, self.training)
        logits = self.second(hidden) if self.training else 1.001 * self.second(hidden)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Draws(Net):
    def forward(self, x, labels=None):
        return super().forward(F.dropout(x, 0.5), labels)  # also in evaluation


class Counted(transformers.Trainer):
    """It logs the mean of a number of each batch, and compares two numbers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] * (2 if model.training else 3)
        self.seen = [*getattr(self, "seen", ()), loss.item()]
        if loss.item() > self.most:
            loss = loss * 0.5
        return (loss, outputs) if return_outputs else loss

    most = 1e9


def net(kind=Net):
    torch.manual_seed(0)
    return kind()


def vectors(samples=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(6, generator=generator), "labels": torch.randint(3, (), generator=generator)} for _ in range(samples)]


def lengths(samples):
    """Sentences of other lengths, so that batches are."""
    return [{name: row[: 10 - i % 3 - i // 4] for name, row in one.items()} for i, one in enumerate(texts(samples, seed=2))]


def padded(samples):
    most = max(len(one["input_ids"]) for one in samples)
    return {name: torch.stack([F.pad(one[name], (0, most - len(one[name])), value=fill) for one in samples])
            for name, fill in (("input_ids", 0), ("labels", -100))}


def trained(kind, model, folder, data, evaluated, *, own=(), prepare=None, **settings):
    own = dict(own)
    if issubclass(kind, twobp.transformers.Trainer):
        own = {"ranks": 2, "evaluate_in_pipeline": True, **own}
    collator = {"data_collator": settings.pop("data_collator")} if "data_collator" in settings else {}
    trainer = kind(model, arguments(folder, **settings), train_dataset=data, eval_dataset=evaluated, **collator, **own)
    if prepare:
        prepare(trainer)
    trainer.train()
    return trainer


def both(kind, model, folder, data, evaluated, **settings):
    return [trained(one, model(), folder / name, data, evaluated, **settings) for one, name in ((kind, "theirs"), (pipelined(kind), "ours"))]


def evaluations(trainer):
    return [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]


@pytest.fixture
def in_pipeline(monkeypatch):
    """Counts the batches that pipelines evaluate. What they would leave to the model is an error."""
    counts = []
    before = twobp.Trainer._cut

    def cut(self, batch, training=True):
        if self._module.evaluates:
            counts.append(len(batch))
        return before(self, batch, training)

    monkeypatch.setattr(twobp.Trainer, "_cut", cut)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "evaluations run the model itself")
        yield counts


def test_the_loss_is_that_of_transformers(tmp_path, in_pipeline):
    """Batches of other sizes and lengths than in training, and a smaller last one, between the steps of a run."""
    settings = {"per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1, "data_collator": padded}
    theirs, ours = both(transformers.Trainer, causal, tmp_path, texts(), lengths(10), **settings)
    assert evaluations(ours) == pytest.approx(evaluations(theirs), rel=1e-5) and len(evaluations(ours)) == 3  # of weights that are trained apart
    assert in_pipeline == [2, 1] * 3
    theirs.model.load_state_dict(ours.model.state_dict())
    expected, found = theirs.evaluate(), ours.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME) and found.keys() == expected.keys()
    alone = trained(pipelined(transformers.Trainer), causal(), tmp_path / "alone", texts(), lengths(10), own={"evaluate_in_pipeline": False}, **settings)
    losses = [[line["loss"] for line in one.state.log_history if "loss" in line] for one in (ours, alone)]
    assert losses[0] == losses[1], "an evaluation changes a step"


def test_a_model_that_differs_in_evaluation(tmp_path, in_pipeline):
    theirs, ours = both(transformers.Trainer, net, tmp_path, vectors(), vectors(11, seed=1), per_device_eval_batch_size=4)
    theirs.model.load_state_dict(ours.model.state_dict())
    before = {name: one.clone() for name, one in ours.model.named_buffers()}
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], **SAME)
    assert in_pipeline == [2, 1]
    assert all(torch.equal(one, before[name]) for name, one in ours.model.named_buffers()), "running statistics changed"
    assert ours.evaluate()["eval_loss"] != pytest.approx(theirs.model.train() and theirs.evaluate(vectors(11, seed=2))["eval_loss"], **SAME)


def test_a_loss_of_the_user_is_logged_as_by_transformers(tmp_path, in_pipeline):
    theirs, ours = both(Counted, net, tmp_path, vectors(), vectors(11, seed=1), per_device_eval_batch_size=4)
    theirs.model.load_state_dict(ours.model.state_dict())
    for trainer in (theirs, ours):
        trainer.seen = []
    expected = theirs.evaluate()
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME)
    assert ours.seen == pytest.approx(theirs.seen, **SAME) and len(ours.seen) == 3
    assert in_pipeline == [2, 1]
    most = sum(sorted(theirs.seen)[:2]) / 2
    for trainer in (theirs, ours):  # the comparison has another outcome for some batches
        trainer.most, trainer.seen = most, []
    expected = theirs.evaluate()
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME)
    assert ours.seen == pytest.approx(theirs.seen, **SAME)


def test_predictions_are_made_by_the_model(tmp_path, in_pipeline):
    settings = {"per_device_eval_batch_size": 4}
    own = {"compute_metrics": lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}}
    theirs, ours = both(transformers.Trainer, net, tmp_path, vectors(), vectors(10, seed=1), own=own, **settings)
    theirs.model.load_state_dict(ours.model.state_dict())
    expected, found = theirs.evaluate(), ours.evaluate()
    assert found["eval_right"] == expected["eval_right"] and found["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME)
    assert in_pipeline == []
    ours.args.prediction_loss_only = theirs.args.prediction_loss_only = True
    losses = [one.predict(vectors(10, seed=2)).metrics["test_loss"] for one in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], **SAME)
    assert in_pipeline == [2, 1]


def test_what_programs_cannot_evaluate_the_model_does(tmp_path):
    theirs, ours = both(transformers.Trainer, lambda: net(Draws), tmp_path, vectors(), vectors(11, seed=1))
    theirs.model.load_state_dict(ours.model.state_dict())
    with pytest.warns(UserWarning, match="evaluations run the model itself.*draws random numbers in evaluation mode"):
        torch.manual_seed(5)
        found = ours.evaluate()["eval_loss"]
    torch.manual_seed(5)
    assert found == theirs.evaluate()["eval_loss"]


def test_threads_share_the_weights_with_the_model_which_evaluates(tmp_path, in_pipeline):
    ours = trained(pipelined(transformers.Trainer), net(), tmp_path, vectors(), vectors(5, seed=1), own={"evaluate_in_pipeline": None})
    assert ours.evaluate()["eval_loss"] > 0 and in_pipeline == []
    with pytest.raises(twobp.Error, match="evaluate_in_pipeline is 'yes', but must be True, False or None"):
        pipelined(transformers.Trainer)(net(), arguments(tmp_path), evaluate_in_pipeline="yes")
