"""A tensor of a checkpoint: what it is, and its elements when they are asked for."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tessera import _memory
from tessera._errors import InvalidArgumentError, UnsupportedError
from tessera._reports import IoReport
from tessera._slices import box_of


class _Filler(Protocol):
    """The open checkpoint that has the elements."""

    def _fill(self, requests: list[Any]) -> IoReport: ...

    def _mapped(self, name: str) -> Any: ...

    def __getitem__(self, key: str) -> Any: ...


@dataclass(frozen=True)
class Piece:
    """A part of a tensor and the file that has it.

    A box has `offsets` and `sizes`; a range of elements in row-major order, as FSDP1 shards hold
    them, has `begin` and `end`.

    >>> with tessera.open(example) as checkpoint:
    ...     checkpoint["model.w"].pieces[0].sizes
    (3, 4)
    """

    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    begin: int | None = None
    end: int | None = None
    rank: int | None = None
    file: str | None = None
    #: Where the piece's storage begins in the file, in bytes.
    file_offset: int = 0


class Tensor:
    """A tensor of an open checkpoint. Nothing of it is read before somebody asks for elements.

    >>> import tessera
    >>> with tessera.open(example) as checkpoint:
    ...     weight = checkpoint["model.w"]
    ...     weight.shape, weight.dtype, weight[0, :2].tolist()
    ((3, 4), 'float32', [0.0, 1.0])
    """

    def __init__(self, checkpoint: _Filler | None, name: str, core: Any) -> None:
        self._checkpoint = checkpoint  # None: it is inside of a value, and in memory
        self._core = core
        #: Its key in the checkpoint.
        self.name = name
        #: Its dtype, by torch's name: "float32", "bfloat16", "bool".
        self.dtype: str = core.dtype
        self.shape: tuple[int, ...] = core.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * _memory.SIZES[self.dtype]

    @property
    def requires_grad(self) -> bool:
        """Whether it was saved so."""
        return bool(self._core.requires_grad)

    @property
    def pieces(self) -> list[Piece]:
        """Where its elements are, each of them once."""
        found = []
        for first, second, rank, file, offset in self._core.pieces():
            if isinstance(first, tuple):
                found.append(Piece(offsets=first, sizes=second, rank=rank, file=file, file_offset=offset))
            else:
                found.append(Piece(begin=first, end=second, rank=rank, file=file, file_offset=offset))
        return found

    def numpy(self, index: Any = (), *, out: Any = None, dtype: Any = None, mmap: bool = False) -> Any:
        """The tensor, or the part that `index` names, as an array of numpy. `out` is filled instead.

        With `mmap` it is a view of the mapped file where `tessera.load` would give one. An open checkpoint maps a file
        once, so what is written into one view is seen in all that it gives of those elements.
        """
        if out is not None:
            self.read_into(out, index)
            return out
        return self._read(index, dtype, "numpy", mmap)

    def torch(self, index: Any = (), *, dtype: Any = None, device: Any = None, mmap: bool = False) -> Any:
        """The tensor, or the part that `index` names, as a tensor of torch; `mmap` is what it is in `numpy`."""
        tensor = self._read(index, dtype, "torch", mmap)
        return tensor if device is None else tensor.to(device)

    def read_into(self, target: Any, index: Any = ()) -> IoReport:
        """Fills memory of numpy, of torch or that speaks DLPack. Its dtype may differ: elements are converted."""
        memory = _memory.memory_of(target)
        offsets, sizes, rest = box_of(index, self.shape)
        kept = [size for size, part in zip(sizes, _of_dimensions(rest)) if part != 0]
        if any(part is None or (isinstance(part, slice) and part.step not in (None, 1)) for part in rest):
            raise InvalidArgumentError("invalid_argument: memory is filled by slices without steps and without None")
        if memory.shape != tuple(kept):
            raise InvalidArgumentError(f"invalid_argument: the memory is {memory.shape}, the slice is {tuple(kept)}")
        shape, strides, given = [], [], iter(zip(memory.shape, memory.strides))
        for part in rest:
            extent, stride = (1, 1) if part == 0 else next(given)
            shape.append(extent)
            strides.append(stride)
        if self._checkpoint is None:
            _memory.fill(target, lambda framework: self._read(index, None, framework))
            return IoReport()
        whole = replace(memory, shape=tuple(shape), strides=tuple(strides))
        return self._checkpoint._fill([whole.request(self.name, offsets, sizes)])

    def __reduce__(self) -> tuple[Any, ...]:
        if self._checkpoint is None:
            raise UnsupportedError(f"unsupported: a tensor inside of a value is not pickled: read it first [key '{self.name}']")
        return operator.getitem, (self._checkpoint, self.name)

    def __copy__(self) -> Tensor:
        return self  # it never changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.numpy(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("a tensor of a checkpoint is copied when it is read")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<tessera.Tensor {self.name!r} {self.dtype} {list(self.shape)}>"

    def _read(self, index: Any, dtype: Any, framework: str, mmap: bool = False) -> Any:
        offsets, sizes, rest = box_of(index, self.shape)
        wanted = self.dtype if dtype is None else _memory.name_of_dtype(dtype)
        parts = tuple(slice(begin, begin + count) for begin, count in zip(offsets, sizes))
        if self._checkpoint is None:
            box = _memory.Loaded(framework)(self._core)[parts]
            return _picked(_memory.as_dtype(box, wanted, framework), rest)
        view = self._checkpoint._mapped(self.name) if mmap and wanted == self.dtype else None
        if view is not None:
            box = _memory.Loaded(framework)(view)
            return _picked((box.detach() if framework == "torch" else box)[parts], rest)
        target = _memory.empty(sizes, wanted, framework)
        memory = _memory.memory_of(target)
        self._checkpoint._fill([memory.request(self.name, offsets, sizes)])
        return _picked(target, rest)


def _of_dimensions(rest: tuple[Any, ...]) -> list[Any]:
    return [part for part in rest if part is not None]


def _picked(box: Any, rest: tuple[Any, ...]) -> Any:
    """What numpy's indexing gives of a box. torch has no negative steps, so it flips."""
    flips = []
    parts: list[Any] = []
    dimension = 0
    for part in rest:
        if isinstance(part, slice) and part.step is not None and part.step < 0 and hasattr(box, "flip"):
            flips.append(dimension)
            parts.append(slice(None, None, -part.step))
        else:
            parts.append(part)
        dimension += part is not None
    if flips:
        box = box.flip(flips)
    return box[tuple(parts)] if any(part != slice(None) for part in parts) else box
