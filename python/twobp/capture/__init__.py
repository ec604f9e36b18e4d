"""Captures torch.nn.Modules. A module and one micro-batch become F, I and W programs that run without autograd and
without Python.

In the order of the work:

| captured.py | a module, its state of Python's values, and the programs for each shape of a micro-batch |
| state/ | what of Python's values the programs depend on: guards, and the cache of traces |
| trace.py | one trace, by the steps below |
| export/ | the module becomes one graph, from the fields of a micro-batch to the loss |
| passes/ | values that are known become constants; norms, attention and the like become one operator each |
| loss/ | the mean over targets becomes a sum, and a program counts the targets |
| cut.py | the graph becomes a chain of layers |
| differentiate/ | a layer becomes a graph of forward and backward, which is split into F, I and W |
| emit.py | the parts become programs of instructions; interpret.py runs them |
| symbols.py, sizes.py | sizes that differ between micro-batches; the table of numbers that follow from them |
| sequences/ | programs that also run over a slice of the sequences |
| verify/ | the programs' numbers against those of the module under autograd |
| bundle.py | the folder with all of it |

ops.py and own_operators.py describe operators, errors.py says where in the module something is."""

from .bundle import read
from .captured import Captured, DryRun, capture
from .errors import CaptureError

__all__ = ["Captured", "CaptureError", "DryRun", "capture", "read"]
