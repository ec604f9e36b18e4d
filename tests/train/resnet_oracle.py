"""Makes small random ResNets with `transformers` and computes their results, for resnet_transformers_test.cpp.

  make(folder)  writes for each case: model/ (saved by transformers), data/ (pixel_values.npy, labels.npy), logits.safetensors
                (in evaluation), before.safetensors (weights and buffers), after.safetensors (after one step of SGD
                over two micro-batches, each with its own batch statistics), facts.json
  check(folder) writes for each model saved by the test, saved*/: weights.safetensors (all its tensors, as transformers loads
                them), logits.safetensors
"""
import json

import numpy
import torch
import transformers
from safetensors.torch import save_file

CASES = {
    "bottleneck": dict(layer_type="bottleneck", embedding_size=8, hidden_sizes=[16, 24], depths=[2, 1], num_labels=7),
    "basic": dict(layer_type="basic", embedding_size=8, hidden_sizes=[8, 12, 12], depths=[1, 2, 1], num_labels=3),
    "deep": dict(layer_type="bottleneck", embedding_size=6, hidden_sizes=[8, 8], depths=[3, 3], num_labels=2,
                 num_channels=1),
}
LR = 0.5
SAMPLES = 12
MICRO_BATCHES = 2


def tensors_of(model):
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def make(folder):
    for seed, case in enumerate(CASES):
        torch.manual_seed(seed)
        config = transformers.ResNetConfig(**CASES[case])
        model = transformers.ResNetForImageClassification(config).float()
        with torch.no_grad():  # otherwise values are ones and zeros, and a test could not see whether they are read
            for name, tensor in model.state_dict().items():
                if "normalization" in name and tensor.is_floating_point():
                    tensor.uniform_(*((-1.0, 0.5) if name.endswith(("bias", "mean")) else (0.5, 1.5)))
                if "num_batches_tracked" in name:
                    tensor.fill_(11)
        to = folder / case
        model.save_pretrained(to / "model")
        (to / "data").mkdir()
        images = torch.randn(SAMPLES, config.num_channels, 65, 61)
        labels = torch.randint(0, config.num_labels, (SAMPLES,))
        labels[0], labels[1] = 0, 1
        numpy.save(to / "data" / "pixel_values.npy", images.numpy())
        numpy.save(to / "data" / "labels.npy", labels.numpy())
        with torch.no_grad():
            logits = model.eval()(pixel_values=images).logits
        save_file({"logits": logits.contiguous()}, to / "logits.safetensors")
        save_file(tensors_of(model), to / "before.safetensors")
        optimizer = torch.optim.SGD(model.train().parameters(), lr=LR)
        loss = 0.0
        for pixels, classes in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES)):
            part = model(pixel_values=pixels, labels=classes).loss / MICRO_BATCHES
            part.backward()
            loss += part.item()
        optimizer.step()
        save_file(tensors_of(model), to / "after.safetensors")
        (to / "facts.json").write_text(json.dumps({"loss": loss, "lr": LR}))


def check(folder):
    for saved in sorted(folder.glob("*/saved*")):
        model, info = transformers.ResNetForImageClassification.from_pretrained(saved, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        save_file(tensors_of(model), saved / "weights.safetensors")
        images = torch.from_numpy(numpy.load(saved.parent / "data" / "pixel_values.npy"))
        with torch.no_grad():
            save_file({"logits": model.eval()(pixel_values=images).logits.contiguous()}, saved / "logits.safetensors")
