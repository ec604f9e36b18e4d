"""Captures torch.nn.Modules. A module and one micro-batch become F, I and W programs that run without autograd and
without Python."""

from .bundle import read
from .captured import Captured, DryRun, capture
from .errors import CaptureError

__all__ = ["Captured", "CaptureError", "DryRun", "capture", "read"]
