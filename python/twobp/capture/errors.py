"""The one exception of this package, and where in the user's code it comes from."""
from __future__ import annotations

import os
import traceback

import torch

from twobp._native import Error


class CaptureError(Error):
    """A module, batch or bundle that twobp cannot take. The message says what is wrong, where, and what to do."""


def user_line(error: BaseException) -> str:
    """The innermost line outside torch and this package that led to `error`, as ' (file:line, in function: code)'; '' if there is none."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(inside) and os.path.exists(frame.filename):
            return f" ({frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""
