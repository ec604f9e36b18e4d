"""Notices changes of a module that would be lost, because the trainer has its own copies, and takes over those of
weights that it shares with the module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from twobp._native import Error, Looks

STATES = 64  # the number of the trainer's states that are recognised
SAMPLES = 16  # elements of a tensor that distinguish states, besides the sum of all bits
AT_ONCE = 1 << 20  # elements that are widened for their sum
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Watches the parameters of a module, and its other tensors that training never changes."""

    def __init__(self, module: nn.Module, changed: set[str], loss_fn: object = None):
        """`changed` lists the buffers that training changes. The module's own forward pass changes them too, so they
        are not watched. If `loss_fn` is a module, its tensors are watched, too."""
        self._module, self._changed = module, changed
        self._loss_fn = loss_fn if isinstance(loss_fn, nn.Module) else None
        self._shared: dict[str, torch.Tensor] = {}  # the trainer's weights that the module has, too
        own = dict(module.named_parameters(remove_duplicate=False))
        self._fixed = {
            name: one.detach().clone()
            for name, one in module.state_dict().items()
            if name not in own and name not in changed
        }
        self._known: dict[str, None] = {}  # in order
        self._parts = [
            (f"{path}.{key}".lstrip("."), part._modules, key, child)
            for path, part in module.named_modules()
            for key, child in part._modules.items()
        ]
        self._hooks = [
            (path, table, len(table))
            for path, part in module.named_modules()
            for table in (part._backward_hooks, part._backward_pre_hooks)
        ]
        self._next_hook = RemovableHandle.next_id
        self._look()
        self.came_from_trainer(module.state_dict())

    def share(self, weights: Mapping[str, torch.Tensor], written: Callable[[], None]) -> None:
        """Lets parameters of the module be the trainer's weights of these names, which it must be told of after a
        change by `written`."""
        own = dict(self._module.named_parameters(remove_duplicate=False))
        for name, weight in weights.items():
            own[name].data = weight
        self._shared, self._written = dict(weights), written
        self._strides = [(own[name], weight.stride()) for name, weight in weights.items()]
        self._look()

    def trainer_wrote(self) -> None:
        """Records that the trainer has changed the weights that it shares."""
        if self._shared:
            self._looks.again(self._of_shared)

    def _take_over(self) -> None:
        """Gives the trainer what the module's shared parameters are now."""
        for name, weight in self._shared.items():
            path, _, key = name.rpartition(".")
            now = self._module.get_submodule(path)._parameters.get(key)
            if now is None or (place(now), now.dtype) == (place(weight), weight.dtype):
                continue
            if (now.shape, now.dtype, now.device) != (weight.shape, weight.dtype, weight.device):
                raise Error(
                    f"'{name}' of the module is now {list(now.shape)} {now.dtype} on {now.device}, but the trainer has "
                    f"{list(weight.shape)} {weight.dtype} on {weight.device}: make a new trainer"
                )
            weight.copy_(now.detach().clone())  # it may be another view of the weight
            now.data = weight
        self._written()
        self._looks.again(self._of_shared)

    def came_from_trainer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Records that a module with this state got it from the trainer."""
        self._known[self._sample(state)] = None
        if len(self._known) > STATES:
            del self._known[next(iter(self._known))]

    def check_fixed(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises Error if the state has other values for a tensor that training never changes. Rounding is allowed,
        because the mean of equal tensors is hardly ever equal to them."""
        for name in state.keys() & self._fixed.keys():
            one, other = state[name], self._fixed[name]
            if one.shape != other.shape or not torch.allclose(one.double(), other.double(), rtol=1e-5, equal_nan=True):
                raise Error(
                    f"the state has other values of {name}, which is a constant of the captured module: make a new "
                    "trainer"
                )

    def check(self) -> None:
        """Raises Error if the module has a part with tensors or a tensor that is no longer the trainer's, or a new hook
        of the backward pass. Other changes are for the guards of its capture."""
        replaced = next(
            (
                name
                for name, table, key, part in self._parts
                if table.get(key) is not part and (has_tensors(part) or has_tensors(table.get(key)))
            ),
            None,
        )
        if replaced:
            raise Error(
                f"the part '{replaced}' of the module was replaced after the trainer was made, but the trainer still "
                "has the old part: make a new trainer"
            )
        if RemovableHandle.next_id != self._next_hook:  # a hook was added somewhere
            hooked = next((path for path, table, count in self._hooks if len(table) > count), None)
            if hooked is not None:
                raise Error(
                    f"{repr(hooked) if hooked else 'the module'} got a hook after the trainer was made, which would "
                    "not run: remove it, or make a new trainer"
                )
            self._next_hook = RemovableHandle.next_id
        number = self._looks.first_change()
        if self._shared and (number >= 0 or any(one.stride() != strides for one, strides in self._strides)):
            self._take_over()
            number = self._looks.first_change()
        if number < 0:
            return
        name, table, key, trained = self._seen[number]
        now = table.get(key)
        if now is not None and now.requires_grad != trained:
            raise Error(
                f"'{name}' of the module was {'unfrozen' if now.requires_grad else 'frozen'} after the trainer was "
                "made, which the trainer does not see: make a new trainer"
            )
        if number >= self._of_module:
            raise Error(
                f"'{name}' was changed after the trainer was made, but the trainer has a copy: make a new trainer"
            )
        if self._sample(self._module.state_dict()) not in self._known:
            raise Error(
                f"'{name}' of the module was changed, but the trainer has its own copy, so the change would be lost: "
                "call "
                "trainer.load_state_dict(module.state_dict()) to take it over, or change a copy.deepcopy of the module"
            )
        self._look()

    def _look(self) -> None:
        self._looks = Looks()
        self._seen: list = []
        self._look_at(self._module, "")
        self._of_module = len(self._seen)
        places = {one.data_ptr() for one in self._shared.values()}  # also under other names
        self._of_shared = [
            number for number, (_, table, key, _) in enumerate(self._seen) if table[key].data_ptr() in places
        ]
        if self._loss_fn is not None:
            self._look_at(self._loss_fn, "loss_fn")

    def _look_at(self, module: nn.Module, prefix: str) -> None:
        for path, part in module.named_modules(prefix=prefix):
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    name = f"{path}.{key}".lstrip(".")
                    if tensor is not None and name not in self._changed:
                        self._looks.add(table, key)
                        self._seen.append((name, table, key, tensor.requires_grad))

    def _sample(self, state: Mapping[str, torch.Tensor]) -> str:
        digest = hashlib.sha256()
        for name in sorted(state.keys() - self._changed):
            flat = state[name].detach().flatten()
            bits = flat.view(
                BITS[flat.element_size()]
            )  # a sum runs at the speed of memory, while a hash of all bytes would take a second
            some = bits[:: max(1, len(bits) // SAMPLES)].tolist()
            whole = sum(one.sum(dtype=torch.int64).item() for one in bits.split(AT_ONCE))
            digest.update(f"{name} {flat.dtype} {len(bits)} {whole} {some}".encode())
        return digest.hexdigest()


def place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def has_tensors(part: nn.Module | None) -> bool:
    return part is not None and next(part.parameters(), next(part.buffers(), None)) is not None
