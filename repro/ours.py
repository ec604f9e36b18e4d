"""Our contenders in benchmarks/rivals/compare.py: their titles, the name of the figure for their speed-up, and the fastest of them."""
from experiment import median
from tables import select

OURS = {"twobp": "ZB-V", "twobp_1f1b": "1F1B", "twobp_planned": "planned"}


def times_faster(name):
    return "times_faster" + name.removeprefix("twobp")


def ours_in(result):
    """Our contenders in this result. Older results have no planned one."""
    return {name: of for name, of in OURS.items() if select(result, contender=name)}


CLOSE = 1.02  # step times within 2 % count as equal


def fastest(rivals):
    """For each job: model, micro-batches, our fastest schedule, its speed-up over PyTorch's 1F1B and over its best zero-bubble schedule,
    that schedule, and the resident MiB of ours and of PyTorch's 1F1B. Of our schedules within 2 %, the one with the least memory counts."""
    for model, count in dict.fromkeys((row["key"]["model"], row["key"]["micro_batches"]) for row in rivals["rows"]):
        of = {row["key"]["contender"]: row["figures"] for row in select(rivals, model=model, micro_batches=count)}
        its = [name for name in of if name in ("interleaved_zb", "zbv", "dualpipev")]
        if not its or "1f1b" not in of:
            continue  # they failed
        best = min(its, key=lambda name: median(of[name]["times_faster"]))
        seconds = {name: median(of[name]["times_faster"]) for name in ours_in(rivals)}  # relative to ZB-V
        ours = min((name for name in seconds if seconds[name] < CLOSE * min(seconds.values())), key=lambda name: of[name]["resident_bytes"])
        over = times_faster(ours)
        yield (model, count, OURS[ours], of["1f1b"][over], of[best][over], best,
               *(of[name]["resident_bytes"] / 2**20 for name in (ours, "1f1b")))
