"""Reads the configuration that twobp reads, with settings as on its command line. It needs no torch, so every program here can use it."""
import json
import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODELS = ("llama", "bert", "mamba", "resnet")
CAPTURED = ("gpt2", "qwen3")  # models of transformers, which twobp captures


def default_config(model):
    return pathlib.Path(__file__).with_name(f"{model}.json") if model in CAPTURED else REPOSITORY / "configs" / f"bench_{model}.json"


def read_config(path, settings=()):
    """The JSON at `path`, with every `section.key=value` applied."""
    try:
        config = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"rivals: {path} cannot be read: {error}")
    for setting in settings:
        place, equals, text = setting.partition("=")
        section, dot, key = place.partition(".")
        if not equals or not dot:
            sys.exit(f"rivals: --set {setting}: expected section.key=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # a word
        config.setdefault(section, {})[key] = value
    return config
