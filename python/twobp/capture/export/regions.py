"""Export turns `with torch.no_grad():` and `with torch.autocast(...):` into calls of other graphs. Their nodes are
inlined: the results of the first are detached, and the casts of the second are written out."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..own_operators import aten

GRAD, AUTOCAST = torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast


def inline_regions(graph_module: fx.GraphModule) -> bool:
    """Works in place. Returns whether autocast casts something."""
    graph, casts = graph_module.graph, False
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (GRAD, AUTOCAST):
            continue
        count = 1 if node.target is GRAD else 4
        setting, inner, arguments = node.args[:count], node.args[count], node.args[count + 1 :]
        body = getattr(graph_module, inner.target)
        casts = inline_regions(body) or casts
        env = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), arguments))
        with graph.inserting_before(node):
            for part in body.graph.nodes:
                if part.op == "call_function":
                    env[part] = graph.node_copy(part, env.__getitem__)
                    # A nested autocast has its casts, and no others: as those of this one, they would be repeated.
                    if node.target is AUTOCAST and not part.meta.get("cast"):
                        casts = write_casts(graph, env[part], *setting[:3]) or casts
                        env[part].meta["cast"] = True
            results = [env[result] for result in list(body.graph.nodes)[-1].args[0]]
            if node.target is GRAD and not setting[0]:
                results = [detached(graph, one) for one in results]
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)
    return casts


def detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    if not value.meta["val"].is_floating_point():
        return value
    node = graph.call_function(aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


class FirstCasts(TorchDispatchMode):
    """Notes the dtypes to which a call casts its own arguments."""

    def __init__(self, arguments: list[torch.Tensor]):
        super().__init__()
        self.place = {id(one): i for i, one in enumerate(arguments)}
        self.found: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is aten._to_copy.default and id(args[0]) in self.place:
            self.found.setdefault(self.place[id(args[0])], result.dtype)
        return result


def write_casts(graph: fx.Graph, node: fx.Node, device: str, dtype: torch.dtype, enabled: bool) -> bool:
    """Writes those casts before a call that autocast would make, and returns whether there are any."""
    target = node.target
    if (
        not enabled
        or not isinstance(target, torch._ops.OpOverload)
        or not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), f"Autocast{device.upper()}")
    ):
        return False
    given = ops.inputs_of(node)
    values = {one: one.meta["val"] for one in given}
    read = [value for value in values.values() if isinstance(value, torch.Tensor)]
    mode = next((value.fake_mode for value in read if hasattr(value, "fake_mode")), None)
    if mode is None:
        return False
    with mode, torch.no_grad(), torch.autocast(device, dtype, cache_enabled=False), FirstCasts(read) as seen:
        target(*fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
    for one in given:
        value = values[one]
        if isinstance(value, torch.Tensor) and (to := seen.found.get(seen.place[id(value)])) not in (None, value.dtype):
            with graph.inserting_before(node):
                cast = graph.call_function(aten._to_copy.default, (one,), {"dtype": to})
            cast.meta = {**node.meta, "val": torch.empty_like(value, dtype=to), "cast": True}
            node.replace_input_with(one, cast)
    return bool(seen.found)
