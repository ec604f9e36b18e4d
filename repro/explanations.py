"""Explanations of surprising figures, for the pages with the tables of the experiments. The figures come from the kept results."""
import re

from claims import TITLES, models_of, times
from experiment import ROOT, median
from schedules_of_paper import PAPER, SCHEDULES
from tables import figures, results_of, select, table

KEPT = ROOT / "benchmarks/results"
MIB = 2**20


def kept(name, pattern):
    """The groups of a pattern in a kept output of benchmarks/run."""
    return re.search(pattern, (KEPT / f"{name}.txt").read_text(), re.MULTILINE).groups()


def held(model, kind):
    """What a layer holds after F and after I, by the kept profile."""
    return kept(f"profile_{model}", rf"^{kind} .*?(\S+ [MK]iB) +(\S+ [MK]iB) +\d+$")


def late_messages():
    bubble = results_of("bubble")
    of = lambda n, name: f"{figures(bubble, schedule='1f1b-1', p2='fill', ranks=n)[name]:.3f}"
    cooldown = figures(bubble, schedule="1f1b-1", p2="cooldown", ranks=8)
    double = figures(bubble, schedule="1f1b-2", p2="fill", ranks=8)
    simulated, = kept("late_messages", r"^bubble ratio +(\S+) %")
    return (f"## Fill on four and eight ranks\n\nUnder 1F1B-1 with `fill`, the measured bubble ratio is {of(4, 'idle')} on four ranks and {of(8, 'idle')} on eight. The formula "
            f"gives {of(4, 'formula')} and {of(8, 'formula')}. The formula assumes that messages take no time. With F = I = W, each message then arrives exactly when a piece of W ends. "
            "A real message arrives a little later. By then the rank has begun the next piece of W, and it cannot interrupt that piece. The delay passes on from rank to rank. In this "
            "experiment, W has four pieces of 2.5 ms per stage.\n\n"
            f"The simulator confirms this. On eight ranks, messages that take a thousandth of F raise the bubble ratio to {float(simulated) / 100:.3f} "
            "([output](../../benchmarks/results/late_messages.txt)). We have not established the cause of the remaining difference. Finer pieces of W lose less. `cooldown` starts no W before a "
            f"late message, and its ratio on eight ranks is {cooldown['idle']:.3f}. 1F1B-2 loses next to nothing ({double['idle']:.3f}; formula: {double['formula']:.3f}). Layers with unequal "
            "costs rarely have such coincidences.")


def cap_of_bert():
    throughput, peaks = results_of("throughput"), results_of("peak_memory")
    rows = []
    for schedule in SCHEDULES:
        paper, fill = (median(figures(throughput, model="bert", schedule=schedule, way=way)["gain"]) for way in (PAPER, "fill"))
        cost = median(figures(peaks, model="bert", schedule=schedule, way="fill", cap="auto")["throughput"])
        peak = figures(peaks, model="bert", schedule=schedule, way="fill", cap="0")["factor"]
        rows.append([TITLES[schedule], times(paper), times(fill), times(cost), times(fill / cost), times(peak)])
    after_f, after_i = held("bert", "mlp")
    return ("## BERT: fill behind 2BP as in the paper\n\nBERT gains less with `fill` than with *2BP as in the paper*. The reason is the memory cap. *2BP as in the paper* runs "
            f"without a cap, and `fill` runs with the default one. The cap affects BERT most: an MLP block holds {after_f} after F but {after_i} after I "
            "([profile](../../benchmarks/results/profile_bert.txt)). So under the cap, a rank must often run W before its next F or I, and the other rank waits for it.\n\n"
            "[Peak memory](../peak_memory/results.md) measures `fill` with and without the cap. The table divides the gain above by the cost of the cap. The result is close to *2BP as in the paper*. The "
            "simulator agrees: without a cap, it gives `fill` and `cooldown` the same step time for BERT under 1F1B-1. ResNet loses throughput for the same reason.\n\n" +
            table(["schedule", "as in the paper, no cap", "`fill`, default cap", "throughput with the cap / without", "`fill`, cost of the cap removed", "peak memory of `fill`, no cap"], rows))


def recomputation():
    result = results_of("derivative_checkpointing")
    mib = lambda figure, **key: f"{figures(result, **key)[figure] / MIB:.0f}"
    of = lambda mode, figure: mib(figure, schedule="1f1b", p2="fill", recompute=mode)
    gpipe = lambda mode: mib("held_bytes", schedule="gpipe", p2="off", recompute=mode)
    return (f"## Recomputed activations that hold more\n\nUnder 1F1B with `fill` and without a cap, a LLaMA with recomputed activations holds {of('activations', 'held_bytes')} MiB, which is more than "
            f"the {of('none', 'held_bytes')} MiB without recomputation. There are two causes.\n\n"
            "- `activations` saves memory only between F and I. After I, a layer holds what W needs, with or without recomputation: "
            f"{held('llama', 'mlp')[1]} for an MLP block and {held('llama', 'attention')[1]} for attention ([profile](../../benchmarks/results/profile_llama.txt)). Under `fill` without a cap, "
            "W of all four micro-batches waits, so this part decides the peak. `derivatives` and `both` save that part.\n"
            "- Recomputation changes the times of the layers, so the stages are cut elsewhere. A repeated run had 10 and 8 layers without recomputation, and 9 and 9 with it. The last stage then has "
            f"half of all blocks and also the head, which holds {held('llama', 'head')[1]} per micro-batch. So its peak is higher than the former peak, which was that of the first stage. GPipe without 2BP rises from {gpipe('none')} to "
            f"{gpipe('derivatives')} MiB with `derivatives` for the same reason.\n\n"
            f"The column counts activations and stash only. The peak of all memory, weights included, falls from {of('none', 'peak_bytes')} to {of('activations', 'peak_bytes')} MiB.")


def above_the_cap():
    peaks = results_of("peak_memory")
    rows = []
    for model in models_of(peaks):
        excess = {s: figures(peaks, model=model, schedule=s, way="fill", cap="auto")["peak_bytes"] - figures(peaks, model=model, schedule=s, way="standard", cap="auto")["peak_bytes"]
                  for s in SCHEDULES}
        rows.append([model, *(f"{excess[s] / MIB:.2f}" for s in SCHEDULES)])
    highest = max(row["figures"]["factor"] for row in select(peaks, way="fill", cap="auto"))
    return ("## Peaks just above those without 2BP\n\nThe default cap is meant to keep the peak at that of the same schedule without 2BP. Some cases nevertheless reach "
            f"{times(highest, 3)}. The program plans the cap from a profile of single layers, and that profile misses some bytes. The table shows the excess of `fill` in MiB.\n\n" +
            table(["model", *TITLES.values()], rows) +
            "\n\n- *Mamba* exceeds the peak by exactly 1 MiB. This is one tensor: the gradient of the residual connection at the cut between the ranks (2 x 256 x 512 numbers of 4 bytes). Ranks are threads, so "
            "they pass the tensor on without a copy. The sender still needs it for its own W, and the meter counts it on the receiver until that W has run. The cap of the receiver cannot "
            "release it.\n"
            "- *ResNet* exceeds it while W of a convolution runs. W of a block runs in pieces, and each piece needs temporary memory. The cap reserves the peak of the whole block, from which the "
            "memory released by earlier pieces is already subtracted. A single piece may need more than that.\n"
            "- *LLaMA* exceeds it by temporary memory during one I. We have not found the cause.")


OF = {"bubble": late_messages, "throughput": cap_of_bert, "derivative_checkpointing": recomputation, "peak_memory": above_the_cap}


def explanations(name):
    return [OF[name]()] if name in OF else []
