"""The drop-in for transformers.Trainer against transformers.Trainer itself, which trains on one device."""
import ast
import dataclasses
import gc
import inspect
import pathlib
import textwrap

import pytest
import torch

transformers = pytest.importorskip("transformers")

import twobp  # noqa: E402
import twobp.transformers  # noqa: E402
import fresh  # noqa: E402
from twobp.transformers import arguments, overrides  # noqa: E402
from twobp.transformers.optimizer import highest_lr, update_rule  # noqa: E402

VOCABULARY, LENGTH = 48, 12

LOSSES = {"rel": 1e-5}
NORMS = {"rel": 1e-4}


def gpt2(**settings):
    torch.manual_seed(1)
    settings = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **settings}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
                                                                 bos_token_id=0, eos_token_id=0, **settings))
    model.loss_type = "ForCausalLM"  # without it, transformers 5.23 also counts the first label, which is no target
    return model


def qwen3():
    torch.manual_seed(1)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=LENGTH))


def texts(samples=8, seed=0, lengths=(LENGTH,)):
    """Ids that depend on the previous one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(samples):
        first = torch.randint(VOCABULARY, (1,), generator=generator).item()
        ids = [(first + 5 * k) % VOCABULARY for k in range(lengths[i % len(lengths)])]
        data.append({"input_ids": ids, "labels": ids})
    return data


def pad(samples):
    """A batch of the longest sample's length, with a mask."""
    length = max(len(sample["input_ids"]) for sample in samples)
    rows = {name: [sample[name] + [fill] * (length - len(sample[name])) for sample in samples]
            for name, fill in (("input_ids", 0), ("labels", -100))}
    rows["attention_mask"] = [[1] * len(sample["input_ids"]) + [0] * (length - len(sample["input_ids"])) for sample in samples]
    return {name: torch.tensor(row) for name, row in rows.items()}


def hide(samples):
    """A batch with some labels left out at random."""
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, -100, ids)}


class Events(transformers.TrainerCallback):
    """Records which events came, and at which step."""

    def __init__(self):
        self.seen = []


for _event in [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]:
    def _record(self, args, state, control, *, event=_event, **_):
        self.seen.append((event, state.global_step))
    setattr(Events, _event, _record)


def train(kind, model, folder, *, resume=None, callbacks=(), data=None, data_collator=None, ranks=2, **settings):
    """A trainer of `kind` that has trained, and what its train() returned."""
    pipeline = {name: settings.pop(name) for name in ("schedule", "p2", "recompute", "slices", "slice_lengths", "loss_reduction", "gradients") if name in settings}
    own = {"compute_metrics": settings.pop("compute_metrics", None)}
    if issubclass(kind, twobp.transformers.Trainer):
        own |= {"ranks": ranks, **pipeline}
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-6, "logging_steps": 1,
                "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, **settings}
    prepare = settings.pop("prepare", None)
    trainer = kind(model=model, args=transformers.TrainingArguments(str(folder), **settings), train_dataset=texts() if data is None else data,
                   eval_dataset=texts(5, seed=1), data_collator=data_collator, callbacks=list(callbacks), **own)
    if prepare is not None:
        prepare(trainer)
    return trainer, trainer.train(resume_from_checkpoint=resume)


def both(model, folder, *mixins, **settings):
    """transformers' trainer and ours, with the same methods of a subclass, after the same training, and what each has logged."""
    kinds = ((type("Theirs", (*mixins, transformers.Trainer), {}), "theirs"), (type("Ours", (*mixins, twobp.transformers.Trainer), {}), "ours"))
    trainers = [train(kind, model(), folder / name, **settings)[0] for kind, name in kinds]
    return trainers, [trainer.state.log_history for trainer in trainers]


def compare(logs):
    """Checks that the lines are the same, and the numbers equal but for rounding."""
    theirs, ours = logs
    for expected, line in zip(theirs, ours, strict=True):
        assert line.keys() == expected.keys()
        for name in line:
            if name.endswith(("runtime", "per_second", "preparation_time")):
                continue
            tolerance = LOSSES if name.endswith("loss") else NORMS if name == "grad_norm" else {"rel": 1e-12}
            assert line[name] == pytest.approx(expected[name], **tolerance), (name, expected)


def compare_weights(trainers):
    theirs, ours = (trainer.model.state_dict() for trainer in trainers)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def assert_equal_bits(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", params=[gpt2, qwen3], ids=["GPT-2", "Qwen3"])
def pair(request, tmp_path_factory):
    """Both trainers after two epochs: warm-up and decay, weight decay, clipping, evaluations, checkpoints, a last smaller batch."""
    events = [Events(), Events()]
    trainers = []
    folder = tmp_path_factory.mktemp("pair")
    for kind, name, callback in zip((transformers.Trainer, twobp.transformers.Trainer), ("theirs", "ours"), events):
        trainers.append(train(kind, request.param(), folder / name, data=texts(11), num_train_epochs=2, warmup_steps=2, weight_decay=0.1,
                              max_grad_norm=0.8, eval_strategy="steps", eval_steps=3, eval_on_start=True, save_strategy="steps",
                              save_steps=2, save_total_limit=2, logging_first_step=True, callbacks=[callback]))
    return trainers, events, folder


def test_every_line_of_the_log_is_that_of_transformers(pair):
    (theirs, ours), _, _ = pair
    compare([theirs[0].state.log_history, ours[0].state.log_history])
    losses = [line["loss"] for line in ours[0].state.log_history if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    rates = [line["learning_rate"] for line in ours[0].state.log_history if "loss" in line]
    assert rates == [0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3]
    assert theirs[1].metrics.keys() | {"captured_shapes"} == ours[1].metrics.keys()
    assert ours[1].training_loss == pytest.approx(theirs[1].training_loss, **LOSSES)
    assert ours[1].metrics["captured_shapes"] == 2  # the whole micro-batch, and the last of an epoch


def test_weights_and_evaluation_after_training_are_those_of_transformers(pair):
    trainers = [trainer for trainer, _ in pair[0]]
    compare_weights(trainers)
    theirs, ours = (trainer.evaluate() for trainer in trainers)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], **LOSSES) and ours.keys() == theirs.keys()


def test_callbacks_are_called_in_the_order_of_transformers(pair):
    theirs, ours = (events.seen for events in pair[1])
    assert ours == theirs
    assert {"on_train_begin", "on_substep_end", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end"} <= {name for name, _ in ours}


def test_the_checkpoints_have_the_files_of_transformers(pair):
    theirs, ours = ({str(path.relative_to(pair[2] / name)) for path in (pair[2] / name).rglob("*")} for name in ("theirs", "ours"))
    assert ours == theirs
    assert "checkpoint-6/model.safetensors" in ours and "checkpoint-2/model.safetensors" not in ours


@pytest.mark.slow
@pytest.mark.parametrize("pair", [gpt2], indirect=True, ids=["GPT-2"])
@pytest.mark.parametrize("first, second", [(transformers.Trainer, twobp.transformers.Trainer), (twobp.transformers.Trainer, transformers.Trainer)],
                         ids=["theirs-ours", "ours-theirs"])
def test_either_trainer_resumes_the_other_s_checkpoint(pair, first, second):
    trainers, _, folder = pair
    theirs = trainers[0][0]
    settings = {"data": texts(11), "num_train_epochs": 2, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.8}
    checkpoint = folder / ("theirs" if first is transformers.Trainer else "ours") / "checkpoint-4"
    resumed, _ = train(second, gpt2(), folder / "resumed", resume=str(checkpoint), **settings)
    compare_weights([theirs, resumed])
    steps = {line["step"]: line["loss"] for line in theirs.state.log_history if "loss" in line}
    for line in resumed.state.log_history:
        if "loss" in line:
            assert line["loss"] == pytest.approx(steps[line["step"]], **LOSSES)


def test_a_resumed_run_goes_on_to_the_bit(tmp_path):
    def model():
        return gpt2(resid_pdrop=0.1)  # the masks of a step are those of the uninterrupted run

    settings = {"num_train_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "data_collator": hide}
    whole, _ = train(twobp.transformers.Trainer, model(), tmp_path / "whole", schedule="zb-v", **settings)
    train(twobp.transformers.Trainer, model(), tmp_path / "parts", save_strategy="steps", save_steps=2, **settings)
    (tmp_path / "parts/checkpoint-6").rename(tmp_path / "later")  # as if the run had ended before
    resumed, _ = train(twobp.transformers.Trainer, model(), tmp_path / "parts", resume=True, ranks=1, activation_checkpointing=True, **settings)
    assert resumed.pipeline.config["pipeline"]["recompute"] == ["activations"]
    assert resumed.pipeline.steps_done == 6 and resumed.pipeline.ranks == 1
    assert_equal_bits(resumed.model.state_dict(), whole.model.state_dict())
    assert [line["loss"] for line in resumed.state.log_history[:-1]] == [line["loss"] for line in whole.state.log_history[:-1]]


@pytest.mark.slow
def test_batches_padded_to_different_lengths(tmp_path):
    trainers, logs = both(qwen3, tmp_path, max_steps=2, data=texts(lengths=(12, 12, 12, 7, 8, 8, 8, 8)), data_collator=pad,
                          train_sampling_strategy="group_by_length", optim="sgd", optim_args="momentum=0.9", learning_rate=0.1,
                          lr_scheduler_type="constant", max_grad_norm=0)
    compare(logs)
    compare_weights(trainers)
    assert trainers[1].pipeline.captures == 1


def test_a_batch_without_a_counted_label(tmp_path):
    data = texts(12)
    for sample in data[:6]:
        sample["labels"] = [-100] * LENGTH
    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0, "num_train_epochs": 1, "train_sampling_strategy": "sequential",
                "data": data}
    with pytest.warns(UserWarning, match="step 1 changes nothing: no label of its batch counts"):
        trainers, logs = both(gpt2, tmp_path, **settings)
    compare(logs)
    assert [line["loss"] > 0 for line in logs[1] if "loss" in line] == [False, True, True]
    compare_weights(trainers)


@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt2, qwen3])
def test_slices_of_what_a_collator_pads(model, tmp_path):
    trainers, logs = both(model, tmp_path, max_steps=3, data=texts(lengths=(12, 9, 12, 7, 12, 12, 8, 6)), data_collator=pad, slices=2, slice_lengths=[5, 7], loss_reduction="targets",
                          train_sampling_strategy="sequential", schedule="zb-v", optim="sgd", optim_args="momentum=0.9", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0)
    compare(logs)
    compare_weights(trainers)
    assert trainers[1].pipeline.captures > 1 and trainers[1].pipeline.config["pipeline"]["slice_lengths"] == [5, 7]


@pytest.mark.slow
def test_an_adapter_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def model():
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True))

    trainers, logs = both(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    compare(logs)
    compare_weights(trainers)
    ours = trainers[1]
    before, after = model().state_dict(), ours.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)
    ours.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/adapter_model.safetensors").exists() and not (tmp_path / "adapter/model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    assert_equal_bits(again.state_dict(), after)
    resumed, _ = train(twobp.transformers.Trainer, model(), tmp_path / "resumed", resume=str(tmp_path / "ours/checkpoint-3"), max_steps=4)
    assert_equal_bits(resumed.model.state_dict(), after)


def test_early_stopping_leaves_the_best_model(tmp_path):
    def stopped(kind, name):
        return train(kind, gpt2(), tmp_path / name, max_steps=8, learning_rate=0.3, adam_epsilon=1e-8, eval_strategy="steps", eval_steps=1,
                     save_strategy="steps", save_steps=1, save_total_limit=1, load_best_model_at_end=True, lr_scheduler_type="constant",
                     callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)])[0]

    trainer = stopped(twobp.transformers.Trainer, "ours")
    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert trainer.state.global_step == best + 2 < 8
    assert trainer.evaluate()["eval_loss"] == losses[best]
    assert [path.name for path in (tmp_path / "ours").glob("checkpoint-*")] == [f"checkpoint-{best}"]
    theirs = stopped(transformers.Trainer, "theirs")
    assert theirs.state.best_global_step == best


def test_metrics_and_predictions_see_the_trained_weights(tmp_path):
    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    trainer, _ = train(twobp.transformers.Trainer, gpt2(), tmp_path, max_steps=1, compute_metrics=accuracy, ranks=1)
    logits = trainer.predict(texts(3)).predictions
    model = gpt2()
    model.load_state_dict({name.removeprefix("model."): one for name, one in trainer.pipeline.state_dict().items()})
    with torch.no_grad():
        expected = model.eval()(torch.tensor([sample["input_ids"] for sample in texts(3)])).logits
    torch.testing.assert_close(torch.tensor(logits), expected)
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    trainer.args.max_steps = 2
    trainer.train()  # a new call begins at the trained weights, with the optimizer's state
    assert trainer.state.global_step == 2 and trainer.pipeline.steps_done == 3


def test_weight_decay_is_by_transformers_groups():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))
            self.relative_bias = torch.nn.Parameter(torch.ones(3, 3))
            self.linear = torch.nn.Linear(3, 3)
            self.norm = torch.nn.LayerNorm(3)

    model = Odd()
    args = transformers.TrainingArguments("unused", weight_decay=0.1, report_to="none", use_cpu=True)
    rule = update_rule(transformers.Trainer(model, args).create_optimizer(), model)
    assert rule == twobp.AdamW(weight_decay=0.1, groups={"scale": {"weight_decay": 0.1}, "relative_bias": {"weight_decay": 0.0}})


def test_an_optimizer_of_the_user_is_taken_or_refused():
    model = torch.nn.Linear(2, 2)
    weight, bias = model.parameters()
    assert update_rule(torch.optim.Adam(model.parameters(), eps=1e-6), model) == twobp.Adam(eps=1e-6)
    with pytest.raises(twobp.Error, match="does not have the parameter bias"):
        update_rule(torch.optim.AdamW([weight]), model)
    with pytest.raises(twobp.Error, match="groups have different betas"):
        update_rule(torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "betas": (0.5, 0.5)}]), model)
    rates = torch.optim.AdamW([{"params": [weight], "lr": 1e-3}, {"params": [bias], "lr": 5e-4}], weight_decay=0)
    assert update_rule(rates, model) == twobp.AdamW(weight_decay=0, groups={"bias": {"lr_scale": 0.5}})
    torch.optim.lr_scheduler.LambdaLR(rates, [lambda step: 1.0, lambda step: 0.3])
    with pytest.raises(twobp.Error, match="one schedule for all"):
        highest_lr(rates)
    with pytest.raises(twobp.Error, match="twobp.Muon"):
        update_rule(torch.optim.Muon([weight]), model)
    with pytest.raises(twobp.Error, match="amsgrad"):
        update_rule(torch.optim.AdamW(model.parameters(), amsgrad=True), model)


def llama():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, tie_word_embeddings=True))


def test_mixed_precision_is_that_of_accelerate(tmp_path):
    trainers, logs = both(llama, tmp_path, max_steps=100, bf16=True, learning_rate=1e-4, data=texts(32))
    theirs, ours = ([line["loss"] for line in log if "loss" in line] for log in logs)
    assert len(theirs) == 100 and ours[0] == pytest.approx(theirs[0], abs=5e-6)
    # Later, roundings go other ways: with weights changed by 1e-7, transformers itself differs by up to 1.6e-4, and by 5e-5 in the mean.
    assert sum(abs(one - other) for one, other in zip(ours, theirs)) / 100 < 1e-4
    assert ours == pytest.approx(theirs, abs=8e-4)
    assert {one.dtype for one in trainers[1].model.parameters()} == {torch.float32}
    assert trainers[1].evaluate()["eval_loss"] == pytest.approx(trainers[0].evaluate()["eval_loss"], abs=2e-4)


def test_fp16_has_an_effect_on_gpus_only(tmp_path):
    with pytest.warns(UserWarning, match="TrainingArguments.fp16 has no effect on a CPU, as in transformers"):
        ours, _ = train(twobp.transformers.Trainer, gpt2(), tmp_path / "ours", fp16=True, max_steps=2)
    theirs, _ = train(transformers.Trainer, gpt2(), tmp_path / "theirs", fp16=True, max_steps=2)
    compare([theirs.state.log_history, ours.state.log_history])


@pytest.mark.parametrize("settings", [
    {"bf16_full_eval": True}, {"debug": "underflow_overflow"}, {"enable_jit_checkpoint": True}, {"activation_checkpointing_kwargs": {"offload": True}},
], ids=lambda settings: next(iter(settings)))
def test_an_argument_that_cannot_be_honoured_is_named(settings):
    args = transformers.TrainingArguments("unused", report_to="none", use_cpu=True, **settings)
    with pytest.raises(twobp.Error, match=f"TrainingArguments.{next(iter(settings))}"):
        twobp.transformers.Trainer(gpt2(), args, train_dataset=texts())


@pytest.mark.parametrize("settings, message", [
    ({"rank": 2}, "unknown setting 'rank': did you mean 'ranks'"), ({"micro_batches": 2}, "gradient_accumulation_steps"),
    ({"loss_reduction": "mean"}, "loss_reduction is 'mean', but may only be 'targets'"), ({"slices": 2}, "slices need a loss .*targets"),
    ({"loss_reduction": "targets", "compute_loss_func": lambda *_: 0}, "compute_loss_func .*leave out loss_reduction"),
], ids=["unknown", "of-the-arguments", "reduction", "slices", "own-loss"])
def test_a_wrong_setting_is_refused(settings, message):
    args = transformers.TrainingArguments("unused", report_to="none", use_cpu=True)
    with pytest.raises(twobp.Error, match=message):
        twobp.transformers.Trainer(gpt2(), args, train_dataset=texts(), **settings)


@pytest.mark.parametrize("settings, message", [
    ({"optim": "adafactor"}, "Adafactor"), ({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"}, "nesterov"),
], ids=["optim", "optim_args"])
def test_an_optimizer_that_the_pipeline_does_not_have_is_refused(settings, message, tmp_path):
    with pytest.raises(twobp.Error, match=message):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, max_steps=1, **settings)


class PreparesInputs:
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "input_ids": (inputs["input_ids"] * 7) % VOCABULARY}


class PreparesInput:
    def _prepare_input(self, data):
        data = super()._prepare_input(data)
        return data.flip(-1) if isinstance(data, torch.Tensor) else data


class ReadsTheModel:
    """Its inputs depend on the weights of this step."""
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        with torch.no_grad():
            return {**inputs, "input_ids": self.model(inputs["input_ids"]).logits.argmax(-1)}


class OrdersBatches:
    def get_batch_samples(self, *arguments):
        batches, items = super().get_batch_samples(*arguments)
        return [{**batch, "input_ids": batch["input_ids"].flip(0)} for batch in reversed(batches)], items


class ReplacesBatches:
    """Calls no method of its base."""
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches = [{**batch, "labels": batch["labels"].roll(1, 0)} for _, batch in zip(range(num_batches), epoch_iterator)]
        return batches, self._get_num_items_in_batch(batches, device)


class Steps:
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, {**inputs, "labels": inputs["labels"].flip(0)}, num_items_in_batch)


@pytest.mark.slow
@pytest.mark.parametrize("mixin", [PreparesInputs, PreparesInput, ReadsTheModel, OrdersBatches, ReplacesBatches, Steps])
def test_methods_of_a_subclass_between_a_batch_and_its_loss_are_called(mixin, tmp_path):
    trainers, logs = both(qwen3, tmp_path, mixin, max_steps=3, train_sampling_strategy="sequential", optim="sgd", learning_rate=0.1)
    compare(logs)
    compare_weights(trainers)
    unchanged = train(transformers.Trainer, qwen3(), tmp_path / "unchanged", max_steps=1, train_sampling_strategy="sequential")[0]
    assert abs(unchanged.state.log_history[0]["loss"] - logs[1][0]["loss"]) > 1e-4  # the method matters


class Sets(transformers.TrainerCallback):
    """Sets an attribute of the trainer before its second step."""

    def __init__(self, name, value):
        self.name, self.value, self.trainer = name, value, None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1:
            setattr(self.trainer, self.name, self.value)


def test_methods_that_are_set_on_the_trainer_later_are_called(tmp_path):
    def shifted(inputs):
        return {**inputs, "input_ids": (inputs["input_ids"] * 7) % VOCABULARY}

    logs = []
    for kind, name in ((transformers.Trainer, "theirs"), (twobp.transformers.Trainer, "ours")):
        sets = Sets("_prepare_inputs", shifted)
        before = train(kind, qwen3(), tmp_path / name / "before", max_steps=1, prepare=lambda trainer: setattr(trainer, "_prepare_inputs", shifted))[0]
        during = train(kind, qwen3(), tmp_path / name / "during", max_steps=2, callbacks=[sets], prepare=lambda trainer: setattr(sets, "trainer", trainer))[0]
        logs.append(before.state.log_history + during.state.log_history)
    compare(logs)


def test_parts_in_evaluation_mode_are_trained_as_in_transformers(tmp_path):
    """Its training_step calls model.train() for each micro-batch."""
    model = gpt2(resid_pdrop=0.5)
    model.transformer.h[0].eval()
    trainer, _ = train(twobp.transformers.Trainer, model, tmp_path, max_steps=1)
    assert model.transformer.h[0].training
    graph = trainer.pipeline._captured.graph
    with_dropout = [layer["name"] for layer in graph["layers"] if "twobp::dropout" in str(graph["shapes"][0]["programs"][layer["kind"]])]
    assert with_dropout == [f"model.transformer.h.{block}.{part}" for block in range(2) for part in ("attn", "mlp")]


METHODS = sorted(overrides.METHODS_REFUSED)


class Weighed(transformers.GPT2LMHeadModel):
    """Its loss has a factor that a callback anneals."""
    beta = 1.0
    accepts_loss_kwargs = True

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **more):
        output = super().forward(input_ids=input_ids, labels=labels, num_items_in_batch=num_items_in_batch)
        return transformers.modeling_outputs.CausalLMOutputWithCrossAttentions(loss=output.loss * self.beta)


class Anneals(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        model.beta = 1.0 / (1 + state.global_step)


@pytest.mark.slow
def test_a_callback_that_anneals_an_attribute(tmp_path):
    def model():
        made = gpt2()
        made.__class__ = Weighed
        return made

    _, logs = both(model, tmp_path, callbacks=[Anneals()], max_steps=3)
    losses = [line["loss"] for line in logs[0] if "loss" in line]
    assert losses[1] < 0.6 * losses[0]
    compare(logs)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_would_have_no_effect_is_refused(name, tmp_path, monkeypatch):
    def own(self, *arguments, **keywords):
        return getattr(super(kind, self), name)(*arguments, **keywords)

    kind = type("Own", (twobp.transformers.Trainer,), {name: own})
    with pytest.raises(twobp.Error, match=f"Own.{name} is not that of transformers.Trainer"):
        kind(qwen3(), transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), train_dataset=texts())
    trainer = twobp.transformers.Trainer(qwen3(), transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), train_dataset=texts())
    setattr(trainer, name, lambda *_, **__: None)
    with pytest.raises(twobp.Error, match=f"Trainer.{name} is not that"):
        trainer.train()
    delattr(trainer, name)
    if name in vars(transformers.Trainer):
        monkeypatch.setattr(transformers.Trainer, name, lambda *_, **__: None)
        if name not in vars(twobp.transformers.Trainer):
            with pytest.raises(twobp.Error, match=f"Trainer.{name} is not that"):
                trainer.train()


@pytest.mark.parametrize("name", ["compute_loss", "compute_loss_func"])
def test_what_is_set_in_the_middle_of_training_is_refused(name, tmp_path):
    sets = Sets(name, lambda *_, **__: None)
    with pytest.raises(twobp.Error, match="compute_loss of Trainer was replaced since the first step"):
        train(twobp.transformers.Trainer, qwen3(), tmp_path, callbacks=[sets], prepare=lambda trainer: setattr(sets, "trainer", trainer))
    assert sets.trainer.state.global_step == 1


def test_evaluation_honours_a_loss_that_is_set_later(tmp_path):
    trainer = twobp.transformers.Trainer(qwen3(), transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), eval_dataset=texts())
    before = trainer.evaluate()["eval_loss"]
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.sum() * 0 + 3
    assert before != 3 and trainer.evaluate()["eval_loss"] == pytest.approx(3)


class CountsTwice:
    def _get_num_items_in_batch(self, *arguments):
        return super()._get_num_items_in_batch(*arguments) * 2


class HidesLabels:
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        return {**inputs, "labels": inputs["labels"].where(inputs["labels"] > 9, -100)}


class CountsNothing:
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)


class MeansOfMeans:
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.model_accepts_loss_kwargs = False


class Scaled:
    loss_is_scaled_for_ga = False


@pytest.mark.parametrize("mixin", [CountsTwice, HidesLabels, CountsNothing, MeansOfMeans, Scaled])
def test_micro_batches_are_weighed_as_by_transformers(mixin, tmp_path):
    """Also where that is not the mean over the labels that count. They are 5 and 11 for each sample."""
    data = texts()
    for i, sample in enumerate(data):
        sample["labels"] = [-100 if i % 4 < 2 and k > 5 else one for k, one in enumerate(sample["input_ids"])]
    trainers, logs = both(qwen3, tmp_path, mixin, data=data, train_sampling_strategy="sequential", max_steps=2)
    compare(logs)
    compare_weights(trainers)


def counts_the_first_label():
    model = gpt2()
    del model.loss_type
    return model


def t5():
    torch.manual_seed(1)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0))


@pytest.mark.slow
@pytest.mark.parametrize("model", [counts_the_first_label, t5])
def test_models_whose_labels_transformers_counts_in_another_way(model, tmp_path):
    trainers, logs = both(model, tmp_path, data_collator=pad, data=texts(lengths=(6, 6, 12, 12)), train_sampling_strategy="sequential", max_steps=2)
    compare(logs)
    compare_weights(trainers)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [True, False])
def test_the_mean_over_counted_targets_by_an_argument(targets, tmp_path):
    """Of T5, transformers adds means of micro-batches. All labels together have another mean."""
    data = {"data_collator": pad, "data": texts(4, lengths=(6, 6, 12, 12)), "train_sampling_strategy": "sequential", "max_steps": 1}
    trainer, _ = train(twobp.transformers.Trainer, t5(), tmp_path, **data, **({"loss_reduction": "targets"} if targets else {}))
    batches = [pad(data["data"][:2]), pad(data["data"][2:])]
    losses, counts = zip(*((t5()(**one).loss.item(), int(one["labels"].ne(-100).sum())) for one in batches))
    wanted = sum(loss * count for loss, count in zip(losses, counts)) / sum(counts) if targets else sum(losses)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, **LOSSES)


def mixtral():
    """Adds an auxiliary loss of its router."""
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, max_position_embeddings=LENGTH, output_router_logits=True, router_aux_loss_coef=0.02))


@pytest.mark.slow
def test_an_auxiliary_loss_is_added_for_each_micro_batch(tmp_path):
    trainers, logs = both(mixtral, tmp_path, max_steps=2)
    compare(logs)
    compare_weights(trainers)
    with pytest.raises(twobp.Error, match="averages a value that already combines the samples"):
        train(twobp.transformers.Trainer, mixtral(), tmp_path, max_steps=1, loss_reduction="targets")


class Roots(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels):
        loss = torch.nn.functional.cross_entropy(self.head(self.table(input_ids)).flatten(0, 1), labels.flatten())
        return {"loss": loss.sqrt()}


def test_a_loss_that_is_no_mean(tmp_path):
    """Also of an incomplete last micro-batch."""
    trainers, logs = both(Roots, tmp_path, num_train_epochs=1, data=texts(7))
    compare(logs)
    compare_weights(trainers)


class Twice:
    def training_step(self, model, inputs, num_items_in_batch=None):
        super().training_step(model, inputs, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


class Sometimes:
    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.accelerator.sync_gradients:
            return torch.tensor(0.0)
        return super().training_step(model, inputs, num_items_in_batch)


class OtherModel:
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(qwen3(), inputs, num_items_in_batch)


@pytest.mark.parametrize("mixin, settings, message", [
    (Twice, {"gradient_accumulation_steps": 1}, "1 micro-batches, but training_step of Ours did not"), (Twice, {}, "2 micro-batches, but training_step of Ours did not"),
    (Sometimes, {}, "2 micro-batches, but training_step of Ours did not"), (OtherModel, {}, "not the trainer's model")])
def test_each_micro_batch_is_one_call_of_training_step(mixin, settings, message, tmp_path):
    with pytest.raises(twobp.Error, match=message):
        train(type("Ours", (mixin, twobp.transformers.Trainer), {}), qwen3(), tmp_path, max_steps=2, **settings)


class EndsEpoch(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **_):
        control.should_epoch_stop = True


def test_an_epoch_that_ends_within_a_step(tmp_path):
    ends = EndsEpoch()
    with pytest.warns(UserWarning, match="an epoch ended within step 1: its 1 micro-batches train nothing"):
        trainer, _ = train(twobp.transformers.Trainer, qwen3(), tmp_path, num_train_epochs=2, callbacks=[ends])
    assert trainer.state.global_step == 0 and trainer.pipeline is None


def test_every_method_between_a_batch_and_its_step_is_in_the_table():
    own, found, todo = vars(transformers.Trainer), set(), ["_run_epoch"]
    after = {"_evaluate", "_save_checkpoint", "log", "store_flos", "_determine_best_metric"}  # these follow a step
    while todo:
        name = todo.pop()
        found.add(name)
        called = {node.attr for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(own[name])))) if isinstance(node, ast.Attribute)
                  and isinstance(node.value, ast.Name) and node.value.id == "self"}
        todo += [one for one in called - found - after if inspect.isfunction(own.get(one))]
    assert found == overrides.CALLED | overrides.UNUSED | set(METHODS)


class Decays(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **_):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5


class Unclips(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        args.max_grad_norm = 0.5


class ChangesWithin(transformers.TrainerCallback):
    def __init__(self, first):
        self.first = first

    def on_substep_end(self, args, state, control, model=None, **_):
        if state.global_step >= self.first:
            model.transformer.drop.p += 0.1


@pytest.mark.parametrize("first", [0, 1])
def test_a_change_between_micro_batches_is_refused(first, tmp_path):
    with pytest.raises(twobp.Error, match=f"has changed between the micro-batches of step {first + 1}"):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, callbacks=[ChangesWithin(first)])


class Replaces(transformers.TrainerCallback):
    def __init__(self, trainer, what):
        self.trainer, self.what = trainer, what

    def on_train_begin(self, args, state, control, optimizer=None, **_):
        if self.what == "hook":
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(lambda *_: None)
        else:
            setattr(self.trainer[0].accelerator, self.what, lambda *_: None)


@pytest.mark.parametrize("what, message", [("backward", "accelerator.backward was replaced"), ("clip_grad_norm_", "accelerator.clip_grad_norm_ was replaced"),
                                           ("hook", "the optimizer has hooks")])
def test_what_accelerate_would_call_is_refused_if_replaced(what, message, tmp_path):
    own = []
    with pytest.raises(twobp.Error, match=message):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, callbacks=[Replaces(own, what)], prepare=own.append)


class Shrinks(transformers.TrainerCallback):
    """Changes the weights after each step, in one of the ways that scripts know."""

    def __init__(self, how):
        self.how = how

    def on_step_end(self, args, state, control, model=None, **_):
        for parameter in model.parameters():
            self.how(parameter)


def shrink(parameter):
    with torch.no_grad():
        parameter.mul_(0.9)


def clamp(parameter):
    parameter.data.clamp_(-0.02, 0.02)


def replace(parameter):
    parameter.data = parameter.data * 0.9


def turn(parameter):
    if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
        parameter.data = parameter.data.t()


@pytest.mark.parametrize("how, made, settings", [(shrink, qwen3, {}), (clamp, qwen3, {}), (replace, qwen3, {}), (turn, qwen3, {}), (shrink, qwen3, {"bf16": True}),
                                                 (shrink, llama, {}), (replace, llama, {})])
def test_the_models_weights_are_the_pipelines(how, made, settings, tmp_path):
    """So a callback may change them, also those that are tied."""
    trainers, logs = both(made, tmp_path, callbacks=[Shrinks(how)], max_steps=2 if how is turn else 3, max_grad_norm=0.0 if how is clamp else 1.0, **settings)
    if settings:
        theirs, ours = ([line["loss"] for line in log if "loss" in line] for log in logs)
        assert len(theirs) == 3 and ours == pytest.approx(theirs, rel=2e-3)
        return
    compare(logs)
    if how is turn:
        return  # PyTorch's fused AdamW goes through the turned weight in another order than through its moments
    compare_weights(trainers)
    if how is replace:
        return  # after the last step, too
    model, pipeline = trainers[1].model, trainers[1].pipeline
    own = pipeline._native.shared_weights()
    assert {name for name, one in model.named_parameters() if one.data_ptr() == own[f"model.{name}"].data_ptr()} == dict(model.named_parameters()).keys()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert_equal_bits(before, {name.removeprefix("model."): one for name, one in pipeline.state_dict().items()})
    trainers[1].pipeline = trainers[1]._Trainer__module = pipeline = own = None
    gc.collect()
    assert_equal_bits(before, model.state_dict())


def test_weights_of_other_sizes_are_refused(tmp_path):
    def cut(parameter):
        parameter.data = parameter.data[:1]

    with pytest.raises(twobp.Error, match="of the module is now .* but the trainer has .* make a new trainer"):
        train(twobp.transformers.Trainer, qwen3(), tmp_path, callbacks=[Shrinks(cut)])


class Doubles(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        assert all(p.grad is None for p in model.parameters())


def test_a_callback_that_expects_gradients_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match=r"Doubles.on_pre_optimizer_step finds no gradients"):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, callbacks=[Doubles()])


class Forgets(twobp.transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return model(**inputs).loss


def test_what_would_have_no_effect_in_the_middle_of_training(tmp_path):
    with pytest.raises(twobp.Error, match=r"settings of the optimizer changed.*'weight_decay': 0.5"):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, callbacks=[Decays()])
    with pytest.raises(twobp.Error, match=r"max_grad_norm changed since the first step: from 1.0 to 0.5"):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, callbacks=[Unclips()])
    with pytest.raises(twobp.Error, match="gradients is 'streamed'.*max_grad_norm is 1.0.*set it to 0"):
        train(twobp.transformers.Trainer, gpt2(), tmp_path, gradients="streamed")
    with pytest.raises(twobp.Error, match=r"did not call super\(\).training_step"):
        Forgets(gpt2(), transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, max_steps=1), train_dataset=texts()).train()


def test_every_training_argument_is_dealt_with():
    parts = (arguments.HONOURED, arguments.WITHOUT_EFFECT, frozenset(arguments.REFUSED))
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    of_others = {"predict_with_generate", "use_liger_loss", "activation_offloading"}  # Seq2SeqTrainer, TRL
    assert fields == frozenset().union(*parts) - of_others
    assert sum(map(len, parts)) == len(fields) + len(of_others)


def test_the_trainer_takes_what_transformers_trainer_takes():
    theirs, ours = (list(inspect.signature(kind.__init__).parameters) for kind in (transformers.Trainer, twobp.transformers.Trainer))
    assert ours == [*theirs, "loss_reduction", "check_every", "evaluate_in_pipeline", "settings"]


class StopsAfter(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


PROCESSES = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
import transformers
import twobp.transformers
from test_transformers import gpt2, train

class SavesAlone(transformers.TrainerCallback):
    # as scripts do
    trainer = None
    def on_step_end(self, args, state, control, **_):
        if self.trainer.is_world_process_zero() and state.global_step != 2:
            self.trainer.save_model(f"{sys.argv[2]}/alone-{state.global_step}")

saves = SavesAlone()
trainer, _ = train(twobp.transformers.Trainer, gpt2(resid_pdrop=0.1), sys.argv[2] + "/output", max_steps=4, save_strategy="steps", save_steps=2,
                   save_total_limit=1, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, per_device_eval_batch_size=2,
                   callbacks=[saves], prepare=lambda trainer: setattr(saves, "trainer", trainer))
trainer.evaluate()
assert any(not one.modes[trainer.model] for one in trainer.pipeline._captured.variants)  # the ranks have evaluated
if trainer.is_world_process_zero():
    trainer.save_model()
torch.save((trainer.state.log_history, trainer.model.state_dict()), f"{sys.argv[2]}/{os.environ['RANK']}.pt")
trainer.end()
"""


@pytest.mark.slow
def test_a_process_for_each_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROCESSES)
    codes, said = fresh.run_ranks(2, script, tmp_path, pathlib.Path(__file__).parent, tmp_path, "connected")
    assert codes == [0, 0], said
    alone, _ = train(twobp.transformers.Trainer, gpt2(resid_pdrop=0.1), tmp_path / "alone", max_steps=4, eval_strategy="steps", eval_steps=2,
                     per_device_eval_batch_size=2)  # and a smaller last batch
    alone.evaluate()
    logs = [alone.state.log_history]
    for rank in range(2):
        log, state = torch.load(tmp_path / f"{rank}.pt")
        logs.append(log)
        assert_equal_bits(state, alone.model.state_dict())
    losses, evaluated = ([[line[name] for line in log if name in line] for log in logs] for name in ("loss", "eval_loss"))
    assert losses[0] == losses[1] == losses[2] and evaluated[1] == evaluated[2]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)
    assert said.count("'train_runtime'") == 1  # only process 0 logs
    states = [transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"alone-{step}").state_dict() for step in (1, 3)]
    assert_equal_bits(states[0], train(twobp.transformers.Trainer, gpt2(resid_pdrop=0.1), tmp_path / "first", max_steps=4, callbacks=[StopsAfter(1)])[0].model.state_dict())
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sorted(path.name for path in (tmp_path / "output").iterdir() if path.is_dir()) == ["checkpoint-4"]


def test_ctrl_c_after_the_update_lets_transformers_count_the_step(tmp_path, monkeypatch):
    import os
    import signal
    import threading
    straight, _ = train(twobp.transformers.Trainer, gpt2(), tmp_path / "straight", max_steps=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for place, done in (("optimizer", 2), ("F:micro_batch=0", 1)):
            monkeypatch.setenv("TWOBP_FAIL", f"{place}:step=2:rank=0:seconds=0.8")
            caught = {}

            class Strike(transformers.TrainerCallback):
                def on_step_begin(self, args, state, control, **_):
                    if state.global_step == 1:
                        caught["timer"] = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
                        caught["timer"].start()

            class Ours(twobp.transformers.Trainer):
                def __init__(self, *arguments, **keywords):
                    super().__init__(*arguments, **keywords)
                    caught["trainer"] = self
            with pytest.raises(KeyboardInterrupt):
                train(Ours, gpt2(), tmp_path / place[0], max_steps=2, ranks=2, callbacks=[Strike()], schedule="1f1b")
            caught["timer"].join()
            trainer = caught["trainer"]
            assert trainer.state.global_step == trainer.pipeline.steps_done == done
            trainer.save_model(str(tmp_path / "saved"))  # as scripts do then
            if done == 2:
                assert_equal_bits(trainer.model.state_dict(), straight.model.state_dict())
    finally:
        signal.signal(signal.SIGINT, before)


def test_rubbish_as_an_argument(tmp_path):
    import test_rubbish
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    make = lambda **given: twobp.transformers.Trainer(**{"model": MODEL, "args": arguments, "train_dataset": DATA, **given})  # noqa: E731
    MODEL, DATA = gpt2(), texts()
    test_rubbish.check({"args": lambda value: make(args=value) if value is not None else None, "data_parallel": lambda value: make(data_parallel=value)})


def with_rope(kind, **settings):
    torch.manual_seed(1)
    ropes = {"longrope": {"short_factor": [1.8, 8.5], "long_factor": [8.2, 6.0], "factor": 4.0, "original_max_position_embeddings": 8}, "dynamic": {"factor": 2.0}}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ropes[kind]}, **settings)).train()


def rope_batches(lengths):
    generator = torch.Generator().manual_seed(2)
    for length in lengths:
        ids = torch.randint(VOCABULARY, (4, length), generator=generator)
        yield {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_wavelengths_that_follow_from_the_length_of_a_sequence(kind):
    """LongRoPE has others beyond 8 positions, which it makes at the first such call and writes into a buffer."""
    model = with_rope(kind, max_position_embeddings=16)
    rotary = model.model.rotary_emb
    before = {**vars(rotary), **rotary._buffers, "values": rotary.inv_freq.clone()}
    lengths = [12, 8, 12, 6]
    trainer = twobp.Trainer(model, {name: one[:2] for name, one in next(rope_batches([6])).items()}, cache=False, optimizer=twobp.SGD(lr=0.1), micro_batches=2, ranks=2)
    losses = [trainer.step(batch).loss for batch in rope_batches(lengths)]
    assert vars(rotary).keys() | rotary._buffers.keys() | {"values"} == before.keys() and torch.equal(rotary.inv_freq, before["values"])
    optimizer, expected = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in rope_batches(lengths):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    if kind == "longrope":
        assert not torch.equal(rotary.inv_freq, rotary.long_inv_freq) and rotary.long_inv_freq[0] != rotary.original_inv_freq[0], "the lengths matter"


@pytest.mark.parametrize("more", [{}, {"position_ids": torch.arange(12).expand(4, -1) % 6}])
def test_wavelengths_that_follow_from_earlier_sequences_are_refused(more):
    batch = {**next(rope_batches([12])), **more}
    with pytest.raises(twobp.Error, match='(inv_freq|dynamic_frequency_update).*follow from the longest sequence so far. Keep sequences within config.max_position_embeddings'):
        twobp.capture.capture(with_rope("dynamic", max_position_embeddings=8), batch, cache=False)
