"""Trains a configured model from Python on two ranks: a stack of MLPs learns to add its inputs' neighbours.

    PYTHONPATH=build/release/python python examples/python/configured_model.py
"""
import torch

import twobp

DIM, SIZE, MICRO_BATCHES = 32, 16, 4


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))
    return [{"input": one, "target": one + 0.5 * one.roll(1)} for one in x]


def main() -> None:
    loader = torch.utils.data.DataLoader(samples(2048, seed=1), batch_size=SIZE * MICRO_BATCHES, shuffle=True,
                                         generator=torch.Generator().manual_seed(0))
    held_out = torch.utils.data.DataLoader(samples(128, seed=2), batch_size=SIZE * MICRO_BATCHES)
    first = next(iter(loader))
    trainer = twobp.Trainer(model={"type": "mlp", "dim": DIM, "layers": 4}, example={name: one[:SIZE] for name, one in first.items()},
                            ranks=2, schedule="zb-v", micro_batches=MICRO_BATCHES, optimizer=twobp.AdamW(lr=3e-3), clip_norm=1.0)
    print(trainer)
    before = trainer.evaluate(held_out).loss
    for epoch in range(4):
        for batch in loader:
            result = trainer.step(batch)
        print(f"epoch {epoch}: loss {result.loss:.4f}, step {1e3 * result.step_seconds:.1f} ms, idle {max(result.idle):.0%}")
    after = trainer.evaluate(held_out).loss
    print(f"held-out loss {before:.4f} -> {after:.4f}")
    if not after < 0.5 * before:
        raise SystemExit("it has not learned")


if __name__ == "__main__":
    main()
