"""Trains a small mixture of experts (DeepSeek-V3) on the bytes of this repository's documentation, on two ranks, and
shows how evenly tokens choose experts: left alone, and with biases that each step moves towards balance
(model.balance_rate).

    PYTHONPATH=build/release/python python examples/python/mixture_of_experts.py
"""

import pathlib
import statistics

import torch

import twobp

SEQUENCE, SIZE, MICRO_BATCHES, STEPS = 64, 4, 4, 60
TEXT = "\n".join(page.read_text() for page in sorted(pathlib.Path(__file__).resolve().parents[2].glob("docs/*.md")))
MODEL = {"type": "deepseek_v3", "dim": 64, "layers": 3, "dense_layers": 1, "dense_hidden": 128, "hidden": 32}
MODEL |= {"heads": 4, "q_rank": 32, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}
MODEL |= {"vocab": 256, "experts": 8, "experts_per_token": 2, "expert_groups": 2, "chosen_groups": 1}


def batches() -> list[dict[str, torch.Tensor]]:
    data = torch.tensor(list(TEXT.encode()))
    starts = torch.randint(
        len(data) - SEQUENCE, (STEPS, SIZE * MICRO_BATCHES), generator=torch.Generator().manual_seed(1)
    )
    samples = data[starts.unsqueeze(-1) + torch.arange(SEQUENCE)]
    return [{"input_ids": ids, "labels": ids} for ids in samples]


def train(rate: float) -> tuple[float, float]:
    """The loss and the imbalance (tokens of the fullest expert over the mean) of the last steps."""
    data = batches()
    trainer = twobp.Trainer(
        model={**MODEL, "balance_rate": rate},
        example={name: one[:SIZE] for name, one in data[0].items()},
        ranks=2,
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        optimizer=twobp.AdamW(lr=3e-3),
        clip_norm=1.0,
    )
    losses, fullest = [], []
    for step, batch in enumerate(data, 1):
        result = trainer.step(batch)
        losses.append(result.loss)
        fullest.append(statistics.mean(max(tokens) / statistics.mean(tokens) for tokens in result.experts.values()))
        if step % 20 == 0:
            print(f"rate {rate}, step {step}: loss {result.loss:.3f}, fullest expert {fullest[-1]:.2f} of the mean")
    print(", ".join(f"{layer}: {tokens}" for layer, tokens in result.experts.items()))
    return statistics.mean(losses[-10:]), statistics.mean(fullest[-10:])


def main() -> None:
    (alone, uneven), (loss, even) = train(0.0), train(0.01)
    print(f"without balance: loss {alone:.3f}, imbalance {uneven:.2f}; with it: {loss:.3f}, {even:.2f}")
    if not (max(alone, loss) < 4.5 and even < uneven):
        raise SystemExit("it has not learned, or not found a balance")


if __name__ == "__main__":
    main()
