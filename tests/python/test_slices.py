"""Captured models in slices of sequences (docs/long_sequences.md). Either they give the numbers of whole sequences, or they are refused with the operator
and its line."""
import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import twobp
from twobp.capture import capture

POSITIONS, VOCAB, WIDTH = 24, 40, 16
LENGTHS = ([8, 16], [5, 1, 18])  # of slices


def tokens(samples=4, positions=POSITIONS):
    ids = torch.randint(VOCAB, (samples, positions), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:9] = -100  # the targets of slices differ in number
    return {"input_ids": ids, "labels": labels}


def gpt2(**settings):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **settings}))


def like_llama(name, **settings):
    model, config = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
    return model(config(**{"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                           "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
                           **settings}))


MODELS = {"GPT-2": gpt2, "LLaMa": lambda: like_llama("Llama", tie_word_embeddings=True), "Qwen3": lambda: like_llama("Qwen3", head_dim=8),
          "GPT-2 with dropout": lambda: gpt2(embd_pdrop=0.2, resid_pdrop=0.1),
          "GPT-NeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(  # turns a part of each head
              vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, rotary_pct=0.5,
              max_position_embeddings=POSITIONS, attention_dropout=0.0, hidden_dropout=0.0, bos_token_id=0, eos_token_id=0))}


def made(make, seed=5):
    """In float64, without the float32 that transformers' norms compute in."""
    torch.manual_seed(seed)
    module = make().double().train()
    for part in list(module.modules()):
        for name, norm in part.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(part, name, nn.RMSNorm(len(norm.weight), eps=1e-6, dtype=torch.float64))
    return module


def exact_loss(output, batch):
    """The loss of transformers, without its rounding to float32."""
    return F.cross_entropy(output.logits.flatten(0, 1), F.pad(batch["targets"][:, 1:], (0, 1), value=-100).flatten())


def exact(batch):
    return {"input_ids": batch["input_ids"], "targets": batch["labels"]}


def train(module, batch, samples=2, steps=2, **settings):
    """Losses, norms and weights."""
    lengths = settings.pop("slice_lengths", [])
    trainer = twobp.Trainer(module, {name: tensor[:samples] for name, tensor in batch.items()}, micro_batches=len(next(iter(batch.values()))) // samples,
                            slices=max(1, len(lengths)), slice_lengths=lengths, optimizer=twobp.SGD(lr=0.1), **{"ranks": 1, "schedule": "1f1b", **settings})
    results = [trainer.step(batch) for _ in range(steps)]
    return [result.loss for result in results], [result.grad_norm for result in results], trainer.state_dict()


def assert_close(sliced, whole, bound=1e-10):
    for mine, expected in zip(sliced[0] + sliced[1], whole[0] + whole[1]):
        assert mine == pytest.approx(expected, rel=bound)
    for name, tensor in whole[2].items():
        expected = tensor.double()
        assert (sliced[2][name].double() - expected).abs().max() <= bound * max(1, expected.abs().max()), name


@pytest.mark.parametrize("model", MODELS)
def test_slices_give_the_whole(model):
    module, batch = made(MODELS[model]), exact(tokens())
    runs = [train(module, batch, loss_fn=exact_loss, slice_lengths=lengths) for lengths in LENGTHS]  # first, so that one capture serves all
    whole = train(module, batch, loss_fn=exact_loss)
    assert whole[0][1] < whole[0][0]
    for sliced in runs:
        assert_close(sliced, whole)
        assert not all(torch.equal(tensor, whole[2][name]) for name, tensor in sliced[2].items()), "nothing was cut"


@pytest.mark.parametrize("model", ["GPT-2 with dropout", "Qwen3"])
def test_schedules_policies_and_cuts_give_the_same_bits(model):
    module, batch = made(MODELS[model]).float(), tokens()
    first = train(module, batch, slice_lengths=LENGTHS[1])
    for settings in ({"schedule": "gpipe", "p2": "off"}, {"ranks": 2, "p2": "fill"}, {"ranks": 2, "schedule": "zb-v"}, {"ranks": 3, "schedule": "zb-h1"}, {"ranks": 2, "schedule": "v-half", "p2": "fill"},
                     {"ranks": 2, "recompute": ["activations"]}):
        losses, norms, weights = train(module, batch, slice_lengths=LENGTHS[1], **settings)
        assert (losses, norms) == first[:2], settings
        assert all(torch.equal(tensor, first[2][name]) for name, tensor in weights.items()), settings
    assert train(module, batch, slice_lengths=[POSITIONS])[2].keys() == first[2].keys()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GPT-2 with dropout", "Qwen3"])
def test_programs_for_slices_have_the_bits_of_others_on_whole_sequences(model, tmp_path):
    module, batch = made(MODELS[model]).float(), tokens()
    example, results = {name: tensor[:2] for name, tensor in batch.items()}, []
    for slices in (True, False):
        folder = tmp_path / str(slices)
        capture(module, example, slices=slices, cache=False).save(folder)
        trainer = twobp.Trainer(model={"from": str(folder)}, example=example, ranks=2, micro_batches=2, optimizer=twobp.SGD(lr=0.1))
        steps = [trainer.step(batch) for _ in range(2)]
        results.append(([(one.loss, one.grad_norm) for one in steps], trainer.state_dict()))
    assert results[0][0] == results[1][0] and all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())
    with pytest.raises(twobp.Error, match="takes no slices: it was captured for whole sequences"):
        twobp.Trainer(model={"from": str(tmp_path / "False")}, example=example, slices=2)


@pytest.mark.slow
def test_costs_decide_where_sequences_are_cut():
    module, batch = made(MODELS["LLaMa"]), tokens()
    trainer = twobp.Trainer(module, batch, ranks=2, micro_batches=1, slices=3, optimizer=twobp.SGD(lr=0.1))
    assert trainer.step(batch).loss == pytest.approx(train(module, batch, steps=1)[0][0], rel=1e-6)
    with pytest.raises(twobp.Error, match="at most 3 slices"):
        twobp.Trainer(module, batch, ranks=2, micro_batches=1, slices=4)


@pytest.mark.slow
def test_other_batches_and_lengths_and_a_bundle(tmp_path):
    module, batch = made(MODELS["GPT-2"]), tokens()
    shorter = [{name: tensor[:1, :16] for name, tensor in batch.items()}] * 4
    losses = []
    for slices in (1, 2):
        trainer = twobp.Trainer(module, {name: tensor[:1] for name, tensor in batch.items()}, ranks=2, micro_batches=4, slices=slices, optimizer=twobp.SGD(lr=0.1))
        losses.append([trainer.step(batch).loss, trainer.step(shorter).loss, trainer.evaluate([batch]).loss])
    with pytest.raises(twobp.Error, match="cut into slices: sequences of 4 positions are too short: pad them to 6 or more"):
        trainer.step([{name: tensor[:, :4] for name, tensor in one.items()} for one in shorter])
    trainer.save(tmp_path / "bundle")
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    again = twobp.Trainer(model={"from": str(tmp_path / "bundle")}, example={name: tensor[:1] for name, tensor in batch.items()}, ranks=2, micro_batches=4,
                          slices=2, slice_lengths=[8, 16], optimizer=twobp.SGD(lr=0.1))
    assert again.step(batch).loss == pytest.approx(trainer.step(batch).loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [r"c_attn", r"h\.1\..*ln_2", r"wpe", r"lm_head|mlp"])
def test_frozen_parameters(trained):
    module, batch = made(lambda: gpt2(tie_word_embeddings=False)), exact(tokens())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(re.search(trained, name) is not None)
    assert_close(train(module, batch, loss_fn=exact_loss, slice_lengths=LENGTHS[1]), train(module, batch, loss_fn=exact_loss))


class Net(nn.Module):
    """Embeddings, `function` of (batch, positions, width), a written-out attention, and a loss whose labels are shifted. `self.x` are parameters."""

    def __init__(self, function, attention=True):
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(1, POSITIONS + 8, WIDTH))
        self.in_projection, self.out_projection, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.convolution, self.norm, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.function, self.attends = function, attention
        self.register_buffer("mask", torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).tril())

    def attention(self, x, **options):
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.in_projection(x).chunk(3, -1))
        return self.out_projection(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))

    def forward(self, input_ids, labels):
        x = self.table(input_ids) + self.positions[:, :input_ids.shape[1]]
        x = x + self.function(self, x)
        if self.attends:
            x = x + self.attention(x, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), F.pad(labels[:, 1:], (0, 1), value=-100).flatten())


def written_out(net, x):
    q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in net.in_projection(x).chunk(3, -1))
    scores = (q @ k.transpose(-2, -1) / 8 ** 0.5).masked_fill(~net.mask, float("-inf"))
    return net.out_projection((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def experts(net, x):
    """Doubles or squares each position, by the larger of two weights, and multiplies by that weight."""
    weight, best = net.head(x)[..., :2].softmax(-1).topk(1)
    return torch.stack([x * 2, x.square()], 2).gather(2, best.unsqueeze(-1).expand(-1, -1, -1, WIDTH)).squeeze(2) * weight


def shared_table(net, x):
    return x * net.mask.double().cumsum(0)[:, :WIDTH]  # a constant for each position


def half_turned(x):
    return x + torch.cat([-x[..., 4:], x[..., :4]], -1)


def attention_of(net, x, mask):
    """Attention with an explicit mask, of queries and keys that are no rows of one product."""
    q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in net.in_projection(net.norm(x)).chunk(3, -1))
    return F.scaled_dot_product_attention(half_turned(q), half_turned(k), v, attn_mask=mask).transpose(1, 2).flatten(2)


def spelled_out(net, x):
    q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in net.in_projection(net.norm(x)).chunk(3, -1))
    later = torch.arange(x.shape[1])[None, :] > torch.arange(x.shape[1])[:, None]
    scores = half_turned(q) @ k.transpose(-2, -1) / 8 ** 0.5 + later.to(x.dtype).expand(x.shape[0], 1, -1, -1) * torch.finfo(torch.float32).min
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


APART = {"nothing": lambda net, x: x * 0.5, "written_out": written_out, "experts": experts, "shared_table": shared_table,
         "heads": lambda net, x: x.unflatten(-1, (4, 4)).permute(0, 2, 1, 3).softmax(-1).transpose(1, 2).reshape(x.shape),
         "rows": lambda net, x: net.out_projection(x.reshape(-1, WIDTH)).tanh().view(x.shape),
         "flattened": lambda net, x: (x.flatten() * 2).view(x.shape), "cat": lambda net, x: torch.cat([x[..., 8:], x[..., :8]], -1),
         "index": lambda net, x: x.unflatten(-1, (4, 4))[..., [1, 0, 3, 2], :].reshape(x.shape) * net.table.weight[x.argmax(-1)],
         "einsum": lambda net, x: torch.einsum("bsd,sd,de->bse", x, net.positions[0, :x.shape[1]], net.in_projection.weight[:WIDTH]) + torch.einsum("bsd,bse->bs", x, x).unsqueeze(-1),
         "norms": lambda net, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1).sqrt(), "batch": lambda net, x: x + x.mean(0, keepdim=True),
         "products": lambda net, x: (x.unsqueeze(-1) @ x.unsqueeze(-2)).sum(-1) + (x.unsqueeze(-2) @ net.positions[0, :x.shape[1], :, None]).flatten(2), "dropout": lambda net, x: F.dropout(x, 0.3, net.training),
         "rows dropped": lambda net, x: F.dropout(x.reshape(-1, WIDTH), 0.3, net.training).view(x.shape),
         "module": lambda net, x: net.heads(x, x, x, attn_mask=~net.mask, need_weights=False)[0], "bool mask": lambda net, x: attention_of(net, x, net.mask), "spelled out": spelled_out,
         "added mask": lambda net, x: attention_of(net, x, torch.full_like(net.mask, -torch.inf, dtype=x.dtype).triu(1)),
         "positions": lambda net, x: x + net.positions[0, 4:4 + x.shape[1]], "where": lambda net, x: torch.where(x > 0, x, net.mask[:, :1] * x)}


@pytest.mark.parametrize("names", [list(APART)[i::4] for i in range(4)], ids=", ".join)
def test_operators_that_keep_positions_apart(names):
    def function(net, x):
        for name in names:
            x = APART[name](net, x)
        return x
    module, batch = made(lambda: Net(function)), tokens()
    sliced = train(module, batch, slice_lengths=LENGTHS[1], ranks=2)
    assert_close(sliced, train(module, batch))


MIXED = {
    "convolution": (lambda net, x: net.convolution(x.transpose(1, 2)).transpose(1, 2), "conv"),
    "mean": (lambda net, x: x - x.mean(1, keepdim=True), "'mean' computes across the positions"),
    "cumsum": (lambda net, x: x.cumsum(1), "'cumsum' computes across the positions"),
    "softmax": (lambda net, x: x.softmax(1), "softmax' computes across"),
    "flip": (lambda net, x: x.flip(1), "'flip' computes across"),
    "roll": (lambda net, x: x.roll(1, 1), "'roll' computes across"),
    "pad": (lambda net, x: F.pad(x, (0, 0, 1, 0))[:, :-1], "pad.*shifts or pads the positions"),
    "first": (lambda net, x: x + x[:, :1], "'slice' cuts positions off"),
    "last": (lambda net, x: x + x[:, -1].unsqueeze(1), "'select' takes single positions"),
    "patches": (lambda net, x: x.reshape(x.shape[0], -1, 2, WIDTH).tanh().reshape(x.shape), "splits the positions"),
    "both directions": (lambda net, x: net.attention(x), "attention in both directions"),
    "mask": (lambda net, x: net.attention(x, attn_mask=net.mask.triu(-3)), "attention with another mask than the causal one"),
    "almost causal": (lambda net, x: net.attention(x, attn_mask=net.mask.clone().index_fill_(1, torch.tensor([0]), False).logical_or(torch.eye(POSITIONS, dtype=torch.bool))),
                      "attention with another mask than the causal one"),
    "three dimensions": (lambda net, x: F.scaled_dot_product_attention(x, x, x, is_causal=True), r"Give it queries.*these are \[4, 24, 16\]"),
    "attention's dropout": (lambda net, x: net.attention(x, is_causal=True, dropout_p=0.1 if net.training else 0.0), "attention with dropout"),
    "products": (lambda net, x: x @ (x.transpose(1, 2) @ x), "'matmul' multiplies positions with positions"),
    "einsum": (lambda net, x: torch.einsum("bid,bjd->bij", x, x) @ x, "'einsum' multiplies positions.*is_causal=True"),
    "weights": (lambda net, x: net.heads(x, x, x, attn_mask=~net.mask)[0], "'baddbmm' multiplies.*need_weights=False"),
    "batch norm": (lambda net, x: net.batch_norm(x.transpose(1, 2)).transpose(1, 2), "the forward pass uses the buffer 'batch_norm"),
    "sum": (lambda net, x: x * x.sum().tanh(), "'tanh' of a sum over positions does not add up"),
    "frequencies": (lambda net, x: F.embedding(x.argmax(-1), net.table.weight, scale_grad_by_freq=True), "counts the ids of all positions"),
    "recurrent": (lambda net, x: net.recurrent(x)[0], "'lstm' is not known to compute each position of a sequence on its own"),
    "noise": (lambda net, x: x + torch.rand_like(x), "'rand' draws random numbers"),
    "feature dropout": (lambda net, x: F.dropout1d(x, 0.1, net.training), "dropout"),
}


@pytest.mark.parametrize("name", MIXED)
def test_operators_that_mix_positions_are_named(name):
    function, message = MIXED[name]
    shape = capture(made(lambda: Net(function)), tokens(), check=False, cache=False).graph["shapes"][0]
    assert "positions" not in shape
    where = r".*test_slices\.py:\d+, in " if name != "batch norm" else ""
    assert re.search(message + where, shape["no_slices"]), shape["no_slices"]


class Pooled(nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.table, self.head, self.reduce = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3), reduce

    def forward(self, input_ids, labels):
        return self.reduce(self.head(self.table(input_ids)), labels)


@pytest.mark.parametrize("reduce, labels, message", [
    (lambda y, labels: F.cross_entropy(y.mean(1), labels), torch.zeros(4, dtype=torch.int64), r"the field 'labels' of sizes \[\d\] has no positions"),
    (lambda y, labels: F.cross_entropy(y.mean(1), labels[:, 0]), torch.zeros(4, POSITIONS, dtype=torch.int64), "'mean' computes across"),
    (lambda y, labels: F.cross_entropy(y[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), torch.zeros(4, POSITIONS, dtype=torch.int64), r"pad these instead: F\.pad"),
    (lambda y, labels: F.mse_loss(y[..., 0], labels.double()), torch.zeros(4, POSITIONS + 1)[:, 1:], None)])
def test_losses(reduce, labels, message):
    torch.manual_seed(2)
    module, batch = Pooled(reduce).double(), {**tokens(), "labels": labels}
    if message is None:
        assert_close(train(module, batch, slice_lengths=LENGTHS[0]), train(module, batch))
        return
    with pytest.raises(twobp.Error, match=message):
        train(module, batch, slice_lengths=LENGTHS[0])


def test_a_refusal_is_one_error_and_whole_sequences_train():
    module, batch = Pooled(lambda y, labels: F.cross_entropy(y.mean(1), labels[:, 0] % 3)).double(), tokens()
    with pytest.raises(twobp.Error, match=r"pipeline\.slices is 2, but .*'mean' computes across the positions of a sequence \(.*test_slices\.py:\d+, in .*Set it to 1"):
        train(module, batch, slice_lengths=LENGTHS[0])
    assert train(module, batch, steps=1)[0][0] > 0


@pytest.mark.slow
def test_bert_is_refused():
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                                                                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    with pytest.raises(twobp.Error, match=r"attention in both directions.*transformers"):
        train(bert, tokens(), slice_lengths=LENGTHS[0])


def padded(batch, lengths, at_end=True):
    """The samples keep these lengths. Their last positions, or the first ones, are padding."""
    places = torch.arange(POSITIONS) if at_end else torch.arange(POSITIONS).flip(0)
    mask = places < torch.tensor(lengths)[:, None]
    return {"input_ids": batch["input_ids"].where(mask, 0), "labels": batch["labels"].where(mask, -100), "attention_mask": mask.long()}


@pytest.mark.parametrize("model, lengths", [("GPT-2", [POSITIONS, 12, 3, 9]), ("LLaMa", [POSITIONS] * 4), ("LLaMa", [20, 7, POSITIONS, 1])])
def test_masks_of_padding_at_the_end(model, lengths):
    """The mask's own programs are those of whole sequences."""
    module, batch = made(MODELS[model]), padded(tokens(), lengths)
    def loss(output, batch):
        return F.cross_entropy(output.logits.flatten(0, 1), F.pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten())
    runs = [train(module, batch, loss_fn=loss, slice_lengths=cuts) for cuts in LENGTHS]
    whole = train(module, batch, loss_fn=loss, schedule="gpipe")
    for sliced in runs:
        assert_close(sliced, whole)


@pytest.mark.slow
def test_other_masks_of_padding_are_refused():
    def trainer(batch, module=None, slices=2):
        return twobp.Trainer(module or made(MODELS["LLaMa"]), {name: tensor[:2] for name, tensor in batch.items()}, ranks=1, micro_batches=2, slices=slices)
    batch = padded(tokens(), [POSITIONS] * 4)
    at_begin, counted = padded(tokens(), [9, POSITIONS, 9, 9], at_end=False), padded(tokens(), [POSITIONS, POSITIONS, POSITIONS, 9])
    counted["labels"][3, 20] = 1
    with pytest.raises(twobp.Error, match=r"the example: 'attention_mask' hides positions before others that count\. .*padding_side to \"right\""):
        trainer(at_begin)
    one = trainer(batch)
    first = one.step(batch).loss
    with pytest.raises(twobp.Error, match="micro-batch 1: 'attention_mask' hides positions whose 'labels' count"):
        one.step(counted)
    assert one.steps_done == 1 and one.step(padded(tokens(), [9, 8, 7, 6])).loss > 0
    assert first == pytest.approx(trainer(batch, slices=1).step(batch).loss, rel=1e-6)

    class Own(nn.Module):  # what it does without a mask is not known
        def __init__(self):
            super().__init__()
            self.model = made(MODELS["LLaMa"])

        def forward(self, input_ids, labels, attention_mask=None):
            return self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask).loss
    with pytest.raises(twobp.Error, match=r"a mask that depends on 'attention_mask' has no form for slices\. Leave a mask that hides nothing out"):
        trainer(batch, Own().train())


@pytest.mark.slow
def test_micro_batches_of_other_lengths_in_one_step():
    module, batch = made(MODELS["GPT-2"]), exact(tokens())
    parts = [{name: tensor[2 * i:2 * i + 2, :length] for name, tensor in batch.items()} for i, length in enumerate((POSITIONS, 7))]
    results = []
    for lengths, ranks, schedule in (([], 2, "1f1b"), (LENGTHS[0], 2, "1f1b"), (LENGTHS[1], 2, "zb-v"), (LENGTHS[1], 1, "gpipe")):
        trainer = twobp.Trainer(module, parts[0], ranks=ranks, schedule=schedule, micro_batches=2, slices=max(1, len(lengths)), slice_lengths=lengths,
                                loss_fn=exact_loss, optimizer=twobp.SGD(lr=0.1))
        steps = [trainer.step(parts), trainer.step(parts[::-1]), trainer.step(parts)]
        results.append(([one.loss for one in steps], [one.grad_norm for one in steps], trainer.state_dict()))
    for sliced in results[1:]:
        assert_close(sliced, results[0])
    assert results[2][:2] == results[3][:2] and all(torch.equal(tensor, results[3][2][name]) for name, tensor in results[2][2].items())


@pytest.mark.slow
def test_programs_over_slices_are_compared_with_autograd(monkeypatch):
    module, batch = made(MODELS["GPT-2 with dropout"]), exact(tokens())
    run, = capture(module, batch, loss_fn=exact_loss, cache=False).dry_runs
    assert 0 < run.slices < 1e-12 and run.worst_of_slices
    from twobp.capture.sequences import positions
    monkeypatch.setitem(positions.RULES, "cumsum", positions.same)  # a wrong rule
    module = made(lambda: Net(lambda net, x: x.cumsum(1)))
    captured = capture(module, tokens(), cache=False)
    reason = captured.graph["shapes"][0]["no_slices"]
    assert re.search(r"over slices, programs compute (the loss|the gradient of '.*') with a relative error of .* against the module itself\. .* please report it", reason), reason
    assert len(captured.graph["shapes"]) == len(captured.dry_runs) == 1 and captured.dry_runs[0].gradients < 1e-12
    with pytest.raises(twobp.Error, match="takes no slices: over slices, programs compute"):
        train(module, tokens(), cache=False, slice_lengths=LENGTHS[0])
    assert train(module, tokens(), cache=False)[0][0] > 0


def test_a_trainer_without_slices_captures_whole_sequences_alone():
    module = Pooled(lambda y, labels: F.mse_loss(y[..., 0], labels.double()))
    trainer = twobp.Trainer(module.double(), tokens(), micro_batches=1, cache=False)
    with pytest.raises(twobp.Error, match=r"takes no slices: it was captured for whole sequences \(twobp.Trainer captures it for slices if it is given slices=2"):
        twobp.plan(trainer, ranks=2, slices=[1, 2], seconds=0.05)
    assert {row.slices for row in twobp.plan(trainer, ranks=2, seconds=0.05)} == {1}


@pytest.mark.slow
def test_a_capture_for_slices_serves_whole_sequences(tmp_path):
    module, batch = made(MODELS["GPT-2"]), tokens()
    states = [capture(module, batch, slices=slices, cache=tmp_path / first).cached for first, order in (("whole", (False, True, False)), ("slices", (True, False)))
              for slices in order]
    assert states == [["kept"], ["kept"], ["hit"], ["kept"], ["hit"]]
