"""Bubble ratios of N ranks for F = I = W and messages that take no time, by schedule and p2 policy. Naive runs one micro-batch,
GPipe and 1F1B-1 run N, and 1F1B-2 runs 2N. The paper states the formulas in IN_PAPER. The others follow from its assumptions."""

TEXTS = {
    ("naive", "off"): "(N - 1) / N",
    ("naive", "end"): "2 * (N - 1) / (2 * N + 1)",
    ("gpipe", "off"): "(N - 1) / (2 * N - 1)",
    ("gpipe", "end"): "2 * (N - 1) / (5 * N - 2)",
    ("1f1b-1", "off"): "(N - 1) / (2 * N - 1)",
    ("1f1b-1", "end"): "2 * (N - 1) / (5 * N - 2)",
    ("1f1b-1", "cooldown"): "(N - 1) / (4 * N - 1)",
    ("1f1b-1", "fill"): "(N - 1) / (4 * N - 1)",
    ("1f1b-2", "off"): "(N - 1) / (3 * N - 1)",
    ("1f1b-2", "fill"): "(N - 1) / (7 * N - 1)",
}
FORMULAS = {case: eval(f"lambda N: {text}") for case, text in TEXTS.items()}
IN_PAPER = {("naive", "off"), ("naive", "end"), ("gpipe", "off"), ("1f1b-1", "off"), ("1f1b-2", "off")}

# The 2BP policy of each schedule with the least idle time.
BEST = {"naive": "end", "gpipe": "end", "1f1b-1": "fill", "1f1b-2": "fill"}


def speed_up(schedule, ranks):
    """The speed-up of 2BP by the formulas. The busy time of a step is the same with and without 2BP."""
    off, best = (FORMULAS[schedule, p2](ranks) for p2 in ("off", BEST[schedule]))
    return (1 - best) / (1 - off)


def text_of(case):
    """The formula in its usual notation."""
    return TEXTS[case].replace(" ", "").replace("*", "")
