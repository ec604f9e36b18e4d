"""Captures small modules as bundles, with data for them, for captured_on_device_test.cpp.

    captured_bundles.py PACKAGES FOLDER     PACKAGES: the folder of the Python package twobp

Prints "ok", or "skip: ..." if a package is missing. Then each line of the input, a name in MODELS, writes FOLDER/NAME/bundle and
FOLDER/NAME/data. The answer is "ok". If capture fails, the process ends.
"""
import importlib.util
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
missing = [name for name in ("numpy", "torch", "transformers", "twobp") if importlib.util.find_spec(name) is None]
if missing:
    print(f"skip: {sys.executable} has no {', '.join(missing)}", flush=True)
    sys.exit()

import numpy
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import twobp

SAMPLES, MICRO_BATCH, POSITIONS, VOCAB, WIDTH, CLASSES = 40, 2, 16, 40, 16, 5


def random_ids(*sizes, end=VOCAB):
    return torch.randint(end, sizes)


def tokens():
    """Batches differ in the number of labels that count."""
    ids = random_ids(SAMPLES, POSITIONS)
    labels = ids.clone()
    for i in range(SAMPLES):
        labels[i, POSITIONS - i % 7:] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2():
    """With dropout outside attention, and tied embeddings."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0,
        embd_pdrop=0.1, resid_pdrop=0.1))


def llama():
    """With grouped heads of the size of a GPU's kernels."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=2 * WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=POSITIONS, pad_token_id=0, bos_token_id=0, eos_token_id=0, use_cache=False))


class Masked(nn.Module):
    """Two blocks of attention with padding. The second has dropout. The mask passes from layer to layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, keys, wanted):
        mask = keys.bool()[:, None, None, :]
        x = self.table(ids)
        for i, (qkv, out) in enumerate(zip(self.qkv, self.out)):
            q, k, v = qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2 if i == 1 and self.training else 0.0)
            x = x + out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def masked_data():
    keys = torch.ones(SAMPLES, POSITIONS, dtype=torch.long)
    for i in range(SAMPLES):
        keys[i, POSITIONS - i % 7:] = 0
    return {"ids": random_ids(SAMPLES, POSITIONS), "keys": keys, "wanted": random_ids(SAMPLES, POSITIONS, end=CLASSES)}


class Conv(nn.Module):
    """With BatchNorm, whose statistics forward changes, and both kinds of pooling."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, wanted):
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = torch.relu(norm(conv(x)))
            if i == 0:
                x = F.max_pool2d(x, 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), wanted)


def pictures():
    return {"x": torch.randn(SAMPLES, 3, 12, 12), "wanted": random_ids(SAMPLES, end=CLASSES)}


class Noise(nn.Module):
    """Draws by operators of ATen, and makes tensors from nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x, wanted):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.bernoulli(torch.full_like(x, 0.9)) + 0.1 * torch.rand(x.shape)
            x = x + torch.linspace(0, 1, WIDTH) + torch.arange(WIDTH)
        return (x - wanted).square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, wanted):
        return (self.head(self.lstm(x[:, None, :].expand(-1, 4, -1))[0][:, -1]) - wanted).square().mean()


def vectors():
    return {"x": torch.randn(SAMPLES, WIDTH), "wanted": torch.randn(SAMPLES, WIDTH)}


MODELS = {"gpt2": (gpt2, tokens, {}), "llama": (llama, tokens, {"slices": 2}),
          "llama_bf16": (lambda: llama().to(torch.bfloat16), tokens, {}),
          "masked": (Masked, masked_data, {}), "conv": (Conv, pictures, {}), "noise": (Noise, vectors, {}), "lstm": (Recurrent, vectors, {})}


def make(name, folder):
    torch.manual_seed(3)
    model, data, settings = MODELS[name]
    batch = data()
    example = {field: tensor[:MICRO_BATCH] for field, tensor in batch.items()}
    trainer = twobp.Trainer(model().train(), example, cache=False, ranks=1, micro_batches=2, **settings)
    trainer.save(folder / "bundle")
    (folder / "data").mkdir()
    for field, tensor in batch.items():
        numpy.save(folder / "data" / f"{field}.npy", tensor.numpy())


print("ok", flush=True)
for line in sys.stdin:
    make(line.strip(), pathlib.Path(sys.argv[2]) / line.strip())
    print("ok", flush=True)
