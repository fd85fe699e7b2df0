"""torch's dataclasses and values out of pickles, from an allow-list: nothing else is imported or called."""

from __future__ import annotations

import collections
import pathlib
import pickle
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from tessera._errors import CorruptError, UnsafeError
from tessera._values import Opaque

_CLASSES: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "pathlib.Path": pathlib.Path,
    "pathlib.PosixPath": pathlib.PosixPath,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
    "torch.serialization._get_layout": _get_layout,
}
_CLASSES.update(
    (f"torch.distributed.checkpoint.metadata.{name}", getattr(dcp, name))
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
)


def _member(kind: Any, name: Any) -> Any:
    """How pickle names the members of an enumeration."""
    if kind is not dcp._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise UnsafeError(f"unsafe: the metadata asks for {name!r} of {kind!r}")
    return kind[name]


_CLASSES["builtins.getattr"] = _member


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else None
        if found is None:
            raise UnsafeError(f"unsafe: the metadata names {module}.{name}, which is no part of it")
        return found


def read_metadata(file: BinaryIO, path: str) -> dcp.Metadata:
    """What a `.metadata` says. Raises `unsafe` or `corrupt` for anything else."""
    try:
        metadata = _Unpickler(file).load()
    except UnsafeError as error:
        raise UnsafeError(f"{error.text} [{path}]", path) from None
    except Exception as error:
        raise CorruptError(f"corrupt: {error} [{path}]", path) from error
    if not isinstance(metadata, dcp.Metadata):
        raise CorruptError(f"corrupt: the metadata is a {type(metadata).__name__} [{path}]", path)
    return metadata


_PLAIN = {"torch.Size": torch.Size, "torch.device": torch.device, "pathlib.PosixPath": pathlib.PurePosixPath}


def value_of(value: Any, path: str, key: str) -> Any:
    """A value with what torch keeps in place of `Opaque`. Raises `unsafe` for any other class."""
    if isinstance(value, Opaque):
        return _object_of(value, path, key)
    if isinstance(value, dict):
        for name, item in list(value.items()):
            value[name] = value_of(item, path, key)
        return value
    if isinstance(value, list):
        value[:] = [value_of(item, path, key) for item in value]
        return value
    if type(value) is tuple:
        return tuple(value_of(item, path, key) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value)(value_of(item, path, key) for item in value)
    return value


def _object_of(value: Opaque, path: str, key: str) -> Any:
    name = value.name if isinstance(value.name, str) else "a computed class"
    if value.arguments is None and name.startswith("torch."):
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    if value.arguments is not None and value.state is None and name in _PLAIN:
        return _PLAIN[name](*value.arguments)
    raise UnsafeError(f"unsafe: the value needs {name}, which is code [{path}, key '{key}']", path, key)
