"""TRL's trainers in the pipeline, against TRL's own: every key of the log."""
import os
import random
import sys
import warnings

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

import twobp.trl  # noqa: E402
from peft.tuners import tuners_utils  # noqa: E402
from trl.experimental.cpo import CPOConfig  # noqa: E402
from trl.experimental.orpo import ORPOConfig  # noqa: E402

STEPS = int(os.environ.get("TWOBP_TRL_STEPS", 3))
WORDS = [f"w{i}" for i in range(60)]
SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def causal(seed=0):
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def scorer(seed=0):
    torch.manual_seed(seed)
    return transformers.Qwen3ForSequenceClassification(transformers.Qwen3Config(**SIZES, num_labels=1))


def text(rng, least, most):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def completions(samples=24):
    rng = random.Random(0)
    return [{"prompt": text(rng, 3, 6), "completion": " " + text(rng, 4, 9)} for _ in range(samples)]


def pairs(samples=24):
    rng = random.Random(1)
    return [{"prompt": text(rng, 3, 6), "chosen": " " + text(rng, 4, 9), "rejected": " " + text(rng, 4, 9)} for _ in range(samples)]


def judged(samples=24):
    rng = random.Random(2)
    return [{"prompt": text(rng, 3, 6), "completion": " " + text(rng, 4, 9), "label": i % 3 != 0} for i in range(samples)]


def prompts(samples=24, least=3):
    rng = random.Random(3)
    return [{"prompt": text(rng, least, 6)} for _ in range(samples)]


def documents(samples=60):
    rng = random.Random(4)
    return [{"text": text(rng, 6, 12)} for _ in range(samples)]


def distinct(completions, **_):
    return [float(len(set(one.split()))) for one in completions]


def lora():
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def pad_to(number):
    """Pads every batch to one length, so that it is captured once. Both trainers get it."""
    def padded(trainer):
        collator = trainer.data_collator

        def collate(samples):
            batch = collator(samples)
            for name, one in batch.items():
                if isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[1] < number:
                    batch[name] = torch.nn.functional.pad(one, (0, number - one.shape[1]), value=-100 if "labels" in name else 0)
            return batch
        trainer.data_collator = collate
    return padded


COMMON = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": STEPS,
          "learning_rate": 1e-3, "adam_epsilon": 1e-6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
MODELS = {"RewardTrainer": scorer}
CONFIGS = {"SFTTrainer": trl.SFTConfig, "DPOTrainer": trl.DPOConfig, "RewardTrainer": trl.RewardConfig, "KTOTrainer": trl.KTOConfig,
           "GRPOTrainer": trl.GRPOConfig, "RLOOTrainer": trl.RLOOConfig, "ORPOTrainer": ORPOConfig, "CPOTrainer": CPOConfig}


def train(kind, folder, data, settings, own, prepare, pipeline):
    name = kind.__name__
    config = CONFIGS[name](str(folder), **{**COMMON, **settings})
    model = MODELS.get(name, causal)()
    if name in ("DPOTrainer", "RLOOTrainer") and "ref_model" not in own and "peft_config" not in own:  # TRL loads the reference from where the model came from
        model.save_pretrained(folder / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = kind(model, args=config, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer(),
                   **{key: make() for key, make in own.items()}, **pipeline)
    if prepare:
        prepare(trainer)
    torch.manual_seed(0)
    trainer.train()
    return trainer


def original(name):
    return twobp.trl.__getattr__(name).__mro__[1]


def both(name, data, folder, settings=None, own=None, prepare=pad_to(20), **pipeline):
    settings, own = settings or {}, own or {}
    theirs = train(original(name), folder / "theirs", data, settings, own, prepare, {})
    ours = train(getattr(twobp.trl, name), folder / "ours", data, settings, own, prepare, {"ranks": 2, **pipeline})
    return theirs, ours


def compare(theirs, ours):
    """Every key of the log but times. The norm of gradients is that of float32 sums in another order."""
    for expected, line in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert line.keys() - {"captured_shapes"} == expected.keys()
        for key, value in expected.items():
            if "time" in key or key.endswith("per_second"):
                continue
            close = pytest.approx(value, rel=1e-5, abs=1e-5, nan_ok=True) if isinstance(value, float) else value
            assert line[key] == close, (key, expected.get("step"))


CASES = {
    "SFT": ("SFTTrainer", completions, {}, {}),
    "SFT dft": ("SFTTrainer", completions, {"loss_type": "dft"}, {}),
    "SFT label smoothing": ("SFTTrainer", completions, {"label_smoothing_factor": 0.1}, {}),
    "SFT LoRA": ("SFTTrainer", completions, {}, {"peft_config": lora}),
    "DPO": ("DPOTrainer", pairs, {}, {}),
    "DPO own reference": ("DPOTrainer", pairs, {}, {"ref_model": lambda: causal(5)}),
    "DPO LoRA": ("DPOTrainer", pairs, {}, {"peft_config": lora}),
    "DPO precomputed reference": ("DPOTrainer", pairs, {"precompute_ref_log_probs": True}, {"ref_model": lambda: causal(5)}),
    "DPO several losses": ("DPOTrainer", pairs, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "ld_alpha": 0.5}, {}),
    "Reward": ("RewardTrainer", pairs, {"center_rewards_coefficient": 0.01}, {}),
    "KTO": ("KTOTrainer", judged, {"per_device_train_batch_size": 4}, {"ref_model": lambda: causal(5)}),
    "ORPO": ("ORPOTrainer", pairs, {"max_length": 64}, {}),
    "CPO": ("CPOTrainer", pairs, {"max_length": 64}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_the_log_is_that_of_trl(name, tmp_path):
    kind, data, settings, own = CASES[name]
    compare(*both(kind, data(), tmp_path, settings, own))


def test_adapters_are_switched_at_once(tmp_path):
    """PEFT does it layer by layer, which takes longer than the rest of the Python of a step. It does so only until the second step."""
    layer, steps, trainers = tuners_utils.BaseTunerLayer, set(), []

    def calls(frame, event, _):
        if event == "call" and frame.f_code is layer.enable_adapters.__code__ and trainers:
            steps.add(trainers[0].state.global_step)

    sys.setprofile(calls)
    try:
        model = train(twobp.trl.DPOTrainer, tmp_path, pairs(), {"max_steps": 5}, {"peft_config": lora},
                      lambda one: [pad_to(20)(one), trainers.append(one)], {"ranks": 2}).model
    finally:
        sys.setprofile(None)
    assert steps and max(steps) < 2
    assert not any(one._disable_adapters for one in model.modules() if isinstance(one, layer))
    assert all(one.requires_grad == ("lora_" in name) for name, one in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SFT", "SFT LoRA", "DPO", "DPO LoRA", "DPO several losses", "Reward"])
def test_padding_to_the_longest_takes_one_capture_more(name, tmp_path):
    kind, data, settings, own = CASES[name]
    theirs, ours = both(kind, data(40), tmp_path, {**settings, "max_steps": max(8, STEPS)}, own, None)
    compare(theirs, ours)
    assert ours.pipeline.captures <= 3, ours.pipeline.captures


@pytest.mark.slow
@pytest.mark.parametrize("name, least", [("GRPOTrainer", 6), ("GRPOTrainer", 3), ("RLOOTrainer", 3)])
def test_trainers_that_generate_do_so_with_the_trained_weights(name, least, tmp_path):
    """The first one has prompts of one length, which take one capture."""
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "learning_rate": 1e-2 if STEPS < 10 else 1e-3}
    compare(*both(name, prompts(least=least), tmp_path, settings, {"reward_funcs": lambda: distinct}, None))


EVALUATED = {"SFT": "SFTTrainer", "DPO": "DPOTrainer", "DPO LoRA": "DPOTrainer", "Reward": "RewardTrainer", "KTO": "KTOTrainer"}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluations_in_the_pipeline_log_what_trl_does(name, tmp_path):
    kind, data, settings, own = CASES[name]
    evaluated = {"eval_dataset": lambda: datasets.Dataset.from_list(data(36)[24:])}
    settings = {**settings, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* run the model itself")
        theirs, ours = both(kind, data(), tmp_path, settings, {**own, **evaluated}, evaluate_in_pipeline=True)
    compare(theirs, ours)
    assert sum("eval_loss" in line for line in ours.state.log_history) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, max(7, STEPS)])
def test_packed_documents(steps, tmp_path):
    """An epoch has 6 steps and one sample more."""
    settings = {"packing": True, "max_length": 24, "padding_free": False, "packing_strategy": "wrapped", "max_steps": steps}
    compare(*both("SFTTrainer", documents(), tmp_path, settings, {}, None))


def test_checkpointing_is_recomputation(tmp_path):
    """TRL sets gradient_checkpointing by default."""
    theirs, ours = both("SFTTrainer", completions(), tmp_path, {"gradient_checkpointing": True, "max_steps": 2})
    compare(theirs, ours)
    assert ours.pipeline.config["pipeline"]["recompute"] == ["activations"]


@pytest.mark.slow
def test_a_reference_that_follows_the_model(tmp_path):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3}
    compare(*both("DPOTrainer", pairs(), tmp_path, settings, {"ref_model": lambda: causal(5)}))


@pytest.mark.slow
def test_bf16_is_that_of_trl(tmp_path):
    """TRL sets bf16 by default."""
    theirs, ours = both("DPOTrainer", pairs(), tmp_path, {"bf16": True, "max_steps": 2})
    for expected, line in zip(theirs.state.log_history[:2], ours.state.log_history[:2], strict=True):
        assert line.keys() == expected.keys()
        for key in ("loss", "entropy", "logps/chosen", "logits/rejected", "rewards/margins"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=2e-4), key  # logps: a sum over tokens
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert {one.dtype for one in ours.model.parameters()} == {torch.float32}


def test_the_names_are_those_of_trl():
    for name in twobp.trl.__all__:
        assert getattr(twobp.trl, name).__mro__[1] is original(name) and issubclass(getattr(twobp.trl, name), twobp.transformers.Trainer)
    with pytest.raises(AttributeError, match="twobp.trl has no PPOTrainer: it has SFTTrainer.*pipelined"):
        twobp.trl.PPOTrainer  # noqa: B018
