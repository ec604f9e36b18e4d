"""Traces forward and backward of a layer through autograd as one graph: (inputs, gradients of outputs) -> (outputs,
gradients of inputs)."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks_from_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from .. import ops, symbols
from ..cut import Layer
from ..errors import CaptureError, where
from ..ops import aten

SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


@dataclasses.dataclass
class Joint:
    """`arriving` lists the outputs with a gradient, in order of the placeholders after the inputs. `wanted` lists the
    inputs that need a gradient."""

    graph_module: fx.GraphModule
    arriving: list[int]
    wanted: list[int]


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


def mode_of_symbols(layer: Layer) -> FakeTensorMode | None:
    """Returns the mode of export if sizes of the layer's inputs are symbols."""
    return next((x.fake_mode for x in layer.examples if isinstance(x, FakeTensor) and symbols.sized(x.shape)), None)


def joint_graph(layer: Layer, trained: list[bool]) -> Joint:
    """Traces a layer. `trained[i]` says whether input i needs a gradient."""
    mode, how = FakeTensorMode(allow_non_fake_inputs=True), "fake"
    if of_export := mode_of_symbols(layer):  # sizes stay expressions of those of the fields
        mode, how = of_export, "real"
    with mode:
        fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in layer.examples]

    def outputs_of(inputs):
        leaves = [x.detach().requires_grad_() if t else x.detach() for x, t in zip(inputs, trained)]
        return leaves, fx.Interpreter(layer.graph_module).run(*leaves)  # nodes get the lines of their sources

    dispatcher = enable_python_dispatcher if of_export else contextlib.nullcontext
    with mode, dispatcher(), torch.enable_grad(), without_one_dnn():
        _, outputs = outputs_of(fake)
        arriving = [i for i, (kind, _) in enumerate(layer.outputs) if kind != "buffer" and outputs[i].requires_grad]
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
                    [outputs[i] for i in arriving], [leaves[i] for i in wanted], gradients, allow_unused=True
                )
                if arriving
                else [None] * len(wanted)
            )
        return [o.detach() for o in outputs], list(grads)

    with (
        mode if of_export else contextlib.nullcontext(),
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
    for node in graph_module.graph.nodes:
        if is_mutable(node):
            raise CaptureError(
                f"layer '{layer.name}': {node.target} writes into its argument, and there is no other form of "
                f"it{where(node)}. "
                "Write this part of the module with other operators of torch"
            )
    return Joint(graph_module, arriving, wanted)


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
