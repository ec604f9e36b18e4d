"""`capture` is the entry point. A module and one micro-batch become a chain of layers with their F, I and W
programs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from twobp import _native, torch_versions
from twobp.batches import is_positional, too_long

from . import bundle, interpret
from .emit import OTHER_WAY, dtype_name
from .errors import CaptureError, OtherLayers, some, user_line
from .export.draws import Draw
from .export.forward import ROUNDED, WithLoss, as_fields, check_hooks, check_parts, is_number
from .export.four_bits import keep_form
from .export.generic import Dimensions, generic
from .layers import constants_of, described_fields, fitted, kind_names, of_many, of_one, trained_names, without_ones
from .loss.reported import Reported
from .sizes import numbers_if_served
from .state.as_before import AsBefore
from .state.cache import Cache, Entry
from .state.fingerprint import Fingerprint, tensor_digest, walk_over
from .state.guards import Guards, recording
from .trace import Many, Traced, own_tensors, trace
from .verify.dry_run import DryRun, WrongSlices, dry_run, limit
from .verify.reference import KeepParameters, restore

KEPT_VARIANTS = 8  # besides the first; the least recently used is forgotten
MOST_MANY = 8  # captures of a variant for many shapes; further shapes are captured one by one


NOT_ASKED = "it was captured for whole sequences (twobp.Trainer captures it for slices if it is given slices=2 or more)"


@dataclasses.dataclass
class Variant:
    """The module in one state of Python's values: attributes, modes, closures, globals, constants. `walk` and `state`
    are those of walk_over. `reads` has the attributes that its traces read, by the number of the object in the walk,
    and `read` the digests of the module's tensors that its programs hold. `example` is an early batch, and `batches`
    are the sizes of the first ones and of those that needed a capture. `fixed` are dimensions for each of whose sizes
    the module computes something else. `groups` counts attempts to make programs for many shapes, `captures` those that
    worked for a shape or many, and `one_by_one` says why there are none for many."""

    number: int
    walk: Fingerprint
    state: str
    modes: dict[nn.Module, bool]
    shapes: list[dict] = dataclasses.field(default_factory=list)
    reads: dict[int, set[str]] = dataclasses.field(default_factory=dict)
    read: dict[str, str] = dataclasses.field(default_factory=dict)
    guards: Guards = None  # type: ignore[assignment]  # set by guard() before it is in use
    example: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    batches: list[dict[str, torch.Size]] = dataclasses.field(default_factory=list)
    fixed: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    groups: int = 0
    captures: int = 0
    one_by_one: str = ""

    def serving(self, fields: dict[str, torch.Tensor]) -> int | None:
        """Returns the number of the shape whose programs run for a micro-batch, as the runtime chooses it."""
        served = [i for i, shape in enumerate(self.shapes) if numbers_if_served(shape, fields)[0] is not None]
        return min(served, key=lambda i: "sizes" in self.shapes[i], default=None)

    def guard(
        self,
        whole: nn.Module,
        walk: Fingerprint,
        state: str,
        reads: Mapping[int, Iterable[str]] = {},
        read: Mapping[str, str] = {},
    ) -> None:
        """Guards what was read before and now, as it is now."""
        known = (
            {walk.number_of(self.walk.nodes[number].value): names for number, names in self.reads.items()}
            if walk is not self.walk
            else self.reads
        )
        self.reads = {number: {*known.get(number, ()), *reads.get(number, ())} for number in {*known, *reads} - {None}}
        self.walk, self.state = walk, state
        self.read.update(read)
        own = own_tensors(whole)
        self.guards = Guards(walk, self.reads, {id(own[name]) for name in self.read if name in own})

    def is_now(self, whole: nn.Module, state: str) -> bool:
        own = own_tensors(whole)
        return self.state == state and all(
            name in own and tensor_digest(own[name]) == digest for name, digest in self.read.items()
        )


@dataclasses.dataclass
class Captured:
    """A captured module. `graph` has the contents of graph.json, with the shapes of the variant that is in use.
    Parameters, buffers and constants are tensors by name. `cached` says for each shape what the cache did. `variants`
    are in the order of their last use."""

    module: nn.Module
    whole: WithLoss
    loss_reduction: str | None
    graph: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    cache: Cache
    variant: Variant
    variants: list[Variant]
    slices: bool  # whether programs are made for slices of sequences
    trained: set[str] = dataclasses.field(default_factory=set)  # parameters with a gradient
    dry_runs: list[DryRun] = dataclasses.field(default_factory=list)
    cached: list[str] = dataclasses.field(default_factory=list)
    cut_for: dict[str, torch.Size] = dataclasses.field(default_factory=dict)  # the first sizes, as layers stay
    ratios: list[str] = dataclasses.field(default_factory=list)  # of the numbers of targets of means that the loss adds
    draws: list[Draw] = dataclasses.field(default_factory=list)  # of the last shape
    why: str = ""  # the last shape needed a capture of its own, although there are programs for many
    before: Any = None  # an AsBefore, while the module is called

    def add_first(self, batches: list, check: bool, beside: Mapping[str, torch.Tensor] | None) -> None:
        """Captures programs for the first micro-batch. If there are others, of other sizes, one capture is for all of
        them, if that can be."""
        first, *others = (as_fields(self.module, batch) for batch in batches)
        self.cut_for = sizes_of(first)
        self.variant.batches = [sizes_of(one) for one in others]
        self.variant.example = {name: one.clone() for name, one in others[0].items()} if others else {}
        self.add_shape(first, check, beside)

    def add_shape(
        self, batch: Any, check: bool = True, beside: Mapping[str, torch.Tensor] | None = None
    ) -> DryRun | None:
        """Captures programs for a micro-batch that no programs serve. The layers stay. From the second shape on, these
        serve many shapes if they can, unless they are to take slices. `beside` are fields that the programs do without:
        the module has them in the comparison. Raises CaptureError if the module would need other layers for this shape.
        Nothing is changed then."""
        fields = as_fields(self.module, batch)
        self.why = ""
        if self.variant.serving(fields) is not None:
            return None
        check_taken(self.whole, fields)
        check_hooks(self.whole)
        check_parts(self.whole)
        if (errors := self._with_ones(fields, beside, check)) is not None:
            return errors
        failed = ""
        for many, traced_fields in self._many(fields) if self._may_count(fields) else ():
            try:
                return self._add(fields, check, beside, many, traced_fields)
            except NotServed as reason:
                failed = str(reason)
            except Exception as error:  # also of torch, which does not take symbols everywhere
                failed = (str(error).splitlines() or [type(error).__name__])[0]
                if not any("sizes" in shape for shape in self.variant.shapes):
                    self.variant.one_by_one = failed
                break
        self.why = failed or self.why
        return self._add(fields, check, beside, None, fields)

    def _may_count(self, fields: dict[str, torch.Tensor]) -> bool:
        """Returns False if programs for many shapes know that no target of the batch counts. Nothing can be compared
        then, so that the batch gets programs of its own."""
        for number, shape in enumerate(self.variant.shapes):
            relaxed = without_ones(shape, fields) if "sizes" in shape else None
            if relaxed and numbers_if_served(relaxed, fields)[0] is not None:
                chain = self._chain(number)
                chain.shape = relaxed
                return chain.count(fields) > 0
        return True

    def _many(self, fields: dict[str, torch.Tensor]) -> Iterable[tuple[Many, dict[str, torch.Tensor]]]:
        """Yields what programs for many shapes may be captured for, with the fields for it: generic ones, or if their
        programs do not serve the batch, the batch."""
        variant = self.variant
        if not variant.batches or variant.one_by_one:
            return
        script = self._script
        if self.slices or script and script.one_by_one:
            self.why = "programs over slices are for sequences of one length" if self.slices else script.one_by_one
            return
        if variant.groups >= MOST_MANY:
            self.why = f"the module was captured for {MOST_MANY} groups of shapes"
            return
        if many := [shape for shape in variant.shapes if "sizes" in shape]:
            own = getattr(self.module, "not_sized", ())  # of another course
            alike = [one for one in many if all(len(one["fields"][n]["shape"]) == fields[n].dim() for n in own)]
            reasons = "; or ".join(numbers_if_served(shape, fields)[1] for shape in alike)
            self.why = (
                f"the programs so far are for {reasons}" if alike else "Python computes with other values than before"
            )
        for first in (True, False):
            which, differs = self._which(fields)
            if not differs:
                self.why = f"the module computes something else for each {self._fixed()}"
                return
            own = generic(self.module, fields, which) if first else fields
            if first and own is not None and script:
                own = script.prepared(own, fields)
            if own is not None and variant.serving(own) is None:
                variant.groups += 1
                sizes = sizes_of(fields)
                first_sizes = {n: one for n, one in self.cut_for.items() if len(one) == len(sizes.get(n, ()))}
                yield Many(which, sizes, {**sizes, **first_sizes}), own

    @property
    def _script(self) -> Any:
        """Returns the Script of a module whose Python may take another course for other sizes, or None."""
        return getattr(self.module, "python_course", None)

    def _which(self, fields: dict[str, torch.Tensor]) -> tuple[Dimensions, bool]:
        """Returns the dimensions whose sizes may differ between batches: samples, positions of ids, and those that have
        differed. Also returns whether one of these has differed between batches of the same sizes in fixed dimensions:
        only then can programs for many shapes serve several."""
        which: dict[str, list[int]] = {}
        differs = False
        fixed = self.variant.fixed
        alike = [one for one in self.variant.batches if all(one[n][d] == fields[n].shape[d] for n, d in fixed)]
        fixed_fields = getattr(self.module, "not_sized", ())
        for name, field in fields.items():
            seen = [one[name] for one in alike if len(one[name]) == field.dim()]
            which[name] = []
            for dim, size in enumerate(field.shape if name not in fixed_fields else ()):
                changed = any(one[dim] != size for one in seen)
                usual = dim == 0 or dim == 1 and not field.is_floating_point()
                if (changed or usual) and (name, dim) not in fixed:
                    which[name].append(dim)
                    differs = differs or changed
        return which, differs

    def _fixed(self) -> str:
        return " and ".join(f"{name}.size({dim})" for name, dim in sorted(self.variant.fixed))

    def _with_ones(
        self, fields: dict[str, torch.Tensor], beside: Mapping[str, torch.Tensor] | None, check: bool
    ) -> DryRun | None:
        """Symbols of torch are at least 2. Appends programs for many shapes without this guard, if they are right for
        this batch, which has a size of 1. Returns None if there are none."""
        for shape in self.variant.shapes:
            if "sizes" not in shape or numbers_if_served({**shape, "guards": []}, fields)[0] is None:
                continue
            relaxed = without_ones(shape, fields)
            if not relaxed or numbers_if_served(relaxed, fields)[0] is None:
                continue
            known = len(self.variant.shapes)
            self.variant.shapes.append(relaxed)
            try:
                if check and self._chain().count(fields) == 0:
                    raise CaptureError("no target counts")
                with self._in_modes(self.variant), self.leaving_as_before(self.variant.walk):
                    self.dry_runs.append(self._dry_run(fields, beside))
            except CaptureError:
                del self.variant.shapes[known:]
                continue
            self.cached.append("one more comparison")
            return self.dry_runs[-1]
        return None

    def _add(
        self,
        fields: dict[str, torch.Tensor],
        check: bool,
        beside: Mapping[str, torch.Tensor] | None,
        many: Many | None,
        traced_fields: dict[str, torch.Tensor],
    ) -> DryRun | None:
        """Captures for `fields`, by a trace of `traced_fields`. `many`: for many shapes."""
        constants, known = dict(self.constants), len(self.variant.shapes)
        asked = Asked(fields, traced_fields, many, beside, check)
        try:
            with self._in_modes(self.variant):
                walk, state = walk_over(self.whole)
                entry = self.cache.entry(
                    (walk, state),
                    {**traced_fields, **{f"beside {n}": t for n, t in (beside or {}).items()}},
                    self.loss_reduction,
                    check,
                    self.slices,
                    many.which if many else None,
                )
                entries = [entry, entry.of_buffers(self.buffers)] if self.buffers else [entry]
                with self.leaving_as_before(walk):
                    for entry in entries:
                        if kept := self._from_cache(entry, asked):
                            break
                        self._forget(known, constants)
                    traced, errors, entry = kept or self._new(walk, entries, asked)
                self.variant.guard(self.whole, walk, state, traced.reads, traced.read)
        except BaseException as error:
            self._forget(known, constants)
            if (
                many is None
                and isinstance(error, CaptureError)
                and error.__cause__ is not None
                and (own := self._own_failure(fields)) is not None
            ):
                what, failure = own
                sizes = ", ".join(
                    f"{name}: {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in fields.items()
                )
                raise CaptureError(
                    f"{what} fails on this batch: {type(failure).__name__}: "
                    f"{str(failure).splitlines()[0] if str(failure) else ''}"
                    f"{user_line(failure)}. The batch is {{{sizes}}}{too_long(self.whole, [fields])}"
                ) from failure
            raise
        if traced.course:
            self._script.serve(traced.course, self.variant.shapes[-1]["sizes"], fields)
        self.cached.append(entry.state)
        if not self.variant.batches and not self.slices:
            self.variant.example = {name: one.clone() for name, one in fields.items()}
        self.variant.captures += 1
        self.variant.batches.append(sizes_of(fields))
        if errors is None:
            return None
        self.dry_runs.append(DryRun(**errors))
        return self.dry_runs[-1]

    def _from_cache(self, entry: Entry, asked: Asked) -> tuple[Traced, dict | None, Entry] | None:
        """Appends the programs of an entry. Returns None if there is none, or if its programs do not compute what the
        module does."""
        found = entry.read(self.whole)
        if found is None or self.buffers.keys() & found[0].read.keys():
            return None
        traced, errors = found
        if asked.many is None and not interpret.passes(traced.targets, asked.fields):
            return None  # another example decided what its programs take from fields
        try:
            self._append(traced, asked)
            if self._to_compare(asked.fields, asked.check) and entry.is_new_here():
                errors = self._compared(asked)
        except (CaptureError, WrongSlices):
            return None
        return traced, errors, entry

    def _new(self, walk: Fingerprint, entries: list[Entry], asked: Asked) -> tuple[Traced, dict | None, Entry]:
        """Appends new programs. The last entry is for those that only read buffers which training changes in other
        variants."""
        constants, known, errors = dict(self.constants), len(self.variant.shapes), None
        traced = self._trace(walk, asked, "" if self.slices else NOT_ASKED)
        self._append(traced, asked)
        compared = self._to_compare(asked.fields, asked.check)
        if compared:
            try:
                errors = self._compared(asked)
            except WrongSlices as reason:  # whole sequences train
                traced = self._trace(walk, asked, str(reason))
                self._forget(known, constants)
                self._append(traced, asked)
                errors = self._compared(asked)
        entry = entries[0] if self.buffers.keys() <= set(traced.buffers) else entries[-1]
        if compared == asked.check:
            entry.write(traced, errors)
        return traced, errors, entry

    def _compared(self, asked: Asked) -> dict:
        """Compares the last programs with the module. If they are for many shapes, also for an early batch."""
        errors = self._dry_run(asked.fields, asked.beside, self.shape_number(asked.fields))
        example = self.variant.example
        served = asked.many and example and numbers_if_served(self.variant.shapes[-1], example)[0] is not None
        if served and self._chain().count(example) > 0:
            self._dry_run(example)
        _native.release_memory()  # of its gradients
        return dataclasses.asdict(errors)

    def _to_compare(self, fields: dict[str, torch.Tensor], check: bool) -> bool:
        """Without a target, the module's own loss is no number. The first shape of all is compared in any case."""
        return check and (len(self.variants) == len(self.variant.shapes) == 1 or self._chain().count(fields) > 0)

    def _forget(self, known: int, constants: dict[str, torch.Tensor]) -> None:
        """Removes all shapes but the first `known`. `constants` are those before."""
        del self.variant.shapes[known:]
        self.constants = dict(constants)
        if not any(one.shapes for one in self.variants):
            self.graph["layers"] = []

    def follow(self, training: bool = True) -> str | None:
        """If a value that the programs depend on has changed, uses the variant of the module with the new values, whose
        shapes may still have to be added. Returns the name of what changed. In evaluation, the modes of the module's
        parts are those of the last training step."""
        self.step_back()
        with self._in_modes(self.variant) if not training else contextlib.nullcontext():
            if (change := self.variant.guards.change()) is None:
                return None
            if training and not self.module.training:
                raise CaptureError(
                    "the module is in evaluation mode, as module.eval() leaves it. Call module.train() before a step, "
                    "and eval() of the parts that are to stay so"
                )
            known = next(
                (one for one in self.variants if one is not self.variant and one.guards.change() is None), None
            )
            if known is None:
                walk, state = walk_over(self.whole)
                if known := next((one for one in self.variants if one.is_now(self.whole, state)), None):
                    known.guard(self.whole, walk, state)
            self.use(known or Variant(max(one.number for one in self.variants) + 1, walk, state, modes_of(self.whole)))
        return change

    def use(self, variant: Variant) -> None:
        self.variants = [one for one in self.variants if one is not variant] + [variant]
        self.variant, self.graph["shapes"] = variant, variant.shapes

    def step_back(self) -> None:
        """Uses the variant before the one whose capture failed, if it did."""
        if not self.variant.shapes:
            self.variants.remove(self.variant)
            self.use(self.variants[-1])

    def forget_variants(self) -> list[int]:
        """Forgets the variants that were not used for long, and returns their numbers."""
        forgotten = [one for one in self.variants if one.number > 0][:-KEPT_VARIANTS]
        self.variants = [one for one in self.variants if one not in forgotten]
        if forgotten:
            used = constants_of(self.graph["layers"], [shape for one in self.variants for shape in one.shapes])
            self.constants = {name: tensor for name, tensor in self.constants.items() if name in used}
        return [one.number for one in forgotten]

    def constants_in_use(self) -> dict[str, torch.Tensor]:
        """Returns the constants of the variant in use."""
        used = constants_of(self.graph["layers"], self.graph["shapes"])
        return {name: tensor for name, tensor in self.constants.items() if name in used}

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the bundle and, for a Hugging Face module, its configuration."""
        bundle.write(folder, self.graph, {**self.parameters, **self.buffers}, self.constants_in_use(), self.module)

    @contextlib.contextmanager
    def _in_modes(self, variant: Variant):
        """Every capture of a variant sets the parts of the module to the modes that they had when it was met."""
        now = modes_of(self.whole)
        try:
            for part, mode in variant.modes.items():
                part.training = mode
            yield
        finally:
            for part, mode in now.items():
                part.training = mode

    @contextlib.contextmanager
    def leaving_as_before(self, walk: Fingerprint):
        """Within this context, the module may be called."""
        try:
            with AsBefore(walk) as self.before:
                yield
        finally:
            self.before = None

    def _own_failure(self, fields: dict[str, torch.Tensor]) -> tuple[str, Exception] | None:
        """Returns the error that the module itself or the loss function raises for a batch, without twobp, and which of
        them does. The module is not changed."""
        what = "the module itself"
        state = {name: b.detach().clone() for name, b in self.whole.named_buffers()}
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                KeepParameters(self.parameters),
                AsBefore(walk_over(self.whole)[0]),
            ):
                output = self.whole.output(dict(fields))
                if self.whole.loss_fn is not None:
                    what = "loss_fn(output, batch), with the module's output and the whole batch,"
                    self.whole.loss_fn(output, dict(fields))
        except CaptureError:
            pass
        except Exception as failure:
            return what, failure
        finally:
            restore(self.whole, state)
        return None

    def _trace(self, walk: Fingerprint, asked: Asked, no_slices: str) -> Traced:
        frozen = {name for name, p in self.parameters.items() if not p.requires_grad}
        with recording(walk) as reads, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw SymInt value")  # of torch, about sizes as arguments
            traced = trace(
                self.whole, asked.traced, self.loss_reduction, frozen, no_slices, self.before, self.buffers, asked.many
            )
        traced.reads = {number: sorted(names) for number, names in reads.items() if names}
        return traced

    def _append(self, traced: Traced, asked: Asked) -> None:
        """Raises CaptureError if the programs do not fit the layers, and NotServed if they do not serve the batch."""
        graph, self.draws = self.graph, [Draw(*draw) for draw in traced.draws]
        if self.draws and getattr(self.module, "evaluates", False):
            raise CaptureError("the module draws random numbers in evaluation mode")
        names = self._named(traced.names, traced.constants)
        lists = [[i if isinstance(i, dict) else names[i] for i in layer["constants"]] for layer in traced.layers]
        slices = {"positions": traced.positions} if traced.positions else {"no_slices": traced.no_slices}
        if graph["layers"]:
            traced = fitted(graph["layers"], traced)
        targets, ratios = dict(traced.targets), traced.targets["ratios"]
        del targets["ratios"]
        if graph["layers"] and ratios != self.ratios:
            raise CaptureError(
                f"the loss adds means over numbers of targets whose ratios are {', '.join(self.ratios)} for the first "
                f"shape of batch, but {', '.join(ratios)} for this one, so that it is no mean over the global batch. "
                "Let each have the same number for each sample, or set loss_reduction"
            )
        self.ratios = ratios
        shape = {
            "fields": described_fields(asked.fields),
            **slices,
            **of_many(traced.many, names),
            "programs": traced.programs,
            "targets": targets,
        }
        if asked.many:
            shape = self._served(shape, asked)
            for fields in (asked.traced, asked.fields) if traced.course else ():
                if why := self._script.why_not(traced.course, shape["sizes"], fields):
                    raise CaptureError(why)
        if not graph["layers"]:
            first, own = self._of_one(shape, lists, asked.fields) if asked.many else (shape, lists)
            self._begin(traced, own)
            graph["shapes"].append(first)
            self.trained = trained_names(graph["layers"], first)
        if not any(one is shape for one in graph["shapes"]):
            if different := self.trained ^ trained_names(
                graph["layers"], {**shape, "kinds": [layer["kind"] for layer in traced.layers]}
            ):
                raise OtherLayers(f"other parameters are trained then: {some(different)}")
            if [layer["kind"] for layer in traced.layers] != [layer["kind"] for layer in graph["layers"]]:
                shape["kinds"] = [layer["kind"] for layer in traced.layers]
            shape["constants"] = lists
            graph["shapes"].append(shape)

    def _begin(self, traced: Traced, constants: list[list]) -> None:
        """Takes the layers of the first programs, whose constants these are."""
        graph = self.graph
        graph["layers"] = [{**layer, "constants": own} for layer, own in zip(traced.layers, constants)]
        graph["kinds"] = kind_names(
            [layer["name"] for layer in traced.layers], [layer["kind"] for layer in traced.layers]
        )
        buffers = {name.removeprefix("module."): b for name, b in self.whole.named_buffers()}
        self.buffers = {name: buffers[name] for name in traced.buffers}
        for name, factor in traced.factors.items():
            graph["parameters"][name].update(factor)
        graph["buffers"] = {n: {"dtype": dtype_name(b.dtype), "shape": list(b.shape)} for n, b in self.buffers.items()}

    def _of_one(self, shape: dict, lists: list[list], fields: dict[str, torch.Tensor]) -> tuple[dict, list[list]]:
        """Returns what a shape for many is for these fields, and the constants of its layers: a bundle begins with a
        shape for one."""
        one, tables = of_one(shape, fields, self.constants)
        names = self._named([None] * len(tables), tables)
        return one, [[names[i["table"]] if isinstance(i, dict) else i for i in own] for own in lists]

    def _served(self, shape: dict, asked: Asked) -> dict:
        """Returns the shape, without guards against those sizes of 1 that the batch has. Raises NotServed if it does
        not serve the batch."""
        for name, described in shape["fields"].items():
            for dim in asked.many.which[name] if asked.many else ():
                if not isinstance(described["shape"][dim], dict):
                    self.variant.fixed.add((name, dim))
        shape = without_ones(shape, asked.fields) or shape
        numbers, reason = numbers_if_served(shape, asked.fields)
        if numbers is None:
            fixed = f"the module computes something else for each {self._fixed()}"
            raise NotServed(fixed if self.variant.fixed else f"the programs are for {reason}")
        return shape

    def _named(self, own: list, tensors: list[torch.Tensor]) -> list[str]:
        """Adds constants. Tensors of the module keep their names. The others, and those that have had other values,
        are named c0, c1 and so on. Equal ones share their memory."""
        known = {tensor_digest(tensor): name for name, tensor in reversed(self.constants.items())}
        names = []
        for name, tensor in zip(own, tensors):
            digest = tensor_digest(tensor)
            if name is None or name in self.constants and tensor_digest(self.constants[name]) != digest:
                name = known.get(digest) or next(f"c{i}" for i in itertools.count() if f"c{i}" not in self.constants)
            if name not in self.constants:
                self.constants[name] = self.constants[known[digest]] if digest in known else tensor
            known.setdefault(digest, name)
            names.append(name)
        return names

    def _chain(self, shape: int = -1) -> interpret.Chain:
        """The programs of a shape; -1: the last."""
        tensors = {n: t.detach() for n, t in {**self.parameters, **self.buffers}.items()}
        return interpret.Chain(self.graph, shape, tensors, self.constants)

    def shape_number(self, fields: dict[str, torch.Tensor]) -> int:
        return cast(int, self.variant.serving(fields))  # it has programs

    @property
    def only_trains(self) -> bool:
        """Whether the module says that its programs are not for evaluation."""
        return getattr(self.module, "only_trains", False)

    def limit(self) -> float:
        """Returns the largest relative error that is rounding."""
        return limit(self)

    def _dry_run(
        self, fields: dict[str, torch.Tensor], beside: Mapping[str, torch.Tensor] | None = None, shape: int = -1
    ) -> DryRun:
        return dry_run(self, self._chain(shape), fields, beside)


def check_taken(whole: WithLoss, fields: dict[str, torch.Tensor]) -> None:
    """Raises CaptureError for fields that nothing would read."""
    parameters = inspect.signature(whole.module.forward).parameters.values()
    unknown = sorted(fields.keys() - whole.takes)
    if whole.loss_fn is None and unknown and all(p.kind != p.VAR_KEYWORD for p in parameters):
        raise CaptureError(
            f"the module's forward takes {', '.join(sorted(whole.takes))}, but not the batch's {', '.join(unknown)}, "
            "and no loss_fn is given, which could read that. Give loss_fn=lambda output, batch: ..., or leave it out"
        )


class NotServed(Exception):
    """Programs for many shapes do not serve a batch. The message gives the reason."""


@dataclasses.dataclass
class Asked:
    """What is captured: programs for `fields`, or for `many` shapes, by a trace of `traced`."""

    fields: dict[str, torch.Tensor]
    traced: dict[str, torch.Tensor]
    many: Many | None
    beside: Mapping[str, torch.Tensor] | None
    check: bool


def sizes_of(fields: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: one.shape for name, one in fields.items()}


def modes_of(whole: nn.Module) -> dict[nn.Module, bool]:
    return {part: part.training for part in whole.modules()}


def capture(
    module: nn.Module,
    example: Any,
    *,
    loss_fn: Callable | None = None,
    loss_reduction: str | None = None,
    check: bool = True,
    cache: bool | str | os.PathLike = True,
    beside: Mapping[str, torch.Tensor] | None = None,
    slices: bool = True,
    precision: str = "fp32",
) -> Captured:
    """Captures `module` for micro-batches like `example` (a dict of tensors, or a tuple). For a list of micro-batches
    of other sizes, programs are for all sizes at once. The module must be in training mode. Parts of it may be in
    evaluation mode and stay so.

    loss_fn(output, batch) gives the loss. Without it, the module must. loss_reduction ("mean" or "sum" over a
    micro-batch's samples, or "micro_batch": each counts alike) is needed only if capture does not recognise the mean
    in the loss. With `check`, the programs run once and are compared with autograd. The errors are in `dry_runs`.
    `cache` is False, or another folder than the user's, for repeated captures (docs/python.md). `beside` is as for
    `Captured.add_shape`. Without `slices`, programs run over whole sequences alone, and capture is faster. With the
    `precision` "bf16" or "fp16", they compute as under torch.autocast. Raises
    CaptureError, which says what cannot be captured, where, and what to do. The module is not changed."""
    if reason := torch_versions.unknown():
        raise CaptureError(reason)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"capture takes a torch.nn.Module, not {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{repr(name) + ' of the module' if name else 'the module'} is TorchScript, which torch.export does "
                "not take. Give the Python module that it was made of"
            )
    if hasattr(module, "_orig_mod") or isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(f"the module is wrapped in {type(module).__name__}. Give the module itself")
    if isinstance(loss_fn, nn.Module) and (
        own := next((name for name, p in loss_fn.named_parameters() if p.requires_grad), None)
    ):
        raise CaptureError(
            f"loss_fn has the parameter '{own}', which is no part of the module, so that its trained values would be "
            "lost. Freeze it, or let the module hold it and return the loss"
        )
    check_precision(module, precision)
    keep_form(module)
    whole = WithLoss(module, loss_fn, precision)
    for name, tensor in itertools.chain(whole.named_parameters(), whole.named_buffers()):
        name = name.removeprefix("module.")
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"'{name}' of the module has no shape yet. Call the module once on an example before")
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"'{name}' of the module is on {tensor.device}. Move the module to the CPU: module.to(\"cpu\"), or "
                'to_empty(device="cpu") '
                "from the meta device"
            )
    whole.training = module.training
    parameters: dict[str, torch.Tensor] = {
        name.removeprefix("module."): p for name, p in whole.named_parameters() if is_number(p)
    }
    dtypes = {p.dtype for p in parameters.values() if p.requires_grad}
    if not dtypes:
        raise CaptureError("nothing is trained: the module has no parameter with requires_grad")
    graph: dict[str, Any] = {
        "format": bundle.FORMAT,
        "version": bundle.VERSION,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "module": f"{type(module).__module__.split('.')[0]}.{type(module).__name__}",
        "dtype": dtype_name(next(iter(dtypes))),
        **({"precision": precision} if precision in ROUNDED else {}),
        "layers": [],
        "kinds": [],
        "parameters": {
            n: {"dtype": dtype_name(p.dtype), "shape": list(p.shape), "frozen": not p.requires_grad}
            for n, p in parameters.items()
        },
        "buffers": {},
        "shapes": [],
    }
    if not module.training:
        raise CaptureError(
            "the module is in evaluation mode; capture takes it in training mode. Call module.train() first"
        )
    first = Variant(0, Fingerprint(), "", modes_of(whole), graph["shapes"])
    captured = Captured(module, whole, loss_reduction, graph, parameters, {}, {}, Cache(cache), first, [first], slices)
    try:
        several = isinstance(example, list) and not is_positional(example)
        captured.add_first(example if several else [example], check, beside)
    except _native.Error:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CaptureError(
            "the module uses something that capture does not know, and fails with "
            f"{type(error).__name__}{user_line(error)}: {reason}. {OTHER_WAY}"
        ) from error
    for name in graph["parameters"].keys() - captured.trained:
        graph["parameters"][name]["frozen"] = True  # as in PyTorch, a parameter without a gradient is not changed
    if (
        isinstance(loss_fn, nn.Module)
        and not isinstance(loss_fn, Reported)
        and (own := next((name for name in captured.buffers if name.startswith("loss_fn.")), None))
    ):
        raise CaptureError(
            f"loss_fn changes its buffer '{own.removeprefix('loss_fn.')}', which is no part of the module. Let the "
            "module hold it and return the loss"
        )
    return captured


def check_precision(module: nn.Module, precision: str) -> None:
    if precision not in ("fp32", *ROUNDED):
        raise CaptureError(f"precision is {precision!r}, but must be 'fp32', 'bf16' or 'fp16'")
    own = {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}
    if precision in ROUNDED and own:
        raise CaptureError(
            f"precision is {precision!r}, but the module has parameters in {dtype_name(own.pop())}, which autocast "
            "leaves as they are. Give a module in float32: module.float(), or leave precision out"
        )
