"""Our contenders in benchmarks/rivals/compare.py: their titles, the name of the figure for their speed-up, and the fastest of them."""
from experiment import median
from tables import select

OURS = {"twobp": "ZB-V", "twobp_1f1b": "1F1B", "twobp_planned": "planned", "twobp_two_threads": "one rank, two threads"}
PIPELINES = ("1f1b", "interleaved_1f1b", "interleaved_1f1b_4", "interleaved_zb", "zbv", "dualpipev")
UNDIVIDED = {"eager": "eager", "compiled": "`torch.compile`", "replicas": "two replicas"}  # the same cores without a pipeline


def times_faster(name):
    return "times_faster" + name.removeprefix("twobp")


def ours_in(result):
    """Our contenders in this result. Older results have no planned one."""
    return {name: of for name, of in OURS.items() if select(result, contender=name)}


def against_all(rivals):
    """For each job: model, micro-batches, our fastest way, its seconds a step, and by kind of rival (`pipeline` is the fastest of PyTorch's) the name, our
    speed-up over it and its resident MiB, then our resident MiB. A kind that was not measured is left out."""
    for model, count in dict.fromkeys((row["key"]["model"], row["key"]["micro_batches"]) for row in rivals["rows"]):
        of = {row["key"]["contender"]: row["figures"] for row in select(rivals, model=model, micro_batches=count)}
        ours = min((name for name in ours_in(rivals) if name in of), key=lambda name: median(of[name]["step_seconds"]))
        beside = {name: (name, median(its[times_faster(ours)]), its["resident_bytes"] / 2**20) for name, its in of.items() if name not in OURS}
        pipelines = [beside[name] for name in PIPELINES if name in beside]
        if pipelines:
            kinds = {"pipeline": min(pipelines, key=lambda rival: rival[1]), **{kind: beside[kind] for kind in ("1f1b", *UNDIVIDED) if kind in beside}}
            yield model, count, OURS[ours], median(of[ours]["step_seconds"]), kinds, of[ours]["resident_bytes"] / 2**20


def table_against_all(rivals):
    """The title line and the rows of a table, without columns that were not measured."""
    rows = []
    for model, count, title, seconds, kinds, own in against_all(rivals):
        over = lambda kind: f"{kinds[kind][1]:.2f}x" if kind in kinds else "-"
        all_of_them = set(UNDIVIDED) <= set(kinds)
        name, least, _ = min(kinds.values(), key=lambda rival: rival[1])
        rows.append([model, str(count), title, f"{seconds:.2f}", f"{over('pipeline')} ({kinds['pipeline'][0]})", *map(over, UNDIVIDED),
                     f"{least:.2f}x ({name})" if all_of_them else "-", f"{own:.0f} / {kinds['1f1b'][2]:.0f}" if "1f1b" in kinds else "-"])
    titles = ["model", "M", "our fastest", "seconds a step", "over PyTorch's best pipeline", *(f"over {name}" for name in UNDIVIDED.values()),
            "over the best of all", "resident MiB, ours / its 1F1B"]
    measured = [i for i in range(len(titles)) if any(row[i] != "-" for row in rows)]
    return [titles[i] for i in measured], [[row[i] for i in measured] for row in rows]
