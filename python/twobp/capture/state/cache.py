"""Keeps traces of captured modules in the user's cache folder, in a file for each module and shape of micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable

import torch
from torch import nn

from twobp import _native

from ..export.generic import Dimensions
from ..trace import Traced, own_tensors
from . import fingerprint

SWITCH = "TWOBP_CACHE"  # "off": nothing is read or written
MOST_BYTES = 1 << 30  # of all entries; the least recently used are removed
LEFT_BEHIND = 3600  # after these seconds, a file that is still being written belongs to a process that died

_met: set[str] = set()  # keys of entries whose programs this process has compared


class Cache:
    """`where` is True for the user's cache folder, False for none, or a folder."""

    def __init__(self, where: bool | str | os.PathLike = True):
        off = where is False or where is True and os.environ.get(SWITCH) == "off"
        self.folder = None if off else user_folder() if isinstance(where, bool) else pathlib.Path(where)

    def entry(
        self,
        walk: tuple[fingerprint.Fingerprint, str],
        fields: dict[str, torch.Tensor],
        loss_reduction: str | None,
        check: bool,
        slices: bool,
        which: Dimensions | None = None,
    ) -> Entry:
        """Returns the entry of a module, over which `walk` went, for micro-batches with these fields, whose sizes in
        the dimensions `which` may differ."""
        if self.folder is None:
            return Entry([], "", "off")
        if walk[0].unknown:
            return Entry([], "", f"not kept: {walk[0].unknown}")
        key = fingerprint.key_of(walk[1], fields, loss_reduction, check, which)
        sliced, unsliced = self.folder / f"{key}-slices.safetensors", self.folder / f"{key}.safetensors"
        return Entry([sliced] if slices else [unsliced, sliced], key, "")


@dataclasses.dataclass
class Entry:
    """`paths` are the files that serve this capture, the first one its own; empty without a cache. `state` is "hit",
    "kept" or "off", or says why nothing was kept."""

    paths: list[pathlib.Path]
    key: str
    state: str

    def of_buffers(self, names: Iterable[str]) -> Entry:
        """Returns the entry of the same module for programs that have these buffers as inputs, although its forward
        pass may only read them."""
        key = hashlib.sha256(f"{self.key} {sorted(names)}".encode()).hexdigest()
        return Entry([path.with_name(path.name.replace(self.key, key)) for path in self.paths], key, self.state)

    def is_new_here(self) -> bool:
        """Returns True once in a process for each entry, so that its programs are compared with the module once."""
        new = self.key not in _met
        _met.add(self.key)
        return new

    def read(self, whole: nn.Module) -> tuple[Traced, dict | None] | None:
        """Returns the trace and the errors of its dry run. Returns None if there is none for this module, or the files
        are damaged."""
        return next(filter(None, (self._read(path, whole) for path in self.paths)), None)

    def _read(self, path: pathlib.Path, whole: nn.Module) -> tuple[Traced, dict | None] | None:
        if not path.exists():
            return None
        try:
            tensors = _native.read_tensors(str(path))
            text, checksum = (fingerprint.bytes_of(tensors.pop(name)) for name in ("trace", "checksum"))
            constants = [tensors[str(i)] for i in range(len(tensors))]
            kept = json.loads(text)
            kept["reads"] = {int(number): names for number, names in kept["reads"].items()}
            if checksum != checksum_of(text, constants) or kept.pop("key") != self.key:
                return None
            dry_run = kept.pop("dry_run")
            traced = Traced(**kept, constants=constants)
            own = own_tensors(whole)
            if any(fingerprint.tensor_digest(own[name]) != digest for name, digest in traced.read.items()):
                return None  # a buffer that is only read has other values now
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self.state = "hit"
        return traced, dry_run

    def write(self, traced: Traced, dry_run: dict | None) -> None:
        """If the folder cannot be written or the disk is full, the next capture just takes longer."""
        if not self.paths:
            return
        path = self.paths[0]
        kept = dataclasses.asdict(dataclasses.replace(traced, constants=[]))
        del kept["constants"]
        text = json.dumps({"key": self.key, "dry_run": dry_run, **kept}).encode()
        tensors = {str(i): tensor.contiguous() for i, tensor in enumerate(traced.constants)}
        for name, data in (("trace", text), ("checksum", checksum_of(text, traced.constants))):
            tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as own:  # for this process only
                _native.write_tensors(f"{own}/entry", tensors)
                os.replace(f"{own}/entry", path)
            self.state = "kept"
            _met.add(self.key)
            remove_oldest(path.parent)
        except (OSError, RuntimeError) as error:
            self.state = f"not kept: {error}"


def user_folder() -> pathlib.Path | None:
    """Returns a folder beside the tokenized texts of the program. Returns None if the user has no cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    home = os.environ.get("HOME")
    if cache or home:
        return (pathlib.Path(cache) if cache else pathlib.Path(home or "", ".cache")) / "twobp" / "captures"
    return None


def checksum_of(text: bytes, constants: list[torch.Tensor]) -> bytes:
    return hashlib.sha256(text + "".join(map(fingerprint.tensor_digest, constants)).encode()).digest()


def remove_oldest(folder: pathlib.Path) -> None:
    entries = sorted(((path.stat(), path) for path in folder.glob("*.safetensors")), key=lambda one: -one[0].st_mtime)
    total = 0
    for status, path in entries:
        total += status.st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
    for path in folder.glob(".new-*"):
        if time.time() - path.stat().st_mtime > LEFT_BEHIND:
            for inner in path.iterdir():
                inner.unlink()
            path.rmdir()
