"""Puts our reader and writer in the places of torch's."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import TracebackType
from typing import Any

from torch.distributed.checkpoint import filesystem

from tessera.torch import _data
from tessera.torch._reader import FileSystemReader
from tessera.torch._writer import FileSystemWriter

_OURS: dict[type, type] = {filesystem.FileSystemReader: FileSystemReader, filesystem.FileSystemWriter: FileSystemWriter}


class install:
    """Every program that makes `FileSystemReader` or `FileSystemWriter` of torch gets ours, until `remove`.

    That is for programs that choose the classes themselves, and for `dcp.save(..., checkpoint_id=)`.
    The names are replaced in all modules that have them; a module that takes them later gets ours,
    too. `allow` is `LoadPlanner`'s, for programs that have another planner. As a context manager it
    ends with the block.

    >>> import tessera.torch, torch, torch.distributed.checkpoint as dcp
    >>> with tessera.torch.install():
    ...     metadata = dcp.save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step800", no_dist=True)
    >>> tessera.verify(directory + "/step800").findings
    []
    """

    def __init__(self, allow: Collection[str] = ()) -> None:
        _data.installed[self] = frozenset(allow)
        self._replaced: list[tuple[Any, str, type]] = []
        for module in list(sys.modules.values()):
            name = getattr(module, "__name__", "")
            if name == "tessera" or name.startswith("tessera."):
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                ours = _OURS.get(value) if isinstance(value, type) else None
                if ours is not None:
                    setattr(module, attribute, ours)
                    self._replaced.append((module, attribute, value))

    def remove(self) -> None:
        """Torch's classes are in their places again."""
        for module, attribute, theirs in self._replaced:
            if getattr(module, attribute, None) is _OURS[theirs]:
                setattr(module, attribute, theirs)
        self._replaced.clear()
        _data.installed.pop(self, None)

    def __enter__(self) -> install:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
