"""What is in a store or in files of the system, and so ours. The rest is torch's and fsspec's."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import filesystem

WRITABLE = ("file", "s3", "r2", "weka", "gs")
READABLE = (*WRITABLE, "hf", "http", "https")


def is_url_of(schemes: tuple[str, ...], path: str | os.PathLike[str]) -> bool:
    scheme, mark, _ = os.fspath(path).partition("://")
    return bool(mark) and scheme.lower() in schemes


def is_foreign(storage: Any) -> bool:
    """Whether it has a file system of its own, as fsspec's classes and others that derive from torch's have."""
    return type(storage.fs) is not filesystem.FileSystem
