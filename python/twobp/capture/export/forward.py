"""Turns a module and one micro-batch into one functional graph of ATen calls. It is the forward pass from the fields of
the batch to the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from twobp.batches import named

from .. import ops, symbols
from ..errors import DYNAMIC, EXPERTS, CaptureError, recording_lines, user_line, where
from ..own_operators import aten, grouped_mm
from ..passes.fuse import fuse
from .draws import number_draws, refusing_draws_of_python
from .four_bits import four_bit_layers
from .generic import Dimensions, dynamic_shapes
from .parts import InParts, keeping_assertions
from .regions import inline_regions

REMOVED = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
ASSERTIONS = {aten._assert_async.msg, aten._assert_async.default}
# These take a generator.
LIKE = {aten.rand_like.default: aten.rand.default, aten.randn_like.default: aten.randn.default}
SAME_VALUE = {aten.alias.default, aten.lift_fresh_copy.default}

ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of other precisions, autocast has none
MOST_TEXT = 1000  # bytes of a text in a bundle


class Input(NamedTuple):
    """The meaning of a placeholder. `source` is field, parameter, buffer, constant, value, loss_weight, or whole: a
    field of whole sequences, also in a slice."""

    source: str
    name: str


class Check(NamedTuple):
    """An assertion of the module about the fields of its batch. `says` is the error."""

    condition: fx.Node
    says: str


class Recipe(fx.Graph):
    """A graph that computes a node from constants and sizes. `sources` maps its placeholders to those of the node's
    graph."""

    sources: dict[fx.Node, fx.Node]


@dataclasses.dataclass
class Table:
    """A constant that depends on sizes of the fields. `graph` computes it (fold.py). `value` is that in the
    example, and large() that at Forward.largest, or None."""

    graph: Recipe
    value: torch.Tensor
    large: Callable[[], torch.Tensor | None] | None


@dataclasses.dataclass
class Forward:
    """The forward pass of the whole module. `tensors` holds parameters, buffers and constants by Input. `drops` says
    for each call that draws random numbers whether it is a dropout (draws.py). The graph's outputs are the loss, a new
    value of each of `buffers`, `predicted` tensors that the module returns beside the loss, and until weigh_loss the
    condition of each assertion, which `asserted` has the text of. They are read from the graph, where a pass may
    replace them.

    `casts` says that autocast rounds some of its values, so that other roundings would be other numbers.

    Symbols stand for sizes that differ between batches. `tables` has those constants that depend on them, `sizes` the
    sizes for which layers are cut, and `largest` the largest ones for which the values of tables are looked at, which
    is `looked_at` if any were."""

    graph_module: fx.GraphModule
    inputs: dict[fx.Node, Input]
    tensors: dict[Input, torch.Tensor]
    drops: list[bool]
    buffers: list[str]
    predicted: int
    asserted: list[str]
    tables: dict[Input, Table] = dataclasses.field(default_factory=dict)
    sizes: symbols.At = dataclasses.field(default_factory=dict)
    largest: symbols.At = dataclasses.field(default_factory=dict)
    looked_at: symbols.At = dataclasses.field(default_factory=dict)
    casts: bool = False

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self.graph.output_node().args[0]

    @property
    def loss(self) -> fx.Node:
        return self.outputs[0]

    @property
    def new_buffers(self) -> dict[str, fx.Node]:
        return dict(zip(self.buffers, self.outputs[1:]))

    @property
    def predictions(self) -> tuple[fx.Node, ...]:
        return self.outputs[1 + len(self.buffers) :][: self.predicted]

    @property
    def read(self) -> list[fx.Node]:
        """All that programs compute."""
        return [self.loss, *self.new_buffers.values(), *self.predictions]

    @property
    def checks(self) -> list[Check]:
        return [Check(*one) for one in zip(self.outputs[len(self.read) :], self.asserted)]

    def without_checks(self, loss: fx.Node) -> None:
        """Makes `loss` the loss, and the conditions no outputs."""
        self.asserted = []
        self.graph.output_node().args = ((loss, *self.outputs[1 : len(self.read)]),)


def autocast(precision: str) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", ROUNDED[precision]) if precision in ROUNDED else contextlib.nullcontext()


class WithLoss(nn.Module):
    """forward(batch) returns the loss, a scalar. It is the module's own loss, or loss_fn(output, batch). While the
    module `predicts`, its output is a tuple, of which all is returned."""

    def __init__(self, module: nn.Module, loss_fn: Callable | None, precision: str = "fp32"):
        super().__init__()
        self.module, self.loss_fn, self.precision = module, loss_fn, precision
        names = inspect.signature(module.forward).parameters.values()
        self.takes = {p.name for p in names if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self.takes_all = loss_fn is None or any(p.kind == p.VAR_KEYWORD for p in names) and not self.takes

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        symbols.unify(batch)
        with autocast(self.precision):
            output = self.output(batch)
            if getattr(self.module, "predicts", False):
                return output
            return loss_of(output) if self.loss_fn is None else checked_loss(self.loss_fn(output, batch))

    def output(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.module(**{k: v for k, v in batch.items() if self.takes_all or k in self.takes})


def checked_loss(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    if isinstance(loss, torch.Tensor):
        found, advice = f"a tensor of shape {list(loss.shape)}", "Reduce it, such as by mean()"
    elif isinstance(loss, Mapping):
        found, advice = (
            f"a {type(loss).__name__} with the keys {', '.join(map(repr, loss))}",
            "Return one of its values alone",
        )
    elif isinstance(loss, (tuple, list)):
        found, advice = f"a {type(loss).__name__} of {len(loss)}", "Return the loss alone, without other values"
    else:
        found, advice = f"a {type(loss).__name__}", "Return a tensor that depends on the module's output"
    raise CaptureError(f"loss_fn returned {found}, but the loss must be one floating-point scalar. {advice}")


def loss_of(output: Any) -> torch.Tensor:
    """Returns the loss in a module's output: the output itself, its `loss`, or the first of a tuple, as Hugging Face
    models return it."""
    loss = (
        output.get("loss")
        if isinstance(output, Mapping)
        else getattr(output, "loss", None)
        if not isinstance(output, (tuple, torch.Tensor))
        else output
    )
    if isinstance(loss, tuple):
        loss = loss[0] if loss else None
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        found = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(output).__name__} without a loss"
        )
        raise CaptureError(
            f"the module's output is {found}, and no loss_fn is given. Return a scalar loss, pass the targets that "
            "make the module compute one (`labels` in Hugging Face models), or give loss_fn=lambda output, batch: ..."
        )
    return loss


def as_fields(module: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """Returns the micro-batch as a dict."""
    example = named(module, example, CaptureError)
    if not isinstance(example, Mapping) or not example:
        raise CaptureError(f"a batch is a dict of tensors (or a tuple of them), not {type(example).__name__}")
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"batch field '{name}' is {type(value).__name__}, not a tensor. Leave it out, or bind it to the module "
                "(a wrapper whose forward passes it)"
            )
    return {str(name): value.detach() for name, value in example.items()}


@contextlib.contextmanager
def causal_attention_without_mask(fields: Mapping[str, torch.Tensor]):
    """When Hugging Face models are exported, they write a dense causal mask, for the sake of other shapes. A captured
    program has one shape, and `is_causal` gives the same in less time. A batch with padding or with its own positions
    keeps its masks."""
    masking = sys.modules.get(
        "transformers.masking_utils"
    )  # models of transformers import it; for others, the import would take seconds
    if masking is None:
        yield
        return
    changed: dict[str, Callable] = {"is_torchdynamo_exporting": lambda: False}
    if "position_ids" not in fields:
        changed["find_packed_sequence_indices"] = lambda position_ids: None
    before = {name: getattr(masking, name) for name in changed if hasattr(masking, name)}
    for name in before:
        setattr(masking, name, changed[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(masking, name, value)


@contextlib.contextmanager
def quiet():
    """Silences torch's log during tracing, because its exception has the same text."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
    ]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for one, level in zip(loggers, before):
            one.setLevel(level)


def check_parts(module: nn.Module) -> None:
    """Refuses parts for which export would not give the reason."""
    for name, part in module.named_modules():
        if (
            isinstance(part, nn.modules.batchnorm._NormBase)
            and part.momentum is None
            and part.track_running_stats
            and part.training
        ):
            raise CaptureError(
                f"'{name.removeprefix('module.')}' is a {type(part).__name__} with momentum=None, which divides by the "
                "number of its batches. Give it a momentum"
            )
    registered: dict[nn.Module, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        first = registered.setdefault(part, name)
        if (
            first != name
            and isinstance(part, nn.modules.batchnorm._NormBase)
            and part.track_running_stats
            and part.training
        ):
            raise CaptureError(
                f"'{first.removeprefix('module.')}' and '{name.removeprefix('module.')}' are one "
                f"{type(part).__name__}, whose statistics torch.export does "
                "not take under two names. Register it once, and call it twice"
            )


def check_hooks(module: nn.Module) -> None:
    """Export includes hooks of the forward pass, but would lose those of the backward pass."""
    if nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks:
        raise CaptureError("there is a backward hook for all modules, which would not run. Remove it")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"'{name.removeprefix('module.') or 'the module'}' has a backward hook, which would not run. Remove it"
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter '{name.removeprefix('module.')}' has a gradient hook, which would not run. Remove it"
            )


def export(
    whole: WithLoss, fields: dict[str, torch.Tensor], buffers: Collection[str] = (), which: Dimensions | None = None
) -> Forward:
    """Exports `whole` in training mode. `buffers` are no constants, even if this forward pass only reads them. The
    sizes of the dimensions `which` are symbols. Raises CaptureError with export's reason and the line of user code."""
    try:
        with (
            causal_attention_without_mask(fields),
            keeping_assertions(),
            recording_lines(),
            quiet(),
            refusing_draws_of_python("the module's forward pass"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", FutureWarning)  # torch's own warnings
            shapes = None if which is None else dynamic_shapes(fields, which)
            with four_bit_layers(), InParts(fields, fixed=which is None):
                program = torch.export.export(whole, (fields,), strict=False, dynamic_shapes=shapes)
            casts = inline_regions(program.graph_module)  # later steps lose the places where gradients stop
            drops = number_draws(program.graph_module.graph)
            drop_failed(program.graph_module.graph)
            program.graph_module.recompile()
            with operators_prepared_in_less_time():
                program = program.run_decompositions({})
    except CaptureError:
        raise
    except Exception as error:
        raise refusal(error) from error
    graph_module = program.graph_module
    symbols.inline(graph_module.graph)
    asserted = take_checks(graph_module.graph)
    check_values(graph_module.graph)
    clean(graph_module, casts)
    forward = with_meaning(program, whole, fields, drops, buffers, asserted)
    forward.casts = casts
    return forward


@contextlib.contextmanager
def operators_prepared_in_less_time():
    """torch looks up all of its operators for each of their 30 namespaces, and registers 22 kernels for each of 525
    operators that it does not decompose, with checks of types. Both take longer than a small export."""
    from torch._export import utils

    look_up, register = utils._materialize_cpp_cia_ops, torch._ops.OperatorBase.py_impl

    def py_impl(operator, key):
        if not isinstance(key, torch._C.DispatchKey) or key in operator.py_kernels:
            return register(operator, key)

        def inner(kernel):
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return inner

    utils._materialize_cpp_cia_ops = functools.cache(look_up)
    torch._ops.OperatorBase.py_impl = py_impl  # type: ignore[method-assign]
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = look_up
        torch._ops.OperatorBase.py_impl = register  # type: ignore[method-assign]


def drop_failed(graph: fx.Graph) -> None:
    """Removes calls that raised an error, which Python caught. They have no value, and would raise it again."""
    for node in list(graph.nodes):
        returns = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.returns
        if returns and not node.users and node.meta.get("val") is None:
            graph.erase_node(node)


def take_checks(graph: fx.Graph) -> list[str]:
    """Makes the condition of each assertion an output, in place. Returns what the assertions say."""
    found = [node for node in graph.nodes if node.target in ASSERTIONS]
    outputs = graph.output_node()
    outputs.args = ((*outputs.args[0], *(node.args[0] for node in found)),)
    for node in found:
        graph.erase_node(node)
    return [
        node.args[1] if len(node.args) > 1 else f"its fields do not pass a check of the module{where(node)}"
        for node in found
    ]


def check_values(graph: fx.Graph) -> None:
    """Raises CaptureError for tensors that programs do not have."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"the module's forward pass calls '{node.target.name()}', an operator that takes "
                f"functions{where(node)}, which programs do not have. In place of torch.cond, compute both sides and "
                "choose: torch.where(condition, a, b). Write a loop out, and attention by scaled_dot_product_attention"
            )
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else [values]:
            if not isinstance(value, torch.Tensor):
                if symbols.is_unknown(value):
                    raise CaptureError(
                        f"a number in the module's forward pass depends on the values of tensors{where(node)}. Keep it "
                        "a tensor: leave out .item()"
                    )
            elif value.is_complex():
                raise CaptureError(
                    f"the module computes with complex numbers{where(node)}, which programs do not have. Compute with "
                    "their real and imaginary parts"
                )
            elif value.layout is not torch.strided:
                raise CaptureError(
                    f"the module has a tensor of the layout {value.layout}{where(node)}, which programs do not have. "
                    "Call to_dense() on it before the module takes it"
                )
            elif any(map(symbols.is_unknown, value.shape)):
                raise CaptureError(
                    f"the size of a tensor depends on the values of tensors{where(node)}. Keep all elements, and "
                    "choose by a mask: in place of "
                    "x[mask].sum(), write (x * mask).sum() or torch.where(mask, x, 0).sum()"
                )


def refusal(error: Exception) -> CaptureError:
    reason = str(error).strip().split("\n\n")[0].strip() or type(error).__name__
    advice = "Only operations whose course does not depend on the values of tensors can be captured"
    if "dynamic_frequency_update" in (line := user_line(error)):
        advice = DYNAMIC
    elif "data-dependent" in str(error).lower() or "GuardOnDataDependent" in type(error).__name__:
        return CaptureError(
            f"the module branches on the value of a tensor, or checks it{line}. Leave out a check. Of a "
            "branch, compute both sides and choose: y = torch.where(condition, a, b)"
            + (". " + EXPERTS if "expert" in line else "")
        )
    elif "numpy" in str(error):
        advice = "Compute with torch in place of numpy"
    return CaptureError(f"torch.export cannot take the module: {type(error).__name__}: {reason}{line}. {advice}")


def with_meaning(
    program,
    whole: WithLoss,
    fields: dict[str, torch.Tensor],
    drops: list[bool],
    kept: Collection[str],
    asserted: list[str],
) -> Forward:
    """Finds the meaning of each placeholder and output of the exported graph."""
    signature, graph = program.graph_signature, program.graph_module.graph
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    canonical: dict[int, str] = {}
    for name, tensor in [*parameters.items(), *buffers.items()]:
        canonical.setdefault(id(tensor), name.removeprefix("module."))
    changed = {
        *kept,
        *(canonical[id(buffers[name])] for name in signature.buffers_to_mutate.values() if name in buffers),
    }
    field_of = dict(zip(signature.user_inputs, fields))
    inputs: dict[fx.Node, Input] = {}
    tensors: dict[Input, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in signature.inputs_to_parameters:
            tensor = parameters[signature.inputs_to_parameters[node.name]]
            inputs[node] = Input("parameter" if is_number(tensor) else "constant", canonical[id(tensor)])
        elif node.name in signature.inputs_to_buffers:
            target = signature.inputs_to_buffers[node.name]
            tensor = buffers[target] if target in buffers else program.constants[target]
            name = canonical.get(id(tensor), target)
            inputs[node] = Input("buffer" if name in changed else "constant", name)
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            target = signature.inputs_to_lifted_tensor_constants[node.name]
            tensor = program.constants[target]
            inputs[node] = Input("constant", target)
        elif node.name in field_of:
            inputs[node] = Input("field", field_of[node.name])
            continue
        else:
            raise CaptureError(
                f"the exported module has an input '{node.name}' that is neither a tensor of the batch nor of the "
                "module"
            )
        tensors[inputs[node]] = tensor.detach()
    by_input: dict[Input, fx.Node] = {}
    for node, meaning in list(inputs.items()):  # a tied parameter is one input
        first = by_input.setdefault(meaning, node)
        if first is not node:
            node.replace_all_uses_with(first)
            del inputs[node]
            graph.erase_node(node)
    returned, new_buffers, outputs = [], {}, graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, outputs):
        if spec.kind.name == "BUFFER_MUTATION":
            if spec.target in buffers:  # others are made by the forward pass, for its next call
                name = canonical[id(buffers[spec.target])]
                with graph.inserting_before(graph.output_node()):
                    new_buffers[name] = in_form_of(graph, node, by_input[Input("buffer", name)].meta["val"])
        elif spec.kind.name == "USER_OUTPUT":
            returned.append(node)
        elif spec.kind.name == "PARAMETER_MUTATION":
            raise CaptureError(
                "the module's forward pass changes its parameter "
                f"'{spec.target.removeprefix('module.')}'{where(node)}. Make it a buffer"
            )
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise CaptureError(
                f"the module's forward pass writes into the field '{field_of.get(spec.target, spec.target)}' of its "
                f"batch{where(node)}. Let it clone the tensor first"
            )
        else:
            raise CaptureError(
                f"the module's forward pass has an output of the kind {spec.kind.name}{where(node)}, which programs do "
                "not have"
            )
    loss, *predictions = returned or [None]
    value: Any = loss.meta.get("val") if isinstance(loss, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 0 or not value.is_floating_point():
        found = (
            f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise CaptureError(
            f"the loss is {found}{where(cast(fx.Node, loss)) if value is not None else ''}, but must be one "
            "floating-point scalar: reduce it (loss.mean()) in the module or in loss_fn"
        )
    conditions = outputs[len(signature.output_specs) :]
    graph.output_node().args = ((loss, *new_buffers.values(), *predictions, *conditions),)
    return Forward(program.graph_module, inputs, tensors, drops, list(new_buffers), len(predictions), asserted)


def clean(graph_module: fx.GraphModule, casts: bool) -> None:
    """Removes calls that only check or copy. Writes dropout as our operator, and activations and norms as one operator
    each: with `casts` of autocast, only those that round nothing between their parts."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in REMOVED:
            graph.erase_node(node)
        elif (
            (
                node.target in SAME_VALUE
                or node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
                and is_same(node, node.args[0], node.args[1])
            )
            or node.target is aten.slice.Tensor
            and takes_all(node)
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in ops.ZEROED:
            ops.write_zeros(node)
        elif node.target in LIKE:
            value = node.meta["val"]
            node.target, node.args, node.kwargs = (
                LIKE[node.target],
                (list(value.shape),),
                {"dtype": value.dtype, "device": value.device},
            )
        elif str(node.target) == "transformers.grouped_mm_fallback.default":
            node.target = grouped_mm
        elif node.target is aten.view.default:
            node.target = (
                aten.reshape.default
            )  # with autograd, kernels may lay out a tensor in another way than export saw
        elif node.target is aten.copy.default:
            write_as_expand(graph, node)
        elif node.target is aten.native_dropout.default:
            write_as_dropout(graph, node)
        elif (
            node.target is aten.scaled_dot_product_attention.default
            and (node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)) > 0
        ):
            node.target = ops.attention_with_dropout
            names = ("q", "k", "v", "mask", "p", "is_causal")
            renamed = {"attn_mask": "mask", "dropout_p": "p"}
            node.kwargs = {
                **dict(zip(names[3:], node.args[3:])),
                **{renamed.get(k, k): v for k, v in node.kwargs.items()},
            }
            node.args = node.args[:3]
    fuse(graph, casts)
    graph_module.recompile()


def takes_all(node: fx.Node) -> bool:
    """Returns whether a slice is the whole for every size. For a fixed size, torch leaves it out itself."""
    size = node.args[0].meta["val"].shape[ops.named_argument(node, 1)]
    return isinstance(size, torch.SymInt) and symbols.same(size, node.meta["val"].shape[ops.named_argument(node, 1)])


def is_same(node: fx.Node, x: Any, factor: Any) -> bool:
    """Returns whether the product or quotient is x itself, and no mean over one sample."""
    return (
        isinstance(factor, (int, float))
        and factor == 1
        and node.meta["val"].dim() > 0
        and isinstance(x, fx.Node)
        and x.meta["val"].dtype == node.meta["val"].dtype
    )


def write_as_expand(graph: fx.Graph, node: fx.Node) -> None:
    """x[...] = y is exported as copy(x, y), which has no derivative. Its value is y in x's dtype and shape."""
    into, source = node.args[:2]
    with graph.inserting_before(node):
        source = in_form_of(graph, source, into.meta["val"])
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def is_number(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a weight. Others, such as those in 4 bits, are constants."""
    return parameter.is_floating_point()


def in_form_of(graph: fx.Graph, source: fx.Node, value: torch.Tensor) -> fx.Node:
    """Returns what value.copy_(source) writes."""
    if value.dtype != source.meta["val"].dtype:
        converted = source.meta["val"].to(value.dtype)
        source = graph.call_function(aten._to_copy.default, (source,), {"dtype": value.dtype})
        source.meta["val"] = converted
    if not symbols.same(value.shape, source.meta["val"].shape):
        source = graph.call_function(aten.expand.default, (source, list(value.shape)))
        source.meta["val"] = value
    return source


def write_as_dropout(graph: fx.Graph, node: fx.Node) -> None:
    x, p, train = node.args
    if train and p > 0:
        node.target, node.args = ops.dropout, (x, p)
        return
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(x)
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
