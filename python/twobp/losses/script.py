"""What is known of a trainer's compute_loss: which modules it calls, which courses its Python takes for which shapes of
micro-batch, and which of the outcomes of its comparisons change the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from twobp import Error
from twobp.capture import symbols

from .course import At, Outcome, Take, Template, is_traced
from .flow import OtherCourse, Real, Tracing, Unseen, Walk, module_calls, packages_read_once, replaced
from .heads import whole_heads
from .numbers import TOO_LARGE, digest, is_too_large, nested
from .shadow import Kept, changed, shadow_of

T = torch.Tensor
ITEMS, SCALE, NUMBER = STEP = "_items", "_scale", "_number"  # scalars beside the fields of the batch
COURSE, SIZED = "_course", "_sized"  # the first has as many dimensions as the number of the course
SMALL = 1 << 20  # elements up to which modules return zeros: that takes less time than tensors without values
MOST_COURSES = 8  # each is a number of dimensions, of which a bundle allows 8
MOST_TEMPLATES = 3  # courses with programs for many shapes; further ones have programs for each shape
ROW = 256  # numbers of a micro-batch, at least
PLAIN = (int, float, bool, str, type(None))
Returns = Callable[[Any], tuple[list[T], Any]]  # from what compute_loss returns beside the loss to its tensors and form


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that a module returned."""

    shape: tuple
    dtype: torch.dtype


@dataclasses.dataclass
class Call:
    """A call of a module, and what it returned, with a Value for each tensor."""

    module: nn.Module
    output: Any
    tree: Any


@dataclasses.dataclass
class Run:
    """What a run for one shape of micro-batch would do: its calls of modules, the numbers that it takes, by key, and
    outcomes of comparisons that are to be these."""

    calls: list[Call]
    values: dict[str, Any]
    outcomes: dict[str, bool]

    def value(self, name: str, tensor: T) -> Any:
        if name not in self.values:
            raise Unseen(name)
        return resized(self.values[name], tuple(map(int, tensor.shape)), name)


@dataclasses.dataclass
class Course:
    """`signatures` are those of its shapes. A template has those of all shapes for which there are programs, and a plan
    for one of them."""

    signatures: dict[tuple, str] = dataclasses.field(default_factory=dict)
    templates: list[tuple[Template, Plan]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Plan:
    """A course of compute_loss, for one shape of micro-batch. `fields` are all of them. `kept` are tensors that it
    leaves in attributes of the trainer."""

    course: int
    fields: dict[str, T]
    others: list
    tree: Any
    takes: dict[str, Take]
    outcomes: dict[str, Outcome]
    sized: dict[str, tuple[list[str], Any]]
    kept: list[Take]
    loss: str
    guarded: list[str]
    items: T | None
    run: Run = dataclasses.field(default_factory=lambda: Run([], {}, {}))
    notes: list[str] = dataclasses.field(default_factory=list)
    form: Any = None  # of what compute_loss returns beside the loss

    @property
    def in_row(self) -> list[Take]:
        return [one for one in self.takes.values() if not one.known] + self.kept

    def too_large(self, row: T) -> str | None:
        """Returns the key of a whole number in a row that a float64 may not have."""
        for key, take in [*self.takes.items(), *(("in an attribute", one) for one in self.kept)]:
            numbers = row[take.begin : take.begin + take.size]
            if not take.known and not take.dtype.is_floating_point and is_too_large(numbers):
                return TOO_LARGE.format(key)
        return None

    @property
    def guards_begin(self) -> int:
        """The place of the guards in a row, behind the loss and what Python takes (LossModule)."""
        return 1 + sum(one.size for one in self.in_row)


def is_given(name: str) -> bool:
    """Whether a field is of the batch itself."""
    return name not in (*STEP, COURSE) and not name.startswith(SIZED)


def shapes_of(fields: Mapping[str, T]) -> tuple:
    return tuple(
        sorted(
            (name, str(one.dtype), tuple(symbols.hint(one.shape))) for name, one in fields.items() if name not in STEP
        )
    )


class Script:
    """compute_loss of a trainer. `own` says that it is not the one of transformers, whose course never changes."""

    def __init__(
        self, trainer: Any, own: bool, refresh: Callable[[], None] = lambda: None, returns: Returns | None = None
    ):
        """`refresh` gives the model its trained weights. `returns` finds the tensors in what compute_loss returns
        beside the loss; None: it is not asked for these."""
        self.trainer, self.own, self._refresh, self.returns = trainer, own, refresh, returns
        self.modules: dict[str, nn.Module] = {"model": trainer.model}
        self.names: dict[int, str] = {}
        self.signatures: dict[str, str] = {}
        self._runs: dict[tuple, list[Run]] = {}  # by shapes
        self._courses: list[Course] = []
        self._plans: dict[tuple | int, Plan] = {}  # by shapes, or by course if it is the same for all shapes
        self._placed: list[T] = []  # in attributes of the trainer, by the last step
        self._inside: dict[int, tuple[list[nn.Module], list[nn.Module]]] = {}  # parts, and those with adapters
        self._statuses: dict[tuple[int, str], Any] = {}  # of adapters, by model and state
        self._switched: dict[tuple, tuple] = {}  # what switching adapters on or off does
        self._described: dict = {}  # the course of the last trace
        self.one_by_one = ""  # why there are no programs for many shapes
        self._fake = FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True), allow_non_fake_inputs=True)

    # The modules that compute_loss calls.

    def is_part(self, module: nn.Module) -> bool:
        return id(module) in self._parts

    def _add_modules(self, called: list[nn.Module]) -> None:
        for module in called:
            if self.is_part(module):
                continue
            places = vars(self.trainer).items()
            name = next((name for name, one in places if one is module), f"module{len(self.modules)}")
            self.modules[name] = module
            self._look()

    def _look(self) -> None:
        self._parts = {
            id(part): f"{name}.{path}" for name, m in self.modules.items() for path, part in m.named_modules()
        }
        self._inside.clear()
        self._switched.clear()
        self.names = self._tensors()

    def _inside_of(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """Returns the parts of a module, and those with adapters."""
        if id(module) not in self._inside:
            parts = [one for _, one in module.named_modules()]  # not modules(), which asks this method
            self._inside[id(module)] = parts, [one for one in parts if hasattr(one, "_active_adapter")]
        return self._inside[id(module)]

    def _state_of(self, module: nn.Module) -> str:
        """Describes what compute_loss may change about a module before it calls it: modes, and adapters of PEFT."""
        parts, adapters = self._inside_of(module)
        return digest(
            [one.training for one in parts],
            [(getattr(one, "_disable_adapters", None), one._active_adapter) for one in adapters],
        )

    @contextlib.contextmanager
    def _parts_looked_at_once(self, mode: Walk):
        """TRL, PEFT and accelerate look at every part of a model several times in each loss, which takes longer than
        the rest of it."""

        def status_once(status):
            def of(model):
                if sys._getframe(1).f_code.co_name != "disable_adapter":  # which reads no more than _state_of has
                    return status(model)
                key = id(model), self._state_of(model)
                if key not in self._statuses:
                    self._statuses[key] = status(model)
                return self._statuses[key]

            return of

        def modules_once(modules):
            def of(module):
                return iter(self._inside_of(module)[0]) if self.is_part(module) else modules(module)

            return of

        peft, tuners = (sys.modules.get(f"peft.{name}") for name in ("peft_model", "tuners.tuners_utils"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(nn.Module, "modules", modules_once))
            stack.enter_context(replaced(peft and peft.PeftModel, "get_model_status", status_once))
            switch = functools.partial(self._switching_at_once, mode)
            stack.enter_context(replaced(tuners and tuners.BaseTuner, "_enable_adapter_layers", switch))
            yield

    def _switching_at_once(self, mode: Walk, switch: Callable) -> Callable:
        """PEFT calls requires_grad_ for each weight of an adapter. What that does is done again without these calls."""

        def of(tuner, enabled=True):
            layers = self._inside_of(tuner)[1]
            key = id(tuner), enabled, str([one._active_adapter for one in layers])
            if key not in self._switched:
                notes, asked = len(mode.notes), len(mode.asked)
                switch(tuner, enabled)
                after = [(vars(one), one._disable_adapters, one._active_adapter) for one in layers]
                own = {type(one).enable_adapters.__module__ for one in layers} <= {switch.__module__}
                if own:
                    self._switched[key] = mode.notes[notes:], mode.asked[asked:], after
                return
            notes, asked, after = self._switched[key]
            mode.notes += notes
            with torch._C.DisableTorchFunction():
                for tensor, *wanted in asked:
                    tensor.requires_grad_(*wanted)
            for attributes, disabled, active in after:
                attributes.update(_disable_adapters=disabled, _active_adapter=active)

        return of

    def _tensors(self) -> dict[int, str]:
        return {
            id(tensor): f"{name}.{path}"
            for name, module in self.modules.items()
            for path, tensor in (*module.named_parameters(), *module.named_buffers())
        }

    # Runs.

    def compute(self, trainer: Any, inputs: dict, items: T | None) -> tuple[T, list[T], Any]:
        """Returns the loss, the other tensors that compute_loss returns, and their form."""
        kind = type(self.trainer)
        method = vars(trainer).get("compute_loss") or kind.compute_loss.__get__(trainer)
        predictions, form = list[T](), None
        if self.returns is None:
            loss = method(self.trainer.model, inputs, num_items_in_batch=items)
        else:
            loss, outputs = method(self.trainer.model, inputs, return_outputs=True, num_items_in_batch=items)
            predictions, form = self.returns(outputs)
        if not isinstance(loss, T) or loss.dim() != 0:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, T) else f"a {type(loss).__name__}"
            raise Error(f"{kind.__name__}.compute_loss returned {found}, but must return one scalar: loss.mean()")
        return loss, predictions, form

    def _made(self, mode: Any, loss: T, predictions: list[T]) -> str:
        """Returns how the loss and all predictions were made."""
        how = mode.how_of(loss)
        return mode.digest(how, *map(mode.how_of, predictions)) if predictions else how

    def inputs(self, fields: Mapping[str, T], others: list, tree: Any) -> dict:
        tensors = iter([one for name, one in fields.items() if is_given(name)])
        return pytree.tree_unflatten([next(tensors) if one is T else one for one in others], tree)

    def real(self, fields: Mapping[str, T], others: list, tree: Any, items: T | None) -> None:
        """Runs compute_loss as it is, for what its modules return and the numbers that it takes."""
        calls: list[Call] = []
        mode = Real()

        def around(module, call, args, kwargs):
            output = call(*args, **kwargs)
            leaves, spec = pytree.tree_flatten(output)
            values = [
                Value(tuple(one.shape), one.dtype) if isinstance(one, T) else one if isinstance(one, PLAIN) else None
                for one in leaves
            ]
            calls.append(Call(module, values, spec))
            return output

        self._look()
        self._refresh()
        with Kept(self.trainer), torch.no_grad(), module_calls(self.calls_of, around) as depth, refusing_generation():
            mode.depth = depth
            with mode:
                self.compute(shadow_of(self.trainer), self.inputs(fields, others, tree), items)
        self._add_modules([one.module for one in calls])
        runs = self._runs.setdefault(shapes_of(fields), [])
        runs.append(Run(calls, {**mode.values, **(runs[-1].values if runs else {})}, runs[-1].outcomes if runs else {}))

    def calls_of(self, module: nn.Module) -> bool:
        return self.is_part(module) or next(module.parameters(), None) is not None

    def _walk(self, trainer: Any, calls, fields, others, tree, items, values, forced=None) -> tuple[Walk, str, list[T]]:
        """Returns the walk, how the loss was made, and the tensors that stay in attributes of the trainer."""
        names = {**self.names, **{id(one): f"field {name}" for name, one in fields.items()}}
        if items is not None:
            names[id(items)] = "num_items_in_batch"
        mode = Walk(names, values, forced)
        size = sum(torch.Size(v.shape).numel() for one in calls for v in one.output if isinstance(v, Value))
        expected = iter(calls)

        def answer(module, call, args, kwargs):
            known = next(expected, None)
            if known is None or known.module is not module or not self.is_part(module):
                before = type(known.module).__name__ if known else "nothing"
                raise OtherCourse(f"it calls {type(module).__name__} where it called {before}")
            made = contextlib.nullcontext() if size < SMALL else self._fake
            with made, mode.unrecorded():
                tensors = [torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, Value) else v for v in known.output]
            output = pytree.tree_unflatten(tensors, known.tree)
            mode.answered(self._parts[id(module)], self._state_of(module), args, kwargs, output)
            return output

        compiled = any(one._compiled_call_impl for one in self.modules.values())
        calls = module_calls(self.calls_of, answer, "__call__" if compiled else "_call_impl")
        with torch.no_grad(), torch.random.fork_rng(devices=[]), calls as depth:
            mode.depth = depth
            with packages_read_once(), self._parts_looked_at_once(mode), mode:
                loss, predictions, mode.form = self.compute(trainer, self.inputs(fields, others, tree), items)
        if any(id(one) in mode.constants for one in self._placed):
            raise Error(
                f"{type(self.trainer).__name__}.compute_loss reads a tensor that it left in an attribute before, as in "
                "self.total += loss.detach(). Let it keep numbers: self.total += loss.item()"
            )
        mode.note("loss", how := self._made(mode, loss, predictions))
        kept = tensors_in(changed(trainer, self.trainer)) if trainer is not self.trainer else []
        return mode, how, [one for one in kept if mode.is_unknown(one)]

    def _of_batch(self, fields: Mapping[str, T]) -> dict[str, T]:
        return {n: one for n, one in fields.items() if is_given(n)}

    # Before a step.

    def plan(self, inputs: Mapping, items: T | None, like: Plan | None = None) -> Plan:
        """Returns the course that compute_loss takes for a micro-batch. With `like`, its comparisons have the outcomes
        of this plan, and OtherCourse is raised if it is another course."""
        leaves, tree = pytree.tree_flatten(dict(inputs))
        others = [T if isinstance(one, T) else one for one in leaves]
        tensors = [one.detach() for one in leaves if isinstance(one, T)]
        fields = dict(zip(paths_of(inputs), tensors))
        key = shapes_of(fields)
        if not self.own:
            read = (self.trainer.model_accepts_loss_kwargs, self.trainer.args.average_tokens_across_devices)
            signature = digest(items is None, *read, *(one for one in others if one is not T))
            course = self._course(fields, [signature])
            self.signatures[str(course)] = signature
            fields[COURSE] = torch.zeros([1] * course)
            self._plans[course] = Plan(course, fields, others, tree, {}, {}, {}, [], "", [], items)
            return self._plans[course]

        def walk(calls, values, forced=None):
            with Kept(self.trainer):
                return self._walk(shadow_of(self.trainer), calls, fields, others, tree, items, values, forced)

        def planned(run: Run) -> Plan:
            mode, loss, kept = walk(run.calls, run.value, run.outcomes)
            every, sized = dict(fields), {}
            for name, result in mode.sized.items():
                parts, spec = pytree.tree_flatten(result)
                names = [f"{SIZED}{len(every) - len(tensors) + i}" for i in range(len(parts))]
                every.update(zip(names, parts))
                sized[name] = names, spec
            takes = [Take(False, mode.how_of(one), tuple(map(int, one.shape)), one.dtype, None) for one in kept]
            return Plan(
                -1,
                every,
                others,
                tree,
                mode.takes,
                mode.outcomes,
                sized,
                takes,
                loss,
                [],
                items,
                run,
                mode.notes,
                mode.form,
            )

        plan: Plan | None = None
        for run in reversed(self._runs.get(key, ()) if like is None else ()):
            with contextlib.suppress(Unseen, OtherCourse):
                plan = planned(run)
                break
        foreseen = False
        if plan is None and like is None and (plan := self._foreseen(fields, planned)):
            foreseen = True
            self._runs.setdefault(key, []).append(plan.run)
        if plan is None:
            self.real(fields, others, tree, items)
            run = self._runs[key][-1]
            if like is not None:
                run.outcomes = {name: one.value for name, one in like.outcomes.items() if not one.known}
                run.values = {**run.values, **like.run.values}
            plan = planned(run)
        if plan.sized:
            self.one_by_one = "values decide sizes in compute_loss, as in nonzero()"
        plan.course = self._course(plan.fields, plan.notes, like)
        plan.fields[COURSE] = torch.zeros([1] * plan.course)
        full = shapes_of(plan.fields)
        place = 1  # behind the loss
        for one in plan.in_row:
            one.begin, place = place, place + one.size
        before = self._plans.get(full)
        if before is None:
            plan.guarded = self._guarded(plan, functools.partial(walk, plan.run.calls), plan.run.value)
            if not foreseen:
                self.signatures[digest(*full)] = digest(*plan.notes)
        else:
            plan.guarded = before.guarded
        self._plans[full] = dataclasses.replace(plan, fields={})
        return plan

    def expected(self, inputs: Mapping, items: T | None, like: Plan) -> Plan:
        """Returns the plan of a micro-batch if it takes the course of `like`, without a walk unless its values decide
        sizes."""
        if like.sized:
            return self.plan(inputs, items)
        tensors = [one.detach() for one in pytree.tree_leaves(dict(inputs)) if isinstance(one, T)]
        fields = {**dict(zip(paths_of(inputs), tensors)), COURSE: like.fields[COURSE]}
        return dataclasses.replace(like, fields=fields, items=items)

    def _foreseen(self, fields: dict[str, T], planned: Callable[[Run], Plan]) -> Plan | None:
        """Returns the plan for a shape that programs for many shapes serve. Numbers that Python takes are those of
        another shape: they decide no course."""
        for course in reversed(self._courses):
            for template, known in course.templates:
                if (here := template.at(fields)) is None:
                    continue
                outcomes = {name: one.value for name, one in known.outcomes.items() if not one.known}
                try:
                    plan = planned(Run(calls_at(here, known.run.calls), known.run.values, outcomes))
                except Exception:  # of Python, for numbers that are not those of this shape
                    continue
                there = template.at(plan.fields)
                if there is not None and there.difference(plan.notes) is None:
                    return plan
        return None

    def _course(self, fields: Mapping[str, T], notes: list[str], like: Plan | None = None) -> int:
        """Returns the number of the course. A course without programs for many shapes may have other signatures for
        other shapes."""
        key, signature = shapes_of(fields), digest(*notes)
        known, foreseen, free = [], [], []
        for number, one in enumerate(self._courses):
            if key in one.signatures:
                known += [number] if one.signatures[key] == signature else []
            elif one.templates:
                found = [template.at(fields) for template, _ in one.templates]
                if all(at is not None and at.difference(notes) is None for at in found):
                    foreseen.append(number)
            else:
                free.append(number)
        if like is not None:
            if like.course not in {*known, *foreseen, *free}:
                raise OtherCourse("it takes another course for other sizes")
            return like.course
        if known or foreseen or free:
            course = (known or foreseen or free)[-1]
        else:
            self._courses.append(Course())
            if len(self._courses) > MOST_COURSES:
                raise Error(
                    f"{type(self.trainer).__name__}.compute_loss has computed with other values of Python in "
                    f"{MOST_COURSES} steps, and each needs a capture of its own. Give it what changes from step to "
                    "step as a tensor of the batch"
                )
            course = len(self._courses) - 1
        self._courses[course].signatures[key] = signature
        return course

    def _guarded(self, plan: Plan, walk, known) -> list[str]:
        """Returns the comparisons whose other outcome would change the loss or a number that is taken. Raises Error if
        a number enters the loss that Python made of one that it took."""
        same = values_of(plan.outcomes)

        def others(key: str, tensor: T) -> Any:
            return perturbed(known(key, tensor))

        def nothing(key: str, tensor: T) -> Any:
            try:
                return known(key, tensor)
            except Unseen:
                return torch.zeros([int(n) for n in tensor.shape], dtype=tensor.dtype).tolist()

        if any(not one.known for one in plan.takes.values()):
            _, loss, _ = walk(others, same)
            if loss != plan.loss:
                raise Error(
                    f"the loss of {type(self.trainer).__name__}.compute_loss depends on a number that Python computed "
                    f"from one that it took out of a tensor ({self._culprit(plan, walk, known, same)}). Compute it "
                    "with functions of torch: torch.exp(x) in place of math.exp(x.item())"
                )
        found = []
        for key, outcome in plan.outcomes.items():
            if outcome.known:
                continue
            try:
                other, loss, _ = walk(nothing, {key: not outcome.value})
            except Exception:  # the other outcome ends training
                found.append(key)
                continue
            if loss != plan.loss or any(
                name not in plan.takes or one.how != plan.takes[name].how for name, one in other.takes.items()
            ):
                found.append(key)
        return found

    def _culprit(self, plan: Plan, walk, known, same: dict[str, bool]) -> str:
        for name, take in plan.takes.items():
            if take.known:
                continue
            _, loss, _ = walk(lambda key, t, name=name: (perturbed if key == name else same_value)(known(key, t)), same)
            if loss != plan.loss:
                return name
        return "several"

    def ignores_items(self, plan: Plan) -> bool:
        """Whether the loss is the same for another number of items."""
        with torch.no_grad():
            items: Any = plan.items
            one, other = (self.eager(plan.fields, plan, number)[0] for number in (items, 2 * items))
        return bool(torch.isclose(one, other, rtol=1e-4))

    # In a program.

    def prepared(self, fields: Mapping[str, T], like: Mapping[str, T]) -> dict[str, T] | None:
        """Returns fields of other sizes than those of a micro-batch, with what Python computes from them. Returns None
        if it takes another course."""
        plan = self._plans[shapes_of(like)]
        try:
            other = self.plan(self.inputs(self._of_batch(fields), plan.others, plan.tree), plan.items, plan)
        except Exception:  # of Python, for sizes that are not the user's
            return None
        if values_of(other.outcomes) != values_of(plan.outcomes):
            return None
        return {**other.fields, **{name: fields[name] for name in STEP}}

    def course_of_trace(self) -> dict:
        """Describes the course of the last trace, with its sizes."""
        return self._described

    def why_not(self, described: dict, entries: list[dict], fields: Mapping[str, T]) -> str:
        """Returns why programs for many shapes do not serve a micro-batch, or ''. Then none will. `described` is the
        course of their trace."""
        at, plan = Template(described, entries).at(fields), self._plans[shapes_of(fields)]
        returned = [[one.shape for one in call.output if isinstance(one, Value)] for call in plan.run.calls]
        same = at is not None and at.shapes() == returned
        line = at.difference(plan.notes) if at is not None and same else "sizes that modules return"
        if line is None:
            return ""
        self.one_by_one = f"the Python of compute_loss computes something else for other sizes ({line})"
        return self.one_by_one

    def serve(self, described: dict, entries: list[dict], fields: Mapping[str, T]) -> None:
        """From now on, programs for many shapes serve each whose course this is."""
        plan = self._plans[shapes_of(fields)]
        self._courses[plan.course].templates.append((Template(described, entries), plan))
        if sum(bool(one.templates) for one in self._courses) >= MOST_TEMPLATES:
            self.one_by_one = f"the Python of compute_loss took {MOST_TEMPLATES} courses for other sizes or values"

    def traced(self, fields: Mapping[str, T]) -> tuple[T, list[T], list[T], dict[str, T], Plan]:
        """Returns the loss, the predictions, what the row of a micro-batch holds, and the guards."""
        plan = self._plans[shapes_of(fields)]
        items = items_of(fields, plan.items)
        names = {**self._tensors(), **{id(one): f"field {name}" for name, one in self._of_batch(fields).items()}}
        if items is not None:
            names[id(items)] = "num_items_in_batch"
        mode = Tracing(
            names,
            plan.takes,
            plan.outcomes,
            plan.guarded,
            {
                key: pytree.tree_unflatten([fields[name] for name in names], spec)
                for key, (names, spec) in plan.sized.items()
            },
        )
        trainer = shadow_of(self.trainer)

        def around(module, call, args, kwargs):
            if torch.is_grad_enabled() or not any(one.requires_grad for one in module.parameters()):
                output = call(*args, **kwargs)
            else:
                with torch.enable_grad():
                    output = call(*args, **kwargs)
                with mode.unrecorded():
                    output = pytree.tree_map_only(T, T.detach, output)
            mode.answered(self._parts[id(module)], self._state_of(module), args, kwargs, output)
            return output

        with Kept(self.trainer, trace=True), whole_heads(), module_calls(self.is_part, around) as depth:
            mode.depth = depth
            with mode, refusing_generation():
                loss, predictions, _ = self.compute(trainer, self.inputs(fields, plan.others, plan.tree), items)
        mode.note("loss", self._made(mode, loss, predictions))
        self._described = mode.symbolic.described(mode.notes)
        row = [mode.tensors[key] for key, one in plan.takes.items() if not one.known]
        kept = [one for one in tensors_in(changed(trainer, self.trainer)) if is_traced(one)]
        if len(kept) != len(plan.kept):
            raise OtherCourse("it leaves other tensors in attributes")
        return loss, predictions, [*row, *kept], {key: mode.guards[key] for key in plan.guarded}, plan

    def eager(self, fields: Mapping[str, T], plan: Plan, items: T | None) -> tuple[T, list[T], Any]:
        with Kept(self.trainer):
            return self.compute(shadow_of(self.trainer), self.inputs(fields, plan.others, plan.tree), items)

    def plan_of(self, fields: Mapping[str, T]) -> Plan:
        return self._plans[shapes_of(fields) if self.own else fields[COURSE].dim()]

    # After a step.

    def replay(self, plan: Plan, row: T) -> None:
        """Runs the Python of compute_loss for a micro-batch with the trainer itself, and the numbers of the step."""
        by_key = plan.takes

        def value(key: str, tensor: T) -> Any:
            take = by_key.get(key)
            if take is None or take.known:
                raise OtherCourse(f"{key} takes a number that the program does not return")
            return nested(row[take.begin : take.begin + take.size], take.shape, take.dtype)

        if large := plan.too_large(row):
            raise Error(large)
        fields = self._of_batch(plan.fields)
        mode, loss, _ = self._walk(self.trainer, plan.run.calls, fields, plan.others, plan.tree, plan.items, value)
        if loss != plan.loss:
            raise OtherCourse("its loss is computed in another way")
        values = {
            one.how: torch.tensor(nested(row[one.begin : one.begin + one.size], one.shape, one.dtype), dtype=one.dtype)
            for one in plan.kept
        }
        self._placed += [one for one in values.values() if not any(one is other for other in self._placed)]
        if values:
            replace_tensors(self.trainer, mode, values)


def items_of(fields: Mapping[str, T], items: T | None) -> T | None:
    return None if items is None else fields[ITEMS].to(items.dtype)


def resized(value: Any, shape: tuple[int, ...], name: str) -> Any:
    """Returns numbers of another shape. Raises Unseen if there are none."""
    numbers = torch.as_tensor(value)
    if tuple(numbers.shape) == shape:
        return value
    if not (count := torch.Size(shape).numel()):
        return numbers.new_zeros(shape).tolist()
    if not numbers.numel():
        raise Unseen(name)
    return numbers.flatten()[torch.arange(count) % numbers.numel()].reshape(shape).tolist()


def calls_at(here: At, calls: list[Call]) -> list[Call]:
    """Returns calls as they are for other sizes."""
    found = []
    for call, shapes in zip(calls, here.shapes(), strict=True):
        own = iter(shapes)
        output = [Value(next(own), one.dtype) if isinstance(one, Value) else one for one in call.output]
        found.append(Call(call.module, output, call.tree))
    return found


def values_of(outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    return {key: one.value for key, one in outcomes.items()}


def same_value(value: Any) -> Any:
    return value


def perturbed(value: Any) -> Any:
    if isinstance(value, list):
        return [perturbed(one) for one in value]
    return value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.25 + 0.125


def paths_of(inputs: Mapping) -> list[str]:
    """Names each tensor of the inputs."""
    found = pytree.tree_flatten_with_path(dict(inputs))[0]
    return [
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
        for path, one in found
        if isinstance(one, T)
    ]


def tensors_in(values: Mapping[str, Any]) -> list[T]:
    found: dict[int, T] = {}
    for value in values.values():
        for one in pytree.tree_leaves(value):
            if isinstance(one, T):
                found.setdefault(id(one), one)
    return list(found.values())


def replace_tensors(trainer: Any, mode: Walk, values: Mapping[str, T]) -> None:
    """Puts the values of the step in place of tensors that a walk left in attributes of the trainer."""
    for name, value in list(vars(trainer).items()):
        leaves, tree = pytree.tree_flatten(value)
        wanted = [isinstance(one, T) and mode.is_unknown(one) and mode.how_of(one) in values for one in leaves]
        if any(wanted):
            new = [values[mode.how_of(one)] if by_value else one for one, by_value in zip(leaves, wanted)]
            vars(trainer)[name] = pytree.tree_unflatten(new, tree)


def refusing_generation():
    def generate(self, *args, **keywords):
        raise Error(
            "compute_loss calls generate(), whose course depends on values. Generate in _prepare_inputs, and return "
            "the tokens as tensors of the batch, as GRPOTrainer of TRL does"
        )

    utils = sys.modules.get("transformers.generation.utils")
    return replaced(utils and utils.GenerationMixin, "generate", lambda _: generate)
