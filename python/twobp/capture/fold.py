"""Values that depend on no field, parameter or changed buffer (rotary tables, positions, masks) are computed once, at capture,
and become constants."""
from __future__ import annotations

import torch
from torch import fx

from . import ops
from .export import Forward, Input
from .ops import aten

MOST_BYTES = 1 << 24  # larger results are computed in every micro-batch, so that a bundle stays small
LARGER = {aten.expand.default, aten.repeat.default}  # the inputs of these are kept instead of their results


def fold(forward: Forward) -> None:
    """Works in place."""
    known = {node: forward.tensors[meaning] for node, meaning in forward.inputs.items() if meaning.source == "constant"}
    with torch.no_grad():
        for node in forward.graph.nodes:
            if node.op == "call_function" and node.target not in LARGER and not ops.is_random(node) and all(one in known for one in ops.inputs_of(node)):
                known[node] = node.target(*fx.map_arg(node.args, known.__getitem__), **fx.map_arg(node.kwargs, known.__getitem__))
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
