"""Trains a small vision transformer on Fashion-MNIST on two ranks, for 150 steps.

    examples/fashion_mnist/get                                                   # 70,000 pictures, from Debian's dataset-fashion-mnist
    PYTHONPATH=build/release/python python examples/python/vision_transformer.py
"""
import gzip
import pathlib
import sys

import torch
from torch import nn

import twobp

DATA = pathlib.Path(__file__).resolve().parents[2] / "data/fashion-mnist"
WIDTH, BLOCKS, PATCH, STEPS = 64, 4, 7, 150


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((28 // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def read(name: str) -> dict[str, torch.Tensor]:
    pixels = gzip.decompress((DATA / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((DATA / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
    return {"pixels": torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 127.5 - 1,
            "labels": torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()}


def main() -> None:
    if not DATA.exists():
        sys.exit(f"there is no {DATA}: run examples/fashion_mnist/get")
    torch.manual_seed(0)
    train, test = read("train"), read("t10k")
    loader = torch.utils.data.DataLoader(list(zip(train["pixels"], train["labels"])), batch_size=128, shuffle=True, drop_last=True)
    module = VisionTransformer()
    trainer = twobp.Trainer(module, {name: tensor[:32] for name, tensor in train.items()}, ranks=2, schedule="zb-v", micro_batches=4,
                            loss_fn=lambda output, batch: nn.functional.cross_entropy(output, batch["labels"]),
                            optimizer=twobp.AdamW(lr=2e-3, schedule="cosine", warmup=20), steps=STEPS, clip_norm=1.0)
    for step, (pixels, labels) in zip(range(STEPS), loader):
        result = trainer.step({"pixels": pixels, "labels": labels})
        if step % 50 == 0:
            print(f"step {step}: loss {result.loss:.3f}, {1e3 * result.step_seconds:.0f} ms", flush=True)
    module.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        right = (module.eval()(test["pixels"][:2000]).argmax(1) == test["labels"][:2000]).float().mean().item()
    print(f"{right:.1%} of 2000 new pictures are named right")
    if right < 0.75:
        raise SystemExit("it has not learned")


if __name__ == "__main__":
    main()
