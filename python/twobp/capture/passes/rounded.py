"""A parameter that a layer reads only in 16 bits, as under autocast, becomes an input in 16 bits: the runtime rounds it
once a step, and not in every micro-batch."""

from __future__ import annotations

import torch
from torch import fx

from ..cut import Layer
from ..own_operators import aten


def round_parameters(layer: Layer) -> None:
    """Works in place."""
    graph = layer.graph_module.graph
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        if layer.inputs[i].source != "parameter" or node.meta["val"].dtype != torch.float32:
            continue
        dtypes = {user.kwargs["dtype"] if is_cast(user) else None for user in node.users}
        if len(dtypes) == 1 and (to := dtypes.pop()) in (torch.bfloat16, torch.float16):
            for user in list(node.users):
                user.replace_all_uses_with(node)
                graph.erase_node(user)
            node.meta["val"], layer.examples[i] = (one.to(to) for one in (node.meta["val"], layer.examples[i]))


def is_cast(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}


def join_casts(graph: fx.Graph) -> None:
    """Equal casts of one value become one, which is kept once. Works in place, on a graph with its derivatives."""
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if is_cast(node):
            known = first.setdefault((node.args[0], node.kwargs["dtype"]), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)
