"""Traces forward and backward of a layer through autograd as one graph: (inputs, gradients of outputs) -> (outputs,
gradients of inputs)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks_from_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from twobp import torch_versions

from .. import ops, symbols
from ..cut import Layer
from ..errors import CaptureError, where
from ..ops import aten
from ..passes.rounded import join_casts

torch_versions.complete_size_calls()

SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


@dataclasses.dataclass
class Joint:
    """`arriving` lists the outputs with a gradient, in order of the placeholders after the inputs. `wanted` lists the
    inputs that need a gradient, and `trained` says so of each, also where none arrives."""

    graph_module: fx.GraphModule
    arriving: list[int]
    wanted: list[int]
    trained: list[bool]


def is_mutable(node: fx.Node) -> bool:
    return (
        node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


@contextlib.contextmanager
def without_one_dnn():
    """oneDNN's LSTM keeps a workspace that only autograd has."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def modes_of(layer: Layer) -> tuple[FakeTensorMode, Callable, Literal["real", "fake"]]:
    """Returns the modes in which a layer is traced. If sizes of its inputs are symbols, they are those of export, so
    that sizes stay expressions of those of the fields."""
    for x in layer.examples:
        if isinstance(x, FakeTensor) and symbols.sized(x.shape):
            return x.fake_mode, enable_python_dispatcher, "real"
    return FakeTensorMode(allow_non_fake_inputs=True), contextlib.nullcontext, "fake"


def run_with_gradients(layer: Layer, inputs: list[torch.Tensor], trained: list[bool]) -> tuple[list, list]:
    """Returns the leaves and the outputs of a layer. `trained[i]` says whether input i needs a gradient."""
    leaves = [x.detach().requires_grad_() if t else x.detach() for x, t in zip(inputs, trained)]
    return leaves, fx.Interpreter(layer.graph_module).run(*leaves)  # nodes get the lines of their sources


def fake_inputs(layer: Layer) -> list[torch.Tensor]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in layer.examples]


class Flow:
    """Where gradients go in a layer. `trained[i]` says whether input i needs a gradient, and `given` which outputs
    that may (Layer.differentiated), have one."""

    def __init__(self, layer: Layer, trained: list[bool]):
        self._modes = modes_of(layer)
        with self._running():
            leaves, outputs = run_with_gradients(layer, fake_inputs(layer), trained)
        self._leaves = [one if t else None for one, t in zip(leaves, trained)]
        self._outputs = [outputs[i] for i in layer.differentiated]
        self.given = [one.requires_grad for one in self._outputs]
        self._reached: dict[tuple[bool, ...], list[bool]] = {}

    def reached(self, read: list[bool]) -> list[bool]:
        """Returns which inputs the gradients of those outputs reach that are `read`."""
        if tuple(read) not in self._reached:
            self._reached[tuple(read)] = self._find(read)
        return self._reached[tuple(read)]

    def _find(self, read: list[bool]) -> list[bool]:
        some = [one for one, given, r in zip(self._outputs, self.given, read, strict=True) if given and r]
        wanted = [one for one in self._leaves if one is not None]
        if not some or not wanted:
            return [False] * len(self._leaves)
        with self._running():
            found = iter(
                torch.autograd.grad(
                    some, wanted, [torch.empty_like(one) for one in some], allow_unused=True, retain_graph=True
                )
            )
        return [one is not None and next(found) is not None for one in self._leaves]

    @contextlib.contextmanager
    def _running(self):
        mode, dispatcher, _ = self._modes
        with mode, dispatcher(), torch.enable_grad(), without_one_dnn():
            yield


def joint_graph(layer: Layer, trained: list[bool], read: list[bool]) -> Joint:
    """Traces a layer. `trained[i]` says whether input i needs a gradient, and `read[i]` whether output i gets one."""
    mode, dispatcher, how = modes_of(layer)
    with mode:
        fake = fake_inputs(layer)

    def outputs_of(inputs):
        return run_with_gradients(layer, inputs, trained)

    with mode, dispatcher(), torch.enable_grad(), without_one_dnn():
        _, outputs = outputs_of(fake)
        values = layer.differentiated
        given = [i for i, gets in zip(values, read, strict=True) if gets and outputs[i].requires_grad]
        # The backward pass goes through all trained layers. Where it has no gradient to bring, one output has one that
        # nothing reads.
        others = sorted(values, key=lambda i: not outputs[i].requires_grad) if any(trained) else []
        arriving = given or [i for i in others if outputs[i].is_floating_point()][:1]
        gradients = [torch.empty(outputs[i].shape, dtype=outputs[i].dtype) for i in arriving]
    wanted = [
        i for i, (t, one) in enumerate(zip(trained, layer.inputs)) if t and (arriving or one.source == "value")
    ]  # without a derivative, 0

    def joint(inputs, gradients):
        with torch.enable_grad(), without_one_dnn():
            leaves, outputs = outputs_of(inputs)
            setup_stacktrace_preservation_hooks_from_tensors(outputs)
            grads = (
                torch.autograd.grad(
                    [outputs[i] for i in given], [leaves[i] for i in wanted], gradients, allow_unused=True
                )
                if given
                else [None] * len(wanted)
            )
        return [o.detach() for o in outputs], list(grads)

    with (
        mode if how == "real" else contextlib.nullcontext(),
        dispatcher(),
        preserve_node_meta(),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):  # derivatives know their forward nodes
        graph_module = make_fx(joint, tracing_mode=how, _allow_non_fake_inputs=True)(fake, gradients)
        if any(map(is_mutable, graph_module.graph.nodes)):  # autograd's formulas write into tensors that they just made
            for node in graph_module.graph.find_nodes(op="call_function", target=aten.view.default):
                node.target = aten.reshape.default  # without these writes, tensors may have other strides
            graph_module.recompile()

            def replay(*arguments):
                return fx.Interpreter(graph_module).run(*arguments, enable_io_processing=False)

            functional = torch.func.functionalize(replay, remove="mutations")
            graph_module = make_fx(functional, tracing_mode=how, _allow_non_fake_inputs=True)(*fake, *gradients)
    symbols.inline(graph_module.graph)
    clean(graph_module.graph)
    join_casts(graph_module.graph)
    for node in graph_module.graph.nodes:
        if is_mutable(node):
            raise CaptureError(
                f"layer '{layer.name}': {node.target} writes into its argument, and there is no other form of "
                f"it{where(node)}. Write this part of the module with other operators of torch"
            )
    return Joint(graph_module, arriving, wanted, trained)


def clean(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and (
            node.target in SAME_VALUE or node.target is aten._to_copy.default and not node.kwargs
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in ops.ZEROED:
            ops.write_zeros(node)
    for node in list(graph.nodes):  # t(t(x)) is x
        if node.op == "call_function" and node.target in (aten.t.default, aten.transpose.int):
            inner = node.args[0]
            if inner.op == "call_function" and inner.target is node.target and inner.args[1:] == node.args[1:]:
                node.replace_all_uses_with(inner.args[0])
    graph.eliminate_dead_code()
