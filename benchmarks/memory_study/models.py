"""The models of the memory study: shapes from 100M to 10B parameters, in fp32. Each uses the optimizer and the micro-batch of its family in arXiv 2405.18047, and the four models
of that paper are marked. The largest Mambas and ResNets have fewer samples.

Shapes are published ones, under their known names, at this study's sequence length. Beyond the largest published ResNet (BiT's 152x4), the same blocks become wider and
deeper. XLM-R XXL has BERT's vocabulary here, which is a tenth of its own.
"""

import dataclasses

IMAGE = 224


@dataclasses.dataclass(frozen=True)
class Study:
    """One model of the study. `model` is the section of twobp's configuration."""

    family: str
    name: str
    model: dict
    in_paper: bool = False
    fewer_samples: int = 0  # samples in a micro-batch, if fewer than those of the family; 0: the same number

    @property
    def micro_batch_size(self):
        return self.fewer_samples or FAMILIES[self.family]["micro_batch_size"]

    def config(self, threads):
        family = FAMILIES[self.family]
        return {
            "model": {"type": self.family, **family["model"], **self.model},
            "data": family["data"],
            "pipeline": {"stages": 2, "micro_batch_size": self.micro_batch_size, "threads": threads},
            "optimizer": family["optimizer"],
            "train": {"precision": "fp32", "seed": 1},
        }


FAMILIES = {
    "llama": {
        "title": "LLaMa",
        "micro_batch_size": 1,
        "model": {"vocab": 32000},
        "data": {"synthetic": "tokens", "sequence": 1024},
        "optimizer": {"type": "adam"},
    },
    "bert": {
        "title": "BERT",
        "micro_batch_size": 2,
        "model": {"vocab": 30522, "positions": 512, "tied": True, "norm_eps": 1e-12, "dropout": 0.1,
                  "attention_dropout": 0.1},
        "data": {"synthetic": "tokens", "sequence": 512},
        "optimizer": {"type": "adam"},
    },
    "mamba": {
        "title": "Mamba",
        "micro_batch_size": 2,
        "model": {"vocab": 50280, "state": 16, "conv_kernel": 4, "expand": 2, "tied": True},
        "data": {"synthetic": "tokens", "sequence": 1024},
        "optimizer": {"type": "adamw"},
    },
    "resnet": {
        "title": "ResNet",
        "micro_batch_size": 8,
        "model": {"block": "bottleneck", "classes": 1000},
        "data": {"synthetic": "images", "image_size": IMAGE},
        "optimizer": {"type": "sgd", "momentum": 0.9},
    },
}


def llama(name, dim, layers, heads, hidden, **more):
    return Study("llama", name, {"dim": dim, "layers": layers, "heads": heads, "hidden": hidden,
                                 **{k: v for k, v in more.items() if k != "in_paper"}}, more.get("in_paper", False))


def bert(name, dim, layers, heads, in_paper=False):
    return Study("bert", name, {"dim": dim, "layers": layers, "heads": heads, "hidden": 4 * dim}, in_paper)


def mamba(name, dim, layers, in_paper=False, fewer_samples=0, **more):
    return Study("mamba", name, {"dim": dim, "layers": layers, **more}, in_paper, fewer_samples)


def resnet(name, depths, width, in_paper=False, fewer_samples=0):
    widths = [width * w for w in (256, 512, 1024, 2048)]
    return Study("resnet", name, {"depths": depths, "widths": widths, "stem": 64 * width}, in_paper, fewer_samples)


STUDIES = [
    llama("160M", 768, 12, 12, 3072),
    llama("SmolLM2 360M", 960, 32, 15, 2560, kv_heads=5, vocab=49152, tied=True),
    llama("Sheared 1.3B", 2048, 24, 16, 5504),
    llama("OpenLLaMA 3B", 3200, 26, 32, 8640),
    llama("7B", 4096, 32, 32, 11008, in_paper=True),
    llama("13B", 5120, 40, 40, 13824),
    bert("Base", 768, 12, 12),
    bert("Large", 1024, 24, 16, in_paper=True),
    bert("Megatron 1.3B", 2048, 24, 32),
    bert("Megatron 3.9B", 2560, 48, 40),
    bert("XLM-R XXL blocks", 4096, 48, 32),
    mamba("130M", 768, 24),
    mamba("370M", 1024, 48),
    mamba("790M", 1536, 48),
    mamba("1.4B", 2048, 48, in_paper=True),
    mamba("2.8B", 2560, 64, fewer_samples=1),
    mamba("Falcon 7B", 4096, 64, fewer_samples=1, vocab=65024, tied=False),
    resnet("152", [3, 8, 36, 3], 1, in_paper=True),
    resnet("152x2", [3, 8, 36, 3], 2),
    resnet("101x3", [3, 4, 23, 3], 3),
    resnet("152x4", [3, 8, 36, 3], 4),
    resnet("152x8", [3, 8, 36, 3], 8, fewer_samples=2),
    resnet("420x8", [4, 44, 87, 4], 8, fewer_samples=2),
]

# One model of each family, small enough for a test.
TOY = [
    Study("llama", "toy", {"dim": 32, "layers": 8, "heads": 2, "hidden": 64, "vocab": 96}),
    Study("bert", "toy", {"dim": 32, "layers": 8, "heads": 2, "hidden": 128, "vocab": 96}),
    Study("mamba", "toy", {"dim": 32, "layers": 16, "vocab": 96}),
    Study("resnet", "toy", {"depths": [4, 4, 4, 4], "widths": [16, 16, 32, 32], "stem": 8, "classes": 5}),
]
