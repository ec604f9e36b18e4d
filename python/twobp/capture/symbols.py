"""Sizes that differ between micro-batches are symbols of torch. Export and the graphs of forward and backward share one
environment of symbols, so each size is an expression of sizes of fields. Such an expression is an argument: no program
has nodes for sizes.

Never compare sizes by `==`: with a symbol, that compares the sizes of the example, and adds a guard that refuses others
or that refuses this one. `same` adds none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, statically_known_true

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def unify(fields: Mapping[str, torch.Tensor]) -> None:
    """Runs in export before the module: sizes that are equal in the example are one symbol. Otherwise each comparison
    of two in the module would add a guard."""
    seen: list[torch.SymInt] = []
    for field in fields.values():
        for size in field.shape:
            if isinstance(size, torch.SymInt):
                known = next((one for one in seen if hint(one) == hint(size)), None)
                if known is None:
                    seen.append(size)
                else:
                    bool(size == known)  # the guard replaces the symbol


def is_size(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def is_unknown(value: Any) -> bool:
    """Returns whether values of tensors decide a number."""
    return isinstance(value, SYMBOLIC) and bool(free_unbacked_symbols(value))


def expr_of(size: Any) -> sympy.Expr:
    """Returns the expression of a symbolic size."""
    return size.node.shape_env.simplify(size.node.expr)


def plain(size: Any) -> Any:
    """A size that is the same for every batch becomes a number."""
    if is_size(size) and not (expr := expr_of(size)).free_symbols and expr.is_number:
        return int(expr) if isinstance(size, torch.SymInt) else float(expr)
    return size


At = Mapping[sympy.Symbol, int]  # other sizes of fields than those of the example
EXAMPLE: At = {}


def hint(value: Any) -> Any:
    return at(value, EXAMPLE)


def at(value: Any, sizes: At) -> Any:
    """Returns the value of a size, or of (nested) arguments with sizes, in the example or for other sizes of the
    fields. Adds no guard."""
    if isinstance(value, SYMBOLIC):
        if sizes:
            number = expr_of(value).subs(sizes)
            return int(number) if isinstance(value, torch.SymInt) else float(number)
        return value.node.hint if value.node.hint is not None else value.node.shape_env.size_hint(value.node.expr)
    if isinstance(value, torch.Size):
        return torch.Size([at(one, sizes) for one in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(at(one, sizes) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(at(one, sizes) for one in value)
    if isinstance(value, dict):
        return {key: at(one, sizes) for key, one in value.items()}
    return value


def argument(value: Any) -> Any:
    """Returns a number of an instruction."""
    return {"size": value} if is_size(value := plain(value)) else value


def same(these: Any, those: Any) -> bool:
    """Returns whether two sizes or shapes are equal for all batches."""
    if isinstance(these, (int, torch.SymInt)) and isinstance(those, (int, torch.SymInt)):
        return bool(statically_known_true(these == those))
    return len(these) == len(those) and all(same(a, b) for a, b in zip(these, those))


def sized(arguments: Any) -> bool:
    """Returns whether (nested) arguments have a size that differs between batches."""
    found = []
    fx.node.map_aggregate(arguments, lambda one: found.append(one) if is_size(plain(one)) else None)
    return bool(found)


def replaced(arguments: Any, node: fx.Node, by: Any) -> Any:
    return fx.map_arg(arguments, lambda one: by if one is node else one)


def inline(graph: fx.Graph) -> None:
    """Calls that give a size become the size itself in the arguments of others, so that no number crosses a cut or
    waits for W."""
    for node in list(graph.nodes):
        size = node.meta.get("val")
        if node.op != "call_function" or not isinstance(size, SYMBOLIC) or is_unknown(size):
            continue
        for user in list(node.users):
            user.args, user.kwargs = (replaced(one, node, plain(size)) for one in (user.args, user.kwargs))
        if not node.users:
            graph.erase_node(node)


def env_of(graph: fx.Graph) -> ShapeEnv | None:
    """Returns the environment of the symbols in a graph, or None if it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    return None
