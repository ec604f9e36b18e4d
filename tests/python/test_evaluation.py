"""Evaluations on the ranks of the pipeline, against those of transformers."""
import os
import pathlib
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import fresh  # noqa: E402
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
        warnings.filterwarnings("error", ".* run the model itself")
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


def right(found):
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def compare_predictions(ours, theirs):
    ours, theirs = ([one] if isinstance(one, numpy.ndarray) else one for one in (ours, theirs))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.shape == other.shape and one.dtype == other.dtype
        numpy.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_predictions_are_those_of_transformers(tmp_path, in_pipeline):
    settings = {"per_device_eval_batch_size": 4}
    theirs, ours = both(transformers.Trainer, net, tmp_path, vectors(), vectors(10, seed=1), own={"compute_metrics": right}, **settings)
    theirs.model.load_state_dict(ours.model.state_dict())
    expected, found = theirs.evaluate(), ours.evaluate()
    assert found["eval_right"] == expected["eval_right"] and found["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME)
    assert in_pipeline == [2, 1]
    expected, found = (one.predict(vectors(9, seed=2)) for one in (theirs, ours))
    compare_predictions(found.predictions, expected.predictions)
    assert found.metrics["test_right"] == expected.metrics["test_right"] and (found.label_ids == expected.label_ids).all()
    assert in_pipeline == [2, 1] * 2
    ours.args.prediction_loss_only = theirs.args.prediction_loss_only = True
    losses = [one.predict(vectors(10, seed=2)).metrics["test_loss"] for one in (theirs, ours)]
    assert losses[1] == pytest.approx(losses[0], **SAME)
    assert in_pipeline == [2, 1] * 3
    unlabelled = [{"x": one["x"], "labels": None} for one in vectors(3)]
    with pytest.raises(Exception, match="cross_entropy"):  # of the model itself, as in transformers
        ours.predict(unlabelled)


class Several(Net):
    """It returns more than logits, of other sizes and dtypes, some of them in a list."""

    def forward(self, x, labels=None):
        first = self.first(x)
        hidden = self.norm(first).relu()
        logits = self.second(hidden)
        masked = logits.masked_fill(logits > logits.mean(), float("-inf"))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "hidden": [first, hidden.mean(1)], "masked": masked, "none": None,
                "best": logits.argmax(-1), "ids": labels}


@pytest.mark.parametrize("ranks", [2, 1])
def test_all_that_a_model_returns_is_predicted(ranks, tmp_path, in_pipeline):
    def checked(logits, labels):
        assert [type(one) for one in logits] == [torch.Tensor, list, torch.Tensor, torch.Tensor, torch.Tensor]
        return logits[0], logits[1][0], logits[1][1], logits[3], logits[4]

    class Named(transformers.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            return super().prediction_step(model, inputs, prediction_loss_only, ["none"])

    own = {"compute_metrics": lambda found: {"first": float(found.predictions[1].sum())}, "preprocess_logits_for_metrics": checked}
    theirs = trained(Named, net(Several), tmp_path / "theirs", vectors(), vectors(10, seed=1), own=own, per_device_eval_batch_size=4)
    ours = trained(pipelined(Named), net(Several), tmp_path / "ours", vectors(), vectors(10, seed=1), own={**own, "ranks": ranks},
                   per_device_eval_batch_size=4)
    theirs.model.load_state_dict(ours.model.state_dict())
    assert ours.evaluate()["eval_first"] == pytest.approx(theirs.evaluate()["eval_first"], rel=1e-5)
    expected, found = (one.predict(vectors(9, seed=2)).predictions for one in (theirs, ours))
    compare_predictions(found, expected)
    assert in_pipeline == [2, 1] * 2


def test_logits_of_a_language_model(tmp_path, in_pipeline):
    """Sentences of other lengths, between the steps of a run, with the user's own loss, whose Python runs again."""
    own = {"compute_metrics": right, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)[..., None] == torch.arange(40)}
    settings = {"per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2, "data_collator": padded}
    theirs, ours = both(Counted, lambda: causal(use_cache=True), tmp_path, texts(), lengths(10), own=own, **settings)
    theirs.model.load_state_dict(ours.model.state_dict())
    for trainer in (theirs, ours):
        trainer.seen = []
    expected, found = theirs.evaluate(), ours.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], **SAME) and found["eval_right"] == expected["eval_right"]
    assert ours.seen == pytest.approx(theirs.seen, **SAME) and len(ours.seen) == 3
    assert in_pipeline == [2, 1] * len(evaluations(ours))


def t5():
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=3, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0))


RETURNING = {
    "hidden states": lambda: causal(output_hidden_states=True, num_hidden_layers=3),
    "attention": lambda: causal(output_attentions=True, num_hidden_layers=3, attn_implementation="eager"),
    "T5": t5,
}


@pytest.mark.parametrize("name", RETURNING)
def test_what_layers_return_is_predicted(name, tmp_path, in_pipeline):
    """Later layers pass it on."""
    theirs, ours = both(transformers.Trainer, RETURNING[name], tmp_path, texts(), texts(10), per_device_eval_batch_size=4)
    theirs.model.load_state_dict(ours.model.state_dict())
    expected, found = (one.predict(texts(8, seed=2)).predictions for one in (theirs, ours))
    flat = [torch.utils._pytree.tree_leaves(one) for one in (found, expected)]
    assert len(flat[0]) > 1
    compare_predictions(*flat)
    assert in_pipeline == [2]


class Odd(Net):
    def forward(self, x, labels=None):
        return {**super().forward(x, labels), "odd": transformers.PreTrainedConfig()}


def test_what_is_no_tensor_the_model_predicts(tmp_path):
    ours = trained(pipelined(transformers.Trainer), net(Odd), tmp_path, vectors(), vectors(5, seed=1))
    with pytest.warns(UserWarning, match="predictions run the model itself.*returns a PreTrainedConfig beside the loss"):
        with pytest.raises(TypeError, match="Unsupported types"):  # as in transformers
            ours.predict(vectors(5))
    assert ours.evaluate()["eval_loss"] > 0


def test_every_process_gets_the_predictions(tmp_path):
    for name, ranks in (("alone", 1), ("two", 2)):
        program = tmp_path / f"{name}.py"
        program.write_text(f"import sys\nsys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\nfrom test_evaluation import predict\n"
                           f"predict({str(tmp_path)!r}, {name!r})\n")
        codes, said = fresh.run_ranks(ranks, program, tmp_path, launcher=fresh.as_torchrun) if ranks > 1 else ([fresh.run(program, tmp_path)], "")
        assert not any(codes), said
    alone, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("alone0", "two0", "two1"))
    assert first[1] == second[1] == 2 and (first[0] == second[0]).all()
    compare_predictions(first[0], alone[0])


def predict(folder, name):
    """Trains and predicts in this process, one of those of a test above."""
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    seen = []
    cut = twobp.Trainer._cut
    twobp.Trainer._cut = lambda self, batch, training=True: (self._module.predicts and seen.append(1), cut(self, batch, training))[1]
    own = {"ranks": ranks} if ranks > 1 else {"ranks": 1, "evaluate_in_pipeline": False}
    trainer = trained(pipelined(transformers.Trainer), net(), folder, vectors(), vectors(5, seed=1), own={"evaluate_in_pipeline": None, **own},
                      per_device_eval_batch_size=4)
    torch.save((trainer.predict(vectors(13, seed=2)).predictions, len(seen)), f"{folder}/{name}{rank}.pt")
    trainer.end()


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


def test_a_last_batch_of_one_sample_of_seq2seq(tmp_path, in_pipeline):
    def t5():
        torch.manual_seed(1)
        return transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))

    theirs, ours = both(transformers.Trainer, t5, tmp_path, texts(), texts(5, seed=1), per_device_eval_batch_size=2)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
    expected, got = (one.predict(texts(5, seed=2)).metrics["test_loss"] for one in (theirs, ours))
    assert got == pytest.approx(expected, rel=1e-5) and sum(in_pipeline) >= 6
