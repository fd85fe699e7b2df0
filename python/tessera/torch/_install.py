"""Puts our reader and writer in the places of torch's."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint import _async_process_executor, _storage_utils, filesystem

from tessera.torch import _data
from tessera.torch._copies import require_policy
from tessera.torch._reader import FileSystemReader
from tessera.torch._writer import FileSystemWriter


class _Theirs:
    """Torch's classes. While ours are in their places, pickles of objects from before find them here."""

    FileSystemReader = filesystem.FileSystemReader
    FileSystemWriter = filesystem.FileSystemWriter


_PAIRS = ((_Theirs.FileSystemReader, FileSystemReader), (_Theirs.FileSystemWriter, FileSystemWriter))

# What has changed as long as `_data.installed` has anybody, and how it was; all of it is guarded by the lock.
_lock = threading.RLock()
_names: list[tuple[dict[str, Any], str, Any, Any]] = []  # a module's names, one of them, torch's and ours
_attributes: list[tuple[type, str, Any]] = []  # of torch's classes


class install:
    """Every program that makes `FileSystemReader` or `FileSystemWriter` of torch gets ours, until `remove`.

    That is for programs that choose the classes themselves, and for `dcp.save(..., checkpoint_id=)`,
    `dcp.async_save` by a thread or a process among them. The names are replaced in all modules that
    have them; a module that takes them later gets ours, too. `allow` is `LoadPlanner`'s, for programs
    that have another planner. `copies` is
    `FileSystemWriter`'s. As a context manager it ends with the block. Of several, the last one
    that ends gives torch its places back.

    >>> import tessera.torch, torch, torch.distributed.checkpoint as dcp
    >>> with tessera.torch.install():
    ...     metadata = dcp.save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step800", no_dist=True)
    >>> tessera.verify(directory + "/step800").findings
    []
    """

    def __init__(self, allow: Collection[str] = (), *, copies: str | None = None) -> None:
        allowed = frozenset(allow)
        require_policy(copies)
        with _lock:
            _data.installed[self] = allowed
            _data.copies[self] = copies
            try:
                _replace_names()
                if not _attributes:
                    _change_attributes()
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Torch's classes are in their places again, unless another one is installed."""
        with _lock:
            _data.installed.pop(self, None)
            _data.copies.pop(self, None)
            if _data.installed:
                return
            for names, name, theirs, ours in _names:
                if names.get(name) is ours:
                    names[name] = theirs
            for kind, name, value in _attributes:
                setattr(kind, name, value)
            _names.clear()
            _attributes.clear()

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _replace_names() -> None:
    for names in _names_of_modules():
        for name, value in list(names.items()):
            for theirs, ours in _PAIRS:
                if value is theirs:
                    names[name] = ours
                    _names.append((names, name, theirs, ours))


def _names_of_modules() -> Iterator[dict[str, Any]]:
    """Nothing of a module is asked that might answer by code of its own, and no value is compared but by identity."""
    for name, module in list(sys.modules.items()):
        if isinstance(name, str) and (name == "tessera" or name.startswith("tessera.")):
            continue
        try:
            names = object.__getattribute__(module, "__dict__")
        except Exception:  # what some put there is no module
            continue
        if type(names) is dict:
            yield names


def _change_attributes() -> None:
    for theirs, _ in _PAIRS:
        _set(theirs, "__qualname__", f"{_Theirs.__qualname__}.{theirs.__name__}")
        _set(theirs, "__module__", __name__)
    process = _async_process_executor._AsyncCheckpointProcess
    _set(process, "save", _with_writer(process.save))


def _set(kind: type, name: str, value: Any) -> None:
    _attributes.append((kind, name, getattr(kind, name)))
    setattr(kind, name, value)


def _with_writer(save: Any) -> Any:
    """The process that saves in the background knows nothing of an installation: it is told the writer that is meant."""

    @functools.wraps(save)
    def saves(*args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any) -> Any:
        if storage_writer is None and checkpoint_id:
            storage_writer = _storage_utils._storage_setup(None, checkpoint_id, reader=False)
        return save(*args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs)

    return saves
