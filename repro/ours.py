"""Our contenders of benchmarks/rivals/compare.py: what they are called, and the figure of how much faster they are."""
OURS = {"twobp": "ZB-V", "twobp_1f1b": "1F1B", "twobp_planned": "as planned"}


def times_faster(name):
    return "times_faster" + name.removeprefix("twobp")
