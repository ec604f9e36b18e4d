"""Any Python function of a model that returns a loss, such as compute_loss of a transformers.Trainer, as a module that
capture takes. What the function takes out of tensors for its logs becomes an output, and its Python runs again for each
micro-batch with these numbers."""

from twobp.losses.module import LossModule
from twobp.losses.script import Script

__all__ = ["LossModule", "Script"]
