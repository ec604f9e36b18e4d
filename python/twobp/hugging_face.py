"""Captures the model of a Hugging Face directory as a bundle, for `twobp train --set model.from=FOLDER` if the program
has no layers for its architecture. The program starts `main` and reads JSON objects from stdout: signs of life, then
{"code": [file, ...]} with the files on which the result depends, or {"error": message}."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import signal
import sys
import threading
from typing import Any

import torch

from twobp import _native
from twobp._native import Error

DTYPES = {"int64": torch.int64, "float32": torch.float32}


def main(request: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_the_program, daemon=True).start()

    def answer(value: dict) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        answer({"code": capture_folder(**json.loads(request), answer=answer)})
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:
        answer({"error": " ".join(str(error).split()) or type(error).__name__})
        sys.exit(1)


def end_with_the_program() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def capture_folder(folder: str, fields: dict, arrays: str, precision: str, into: str, answer) -> list[str]:
    """Writes the bundle of the model in `folder` into the folder `into`. `fields` has dtype and sizes of each field of
    a micro-batch. The first samples of the folder `arrays` are the example. If `arrays` is "", it has random tokens.
    Returns the files of the code that made the bundle."""
    try:
        import transformers
    except ImportError as error:
        raise Error(
            f"{sys.executable} lacks the package transformers ({error}), which reads the model: pip install "
            "transformers"
        ) from None
    from twobp.capture import bundle, capture

    transformers.logging.set_verbosity_error()
    model = load(transformers, folder, fields).train()
    answer({"doing": "capture"})
    captured = capture(model, example(model, fields, arrays), precision=precision)
    weights = {
        **bundle.buffers_beside({**captured.parameters, **captured.buffers}, model),
        **captured.parameters,
        **captured.buffers,
    }
    answer({"doing": "write"})
    bundle.write(into, captured.graph, None if has_weights(folder, weights) else weights, captured.constants)
    return code_of(model)


def load(transformers, folder: str, fields: dict) -> torch.nn.Module:
    """Returns the model in float32, of the class in its config.json. Code that comes with a model does not run."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise Error("quantized models are not supported: save the model in float32, bfloat16 or float16")
    names = config.architectures or []
    classes: list[Any] = [
        one
        for one in (getattr(transformers, name, None) for name in names)
        if isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)
    ]
    if names and not classes:
        raise Error(
            f"transformers {transformers.__version__} has no class {names[0]}, which config.json names, and code that "
            "comes with a model does not run"
        )
    usual = (
        transformers.AutoModelForImageClassification if "pixel_values" in fields else transformers.AutoModelForCausalLM
    )
    model, found = (classes[0] if classes else usual).from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if found["missing_keys"]:
        raise Error(
            f"its files have no tensor {min(found['missing_keys'])}, which the {type(model).__name__} of config.json "
            "has"
        )
    longest = getattr(config, "max_position_embeddings", None)
    sequence = fields.get("input_ids", ("", [0, 0]))[1][-1]
    if isinstance(longest, int) and 0 < longest < sequence:
        raise Error(f"data.sequence is {sequence}, longer than the model's {longest} positions: shorten it")
    model.config.use_cache = False
    return model


def example(model: Any, fields: dict, arrays: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    batch = {}
    for name, (dtype, sizes) in fields.items():
        if arrays:
            import numpy

            rows = numpy.load(pathlib.Path(arrays) / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            rows = numpy.resize(rows[: sizes[0]], sizes)  # repeats the samples if there are too few
            batch[name] = torch.from_numpy(rows.astype(dtype))
        else:
            batch[name] = torch.randint(
                model.config.get_text_config().vocab_size, sizes, generator=random, dtype=DTYPES[dtype]
            )
    return batch


def has_weights(folder: str, weights: dict[str, torch.Tensor]) -> bool:
    """Returns whether the directory's own files have exactly these tensors under these names. Then the bundle need not
    have them."""
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "model*.safetensors")))
    names = set()
    for path in files:
        for name, tensor in _native.read_tensors(path).items():
            mine = weights.get(name)
            if mine is None or tensor.shape != mine.shape or not torch.equal(tensor.to(mine.dtype), mine.detach()):
                return False
            names.add(name)
    return names == weights.keys()


def code_of(model: torch.nn.Module) -> list[str]:
    """Returns the files with the code of the model, and those of capture."""
    import transformers

    modules = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in modules} - {None}
    files |= {
        transformers.__file__,
        torch.version.__file__,
        *map(str, (pathlib.Path(__file__).parent / "capture").rglob("*.py")),
    }
    return sorted(map(os.path.realpath, files))
