"""Defines the one exception of this package, and finds the place in the user's code that caused it."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.proxy import TracerBase

from twobp._native import Error

ENTRY = os.path.join(os.path.dirname(__file__), "export", "forward.py")  # this file calls the module
OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
LIBRARIES = (os.path.join(os.path.dirname(torch.__file__), ""), os.path.join(sysconfig.get_path("stdlib"), ""))
ASSERTS = "torch_compilable_check"  # of transformers; its caller says more
FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)(?:\n\s*(.*))?')  # there is no code if its file has changed since

EXPERTS = (
    "A mixture of experts of transformers computes without such a loop if it is made with "
    'experts_implementation="grouped_mm"'
)
DYNAMIC = (
    'Wavelengths of the rope_type "dynamic" of transformers follow from the longest sequence so far. Keep sequences '
    "within config.max_position_embeddings "
    'and leave out position_ids, or choose another rope_type, such as "yarn"'
)


class CaptureError(Error):
    """twobp cannot take a module, batch or bundle. The message says what is wrong, where, and what to do."""


class OtherLayers(CaptureError):
    """Programs do not fit the layers of the first ones."""


def is_a_file(frame: traceback.FrameSummary) -> bool:
    """Returns whether the frame is not code that torch generates. A cell of a notebook counts."""
    return os.path.exists(frame.filename) or not frame.filename.startswith("<") and bool(frame.line)


def innermost(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Returns the innermost frame that this package called, outside torch and Python's own library. It belongs to the
    module or its loss function."""
    found = None
    for frame in frames:
        if frame.filename == ENTRY:
            found = None  # the frames before belong to the training script
        elif frame.filename.startswith(OWN):
            continue
        elif (
            is_a_file(frame)
            and frame.name != ASSERTS
            and (
                "site-packages" in frame.filename.removeprefix(LIBRARIES[1])
                or not frame.filename.startswith(LIBRARIES[1])
            )
            and not frame.filename.startswith(LIBRARIES[0])
        ):
            found = frame
    return found


def user_line(error: BaseException) -> str:
    """Returns the line of user code that led to `error`, as ' (file:line, in function: code)', or '' if there is
    none."""
    return _text(innermost(traceback.extract_tb(error.__traceback__)))


def current_line() -> str:
    """Returns the same for the code that runs now."""
    return _text(innermost(traceback.extract_stack()))


def _text(frame: traceback.FrameSummary | None) -> str:
    return f" ({frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})" if frame else ""


@contextlib.contextmanager
def recording_lines():
    """Within this context, nodes of an exported graph get the line of user code that called them. Export itself keeps
    only lines of forward()."""
    before = TracerBase._filter_traceback_frames

    def only_innermost(tracer, frames):
        frame = innermost(frames)
        return traceback.StackSummary.from_list([frame] if frame else [])

    TracerBase._filter_traceback_frames = only_innermost
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = before


def path_of(node: fx.Node) -> str:
    """Returns the name of the part of the module that calls the node, or '' for the module itself or an unknown
    part."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0].removeprefix("module").lstrip(".") if stack else ""


def where(node: fx.Node) -> str:
    """Returns where the node comes from, as " (part 'blocks.0', file:line, in function: code)", or '' if nothing is
    known."""
    found = FRAME.findall(node.stack_trace or "")
    line = ["{}:{}, in {}: {}".format(*found[-1])] if found else []
    return f" ({', '.join([f'part {path_of(node)!r}'] * bool(path_of(node)) + line)})" if line or path_of(node) else ""


def some(names: Iterable[str]) -> str:
    """Returns the first names of many, in order."""
    names = sorted(names)
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
