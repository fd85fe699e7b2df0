"""Fills tensors of torch with the elements of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from tessera._checkpoint import Checkpoint
from tessera._errors import MismatchError
from tessera._memory import Memory, memory_of, torch_dtype

#: Bytes of tensors that are read elsewhere first, at once.
_ASIDE = 256 << 20

class Presence:
    """Raises `incomplete` for what lies in files of a DCP checkpoint that are missing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._missing = frozenset(checkpoint._core.missing)

    def require_elements(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Of a tensor, whose pieces are boxes."""
        if not self._missing:
            return
        for piece in self._checkpoint[name].pieces:
            assert piece.offsets is not None and piece.sizes is not None
            sides = zip(piece.offsets, piece.sizes, offsets, sizes)
            if piece.file in self._missing and all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
                self.require_all(name)

    def require_all(self, name: str) -> None:
        if self._missing:
            self._checkpoint._core.only([name]).require_files()


Place = tuple[str, tuple[int, ...]]  # a tensor's name, and where the wanted elements begin in it


def materialized(target: Any) -> Any:
    """A tensor on the meta device with memory where torch would make it: on the CPU or the group's device. Else the target."""
    if not isinstance(target, torch.Tensor) or target.device.type != "meta":
        return target
    state = {"": target}
    try:
        if not (dist.is_available() and dist.is_initialized()):  # where torch has no answer
            return torch.empty_like(target, device="cpu")
        _init_state_dict(state)
    except Exception as error:
        raise MismatchError(f"mismatch: a {type(target).__name__} on the meta device: {error}") from error
    return state[""]


def require_fillable(part: torch.Tensor) -> None:
    """Throws `mismatch` for what has no memory of its own for each of its elements."""
    kind = type(part).__name__
    if part.layout is not torch.strided:
        raise MismatchError(f"mismatch: a {kind} of {part.layout}")
    if part.device.type == "meta":
        raise MismatchError(f"mismatch: a {kind} on the meta device")
    if any(stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape)):
        raise MismatchError(f"mismatch: an expanded {kind}, whose elements share memory")


class Fill:
    """Collects targets, and fills them. What is added does not change before `run`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._presence = Presence(checkpoint)
        self._direct: list[Any] = []
        self._indirect: list[tuple[Place, torch.Tensor]] = []
        self._taken: set[int] = set()
        self._dtypes: dict[str, Any] = {}  # by our name

    def add(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        """`target` gets as many elements as it has, from `offsets` of the tensor `name` on, which have to be there."""
        self._presence.require_elements(name, offsets, target.shape)
        memory = self._memory(name, target)
        if memory is None:
            self._indirect.append(((name, offsets), target))
        else:
            self._direct.append(memory.request(name, offsets, tuple(target.shape)))

    def run(self) -> None:
        """Reads straight into the targets' memory; for other dtypes, devices and layouts, aside first."""
        if self._direct:
            self._checkpoint._fill(self._direct)
        batch: list[tuple[Place, torch.Tensor]] = []
        size = 0
        for place, target in self._indirect:
            batch.append((place, target))
            size += target.numel() * self._dtype(place[0]).itemsize
            if size >= _ASIDE:
                self._run_aside(batch)
                batch, size = [], 0
        if batch:
            self._run_aside(batch)

    def _run_aside(self, batch: list[tuple[Place, torch.Tensor]]) -> None:
        asides = [torch.empty(tuple(target.shape), dtype=self._dtype(name)) for (name, _), target in batch]
        self._checkpoint._fill(
            [
                memory_of(aside).request(name, offsets, tuple(aside.shape))
                for aside, ((name, offsets), _) in zip(asides, batch)
            ]
        )
        for aside, ((name, _), target) in zip(asides, batch):
            try:
                target.copy_(aside)
            except Exception as error:
                path = self._checkpoint.path
                text = f"mismatch: a {type(target).__name__} cannot be filled: {error} [{path}, key '{name}']"
                raise MismatchError(text, path, name) from error

    def _memory(self, name: str, target: torch.Tensor) -> Memory | None:
        """The target's, if the elements can go there as they are. A second key of it (tied weights) cannot."""
        is_plain = target.device.type == "cpu" and target.layout is torch.strided and type(target) is torch.Tensor
        if not is_plain or target.is_conj() or target.is_neg() or target.dtype != self._dtype(name):
            return None
        address = target.data_ptr()
        if target.numel() > 0 and (address in self._taken or 0 in target.stride()):
            return None
        self._taken.add(address)
        return memory_of(target)

    def _dtype(self, name: str) -> Any:
        short = self._checkpoint[name].dtype
        found = self._dtypes.get(short)
        if found is None:
            found = self._dtypes[short] = torch_dtype(short)
        return found
