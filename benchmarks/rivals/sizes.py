"""The sizes at which each model is compared, as settings on top of its configuration file (configs/bench_MODEL.json)."""
from configuration import default_config, read_config

SIZES = {
    "llama": {"512": {"model.dim": 512, "model.hidden": 1408, "data.sequence": 256},
              "256": {"model.dim": 256, "model.hidden": 704, "data.sequence": 128},
              "long": {"model.dim": 512, "model.hidden": 1408, "data.sequence": 2048, "pipeline.micro_batch_size": 1}},
    "bert": {"512": {}},
    "mamba": {"512": {}},
    "resnet": {"50": {}},
    "gpt2": {"512": {}},
    "qwen3": {"512": {}},
}
NOT_BY_DEFAULT = ("long",)
QUICK = {  # for --quick
    "llama": {"model.dim": 64, "model.layers": 4, "model.heads": 4, "model.hidden": 128, "model.vocab": 128,
              "data.sequence": 32},
    "bert": {"model.dim": 64, "model.layers": 4, "model.heads": 4, "model.hidden": 128, "model.vocab": 128,
             "data.sequence": 32},
    "mamba": {"model.dim": 64, "model.layers": 4, "model.vocab": 128, "data.sequence": 32},
    "resnet": {"model.depths": [2, 2, 1, 1], "model.widths": [32, 64, 128, 256], "model.stem": 8,
               "data.image_size": 32, "pipeline.micro_batch_size": 4},
    "gpt2": {"model.dim": 64, "model.layers": 4, "model.heads": 4, "model.vocab": 128, "data.sequence": 32},
    "qwen3": {"model.dim": 64, "model.layers": 4, "model.heads": 4, "model.hidden": 128, "model.vocab": 128, "data.sequence": 32},
}
LABELS = {"model.dim": "dim {}", "model.layers": "{} layers", "model.heads": "{} heads", "model.hidden": "FF {}",
          "model.state": "state {}", "model.depths": "blocks {}", "model.widths": "widths {}", "model.stem": "stem {}",
          "data.sequence": "sequence {}", "data.image_size": "images of {0} x {0}",
          "pipeline.micro_batch_size": "micro-batch size {}", "model.vocab": "vocabulary {}", "model.classes": "{} classes"}


def as_settings(size):
    return [f"{key}={str(value).replace(' ', '')}" for key, value in size.items()]


def describe(model, size):
    """One line with the model and its sizes."""
    config = read_config(default_config(model), as_settings(size))
    words = []
    for key, label in LABELS.items():
        section, name = key.split(".")
        value = config.get(section, {}).get(name)
        if value is not None:
            words.append(label.format("/".join(map(str, value)) if isinstance(value, list) else value))
    return f"{model}: {', '.join(words)}"
