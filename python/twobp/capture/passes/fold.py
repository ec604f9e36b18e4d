"""Values that depend on no field, parameter or changed buffer (rotary tables, positions, masks) are computed once, at
capture, and become constants. With their values, attention that is spelled out becomes one operator, and causal masks
become is_causal."""

from __future__ import annotations

import torch
from torch import fx

from .. import ops
from ..export.forward import Forward, Input
from ..ops import aten, named_argument, set_argument
from .masked import LEAST, fuse_masked_attention

MOST_BYTES = 1 << 24  # larger results are computed in every micro-batch, so that a bundle stays small
LARGER = {aten.expand.default, aten.repeat.default}  # the inputs of these are kept instead of their results


def fold(forward: Forward) -> None:
    """Works in place."""
    known = {node: forward.tensors[meaning] for node, meaning in forward.inputs.items() if meaning.source == "constant"}
    compute(forward.graph, known)
    fuse_masked_attention(forward.graph, lambda node: value_of(node, known))
    compute(forward.graph, known)
    for node in forward.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if is_causal(node, known):
            set_argument(node, 3, None)
            set_argument(node, 5, True)
    forward.graph.eliminate_dead_code()
    for node in [node for node in known if node.op == "call_function" and ops.inputs_of(node)]:
        readers = [user for user in node.users if user not in known]
        tensor = known[node]
        if readers and isinstance(tensor, torch.Tensor) and tensor.numel() * tensor.element_size() <= MOST_BYTES:
            with forward.graph.inserting_before(node):
                constant = forward.graph.placeholder(f"constant_{node.name}")
            meaning = Input("constant", constant.name)
            forward.inputs[constant], forward.tensors[meaning] = meaning, tensor.contiguous()
            constant.meta = {"val": node.meta["val"].fake_mode.from_tensor(forward.tensors[meaning])}
            node.replace_all_uses_with(constant, delete_user_cb=readers.__contains__)
    forward.graph.eliminate_dead_code()


def compute(graph: fx.Graph, known: dict[fx.Node, torch.Tensor]) -> None:
    """Adds the values of those calls that depend on known ones alone."""
    with torch.no_grad():
        for node in graph.nodes:
            if (
                node.op == "call_function"
                and node not in known
                and node.target not in LARGER
                and not ops.is_random(node)
                and all(one in known for one in ops.inputs_of(node))
            ):
                known[node] = ops.computed(node, known)


def is_causal(attention: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    """Returns whether the mask of scaled_dot_product_attention hides all later positions, and nothing else."""
    mask, positions = named_argument(attention, 3), attention.args[0].meta["val"].shape[-2]
    if (
        mask is None
        or attention.args[1].meta["val"].shape[-2] != positions
        or mask.meta["val"].shape[-2:] != (positions, positions)
    ):
        return False
    value = value_of(mask, known)
    if value is None:
        return False
    seen = torch.ones(positions, positions, dtype=torch.bool).tril()
    if value.dtype == torch.bool:
        return bool((value == seen).all())
    return bool((value == 0)[..., seen].all() and (value <= LEAST)[..., ~seen].all())


def value_of(last: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Returns the value of a node that depends on no field, parameter or changed buffer. Returns None for others, and
    for large ones."""
    values = dict(known)
    for node in sorted(ops.ancestors([last], stop=known.__contains__)) if last not in known else ():
        if node not in known:
            if (
                ops.is_random(node)
                or not all(one in values for one in ops.inputs_of(node))
                or node.meta["val"].numel() > MOST_BYTES
            ):
                return None
            values[node] = ops.computed(node, values)
    return values.get(last)
