"""Trains a small GPT-2 of transformers on this repository's README, byte by byte, and writes it for transformers.

One process runs both ranks:      python examples/python/hugging_face.py
Each rank is a process:           torchrun --nproc-per-node 2 examples/python/hugging_face.py, or mpirun -n 2 python ...
"""
import pathlib
import tempfile

import torch
import torch.distributed as dist
import transformers

import twobp

SEQUENCE, SAMPLES, MICRO_BATCHES, STEPS = 64, 4, 4, 30

twobp.init_process_group()
torch.manual_seed(0)
text = torch.tensor(list(pathlib.Path(__file__).resolve().parents[2].joinpath("README.md").read_bytes()))


def batches():
    random = torch.Generator().manual_seed(1)
    while True:
        begin = torch.randint(len(text) - SEQUENCE, (SAMPLES * MICRO_BATCHES,), generator=random).tolist()
        ids = torch.stack([text[one:one + SEQUENCE] for one in begin])
        yield {"input_ids": ids, "labels": ids}   # the model shifts the labels


config = transformers.GPT2Config(vocab_size=256, n_positions=SEQUENCE, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config).train()
data = batches()
example = {name: tensor[:SAMPLES] for name, tensor in next(data).items()}
trainer = twobp.Trainer(model, example, ranks=2, schedule="zb-v", micro_batches=MICRO_BATCHES, optimizer=twobp.AdamW(lr=3e-3), clip_norm=1.0)
losses = []
while trainer.steps_done < STEPS:
    losses.append(trainer.step(next(data)).loss)
model.load_state_dict(trainer.state_dict())
if not dist.is_initialized() or dist.get_rank() == 0:
    print(f"{trainer}\nloss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.8 * losses[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(**example).loss, model.eval()(**example).loss)
if dist.is_initialized():
    dist.destroy_process_group()
