"""Our contenders in benchmarks/rivals/compare.py: their titles, and the name of the figure for their speed-up."""
OURS = {"twobp": "ZB-V", "twobp_1f1b": "1F1B", "twobp_planned": "planned"}


def times_faster(name):
    return "times_faster" + name.removeprefix("twobp")
