#!/usr/bin/env python3
"""Trains random models under random settings that must not change the bits, and compares losses, norms and saved weights with
those of one stage without 2BP. What varies: schedule, ranks, p2 policy, order, gradients, memory cap, recomputation, steps that overlap,
and whether the run is stopped and resumed. Models of text read random tokens, samples with padding, packed documents, or
chats, as whole sequences or in slices. Ranks have one or two threads. Chats need Python with transformers.

    tests/random/bits_test.py PROGRAM                   a few cases
    tests/random/bits_test.py PROGRAM --count 500       many
    tests/random/bits_test.py PROGRAM --case 17         one of them again, with its settings
"""
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import documents
from command_line import options_of

SCHEDULES = ["naive", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
             "interleaved-zb", "dualpipe-v", "auto"]


def tokens(dice, kind):
    heads = dice.choice([1, 2, 4])
    return [f"model.type={kind}", "data.synthetic=tokens", f"data.sequence={dice.randint(4, 40)}", f"model.layers={dice.randint(2, 5)}",
            f"model.vocab={dice.randint(260, 300)}", f"model.tied={dice.choice(['true', 'false'])}",
            f"model.dim={heads * 2 * dice.randint(4, 16)}", *([f"model.heads={heads}"] if kind != "mamba" else [])]


# A few families of decoders, with what sets them apart.
DECODERS = {"llama": ["model.rope_scaling=yarn", "model.rope_factor=4"], "mistral": ["model.windows=6"],
            "qwen3": ["model.windows=0,5"], "olmo2": [], "gemma2": ["model.windows=3,0"], "smollm3": ["model.windows=4,0,4"],
            "qwen3_moe": ["model.experts=5", "model.experts_per_token=2", "model.hidden=20", "model.balance_loss=0.1"],
            "deepseek_v3": ["model.experts=6", "model.experts_per_token=2", "model.expert_groups=2", "model.hidden=20", "model.dense_layers=1",
                            "model.balance_rate=0.01"],
            "gpt2": ["model.dropout=0.1"], "gpt_neox": ["model.rope_part=1", "model.attention_dropout=0.1"]}


LORA = {"gpt2": "c_attn,c_proj", "deepseek_v3": "kv_b_proj,o_proj", "gpt_neox": "query_key_value,dense"}


def model_of(dice):
    kind = dice.choice(["decoder", "bert", "mamba", "resnet", "mlp"])
    if kind == "resnet":
        return kind, ["model.type=resnet", f"model.depths={dice.randint(1, 3)},{dice.randint(1, 2)}", "model.widths=16,32", "model.stem=8",
                      f"model.block={dice.choice(['basic', 'bottleneck'])}", "model.classes=7", "data.synthetic=images",
                      f"data.image_size={dice.choice([16, 24])}"]
    if kind == "mlp":
        return kind, ["model.type=mlp", f"model.dim={dice.randint(8, 60)}", f"model.layers={dice.randint(3, 6)}", "data.synthetic=vectors"]
    if kind == "decoder":
        kind = dice.choice(list(DECODERS))
    settings = tokens(dice, kind) + DECODERS.get(kind, [])
    if kind == "bert":
        settings += [f"model.dropout={dice.choice([0, 0.1])}", f"model.attention_dropout={dice.choice([0, 0.1])}"]
    if kind in DECODERS and dice.random() < 0.3:
        settings = [one for one in settings if "balance_rate" not in one]  # adapters freeze what it moves
        settings += ["model.lora=3", f"model.lora_targets={LORA.get(kind, 'q_proj,v_proj')}"]
    return kind, settings


def write_array(path, rows):
    """Writes a .npy file of int32."""
    shape = f"({len(rows)}, {len(rows[0])})"
    header = "{'descr': '<i4', 'fortran_order': False, 'shape': " + shape + ", }"
    header = header.ljust(117) + "\n"
    numbers = [number for row in rows for number in row]
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() +
                     struct.pack(f"<{len(numbers)}i", *numbers))


def write_padded_samples(folder, dice, sequence):
    """Samples for data.arrays with padding anywhere but in the middle, where a label counts."""
    ids = [[dice.randrange(256) for _ in range(sequence)] for _ in range(48)]
    mask = [[int(column == sequence // 2 or dice.random() < 0.7) for column in range(sequence)] for _ in ids]
    write_array(folder / "input_ids.npy", ids)
    write_array(folder / "attention_mask.npy", mask)
    write_array(folder / "labels.npy", [[id if seen else -100 for id, seen in zip(*row)] for row in zip(ids, mask)])


def training_of(dice, kind):
    reduced = kind not in ("resnet", "mlp") and dice.random() < 0.4
    return [f"pipeline.micro_batches={dice.randint(1, 8)}", f"pipeline.micro_batch_size={dice.randint(1, 3)}",
            f"optimizer.type={dice.choice(['adamw', 'adam', 'sgd', 'muon'])}", f"train.clip_norm={dice.choice([0, 0.5])}",
            f"train.precision={dice.choice(['bf16', 'fp16']) if reduced else 'fp32'}", f"train.seed={dice.randint(1, 1000)}",
            f"train.steps={dice.randint(3, 6)}", "data.held_out=0"]


def text_of(dice, common, kind, folder):
    """Exchanges random tokens for samples with padding, or for documents if the model is causal."""
    sequence = int(next(text for text in common if text.startswith("data.sequence=")).split("=")[1])
    source = dice.choice(["tokens", "padded"] + ["documents"] * (3 if kind != "bert" else 0))
    rest = [text for text in common if not text.startswith("data.synthetic=")]
    if source == "tokens":
        return common, sequence
    if source == "padded":
        write_padded_samples(folder, dice, sequence)
        return [*rest, f"data.arrays={folder}"], sequence
    vocab = dice.choice([documents.BYTES, documents.VOCAB, documents.VOCAB])
    settings, samples, _ = documents.draw(folder, dice, vocab, ("stream", "none") if kind == "mamba" else documents.PACKINGS)
    changed = ("data.sequence=", "model.vocab=", "pipeline.micro_batches=", "pipeline.micro_batch_size=")
    size = dice.randint(1, min(3, samples))
    sequence = int(next(text for text in settings if text.startswith("data.sequence=")).split("=")[1])
    return [*(text for text in rest if not text.startswith(changed)), *settings, f"model.vocab={vocab}",
            f"pipeline.micro_batches={dice.randint(1, samples // size)}", f"pipeline.micro_batch_size={size}"], sequence


def way_of(dice, sliced, streams, rounds):
    """Settings that must not change the bits."""
    gradients = dice.choice(['kept', 'auto'] + ['streamed'] * 2 * streams)  # streamed ones need W that waits
    schedule = dice.choice([one for one in SCHEDULES if not sliced or one != 'dualpipe-v'])
    policy = dice.choice(['off'] * (gradients != 'streamed') + ['end', 'cooldown', 'fill'])  # a searched schedule has its own
    return [f"pipeline.schedule={schedule}",
            f"pipeline.ranks={dice.randint(1, 4)}",
            *([f"pipeline.p2={policy}"] if schedule != "auto" else []), f"pipeline.p2_order={dice.choice(['oldest', 'bucket'])}",
            f"pipeline.gradients={gradients}",
            f"pipeline.memory_cap={dice.choice(['auto', '0', '1.2x'])}", f"pipeline.run_ahead={dice.choice(['auto', 'on', 'off'])}",
            f"pipeline.recompute={dice.choice(['[]', 'activations'] + ['derivatives', 'both'] * (not sliced and not rounds))}"]


def train(program, folder, settings, resumed_after=None):
    """Losses and norms of all steps, and the saved weights."""
    metrics = folder / "metrics.jsonl"
    command = [program, "train", "--metrics", metrics, "--set", *settings, "pipeline.pin=false"]
    if "model.type=mlp" not in settings:
        command.append(f"save.model={folder}/model")
    runs = [command]
    if resumed_after is not None:
        command += [f"save.checkpoints={folder}/checkpoints", "save.every=1"]
        runs = [[*command, f"train.steps={resumed_after}"], [*command, "--resume"]]
    for run in runs:
        done = subprocess.run([str(part) for part in run], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
    steps = {}
    for line in metrics.read_text().splitlines():
        step = json.loads(line)
        if "grad_norm" in step:
            steps[step["step"]] = [step["loss"], step["grad_norm"]]
    return steps, {path.name: path.read_bytes() for path in sorted((folder / "model").glob("*.safetensors"))}


def run_case(number, seed, program, verbose):
    dice = random.Random(f"{seed} {number}")
    kind, model = model_of(dice)
    common = [*model, *training_of(dice, kind), "optimizer.schedule=constant"]
    steps = int(next(one for one in common if one.startswith("train.steps=")).split("=")[1])
    common.append(f"pipeline.threads={dice.choice([1, 1, 2])}")  # the kernels of math libraries depend on it
    common.append(f"pipeline.stash={dice.choice(['full', 'full', 'bf16'])}")
    resumed_after = dice.randint(1, steps - 1) if dice.random() < 0.3 else None
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other, tempfile.TemporaryDirectory() as data:
        sliced = False
        if "data.synthetic=tokens" in common:
            common, sequence = text_of(dice, common, kind, pathlib.Path(data))
            sliced = kind != "bert" and dice.random() < 0.4
            common += documents.slices_of(dice, sequence) if sliced else []
        way = way_of(dice, sliced, "train.clip_norm=0" in common and "train.precision=fp16" not in common, "pipeline.stash=bf16" in common)
        if verbose:
            print(*common, "", *way, f"resumed after {resumed_after}", sep="\n")
        reference = ["pipeline.schedule=gpipe", "pipeline.ranks=1", "pipeline.p2=off"]
        try:
            expected = train(program, pathlib.Path(one), [*common, *reference])
            found = train(program, pathlib.Path(other), [*common, *way], resumed_after)
        except RuntimeError as error:
            text = str(error)
            refused = "layers, too few for" in text or "pip install" in text
            return f"left out: {text.splitlines()[-1]}" if refused else f"fails: {text}"
    for what, a, b in zip(("losses and norms", "weights"), expected, found):
        if a != b:
            return f"other {what}: {a if what != 'weights' else sorted(a)}, {b if what != 'weights' else sorted(b)}"
    return ""


def main():
    options = options_of(__doc__, 6)
    failed, left_out = 0, []
    for number in options.numbers:
        wrong = run_case(number, options.seed, options.program, options.case is not None)
        if wrong.startswith("left out"):
            left_out.append(wrong)
        elif wrong:
            failed += 1
            print(f"case {number} of seed {options.seed}: {wrong}", flush=True)
    for why in sorted(set(left_out)):
        print(f"{left_out.count(why)} {why}")
    print(f"{len(options.numbers)} cases, {failed} differ, {len(left_out)} left out")
    sys.exit(failed > 0 or len(left_out) == len(options.numbers))


if __name__ == "__main__":
    main()
