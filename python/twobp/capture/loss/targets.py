"""The loss of the global batch is the mean over all counted targets. So the captured loss is a sum, multiplied by
loss_weight = 1 / (targets of the global batch), and a program counts a micro-batch's targets."""

from __future__ import annotations

import contextlib
import math
import operator

import torch
from torch import fx

from .. import ops, symbols
from ..errors import CaptureError, where
from ..export.forward import Forward, Input
from ..ops import named_argument, set_argument
from ..own_operators import aten, cross_entropy
from .counts import ADVICE, Count, Counts, ids_in_range, program
from .losses import ELEMENTWISE, MEAN, NLL, ROWWISE, SUM
from .samples import Samples

# These are linear in their first argument.
PASSED = {
    aten.neg.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.unsqueeze.default,
    aten._to_copy.default,
    aten.clone.default,
}
DIVIDED, SCALED = (
    {aten.div.Tensor, aten.div.Scalar},
    {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar},
)
ADDED = {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar}
MEANS = {aten.mean.default, aten.mean.dim}
REDUCED = {*MEANS, aten.sum.default, aten.sum.dim_IntList}
AT_LEAST = {aten.clamp.default, aten.clamp_min.default, aten._to_copy.default}  # leave a count of at least one as it is
JOINED = {aten.stack.default, aten.cat.default, aten.hstack.default}
DOT = {aten.dot.default, aten.matmul.default}


class Unknown(Exception):
    pass


class Sums:
    """Writes a mean over targets as their sum. The mean itself stays in the graph for others that read it."""

    def __init__(self, graph: fx.Graph, samples: Samples, counts: Counts):
        self.graph, self.samples, self.counts = graph, samples, counts

    def of(self, node: fx.Node) -> tuple[fx.Node, Count]:
        """Returns the sum of which `node` is the mean, and the number of targets. Raises Unknown."""
        if node.op != "call_function":
            raise Unknown("it is an input of the module")
        target, first = node.target, node.args[0]
        if target in DIVIDED and (count := self._divided(node)) is not None:
            return first, count
        if target in PASSED or target is operator.getitem and node.args[1] == 0:
            total, count = self.of(first)
            return self._copy(node, (total, *node.args[1:])), count
        if (place := self._linear_in(node)) is not None:
            total, count = self._inner(node, node.args[place]) if target in DOT else self.of(node.args[place])
            return self._with_argument(node, place, total), count
        if target in ADDED:
            values, count = self._joined(node, node.args[:2])
            return self._copy(node, (*values, *node.args[2:])), count
        if (
            target is aten.select.int
            and first.target in JOINED
            and node.meta["val"].dim() == 0
            and len(first.args[0]) == first.meta["val"].numel()
        ):
            return self.of(first.args[0][node.args[2]])
        for table, targets in ((ELEMENTWISE, lambda x: x.numel()), (ROWWISE, lambda x: math.prod(x.shape[:-1]))):
            if target in table and named_argument(node, table[target]) == MEAN:
                self._check(node, first)
                return self._with_argument(node, table[target], SUM), targets(first.meta["val"])
        if target in NLL:
            return self._of_classes(node)
        if target in REDUCED and node.meta["val"].dim() == 0:
            if not self.samples.kept(first):
                total, count = self._inner(node, first)
                return self._copy(node, (total, *node.args[1:])), count
            if target in MEANS:
                return self._sum(node), first.meta["val"].numel()
        raise Unknown(f"it ends with {ops.short_name(node)}{where(node)}, which capture does not know as a mean")

    def _copy(self, node: fx.Node, arguments: tuple, target=None) -> fx.Node:
        with self.graph.inserting_after(node):
            new = self.graph.node_copy(node)
        new.target, new.args, new.meta = target or node.target, arguments, dict(node.meta)
        return new

    def _with_argument(self, node: fx.Node, position: int, value) -> fx.Node:
        new = self._copy(node, node.args)
        set_argument(new, position, value)
        return new

    def _sum(self, node: fx.Node) -> fx.Node:
        """The sum of a mean over all or some dimensions."""
        return self._copy(
            node, node.args, aten.sum.default if node.target is aten.mean.default else aten.sum.dim_IntList
        )

    def _check(self, node: fx.Node, averaged: fx.Node) -> None:
        if not self.samples.kept(averaged):
            raise Unknown(f"{ops.short_name(node)}{where(node)} averages a value that already combines the samples")

    def _divided(self, node: fx.Node) -> Count | None:
        """x.sum() / len(x), kl_div's "batchmean", and (x * mask).sum() / mask.sum()."""
        total, by = node.args[:2]
        source = summed(total)
        if source is None or not self.samples.kept(source) or total.meta["val"].dtype != node.meta["val"].dtype:
            return None
        if not isinstance(by, fx.Node):
            if isinstance(by, float) and by.is_integer():
                by = int(by)
            whole = isinstance(by, (int, torch.SymInt))
            found = whole and any(
                symbols.same(by, one) for one in (*source.meta["val"].shape[:1], source.meta["val"].numel())
            )
            return symbols.plain(by) if found else None
        while by.target in AT_LEAST and (by.target is not aten.clamp.default or named_argument(by, 2) is None):
            if by.target is not aten._to_copy.default and not 0 <= (named_argument(by, 1) or 0) <= 1:
                return None
            by = by.args[0]
        counted = summed(by) if by.op == "call_function" else None
        while (
            counted is not None
            and counted.target in PASSED - {aten.neg.default}
            and counted.meta["val"].is_floating_point()
        ):
            counted = counted.args[0]
        if counted is None or not self.samples.from_fields(counted):
            return None
        if counted.meta["val"].is_floating_point():
            raise Unknown(
                f"it divides by a sum of numbers{where(by)}, which may be no whole number: let the mask be bool or of "
                "integers"
            )
        return counted, None

    def _linear_in(self, node: fx.Node) -> int | None:
        """Returns which factor depends on the samples, if only one does, and a divisor does not."""
        if node.target not in SCALED and not (node.target in DOT and node.meta["val"].dim() == 0):
            return None
        changed = [i for i in range(2) if isinstance(node.args[i], fx.Node) and self.samples.changes(node.args[i])]
        return changed[0] if len(changed) == 1 and (changed[0] == 0 or node.target not in DIVIDED) else None

    def _joined(self, node: fx.Node, parts) -> tuple[list, Count]:
        """Returns the sums behind `parts`, which are means over the same targets, or do not depend on the samples, such
        as a penalty on weights."""
        means = [one for one in parts if isinstance(one, fx.Node) and self.samples.changes(one)]
        found = [self.of(one) for one in means]
        together = self.counts.combined([count for _, count in found], node) if found else None
        if together is None:
            raise Unknown(f"it adds means over different numbers of targets{where(node)}")
        count, factors = together
        totals = {one: self._scaled(total, factor) for one, (total, _), factor in zip(means, found, factors)}
        return [totals[one] if one in means else self._times(node, one, count) for one in parts], count

    def _scaled(self, total: fx.Node, factor: float) -> fx.Node:
        if factor == 1:
            return total
        with self.graph.inserting_after(total):
            new = self.graph.call_function(aten.mul.Scalar, (total, factor))
        new.meta = dict(total.meta)
        return new

    def _times(self, node: fx.Node, value: fx.Node | float, count: Count):
        if value == 0:
            return value
        if isinstance(count, tuple):
            raise Unknown(
                "it adds a term that does not depend on the samples to a mean whose number of targets differs between "
                f"batches{where(node)}"
            )
        if not isinstance(value, fx.Node):
            return value * count
        with self.graph.inserting_before(node):
            new = self.graph.call_function(aten.mul.Tensor, (value, count))
        new.meta = dict(value.meta)
        return new

    def _inner(self, node: fx.Node, source: fx.Node) -> tuple[fx.Node, Count]:
        """`node` reduces what reduces the samples: several means in a stack, or x.mean(0)."""
        if source.target in JOINED and len(source.args[0]) == source.meta["val"].numel():
            values, count = self._joined(source, source.args[0])
            return self._copy(source, (values, *source.args[1:])), count
        if source.target is aten.mean.dim and self.samples.kept(source.args[0]):
            return self._sum(source), source.args[0].meta["val"].numel() // source.meta["val"].numel()
        if source.target in PASSED:
            total, count = self._inner(node, source.args[0])
            return self._copy(source, (total, *source.args[1:])), count
        if source.target in SCALED and (place := self._linear_in(source)) is not None:
            total, count = self._inner(node, source.args[place])
            return self._with_argument(source, place, total), count
        raise Unknown(f"{ops.short_name(node)}{where(node)} averages a value that already combines the samples")

    def _of_classes(self, node: fx.Node) -> tuple[fx.Node, Count]:
        reduction, ignore = NLL[node.target]
        if named_argument(node, 2) is not None:
            raise Unknown(f"it weights classes{where(node)}")
        if named_argument(node, reduction) != MEAN:
            raise Unknown(f"it ends with {ops.short_name(node)}{where(node)}, which capture does not know as a mean")
        labels = node.args[1]
        self._check(node, labels)
        new, value = self._with_argument(node, reduction, SUM), labels.meta["val"]
        return new, value.numel() // value.shape[-1 if value.dim() == 1 else 1] if value.is_floating_point() else (
            labels,
            named_argument(node, ignore),
        )


def summed(node: fx.Node) -> fx.Node | None:
    """Returns the node whose elements `node` sums."""
    if node.op != "call_function":
        return None
    whole = (
        node.target is aten.sum.default
        or node.target is aten.sum.dim_IntList
        and node.meta["val"].dim() == 0
        or node.target in ELEMENTWISE
        and named_argument(node, ELEMENTWISE[node.target]) == SUM
        or node.target in NLL
        and named_argument(node, 2) is None
        and named_argument(node, NLL[node.target][0]) == SUM
    )
    return (node.args[1] if node.target in NLL else node.args[0]) if whole else None


def batch_size(forward: Forward, fields: dict[str, torch.Tensor]) -> int | torch.SymInt:
    sizes = [
        node.meta["val"].shape[0]
        for node, one in forward.inputs.items()
        if one.source == "field" and node.meta["val"].dim()
    ]
    if not sizes or any(not symbols.same(one, sizes[0]) for one in sizes):
        rows = sorted({f.shape[0] for f in fields.values() if f.dim()})
        raise CaptureError(
            f"the batch's tensors have {rows} rows, so the number of samples is unknown. Make the loss a mean that "
            'capture knows, such as cross_entropy, or weigh all micro-batches alike: loss_reduction="micro_batch"'
        )
    return symbols.plain(sizes[0])


def weigh_loss(forward: Forward, fields: dict[str, torch.Tensor], reduction: str | None) -> dict:
    """Makes the loss a sum multiplied by loss_weight, in place. Returns TARGETS of the bundle."""
    env = symbols.env_of(forward.graph)
    # What the rules for samples compare are sizes of the example, which are different primes.
    with env.suppress_guards() if env else contextlib.nullcontext():
        return _weigh_loss(forward, fields, reduction)


def _weigh_loss(forward: Forward, fields: dict[str, torch.Tensor], reduction: str | None) -> dict:
    if reduction not in (None, "mean", "sum", "micro_batch"):
        raise CaptureError(f'loss_reduction is {reduction!r}, not "mean", "sum" or "micro_batch"')
    graph = forward.graph
    factor: int | torch.SymInt = 1
    counts, samples = Counts(forward, fields), Samples(forward, fields)
    for check in forward.checks:
        if not samples.from_fields(check.condition):
            raise CaptureError(
                "the module checks a value that does not depend on the fields of its batch "
                f"alone{where(check.condition)}. Leave out the check"
            )
    if reduction:
        divide_sums(graph)
    loss = forward.loss
    counted: Count
    if reduction == "micro_batch":
        counted = 1
    elif reduction:
        counted = batch_size(forward, fields)
        factor = counted if reduction == "mean" else 1
    else:
        try:
            loss, counted = Sums(graph, samples, counts).of(loss)
        except Unknown as reason:
            raise CaptureError(f"the loss must be a mean over targets, and {reason}. {ADVICE}") from None
    described = {
        **program(forward, counted, [*forward.checks, *counts.checks, *ids_in_range(forward)]),
        "ratios": counts.ratios,
    }
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(first):
        weight = graph.placeholder("loss_weight")
    fake = loss.meta["val"].fake_mode
    with fake:
        weight.meta["val"] = torch.empty((), dtype=torch.float32)
    forward.inputs[weight] = Input("loss_weight", "")
    last = loss
    with graph.inserting_before(list(graph.nodes)[-1]):
        for by in ([factor] if factor != 1 else []) + [weight]:
            new = graph.call_function(aten.mul.Tensor, (last, by))
            new.meta = dict(loss.meta)
            last = new
    forward.without_checks(last)
    graph.eliminate_dead_code()  # the mean
    fuse_cross_entropy(graph)
    return described


def divide_sums(graph: fx.Graph) -> None:
    """Writes means of cross-entropies over the labels that count as sums, which become one operator, divided by their
    number."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in NLL:
            continue
        labels, (reduction, ignore) = node.args[1], NLL[node.target]
        if (
            named_argument(node, reduction) != MEAN
            or named_argument(node, 2) is not None
            or labels.meta["val"].is_floating_point()
        ):
            continue
        means = [node]
        if isinstance(node.meta["val"], tuple):
            means = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        set_argument(node, reduction, SUM)
        for mean in means:
            with graph.inserting_after(mean):
                quotient = graph.call_function(aten.div.Tensor, (mean, mean))
            with graph.inserting_before(quotient):
                counts = graph.call_function(aten.ne.Scalar, (labels, named_argument(node, ignore)))
                counts.meta = {
                    **mean.meta,
                    "val": labels.meta["val"].new_empty(labels.meta["val"].shape, dtype=torch.bool),
                }
                number = graph.call_function(aten.sum.default, (counts,))
                number.meta = {**mean.meta, "val": labels.meta["val"].new_empty((), dtype=torch.int64)}
            quotient.meta = dict(mean.meta)
            mean.replace_all_uses_with(quotient)
            quotient.args = (mean, number)


def fuse_cross_entropy(graph: fx.Graph) -> None:
    """Sums of cross-entropies become one operator, which needs no second tensor of the logits' size."""
    for node in list(graph.nodes):
        found = cross_entropy_of(node) if node.op == "call_function" and node.target in NLL else None
        if found is None:
            continue
        logits, labels, ignore = found
        with graph.inserting_before(node):
            both = graph.call_function(cross_entropy, (logits, labels, ignore))
            both.meta = {**node.meta, "val": (node.meta["val"], logits.meta["val"])}
            total = graph.call_function(operator.getitem, (both, 0))
        total.meta = dict(logits.meta, val=logits.meta["val"].new_empty(()))
        results = (
            [user for user in node.users if user.target is operator.getitem]
            if isinstance(node.meta["val"], tuple)
            else [node]
        )
        results[0].replace_all_uses_with(total)
        graph.eliminate_dead_code()


def cross_entropy_of(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Returns (logits, labels, ignored label) of a plain sum over rows of logits."""
    reduction, ignore = NLL[node.target]
    logits, labels = node.args[:2]
    if (
        named_argument(node, reduction) != SUM
        or named_argument(node, 2) is not None
        or labels.meta["val"].dtype != torch.int64
        or labels.meta["val"].dim() != 1
    ):
        return None
    if node.target is aten.cross_entropy_loss.default:
        plain = named_argument(node, 5) == 0
    else:
        logs, logits = logits, logits.args[0] if logits.op == "call_function" else logits
        plain = (
            logs.target in (aten.log_softmax.int, aten._log_softmax.default)
            and logs.args[1] in (1, -1)
            and len(logs.users) == 1
            and logs.meta["val"].dtype == logits.meta["val"].dtype
        )
        if isinstance(node.meta["val"], tuple) and [user.args[1] for user in node.users] != [0]:
            return None
    value = logits.meta["val"]
    return (
        (logits, labels, named_argument(node, ignore))
        if plain and value.dim() == 2 and value.dtype in (torch.float32, torch.float64)
        else None
    )
