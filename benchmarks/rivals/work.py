"""The job of a run: the configuration of twobp, read the same way for PyTorch, and the parts that all models share.

A model is a file in this folder (llama.py, bert.py, mamba.py, resnet.py, gpt2.py, qwen3.py) with
    KEYS          the keys of the model section that it understands; None marks a required key
    VARIANTS      formulations of the same arithmetic, the default first
    CUTS          the places where stages may begin, the default first
    units(work)   the layers in order, as Unit(kind, make); stages consist of them
    batch(work, samples, generator)   inputs and labels (random_tokens below)
    items(work)   the number of items in a sample, for the throughput, and their name (tokens_of_sample below)
    tied(work)    None (not_tied below), or the two places (unit, parameter) of one shared matrix
    whole(work)   of models that twobp captures: the module of transformers
    name_in_whole(unit, name, units)   the name there of a parameter of a unit
"""
import importlib
import sys
import typing
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from configuration import CAPTURED, MODELS, default_config, read_config

IGNORED = -100  # label of a position without a prediction
OPTIMIZER = {"type": "adamw", "lr": 3e-4, "weight_decay": 0.01, "momentum": 0.0, "schedule": "constant"}


class Unit(typing.NamedTuple):
    kind: str                                    # units of one kind cost the same
    make: typing.Callable[[], torch.nn.Module]


def known(section, given, allowed):
    """The section with its defaults. It refuses keys that PyTorch's side would ignore."""
    for key in given:
        if key not in allowed:
            sys.exit(f"rivals: {section}.{key} is not known to the PyTorch model; the known keys are {', '.join(allowed)}")
    values = allowed | given
    missing = [key for key, value in values.items() if value is None]
    if missing:
        sys.exit(f"rivals: the configuration lacks {', '.join(f'{section}.{key}' for key in missing)}")
    return SimpleNamespace(**values)


def read_work(path, settings=(), variant=None, cut_at="blocks"):
    config = read_config(path, settings)
    section = dict(config["model"])
    name = section.pop("type")
    if name not in MODELS + CAPTURED:
        sys.exit(f"rivals: there is no PyTorch model for model.type {name}; choose one of {', '.join(MODELS + CAPTURED)}")
    module = importlib.import_module(name)
    if variant not in (None, *module.VARIANTS):
        sys.exit(f"rivals: --variant {variant} is none of {', '.join(module.VARIANTS)}, which {name} has")
    if cut_at not in module.CUTS:
        sys.exit(f"rivals: {name} is cut at {' or '.join(module.CUTS)}, not at {cut_at}")
    data, pipeline = config.get("data", {}), config["pipeline"]
    return SimpleNamespace(name=name, module=module, model=known("model", section, module.KEYS),
                           data=SimpleNamespace(**data), sequence=data.get("sequence"),
                           micro_batch_size=pipeline["micro_batch_size"],
                           optimizer=known("optimizer", config.get("optimizer", {}), OPTIMIZER),
                           variant=variant or module.VARIANTS[0], cut_at=cut_at)


class WantsLabels(torch.nn.Module):
    """A unit whose forward also takes the labels."""


class Stage(torch.nn.Sequential):
    """Consecutive units. The names of their parameters begin with the unit's place in the model."""

    def forward(self, x, labels=None):
        for unit in self:
            x = unit(x, labels) if isinstance(unit, WantsLabels) else unit(x)
        return x


def build_stage(units, begin, end, seed):
    """The units begin..end. Their weights depend only on the seed and the unit's index."""
    stage = Stage()
    for index in range(begin, end):
        torch.manual_seed(seed * 1000 + index)
        stage.add_module(str(index), units[index].make())
    return stage


def make_batch(work, micro_batches, seed):
    samples = micro_batches * work.micro_batch_size
    return work.module.batch(work, samples, torch.Generator().manual_seed(seed))


def random_tokens(work, samples, generator):
    """Tokens, with the next tokens as labels."""
    tokens = torch.randint(work.model.vocab, (samples, work.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def tokens_of_sample(work):
    return work.sequence, "tokens"


def not_tied(work):
    return None


def make_embedding(count, dim, std):
    embedding = torch.nn.Embedding(count, dim)
    torch.nn.init.normal_(embedding.weight, std=std)
    return embedding


def tied_weight(work):
    """The initial value for both places of a tied matrix."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(work.model.vocab, work.model.dim, generator=generator) * work.model.init_std


def loss_function(outputs, labels):
    """The mean cross-entropy over the predicted positions. `outputs` may contain these positions only."""
    outputs, labels = outputs.flatten(0, -2), labels.flatten()
    if len(outputs) < len(labels):
        labels = labels[labels != IGNORED]
    return F.cross_entropy(outputs, labels, ignore_index=IGNORED)


def make_optimizer(work, parameters):
    settings = work.optimizer
    if settings.type == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    if settings.type == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum,
                               weight_decay=settings.weight_decay, fused=True)
    sys.exit(f"rivals: optimizer.type {settings.type} is neither adamw nor sgd")


def add_options(parser):
    """Adds the options of every program that runs a model."""
    parser.add_argument("--config", default=default_config("llama"), help="default configs/bench_llama.json")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    parser.add_argument("--variant", help="variant of the model: " + "; ".join(
        f"{name}: {', '.join(importlib.import_module(name).VARIANTS)}" for name in MODELS))
    parser.add_argument("--cut-at", choices=("blocks", "halves"), default="blocks",
                        help="stages may start at whole blocks, or, for llama and bert, also between the halves of a block")


def work_of(args):
    return read_work(args.config, args.settings, args.variant, args.cut_at)
