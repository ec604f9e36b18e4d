"""The paper's grid: its four schedules, each without 2BP, with 2BP as the paper runs it, with p2 in every wait, and the
best zero-bubble schedule at the same number of micro-batches."""

from experiment import MODELS, on_gpus

# schedule -> micro-batches as a multiple of the ranks (0: one in all), the paper's p2 policy
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
    """Which of WAYS a row of `twobp bench` is."""
    if row["schedule"] == ZERO_BUBBLE:
        return "zero-bubble"
    return {"off": "standard", SCHEDULES[row["schedule"]][1]: PAPER, "fill": "fill"}[row["p2"]]


def rows_of(experiment, model, schedule, caps):
    """(way, memory cap) -> its row of `twobp bench`, all interleaved."""
    rows = experiment.bench_in_turns(model, [schedule, ZERO_BUBBLE + "@fill"], ["off", SCHEDULES[schedule][1], "fill"],
                                     "--micro-batches", micro_batches(schedule, experiment.ranks), "--memory-cap", *caps)
    return {(way_of(row), row["memory_cap"]): row for row in rows}
