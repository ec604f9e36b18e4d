"""Cuts the forward graph into a chain of layers, at every point where the fewest bytes cross."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter

import torch
from torch import fx

from . import ops, symbols
from .errors import CaptureError, path_of, where
from .export.forward import Forward, Input, Table
from .own_operators import linear_4bit

ATOMIC = 12  # a piece with at most this many products of parameters is cut only where a single value crosses


@dataclasses.dataclass
class Layer:
    """A piece between two cuts. Its placeholders are `inputs`, in order. Its outputs are `outputs`: ("value", name),
    ("buffer", name), ("loss", "") or ("prediction", ""). `tables` has those of its constants that depend on sizes, by
    name."""

    name: str
    graph_module: fx.GraphModule
    inputs: list[Input]
    examples: list[torch.Tensor]
    outputs: list[tuple[str, str]]
    tables: dict[str, Table] = dataclasses.field(default_factory=dict)
    casts: bool = False  # of autocast

    def names(self, source: str) -> list[str]:
        return [name for kind, name in self.inputs if kind == source]

    @property
    def differentiated(self) -> list[int]:
        """The outputs that may get a gradient."""
        return [i for i, (kind, _) in enumerate(self.outputs) if kind in ("value", "loss")]


def bytes_of(node: fx.Node, sizes: symbols.At) -> float:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return float("inf")  # lists may not cross a cut
    return symbols.at(value.numel(), sizes) * value.element_size()


def is_free(node: fx.Node, free: set[fx.Node]) -> bool:
    """Returns whether the node depends on no parameter and draws nothing (masks, rotary tables). Each layer that reads
    such a node computes it again."""
    return (
        not ops.is_random(node)
        and ops.short_name(node) not in ops.FORWARD_HEAVY
        and all(i in free for i in ops.inputs_of(node))
    )


def chain_of(forward: Forward) -> tuple[list[fx.Node], set[fx.Node]]:
    """Returns the calls that depend on a parameter or a changed buffer, in order, and all other nodes. Marks the
    products of parameters."""
    free = {node for node, (source, _) in forward.inputs.items() if source not in ("parameter", "buffer")}
    parameters = {node for node, (source, _) in forward.inputs.items() if source == "parameter"}
    needed = ops.ancestors(forward.read)
    chain = []
    for node in forward.graph.nodes:
        if node.op == "call_function" and node in needed:
            if is_free(node, free):
                free.add(node)
                continue
            chain.append(node)
            reads = any(one in parameters for one in ops.inputs_of(node))
            if reads and (node.target in ops.VIEWS or node.target is ops.aten._to_copy.default):
                parameters.add(node)
            node.meta["product"] = reads and ops.short_name(node) in ops.FORWARD_HEAVY or node.target is linear_4bit
    return chain, free


def references_first(
    chain: list[fx.Node], free: set[fx.Node], forward: Forward, frozen: set[str]
) -> tuple[list[fx.Node], int]:
    """Puts chains of calls that depend on frozen weights alone, such as those of a reference model, before the calls
    that depend on trained ones. They are then no part of the way from the trained weights to the loss and back. Returns
    the number of these calls, too. Nothing moves if more bytes leave them than are usually in between two of them,
    because all later layers pass these on."""
    weights = {node for node, (source, name) in forward.inputs.items() if source == "parameter" and name in frozen}
    parent: dict[fx.Node, fx.Node] = {}  # of a call that depends on frozen weights alone; a chain is a tree

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = node = parent[parent[node]]
        return node

    late: list[fx.Node] = []  # calls after the first that is trained
    trained = False
    for node in chain:
        read = [one for one in ops.inputs_of(node) if one not in free and one not in weights]
        if ops.is_random(node) or any(one not in parent for one in read):
            trained = True
            continue
        parent[node] = node
        for one in read:
            parent[root(one)] = node
        if trained:
            late.append(node)
    products = Counter(root(node) for node in parent if heavy(node))
    moved = {one for one in map(root, late) if products[one] > ATOMIC}
    first = [node for node in chain if node in parent and root(node) in moved]
    if not first:
        return chain, 0
    rest = [node for node in chain if node not in parent or root(node) not in moved]
    points, _ = crossing(first + rest, forward)
    sizes = [sum(bytes_of(one, forward.sizes) for one in values) for values in points[: len(first)]]
    return (first + rest, len(first)) if sizes[-1] <= statistics.median(sizes) else (chain, 0)


def crossing(chain: list[fx.Node], forward: Forward) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
    """Returns, for each point after a call, the values that later calls read, or that the last layer returns. Also
    returns those of them that do not last for more than a piece. Layer after layer reads an encoder's output or a
    position bias, so these do not show where a layer ends. Nor do predictions that only the last layer still returns,
    such as hidden states, so that the layers are those of training."""
    index = {node: i for i, node in enumerate(chain)}
    read = {node: max((index[user] for user in node.users if user in index), default=index[node]) for node in chain}
    read[forward.loss] = len(chain) - 1
    last = {**read, **{node: len(chain) - 1 for node in forward.predictions if node in index}}
    products = list(itertools.accumulate(map(heavy, chain), initial=0))
    live: list[fx.Node] = []
    points = []
    for i, node in enumerate(chain):
        live = [value for value in live if last[value] > i] + ([node] if last[node] > i else [])
        points.append(live)
    brief = {node for node in chain if products[read[node]] - products[index[node]] <= ATOMIC}
    return points, [[one for one in live if one in brief and read[one] > i] for i, live in enumerate(points)]


def heavy(node: fx.Node) -> bool:
    return node.meta["product"]


def uses_of_buffers(chain: list[fx.Node], forward: Forward) -> set[int]:
    """Returns the indices of calls after which a buffer that forward changes is still in use. It belongs to one layer,
    so there is no cut there."""
    buffers = {node for node, (source, _) in forward.inputs.items() if source == "buffer"}
    new = {forward.inputs[node].name: node for node in buffers}
    inside: set[int] = set()
    for name, buffer in new.items():
        uses = [
            i for i, node in enumerate(chain) if buffer in ops.inputs_of(node) or node is forward.new_buffers.get(name)
        ]
        if uses:
            inside.update(range(uses[0], uses[-1]))
    return inside


def cut_points(
    chain: list[fx.Node], points: list[list[fx.Node]], brief: list[list[fx.Node]], whole: set[int], sizes: symbols.At
) -> list[int]:
    """Returns the indices of calls after which to cut. There is a cut if at most one value crosses that does not last
    (`brief`). Large pieces are also cut where the fewest bytes cross. There is no cut after the calls `whole`."""
    known = {node: bytes_of(node, sizes) for node in chain}
    cost = [float("inf") if i in whole else sum(known[one] for one in values) for i, values in enumerate(points)]
    own = [sum(known[one] for one in values) if cost[i] < float("inf") else cost[i] for i, values in enumerate(brief)]
    found: set[int] = set()

    def divide(begin: int, end: int) -> None:
        """Cuts chain[begin:end]. The cut after end - 1 is already made."""
        inside = range(begin, end - 1)
        if not inside or sum(map(heavy, chain[begin:end])) <= ATOMIC:
            return
        least = min(own[i] for i in inside)
        if least == float("inf"):
            return
        here = [i for i in inside if own[i] <= least * 1.01]
        found.update(here)
        for a, b in zip([begin, *(i + 1 for i in here)], [*(i + 1 for i in here), end]):
            if (a, b) != (begin, end):
                divide(a, b)

    single = [i for i in range(len(chain) - 1) if len(brief[i]) <= 1 and cost[i] < float("inf")]
    found.update(single)
    for a, b in zip([0, *(i + 1 for i in single)], [*(i + 1 for i in single), len(chain)]):
        divide(a, b)
    return sorted(found)


def merge_light(chain: list[fx.Node], cuts: list[int]) -> list[list[fx.Node]]:
    """Joins pieces without a product to a neighbour. It is the neighbour that occurs as often as they do, so that
    repeated layers stay equal."""
    bounds = [-1, *cuts, len(chain) - 1]
    pieces = [chain[a + 1 : b + 1] for a, b in zip(bounds, bounds[1:])]

    def look(piece):
        return tuple(
            (ops.short_name(n), str(tuple(n.meta["val"].shape)) if isinstance(n.meta.get("val"), torch.Tensor) else "")
            for n in piece
        )

    def weight(piece):
        return (
            2 if any(map(heavy, piece)) else 1 if any(ops.short_name(n).startswith("embedding") for n in piece) else 0
        )

    merged: list[list[fx.Node]] = []
    for piece in pieces:  # embeddings that are added together are one layer
        if merged and weight(piece) == 1 and weight(merged[-1]) < 2:
            merged[-1] = merged[-1] + piece
        else:
            merged.append(piece)
    count = Counter(map(look, merged))
    result: list[list[fx.Node]] = []
    ahead: list[fx.Node] = []
    for i, piece in enumerate(merged):
        if weight(piece):
            result.append(ahead + piece)
            ahead = []
            continue
        mine = count[look(piece)]
        before = count[look(merged[i - 1])] if i else 0
        after = count[look(merged[i + 1])] if i + 1 < len(merged) else 0
        if ahead or not result or (after and after == mine != before):
            ahead = ahead + piece
        else:
            result[-1] = result[-1] + piece
    if ahead:
        if result:
            result[-1] = result[-1] + ahead
        else:
            result.append(ahead)
    return result


def layer_names(pieces: list[list[fx.Node]]) -> list[str]:
    """Names each layer after the module that its products have in common."""
    names = []
    for piece in pieces:
        paths = (
            [path_of(n) for n in piece if heavy(n)]
            or [path_of(n) for n in piece if ops.short_name(n).startswith("embedding")]
            or [path_of(n) for n in piece]
        )
        paths = [p for p in paths if p] or [""]
        common = paths[0].split(".")
        for path in paths[1:]:
            parts = path.split(".")
            common = [a for i, a in enumerate(common[: len(parts)]) if common[: i + 1] == parts[: i + 1]]
        names.append(".".join(common))
    for i, piece in enumerate(pieces):  # a name that is a prefix of other layers' names says too little
        if not names[i] or any(other != names[i] and other.startswith(names[i] + ".") for other in names):
            names[i] = (
                next((path_of(n) for n in piece if heavy(n) or ops.short_name(n).startswith("embedding")), names[i])
                or "layer"
            )
    seen: Counter = Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[i] = f"{name}#{seen[name]}"
    return names


def sink_casts(forward: Forward) -> None:
    """Each use of a parameter's cast gets its own, so that no cut is between the two."""
    graph = forward.graph
    for node in graph.find_nodes(op="call_function", target=ops.aten._to_copy.default):
        if node.args[0] in forward.inputs and forward.inputs[node.args[0]].source == "parameter":
            for user in list(node.users):
                with graph.inserting_before(user):
                    own = graph.node_copy(node)
                user.replace_input_with(node, own)
            graph.erase_node(node)


def cut(forward: Forward, frozen: set[str]) -> list[Layer]:
    """Returns the chain of layers. Values that skip a layer pass through it as inputs and outputs. `frozen` are the
    parameters that are not trained."""
    sink_casts(forward)
    chain, free = chain_of(forward)
    chain, first = references_first(chain, free, forward, frozen)
    points, brief = crossing(chain, forward)
    cuts = cut_points(chain, points, brief, uses_of_buffers(chain, forward), forward.sizes)
    pieces: list[list[fx.Node]] = []
    for begin, end in ((0, first), (first, len(chain))):
        if begin < end:
            pieces += merge_light(chain[begin:end], [i - begin for i in cuts if begin <= i < end - 1])
    at = {node: i for i, node in enumerate(chain)}
    position = {node: i for i, node in enumerate(forward.graph.nodes)}
    layers: list[Layer] = []
    arriving: list[fx.Node] = []
    for number, (piece, name) in enumerate(zip(pieces, layer_names(pieces))):
        final = number == len(pieces) - 1
        leaving = [] if final else points[at[piece[-1]]]
        outputs = [(("value", n.name), n) for n in leaving]
        if final:
            outputs = [(("loss", ""), forward.loss), *((("prediction", ""), n) for n in forward.predictions)]
        mine = set(piece)
        outputs += [
            (("buffer", name_), n) for name_, n in forward.new_buffers.items() if n in mine or (final and n not in at)
        ]
        layers.append(piece_graph(forward, name, piece, free, arriving, outputs, position))
        arriving = leaving
    owners: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for kind, buffer in layer.outputs:
            if kind == "buffer":
                owners[buffer] = i
    for i, layer in enumerate(layers):
        for buffer in layer.names("buffer"):
            owners.setdefault(buffer, i)  # nothing changes it here
            if owners.get(buffer) != i:
                use = next(
                    user
                    for node, one in zip(layer.graph_module.graph.find_nodes(op="placeholder"), layer.inputs)
                    if one.name == buffer
                    for user in node.users
                )
                raise CaptureError(
                    f"two layers use the buffer '{buffer}', which the forward pass changes{where(use)}. Give each its "
                    "own"
                )
    return layers


def piece_graph(
    forward: Forward, name: str, piece: list[fx.Node], free: set, arriving: list[fx.Node], outputs: list, position: dict
) -> Layer:
    mine = set(piece)
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [*piece, *(n for _, n in outputs)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        order.append(node)
        if node.op == "call_function" and (node in mine or node in free):
            stack += ops.inputs_of(node)
    calls = sorted((n for n in order if n.op == "call_function" and (n in mine or n in free)), key=position.__getitem__)
    changed = {name_ for (kind, name_), _ in outputs if kind == "buffer"}
    used = [
        n
        for n in sorted(
            {*order, *(n for n, one in forward.inputs.items() if one.source == "buffer" and one.name in changed)},
            key=position.__getitem__,
        )
        if n in forward.inputs
    ]
    rank = {"field": 0, "parameter": 1, "buffer": 2, "constant": 3, "loss_weight": 4}
    graph, env = fx.Graph(), {}
    inputs: list[Input] = []
    examples: list[torch.Tensor] = []
    first_use = {n: i for i, call in reversed(list(enumerate(calls))) for n in ops.inputs_of(call)}
    for node in [*arriving, *sorted(used, key=lambda n: (rank[forward.inputs[n].source], first_use.get(n, 0)))]:
        meaning = forward.inputs.get(node, Input("value", node.name))
        env[node] = graph.placeholder(f"{meaning.source}_{len(inputs)}")
        env[node].meta = {"val": node.meta["val"]}
        inputs.append(meaning)
        examples.append(
            node.meta["val"] if meaning in forward.tables else forward.tensors.get(meaning, node.meta["val"])
        )
    for node in calls:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for _, n in outputs))
    tables = {one.name: forward.tables[one] for one in inputs if one in forward.tables}
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Layer(name, module, inputs, examples, [o for o, _ in outputs], tables, forward.casts)


def structure(layer: Layer, trained: list[bool], constants: list[torch.Tensor]) -> str:
    """Returns a text that is equal for layers with the same programs and constants. `constants` collects constants that
    differ. Those of a weight of 4 bits are as different as weights are."""

    def number_of(tensor: torch.Tensor) -> int:
        for i, one in enumerate(constants):
            if one.dtype == tensor.dtype and torch.equal(one, tensor):
                return i
        constants.append(tensor)
        return len(constants) - 1

    number: dict[fx.Node, int] = {}
    lines = []
    counters: Counter = Counter()
    for node in layer.graph_module.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            i = number[node]
            source, name = layer.inputs[i]
            counters[source] += 1
            of_weight = all(user.target is linear_4bit for user in node.users)
            which = (
                name
                if source == "field" or name in layer.tables
                else number_of(layer.examples[i])
                if source == "constant" and not of_weight
                else counters[source]
            )
            lines.append(f"{source} {which} {layer.examples[i].dtype} {tuple(layer.examples[i].shape)} {trained[i]}")
        else:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            lines.append(f"{node.target if node.op != 'output' else 'output'} {arguments}")
    return "\n".join(
        [
            *lines,
            str(
                [
                    (kind if kind != "buffer" else (kind, layer.names("buffer").index(name)))
                    for kind, name in layer.outputs
                ]
            ),
        ]
    )
