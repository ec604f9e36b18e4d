"""Pipeline schedules as data: by name or from files, simulated and drawn. The program runs the same code."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from twobp import _native, checks

# One number, one for each stage, or one for each micro-batch and stage.
Cost = float | Sequence[float] | Sequence[Sequence[float]]


class Instruction(NamedTuple):
    """`op` on `stage` for the micro-batches from `micro_batch` to `micro_batch + count - 1`. `op` is F (forward), I
    (input gradient), W (weight gradient), B (I, then W), or SEND_F, RECV_F, SEND_B, RECV_B for messages."""

    op: str
    stage: int
    micro_batch: int
    count: int = 1  # type: ignore[assignment]  # in place of tuple's method


class Operation(NamedTuple):
    """An F, I, W or B as it ran in a simulation."""

    op: str
    stage: int
    micro_batch: int
    begin: float
    end: float


class Schedule:
    """The work of each rank in order: `twobp.schedule` makes it from a name, `Schedule.from_csv` from a file, and
    `Schedule` from lists."""

    def __init__(
        self,
        ranks: Iterable[Iterable[Any]] | Mapping[int, Iterable[Any]],
        *,
        p2: str | None = None,
        name: str = "schedule",
    ):
        """`ranks` has a list of actions for each rank, or by number of rank. An action is a cell of the text form
        ("0F1": stage, op, micro-batch), an `Instruction`, or an action of torch.distributed.pipelining; None is an idle
        step. Messages may be left out. `p2` is as for `from_csv`. Raises twobp.Error, which names the rank (row) and
        the place (column) of a mistake."""
        self._take(_native.schedule_from_csv(_text(ranks), name, p2))

    @classmethod
    def _of(cls, native: _native.Schedule) -> Schedule:
        schedule = cls.__new__(cls)
        schedule._take(native)
        return schedule

    def _take(self, native: _native.Schedule) -> None:
        self._native = native
        self.ranks: list[list[Instruction]] = [[Instruction(*one) for one in rank] for rank in native.instructions()]

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def p2(self) -> str:
        """The policy of W: off, end, cooldown, fill or placed."""
        return self._native.p2

    @property
    def stages(self) -> int:
        return self._native.stages

    @property
    def micro_batches(self) -> int:
        return self._native.micro_batches

    @property
    def slices(self) -> int:
        """The number of slices of each micro-batch's sequences. With k > 1, instructions count slices: number m k + s
        is slice s of micro-batch m."""
        return self._native.slices

    @property
    def rank_of_stage(self) -> list[int]:
        return self._native.rank_of_stage

    def validate(self) -> None:
        """Raises twobp.Error, which shows the bad cell, unless the schedule is complete, in order and free of
        deadlock."""
        self._native.validate()

    def simulate(
        self,
        forward: Cost = 1,
        backward_p1: Cost = 1,
        backward_p2: Cost = 1,
        *,
        p2_units: int = 1,
        latency: float = 0,
        cap: float | Literal["auto"] | None = "auto",
    ) -> Simulation:
        """Times the schedule by the executor's rules.

        Costs are those of F, I and W for one micro-batch, in any unit: one number, or one for each stage. Where
        micro-batches cost unequally, a cost is a list of such lists (or an array or tensor of them), one for each
        micro-batch; the numbers of a list may be one for all stages (`[[1], [1.5]]`). Fewer lists than micro-batches
        repeat, so that with slices there may be one for each slice. W has `p2_units` pieces, and a waiting rank looks
        for its message between them. `latency` is that of a message, in the same unit. `cap` is the largest number of
        micro-batches that a rank may hold. "auto" is the default, as in training (docs/memory.md): what the fullest
        rank holds without 2BP. None is no limit. Raises twobp.Error for costs that are negative, for another number of
        stages, and for a number of lists that does not divide that of the micro-batches."""

        def rows(cost: Any) -> list[list[float]]:
            try:
                if hasattr(cost, "tolist"):  # an array or a tensor
                    cost = cost.tolist()
                if not isinstance(cost, Sequence):
                    return [[float(cost)]]
                if len(cost) > 0 and all(isinstance(row, Sequence) for row in cost):
                    return [[float(one) for one in row] for row in cost]
                return [[float(one) for one in cost]]
            except Exception:  # also of an object's own methods
                raise _native.Error(
                    "a cost must be a number, a list with one for each stage, or a list of such lists, not "
                    f"{checks.shown(cost)}"
                ) from None

        most = (
            None if isinstance(cap, str) and cap == "auto" else 0 if cap is None else checks.number(cap, "cap")
        )  # the native side has 0 for no limit
        return Simulation(
            self._native.simulate(
                rows(forward),
                rows(backward_p1),
                rows(backward_p2),
                checks.whole(p2_units, "p2_units", least=1),
                checks.number(latency, "latency"),
                most,
            ),
            self,
        )

    def to_csv(self, path: str | os.PathLike | None = None) -> str:
        """Returns the text form of PyTorch's pipelining, and writes it to `path` if that is given. A `fill` schedule
        has no fixed order, so use that of a simulation (`Simulation.to_csv`)."""
        return _write(path, self._native.csv())

    @staticmethod
    def from_csv(source: str | os.PathLike, *, p2: str | None = None) -> Schedule:
        """Reads PyTorch's text form from a file, or from a text with line breaks, as `to_csv` returns it. It runs as
        written unless `p2` is
        given: placed if it has W, else off. Raises twobp.Error, which names row, column and cell of a mistake."""
        p2 = None if p2 is None else checks.text(p2, "p2")
        if isinstance(source, str) and "\n" in source:
            return Schedule._of(_native.schedule_from_csv(source, "schedule", p2))
        file = pathlib.Path(checks.path(source, "source"))
        with checks.files("the schedule cannot be read"):
            text = file.read_text()
        return Schedule._of(_native.schedule_from_csv(text, file.name, p2))

    def _repr_svg_(self) -> str:
        return self.simulate().svg()

    def __repr__(self) -> str:
        return (
            f"<twobp.Schedule {self.name}, {self.stages} stages on {len(self.ranks)} ranks, {self.micro_batches} "
            f"micro-batches{f' of {self.slices} slices' if self.slices > 1 else ''}, p2 {self.p2}>"
        )


class Simulation:
    """A simulated step."""

    def __init__(self, native: _native.Simulation, of: Schedule):
        self._native = native
        self.schedule = of

    @property
    def step(self) -> float:
        """The length of the step, in the unit of the costs."""
        return self._native.step

    @property
    def bubble(self) -> float:
        """The idle fraction, as a mean over ranks."""
        return self._native.bubble

    @property
    def idle(self) -> list[float]:
        """The idle fraction of each rank."""
        return self._native.idle

    @property
    def peak(self) -> float:
        """The largest number of micro-batches of stages that a rank holds."""
        return self._native.peak

    @property
    def ranks(self) -> list[list[Operation]]:
        """The operations of each rank, in order."""
        return [[Operation(*one) for one in rank] for rank in self._native.timeline()]

    def svg(
        self, path: str | os.PathLike | None = None, *, title: str = "", width: int = 1200, until: float = 0
    ) -> str:
        """Returns the picture, and writes it to `path` if that is given. `until` is the end of its time axis, to
        compare pictures."""
        return _write(
            path,
            self._native.svg(
                checks.text(title, "title") or self.schedule.name,
                checks.whole(width, "width", least=1),
                checks.number(until, "until"),
            ),
        )

    def grid(self, unit: float = 1) -> str:
        """Returns the picture as text, with one column for each `unit` of time."""
        return self._native.grid(checks.number(unit, "unit"))

    def to_csv(self, path: str | os.PathLike | None = None) -> str:
        """Returns the order in which the simulation ran F, I and W, in the form of `Schedule.to_csv`."""
        return _write(path, self._native.csv())

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        figures = f"step {self.step:g}, bubble {self.bubble:.1%}, peak {self.peak:g}"
        return f"<twobp.Simulation of {self.schedule.name}: {figures}>"


def schedules() -> list[str]:
    """Returns the names that `twobp.schedule` takes."""
    return _native.schedule_names()


def schedule(
    name: str,
    *,
    stages: int | None = None,
    ranks: int | None = None,
    micro_batches: int | None = None,
    p2: str | None = None,
    slices: int = 1,
) -> Schedule:
    """Returns the schedule of this name, or from the file of this name if it ends in .csv.

    Missing numbers are the schedule's own. Without stages and ranks, it has 2 ranks. `p2` says when W runs: off, end,
    cooldown, fill or placed. `slices` cuts each micro-batch along its sequence (docs/long_sequences.md). Raises
    twobp.Error for an unknown name (with the nearest one) and for numbers that do not fit."""
    stages, ranks, micro_batches = (
        None if value is None else checks.whole(value, of, least=1)
        for of, value in (("stages", stages), ("ranks", ranks), ("micro_batches", micro_batches))
    )
    return Schedule._of(
        _native.make_schedule(
            checks.text(name, "name"),
            stages,
            ranks,
            micro_batches,
            None if p2 is None else checks.text(p2, "p2"),
            checks.whole(slices, "slices", least=1),
        )
    )


def _text(ranks: Iterable[Iterable[Any]] | Mapping[int, Iterable[Any]]) -> str:
    """Returns the text form of lists of actions."""
    if isinstance(ranks, Mapping):
        if set(ranks) != set(range(len(ranks))):
            raise _native.Error(f"a schedule by rank has the ranks 0 to {len(ranks) - 1}, not {list(ranks)}")
        ranks = [ranks[rank] for rank in range(len(ranks))]
    try:
        rows: list[Any] = [None if isinstance(row, str) else list(row) for row in ranks]
    except Exception:  # also of an object's own methods
        rows = [None]
    if isinstance(ranks, str) or None in rows:
        raise _native.Error(
            f"a schedule is a list of actions for each rank, not {checks.shown(ranks)} (text: Schedule.from_csv)"
        )
    return "".join(",".join(cell for action in row for cell in _cells(action)) + "\n" for row in rows)


def _cells(action: Any) -> list[str]:
    """Returns the cells of an action in the text form."""
    if action is None:
        return [""]
    if isinstance(action, tuple) and 3 <= len(action) <= 4 and isinstance(action[0], str):
        op, stage, micro_batch, count = Instruction(*action)
        return [f"{stage}{op}{one}" for one in range(micro_batch, micro_batch + count)]
    cell = str(action)
    if set(cell) & set(",\r\n"):
        raise _native.Error(f'{action!r} is not an action: give a cell such as "0F1", or (op, stage, micro-batch)')
    return [cell]


def _write(path: str | os.PathLike | None, text: str) -> str:
    if path is not None:
        with checks.files("the file cannot be written"):
            pathlib.Path(checks.path(path, "path")).write_text(text)
    return text
