"""The tables of the memory study, as Markdown, and its plot."""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

import causes
import models

PAPER = (1.02, 2.67)  # peak memory with 2BP over that without, over all models and schedules of arXiv 2405.18047
POLICIES = [("end", "none"), ("cooldown", "none"), ("fill", "none"), ("fill", "auto")]
# The paper's cases: (title, schedule, M as a multiple of N, or 0 for M = 1)
PAPER_SCHEDULES = [("naive, M = 1", "naive", 0), ("GPipe, M = N", "gpipe", 1), ("1F1B, M = N", "1f1b", 1),
                   ("1F1B, M = 2N", "1f1b", 2)]
COLOURS = {("end", "none"): "C3", ("cooldown", "none"): "C1", ("fill", "none"): "C0", ("fill", "auto"): "C2"}
GIB = 2**30
MIB = 2**20


def count(parameters):
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def short(commit):
    return commit[:7] + commit[40:]


def policy_title(policy):
    return policy[0] + (" + cap" if policy[1] == "auto" else "")


def pick(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def one(rows, schedule, ranks, multiple, policy, model):
    (row,) = pick(rows, family=model["family"], model=model["model"], schedule=schedule, ranks=ranks,
                  micro_batches=multiple * ranks or 1, p2=policy[0], cap=policy[1])
    return row


def spread(rows, factor):
    values = [row[factor] for row in rows]
    return f"{min(values):.2f} – {max(values):.2f}" if values else "-"


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


def factor_table(results, rows, ranks, factor):
    """One row per model and one column per schedule of the paper. A cell has one factor per policy."""
    header = ["model", "parameters", "samples"] + [title for title, _, _ in PAPER_SCHEDULES]
    table = []
    for model in results["models"]:
        cells = [" / ".join(f"{one(rows, schedule, ranks, multiple, policy, model)[factor]:.2f}" for policy in POLICIES)
                 for _, schedule, multiple in PAPER_SCHEDULES]
        name = f"{models.FAMILIES[model['family']]['title']} {model['model']}" + (" *" if model["in_paper"] else "")
        table.append([name, count(model["parameters"]), model["micro_batch_size"]] + cells)
    return markdown(header, table)


def schedule_table(rows):
    """One row for each schedule, N and M, with the range of the factor over all models."""
    policies = POLICIES + [("placed", "none"), ("placed", "auto")]
    table = []
    seen = {(row["ranks"], row["schedule"], row["micro_batches"]): None for row in rows}
    for ranks, schedule, micro_batches in seen:
        of = pick(rows, ranks=ranks, schedule=schedule, micro_batches=micro_batches)
        cells = [spread(pick(of, p2=policy[0], cap=policy[1]), "total_factor") for policy in policies]
        off = pick(of, p2="off")
        usual = "-" if off[0]["total_over_1f1b_off"] is None else spread(off, "total_over_1f1b_off")
        table.append([schedule, ranks, micro_batches, *cells, usual])
    header = ["schedule", "N", "M", *(policy_title(policy) for policy in policies), "off, over 1F1B's off"]
    return markdown(header, table)


def cause_table(results):
    def part(bytes_, row):
        return "" if bytes_ is None else f"{100 * bytes_ / row['after_forward']:.0f} %"

    table = []
    for model in results["models"]:
        if not model["in_paper"] and any(m["in_paper"] for m in results["models"]):
            continue
        rows = causes.causes(model)
        for row in rows:
            if row["after_forward"] <= 0:  # a head that releases its input
                continue
            title = f"{models.FAMILIES[model['family']]['title']} {model['model']}"
            table.append([title, row["kind"], row["layers"], f"{row['after_forward'] / MIB:.1f}",
                          part(row["after_forward"], rows[-1]), part(row["kept"], row), part(row["gradients"], row),
                          f"{row['after_p1'] / row['after_forward']:.2f}"])
    return markdown(["model", "kind", "layers", "held after F, MiB", "share of the model", "part that W needs", "dL/dz in addition",
                     "held after I / after F"], table)


def growth_table(results, rows):
    """For each model: the bytes after F, the bytes that W needs, and the bytes that are always held."""
    table = []
    for model in results["models"]:
        whole = causes.causes(model)[-1]
        off = one(rows, "1f1b", 4, 2, ("off", "none"), model)
        end = one(rows, "1f1b", 4, 2, ("end", "none"), model)
        table.append([f"{models.FAMILIES[model['family']]['title']} {model['model']}", count(model["parameters"]),
                      f"{whole['after_p1'] / whole['after_forward']:.2f}", f"{off['total_bytes'] / GIB:.2f}",
                      f"{100 * off['held_bytes'] / off['total_bytes']:.0f} %", f"{end['held_factor']:.2f}",
                      f"{end['total_factor']:.2f}"])
    return markdown(["model", "parameters", "held after I / after F", "1F1B off, GiB", "its activations",
                     "end: activations and stash", "end: total"], table)


def paper_rows(rows, results):
    """The paper's four models and schedules on four ranks, without a cap."""
    names = {(m["family"], m["model"]) for m in results["models"] if m["in_paper"]}
    schedules = {(schedule, 4 * multiple or 1) for _, schedule, multiple in PAPER_SCHEDULES}
    return [row for row in rows if (row["family"], row["model"]) in names and row["ranks"] == 4 and row["cap"] == "none" and
            row["p2"] in ("end", "cooldown", "fill") and (row["schedule"], row["micro_batches"]) in schedules]


def range_table(results, rows):
    def cells(of):
        return [spread(of, "total_factor"), spread(of, "held_factor")]

    split = [row for row in rows if row["p2"] != "off"]
    table = [["the paper, its models and schedules on 4 to 16 devices, measured", f"{PAPER[0]} – {PAPER[1]}", ""]]
    of = paper_rows(rows, results)
    for policy in ("end", "cooldown", "fill"):
        if of:
            table.append([f"its models and schedules here, N = 4, {policy}", *cells(pick(of, p2=policy))])
    for family in {row["family"]: None for row in rows}:
        title = models.FAMILIES[family]["title"]
        for cap, what in (("none", "no cap"), ("auto", "cap")):
            table.append([f"{title}, all sizes, schedules and policies, {what}", *cells(pick(split, family=family, cap=cap))])
    return markdown(["", "total", "activations and stash"], table)


def tables(results, rows):
    machine = results["machine"]
    policies = " / ".join(policy_title(policy) for policy in POLICIES)
    parts = [
        f"    {results['command']}\n\n{machine['cpu']}, {machine['cores']} cores, commit {short(results['commit'])}, "
        f"{results['precision']}, {len(rows)} simulations\n",
        "Memory factor: peak bytes of the fullest rank over those of the same schedule with p2 off. *Total* includes parameters, "
        "gradients and optimizer state. *Samples* is the size of a micro-batch. * marks the models of the paper.\n",
        "## Ranges\n", range_table(results, rows),
        f"## Total, N = 4: {policies}\n", factor_table(results, rows, 4, "total_factor"),
        f"## Total, N = 8: {policies}\n", factor_table(results, rows, 8, "total_factor"),
        f"## Activations and stash alone, N = 4: {policies}\n", factor_table(results, rows, 4, "held_factor"),
        "## Causes: one micro-batch, all layers of a kind\n", cause_table(results),
        "## By size: 1F1B, N = 4, M = 8\n", growth_table(results, rows),
        "## Every schedule: lowest and highest total over all models\n", schedule_table(rows),
    ]
    return "\n".join(parts)


def plot(results, rows, path):
    families = list({model["family"]: None for model in results["models"]})
    kinds = [("total_factor", "total"), ("held_factor", "activations and stash")]
    figure, grid = plt.subplots(2, len(families), figsize=(3.6 * len(families), 7), sharex=True, sharey="row",
                                squeeze=False)
    for column, family in enumerate(families):
        of = [model for model in results["models"] if model["family"] == family]
        of.sort(key=lambda model: model["parameters"])
        sizes = [model["parameters"] for model in of]
        for axes, (factor, title) in zip(grid[:, column], kinds):
            if factor == "total_factor":
                for bound in PAPER:
                    axes.axhline(bound, color="0.3", linestyle=":", linewidth=1)
            every = [[row[factor] for row in pick(rows, family=family, model=model["model"])
                      if row["p2"] != "off" and row["cap"] == "none"] for model in of]
            axes.fill_between(sizes, [min(e) for e in every], [max(e) for e in every], color="C4", alpha=0.15, linewidth=0)
            for policy in POLICIES:
                for ranks, line in ((4, "o-"), (8, "s--")):
                    values = [one(rows, "1f1b", ranks, 2, policy, model)[factor] for model in of]
                    axes.plot(sizes, values, line, color=COLOURS[policy], markersize=3.5, linewidth=1.2)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator([1e8, 1e9, 1e10]))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}B" if value >= 1e9 else f"{value / 1e6:g}M")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4, 6]))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.grid(True, which="major", alpha=0.3)
            if column == 0:
                axes.set_ylabel(f"{title}: 2BP over p2 off")
        grid[0, column].set_title(models.FAMILIES[family]["title"])
        grid[1, column].set_xlabel("parameters")
    handles = [plt.Line2D([], [], color=COLOURS[policy], label="1F1B, " + policy_title(policy)) for policy in POLICIES]
    handles += [plt.Line2D([], [], color="0.3", marker="o", markersize=3.5, label="N = 4, M = 8"),
                plt.Line2D([], [], color="0.3", marker="s", markersize=3.5, linestyle="--", label="N = 8, M = 16"),
                plt.Rectangle((0, 0), 1, 1, color="C4", alpha=0.15, label="every schedule and policy without a cap"),
                plt.Line2D([], [], color="0.3", linestyle=":", label=f"the paper's range, {PAPER[0]} to {PAPER[1]}")]
    figure.legend(handles=handles, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
