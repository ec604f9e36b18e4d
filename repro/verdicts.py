"""For docs/results.md: the question of each experiment, and the figures that decide it besides the paper's claims."""
from claims import span, times
from experiment import median
from schedules_of_paper import PAPER
from tables import figures, number, results_elsewhere, select, table

QUESTIONS = {
    "throughput": "How much faster is a step with 2BP? Four models under the paper's four schedules.",
    "peak_memory": "How much more memory does the fullest rank need with 2BP?",
    "bubble": "Do ranks wait as long as the formulas say? F = I = W; layers are emulated.",
    "scaling": "How does the gain of 1F1B with M = 2N change with the number of ranks? LLaMA on 2 ranks, emulated layers up to 32, simulated up to 1024.",
    "concatenation": "Is one W on the concatenated tensors of four micro-batches faster than four W in a loop? GPipe, all W at the end.",
    "model_size": "Does the memory factor of 2BP depend on the size of a model? Bytes of real layers, simulated schedules, 4 and 8 ranks.",
    "derivative_checkpointing": "What does it cost to compute intermediate derivatives again instead of keeping them? LLaMA, M = 4, no memory cap.",
    "streams_or_graphs": "Should W run in a CUDA stream of its own, or as a CUDA graph? The matrix products of one rank of the 7B transformer, four micro-batches.",
    "data_parallel": "How much of the gradient all-reduce still overlaps with compute under 2BP? Two replicas of two ranks, emulated layers, a slow link.",
    "real_data": "Does 2BP gain as much on real text with a real loader as on random tokens?",
    "rivals": "How does a step compare with `torch.distributed.pipelining`, with the same model, data and optimizer?",
    "one_gpu": "What does 2BP gain when four stages share one GPU, and how does a whole GPU compare with PyTorch eager? Layers of the 7B transformer, bf16.",
    "memory_budget": "How much throughput remains if `twobp plan` may use at most 1.05 times the memory of 1F1B without 2BP?",
    "run_ahead": "What does a step gain if ranks need not wait for each other at its end? F = I = W, emulated layers, 4 to 32 ranks.",
}


def throughput(result):
    ways = {way: [median(row["figures"]["gain"]) for row in select(result, way=way)] for way in (PAPER, "fill", "zero-bubble")}
    apart = sorted(abs(median(row["figures"]["beyond_predicted"])) for way in ways for row in select(result, way=way))
    best = {way: max(select(result, way=way), key=lambda row: median(row["figures"]["gain"])) for way in ways}
    named = lambda way: f"{number(best[way]['figures']['gain'])} for {best[way]['key']['model']} under {best[way]['key']['schedule']}"
    return (table(["way", "medians of all cases", "highest"], [[way, span(gains), named(way)] for way, gains in ways.items()]) +
            f"\n\nThe simulator predicts the measured speed-ups within {100 * apart[-1]:.1f} %. BERT and ResNet gain less with `fill` than with *{PAPER}*, because "
            "they run under the [memory cap](../repro/throughput/results.md#bert-fill-behind-2bp-as-in-the-paper).")


def peak_memory(result):
    rows = []
    for cap, title in {"auto": "default: the peak without 2BP", "1.05x": "1.05 times that", "0": "none"}.items():
        its = select(result, way="fill", cap=cap)
        rows.append([title, span([row["figures"]["factor"] for row in its]),
                     "1" if cap == "0" else span([median(row["figures"]["throughput"]) for row in its])])
    most = max(row["figures"]["factor"] for row in select(result, way="fill", cap="auto"))
    low = min(select(result, way="fill", cap="auto"), key=lambda row: median(row["figures"]["throughput"]))
    return (table(["cap, with `fill`", "peak over that without 2BP", "throughput over that without a cap"], rows) +
            f"\n\nThe default costs most for {low['key']['model']} under {low['key']['schedule']}: {number(low['figures']['throughput'])}. Peaks reach at most "
            f"{times(most, 3)}, for [known reasons](../repro/peak_memory/results.md#peaks-just-above-those-without-2bp).")


def scaling(result):
    real = {way: number(figures(result, how="real", schedule=schedule, p2="fill", ranks=2)["gain"]) for way, schedule in (("1F1B", "1f1b"), ("ZB-V", "zb-v"))}
    v = {row["key"]["ranks"]: row["figures"]["gain"] for row in select(result, how="emulated", schedule="zb-v")}
    return (f"LLaMA on two ranks, `fill`: 1F1B gains {real['1F1B']} and ZB-V {real['ZB-V']}. Emulated ZB-V with `placed` gains {times(median(v[min(v)]))} "
            f"(N = {min(v)}) to {times(median(v[max(v)]))} (N = {max(v)}).")


def one_gpu(result):
    of = lambda **key: number(figures(result, launch="one by one", **key)["gain"])
    stages = [[title, *(of(ranks=4, schedule=schedule, way=way) for schedule in ("1f1b-1", "1f1b-2"))]
              for way, title in {PAPER: PAPER, "fill": "`fill`", "zero-bubble": "ZB-V"}.items()]
    text = ("Speed-up of four stages over the same schedule without 2BP:\n\n" + table(["way", "1F1B-1", "1F1B-2"], stages) +
            f"\n\nOne rank on the whole GPU, eight layers, M = 8, was {of(ranks=1, model='whole', way='fill')} times as fast as PyTorch eager with `fill` and "
            f"{of(ranks=1, model='whole', schedule='twobp', way='standard')} times without 2BP.")
    for before in results_elsewhere("one_gpu"):
        seconds = lambda way, launch: median(figures(before, schedule="twobp", way=way, micro_batches=4, launch=launch)["step_seconds"])
        shares = [seconds(way, "graph") / seconds(way, "one by one") for way in ("fill", "standard")]
        text += f" Launched as one CUDA graph, a step of four blocks took {shares[0]:.2f} (with `fill`) and {shares[1]:.2f} (without 2BP) of the time in an earlier run."
    text += " W had a stream of its own in these runs; it no longer has ([what has run](distributed.md#what-has-run-on-a-gpu))."
    return text


def rivals(result):
    return ("[README](../README.md#results) has the table. Our ranks are threads, and PyTorch's are processes over Gloo. We may cut within a block, so better balance is a part of the lead.")


def memory_budget(result):
    of = {way: [row["figures"] for row in select(result, way=way)] for way in ("1F1B without 2BP", "2BP within the budget", "2BP, any memory")}
    share = {way: span([median(its["throughput"]) for its in rows]) for way, rows in of.items()}
    memory = {way: span([its["factor"] for its in rows]) for way, rows in of.items()}
    return ("Four models, M = 2 and 4. Throughput is relative to the choice with any amount of memory:\n\n" +
            table(["way", "memory", "throughput"], [[way, memory[way], share[way]] for way in of]))


def run_ahead(result):
    rows = []
    for schedule, p2 in dict.fromkeys((row["key"]["schedule"], row["key"]["p2"]) for row in result["rows"]):
        its = [row["figures"]["gain"] for row in select(result, schedule=schedule, p2=p2)]
        rows.append([schedule, p2, span([median(gain) for gain in its]), f"{min(gain['low'] for gain in its):.2f} to {max(gain['high'] for gain in its):.2f}"])
    return ("Speed-up over steps with a barrier, with and without clipping of the gradients:\n\n" + table(["schedule", "p2", "medians", "rounds"], rows) +
            "\n\n1F1B with `fill` gains nothing beyond the spread.")


VERDICTS = {"throughput": throughput, "peak_memory": peak_memory, "scaling": scaling, "one_gpu": one_gpu, "rivals": rivals, "memory_budget": memory_budget,
            "run_ahead": run_ahead}
