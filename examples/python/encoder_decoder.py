"""Trains an encoder-decoder like T5 on two ranks: it learns to write a row of digits backwards. The decoder's layers all read the encoder's result, which
crosses every later cut of the pipeline.

    PYTHONPATH=build/release/python python examples/python/encoder_decoder.py
"""
import torch
from torch import nn

import twobp

DIGITS, BEGIN, LENGTH, WIDTH, LAYERS, STEPS = 10, 10, 6, 64, 2, 80


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: torch.Tensor, of: torch.Tensor, causal: bool = False) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q(x), self.k(of), self.v(of)))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, crosses: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if crosses else 2))
        self.own, self.cross = Attention(width), Attention(width) if crosses else None
        self.wide, self.narrow = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y, causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), encoded)
        return x + self.narrow(torch.relu(self.wide(self.norms[1](x))))


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.encoder = nn.ModuleList(Layer(WIDTH, crosses=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(WIDTH, crosses=True) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        x, y = (self.digits(ids) + self.places.weight for ids in (read, written))
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return self.head(self.norm(y))


def make_batch(count: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    read = torch.randint(DIGITS, (count, LENGTH), generator=random)
    wanted = read.flip(1)
    return {"read": read, "written": torch.cat([torch.full((count, 1), BEGIN), wanted[:, :-1]], 1), "wanted": wanted}


def main() -> None:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    trainer = twobp.Trainer(EncoderDecoder(), make_batch(16, random), ranks=2, schedule="zb-v", micro_batches=4, clip_norm=1.0, optimizer=twobp.AdamW(lr=3e-3),
                            loss_fn=lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch["wanted"].flatten()))
    print(trainer, "with the layers", *trainer.layers, sep="\n  ")
    for step in range(STEPS):
        result = trainer.step(make_batch(64, random))
        if step % 50 == 0:
            print(f"step {step}: loss {result.loss:.3f}")
    print(f"loss of the last step {result.loss:.3f}")
    if result.loss > 0.3:
        raise SystemExit("it has not learned")


if __name__ == "__main__":
    main()
