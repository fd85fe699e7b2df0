"""The interface of safetensors, for checkpoints of every kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tessera._checkpoint import Checkpoint, open
from tessera._errors import IncompleteError, InvalidArgumentError, MismatchError
from tessera._memory import SAFETENSORS, framework_of
from tessera._tensor import Tensor


class safe_open:
    """safetensors' `safe_open`, word for word: programs change an import.

    >>> import tessera
    >>> with tessera.safe_open(example, framework="np") as file:
    ...     file.keys(), file.get_slice("model.w")[1:2, :2].tolist()
    (['model.w'], [[4.0, 5.0]])

    `partial`, `ignore_index`, `rank` and `accept` are those of `tessera.open`.

    With `mmap` tensors are views of the mapped file where `tessera.load` would give such; their bytes are not checked.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: Any = "cpu",
        *,
        mmap: bool = False,
        partial: bool = False,
        ignore_index: bool = False,
        rank: int | None = None,
        accept: Sequence[str] = (),
    ) -> None:
        self._framework = framework_of(framework)
        self._device = None if str(device) == "cpu" else device
        if self._device is not None and self._framework != "torch":
            raise InvalidArgumentError(f"invalid_argument: arrays of numpy are on the cpu, not on {device!r}")
        self._mmap = mmap
        self._checkpoint: Checkpoint = open(
            filename, partial=partial, ignore_index=ignore_index, rank=rank, accept=accept
        )

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpoint.close()

    def keys(self) -> list[str]:
        """The sorted names of the tensors; of a safetensors file those that its header has, of an index also those that
        it has in missing files, unless they are left out (`partial`).

        Other names of a tensor (tied weights), which `__metadata__` notes, are not among them, as in safetensors:
        `load_model` takes each name that a file lists for a tensor of its own. `get_tensor` knows them.
        """
        noted = self._checkpoint.metadata
        return [name for name in self._checkpoint.names() if not self._is_noted(name, noted)]

    def _is_noted(self, name: str, noted: dict[str, str]) -> bool:
        """Metadata may happen to have a tensor's own name: no two tensors of a file are at one place."""
        kept = noted.get(name)
        if kept is None or kept == name or kept not in self._checkpoint:
            return False
        try:
            tensor, other = self._checkpoint[name], self._checkpoint[kept]
        except IncompleteError:
            return False  # nobody knows where they lie
        return isinstance(other, Tensor) and 0 not in tensor.shape and tensor.pieces == other.pieces

    def offset_keys(self) -> list[str]:
        """The names of the tensors in the order of the file."""
        return sorted(self.keys(), key=self._place)

    def _place(self, name: str) -> tuple[str, int]:
        try:
            pieces = self._checkpoint[name].pieces
        except IncompleteError:
            return "", 0
        return (pieces[0].file or "", pieces[0].file_offset) if pieces else ("", 0)

    def metadata(self) -> dict[str, str] | None:
        """`__metadata__` of a safetensors file; None: there is none."""
        return self._checkpoint.metadata or None

    def get_tensor(self, name: str) -> Any:
        """The tensor, read."""
        return self.get_slice(name)[()]

    def get_slice(self, name: str) -> TensorSlice:
        """What reads parts of the tensor."""
        found = self._checkpoint[name]
        if not isinstance(found, Tensor):
            raise MismatchError(f"mismatch: {name!r} is a value, not a tensor", self._checkpoint.path, name)
        return TensorSlice(found, self._framework, self._device, self._mmap)


class TensorSlice:
    """A tensor of a `safe_open` whose parts are read by indexing.

    >>> with tessera.safe_open(example, framework="np") as file:
    ...     file.get_slice("model.w").get_shape(), file.get_slice("model.w").get_dtype()
    ([3, 4], 'F32')
    """

    def __init__(self, tensor: Tensor, framework: str, device: Any, mmap: bool) -> None:
        self._tensor = tensor
        self._framework = framework
        self._device = device
        self._mmap = mmap

    def get_shape(self) -> list[int]:
        """The sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name: "F32", "BF16"."""
        return SAFETENSORS[self._tensor.dtype] or self._tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        if self._framework == "torch":
            return self._tensor.torch(index, device=self._device, mmap=self._mmap)
        return self._tensor.numpy(index, mmap=self._mmap)
