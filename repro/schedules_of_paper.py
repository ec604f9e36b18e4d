"""The cases of the paper: its four schedules, each without 2BP, with 2BP as in the paper, and with p2 in every wait. They are compared with the
best zero-bubble schedule with the same number of micro-batches."""

from experiment import MODELS, on_gpus

# schedule -> (micro-batches as a multiple of the ranks, or 0 for a single one; the paper's p2 policy)
SCHEDULES = {"naive": (0, "end"), "gpipe": (1, "end"), "1f1b-1": (1, "cooldown"), "1f1b-2": (2, "cooldown")}
ZERO_BUBBLE = "zb-v"
PAPER = "2BP as in the paper"
WAYS = ["standard", PAPER, "fill", "zero-bubble"]


def options(parser):
    parser.add_argument("--models", nargs="+", default=MODELS)
    on_gpus(parser)


def micro_batches(schedule, ranks):
    return max(1, SCHEDULES[schedule][0] * ranks)


def way_of(row):
    """Returns the element of WAYS that a row of `twobp bench` measures."""
    if row["schedule"] == ZERO_BUBBLE:
        return "zero-bubble"
    return {"off": "standard", SCHEDULES[row["schedule"]][1]: PAPER, "fill": "fill"}[row["p2"]]


def rows_of(experiment, model, schedule, caps):
    """(way, memory cap) -> its row of `twobp bench`. All rows are interleaved."""
    rows = experiment.bench_in_turns(model, [schedule, ZERO_BUBBLE + "@fill"], ["off", SCHEDULES[schedule][1], "fill"],
                                     "--micro-batches", micro_batches(schedule, experiment.ranks), "--memory-cap", *caps)
    return {(way_of(row), row["memory_cap"]): row for row in rows}
