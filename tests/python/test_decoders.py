"""A trainer of a configured model reads batches, and the directories of transformers, as transformers does."""
import copy
import json
import warnings

import pytest
import torch

import twobp

transformers = pytest.importorskip("transformers")
VOCAB, SAMPLES, POSITIONS = 40, 4, 24


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, initializer_range=0.2))


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, state_size=4, initializer_range=0.2, use_cache=False))


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2))


@pytest.fixture
def saved(tmp_path):
    """Saves a model, and returns it with its folder."""
    def saved(make):
        torch.manual_seed(1)
        model = make()
        model.save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"
    return saved


def batch_of(padding=None, mask=torch.int64, counted=True):
    """Labels as for transformers: label t belongs to token t. Some do not count; those of padding do if `counted`."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (SAMPLES, POSITIONS), generator=random)
    labels = ids.clone()
    labels[0, 2:5] = labels[1, :7] = -100
    if padding is None:
        return {"input_ids": ids, "labels": labels}
    seen = torch.ones(SAMPLES, POSITIONS, dtype=torch.bool)
    for sample, count in enumerate((0, 3, 5, 1)):
        (seen[sample, :count] if padding == "left" else seen[sample, POSITIONS - count:]).zero_()
    if not counted:
        labels[~seen] = -100
    return {"input_ids": ids.where(seen, 0), "labels": labels, "attention_mask": seen.to(mask)}


def train_of(folder, batch, **settings):
    return twobp.Trainer(model={"from": str(folder)}, example={name: tensor[:2] for name, tensor in batch.items()}, micro_batches=SAMPLES // 2,
                         **{"ranks": 2, "optimizer": twobp.SGD(lr=0.1), **settings})


BATCHES = {"plain": lambda: batch_of(), "right": lambda: batch_of("right"), "left": lambda: batch_of("left", counted=False),
           "bool": lambda: batch_of("right", torch.bool), "float": lambda: batch_of("right", torch.float32)}


@pytest.mark.parametrize("make", [llama, mamba, bert])
def test_micro_batches_have_any_length(saved, make):
    """Those of one step, too. The loss is the mean over the targets of all."""
    model, folder = saved(make)
    trainer = train_of(folder, batch_of("right"), optimizer=twobp.SGD(lr=0.1, momentum=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for lengths in ((7, 24), (20, 2), (1, 9)):
        parts = [{name: one[:1 + i, :length].contiguous() for name, one in batch_of("right").items()} for i, length in enumerate(lengths)]
        counted = [(part["labels"][:, int(make is not bert):] != -100).sum().item() for part in parts]
        losses = [model(**part).loss * count for part, count in zip(parts, counted) if count]
        loss = sum(losses) / sum(counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.step(parts).loss == pytest.approx(loss.item(), rel=5e-6)
    state = trainer.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=2e-6)


def test_lengths_that_do_not_fit_are_refused(saved):
    _, folder = saved(bert)
    trainer = train_of(folder, batch_of())
    long = {name: one.repeat(1, 2) for name, one in batch_of().items()}
    with pytest.raises(twobp.Error, match="sequences of 48 positions, but the model has 32"):
        trainer.step(long)
    with pytest.raises(twobp.Error, match="all must be \\(samples, positions\\)"):
        trainer.step({**batch_of(), "labels": batch_of()["labels"][:, 1:]})
    assert trainer.step(batch_of()).step == 1


@pytest.mark.parametrize("make", [llama, mamba, bert])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_means_what_transformers_means(saved, make, kind):
    """Loss, evaluation and the weights after a step are those of transformers, and of the captured module."""
    model, folder = saved(make)
    batch = BATCHES[kind]()
    trainer = train_of(folder, batch)
    loss = model(**batch).loss
    loss.backward()
    assert trainer.evaluate([batch]).loss == pytest.approx(loss.item(), rel=2e-6)
    assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=2e-6)
    state = trainer.state_dict()
    for name, parameter in model.named_parameters():
        if name in state:
            torch.testing.assert_close(state[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=2e-6)


def test_the_captured_module_has_the_same_loss(saved):
    model, folder = saved(llama)
    batch = batch_of()
    captured = twobp.Trainer(model.train(), {name: tensor[:2] for name, tensor in batch.items()}, micro_batches=SAMPLES // 2, ranks=2)
    assert train_of(folder, batch).step(batch).loss == pytest.approx(captured.step(batch).loss, rel=2e-6)


def test_slices_and_replicas_of_a_batch_shift_labels_once(saved):
    model, folder = saved(llama)
    batch = batch_of()
    assert train_of(folder, batch, slices=3).step(batch).loss == pytest.approx(model(**batch).loss.item(), rel=2e-6)
    parts = [{name: tensor[i:i + 2] for name, tensor in batch.items()} for i in (0, 2)]
    assert train_of(folder, batch).step(parts).loss == pytest.approx(model(**batch).loss.item(), rel=2e-6)


def mixture():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=5, max_position_embeddings=32, initializer_range=0.2, output_router_logits=True, router_aux_loss_coef=0.5))


@pytest.mark.parametrize("settings", [{"ranks": 1}, {"ranks": 3, "schedule": "zb-h1"}, {"slices": 3}, {"recompute": ["both"]}])
@pytest.mark.parametrize("padding", [None, "right"])
def test_the_loss_that_balances_experts(saved, settings, padding):
    """Each micro-batch has its own over all layers, and counts as many times as it has targets."""
    model, folder = saved(mixture)
    batch = batch_of(padding)
    trainer = train_of(folder, batch, **{"optimizer": twobp.SGD(lr=0.1, momentum=0.0), **settings})
    parts = [{name: one[i:i + 2] for name, one in batch.items()} for i in (0, 2)]
    counts = [(part["labels"][:, 1:] != -100).sum().item() for part in parts]
    loss = sum(model(**part).loss * count for part, count in zip(parts, counts)) / sum(counts)
    loss.backward()
    assert trainer.evaluate([batch]).loss == pytest.approx(loss.item(), rel=2e-6)
    result = trainer.step(batch)
    assert result.loss == pytest.approx(loss.item(), rel=2e-6)
    assert list(result.experts) == [f"model.layers.{i}.mlp" for i in range(3)]
    assert all(len(tokens) == 5 and sum(tokens) == 2 * SAMPLES * POSITIONS for tokens in result.experts.values())
    model.config.output_router_logits = False
    assert abs(sum(model(**part).loss * count for part, count in zip(parts, counts)) / sum(counts) - loss) > 0.1
    state = trainer.state_dict()
    for name, parameter in model.named_parameters():
        if name in state:
            torch.testing.assert_close(state[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=2e-6)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    gradient = model.model.layers[0].mlp.gate.weight
    torch.testing.assert_close(state[gate], gradient.detach() - 0.1 * gradient.grad, rtol=1e-4, atol=2e-6)


def test_a_label_that_nothing_predicts_does_not_count(saved):
    _, folder = saved(llama)
    batch = batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, 0] = 3
    with pytest.raises(twobp.Error, match="no label that counts"):
        train_of(folder, batch).step(batch)


def test_documents_of_a_sample_are_kept_apart(saved):
    """The last token of a document predicts nothing, whatever the first label of the next one is."""
    model, folder = saved(llama)
    batch = batch_of()
    starts = torch.tensor([0] * 5 + [5] * (POSITIONS - 5))
    loss = train_of(folder, {**batch, "document_starts": starts.repeat(SAMPLES, 1)})
    parts = [{name: tensor[:, part] for name, tensor in batch.items()} for part in (slice(0, 5), slice(5, None))]
    counts = [(part["labels"][:, 1:] != -100).sum().item() for part in parts]
    with torch.no_grad():
        expected = sum(model(**part).loss.item() * count for part, count in zip(parts, counts)) / sum(counts)
    assert loss.step({**batch, "document_starts": starts.repeat(SAMPLES, 1)}).loss == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("make, name", [(llama, "position_ids"), (llama, "token_type_ids"), (mamba, "document_starts"), (bert, "position_ids")])
def test_a_field_that_the_model_would_not_read_is_refused(saved, make, name):
    _, folder = saved(make)
    batch = {**batch_of(), name: torch.zeros(SAMPLES, POSITIONS, dtype=torch.int64)}
    with pytest.raises(twobp.Error, match=f"field '{name}', but the model .* reads only input_ids, labels"):
        train_of(folder, batch)


# Changes of a config.json, as several versions of transformers and people write them.
LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
OLD_LINEAR = {"type": "linear", "factor": 4.0}
PARAMETERS = {"rope_type": "default", "rope_theta": 50.0}
KEYS = [{}, {"rope_theta": 50.0}, {"rope_parameters": PARAMETERS}, {"rope_scaling": LINEAR}, {"rope_scaling": OLD_LINEAR}, {"rope_scaling": YARN},
        {"rope_scaling": {}, "rope_parameters": PARAMETERS}, {"rope_scaling": None, "rope_parameters": PARAMETERS}, {"rope_scaling": {}, "rope_theta": 50.0},
        {"rope_scaling": LINEAR, "rope_parameters": PARAMETERS}, {"rope_scaling": LINEAR, "rope_parameters": {}, "rope_theta": 50.0},
        {"rope_scaling": {**LINEAR, "rope_theta": 70.0}, "rope_theta": 50.0}, {"rope_parameters": {}, "rope_theta": 50.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0}, {"rope_parameters": {**PARAMETERS, "type": "linear", "factor": 2.0}}]
PARTS = [{"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5, "rope_theta": 50.0}, {"rope_parameters": {**PARAMETERS, "partial_rotary_factor": 0.5}},
         {"rope_parameters": PARAMETERS, "partial_rotary_factor": 0.5}]
NEOX = [{"rotary_emb_base": 50.0, "rotary_pct": 0.5}, {"rotary_emb_base": 50.0, "rope_theta": 70.0}, {"rotary_pct": 0.5, "partial_rotary_factor": 1.0},
        {"rotary_emb_base": 50.0, "rope_parameters": {"rope_type": "default"}}, {"rotary_pct": 0.5, "rope_scaling": LINEAR},
        {"rotary_pct": 0.5, "rope_parameters": {**PARAMETERS, "partial_rotary_factor": 1.0}}]
BOTH = {"full_attention": {"rope_type": "default", "rope_theta": 300.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
GEMMA = [{"rope_local_base_freq": 50.0, "rope_theta": 300.0, "rope_scaling": LINEAR}, {"rope_parameters": BOTH}, {"rope_parameters": BOTH, "rope_scaling": LINEAR},
         {"rope_parameters": BOTH, "rope_scaling": OLD_LINEAR}, {"rope_parameters": BOTH, "rope_scaling": {}},
         {"rope_parameters": {**BOTH, "full_attention": {"type": "linear", "factor": 4.0}}}, {"rope_parameters": {**BOTH, "full_attention": None}},
         {"rope_parameters": {"sliding_attention": BOTH["sliding_attention"]}, "rope_theta": 300.0},
         {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 300.0}}, "rope_local_base_freq": 50.0},
         {"rope_parameters": {"full_attention": {**BOTH["full_attention"]}}, "rope_scaling": {**LINEAR, "rope_theta": 70.0}}]
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32, initializer_range=0.2)
GROUPED = dict(**SIZES, num_key_value_heads=1)
FAMILIES = {
    "llama": (lambda: transformers.LlamaConfig(**GROUPED), KEYS), "mistral": (lambda: transformers.MistralConfig(**GROUPED), KEYS),
    "qwen2": (lambda: transformers.Qwen2Config(**GROUPED), KEYS), "qwen3": (lambda: transformers.Qwen3Config(**GROUPED, head_dim=16), KEYS),
    "olmo2": (lambda: transformers.Olmo2Config(**GROUPED), KEYS), "gemma": (lambda: transformers.GemmaConfig(**GROUPED, head_dim=16), KEYS),
    "gemma2": (lambda: transformers.Gemma2Config(**GROUPED, head_dim=16, sliding_window=5, attn_implementation="eager"), KEYS),
    "smollm3": (lambda: transformers.SmolLM3Config(**GROUPED, no_rope_layer_interval=2, pad_token_id=None), KEYS),
    "granite": (lambda: transformers.GraniteConfig(**GROUPED), KEYS), "starcoder2": (lambda: transformers.Starcoder2Config(**GROUPED), KEYS),
    "stablelm": (lambda: transformers.StableLmConfig(**GROUPED), KEYS + PARTS),
    "phi3": (lambda: transformers.Phi3Config(**GROUPED, pad_token_id=None), [one for one in KEYS if "factor" not in str(one)] + PARTS),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**SIZES), KEYS + PARTS + NEOX),
    "gemma3_text": (lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 1 + ["sliding_attention"]),
                    [one for one in KEYS if "rope_parameters" not in one] + GEMMA)}
ROTARY_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct")


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_keys_are_read_as_transformers_reads_them(tmp_path, family):
    """Each directory has the loss that transformers has for it, or is refused."""
    make, changes = FAMILIES[family]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path)
    batch = batch_of()
    before = json.loads((tmp_path / "config.json").read_text())
    read, losses = 0, set()
    for change in copy.deepcopy(changes):
        config = {key: value for key, value in before.items() if key not in ROTARY_KEYS}
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
        with torch.no_grad():
            expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **attention).eval()(**batch).loss.item()
        try:
            loss = train_of(tmp_path, batch).evaluate([batch]).loss
        except twobp.Error as error:
            assert "config.json" in str(error) and ("not supported" in str(error)), (change, error)
            continue
        assert loss == pytest.approx(expected, rel=3e-6), change
        read += 1
        losses.add(round(expected, 4))
    assert read >= len(changes) - 2 and len(losses) > 3
