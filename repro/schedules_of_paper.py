"""The paper's grid: its four schedules, each without 2BP, with 2BP as the paper runs it, with p2 in every wait, and the
best zero-bubble schedule at the same number of micro-batches."""

# schedule -> micro-batches as a multiple of the ranks (0: one in all), the paper's p2 policy
SCHEDULES = {"naive": (0, "end"), "gpipe": (1, "end"), "1f1b-1": (1, "cooldown"), "1f1b-2": (2, "cooldown")}
RANKS = 2
ZERO_BUBBLE = "zb-v"
WAYS = ["standard", "2BP as in the paper", "fill", "zero-bubble"]


def micro_batches(schedule):
    return max(1, SCHEDULES[schedule][0] * RANKS)


def way_of(row):
    """Which of WAYS a row of `twobp bench` is, or None."""
    if row["schedule"] == ZERO_BUBBLE:
        return "zero-bubble"
    return {"off": "standard", SCHEDULES[row["schedule"]][1]: "2BP as in the paper", "fill": "fill"}.get(row["p2"])


def rows_of(experiment, model, schedule, *more):
    """way -> its row of `twobp bench`, all interleaved in one run."""
    paper = SCHEDULES[schedule][1]
    rows = experiment.bench(model, "--schedules", schedule, ZERO_BUBBLE, "--micro-batches", micro_batches(schedule),
                            "--p2", "off", paper, "fill", *more)
    # Of the V-shaped schedule only the one that fills: `off` is no zero-bubble schedule.
    kept = [row for row in rows if row["schedule"] != ZERO_BUBBLE or row["p2"] == "fill"]
    return {way: row for row in kept if (way := way_of(row))}
