"""The benchmark's ResNet in plain PyTorch. Layers and parameters are those of transformers' ResNetForImageClassification and of torchvision (the
stride is in the 3x3 convolution).

ReLUs work in place, as in torchvision. The variant `channels_last` keeps tensors in that memory format.
"""
import torch
import torch.nn as nn

from work import Unit

KEYS = {"depths": [3, 4, 6, 3], "widths": [256, 512, 1024, 2048], "stem": 64, "block": "bottleneck", "classes": 1000,
        "channels": 3, "norm_eps": 1e-5}
VARIANTS = ("plain", "channels_last")
CUTS = ("blocks",)
REDUCTION = 4  # of a bottleneck's inner width


def convolution(width_in, width_out, kernel, stride=1):
    """A convolution without a bias, and the normalisation after it."""
    return [nn.Conv2d(width_in, width_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width_out)]


class Residual(nn.Module):
    """relu(body(x) + skip(x))"""

    def __init__(self, block, width_in, width_out, stride):
        super().__init__()
        inner = width_out // REDUCTION
        if block == "bottleneck":
            self.body = nn.Sequential(*convolution(width_in, inner, 1), nn.ReLU(inplace=True),
                                      *convolution(inner, inner, 3, stride), nn.ReLU(inplace=True),
                                      *convolution(inner, width_out, 1))
        else:
            self.body = nn.Sequential(*convolution(width_in, width_out, 3, stride), nn.ReLU(inplace=True),
                                      *convolution(width_out, width_out, 3))
        same = stride == 1 and width_in == width_out
        self.skip = nn.Identity() if same else nn.Sequential(*convolution(width_in, width_out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.body(x) + self.skip(x))


def make_stem(work):
    return nn.Sequential(*convolution(work.model.channels, work.model.stem, 7, 2), nn.ReLU(inplace=True),
                         nn.MaxPool2d(3, stride=2, padding=1))


def make_head(work):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(work.model.widths[-1], work.model.classes))


def units(work):
    sizes = work.model
    memory_format = torch.channels_last if work.variant == "channels_last" else torch.contiguous_format
    result = [Unit("stem", lambda: make_stem(work).to(memory_format=memory_format))]
    width_in = sizes.stem
    for group, (depth, width) in enumerate(zip(sizes.depths, sizes.widths, strict=True)):
        for index in range(depth):
            stride = 2 if group > 0 and index == 0 else 1
            shape = (sizes.block, width_in, width, stride)
            result.append(Unit(f"{sizes.block} {width_in} to {width}, stride {stride}",
                               lambda shape=shape: Residual(*shape).to(memory_format=memory_format)))
            width_in = width
    return [*result, Unit("head", lambda: make_head(work))]


def batch(work, samples, generator):
    size = work.data.image_size
    images = torch.randn(samples, work.model.channels, size, size, generator=generator)
    if work.variant == "channels_last":
        images = images.to(memory_format=torch.channels_last)
    return images, torch.randint(work.model.classes, (samples,), generator=generator)


def items(work):
    return 1, "images"


def tied(work):
    return None
