"""Replaces the attention of the rows of one projection, with or without rotary embedding, by one operator. Every
operator after the projection must be known: linear ones, two products, a softmax, and constant masks. Which attention
they make is then recognised by values, however it is written: they are evaluated for random numbers, from small ones to
those that leave a single key per row."""

from __future__ import annotations

import functools
import itertools
import operator

import torch
from torch import fx

from .. import ops, symbols
from ..cut import Layer
from ..export.forward import Table
from ..own_operators import aten, attention
from .linear import dependents, is_linear, is_moved
from .masked import FILLS

SCORES = {aten.scaled_dot_product_attention.default, aten.softmax.int, aten._softmax.default}
PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.einsum.default}
# Of the random numbers, and by what scores of this size multiply an error.
MAGNITUDES = ((1.0, 1.0), (1e-2, 1.0), (30.0, 1e2), (1e3, 1e3))


def fuse_attention(layer: Layer) -> None:
    """Works on the layer's graph, in place."""
    graph, constants, of_sizes = layer.graph_module.graph, constants_of(layer), tables_by_node(layer)
    for scores in [node for node in graph.nodes if node.op == "call_function" and node.target in SCORES]:
        found = attention_of(scores, constants, of_sizes)
        if found is not None:
            replace(graph, scores, *found)
    graph.eliminate_dead_code()


def constants_of(layer: Layer) -> dict[fx.Node, torch.Tensor]:
    placeholders = [node for node in layer.graph_module.graph.nodes if node.op == "placeholder"]
    return {
        node: layer.tables[one.name].value if one.name in layer.tables else example
        for node, one, example in zip(placeholders, layer.inputs, layer.examples)
        if one.source == "constant"
    }


def tables_by_node(layer: Layer) -> dict[fx.Node, Table]:
    placeholders = [node for node in layer.graph_module.graph.nodes if node.op == "placeholder"]
    return {node: layer.tables[one.name] for node, one in zip(placeholders, layer.inputs) if one.name in layer.tables}


def attention_of(scores: fx.Node, constants: dict[fx.Node, torch.Tensor], of_sizes: dict[fx.Node, Table]):
    """Returns (rows, last, (batch, positions), arguments). `last` is the attention of `rows`. Returns None if this is
    no attention, or not of rows of one projection."""
    last = end_of(scores)
    rows = source_of(last, constants)
    if rows is None:
        return None
    value, q = (
        rows.meta["val"],
        (scores.args[0] if scores.target is aten.scaled_dot_product_attention.default else scores).meta["val"],
    )
    if q.dim() != 4 or value.dtype not in (torch.float32, torch.float64):
        return None
    batch, heads, positions = symbols.hint(q.shape[:3])
    width = symbols.hint(last.meta["val"].numel()) // (batch * heads * positions)
    row = symbols.hint(value.numel()) // (batch * positions)
    kv_heads = (row // width - heads) // 2 if width else 0
    samples, _, length = q.shape[:3]
    if (
        not symbols.same(
            (value.numel(), q.shape[1], last.meta["val"].numel()),
            (samples * length * row, heads, samples * length * heads * width),
        )
        or kv_heads < 1
        or heads % kv_heads
        or (heads + 2 * kv_heads) * width != row
    ):
        return None
    limit = 1e-9 if value.dtype == torch.float64 else 1e-5

    @functools.cache
    def made(magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = magnitude * torch.randn(
            batch, positions, row, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        return numbers, evaluate(last, rows, numbers.reshape(symbols.hint(value.shape)), constants).reshape(
            batch, positions, -1
        )

    def is_equal(cos: torch.Tensor | None, sin: torch.Tensor | None, causal: bool) -> bool:
        return all(
            torch.allclose(
                attention(made(magnitude)[0], cos, sin, heads, kv_heads, causal)[0],
                made(magnitude)[1],
                rtol=limit * slack,
                atol=limit * slack * magnitude,
            )
            for magnitude, slack in MAGNITUDES
        )

    try:
        for tables, causal in itertools.product(
            [(None, None), *tables_of(last, rows, constants, positions, width)], (True, False)
        ):
            cos, sin = (None if one is None else half(constants[one].double(), positions, width) for one in tables)
            if is_equal(cos, sin, causal):
                masks = [of_sizes[one] for one in constants_read(last, rows) & of_sizes.keys() - set(tables)]
                if not all(is_mask(one, causal) for one in masks):
                    return None
                return rows, last, (samples, length, row), (*tables, heads, kv_heads, causal)
    except (RuntimeError, TypeError, NotImplementedError):  # an operator that does not fit float64 or these shapes
        pass
    return None


def constants_read(last: fx.Node, rows: fx.Node) -> set[fx.Node]:
    return {one for node in ops.ancestors([last], stop=lambda node: node is rows) for one in ops.inputs_of(node)}


def is_mask(table: Table, causal: bool) -> bool:
    """Returns whether a table has one number for the positions that attention sees, and one for the others, which are
    the same in the example and in the largest batch. So they are for all sizes in between."""

    def numbers(value: torch.Tensor | None) -> list | None:
        if value is None:
            return None
        if not causal or value.numel() == 1:
            parts = [value]
        elif value.dim() < 2 or value.shape[-1] != value.shape[-2]:
            return None
        else:
            seen = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
            parts = [value[..., seen], value[..., ~seen]]
        found = [part.unique() for part in parts]
        return [one.item() for one in found] if all(one.numel() == 1 for one in found) else None

    own = numbers(table.value)
    return own is not None and table.large is not None and own == numbers(table.large())


def end_of(scores: fx.Node) -> fx.Node:
    """Returns the last node that has only the attention's result, at other places in memory."""
    node, product = scores, scores.target is aten.scaled_dot_product_attention.default
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not is_moved(user) and (product or user.target not in PRODUCTS):
            break
        node, product = user, product or user.target in PRODUCTS
    return node


def source_of(last: fx.Node, constants: dict) -> fx.Node | None:
    """Returns the one product of a parameter on which `last` depends, apart from constants, if all operators between
    are those of attention. No other node may read it or the nodes between it and `last`. Returns None if there is
    none."""
    between, sources, stack = {last}, set(), [last]
    while stack:
        for one in ops.inputs_of(stack.pop()):
            if one in between or one in sources or one in constants:
                continue
            if one.op != "call_function" or ops.is_random(one):
                return None
            if one.target in (aten.linear.default, aten.addmm.default, aten.mm.default):
                sources.add(one)
            else:
                between.add(one)
                stack.append(one)
    if len(sources) != 1:
        return None
    rows = sources.pop()
    dependent = dependents(between, rows)
    if not all(user in between for node in dependent if node is not last for user in node.users):
        return None
    return rows if are_of_attention(dependent[1:], set(dependent), rows.meta["val"].dtype) else None


def are_of_attention(nodes: list[fx.Node], dependent: set[fx.Node], dtype: torch.dtype) -> bool:
    """Returns whether all operators are linear, apart from one softmax, masks, and products."""
    if [node.target in SCORES for node in nodes].count(True) != 1:
        return False
    for node in nodes:
        value = node.meta["val"]
        if any(one.dtype != dtype for one in (value if isinstance(value, (tuple, list)) else [value])):
            return False
        if node.target in FILLS:
            scores = 1 if node.target in (aten.where.self, aten.where.ScalarOther) else 0
            known = dependent.isdisjoint(ops.nodes_in([one for i, one in enumerate(node.args) if i != scores]))
        elif node.target is aten.scaled_dot_product_attention.default:
            known = dependent.isdisjoint(ops.nodes_in((node.args[3:], node.kwargs)))
        else:
            known = node.target in SCORES or node.target in PRODUCTS or is_linear(node, dependent)
        if not known:
            return False
    return True


def evaluate(last: fx.Node, rows: fx.Node, numbers: torch.Tensor, constants: dict) -> torch.Tensor:
    """Returns `last` in float64 if `rows` has these numbers. What does not depend on them is computed as the program
    does."""
    needed, dtype = ops.ancestors([last], stop=lambda node: node is rows), rows.meta["val"].dtype
    dependent = set(dependents(needed, rows))
    known = {**constants, rows: numbers}

    def wide(argument):
        if isinstance(argument, torch.Tensor):
            return argument.double() if argument.is_floating_point() else argument
        return torch.float64 if argument == dtype else argument

    with torch.no_grad():
        for node in rows.graph.nodes:
            if node in needed:
                args, kwargs = (symbols.hint(fx.map_arg(one, known.__getitem__)) for one in (node.args, node.kwargs))
                if node in dependent:
                    args, kwargs = (fx.node.map_aggregate(one, wide) for one in (args, kwargs))
                known[node] = node.target(*args, **kwargs)
    return known[last]


def tables_of(last: fx.Node, rows: fx.Node, constants: dict, positions: int, width: int):
    """Returns pairs of constants that may be cos and sin."""
    tables = [
        one
        for one in constants_read(last, rows)
        if one in constants
        and constants[one].is_floating_point()
        and width % 2 == 0
        and constants[one].shape[-1:] in ((width,), (width // 2,))
        and constants[one].numel() == positions * constants[one].shape[-1]
    ]
    return itertools.permutations(sorted(tables, key=str), 2)


def half(table: torch.Tensor, positions: int, width: int) -> torch.Tensor:
    """Returns (positions, width / 2) of a table that may have each angle twice."""
    return table.reshape(positions, -1)[:, : width // 2].contiguous()


def call(graph: fx.Graph, target, *arguments, **named) -> fx.Node:
    """Adds a call whose meta has the shape and dtype of its result."""
    node = graph.call_function(target, arguments, named)
    node.meta["val"] = target(*fx.map_arg(arguments, lambda one: one.meta["val"]), **named)
    return node


def call_half(graph: fx.Graph, table: fx.Node, positions: int, width: int, dtype: torch.dtype) -> fx.Node:
    """Adds `half` of a table to the graph, in the dtype of what it turns: a product with float64 is in float64."""
    one = call(graph, aten.slice.Tensor, call(graph, aten.reshape.default, table, [positions, -1]), 1, 0, width // 2)
    return one if one.meta["val"].dtype == dtype else call(graph, aten._to_copy.default, one, dtype=dtype)


def replace(
    graph: fx.Graph, scores: fx.Node, rows: fx.Node, last: fx.Node, shape: tuple[int, ...], arguments: tuple
) -> None:
    positions, width = shape[1], shape[2] // (arguments[2] + 2 * arguments[3])
    with graph.inserting_before(last):
        tables = [one and call_half(graph, one, positions, width, rows.meta["val"].dtype) for one in arguments[:2]]
        whole = call(graph, attention, call(graph, aten.reshape.default, rows, list(shape)), *tables, *arguments[2:])
        whole.meta = {**scores.meta, "val": whole.meta["val"]}  # where it comes from
        result = call(
            graph, aten.reshape.default, call(graph, operator.getitem, whole, 0), list(last.meta["val"].shape)
        )
    last.replace_all_uses_with(result)
