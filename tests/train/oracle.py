"""The oracles of language models share these functions."""
import json

import torch
from safetensors.torch import save_file


def weights_of(model):
    return {name: weight.detach().clone().contiguous() for name, weight in model.named_parameters()}


def padding(ids, right, both):
    """Returns a mask of four samples. They are padded on the right from `right` on, on the left, with a hole, and on both sides (from `both` on)."""
    mask = torch.ones_like(ids)
    mask[0, right:] = 0
    mask[1, :9] = 0
    mask[2, 5:7] = 0
    mask[3, :2] = mask[3, both:] = 0
    return mask


def save_step(model, loss, lr, folder, facts):
    """Writes the weights before and after a step of SGD, and the facts with the loss."""
    save_file(weights_of(model), folder / "before.safetensors")
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=lr).step()
    save_file(weights_of(model), folder / "after.safetensors")
    (folder / "facts.json").write_text(json.dumps({**facts, "loss": loss.item(), "lr": lr}))
