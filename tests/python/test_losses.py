"""The loss of a step is that of one device for the global batch, also if the micro-batches have unequal numbers of samples or targets."""
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twobp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Penalised(Net):
    def forward(self, x, y):
        return F.mse_loss(super().forward(x), y) + 0.1 * self.up.weight.pow(2).mean() + self.up.bias.pow(2).sum() + 3


class Weighs(Net):
    """Learns the weight of each mean."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x, y):
        output = super().forward(x)
        return (torch.stack([F.mse_loss(output, y), F.l1_loss(output[:, 0], y[:, 0])]) * torch.exp(-self.log)).sum() + self.log.sum()


class Averages(Net):
    """Keeps the running mean of its loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x, y):
        loss = F.mse_loss(super().forward(x), y)
        self.mean.lerp_(loss.detach(), 0.5)
        return loss


def batch():
    generator = torch.Generator().manual_seed(5)
    numbers = {name: torch.randn(6, size, generator=generator, dtype=torch.float64) for name, size in (("x", 8), ("y", 4))}
    return {**numbers, "labels": torch.tensor([0, 3, -100, 1, -100, 2]), "mask": torch.randint(2, (6, 4), generator=generator)}


def square(output, b):
    return (output - b["y"]) ** 2


def columns(output, b):
    return [F.mse_loss(output[:, k], b["y"][:, k]) for k in range(4)]


def entropy(output, b, **settings):
    return F.cross_entropy(output, b["labels"], **settings)


LOSSES = {
    "mean": lambda o, b: square(o, b).mean(),
    "over the samples first": lambda o, b: square(o, b).mean(0).mean(),
    "over the samples first, half": lambda o, b: (0.5 * square(o, b).mean(0)).sum(),
    "stack": lambda o, b: torch.stack(columns(o, b)).mean(),
    "sum of a list": lambda o, b: sum(columns(o, b)) / 4,
    "difference": lambda o, b: F.mse_loss(o, b["y"]) - 0.5 * o.abs().mean(),
    "similarity": lambda o, b: 1 - F.cosine_similarity(o, b["y"]).mean(),
    "by the number of samples": lambda o, b: square(o, b).sum() / len(o),
    "batchmean": lambda o, b: F.kl_div(o.log_softmax(-1), b["y"].softmax(-1), reduction="batchmean"),
    "masked": lambda o, b: (square(o, b) * b["mask"]).sum() / b["mask"].sum(),
    "masked by floats": lambda o, b: (square(o, b) * b["mask"]).sum() / (b["mask"] > 0).double().sum().clamp(min=1),
    "cross-entropy": entropy,
    "cross-entropy, counted": lambda o, b: entropy(o, b, reduction="sum") / (b["labels"] != -100).sum(),
    "cross-entropy, masked": lambda o, b: entropy(o, b, reduction="none").sum() / (b["labels"] != -100).sum(),
    "stack of cross-entropies": lambda o, b: torch.stack([entropy(o, b), entropy(o.flip(-1), b)]).mean(),
    "stack, weighted": lambda o, b: (torch.stack(columns(o, b)) * torch.tensor([1.0, 0.5, 2.0, 0.0])).sum(),
    "stack times a vector": lambda o, b: torch.stack(columns(o, b)) @ torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64),
    "one of a stack": lambda o, b: torch.stack(columns(o, b))[1],
    "cat": lambda o, b: torch.cat([one.reshape(1) for one in columns(o, b)]).mean(),
    "hstack": lambda o, b: torch.hstack(columns(o, b)).sum(),
    "stack with a penalty": lambda o, b: torch.stack([*columns(o, b), torch.tensor(2.0, dtype=torch.float64)]).mean(),
    "stack over elements of unequal numbers": lambda o, b: torch.stack([F.mse_loss(o, b["y"]), F.mse_loss(o[:, 0], b["y"][:, 0])]).sum(),
    "cross-entropies of the same labels": lambda o, b: entropy(o, b) + 0.5 * F.cross_entropy(-o, b["labels"].reshape(-1, 1).squeeze(1)),
    "learned weights": Weighs, "penalty": Penalised, "running mean": Averages}


def trained(module, loss, micro_batches, **settings):
    """The loss of a step, and the gradients."""
    module = copy.deepcopy(module)
    trainer = twobp.Trainer(module, micro_batches[0], loss_fn=loss, micro_batches=len(micro_batches), optimizer=twobp.SGD(lr=1.0), ranks=2, **settings)
    before, result = trainer.state_dict(), trainer.step(micro_batches)
    after = trainer.state_dict()
    return result.loss, {name: before[name] - after[name] for name, _ in module.named_parameters()}, after


def expected(module, loss, whole):
    value = module(whole["x"], whole["y"]) if loss is None else loss(module(whole["x"]), whole)
    value.backward()
    return value.item(), {name: p.grad for name, p in module.named_parameters()}


def compare(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-12)


def taken(loss, whole):
    return {name: whole[name] for name in ("x", "y")} if loss is None else whole


@pytest.mark.parametrize("name", LOSSES)
def test_unequal_micro_batches_are_weighted_as_on_one_device(name):
    torch.manual_seed(0)
    loss = LOSSES[name]
    module, loss = (loss(), None) if isinstance(loss, type) else (Net(), loss)
    module.train().double()
    whole = batch()
    parts = [{n: t[a:b] for n, t in taken(loss, whole).items()} for a, b in ((0, 5), (5, 6))]
    found = trained(module, loss, parts)
    if "mean" in found[2]:
        one = copy.deepcopy(module)
        for part in parts:
            one(**part)
        torch.testing.assert_close(found[2]["mean"], one.mean, rtol=1e-12, atol=0)
    compare(found, expected(module, loss, whole))


@pytest.mark.parametrize("loss", [lambda o, b: square(o, b).mean().sqrt(), lambda o, b: (o.mean(0) - b["y"].mean(0)).pow(2).mean()])
def test_the_samples_of_a_micro_batch_are_counted_if_the_user_says_mean(loss):
    """A loss that is no mean is weighted by samples: that of gradient accumulation."""
    torch.manual_seed(0)
    module, whole = Net().train().double(), batch()
    parts = [{n: t[a:b] for n, t in whole.items()} for a, b in ((0, 5), (5, 6))]
    value, gradients = 0, {}
    for part in parts:
        one = copy.deepcopy(module)
        of_part = expected(one, loss, part)
        value += of_part[0] * len(part["x"]) / 6
        gradients = {n: gradients.get(n, 0) + g * len(part["x"]) / 6 for n, g in of_part[1].items()}
    compare(trained(module, loss, parts, loss_reduction="mean"), (value, gradients))


@pytest.mark.parametrize("loss, message", [
    (lambda o, b: (o.mean(0) - b["y"].mean(0)).pow(2).mean(), "mean .*averages a value that already combines the samples.*loss_reduction"),
    (lambda o, b: F.mse_loss(o.mean(0), b["y"].mean(0)), "mse_loss .*averages a value that already combines the samples"),
    (lambda o, b: square(o, b).sum(0).mean(), "averages a value that already combines the samples"),
    (lambda o, b: square(o[0], {"y": b["y"][0]}).mean(), "averages a value that already combines the samples"),
    (lambda o, b: square(o, b).sum(), "ends with sum"),
    (lambda o, b: entropy(o, b) + 0.1 * F.mse_loss(o, b["y"]), "different numbers of targets"),
    (lambda o, b: entropy(o, b) + 1, "differs between batches"),
    (lambda o, b: torch.stack([entropy(o, b), F.mse_loss(o, b["y"])]).mean(), "adds means over different numbers"),
    (lambda o, b: F.mse_loss(o, b["y"]) * F.mse_loss(o, b["y"]), "ends with mul"), (lambda o, b: 1 / F.mse_loss(o, b["y"]), "ends with reciprocal"),
    (lambda o, b: torch.stack(columns(o, b)).max(), "ends with max"),
    (lambda o, b: (square(o, b) * b["y"]).sum() / b["y"].sum(), "may be no whole number: let the mask be bool"),
    (lambda o, b: square(o, b).sum() / o.sum(), "ends with div"),
    (nn.MSELoss(), r"loss_fn\(output, batch\), with the module's output and the whole batch, fails .*AttributeError")])
def test_what_is_no_mean_over_targets_is_refused(loss, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.Trainer(Net().train().double(), batch(), loss_fn=loss)


COUNTED = {
    "equal": lambda o, b: entropy(o, b) + 0.5 * F.mse_loss(o[:, 0], b["y"][:, 0]),
    "in proportion": lambda o, b: 0.5 * F.mse_loss(o, b["y"]) + entropy(o, b),
    "stack": lambda o, b: torch.stack([entropy(o, b), F.mse_loss(o, b["y"]), F.mse_loss(o[:, 0], b["y"][:, 0])]).mean(),
    "masked": lambda o, b: (square(o, b) * b["mask"]).sum() / b["mask"].sum() + entropy(o, b)}


def all_counted():
    return {**batch(), "labels": torch.tensor([0, 3, 2, 1, 0, 2]), "mask": torch.ones(6, 4, dtype=torch.bool)}


@pytest.mark.parametrize("name", COUNTED)
def test_means_over_all_targets_of_each_kind(name):
    torch.manual_seed(0)
    module, whole = Net().train().double(), all_counted()
    parts = [{n: t[a:b] for n, t in whole.items()} for a, b in ((0, 5), (5, 6))]
    compare(trained(module, COUNTED[name], parts)[:2], expected(module, COUNTED[name], whole))


def test_a_micro_batch_in_which_some_targets_do_not_count_is_refused():
    torch.manual_seed(0)
    whole = all_counted()
    trainer = twobp.Trainer(Net().train().double(), whole, loss_fn=COUNTED["in proportion"], micro_batches=2, optimizer=twobp.SGD(lr=1.0), ranks=1)
    before = trainer.state_dict()
    with pytest.raises(twobp.Error, match=r"the loss adds means over all targets \(test_losses.py:\d+, .*some targets of this micro-batch do not count"):
        trainer.step([whole, {**whole, "labels": batch()["labels"]}])
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, before[name])
    trainer.step([whole, whole])  # the trainer goes on


def heads(o, b):
    return torch.stack([F.cross_entropy(o[:, :2], b["labels"]), F.cross_entropy(o[:, 2:], b["other"])]).mean()


def test_heads_whose_labels_count_together():
    torch.manual_seed(0)
    labels, other = torch.tensor([0, 1, -100, 1, 0, 1]), torch.tensor([1, 1, -100, 0, 0, 1])
    module, whole = Net().train().double(), {**batch(), "labels": labels, "other": other}
    parts = [{n: t[a:b] for n, t in whole.items()} for a, b in ((0, 5), (5, 6))]
    compare(trained(module, heads, parts)[:2], expected(module, heads, whole))
    trainer = twobp.Trainer(module, whole, loss_fn=heads, ranks=1)
    with pytest.raises(twobp.Error, match="over the same number of targets .* which are not the same in this micro-batch"):
        trainer.step({**whole, "other": other.where(other != 0, -100)})


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, ids, labels):
        hidden = self.table(ids)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + hidden.mean(1).square().mean()


def test_means_whose_numbers_are_in_another_proportion_in_another_shape_are_refused():
    ids = torch.arange(24).reshape(4, 6) % 7
    trainer = twobp.Trainer(Tokens().train(), {"ids": ids, "labels": ids}, ranks=1)
    trainer.step({"ids": ids[:3], "labels": ids[:3]})
    with pytest.raises(twobp.Error, match="ratios are 3/4 for the first shape of batch, but 1/2 for this one"):
        trainer.step({"ids": ids[:, :4], "labels": ids[:, :4]})


def accuracy(o, b):
    return (o.argmax(-1) == b["labels"]).double().mean()


def halves():
    return [{name: one[i:i + 3] for name, one in batch().items()} for i in (0, 3)]


def test_several_losses_and_metrics_by_a_dict():
    """The sum of the losses is trained, and each is reported."""
    losses = {"square": lambda o, b: square(o, b).mean(), "size": lambda o, b: o.pow(2).mean()}
    module, parts = Net().double(), halves()
    trainer = twobp.Trainer(module, parts[0], loss_fn=losses, metrics={"accuracy": accuracy}, ranks=2, micro_batches=2)
    outputs = [module(one["x"]) for one in parts]
    wanted = {name: sum(f(o, b).item() for o, b in zip(outputs, parts)) / 2 for name, f in {**losses, "accuracy": accuracy}.items()}
    result = trainer.step(batch())
    assert result.metrics == pytest.approx(wanted, rel=1e-9) and trainer.last_result == result
    assert result.loss == pytest.approx(wanted["square"] + wanted["size"], rel=1e-9)
    one = trainer.step(parts[:1])
    assert one.loss == pytest.approx(one.metrics["square"] + one.metrics["size"], rel=1e-9)


@pytest.mark.parametrize("own, message", [
    ({"metrics": {"ids": lambda o, b: o}}, r"the metric 'ids' is a tensor of shape \[3, 4\]"), ({"metrics": accuracy}, "metrics must be a dict of functions"),
    ({"metrics": {"loss": accuracy}}, "'loss' is both a loss and a metric"), ({"loss_fn": {}}, "loss_fn is an empty dict"),
    ({"metrics": {"a": accuracy}, "data_parallel": 2}, "are for one replica")])
def test_wrong_losses_and_metrics_are_refused(own, message):
    with pytest.raises(twobp.Error, match=message):
        twobp.Trainer(Net().double(), halves()[0], **{"loss_fn": LOSSES["mean"], **own})


def test_micro_batches_that_count_alike():
    """Of a loss that is no mean over samples, with other numbers of samples in each."""
    module, whole = Net().double(), batch()
    parts = [{name: one[:2] for name, one in whole.items()}, {name: one[2:] for name, one in whole.items()}]

    def root(o, b):
        return square(o, b).mean().sqrt()

    trainer = twobp.Trainer(module, parts[0], loss_fn=root, loss_reduction="micro_batch", ranks=2, micro_batches=2)
    assert trainer.step(parts).loss == pytest.approx(sum(root(module(one["x"]), one).item() for one in parts) / 2, rel=1e-9)


def test_scalars_and_other_rows_in_a_batch():
    """A scalar scales a mean, and a table with rows of its own is read whole."""
    def scaled(o, b):
        return b["factor"] * ((o - b["table"].sum()) ** 2).mean()

    module, more = Net().double(), {"factor": torch.tensor(0.5, dtype=torch.float64), "table": torch.linspace(0, 1, 5, dtype=torch.float64)}
    parts = [{**one, **more} for one in halves()]
    trainer = twobp.Trainer(module, parts[0], loss_fn=scaled, ranks=2, micro_batches=2)
    assert trainer.step(parts).loss == pytest.approx(sum(scaled(module(one["x"]), one).item() for one in parts) / 2, rel=1e-9)
    with pytest.raises(twobp.Error, match="different numbers of samples.*Give a list of micro-batches"):
        trainer.step({**batch(), **more})
    whole = {**batch(), "factor": more["factor"], "table": torch.ones((), dtype=torch.float64)}
    other = twobp.Trainer(module, {**parts[0], "table": whole["table"]}, loss_fn=scaled, ranks=2, micro_batches=2)
    assert other.step(whole).loss == pytest.approx(scaled(module(whole["x"]), whole).item(), rel=1e-9)
