"""Trains a plain torch.nn.Module on two ranks: a small network learns to tell two spirals apart.

    PYTHONPATH=build/release/python python examples/python/plain_module.py
"""
import torch
from torch import nn

import twobp


class Spirals(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 4):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                                     for _ in range(blocks)])
        self.last = nn.Linear(width, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.first(points)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["side"])


def make_batch(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    side = torch.randint(2, (count,), generator=generator)
    angle = 6 * torch.rand(count, generator=generator)
    radius = angle / 6 * (1 - 2 * side)
    return {"points": torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), "side": side}


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    module = Spirals()
    example = make_batch(32, generator)  # one micro-batch
    trainer = twobp.Trainer(module, example, loss_fn=loss_of, ranks=2, schedule="zb-v", micro_batches=4,
                            optimizer=twobp.AdamW(lr=3e-3), clip_norm=1.0, seed=0)
    print(trainer)
    for step in range(200):
        result = trainer.step(make_batch(128, generator))
        if step % 50 == 0:
            print(f"step {step}: loss {result.loss:.4f}, {1e3 * result.step_seconds:.1f} ms, idle {max(result.idle):.0%}")
    module.load_state_dict(trainer.state_dict())
    test = make_batch(1000, generator)
    right = (module(test["points"]).argmax(dim=1) == test["side"]).float().mean().item()
    print(f"{right:.1%} of new points are told apart")
    if right < 0.95:
        raise SystemExit("it has not learned")


if __name__ == "__main__":
    main()
