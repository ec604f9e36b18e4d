"""Tests the PyTorch side of benchmarks/rivals. Its models must equal those of transformers, its pipelines must compute
the same as eager, and failures must be reported.

    python tests/benchmarks/rivals_test.py
"""
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest

RIVALS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "rivals"
sys.path.insert(0, str(RIVALS))
os.environ["HF_HUB_OFFLINE"] = "1"
for package in ("torch", "transformers"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: no {package} in {sys.executable}")
        sys.exit(77)

import torch
import transformers

import balance
import contenders
import mamba
import pitfalls
import report
import work as work_module

CONFIGS = {
    "llama": {"model": {"type": "llama", "dim": 32, "layers": 4, "heads": 4, "hidden": 64, "vocab": 96}},
    "bert": {"model": {"type": "bert", "dim": 32, "layers": 3, "heads": 4, "hidden": 64, "vocab": 96, "positions": 40,
                       "tied": True}},
    "mamba": {"model": {"type": "mamba", "dim": 32, "layers": 3, "state": 8, "vocab": 96}},
    "gpt2": {"model": {"type": "gpt2", "dim": 32, "layers": 3, "heads": 4, "vocab": 96}},
    "qwen3": {"model": {"type": "qwen3", "dim": 32, "layers": 3, "heads": 4, "hidden": 64, "vocab": 96}},
    "resnet": {"model": {"type": "resnet", "depths": [2, 1], "widths": [32, 64], "stem": 8, "classes": 5},
               "data": {"image_size": 24}, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
}


def write_config(folder, name, **model):
    config = {"data": {"sequence": 20}, "pipeline": {"micro_batch_size": 3}} | CONFIGS[name]
    path = pathlib.Path(folder) / f"{name}.json"
    path.write_text(json.dumps(config | {"model": config["model"] | model}))
    return path


def read(name, variant=None, cut_at="blocks", **model):
    with tempfile.TemporaryDirectory() as folder:
        return work_module.read_work(write_config(folder, name, **model), variant=variant, cut_at=cut_at)


def build(work):
    units = work.module.units(work)
    model = work_module.build_stage(units, 0, len(units), seed=1)
    places = work.module.tied(work)
    if places:
        (first, name), (last, last_name) = places
        model[last].decoder.weight = model[first].get_parameter(name)
        assert model[last].get_parameter(last_name) is model[first].get_parameter(name)
    return model


def copy_parameters(ours, theirs, names):
    """`names` maps our names to theirs. It must contain every parameter of both exactly once."""
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert names.keys() == own.keys(), (names.keys() ^ own.keys())
    assert sorted(names.values()) == sorted(other), set(names.values()) ^ other.keys()
    with torch.no_grad():
        for name, their_name in names.items():
            other[their_name].copy_(own[name])


def with_parts(names, pairs, parts=("weight", "bias")):
    return names | {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in pairs.items() for part in parts}


class Models(unittest.TestCase):
    """Compares parameters, outputs and gradients with transformers."""

    def compare(self, work, ours, theirs, names, outputs):
        copy_parameters(ours, theirs, names)
        x, labels = work_module.make_batch(work, 1, seed=3)
        mine, reference = ours(x, labels), outputs(theirs, x)
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
        work_module.loss_function(mine, labels).backward()
        work_module.loss_function(reference, labels).backward()
        own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
        for name, their_name in names.items():
            torch.testing.assert_close(own[name].grad, other[their_name].grad, rtol=1e-3, atol=1e-5, msg=name)

    def test_models_that_twobp_captures(self):
        for name in ("gpt2", "qwen3"):
            with self.subTest(name):
                work = read(name)
                ours, units = build(work), len(work.module.units(work))
                names = {}
                for parameter, _ in ours.named_parameters():
                    unit, _, own = parameter.partition(".")
                    names[parameter] = work.module.name_in_whole(int(unit), own, units)
                self.compare(work, ours, work.module.whole(work), names, lambda theirs, x: theirs(input_ids=x).logits)

    def test_bert(self):
        work = read("bert", variant="all")
        sizes = work.model
        theirs = transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=sizes.vocab, hidden_size=sizes.dim, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
            intermediate_size=sizes.hidden, max_position_embeddings=sizes.positions, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, layer_norm_eps=sizes.norm_eps,
            pad_token_id=None))  # otherwise token 0's embedding has no gradient
        names = {f"0.{ours}.weight": f"bert.embeddings.{name}_embeddings.weight" for ours, name in
                 {"tokens": "word", "positions": "position", "token_types": "token_type"}.items()}
        names = with_parts(names, {"0.norm": "bert.embeddings.LayerNorm"})
        for layer in range(sizes.layers):
            ours, name = f"{layer + 1}", f"bert.encoder.layer.{layer}"
            names = with_parts(names, {f"{ours}.0.query": f"{name}.attention.self.query",
                                       f"{ours}.0.key": f"{name}.attention.self.key",
                                       f"{ours}.0.value": f"{name}.attention.self.value",
                                       f"{ours}.0.output": f"{name}.attention.output.dense",
                                       f"{ours}.0.norm": f"{name}.attention.output.LayerNorm",
                                       f"{ours}.1.up": f"{name}.intermediate.dense",
                                       f"{ours}.1.down": f"{name}.output.dense",
                                       f"{ours}.1.norm": f"{name}.output.LayerNorm"})
        head, name = f"{sizes.layers + 1}", "cls.predictions"
        names = with_parts(names, {f"{head}.transform": f"{name}.transform.dense",
                                   f"{head}.norm": f"{name}.transform.LayerNorm"})
        names[f"{head}.decoder.bias"] = "cls.predictions.bias"
        self.compare(work, build(work), theirs, names, lambda model, x: model(input_ids=x).logits)

    def test_bert_of_counted_positions_alone_is_the_same(self):
        loss, gradients = {}, {}
        for variant in ("all", "counted"):
            work = read("bert", variant=variant)
            model, (x, labels) = build(work), work_module.make_batch(work, 2, seed=3)
            outputs = model(x, labels)
            self.assertEqual(outputs.shape, (6, 20, 96) if variant == "all" else (18, 96))  # 15% of 6 x 20
            loss[variant] = work_module.loss_function(outputs, labels)
            loss[variant].backward()
            gradients[variant] = {name: p.grad for name, p in model.named_parameters()}
        torch.testing.assert_close(loss["counted"], loss["all"])
        torch.testing.assert_close(gradients["counted"], gradients["all"], rtol=1e-4, atol=1e-6)

    def test_mamba(self):
        for variant in ("chunked", "loop"):
            for tied in (True, False):
                with self.subTest(variant=variant, tied=tied):
                    work = read("mamba", variant=variant, tied=tied)
                    theirs = mamba.Transformers(work.model)
                    names = {"0.weight": "model.backbone.embeddings.weight"}
                    for layer in range(work.model.layers):
                        ours, name = f"{layer + 1}", f"model.backbone.layers.{layer}"
                        names[f"{ours}.norm.weight"] = f"{name}.norm.weight"
                        names |= {f"{ours}.{part}": f"{name}.mixer.{part}" for part in
                                  ("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight",
                                   "dt_proj.bias", "A_log", "D", "out_proj.weight")}
                    head = f"{work.model.layers + 1}"
                    names[f"{head}.norm.weight"] = "model.backbone.norm_f.weight"
                    if not tied:
                        names[f"{head}.decoder.weight"] = "model.lm_head.weight"
                    self.compare(work, build(work), theirs, names, lambda model, x: model(x))

    def test_resnet(self):
        for block in ("bottleneck", "basic"):
            with self.subTest(block=block):
                work = read("resnet", block=block)
                sizes = work.model
                theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(
                    embedding_size=sizes.stem, hidden_sizes=sizes.widths, depths=sizes.depths, layer_type=block,
                    num_labels=sizes.classes)).train()
                layer = "resnet.encoder.stages.{}.layers.{}"
                names = with_parts({"0.0.weight": "resnet.embedder.embedder.convolution.weight"},
                                   {"0.1": "resnet.embedder.embedder.normalization"})
                index = 0
                for stage, depth in enumerate(sizes.depths):
                    for place in range(depth):
                        index += 1
                        name = layer.format(stage, place)
                        for part in range(3 if block == "bottleneck" else 2):
                            names[f"{index}.body.{3 * part}.weight"] = f"{name}.layer.{part}.convolution.weight"
                            names = with_parts(names, {f"{index}.body.{3 * part + 1}": f"{name}.layer.{part}.normalization"})
                        if f"{name}.shortcut.convolution.weight" in dict(theirs.named_parameters()):
                            names[f"{index}.skip.0.weight"] = f"{name}.shortcut.convolution.weight"
                            names = with_parts(names, {f"{index}.skip.1": f"{name}.shortcut.normalization"})
                names = with_parts(names, {f"{index + 1}.2": "classifier.1"})
                self.compare(work, build(work), theirs, names, lambda model, x: model(pixel_values=x).logits)


class Work(unittest.TestCase):
    def test_a_key_that_pytorch_would_ignore_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "model.rotary is not known"):
            read("bert", rotary=True)

    def test_a_variant_of_another_model_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "loop is none of counted, all"):
            read("bert", variant="loop")

    def test_blocks_of_a_resnet_have_no_halves(self):
        with self.assertRaisesRegex(SystemExit, "resnet is cut at blocks"):
            read("resnet", cut_at="halves")

    def test_every_micro_batch_has_as_many_targets(self):
        _, labels = work_module.make_batch(read("bert"), 4, seed=1)
        self.assertEqual((labels != -100).sum(1).tolist(), [3] * 12)  # 15% of 20


class Balance(unittest.TestCase):
    def test_largest_stage_is_smallest(self):
        self.assertEqual(balance.balanced_cuts([1, 1, 1, 3], [[0], [1]]), [0, 3, 4])
        self.assertEqual(balance.balanced_cuts([4, 1, 1, 1, 1, 4], [[0, 3], [1, 2]]), [0, 1, 3, 5, 6])

    def test_layers_have_times_and_shapes(self):
        layers = balance.measure_layers(read("resnet"))
        self.assertEqual([tuple(layer["shape"]) for layer in layers],
                         [(3, 8, 6, 6), (3, 32, 6, 6), (3, 32, 6, 6), (3, 64, 3, 3), (3, 5)])
        self.assertTrue(all(layer["seconds"] > 0 for layer in layers))


class Schedules(unittest.TestCase):
    """Compares a step under PyTorch's schedules with eager, in the processes that compare.py starts."""

    def test_as_timed_is_right_and_traps_are_seen(self):
        # Each variant starts three processes, so only the variants with different verdicts are run.
        expected = {"bert": {"as timed": "^right$", "tied matrix as one parameter": "gradient of 0.tokens.weight off"},
                    "resnet": {"shapes found by PyTorch": "running statistics", "channels_last": "contiguous"}}
        for name, variants in expected.items():
            with tempfile.TemporaryDirectory() as folder:
                results = pitfalls.check(name, write_config(folder, name), ("zbv",), variants)
            self.assertEqual(results.keys(), variants.keys())
            for variant, pattern in variants.items():
                with self.subTest(model=name, variant=variant):
                    self.assertRegex(results[variant]["zbv"], pattern)


class Report(unittest.TestCase):
    def setting(self):
        def run(name, repeat, seconds):
            return {"contender": name, "repeat": repeat, "step_seconds": seconds, "items_per_second": 8 / seconds,
                    "idle_fraction": [0.1], "peak_resident_bytes": 2**20, "peak_anonymous_bytes": 2**20, "disturbed": False}
        setting = {"title": "t", "item": "tokens", "micro_batches": 2, "contenders": ["twobp", "1f1b", "zbv"],
                   "runs": [run("twobp", 0, 1.0), run("1f1b", 0, 3.0), run("twobp", 1, 2.0), run("1f1b", 1, 2.0),
                            {"contender": "zbv", "repeat": 0, "error": "RuntimeError: no\nsecond line", "disturbed": True}]}
        return setting | {"summary": report.summarise(setting)}

    def test_ratios_are_of_one_repeat(self):
        self.assertEqual(self.setting()["summary"][1]["ratio"], {"median": 2.0, "min": 1.0, "max": 3.0})

    def test_a_failure_is_a_row_with_the_errors_first_line(self):
        table = report.markdown_table(self.setting())
        self.assertIn("| PyTorch `ScheduleZBVZeroBubble` | failed: RuntimeError: no |", table)
        self.assertIn("5 runs, 1 of them disturbed by other programs, 1 failed.", table)

    def test_rivals_of_a_model(self):
        def names(model, single, micro_batches, mpi=False, slices=1):
            args = types.SimpleNamespace(model=model, single=single, mpi=mpi, quick=False, slices=slices)
            args.rivals = contenders.default_rivals(args)
            return contenders.names_of(args, micro_batches)
        self.assertEqual(names("mamba", True, 2), ["twobp_single", "single", "single_loop", "transformers"])
        self.assertEqual(names("resnet", True, 2), ["twobp_single", "single", "single_channels_last"])
        ours = ["twobp", "twobp_1f1b", "twobp_planned", "twobp_two_threads"]
        pipelines = ["1f1b", "interleaved_1f1b", "interleaved_1f1b_4", "interleaved_zb", "zbv"]
        undivided = ["eager", "compiled", "replicas"]
        self.assertEqual(names("bert", False, 2), [*ours, *pipelines, "1f1b_all", *undivided])
        self.assertEqual(names("resnet", False, 2, mpi=True)[:7], [*ours, "twobp_mpi", "twobp_1f1b_mpi", "1f1b"])
        self.assertEqual(names("llama", False, 1, slices=8), [*ours, "twobp_sliced", "twobp_sliced_1f1b", *pipelines, *undivided])
        self.assertEqual(names("bert", False, 4), [*ours, *pipelines, "dualpipev", "1f1b_all", *undivided])


if __name__ == "__main__":
    unittest.main()
