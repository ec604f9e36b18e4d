"""Traces a module for one shape of micro-batch. It is exported and cut into layers, and each layer is split into
programs."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import cast

import sympy
import torch
from torch import nn
from torch._functorch import eager_transforms
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from . import symbols
from .cut import Layer, cut, structure
from .differentiate.joint import Flow, joint_graph
from .differentiate.split import split
from .emit import Emitter, dtype_name, emit
from .errors import CaptureError, current_line
from .export.draws import Draw, draws_of
from .export.forward import MOST_TEXT, Forward, Recipe, WithLoss, export, is_number
from .export.generic import Dimensions
from .loss.targets import weigh_loss
from .passes import matrices
from .passes.attend import fuse_attention
from .passes.fold import fold
from .passes.gates import fuse_gates
from .passes.pack import Packed, pack
from .passes.rotary import fuse_rotary
from .passes.rounded import round_parameters
from .sequences.slices import Refused, positions_of, sliced_programs
from .sizes import Sizes
from .state.as_before import AsBefore
from .state.fingerprint import is_installed, is_installed_module, tensor_digest

# What these functions call first, however a module has imported them.
DERIVATIVES = {
    "torch.autograd.grad or backward": (torch.autograd, "_engine_run_backward"),
    "torch.func.grad or vjp": (eager_transforms, "grad_increment_nesting"),
    "torch.func.jvp": (eager_transforms, "jvp_increment_nesting"),
}


# The values of masks are looked at up to so many positions, or twice those of the batch, within LONGEST.
LONG, LONGEST = 1024, 4096


@dataclasses.dataclass
class Traced:
    """The programs for one shape. Layers have `name`, `kind`, `parameters`, perhaps their `dtypes`, `buffers` and
    `constants`, which are indices into `constants`. `names` are the module's own names of these tensors, or None for
    those that tracing made. `buffers` are those that forward changes. `read` has the digests of the module's other
    tensors that it reads. Their values are in the programs. `factors` is what matrices.describe found. `reads` has the
    attributes that the trace read, by the number of the object in the walk of fingerprint.py. `positions` is the
    length of the sequences, if the programs run over slices of them. Otherwise it is 0, and `no_slices` says why.
    `draws` are the forward pass's calls that draw random numbers, in order. If the programs are for many shapes,
    `many` has the keys of graph.json that describe these, and a constant of a layer may be {"table": i}. Otherwise it
    is empty. `course` is that of the Python of such a module, if it says so (losses/course.py)."""

    layers: list[dict]
    programs: list[dict]
    positions: int
    no_slices: str
    targets: dict
    buffers: list[str]
    read: dict[str, str]
    factors: dict[str, dict]
    names: list[str | None]
    draws: list[Draw]
    constants: list[torch.Tensor]
    reads: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    many: dict = dataclasses.field(default_factory=dict)
    course: dict = dataclasses.field(default_factory=dict)


class Constants:
    """Tensors by number. Equal tensors with the same name have one number. They are copies, except of those that are
    `watched`: weights of 4 bits are large."""

    def __init__(self, watched: Collection[str] = ()):
        self._watched = watched
        self._number: dict[tuple, int] = {}
        self.names: list[str | None] = []
        self.tensors: list[torch.Tensor] = []

    def number(self, tensor: torch.Tensor, name: str | None = None) -> int:
        key = (name, None if name else tensor_digest(tensor))
        if key not in self._number:
            self._number[key] = len(self.tensors)
            self.names.append(name)
            self.tensors.append(tensor.detach() if name in self._watched else tensor.detach().clone())
        return self._number[key]


def trace(
    whole: WithLoss,
    fields: dict[str, torch.Tensor],
    loss_reduction: str | None,
    frozen: set[str],
    no_slices: str,
    before: AsBefore,
    buffers: Collection[str] = (),
    many: Many | None = None,
) -> Traced:
    """Traces `whole`. `no_slices` says why its programs must not take slices. `buffers` are no constants, even if it
    only reads them. The programs are for one shape, or for `many`. Raises CaptureError."""
    with refusing_prints(), refusing_own_backward(), before, _use_lazy_graph_module(True):
        forward = export(whole, fields, buffers, many.which if many else None)
        before.check()
    symbolic = {one.name: node.meta["val"] for node, one in forward.inputs.items() if one.source == "field"}
    if many:
        many.look_at(forward, symbolic)
    own = own_tensors(whole)
    read = {
        name: tensor_digest(own[name])
        for one in forward.tensors
        if one.source == "constant" and (name := own_name(one.name, own))
    }
    fold(forward)
    factors = matrices.describe(forward)  # those of the first shape count
    targets = weigh_loss(forward, fields, loss_reduction)
    draws = draws_of(forward.graph, forward.read, forward.drops)
    layers = cut(forward, frozen)
    for layer in layers if forward.casts else ():
        round_parameters(layer)
    constants = Constants({name for name, one in own.items() if isinstance(one, nn.Parameter)})
    untrained, reads = where_gradients_go(layers, frozen)
    programs, assigned, packs, made = programs_of(layers, frozen | untrained, reads)
    positions = 0
    try:
        if no_slices:
            raise Refused(no_slices)
        length = positions_of(fields)
        programs = sliced_programs(
            [(kind, packs[kind].layer) for kind in assigned],
            length,
            lambda kind, layer: program_of(layer, packs[kind].trained, packs[kind].read),
            list(zip(programs, made)),
        )
        positions = length
    except Refused as reason:
        no_slices = str(reason).encode()[:MOST_TEXT].decode(errors="ignore")
    of_many, tables, course = {}, {}, {}
    if many:
        if script := getattr(whole.module, "python_course", None):
            course = script.course_of_trace()
        tables = {one: number for number, one in enumerate(forward.tables)}
        of_many = described_sizes(
            forward, symbolic, [programs, targets, course], lambda t, n: constants.number(t, own_name(n, own))
        )
    described = []
    for layer, kind in zip(layers, assigned):
        numbers = [
            {"table": tables[one]} if one in tables else constants.number(forward.tensors[one], own_name(one.name, own))
            for one in layer.inputs
            if one.source == "constant"
        ]
        described.append(
            {
                "name": layer.name,
                "kind": kind,
                "parameters": packs[kind].names(layer),
                **dtypes_of(packs[kind].layer, layer, forward),
                "buffers": layer.names("buffer"),
                "constants": numbers + [constants.number(tensor) for tensor in made[kind]],
            }
        )
    return Traced(
        described,
        programs,
        positions,
        no_slices,
        targets,
        list(forward.new_buffers),
        read,
        factors,
        constants.names,
        draws,
        constants.tensors,
        many=of_many,
        course=course,
    )


def dtypes_of(packed: Layer, layer: Layer, forward: Forward) -> dict:
    """Returns the dtypes in which the programs read the parameters, if some are not the parameters' own."""
    read = [one.dtype for one, (source, _) in zip(packed.examples, packed.inputs) if source == "parameter"]
    own = {forward.tensors[one].dtype for one in layer.inputs if one.source == "parameter"}
    return {"dtypes": [dtype_name(one) for one in read]} if {*read} - own or len(own) > 1 else {}


@dataclasses.dataclass
class Many:
    """The shapes that programs are to serve: the sizes of the dimensions `which` differ. `batch` has the sizes of a
    batch of the user, and `cut_for` those for which layers are cut."""

    which: Dimensions
    batch: dict[str, torch.Size]
    cut_for: dict[str, torch.Size]

    def look_at(self, forward: Forward, symbolic: dict[str, torch.Tensor]) -> None:
        """Sets Forward.sizes and Forward.largest. Raises CaptureError if no size is a symbol."""
        env = symbols.env_of(forward.graph)
        sizes = Sizes(symbolic, env) if env else None
        if env is None or sizes is None or not sizes.symbols:
            raise CaptureError("the module computes something else for each size of its fields")
        forward.sizes = {symbol: self.cut_for[name][dim] for symbol, (name, dim) in sizes.symbols.items()}
        guards = [env.simplify(guard.expr) for guard in env.guards]
        longest = max(self.batch[name][dim] for name, dim in sizes.symbols.values())
        most = max(LONG, min(2 * longest, LONGEST))
        bounds = {abs(int(one)) for guard in guards for one in guard.atoms(sympy.Integer)}  # such as of a buffer
        tried = {one - less for one in (most, *bounds) for less in (0, 1)} | {longest}
        for length in sorted((one for one in tried if 1 < one <= most), reverse=True):
            at = {
                symbol: symbols.hint(symbolic[name].shape[dim]) if dim == 0 else length
                for symbol, (name, dim) in sizes.symbols.items()
            }
            if all(guard.subs(at) == sympy.true for guard in guards):
                forward.largest = at
                break


def described_sizes(
    forward: Forward, symbolic: dict[str, torch.Tensor], code: list, number: Callable[[torch.Tensor, str], int]
) -> dict:
    """Returns the keys of graph.json that describe the shapes. Puts the numbers of their entries into `code`. `number`
    gives that of a constant."""
    sizes = Sizes(symbolic, cast(ShapeEnv, symbols.env_of(forward.graph)))
    tables = [table_program(forward, table.graph, number) for table in forward.tables.values()]
    sizes.place([*code, tables])
    guards = sizes.guards()
    shapes = sizes.of_fields(symbolic)
    lengths = {symbol: most for symbol, most in forward.looked_at.items() if sizes.symbols[symbol][1] > 0}
    guards += [sizes.at_most(symbol, most) for symbol, most in lengths.items()]
    guards += [sizes.at_least(symbol, 2) for symbol in sizes.symbols]
    return {
        "fields": {name: {"dtype": dtype_name(value.dtype), "shape": shapes[name]} for name, value in symbolic.items()},
        "sizes": sizes.entries,
        "guards": guards,
        "tables": tables,
    }


def table_program(forward: Forward, graph: Recipe, number: Callable[[torch.Tensor, str], int]) -> dict:
    """Returns the program of a table. Its inputs are constants by number."""
    emitter, inputs, code = Emitter("a table"), [], []
    for node in graph.nodes:
        if node.op == "placeholder":
            one = forward.inputs[graph.sources[node]]
            emitter.slot[node] = emitter.new_slot()
            inputs.append({"constant": number(forward.tensors[one], one.name), "slot": emitter.slot[node]})
        elif node.op == "call_function" and (instruction := emitter.instruction(node)):
            code.append(instruction)
    slot = emitter.slot[graph.output_node().args[0]]
    return {"slots": emitter.slots, "inputs": inputs, "code": code, "slot": slot}


@contextlib.contextmanager
def refusing_prints():
    """Programs do not print. A forward pass that prints would print once, and never again."""
    thread, print_ = threading.get_ident(), builtins.print

    def refuse(*values, **options):
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == "torch.export._trace":
            return None  # torch prints pages of the graph before an error
        if threading.get_ident() != thread or is_installed(caller.f_code.co_filename):
            return print_(*values, **options)
        raise CaptureError(
            f"the module's forward pass prints ({caller.f_code.co_filename}:{caller.f_lineno}, in "
            f"{caller.f_code.co_name}), which its "
            "programs would not. Remove the print, or make it depend on torch.compiler.is_exporting()"
        )

    builtins.print = refuse
    try:
        yield
    finally:
        builtins.print = print_


@contextlib.contextmanager
def refusing_own_backward():
    """Programs differentiate the computation of a forward pass. They would not run a backward pass that the module
    defines. One of an installed package, such as Bloom's GELU of transformers, is taken for the derivative: the
    comparison with autograd decides."""
    thread, apply, register_hook = (
        threading.get_ident(),
        torch.autograd.Function.__dict__["apply"],
        torch.Tensor.register_hook,
    )

    def checked_apply(cls, *args, **keywords):
        if threading.get_ident() == thread and cls.__qualname__ == "CheckpointFunction":
            raise CaptureError(
                f"the module calls torch.utils.checkpoint with use_reentrant=True{current_line()}, whose backward pass "
                "would not run. Give it "
                'use_reentrant=False; to compute activations again, give the trainer recompute=["activations"]'
            )
        if threading.get_ident() == thread and not is_installed_module(cls.__module__):
            raise CaptureError(
                f"the module's forward pass calls {cls.__qualname__}, a torch.autograd.Function, whose own backward "
                f"pass would not run{current_line()}. Write it with operators that have the derivative that you want, "
                "such as x + (y - x).detach() for y with the derivative of x"
            )
        return apply.__get__(None, cls)(*args, **keywords)

    def checked_hook(tensor, hook):
        if threading.get_ident() == thread:
            raise CaptureError(
                f"the module's forward pass registers a hook on the gradient of a tensor{current_line()}, which would "
                "not run. Remove it, or make it depend on torch.compiler.is_exporting()"
            )
        return register_hook(tensor, hook)

    def refusing(call: str, original):
        def refuse(*arguments, **keywords):
            if threading.get_ident() != thread:
                return original(*arguments, **keywords)
            raise CaptureError(
                f"{call} is called within the forward pass or loss_fn{current_line()}, but programs have the "
                "derivatives of the loss alone. "
                "Write this one out with operators of torch, or take it before the batch is made"
            )

        return refuse

    before = [(torch.autograd.Function, "apply", apply), (torch.Tensor, "register_hook", register_hook)]
    torch.autograd.Function.apply, torch.Tensor.register_hook = classmethod(checked_apply), checked_hook
    for call, (holder, name) in DERIVATIVES.items():
        before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, refusing(call, getattr(holder, name)))
    try:
        yield
    finally:
        for holder, name, original in before:
            setattr(holder, name, original)


def programs_of(
    layers: list[Layer], frozen: set[str], reads: list[list[bool]]
) -> tuple[list[dict], list[int], list[Packed], list[list[torch.Tensor]]]:
    """Returns the program of each kind, the kind of each layer, the packed parameters of each kind, and the constants
    that tracing made for it. `reads` says for each layer which of its outputs get a gradient."""
    kinds: dict[str, int] = {}
    packs: list[Packed] = []
    different: list[torch.Tensor] = []
    programs: list[dict] = []
    made, gradients = [], []
    arriving: list[bool] = []
    assigned = []
    for layer, read in zip(layers, reads):
        trained = trained_inputs(layer, frozen, arriving)
        text = f"{structure(layer, trained, different)} {read}"
        if text not in kinds:
            kinds[text] = len(programs)
            packed = pack(layer, trained, read)
            if not layer.casts:
                fuse_gates(packed.layer.graph_module.graph)
            fuse_attention(packed.layer)
            fuse_rotary(packed.layer)
            program, constants = program_of(packed.layer, packed.trained, read)
            packs.append(packed)
            programs.append(program)
            made.append(constants)
            gradients.append(["gradient" in o for o in program["outputs"]])
        assigned.append(kinds[text])
        arriving = gradients[kinds[text]]
    if not any(arriving):
        raise CaptureError("nothing is trained: the loss depends on no parameter with requires_grad")
    return programs, assigned, packs, made


def trained_inputs(layer: Layer, frozen: set[str], arriving: Iterable[bool]) -> list[bool]:
    """Returns which inputs of a layer need a gradient. `arriving` has it for the values of the layer before."""
    arrived = iter(arriving)
    return [
        next(arrived) if source == "value" else source == "parameter" and name not in frozen
        for source, name in layer.inputs
    ]


def where_gradients_go(layers: list[Layer], frozen: set[str]) -> tuple[set[str], list[list[bool]]]:
    """Returns the parameters that no gradient of the loss reaches, such as those before a detach, and for each layer
    which of its Layer.differentiated outputs one reaches. As in PyTorch, those parameters are not trained, and a call
    of a model without gradients has no backward pass."""
    different: list[torch.Tensor] = []
    known: dict[str, Flow] = {}  # layers of one kind share it
    flows, flags = [], []
    arriving: list[bool] = []
    for layer in layers:
        flags.append(trained_inputs(layer, frozen, arriving))
        text = structure(layer, flags[-1], different)
        if text not in known:
            known[text] = Flow(layer, flags[-1])
        flows.append(known[text])
        arriving = flows[-1].given
    met: set[str] = set()
    reached: set[str] = set()
    reads = [arriving]
    for layer, trained, flow in zip(reversed(layers), reversed(flags), reversed(flows)):
        of_inputs = flow.reached(reads[-1])
        of_parameters = [
            (name, t, r) for (source, name), t, r in zip(layer.inputs, trained, of_inputs) if source == "parameter"
        ]
        met |= {name for name, t, _ in of_parameters if t}
        reached |= {name for name, _, r in of_parameters if r}
        reads.append([r for (source, _), r in zip(layer.inputs, of_inputs) if source == "value"])
    return met - reached, reads[-2::-1]


def program_of(layer: Layer, trained: list[bool], read: list[bool]) -> tuple[dict, list[torch.Tensor]]:
    """The program of a layer, and the constants that tracing made for it. Inputs beyond `trained` need no gradient, and
    outputs that are not `read` get none."""
    with _use_lazy_graph_module(True):  # the code of the graphs is not run
        joint = joint_graph(layer, trained + [False] * (len(layer.inputs) - len(trained)), read)
    return emit(layer, joint, split(joint, layer))


def own_tensors(whole: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the module's tensors that are no weights, by name: buffers, plain attributes, and parameters that are no
    numbers."""
    tensors = dict(whole.named_buffers(remove_duplicate=False))
    tensors.update({name: one for name, one in whole.named_parameters() if not is_number(one)})
    for path, part in whole.named_modules():
        tensors.update(
            {f"{path}.{attribute}": value for attribute, value in vars(part).items() if isinstance(value, torch.Tensor)}
        )
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def own_name(exported: str, own: dict[str, torch.Tensor]) -> str | None:
    name = exported.removeprefix("module.")
    return name if name in own else None
