#!/usr/bin/env python3
"""Trains random models on random data for three steps, here and with transformers and torch, and compares all weights.
What varies: the model type and its sizes, labels and masks, documents and chats and how they are packed, the optimizer, clipping,
the schedule, slices, and the numbers of ranks and threads. transformers sees each document by itself.

    tests/random/torch_test.py PROGRAM                   one case of each model type
    tests/random/torch_test.py PROGRAM --count 200       many
    tests/random/torch_test.py PROGRAM --case 17         one of them again, with its settings

Exit code 77: a Python package is missing.
"""
import copy
import importlib.util
import json
import pathlib
import random
import subprocess
import sys
import tempfile

for package in ("torch", "transformers", "safetensors"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)
import numpy
import decoders
import documents
import torch
import transformers
from command_line import options_of, run_cases
from safetensors.torch import load_file

STEPS = 3
# Of the change of a tensor: both sides add the same numbers in different orders.
TOLERANCE = 2e-3
ROUNDING, NUDGED = 3e-7, 80  # part of the weights, and how often
LEAST_CHANGE = 1e-4  # some gradients are zero but for rounding, such as those of a key's bias
LOSS_TOLERANCE = 1e-5  # of a loss
SCHEDULES = ["naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"]


def decoder(dice):
    config = dice.choice(decoders.FAMILIES + decoders.MIXTURES)(dice)
    config.vocab_size = dice.choice([config.vocab_size, documents.BYTES, documents.VOCAB, documents.VOCAB])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def bert(dice):
    heads = dice.choice([1, 2, 4])
    return transformers.BertForMaskedLM(transformers.BertConfig(
        hidden_size=heads * dice.randint(4, 12), num_hidden_layers=dice.randint(1, 3), num_attention_heads=heads,
        intermediate_size=dice.randint(8, 70), vocab_size=dice.randint(40, 90), max_position_embeddings=dice.randint(32, 48),
        type_vocab_size=dice.randint(1, 3), hidden_act=dice.choice(["gelu", "gelu_new"]), hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, tie_word_embeddings=dice.random() < 0.5, initializer_range=0.1,
        pad_token_id=dice.choice([None, 0, 5])))


def mamba(dice):
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        hidden_size=4 * dice.randint(3, 8), num_hidden_layers=dice.randint(1, 3), state_size=dice.randint(2, 9),
        conv_kernel=dice.randint(2, 5), expand=dice.choice([1, 2]), time_step_rank=dice.randint(1, 4),
        vocab_size=dice.choice([dice.randint(40, 90), documents.BYTES, documents.VOCAB]), tie_word_embeddings=dice.random() < 0.5,
        initializer_range=0.1, pad_token_id=None, use_cache=False))


def resnet(dice):
    block = dice.choice(["basic", "bottleneck"])
    count = dice.randint(1, 2)
    width = 4 * dice.randint(1, 3)
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(
        embedding_size=4 * dice.randint(1, 3), hidden_sizes=[width * 2**i for i in range(count)],
        depths=[dice.randint(1, 2) for _ in range(count)], layer_type=block, num_labels=dice.randint(2, 9)))


MODELS = {"decoder": decoder, "bert": bert, "mamba": mamba, "resnet": resnet}


def labels_of(ids, dice, kind):
    """Copies of the ids, of which some do not count."""
    labels = ids.copy()
    source = numpy.random.default_rng(dice.randrange(2**32))
    labels[source.random(ids.shape) < (0.8 if kind == "bert" else dice.choice([0.0, 0.3]))] = -100
    middle = ids.shape[1] // 2
    labels[:, middle] = ids[:, middle]  # so that every step counts something
    return labels


def mask_of(shape, source, dice):
    """Padding on the left, on the right, or anywhere but in the middle column, whose label counts."""
    columns, middle = numpy.arange(shape[1]), shape[1] // 2
    kind = dice.choice(["left", "right", "anywhere"])
    if kind == "left":
        seen = columns >= source.integers(0, middle + 1, (shape[0], 1))
    elif kind == "right":
        seen = columns < source.integers(middle + 1, shape[1] + 1, (shape[0], 1))
    else:
        seen = source.random(shape) < 0.8
    seen[:, middle] = True
    return seen.astype(numpy.int64)


def data_of(kind, model, samples, dice):
    """Arrays by name, as data.arrays reads them."""
    source = numpy.random.default_rng(dice.randrange(2**32))
    config = model.config
    if kind == "resnet":
        # Statistics of a few numbers would magnify the last digits.
        size = dice.choice([32, 40, 65])
        return {"pixel_values": source.standard_normal((samples, 3, size, size), numpy.float32),
                "labels": source.integers(0, config.num_labels, samples, dtype=numpy.int64)}
    shape = (samples, dice.randint(5, 32))
    ids = source.integers(0, config.vocab_size, shape, dtype=numpy.int64)
    data = {"input_ids": ids, "labels": labels_of(ids, dice, kind)}
    # Gemma 2's eager attention gives queries that see only padding the mean of all values, SDPA gives zeros, as we do.
    if config.model_type != "gemma2" and dice.random() < 0.7:
        data["attention_mask"] = mask = mask_of(shape, source, dice)
        if kind != "bert":
            data["labels"][mask == 0] = -100
    if kind == "bert":
        if config.type_vocab_size > 1:
            data["token_type_ids"] = source.integers(0, config.type_vocab_size, shape, dtype=numpy.int64)
    return data


def groups(model, decay):
    """Only matrices and kernels decay, except Mamba's decay rates."""
    decays = lambda name, p: p.dim() > 1 and not name.endswith("A_log")
    return [{"params": [p for name, p in model.named_parameters() if decays(name, p) == one], "weight_decay": decay if one else 0.0}
            for one in (True, False)]


def optimizer_of(dice):
    """Settings of ours, and torch's optimizer of the same rule."""
    decay, rate = dice.choice([0.0, 0.1]), dice.choice([1e-3, 1e-2])
    kind = dice.choice(["adamw", "adam", "sgd"])
    settings = [f"optimizer.type={kind}", f"optimizer.lr={rate}", f"optimizer.weight_decay={decay}", "optimizer.schedule=constant"]
    if kind == "sgd":
        momentum = dice.choice([0.0, 0.9])
        return [*settings, f"optimizer.momentum={momentum}"], lambda model: torch.optim.SGD(groups(model, decay), rate, momentum)
    # A small eps would divide tiny gradients, whose last digits differ, by their own size.
    betas, eps = (dice.choice([0.8, 0.9]), dice.choice([0.95, 0.999])), 1e-3
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return ([*settings, f"optimizer.beta1={betas[0]}", f"optimizer.beta2={betas[1]}", f"optimizer.eps={eps}"],
            lambda model: make(groups(model, decay), rate, betas, eps))


def targets_of(kind, batch):
    """What each output should be; -100 does not count."""
    if kind in ("decoder", "mamba") and "targets" not in batch:
        return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return batch.get("targets", batch.get("labels"))


def loss_sum(kind, model, batch):
    """The sum of the losses of all counted targets."""
    outputs = model(**{name: value for name, value in batch.items() if name not in ("labels", "targets")}).logits
    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets_of(kind, batch).flatten(), ignore_index=-100, reduction="sum")


def train_with_torch(kind, model, steps, optimizer, clip):
    """Returns the losses. A step is a list of batches of any shapes."""
    model.train()
    losses = []
    for batches in steps:
        counted = sum(int(targets_of(kind, batch).ne(-100).sum()) for batch in batches)
        losses.append(0.0)
        for batch in batches:
            loss = loss_sum(kind, model, batch) / counted
            loss.backward()
            losses[-1] += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def most_positions(config):
    """Up to which documents that are kept apart have the rotary embedding of the whole sample."""
    limit = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    return getattr(config, limit.get((getattr(config, "rope_parameters", None) or {}).get("rope_type"), ""), 32)


def arrays_for(kind, model, folder, dice):
    """Settings, and the batches of each step as torch sees them."""
    micro_batches, size = dice.randint(1, 6), dice.randint(2 if kind == "resnet" else 1, 3)
    data = data_of(kind, model, STEPS * micro_batches * size, dice)
    for field, value in data.items():
        numpy.save(folder / f"{field}.npy", value)
    batches = [{name: torch.from_numpy(value[row:row + size]) for name, value in data.items()}
               for row in range(0, STEPS * micro_batches * size, size)]
    settings = [f"data.arrays={folder}", f"pipeline.micro_batches={micro_batches}", f"pipeline.micro_batch_size={size}", "data.shuffle=false"]
    settings += [f"data.sequence={data['input_ids'].shape[1]}"] if kind != "resnet" else ["data.mean=[0,0,0]", "data.std=[1,1,1]"]
    return settings, [batches[i:i + micro_batches] for i in range(0, len(batches), micro_batches)]


def documents_for(kind, model, folder, dice):
    """The same of documents. A step reads all of them, so their order and their places in samples do not matter."""
    packings = ("stream", "none") if kind == "mamba" else documents.PACKINGS
    settings, samples, sequences = documents.draw(folder, dice, model.config.vocab_size, packings, most_positions(model.config))
    size = dice.choice([n for n in range(1, samples + 1) if samples % n == 0])
    batches = [{"input_ids": torch.tensor([ids]), "targets": torch.tensor([targets])} for ids, targets in sequences]
    return settings + [f"pipeline.micro_batches={samples // size}", f"pipeline.micro_batch_size={size}"], [batches] * STEPS


def run_case(number, seed, program, verbose):
    """What differs; empty if nothing does."""
    dice = random.Random(f"{seed} {number}")
    kind = list(MODELS)[number % len(MODELS)]
    torch.manual_seed(dice.randrange(2**32))
    model = MODELS[kind](dice)
    settings, make_optimizer = optimizer_of(dice)
    clip = dice.choice([0, 0, 0.5])
    ranks = dice.randint(1, 3)
    settings += [f"train.steps={STEPS}", f"train.clip_norm={clip}", f"pipeline.ranks={ranks}", f"pipeline.threads={dice.choice([1, 1, 2])}",
                 f"pipeline.schedule={dice.choice(SCHEDULES)}", f"pipeline.p2={dice.choice(['off', 'end', 'cooldown', 'fill'])}",
                 f"pipeline.p2_batching={dice.choice(['loop', 'concat'])}", "pipeline.pin=false", "data.held_out=0"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.save_pretrained(folder / "model")
        (folder / "data").mkdir()
        of_text = kind in ("decoder", "mamba") and model.config.vocab_size in (documents.BYTES, documents.VOCAB)
        data, steps = (documents_for if of_text else arrays_for)(kind, model, folder / "data", dice)
        settings += data
        if kind in ("decoder", "mamba") and dice.random() < 0.4:
            settings += documents.slices_of(dice, next(int(one.split("=")[1]) for one in data if one.startswith("data.sequence=")))
        command = [program, "train", "--metrics", f"{folder}/metrics.jsonl", "--set", f"model.from={folder}/model",
                   f"save.model={folder}/out", *settings]
        if verbose:
            print(model.config, *command, sep="\n")
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            if "layers" in done.stderr and "stages" in done.stderr and ranks > 1:
                return None  # fewer layers than stages
            return [f"exit code {done.returncode}: {done.stderr.strip()}"]
        losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if "grad_norm" in line]
        ours = load_file(folder / "out/model.safetensors")
        before = load_file(folder / "model/model.safetensors")
    wrong = []
    # The gradient of a ReLU or a max pool jumps where two values are next to equal. There, torch too gives another result
    # if its weights are changed by a rounding, and ours must be one of these.
    for nudge in [0.0] + [ROUNDING] * (NUDGED if kind == "resnet" else 0):
        trained = nudged(model, nudge)
        theirs = train_with_torch(kind, trained, steps, make_optimizer(trained), clip)
        found = differences(before, ours, trained)
        if not numpy.allclose(losses, theirs, rtol=LOSS_TOLERANCE, atol=0):
            found.append(f"losses {losses}, in torch {theirs}")
        if not found:
            return []
        wrong = wrong or found
    return wrong


def nudged(model, by):
    """A copy whose weights differ by this part of themselves, at random."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + by * torch.randn_like(parameter))
    return model


def differences(before, ours, model):
    """Sentences about the tensors that were saved with other values than those of torch's model; empty if there are none."""
    with tempfile.TemporaryDirectory() as folder:  # some tensors have other names in files, and experts are apart there
        model.save_pretrained(folder)
        theirs = load_file(pathlib.Path(folder, "model.safetensors"))
    wrong = []
    for name in before:
        if name not in ours:
            if name != "cls.predictions.bias" or model.config.tie_word_embeddings:  # else unused
                wrong.append(f"{name} is not saved")
            continue
        change = (theirs[name].double() - before[name].double()).norm()
        error = (ours[name].double() - theirs[name].double()).norm() / change.clamp_min(LEAST_CHANGE)
        if not error <= TOLERANCE:
            wrong.append(f"{name}: differs by {error:.2g} of its change, {change:.2g}")
    return wrong


def main():
    options = options_of(__doc__, len(MODELS), "cases; the model types take turns")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run_cases(options, lambda number: run_case(number, options.seed, options.program, options.case is not None),
              lambda number: f", {list(MODELS)[number % len(MODELS)]}")


if __name__ == "__main__":
    main()
