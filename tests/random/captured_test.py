#!/usr/bin/env python3
"""Trains random modules in Python for three steps: modules of one's own and decoders of transformers, on plain, padded and packed
samples and on chats of which only answers count, as whole sequences or in slices, on one or two threads; and on micro-batches of
other sizes. Losses and weights must be those of autograd, and losses, norms and weights must have the same bits under another schedule, p2 policy, number of ranks,
memory cap and recomputation.

    tests/random/captured_test.py PROGRAM                a few cases; the Python package is beside the program
    tests/random/captured_test.py PROGRAM --count 200    many
    tests/random/captured_test.py PROGRAM --case 17      one of them again, with its settings

Exit code 77: a Python package is missing.
"""
import copy
import importlib.util
import pathlib
import random
import sys
import tempfile
import warnings

from command_line import options_of, run_cases

OPTIONS = options_of(__doc__, 4)
sys.path.insert(0, str(pathlib.Path(OPTIONS.program).resolve().parent / "python"))
for package in ("torch", "transformers", "twobp"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {sys.executable} has no {package}")
        sys.exit(77)
import decoders
import documents
import modules
import torch
import transformers
import twobp
from torch.nn import functional as F

STEPS = 3
# Of the change of a tensor, and of a loss. transformers computes norms, angles and its loss in float32.
TOLERANCES = {"own": (1e-9, 1e-12), "transformers": (2e-4, 1e-6)}
LEAST_CHANGE = 1e-4  # some gradients are zero but for rounding, such as those of a key's bias
SCHEDULES = ["naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"]
# Their attention sees all earlier positions, so that slices must take them.
CAUSAL = [decoders.llama, decoders.olmo2, decoders.gemma, decoders.gpt2, decoders.gpt_neox, decoders.granite, decoders.stablelm]


def runs(dice, count, names):
    """`count` names, each several times in a row."""
    out = []
    while len(out) < count:
        out += [dice.choice(names)] * dice.randint(1, max(2, count // 2))
    return out[:count]


def data_of(kind, dice, samples, positions, vocab):
    """A batch of fields, with `targets`: what each position predicts, or -100."""
    source = torch.Generator().manual_seed(dice.randrange(2**32))
    ids = torch.randint(vocab, (samples, positions), generator=source)
    counts = torch.ones(samples, positions, dtype=torch.bool)
    batch = {"input_ids": ids}
    if kind == "packed":
        documents_of = torch.tensor([sorted(runs(dice, positions, range(positions))) for _ in range(samples)])
        first = torch.stack([torch.searchsorted(row, row) for row in documents_of])
        batch["position_ids"] = torch.arange(positions) - first
        batch["documents"] = documents_of
        counts[:, 1:] = documents_of[:, 1:] == documents_of[:, :-1]  # the target of a document's last token is another's first
        counts[:, 0] = False
    if kind in ("padded", "chats"):
        lengths = torch.tensor([[dice.randint(positions // 2 + 1, positions)] for _ in range(samples)])
        seen = torch.arange(positions) < lengths
        if kind == "padded" and dice.random() < 0.5:
            seen = seen.flip(1)
        batch["attention_mask"] = seen.long()
        counts &= seen
        counts[:, 1:] &= seen[:, :-1]
    if kind == "chats":
        answers = torch.tensor([runs(dice, positions, [False, True]) for _ in range(samples)])
        answers[:, positions // 2] = True
        counts &= answers
    labels = ids.where(counts, -100)
    batch["targets"] = F.pad(labels[:, 1:], (0, 1), value=-100)
    return batch


def loss_of(output, batch):
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def own_loss(output, batch):
    return output.loss


def draw(dice):
    """A module, its loss, the global batch, the samples of a micro-batch, and settings of which the bits depend."""
    kind = dice.choice(["plain", "padded", "packed", "chats"])
    own = dice.random() < 0.5
    sliced = kind in ("plain", "chats") and dice.random() < 0.5
    # Capture compares slices on sequences of six positions or more.
    positions, size, count = dice.randint(6 if sliced else 4, 24), dice.randint(1, 3), dice.randint(1, 4)
    if own:
        vocab = dice.randint(20, 60)
        module, loss_fn = modules.Model(dice, vocab, 24), loss_of
    else:
        config = dice.choice(CAUSAL if sliced else decoders.FAMILIES)(dice)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":  # it branches on values
            config.rope_parameters = {**{key: value for key, value in rope.items() if key != "factor"}, "rope_type": "default"}
        vocab = config.vocab_size
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        loss_fn = dice.choice([loss_of, None])

    def batch_of(samples, positions):
        batch = data_of(kind, dice, samples, positions, vocab)
        if not own:
            batch.pop("documents", None)
        # Slices take a mask only beside labels; behind padding on the right no position counts. In float64, Gemma 2's own attention gives
        # NaN where a window holds only padding.
        if sliced and loss_fn is not None or not own and config.model_type == "gemma2":
            batch.pop("attention_mask", None)
        if loss_fn is None:
            batch["labels"] = F.pad(batch.pop("targets")[:, :-1], (1, 0), value=-100)
        return batch

    batch = batch_of(size * count, positions)
    shapes = [] if sliced else [batch_of(dice.randint(1, 4), dice.randint(4, 24)) for _ in range(STEPS)]
    settings = {"micro_batches": count, "threads": dice.choice([1, 1, 2])}
    if sliced:
        lengths = documents.lengths_of(dice, positions)
        settings |= {"slices": len(lengths), "slice_lengths": lengths}
    return module.double().train(), loss_fn, batch, shapes, size, settings, "own" if own else "transformers", kind


def way_of(dice, sliced):
    """Settings that must not change the bits."""
    p2 = dice.choice(["off", "end", "cooldown", "fill"])
    return {"ranks": dice.randint(1, 3), "schedule": dice.choice(SCHEDULES), "p2": p2, "p2_order": dice.choice(["oldest", "bucket"]),
            "gradients": dice.choice(["kept"] + ["streamed"] * (p2 != "off")),
            "memory_cap": dice.choice(["auto", "0", "1.2x"]),
            "recompute": dice.choice([[], ["activations"]] if sliced else [[], ["activations"], ["derivatives"], ["both"]])}


def optimizer_of(dice):
    rate = dice.choice([0.01, 0.1])
    if dice.random() < 0.5:
        momentum = dice.choice([0.0, 0.9])
        return twobp.SGD(lr=rate, momentum=momentum), lambda parameters: torch.optim.SGD(parameters, rate, momentum)
    # A small eps would divide tiny gradients, whose last digits differ, by their own size.
    return (twobp.AdamW(lr=rate, eps=1e-3, weight_decay=0), lambda parameters: torch.optim.AdamW(parameters, rate, eps=1e-3, weight_decay=0))


def train(module, batch, size, loss_fn, optimizer, cache, settings, steps=None):
    """Losses, norms and weights. `steps`: micro-batches in place of the batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory caps
        trainer = twobp.Trainer(module, {name: tensor[:size] for name, tensor in batch.items()}, loss_fn=loss_fn, optimizer=optimizer,
                                cache=cache, pin=False, **settings)
    steps = [trainer.step(batch if steps is None else [steps[i]]) for i in range(STEPS)]
    return [(step.loss, step.grad_norm) for step in steps], trainer.state_dict()


def train_with_torch(module, batch, loss_fn, make_optimizer, steps=None):
    """The loss of a step is the mean over the targets of all micro-batches, so autograd takes them at once."""
    optimizer, losses = make_optimizer(module.parameters()), []
    for batch in steps or [batch] * STEPS:
        fields = {name: tensor for name, tensor in batch.items() if name != "targets"}
        optimizer.zero_grad()
        output = module(**fields)
        loss = output.loss if loss_fn is None else loss_fn(output, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def differences(before, ours, theirs, tolerance):
    wrong = []
    for name in before:
        change = (theirs[name].double() - before[name].double()).norm()
        error = (ours[name].double() - theirs[name].double()).norm() / change.clamp_min(LEAST_CHANGE)
        if not error <= tolerance:
            wrong.append(f"{name}: differs by {error:.2g} of its change, {change:.2g}")
    return wrong


def run_case(number, seed, verbose):
    """What is wrong, None if the case was left out."""
    dice = random.Random(f"{seed} {number}")
    torch.manual_seed(dice.randrange(2**32))
    module, loss_fn, batch, shapes, size, settings, origin, kind = draw(dice)
    optimizer, make_optimizer = optimizer_of(dice)
    way = way_of(dice, "slices" in settings)
    if verbose:
        print(module, getattr(module, "config", ""), batch, settings, way, optimizer, sep="\n")
    about = f"{type(module).__name__}, {kind}, {settings}, {way}"
    before = copy.deepcopy(module.state_dict())
    with tempfile.TemporaryDirectory() as cache:
        try:
            expected = train(module, batch, size, loss_fn, optimizer, cache, {"ranks": 1, "schedule": "gpipe", "p2": "off", **settings})
            found = train(module, batch, size, loss_fn, optimizer, cache, {**settings, **way})
            shaped = train(module, batch, size, loss_fn, optimizer, cache, {"ranks": 1}, shapes) if shapes else None
        except twobp.Error as error:
            return None if "layers, too few for" in str(error) else [about, str(error)]
    wrong = [] if found[0] == expected[0] else [f"losses and norms: {expected[0]} became {found[0]}"]
    wrong += [f"{name} has other bits" for name in expected[1] if not torch.equal(expected[1][name], found[1][name])]
    of_change, of_loss = TOLERANCES[origin]
    mine, (theirs, weights) = [loss for loss, _ in expected[0]], train_with_torch(copy.deepcopy(module), batch, loss_fn, make_optimizer)
    wrong += differences(before, expected[1], weights, of_change)
    if any(abs(a - b) > of_loss * abs(b) for a, b in zip(mine, theirs)):
        wrong.append(f"losses {mine}, by autograd {theirs}")
    if shaped:
        mine, (theirs, weights) = [loss for loss, _ in shaped[0]], train_with_torch(copy.deepcopy(module), batch, loss_fn, make_optimizer, shapes)
        sizes = [list(one["input_ids"].shape) for one in shapes]
        wrong += [f"after batches of the sizes {sizes}, {one}" for one in differences(before, shaped[1], weights, of_change)]
        if any(abs(a - b) > of_loss * abs(b) for a, b in zip(mine, theirs)):
            wrong.append(f"losses {mine} of batches of the sizes {sizes}, by autograd {theirs}")
    return [about, *wrong] if wrong else []


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    run_cases(OPTIONS, lambda number: run_case(number, OPTIONS.seed, OPTIONS.case is not None))


if __name__ == "__main__":
    main()
