"""The rotary embedding of queries or keys becomes one operator, even if other operators (a norm of each head) stand
between it and the projection. All of its operators must be linear. It is then recognised by its values, as attention
is."""

from __future__ import annotations

import torch
from torch import fx

from .. import ops, symbols
from ..cut import Layer
from ..own_operators import aten, rotary, turn
from .attend import call, call_half, constants_of, evaluate, half, tables_of
from .linear import FACTORS, SUMS, dependents, is_linear

MOST_PARTS = 30  # operators of an embedding; longer ones are not searched


def fuse_rotary(layer: Layer) -> None:
    """Works on the layer's graph, in place."""
    graph, constants = layer.graph_module.graph, constants_of(layer)
    for last in [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target in (aten.add.Tensor, aten.cat.default)
    ]:
        found = rotary_of(last, constants)
        if found is None:
            continue
        x, tables = found
        positions, width = last.meta["val"].shape[-2:]
        with graph.inserting_before(last):
            halves = [call_half(graph, one, positions, width, x.meta["val"].dtype) for one in tables]
            turned = call(graph, rotary, x, *halves, False)
        last.replace_all_uses_with(turned)
    graph.eliminate_dead_code()


def rotary_of(last: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> tuple[fx.Node, tuple[fx.Node, fx.Node]] | None:
    """Returns (x, (cos, sin)) if `last` is x (batch, heads, positions, n) with rotary embedding."""
    value = last.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.dtype not in (torch.float32, torch.float64):
        return None
    x = argument_of(last, constants)
    if x is None:
        return None
    shape = symbols.hint(value.shape)
    numbers = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tolerance = 1e-9 if value.dtype == torch.float64 else 1e-5
    wanted = None
    for tables in tables_of(last, x, constants, *shape[-2:]):
        if wanted is None:
            try:
                wanted = evaluate(last, x, numbers, constants)
            except (RuntimeError, TypeError, NotImplementedError):
                return None
        cos, sin = (half(constants[one].double(), *shape[-2:]) for one in tables)
        if torch.allclose(turn(numbers, cos, sin), wanted, rtol=tolerance, atol=tolerance):
            return x, tables
    return None


def argument_of(last: fx.Node, constants: dict) -> fx.Node | None:
    """Returns the node of the same shape on which `last` depends by linear operators, apart from constants."""
    seen, stack = {last}, [last]
    found = None
    while stack:
        for one in ops.inputs_of(stack.pop()):
            if one in seen or one in constants:
                continue
            seen.add(one)
            own = one.meta.get("val")
            if (
                isinstance(own, torch.Tensor)
                and symbols.same(own.shape, last.meta["val"].shape)
                and one.target not in FACTORS | SUMS
            ):
                if found is not None:
                    return None
                found = one
            elif one.op != "call_function" or len(seen) > MOST_PARTS:
                return None
            else:
                stack.append(one)
    if found is None or found.meta["val"].dtype != last.meta["val"].dtype:
        return None
    of_x = dependents(seen, found)
    return found if all(is_linear(node, set(of_x)) for node in of_x[1:]) else None
