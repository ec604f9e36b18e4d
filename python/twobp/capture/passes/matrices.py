"""Finds the parameters that multiply as matrices, and the projections of which each consists. Muon updates these
(docs/optimizers.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import ops, symbols
from ..export.forward import Forward
from ..ops import aten

# The arguments of a product that may be weights. The first argument of linear is its input, also if it is a parameter,
# such as learned queries.
WEIGHTS = {"linear": (1,), "addmm": (1, 2), "mm": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2), "matmul": (0, 1)}
RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
SAME = {aten.clone.default, aten.contiguous.default, aten._to_copy.default, aten.detach.default, aten.alias.default}
LOOKUPS = {"embedding", "embedding_bag", "_embedding_bag", "index", "index_select", "gather", "take"}
NO_NUMBERS = set(
    """
    new_zeros new_ones new_full zeros_like ones_like full_like
""".split()
)  # they read a tensor's type, but none of its numbers
JOINS = {"cat", "stack", "slice_scatter", "select_scatter", "index_put"}
MOST_NUMBERS = 1 << 22  # of an index; larger ones are not followed


def describe(forward: Forward) -> dict[str, dict]:
    """Returns, for each parameter of two dimensions that multiplies or whose rows are looked up, the keys that
    graph.json has for it."""
    data = nodes_of_data(forward)
    found = {}
    for node, (source, name) in forward.inputs.items():
        if source == "parameter" and node.meta["val"].dim() == 2:
            uses, table = uses_of(node, data)
            of = {
                **({"product": projections(node, uses, forward)} if uses else {}),
                **({"table": True} if table else {}),
            }
            if of:
                found[name] = of
    return found


def nodes_of_data(forward: Forward) -> set[fx.Node]:
    """Returns the nodes that depend on the micro-batch."""
    data = {node for node, (source, _) in forward.inputs.items() if source == "field"}
    for node in forward.graph.nodes:
        if any(one in data for one in ops.inputs_of(node)):
            data.add(node)
    return data


def uses_of(parameter: fx.Node, data: set[fx.Node]) -> tuple[list[tuple[fx.Node, int, tuple | None]], bool]:
    """Returns the products that a parameter is a factor of, with the argument's position and the rows and columns of
    the parameter that it has. The factor may be computed from parameters, as in a weight norm. Also returns whether the
    parameter's rows are looked up."""
    rows, columns = parameter.meta["val"].shape
    places = {
        parameter: (torch.arange(rows)[:, None].expand(rows, columns), torch.arange(columns).expand(rows, columns))
    }
    products, table = [], False
    for node in followers(
        parameter,
        lambda one: (
            one not in data and not is_product(one) and ops.short_name(one) not in LOOKUPS and has_dimensions(one)
        ),
    ):
        for user in node.users:
            name = ops.short_name(user)
            if name in LOOKUPS:
                table = table or user.args[0] is node
            elif is_product(user):
                if symbols.hint(node.meta["val"].shape)[-2:].numel() > rows * columns:
                    continue  # a gain that was multiplied with a matrix
                products += [(user, i, places.get(node)) for i in positions(user, node)]
            elif node in places and (moved := [follow(user, node, one) for one in places[node]])[0] is not None:
                places[user] = tuple(moved)
    return products, table


def followers(first: fx.Node, passes) -> list[fx.Node]:
    """Returns the node and all nodes computed from it by nodes for which `passes` holds, in the graph's order."""
    found, stack = {first}, [first]
    while stack:
        for user in stack.pop().users:
            if user.op == "call_function" and user not in found and passes(user):
                found.add(user)
                stack.append(user)
    return sorted(found)


def is_product(node: fx.Node) -> bool:
    return ops.short_name(node) in ops.FORWARD_HEAVY


def has_dimensions(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() > 1


def positions(product: fx.Node, factor: fx.Node) -> list[int]:
    """Returns the arguments of the product that `factor` is as a weight. The weights of a recurrent layer and of an
    einsum are in a list."""
    name = ops.short_name(product)
    if name in WEIGHTS:
        return [i for i in WEIGHTS[name] if i < len(product.args) and product.args[i] is factor]
    lists = {"einsum": 1, **dict.fromkeys(ops.RECURRENT, 2)}
    return [lists[name]] if name in lists and factor in ops.nodes_in(product.args[lists[name]]) else []


def follow(user: fx.Node, node: fx.Node, places: torch.Tensor):
    """Returns the places of the numbers of `node` within the result of `user`, which only moves or changes them one by
    one. Returns None for others."""
    value: Any = user.meta.get("val")
    shape = symbols.hint(value.shape) if isinstance(value, torch.Tensor) else torch.Size()
    first = user.args[0] if user.args else None
    if user.target in SAME and first is node:
        return places
    if user.target in RESHAPES and first is node:
        try:
            return places.view(shape)
        except RuntimeError:
            return None  # it mixes the places with other dimensions
    if user.target in ops.VIEWS and first is node:
        return user.target(places, *symbols.hint(user.args[1:]), **symbols.hint(user.kwargs))
    pointwise = isinstance(user.target, torch._ops.OpOverload) and torch.Tag.pointwise in user.target.tags
    return (
        places
        if pointwise and isinstance(value, torch.Tensor) and shape == symbols.hint(node.meta["val"].shape)
        else None
    )


def projections(parameter: fx.Node, uses: list, forward: Forward) -> dict:
    """Returns the outputs of each projection in a weight: {"outputs": [...]}, with "columns" if they are columns, and
    with "groups" if the projections lie side by side in each of several groups, such as heads. If they are not clear,
    the weight is one projection."""
    whole = {"outputs": [parameter.meta["val"].shape[0]]}
    parts: dict[tuple, None] = {}
    axes = set()
    for product, argument, places in uses:
        axis, outputs = outputs_of(product, argument, places)
        if outputs is None:
            return whole
        axes.add(axis)
        parts.update(dict.fromkeys(division(product, argument, outputs, forward)))
    described = grouped(sorted(parts), parameter.meta["val"].shape[axis]) if len(axes) == 1 and len(parts) > 1 else None
    if described is None:
        return whole
    return {**described, **({"columns": True} if axis else {})}


def outputs_of(product: fx.Node, argument: int, places) -> tuple[int, torch.Tensor | None]:
    """Returns the dimension of the parameter that becomes the product's outputs, and its index for each output."""
    if places is None or ops.short_name(product) not in WEIGHTS:
        return 0, None
    last = ops.short_name(product) != "linear" and argument == WEIGHTS[ops.short_name(product)][-1]
    for axis, of in enumerate(places):
        if of.dim() < 2:
            return 0, None
        of = of[(0,) * (of.dim() - 2)]
        of = of.t() if last else of
        if bool((of == of[:, :1]).all()):
            return axis, of[:, 0]
    return 0, None


def division(product: fx.Node, argument: int, outputs: torch.Tensor, forward: Forward) -> list[tuple]:
    """Returns the outputs of each projection in a product. Its result is divided at once into their results, which have
    different uses and are not joined again. So the heads of one projection are none, and neither are the parts of a
    rotary embedding."""
    value = product.meta["val"]
    of_rows = ops.short_name(product) != "linear" and argument != WEIGHTS[ops.short_name(product)][-1]
    places = (outputs[:, None] if of_rows else outputs).expand(symbols.hint(value.shape))
    whole = tuple(sorted(outputs.tolist()))
    parts: dict[tuple, list[fx.Node]] = {}
    for leaf, numbers in leaves(product, places, len(whole), forward):
        parts.setdefault(numbers, []).append(leaf)
    if whole in parts or sorted(sum(parts, ())) != list(whole):
        return [whole]
    roles = {frozenset(role(nodes)) for nodes in parts.values()}
    return [whole] if len(roles) == 1 or are_joined(list(parts.values())) else list(parts)


def leaves(node: fx.Node, places: torch.Tensor, count: int, forward: Forward):
    """Yields the nodes at which the result is divided or no longer followed, with the outputs that they have."""
    for user in node.users:
        if ops.short_name(user) in NO_NUMBERS:
            continue
        if isinstance(moved := follow(user, node, places), (list, tuple)):
            for part in user.users:
                yield part, numbers_of(moved[part.args[1]])
            continue
        if user.target is aten.index.Tensor and user.args[0] is node and places.numel() <= MOST_NUMBERS:
            moved = indexed(user, places, forward)
        if moved is None:
            yield node, numbers_of(places)
        elif len(numbers := numbers_of(moved)) < count:
            yield user, numbers
        else:
            yield from leaves(user, moved, count, forward)


def indexed(node: fx.Node, places: torch.Tensor, forward: Forward) -> torch.Tensor | None:
    """Returns the places that an index by constants chooses."""
    constants = [
        None if one not in forward.inputs else forward.tensors.get(forward.inputs[one]) for one in node.args[1]
    ]
    if any(known is None for known, one in zip(constants, node.args[1]) if one is not None):
        return None
    return aten.index.Tensor(places, constants)


def numbers_of(places: torch.Tensor) -> tuple:
    """Returns the different numbers in the tensor."""
    for dimension in reversed(range(places.dim())):
        if places.stride(dimension) == 0:
            places = places.select(dimension, 0)
    return tuple(places.unique().tolist())


def role(nodes: list[fx.Node]) -> set[tuple[str, int, int]]:
    """Returns the operators that a projection's result goes through up to its second product, with the position of the
    argument unless they join theirs, as those of heads are joined."""
    found, stack, seen = set(), [(node, 0) for node in nodes], set()
    while stack:
        node, products = stack.pop()
        for user in node.users:
            if user.op != "call_function":
                continue
            heavy = products + is_product(user)
            name = ops.short_name(user)
            found.add((name, 0 if name in JOINS else ops.inputs_of(user).index(node), heavy))
            if heavy < 2 and (user, heavy) not in seen:
                seen.add((user, heavy))
                stack.append((user, heavy))
    return found


def are_joined(parts: list[list[fx.Node]]) -> bool:
    """Returns whether a concatenation has several of the parts again, before a product."""
    reached = [{one for node in nodes for one in followers(node, lambda user: not is_product(user))} for nodes in parts]
    for join in {one for nodes in reached for one in nodes if ops.short_name(one) in JOINS}:
        arguments = [{i for i, nodes in enumerate(reached) if one in nodes} for one in ops.inputs_of(join)]
        arguments = [one for one in arguments if one]
        if len(arguments) > 1 and len(set.union(*arguments)) > 1:
            return True
    return False


def grouped(parts: list[tuple], count: int) -> dict | None:
    """Returns the parts of range(count) as groups of the same sizes, or None if they are none."""
    if sorted(sum(parts, ())) != list(range(count)):
        return None
    first = parts[0]
    size = next((i for i, number in enumerate(first) if number != i), len(first))
    groups = len(first) // size if size else 0
    if groups == 0 or len(first) % size or count % groups or any(len(one) % groups for one in parts):
        return None
    sizes = [len(one) // groups for one in parts]
    begin = 0
    for one, width in zip(parts, sizes):
        if list(one) != [group * (count // groups) + begin + i for group in range(groups) for i in range(width)]:
            return None
        begin += width
    return {"outputs": sizes, **({"groups": groups} if groups > 1 else {})}
