"""Verdicts on the claims of the paper, computed from the kept results. docs/results.md has them."""
from experiment import median
from formulas import FORMULAS, IN_PAPER, speed_up, text_of
from schedules_of_paper import PAPER, SCHEDULES
from tables import figures, number, results_of, results_on_gpus, select, table

LOWEST, HIGHEST = 1.10, 1.70  # the paper's range of speed-ups
LEAST, MOST = 1.02, 2.67  # and of peak memory
CLOSE = 0.005  # two bubble ratios agree
PAPERS_MODELS = {"LLaMA 7B": ("llama", "7B"), "BERT Large": ("bert", "Large"), "Mamba 1.4B": ("mamba", "1.4B"), "ResNet 152": ("resnet", "152")}
TITLES = {"naive": "naive", "gpipe": "GPipe", "1f1b-1": "1F1B-1", "1f1b-2": "1F1B-2"}
REPRODUCED, PARTLY, NOT, NOT_MEASURED, ANSWERED = "reproduced", "partly reproduced", "not reproduced", "not measured", "answered"


def times(value, digits=2):
    return f"{value:.{digits}f}x"


def span(values, digits=2):
    least, most = times(min(values), digits), times(max(values), digits)
    return least if least == most else f"{least} to {most}"


def models_of(result):
    return list(dict.fromkeys(row["key"]["model"] for row in result["rows"]))


def speed_ups(throughput):
    """(model, schedule) -> speed-up of 2BP as in the paper."""
    return {(row["key"]["model"], row["key"]["schedule"]): row["figures"]["gain"] for row in select(throughput, way=PAPER)}


def of_case(case):
    return f"{case[0]}, {TITLES[case[1]]}"


def every_case(throughput):
    gains = speed_ups(throughput)
    faster = [case for case, gain in gains.items() if gain["low"] > 1]
    lowest = min(gains, key=lambda case: gains[case]["median"])
    return ("2BP raises the throughput in every case.",
            f"It does so in {len(faster)} of {len(gains)} cases, in every round. The smallest median is {times(gains[lowest]['median'])} ({of_case(lowest)}).",
            REPRODUCED if len(faster) == len(gains) else PARTLY, "", ("throughput",))


def range_of_gains(throughput):
    gains = {case: median(gain) for case, gain in speed_ups(throughput).items()}
    reach = [case for case, gain in gains.items() if gain >= LOWEST]
    highest = max(gains, key=gains.get)
    limits = ", ".join(f"{times(speed_up(schedule, 2), 3)} ({TITLES[schedule]})" for schedule in SCHEDULES)
    return (f"The speed-up is {LOWEST:.2f}x to {HIGHEST:.2f}x.",
            f"The medians are {span(gains.values())}. {len(reach)} of {len(gains)} cases reach {LOWEST:.2f}x. The highest is {of_case(highest)}.",
            REPRODUCED if len(reach) == len(gains) else PARTLY,
            f"With F = I = W and N = 2, the formulas allow {limits}.", ("throughput",))


def highest_gain(throughput, bubble):
    off, cooldown = (figures(bubble, schedule="1f1b-1", p2=p2, ranks=4)["idle"] for p2 in ("off", "cooldown"))
    small = median(figures(throughput, model="llama", schedule="1f1b-1", way=PAPER)["gain"])
    return ("LLaMA 7B under 1F1B-1 on four GPUs gains 1.70x.",
            f"A small LLaMA gains {times(small)} on two ranks. With F = I = W on four ranks, the executor gains "
            f"{times((1 - cooldown) / (1 - off))} (formula: {times(speed_up('1f1b-1', 4))}).",
            NOT_MEASURED, "With equal costs, even a step without any bubble would gain only 1.75x.",
            ("throughput", "bubble"))


def papers_sizes(model_size, cap):
    """(model, schedule) -> simulated peak memory of 2BP as in the paper, four ranks, over the same schedule without 2BP."""
    found = {}
    for title, (family, model) in PAPERS_MODELS.items():
        for schedule, (times_ranks, p2) in SCHEDULES.items():
            found[title, schedule] = figures(model_size, family=family, model=model, ranks=4, cap=cap, p2=p2,
                                             schedule=schedule.partition("-")[0], micro_batches=max(1, 4 * times_ranks))["factor"]
    return found


def peak_memory(peaks, model_size):
    measured = {cap: [row["figures"]["factor"] for row in select(peaks, way=PAPER, cap=cap)] for cap in ("0", "auto")}
    simulated = papers_sizes(model_size, "none")
    within = [case for case, factor in simulated.items() if factor >= LEAST]
    return (f"2BP raises the peak memory by {LEAST:.2f}x to {MOST:.2f}x.",
            f"Without a memory cap: {span(measured['0'])} measured (N = 2), {span(simulated.values())} simulated at the paper's sizes "
            f"(N = 4). With the default cap: at most {times(max(measured['auto']), 3)}.",
            PARTLY, f"{len(within)} of {len(simulated)} cells lie in the paper's range. The others stay below it: a LLaMA or Mamba layer "
            f"holds no more after I than after F.", ("peak_memory", "model_size"))


def bubble_falls(throughput, bubble):
    equal = {}
    for row in bubble["rows"]:
        key = row["key"]
        if key["p2"] != "off":
            equal[key["schedule"], key["ranks"]] = max(equal.get((key["schedule"], key["ranks"]), 0),
                                                      figures(bubble, **{**key, "p2": "off"})["idle"] / row["figures"]["idle"])
    real = {way: {} for way in (PAPER, "zero-bubble")}
    for way, its in real.items():
        for row in select(throughput, way=way):
            key = row["key"]
            its[key["model"], key["schedule"]] = (
                figures(throughput, model=key["model"], schedule=key["schedule"], way="standard")["idle"] / row["figures"]["idle"])
    best, paper, v = max(equal, key=equal.get), max(real[PAPER], key=real[PAPER].get), max(real["zero-bubble"], key=real["zero-bubble"].get)
    return ("The bubble ratio falls by up to 4x.",
            f"It falls by up to {equal[best]:.1f}x with F = I = W ({TITLES[best[0]]}, N = {best[1]}), and by up to {real[PAPER][paper]:.1f}x with real layers "
            f"({of_case(paper)}). ZB-V, which is not in the paper, reaches {real['zero-bubble'][v]:.1f}x ({v[0]}).",
            PARTLY, "With F = I = W, 2BP cannot divide the bubble of 1F1B by more than 3.",
            ("bubble", "throughput"))


def more_ranks(scaling):
    gains = {row["key"]["ranks"]: median(row["figures"]["gain"]) for row in select(scaling, how="emulated", schedule="1f1b", p2="fill")}
    few, many = min(gains), max(gains)
    return ("The gain shrinks a little with more GPUs.",
            f"With F = I = W and M = 2N, the gain of 1F1B grows from {times(gains[few])} (N = {few}) to {times(gains[many])} (N = {many}).",
            NOT if gains[many] > gains[few] else REPRODUCED,
            "The bubble grows with N, and so does the part that 2BP can fill. Messages between our ranks take almost no time. Several GPUs are not measured.", ("scaling",))


def apart(row):
    return abs(row["figures"]["idle"] - row["figures"]["formula"])


def bubble_formulas(bubble):
    far = [row for row in bubble["rows"] if apart(row) > CLOSE]
    in_paper = [row for row in far if (row["key"]["schedule"], row["key"]["p2"]) in IN_PAPER]
    names = " and ".join(f"{TITLES[r['key']['schedule']]} with `{r['key']['p2']}` at N = {r['key']['ranks']}" for r in far)
    return ("The paper's table gives bubble ratios as formulas.",
            f"The measured ratio is within {CLOSE} of the formula in {len(bubble['rows']) - len(far)} of {len(bubble['rows'])} cases." +
            (f" The exceptions are {names}." if far else ""), PARTLY if in_paper else REPRODUCED,
            "These are not the paper's formulas. A late message finds W running ([why](../repro/bubble/results.md#fill-on-four-and-eight-ranks))." if far and not in_paper else "", ("bubble",))


def gains_of(concatenation, figure):
    """Model -> gains of concatenated W over the loop, for all micro-batch sizes."""
    gains = {}
    for row in select(concatenation, batching="concat"):
        gains.setdefault(row["key"]["model"], []).append(median(row["figures"][figure]))
    return gains


def concatenates(concatenation):
    w, step = (gains_of(concatenation, f"{of}_gain") for of in ("w", "step"))
    spans = lambda gains: "; ".join(f"{span(values)} ({model})" for model, values in gains.items())
    return ("Open question: the gain of concatenating W of several micro-batches", f"W: {spans(w)}. Whole step: {spans(step)}.", "answered on CPUs",
            "ResNet's small convolutions gain. For the large matrix products of the other models, the copy takes more time than it saves.",
            ("concatenation",))


def checkpointing(result, peaks):
    of = lambda mode: figures(result, schedule="1f1b", p2="fill", recompute=mode)
    none, derivatives = of("none"), of("derivatives")
    free, capped = (figures(peaks, model="llama", schedule="1f1b-2", way="fill", cap=cap) for cap in ("0", "auto"))
    return ("Open question: checkpointing of intermediate derivatives",
            f"1F1B with `fill`: {none['held_bytes'] / 2**20:.0f} MiB of activations and stash become {derivatives['held_bytes'] / 2**20:.0f} MiB. The step takes "
            f"{times(median(derivatives['time']) / median(none['time']))} the time: {number(derivatives['time'])} against {number(none['time'])}, relative to 1F1B without 2BP.", ANSWERED,
            f"Recomputation costs more time than 2BP gains. The memory cap lowers the peak from {times(free['factor'])} to {times(capped['factor'])}, at "
            f"{times(median(capped['throughput']))} of the throughput.", ("derivative_checkpointing", "peak_memory"))


def streams(one_gpu):
    products, = results_on_gpus("streams_or_graphs")
    of = lambda way: figures(products, w=way)
    host = median(of("graph")["host_seconds"]) / median(of("serial")["host_seconds"])
    blocks = lambda count: [median(figures(one_gpu, model="blocks", schedule="twobp", micro_batches=count, way=way)["step_seconds"]) for way in ("standard", "fill")]
    gains = span([standard / fill for standard, fill in map(blocks, (1, 4))])
    return ("Open question: CUDA graphs or CUDA streams for W",
            f"Speed relative to W in the stream of F and I: {number(of('stream')['gain'])} with W in a second stream, "
            f"{number(of('layer_streams')['gain'])} with a stream for each layer, {number(of('graph')['gain'])} as a graph, which takes {host:.2f} of the "
            f"host's time. Whole steps: {gains} with W in a second stream. So twobp runs W in the stream of F and I.",
            "answered on one GPU", "F and I fill the GPU, and the step does not wait for the host.",
            ("streams_or_graphs", "one_gpu"))


def all_reduce(result):
    of = lambda method: f"{1e3 * figures(result, schedule='1f1b', link=4, method=method)['exposed_seconds']:.0f} ms"
    return ("Open question: overlap of the gradient all-reduce with compute",
            f"1F1B, slow link: a step waits {of('standard')} for the all-reduce without 2BP, {of('fill, oldest')} with 2BP, and {of('fill, bucket')} with 2BP that "
            "completes the gradients bucket by bucket.", ANSWERED, "2BP delays the gradients of all layers, unless W runs in the order of the buckets.",
            ("data_parallel",))


def sizes(result):
    factors = {cap: [row["figures"]["factor"] for row in select(result, cap=cap)] for cap in ("none", "auto")}
    return ("Open question: memory from 100M to 10B parameters",
            f"{span(factors['none'])} without a cap, at most {times(max(factors['auto']))} with it, over all our schedules.", "answered by simulation",
            "The kind of layer decides the factor, not the size of the model.", ("model_size",))


def real_data(result):
    gains = [number(figures(result, data=data, p2="fill")["gain"]) for data in ("text", "random tokens")]
    waits = max(row["figures"]["input_wait"] for row in result["rows"])
    return ("Open question: gain on real data with a real loader", f"2BP with `fill` gains {gains[0]} on text and {gains[1]} on random tokens.", ANSWERED,
            f"The loader reads ahead. Ranks wait for input for at most {100 * waits:.3f} % of a step.", ("real_data",))


def throughput_cells(throughput):
    gains = {case: median(gain) for case, gain in speed_ups(throughput).items()}
    verdict = lambda gain: REPRODUCED if LOWEST <= gain <= HIGHEST else "partly" if gain > 1 else NOT
    rows = [[model, *(f"{number(speed_ups(throughput)[model, s])}, {verdict(gains[model, s])}" for s in SCHEDULES)] for model in models_of(throughput)]
    rows.append(["limit by the formulas, N = 2", *(times(speed_up(s, 2), 3) for s in SCHEDULES)])
    return ("## The paper's claim by cell\n\nThe table shows the speed-up of 2BP as in the paper, on two ranks, over the same schedule without 2BP. We know only one "
            "cell of the paper: 1.70x for LLaMA 7B under 1F1B-1. For the other cells we know only the range. A cell is *reproduced* if its median lies in the paper's "
            "range. It is *partly* reproduced if 2BP is faster, but by less than 1.10x. The formulas assume F = I = W. Layers with other costs may exceed their limit.\n\n" +
            table(["model", *TITLES.values()], rows))


def memory_cells(model_size):
    factors, capped = papers_sizes(model_size, "none"), papers_sizes(model_size, "auto")
    verdict = lambda factor: "below" if factor < LEAST else "in range" if factor <= MOST else "above"
    rows = [[title, *(f"{times(factors[title, s])}, {verdict(factors[title, s])}" for s in SCHEDULES)] for title in PAPERS_MODELS]
    return ("## The paper's claim by cell\n\nThe table shows the peak memory of 2BP as in the paper, without a memory cap, over the same schedule without 2BP. It is simulated "
            "for the paper's models on four ranks, from measured bytes of real layers at the paper's sizes. We do not know the paper's figures for single cells. "
            f"Each cell says whether it lies in the paper's range ({LEAST:.2f}x to {MOST:.2f}x) or below it. With the default cap, no cell exceeds {times(max(capped.values()), 3)}.\n\n" + table(["model", *TITLES.values()], rows))


def bubble_cells(bubble):
    ranks = sorted({row["key"]["ranks"] for row in bubble["rows"]})
    rows = []
    for case in FORMULAS:
        its = [select(bubble, schedule=case[0], p2=case[1], ranks=n)[0] for n in ranks]
        far = [str(row["key"]["ranks"]) for row in its if apart(row) > CLOSE]
        verdict = f"except N = {' and '.join(far)}" if far else ""
        rows.append([TITLES[case[0]], f"`{case[1]}`", f"{text_of(case)}{'' if case in IN_PAPER else ', derived'}",
                     *(f"{row['figures']['formula']:.3f} / {row['figures']['idle']:.3f}" for row in its), f"{REPRODUCED} {verdict}".strip()])
    return ("## The formulas by cell\n\nEach cell shows the formula's bubble ratio and the measured one. The paper states some of the formulas. The formulas marked "
            "*derived* follow from its assumptions.\n\n" + table(["schedule", "p2", "formula", *(f"N = {n}" for n in ranks), "verdict"], rows))


def claims():
    """Each claim: what the paper says, what we find, the verdict, its reason, and the experiments that it rests on."""
    names = ("throughput", "peak_memory", "bubble", "scaling", "concatenation", "model_size", "derivative_checkpointing", "data_parallel", "real_data", "one_gpu")
    of = {name: results_of(name) for name in names}
    return [every_case(of["throughput"]), range_of_gains(of["throughput"]), highest_gain(of["throughput"], of["bubble"]),
            peak_memory(of["peak_memory"], of["model_size"]), bubble_falls(of["throughput"], of["bubble"]), more_ranks(of["scaling"]),
            bubble_formulas(of["bubble"]), concatenates(of["concatenation"]), checkpointing(of["derivative_checkpointing"], of["peak_memory"]), streams(of["one_gpu"]),
            all_reduce(of["data_parallel"]), sizes(of["model_size"]), real_data(of["real_data"])]


def cells(name):
    """The claims by cell, for the page with the tables of an experiment."""
    of = {"throughput": throughput_cells, "peak_memory": lambda _: memory_cells(results_of("model_size")), "bubble": bubble_cells}
    return [of[name](results_of(name))] if name in of else []
