"""Values that depend on no field, parameter or changed buffer (rotary tables, positions, masks) are computed once, at
capture, and become constants. Those that depend on sizes of the fields become tables, which a small program computes
for each new shape. With their values, attention that is spelled out becomes one operator, and causal masks become
is_causal."""

from __future__ import annotations

import functools

import torch
from torch import fx

from .. import ops, symbols
from ..export.forward import Forward, Input, Recipe, Table
from ..ops import aten, named_argument, set_argument
from .masked import LEAST, fuse_masked_attention

MOST_BYTES = 1 << 24  # larger results are computed in every micro-batch, so that a bundle stays small
LARGER = {aten.expand.default, aten.repeat.default}  # the inputs of these are kept instead of their results


def fold(forward: Forward) -> None:
    """Works in place."""
    known = {node: forward.tensors[meaning] for node, meaning in forward.inputs.items() if meaning.source == "constant"}
    values = Values(forward, known)
    compute(forward.graph, known)
    sizes = [symbols.EXAMPLE, *([forward.largest] if forward.largest else [])]
    fuse_masked_attention(forward.graph, values, sizes)
    compute(forward.graph, known)
    for node in forward.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if all(is_causal(node, values, one) for one in sizes):
            set_argument(node, 3, None)
            set_argument(node, 5, True)
    forward.graph.eliminate_dead_code()
    tables: dict[str, fx.Node] = {}
    for node in [node for node in known if node.op == "call_function"]:
        of_sizes = any(symbols.sized((one.args, one.kwargs)) for one in ops.ancestors([node]))
        readers = [user for user in node.users if user not in known]
        tensor = known[node]
        if (
            not readers
            or not isinstance(tensor, torch.Tensor)
            or symbols.at(node.meta["val"].numel(), forward.sizes) * tensor.element_size() > MOST_BYTES
            or not of_sizes
            and not ops.inputs_of(node)
        ):
            continue
        with forward.graph.inserting_before(node):
            constant = forward.graph.placeholder(f"constant_{node.name}")
        meaning = Input("constant", constant.name)
        forward.tensors[meaning] = tensor.contiguous()
        if of_sizes:
            graph = recipe(node)
            same = tables.setdefault(text_of(graph), constant)
            if same is not constant:
                del forward.tensors[meaning]
                node.replace_all_uses_with(same, delete_user_cb=readers.__contains__)
                forward.graph.erase_node(constant)
                continue
            large = functools.partial(values, node, forward.largest) if forward.largest else None
            forward.tables[meaning] = Table(graph, forward.tensors[meaning], large)
            constant.meta = {"val": node.meta["val"]}
        else:
            constant.meta = {"val": node.meta["val"].fake_mode.from_tensor(forward.tensors[meaning])}
        forward.inputs[constant] = meaning
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


def recipe(last: fx.Node) -> Recipe:
    graph, needed = Recipe(), ops.ancestors([last])
    env: dict[fx.Node, fx.Node] = {}
    read = {one for call in needed for one in ops.inputs_of(call)}
    for node in last.graph.nodes:
        if node in needed or node in read:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[last])
    graph.sources = {env[node]: node for node in env if node.op == "placeholder"}
    return graph


def text_of(graph: Recipe) -> str:
    """Returns equal texts for graphs that compute the same."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    return "\n".join(
        f"{graph.sources.get(node, node.target) if node.op != 'output' else 'output'} "
        f"{fx.map_arg((node.args, node.kwargs), lambda one: f'%{number[one]}')}"
        for node in graph.nodes
    )


def is_causal(attention: fx.Node, values: Values, sizes: symbols.At) -> bool:
    """Returns whether the mask of scaled_dot_product_attention hides all later positions, and nothing else."""
    mask, positions = named_argument(attention, 3), attention.args[0].meta["val"].shape[-2]
    if (
        mask is None
        or not symbols.same(attention.args[1].meta["val"].shape[-2], positions)
        or not symbols.same(mask.meta["val"].shape[-2:], (positions, positions))
    ):
        return False
    value = values(mask, sizes)
    if value is None:
        return False
    positions = symbols.at(positions, sizes)
    seen = torch.ones(positions, positions, dtype=torch.bool).tril()
    if value.dtype == torch.bool:
        return bool((value == seen).all())
    return bool((value == 0)[..., seen].all() and (value <= LEAST)[..., ~seen].all())


class Values:
    """The values of nodes that depend on no field, parameter or changed buffer. `known` has those of constants, and of
    some nodes in the example."""

    def __init__(self, forward: Forward, known: dict[fx.Node, torch.Tensor]):
        self.forward, self.known = forward, known
        self._of: dict[frozenset, dict[fx.Node, torch.Tensor]] = {}

    def __call__(self, last: fx.Node, sizes: symbols.At) -> torch.Tensor | None:
        """Returns None for other nodes, and for large ones."""
        if not sizes:
            values = dict(self.known)
        else:
            self.forward.looked_at = sizes
            constants = {node: one for node, one in self.known.items() if node.op == "placeholder"}
            values = self._of.setdefault(frozenset(sizes.items()), constants)
        for node in sorted(ops.ancestors([last], stop=values.__contains__)) if last not in values else ():
            if node not in values:
                if (
                    ops.is_random(node)
                    or not all(one in values for one in ops.inputs_of(node))
                    or symbols.at(node.meta["val"].numel(), sizes) > MOST_BYTES
                ):
                    return None
                try:
                    values[node] = ops.computed(node, values, sizes)
                except RuntimeError:  # the module does not take such sizes
                    return None
        return values.get(last)
