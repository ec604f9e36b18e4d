"""The planner ranks the ways to run a model by predicted throughput."""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from twobp import _native, batches, checks
from twobp.trainer import Trainer

if TYPE_CHECKING:
    import pandas

    from twobp.batches import Batch


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One way to run the model. `split` has the layers of each stage. `idle` is the mean idle fraction. `peak_bytes` is
    the total memory of the fullest rank. The first `frozen_stages` of the stages have frozen layers alone, one on each
    rank: a trainer makes them by itself. `slices` is the number of slices of each sequence, and `slice_lengths` has
    their positions (empty for whole sequences). `csv` is the text of a searched schedule, or None. The text form has no
    slices: with slices, train with schedule="auto"."""

    schedule: str
    p2: str
    ranks: int
    stages: int
    micro_batches: int
    micro_batch_size: int
    recompute: str
    split: list[int]
    step_seconds: float
    samples_per_second: float
    idle: float
    peak_bytes: float
    csv: str | None = None
    slices: int = 1
    slice_lengths: list[int] = dataclasses.field(default_factory=list)
    frozen_stages: int = 0


class Plan(Sequence):
    """Has the rows, fastest first, and `gain`: a sentence that says what 2BP brings to the first row."""

    def __init__(self, rows: Iterable[PlanRow], gain: str):
        self._rows = list(rows)
        self.gain = gain

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self._rows)

    def to_pandas(self) -> pandas.DataFrame:
        """Returns the rows as a table of pandas, which must be installed."""
        import pandas

        return pandas.DataFrame([dataclasses.asdict(row) for row in self])

    def _table(self) -> list[list[str]]:
        sliced = any(row.slices > 1 for row in self)
        head = [
            "schedule",
            "p2",
            "ranks",
            "stages",
            "M",
            "size",
            *["slices"] * sliced,
            "recompute",
            "step ms",
            "samples/s",
            "idle",
            "memory MiB",
        ]
        return [
            head,
            *(
                [
                    row.schedule,
                    row.p2,
                    str(row.ranks),
                    str(row.stages),
                    str(row.micro_batches),
                    str(row.micro_batch_size),
                    *[str(row.slices)] * sliced,
                    row.recompute,
                    f"{row.step_seconds * 1e3:.2f}",
                    f"{row.samples_per_second:.2f}",
                    f"{row.idle:.1%}",
                    f"{row.peak_bytes / 2**20:.1f}",
                ]
                for row in self
            ),
        ]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([*lines, "", f"{self.gain}."])

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        cells = lambda row, tag: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)  # noqa: E731
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
        return f"{table}<p>{html.escape(self.gain)}.</p>"


def plan(
    of: Trainer | str | os.PathLike,
    *,
    ranks: int | Iterable[int] | None = None,
    micro_batches: int | Iterable[int] | None = None,
    schedule: str | Iterable[str] | None = None,
    p2: str | Iterable[str] | None = None,
    recompute: str | Iterable[str] = "none",
    memory: str | int | None = None,
    batch: int | None = None,
    top: int | None = 10,
    search: bool = False,
    seconds: float = 0.5,
    slices: int | Iterable[int] | None = None,
    example: Batch | None = None,
) -> Plan:
    """Compares all ways to run a model. `of` is a trainer or the folder of a bundle, whose layers are measured now for
    about `seconds`, or a file of costs (`twobp profile --json`).

    Each of `ranks`, `micro_batches` (default: once, twice and four times the ranks), `schedule` and `p2` (default: all)
    is one value or several. `recompute` is none, activations, derivatives or both. `memory` is that of each rank, such
    as "80GiB" or a number of bytes. `slices` has numbers of slices of a sequence to compare (default: the trainer's
    number, or all in the file; docs/long_sequences.md). A captured module needs a trainer that was given slices.
    `example` is a micro-batch of other sizes than the trainer's, for which the rows then are.
    `batch` keeps only combinations with this number of samples a step. `top` is the number of rows, or None for all.
    `search` also searches for new schedules. Raises twobp.Error if nothing fits, with the smallest memory that
    would."""
    if not isinstance(of, (Trainer, str, os.PathLike)):
        raise _native.Error(
            f"of is a {type(of).__name__}, but must be a trainer, the folder of a bundle, or a file of costs"
        )
    of = of if isinstance(of, Trainer) else checks.path(of, "of")
    recomputes, seconds = _texts(recompute, "recompute"), checks.number(seconds, "seconds")
    limits = (
        "" if memory is None else _memory(memory),
        0 if batch is None else checks.whole(batch, "batch", least=1),
        0 if top is None else checks.whole(top, "top"),
        checks.flag(search, "search"),
    )
    counts, sliced = _numbers(ranks, "ranks"), _numbers(slices, "slices")
    if example is not None and not isinstance(of, Trainer):
        raise _native.Error("example is for a trainer: give one in place of a folder or file")
    if not counts and not isinstance(of, Trainer):
        raise _native.Error("give ranks: a number, or several such as range(2, 9)")
    if not isinstance(of, Trainer) and os.path.isdir(of):
        of = _of_bundle(of)
    if isinstance(of, Trainer):
        counts = counts or [of.ranks]
        one = None if example is None else of._cut([example])[0]
        samples = 0 if one is None else batches.samples_of(one)
        costs = of._native.costs([mode for mode in recomputes if mode != "none"], sliced, seconds, one, samples)
    else:
        costs = _native.read_costs(of)
    rows, gain = _native.plan(
        costs,
        counts,
        _numbers(micro_batches, "micro_batches"),
        _texts(schedule, "schedule"),
        _texts(p2, "p2"),
        recomputes,
        sliced,
        *limits,
    )
    return Plan((PlanRow(**row) for row in rows), gain)


def _of_bundle(folder: str) -> Trainer:
    """Returns a trainer of a bundle, with an example of its first shape. What the example holds hardly changes the
    times."""
    from twobp.capture import bundle

    path = os.path.join(folder, "graph.json")
    try:
        fields = bundle.read_graph(folder)["shapes"][0]["fields"]
        example = {
            name: torch.ones(field["shape"], dtype=getattr(torch, field["dtype"])) for name, field in fields.items()
        }
    except FileNotFoundError:
        raise _native.Error(f"{folder} has no graph.json, so it is no bundle: give a trainer of its model") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise _native.Error(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return Trainer(model={"from": folder}, example=example, micro_batches=1)


def _numbers(value, name: str) -> list[int]:
    return [checks.whole(one, name, least=1) for one in checks.several(value, name)]


def _texts(value, name: str) -> list[str]:
    return [checks.text(one, name) for one in checks.several(value, name)]


def _memory(value: str | int) -> str:
    return (
        checks.text(value, "memory") if isinstance(value, str) else str(checks.whole(value, "memory", most=2**63 - 1))
    )
