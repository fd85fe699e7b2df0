"""An open checkpoint of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from tessera import _core
from tessera._errors import ConflictError, KeyNotFoundError
from tessera._memory import Loaded, framework_of, name_of_dtype
from tessera._reports import File, IoReport
from tessera._tensor import Tensor

Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]


def open(
    path: Path,
    *,
    header_limit: int = 100_000_000,
    threads: int = 2,
    memory: int = 64 << 20,
    part: bool = False,
    raw: bool = False,
    partial: bool = False,
    ignore_index: bool = False,
    rank: int | None = None,
    accept: Sequence[str] = (),
) -> Checkpoint:
    """Opens a checkpoint of any kind: a file, a directory or a URL.

    Reads its metadata and proves that the pieces of every tensor are there; no element is read.
    `threads` and `memory` (bytes of buffers) bound each read. A longer header of a safetensors or GGUF
    file than `header_limit` bytes is refused. A file that one of several ranks saved of its part is
    incomplete; with `part` it is opened for what it holds, the ranks' tensors as their local ones.
    A whole module that torch.save pickled is what its state_dict() would be, with a warning that says
    so; with `raw` it is the object that it was pickled as.

    What lies in a file that is missing is incomplete for who asks for it; with `partial` it is left out. With
    `ignore_index` the files of a set say what they hold, not its index. `rank` chooses among files that ranks wrote under
    the same names (vLLM). `accept` has faults to pass over: "trailing-bytes" behind the last tensor of a safetensors or
    GGUF file, or behind the end of one of torch.save.

    >>> import tessera
    >>> with tessera.open(example) as checkpoint:
    ...     checkpoint.kind, list(checkpoint)
    ('dcp', ['model.w', 'step'])
    """
    how = {
        "header_limit": header_limit,
        "part": part,
        "raw": raw,
        "partial": partial,
        "ignore_index": ignore_index,
        "rank": rank,
        "accept": listed(accept),
    }
    core = _core.open(os.fspath(path), how)
    return Checkpoint(core, _Place(_absolute(os.fsdecode(path)), how), threads, memory)


@dataclass(frozen=True)
class _Place:
    """What opens the same checkpoint again, wherever the working directory is by then."""

    path: str
    how: dict[str, Any]  # the options of `open`
    only: tuple[tuple[str, ...], ...] = ()  # what was chosen of it, and then of that

    def opened(self, identity: list[tuple[str, str]]) -> Any:
        """Raises `conflict` for another save than the one of which `_core` has told this identity."""
        core = _core.open(self.path, self.how)
        if core.identity() != identity:
            text = f"conflict: another save is there than the one that was open when it was pickled [{self.path}]"
            raise ConflictError(text, self.path)
        for keys in self.only:
            core = core.only(list(keys))
        return core


def _absolute(path: str) -> str:
    """Without a look at links, so that ".." means what it means to the system. URLs are whole as they are."""
    return path if "://" in path or os.path.isabs(path) else os.path.join(os.getcwd(), path)


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: a mapping from keys to tensors and values. `open` makes one.

    Several threads may read from it at once. Its pickle has no element: whoever unpickles it, such as
    a worker of a DataLoader, opens the place anew, and gets a `ConflictError` if another save is there
    by then. A copy shares what is open, and is closed for itself.

    >>> import tessera
    >>> with tessera.open(example) as checkpoint:
    ...     checkpoint["step"], checkpoint["model.w"].shape
    (7, (3, 4))
    """

    def __init__(self, core: Any, place: _Place, threads: int, memory: int) -> None:
        self._core = core
        self._place = place
        self._threads = threads
        self._memory = memory

    @property
    def kind(self) -> str:
        """What it is: "dcp", "torch", "safetensors", "olmo-full", ... as the command says."""
        return str(self._core.kind)

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self._core.path)

    @property
    def world_size(self) -> int | None:
        """The number of ranks whose files are there; None: not known."""
        return self._core.world_size or None

    @property
    def files(self) -> list[File]:
        """The files that belong to it."""
        return [File(name, size) for name, size in self._core.files]

    @property
    def warnings(self) -> list[str]:
        """What a careful reader should know."""
        return list(self._core.warnings)

    @property
    def metadata(self) -> dict[str, str]:
        """`__metadata__` of safetensors files, without what is about the files themselves."""
        return dict(self._core.metadata)

    @property
    def producer(self) -> str:
        """What the files say about their origin; may be empty."""
        return str(self._core.producer)

    @property
    def save_id(self) -> str:
        """The name of the save that made a DCP checkpoint; empty elsewhere."""
        return str(self._core.save_id)

    def names(self, glob: str = "*") -> list[str]:
        """The sorted names of the tensors that match ('*', '?', '[a-z]'; '*' matches dots, too)."""
        return list(self._core.matching(glob))

    def only(self, keys: Sequence[str]) -> Checkpoint:
        """A part of it: keys, what keys begin with before a dot, or globs."""
        chosen = listed(keys)
        place = replace(self._place, only=(*self._place.only, tuple(chosen)))
        return Checkpoint(self._core.only(chosen), place, self._threads, self._memory)

    def load(
        self,
        *,
        framework: str | None = None,
        dtype: Any = None,
        mmap: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """All of it as nested dicts and lists, with tensors of torch or arrays of numpy, as `tessera.load` chooses them.

        With `dtype` floating-point tensors of 16 bits and more are converted to that. `mmap` is what it is there; each
        call maps the files anew.
        """
        name = None if dtype is None else name_of_dtype(dtype)
        return self._core.load(name, self._threads, mmap, Loaded(framework_of(framework)), progress)

    def close(self) -> None:
        """Lets its files go. Whoever reads from it afterwards gets an error."""
        self._core.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self._place, self._core.identity(), self._threads, self._memory)

    def __copy__(self) -> Checkpoint:
        return Checkpoint(self._core.share(), self._place, self._threads, self._memory)

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpoint:
        return self.__copy__()  # what is open never changes

    def __getitem__(self, key: str) -> Any:
        value = self._value(key, lambda core: Tensor(None, key, core))
        return Tensor(self, key, value) if isinstance(value, _core.Tensor) else value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._core.has(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._core.names())

    def __len__(self) -> int:
        return len(self._core)

    def __repr__(self) -> str:
        if self._core.closed:
            return "<tessera.Checkpoint, closed>"
        return f"<tessera.Checkpoint {self.kind} {self.path!r}, {len(self)} keys>"

    def _value(self, key: object, wrap: Callable[[Any], Any]) -> Any:
        """A `_core.Tensor`, which is not read, or a value, whose tensors are what `wrap` makes of theirs."""
        found = self._core.leaf(key, wrap) if isinstance(key, str) else None
        if found is None:
            raise KeyNotFoundError(f"not_found: there is no key {key!r} [{self.path}]", self.path, str(key))
        return found[0]

    def _mapped(self, name: str) -> Any:
        """A `_core.Tensor` over its mapped file; None: its elements have to be read."""
        return self._core.mapped(name)

    def _fill(self, requests: list[Any]) -> IoReport:
        return IoReport(**self._core.read(requests, self._threads, self._memory))


def _opened_again(place: _Place, identity: list[tuple[str, str]], threads: int, memory: int) -> Checkpoint:
    return Checkpoint(place.opened(identity), place, threads, memory)


def listed(texts: Sequence[str]) -> list[str]:
    """A list of texts, of which one may be given alone."""
    return [texts] if isinstance(texts, str) else list(texts)
