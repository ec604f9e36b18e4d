"""Base weights in 4 bits, as bitsandbytes keeps them, against autograd on dequantised weights."""
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
bnb = pytest.importorskip("bitsandbytes")

import twobp  # noqa: E402
from twobp.capture.own_operators import dequantised, linear_4bit  # noqa: E402
from twobp.capture.export.four_bits import keep_form, scales_of  # noqa: E402


def layer(columns, rows, nested=False, kind="nf4", dtype=torch.float32, bias=False):
    made = bnb.nn.Linear4bit(columns, rows, bias=bias, quant_type=kind, compress_statistics=nested)
    made.weight = bnb.nn.Params4bit((torch.randn(rows, columns) / columns ** 0.5).to(dtype), requires_grad=False, quant_type=kind,
                                    compress_statistics=nested, module=made)
    made = made.to("cpu")
    for one in made.parameters():
        one.requires_grad_(False)
    made.support_avx512bf16_for_cpu = True  # then a call in evaluation mode gives the weight another form
    return made


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("rows, columns", [(48, 64), (64, 512)])
def test_dequantised_weights_have_the_bits_of_bitsandbytes(rows, columns, nested, kind):
    torch.manual_seed(0)
    one = layer(columns, rows, nested, kind)
    state = one.weight.quant_state
    wanted = bnb.functional.dequantize_4bit(one.weight.data, state)
    got = dequantised(one.weight.data, scales_of(state), state.code, (rows, columns), state.blocksize, torch.float32)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operator_and_its_derivative(dtype, rows=48, columns=64):
    torch.manual_seed(0)
    state = (one := layer(columns, rows)).weight.quant_state
    x = torch.randn(2, 3, columns).to(dtype).requires_grad_()
    weight = one.weight.data, state.absmax, state.code
    y = linear_4bit(x, *weight, rows, state.blocksize, torch.float32)
    dy = torch.randn_like(y)
    dx, = torch.autograd.grad(y, x, dy)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is not torch.bfloat16 else {"rtol": 2e-2, "atol": 2e-2}
    wide = bnb.functional.dequantize_4bit(one.weight.data, state).double()
    torch.testing.assert_close(y.double(), x.double() @ wide.t(), **close)
    torch.testing.assert_close(dx.double(), dy.double() @ wide, **close)


class Adapted(nn.Module):
    """Frozen weights in 4 bits with low-rank adapters; `plain`: with the dequantised weights in their place."""

    def __init__(self, nested=False, dim=64, layers=4, dtype=torch.float32):
        super().__init__()
        self.base = nn.ModuleList(layer(dim, dim, nested, bias=i % 2 == 0, dtype=dtype) for i in range(layers))
        self.down = nn.ModuleList(nn.Linear(dim, 4, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(4, dim, bias=False) for _ in range(layers))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up):
            x = x + torch.tanh(base(x) + up(down(x)))
        return x

    def plain(self):
        """Replaces the layers by linear ones in float64."""
        for i, one in enumerate(self.base):
            weight = bnb.functional.dequantize_4bit(one.weight.data, one.weight.quant_state)
            new = nn.Linear(weight.shape[1], weight.shape[0], bias=one.bias is not None)
            new.weight.data = weight
            if one.bias is not None:
                new.bias.data = one.bias.data
            self.base[i] = new.requires_grad_(False)
        return self.double()


def square(output, batch):
    return F.mse_loss(output, batch["y"])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_those_of_autograd_on_dequantised_weights(nested, ranks):
    torch.manual_seed(0)
    module = Adapted(nested).train()
    batches = [{"x": torch.randn(8, 64), "y": torch.randn(8, 64)} for _ in range(3)]
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    trainer = twobp.Trainer(module, {name: one[:4] for name, one in batches[0].items()}, loss_fn=square, ranks=ranks, micro_batches=2,
                            optimizer=twobp.SGD(lr=2.0))
    losses = [trainer.step(batch).loss for batch in batches]
    state = trainer.state_dict()
    for name, one in module.named_parameters():
        assert torch.equal(one, before[name])
    plain = module.plain()
    optimizer = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=2.0)
    for batch, got in zip(batches, losses):
        optimizer.zero_grad()
        loss = square(plain(batch["x"].double()), {"y": batch["y"].double()})
        loss.backward()
        optimizer.step()
        assert got == pytest.approx(loss.item(), rel=1e-5)
    moved = 0.0
    for name, one in plain.named_parameters():
        if one.requires_grad:
            torch.testing.assert_close(state[name].double(), one.detach(), rtol=1e-5, atol=1e-5)
            moved = max(moved, (one.detach() - before[name]).abs().max().item())
    assert moved > 1e-2  # it trained


def test_layers_share_their_programs_and_nothing_but_the_bits_is_kept():
    torch.manual_seed(0)
    module = Adapted(layers=10).train()
    batch = {"x": torch.randn(8, 64), "y": torch.randn(8, 64)}
    trainer = twobp.Trainer(module, {name: one[:4] for name, one in batch.items()}, loss_fn=square, ranks=2, micro_batches=2)
    graph, constants = trainer._captured.graph, trainer._captured.constants
    assert len({one["kind"] for one in graph["layers"]}) <= 5 < 10 <= len(graph["layers"])  # with bias and without, the first ones and the last
    packed = {name: one for name, one in constants.items() if one.dtype is torch.uint8}
    assert sum(one.numel() for one in packed.values()) == 10 * 64 * 64 // 2
    own = {one.weight.data_ptr() for one in module.base}
    assert {one.data_ptr() for one in packed.values()} == own  # no copy
    rest = sum(one.numel() * one.element_size() for name, one in constants.items() if name not in packed)
    assert rest <= 10 * (64 * 64 // 64 * 4 + 16 * 4 + 64 * 4)  # scales, codes and biases


MEMORY = """
import sys, torch, twobp
sys.path.insert(0, sys.argv[1])
from test_four_bits import Adapted, square
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
def trained(module, dim):
    batch = {"x": torch.randn(2, dim), "y": torch.randn(2, dim)}
    trainer = twobp.Trainer(module, {name: one[:1] for name, one in batch.items()}, loss_fn=square, ranks=2, micro_batches=2)
    trainer.step(batch)
    return trainer
torch.manual_seed(0)
small = trained(Adapted(dim=64, layers=2).train(), 64)  # what is imported counts no more
module = Adapted(dim=1024, layers=24).train()
before = resident()
trainer = trained(module, 1024)
print("held", resident() - before)
"""


@pytest.mark.slow
def test_a_trainer_holds_less_than_the_weights_in_16_bits(tmp_path):
    """The base has 96 MiB in float32."""
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    said = subprocess.run([sys.executable, script, pathlib.Path(__file__).parent], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    assert float(said.stdout.split()[-1]) < 48, said.stdout


def test_a_weight_that_is_not_in_4_bits_yet_is_named():
    module = nn.Sequential(nn.Linear(8, 64), bnb.nn.Linear4bit(64, 64, bias=False))
    module[1].weight.requires_grad_(False)
    with pytest.raises(twobp.Error, match=r"has no weight in 4 bits yet: call model.to\('cpu'\)"):
        twobp.Trainer(module.train(), {"input": torch.randn(2, 8), "y": torch.randn(2, 64)}, loss_fn=square, ranks=1)


# Models of transformers, with PEFT's adapters and TRL.

def pairs(count=24):
    rng = random.Random(0)
    return [{"prompt": " ".join(f"w{rng.randrange(40)}" for _ in range(4)), "completion": " " + " ".join(f"w{rng.randrange(40)}" for _ in range(6))}
            for _ in range(count)]


def sft(kind, folder, source, wide=True, **pipeline):
    import datasets
    import peft
    import transformers
    import trl
    from test_trl import tokenizer
    model = transformers.LlamaForCausalLM.from_pretrained(source, device_map="cpu")
    torch.manual_seed(0)
    args = trl.SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=6,
                         learning_rate=1e-2, per_device_train_batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing=False)
    trainer = kind(model, args, train_dataset=datasets.Dataset.from_list(pairs()), processing_class=tokenizer(),
                   peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"), **pipeline)
    for one in trainer.model.parameters():  # TRL makes adapters of such models bfloat16
        one.data = one.data.float() if one.requires_grad and wide else one.data
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return trainer


@pytest.mark.slow
def test_qlora_from_files_is_that_of_trl_and_its_adapter_loads(tmp_path):
    transformers, trl, peft = (pytest.importorskip(name) for name in ("transformers", "trl", "peft"))
    import safetensors.torch
    import twobp.trl
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2)).save_pretrained(tmp_path / "wide")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide", device_map="cpu", quantization_config=config).save_pretrained(tmp_path / "small")
    theirs = sft(trl.SFTTrainer, tmp_path / "theirs", tmp_path / "small")
    ours = sft(twobp.trl.SFTTrainer, tmp_path / "ours", tmp_path / "small", ranks=2)
    assert any(one.dtype is torch.uint8 for one in ours.pipeline._captured.constants.values())
    for expected, line in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        for name in {"loss", "grad_norm", "mean_token_accuracy", "entropy", "train_loss"} & expected.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (name, expected["step"])
    wanted, got = (safetensors.torch.load_file(tmp_path / one / "adapter/adapter_model.safetensors") for one in ("theirs", "ours"))
    assert wanted.keys() == got.keys() and max((got[name] - one).abs().max() for name, one in wanted.items()) < 1e-4
    # Adapters in bfloat16, as TRL makes them: the pipeline rounds them once a step, and TRL rounds their updates, too.
    rounded = sft(twobp.trl.SFTTrainer, tmp_path / "rounded", tmp_path / "small", wide=False, ranks=2)
    for expected, line in zip(theirs.state.log_history, rounded.state.log_history, strict=True):
        assert line.get("loss", 0) == pytest.approx(expected.get("loss", 0), rel=5e-3)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small", device_map="cpu")
    keep_form(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours/adapter").eval()
    ids = torch.randint(4, 64, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours.model.eval()(ids).logits, rtol=1e-5, atol=1e-5)
