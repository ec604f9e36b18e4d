"""The loss of the global batch is the mean over all counted targets. So the captured loss is a sum, multiplied by loss_weight = 1
/ (targets of the global batch), and a program counts a micro-batch's targets."""
from __future__ import annotations

import operator

import torch
from torch import fx

from . import ops
from .emit import Emitter
from .errors import CaptureError, where
from .export import Forward, Input
from .own_operators import aten, cross_entropy

MEAN, SUM = 1, 2
# This maps an operator to the position of its `reduction`, for losses that average over their elements.
ELEMENTWISE = {aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
               aten.binary_cross_entropy.default: 3, aten.binary_cross_entropy_with_logits.default: 4, aten.soft_margin_loss.default: 2,
               aten.kl_div.default: 2, aten.poisson_nll_loss.default: 5, aten.hinge_embedding_loss.default: 3, aten.margin_ranking_loss.default: 4}
# This is the same for losses that average over rows.
ROWWISE = {aten.cosine_embedding_loss.default: 4, aten.triplet_margin_loss.default: 7}
NLL = {aten.cross_entropy_loss.default: (3, 4), aten.nll_loss.default: (3, 4), aten.nll_loss_nd.default: (3, 4), aten.nll_loss_forward.default: (3, 4),
       aten.nll_loss2d.default: (3, 4), aten.nll_loss2d_forward.default: (3, 4)}
PASSED = {aten.neg.default, aten.reshape.default, aten.squeeze.default, aten._to_copy.default, aten.clone.default}
ADVICE = 'Say how it is reduced: loss_reduction="mean" (over the samples of a micro-batch) or "sum" (over its samples)'


def named_argument(node: fx.Node, position: int):
    parameter = node.target._schema.arguments[position]
    return node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name, parameter.default_value)


def set_argument(node: fx.Node, position: int, value) -> None:
    arguments = [named_argument(node, i) for i in range(max(position + 1, len(node.args)))]
    arguments[position] = value
    names = [a.name for a in node.target._schema.arguments[:len(arguments)]]
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in names}
    node.args = tuple(arguments)


class Unknown(Exception):
    pass


def reduction_of(node: fx.Node, rewrites: list):
    """Returns the count over which the mean `node` averages: an int, or (target node, ignored index). Appends changes that make
    it a sum to `rewrites`."""
    if node.op != "call_function":
        raise Unknown("it is an input of the module")
    target = node.target
    if target in (aten.div.Tensor, aten.div.Scalar) and (source := summed(node.args[0])) is not None and node.args[1] in (*source.shape[:1], source.numel()):
        rewrites.append(lambda: set_argument(node, 1, 1))  # kl_div's "batchmean", and x.sum() / len(x)
        return int(node.args[1])
    if target in PASSED or target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar) and not isinstance(node.args[1], fx.Node):
        return reduction_of(node.args[0], rewrites)
    if target is operator.getitem and node.args[1] == 0:
        return reduction_of(node.args[0], rewrites)
    if target is aten.add.Tensor and all(isinstance(a, fx.Node) for a in node.args):
        left, right = (reduction_of(a, rewrites) for a in node.args)
        if left != right:
            raise Unknown(f"it adds means over different numbers of targets{where(node)}")
        return left
    if target in ELEMENTWISE and named_argument(node, ELEMENTWISE[target]) == MEAN:
        rewrites.append(lambda: set_argument(node, ELEMENTWISE[target], SUM))
        return node.args[0].meta["val"].numel()
    if target in ROWWISE and named_argument(node, ROWWISE[target]) == MEAN:
        rewrites.append(lambda: set_argument(node, ROWWISE[target], SUM))
        return node.args[0].meta["val"].shape[:-1].numel()
    if target in NLL:
        reduction, ignore = NLL[target]
        if named_argument(node, 2) is not None:
            raise Unknown(f"it weights classes{where(node)}")
        if named_argument(node, reduction) == MEAN:
            rewrites.append(lambda: set_argument(node, reduction, SUM))
            labels = node.args[1]
            if labels.meta["val"].is_floating_point():
                return labels.meta["val"].numel() // labels.meta["val"].shape[-1 if labels.meta["val"].dim() == 1 else 1]
            return labels, named_argument(node, ignore)
    if target in (aten.mean.default, aten.mean.dim) and node.meta["val"].dim() == 0:
        def to_sum():
            node.target, node.args = aten.sum.default, node.args[:1]
        rewrites.append(to_sum)
        return node.args[0].meta["val"].numel()
    raise Unknown(f"it ends with {ops.short_name(node)}{where(node)}, which is no mean that capture knows")


def summed(node: fx.Node) -> torch.Tensor | None:
    """Returns the tensor whose elements `node` sums."""
    whole = node.target is aten.sum.default or node.target in ELEMENTWISE and named_argument(node, ELEMENTWISE[node.target]) == SUM
    return node.args[0].meta["val"] if whole and node.op == "call_function" else None


def batch_size(forward: Forward, fields: dict[str, torch.Tensor]) -> int:
    sizes = {f.shape[0] for f in fields.values() if f.dim()}
    if len(sizes) != 1:
        raise CaptureError(f"the batch's tensors have {sorted(sizes)} rows, so the number of samples is unknown. Make the loss a mean that capture knows, "
                           "such as cross_entropy")
    return sizes.pop()


def weigh_loss(forward: Forward, fields: dict[str, torch.Tensor], reduction: str | None) -> dict:
    """Makes the loss a sum multiplied by loss_weight, in place. Returns TARGETS of the bundle."""
    if reduction not in (None, "mean", "sum"):
        raise CaptureError(f'loss_reduction is {reduction!r}, not "mean" or "sum"')
    graph, loss = forward.graph, forward.loss
    factor = 1
    if reduction:
        counted = batch_size(forward, fields)
        factor = counted if reduction == "mean" else 1
    else:
        rewrites: list = []
        try:
            counted = reduction_of(loss, rewrites)
        except Unknown as reason:
            raise CaptureError(f"the loss must be a mean over targets, and {reason}. {ADVICE}") from None
        for rewrite in rewrites:
            rewrite()
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
    forward.loss = last
    forward.graph.output_node().args = ((last, *forward.new_buffers.values()),)
    fuse_cross_entropy(graph)
    return {"count": counted} if isinstance(counted, int) else count_program(forward, *counted)


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
        results = [user for user in node.users if user.target is operator.getitem] if isinstance(node.meta["val"], tuple) else [node]
        results[0].replace_all_uses_with(total)
        graph.eliminate_dead_code()


def cross_entropy_of(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Returns (logits, labels, ignored label) of a plain sum over rows of logits."""
    reduction, ignore = NLL[node.target]
    logits, labels = node.args[:2]
    if named_argument(node, reduction) != SUM or named_argument(node, 2) is not None or labels.meta["val"].dtype != torch.int64 or labels.meta["val"].dim() != 1:
        return None
    if node.target is aten.cross_entropy_loss.default:
        plain = named_argument(node, 5) == 0
    else:
        logs, logits = logits, logits.args[0] if logits.op == "call_function" else logits
        plain = logs.target in (aten.log_softmax.int, aten._log_softmax.default) and logs.args[1] in (1, -1) and len(logs.users) == 1 \
            and logs.meta["val"].dtype == logits.meta["val"].dtype
        if isinstance(node.meta["val"], tuple) and [user.args[1] for user in node.users] != [0]:
            return None
    value = logits.meta["val"]
    return (logits, labels, named_argument(node, ignore)) if plain and value.dim() == 2 and value.dtype in (torch.float32, torch.float64) else None


def count_program(forward: Forward, labels: fx.Node, ignore: int) -> dict:
    emitter = Emitter("the targets")
    needed = ops.ancestors([labels])
    inputs, code = [], []
    for node in forward.graph.nodes:
        if node.op == "placeholder" and (node is labels or any(node in ops.inputs_of(n) for n in needed)):
            source, name = forward.inputs[node]
            if source != "field":
                raise CaptureError(f"the targets depend on the {source} '{name}', so they cannot be counted before the forward pass{where(labels)}. {ADVICE}")
            emitter.slot[node] = emitter.new_slot()
            inputs.append({"from": "field", "name": name, "slot": emitter.slot[node]})
        elif node in needed:
            instruction = emitter.instruction(node)
            if instruction:
                code.append(instruction)
    counted, slot = emitter.call("aten::ne.Scalar", {"v": emitter.slot[labels]}, ignore)
    total, result = emitter.call("aten::sum", {"v": slot}, None)
    return {"slots": emitter.slots, "inputs": inputs, "code": [*code, counted, total], "slot": result}
