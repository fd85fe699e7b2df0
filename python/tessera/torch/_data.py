"""torch's dataclasses and values out of pickles, from an allow-list: nothing else is imported or called."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import io
import pathlib
import pickle
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from tessera._errors import CorruptError, UnsafeError
from tessera._values import Opaque
from tessera.torch._arrays import array_of

_CLASSES: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "pathlib.Path": pathlib.Path,
    "pathlib.PosixPath": pathlib.PosixPath,
    "pathlib._local.PosixPath": pathlib.PosixPath,  # as Python 3.13 calls it
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


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Hundreds of thousands of objects are about to live: looking for dead ones among them takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_metadata(file: BinaryIO, path: str) -> dcp.Metadata:
    """What a `.metadata` says. Raises `unsafe` or `corrupt` for anything else."""
    try:
        with _without_collector():
            metadata = _Unpickler(file).load()
    except UnsafeError as error:
        raise UnsafeError(f"{error.text} [{path}]", path) from None
    except Exception as error:
        raise CorruptError(f"corrupt: {error} [{path}]", path) from error
    if not isinstance(metadata, dcp.Metadata):
        raise CorruptError(f"corrupt: the metadata is a {type(metadata).__name__} [{path}]", path)
    return metadata


_PLAIN = {
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "pathlib.PosixPath": pathlib.PosixPath,
    "pathlib._local.PosixPath": pathlib.PosixPath,
}

# What each `install` allows all readers. It keeps them alive: who has not kept one cannot remove it.
installed: dict[object, frozenset[str]] = {}


class Values:
    """Values with what torch keeps in place of `Opaque`.

    Arrays and scalars of numpy are data, too. Classes and functions are imported and called if `allow` names them. Any
    other raises `unsafe`.
    """

    def __init__(self, path: str, allow: Collection[str] = ()) -> None:
        self._path = path
        self._allow = frozenset(allow).union(*installed.values())
        self._made: dict[int, tuple[Any, Any]] = {}  # by the object that stood there

    def __call__(self, value: Any, key: str) -> Any:
        if isinstance(value, Opaque):
            found = self._made.get(id(value))
            if found is None:
                found = self._made[id(value)] = (value, self._object_of(value, key))
            return found[1]
        if isinstance(value, dict):
            items = [(self(name, key), self(item, key)) for name, item in value.items()]
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = [self(item, key) for item in value]
        elif type(value) is tuple:
            return tuple(self(item, key) for item in value)
        elif isinstance(value, (set, frozenset)):
            return type(value)(self(item, key) for item in value)
        return value

    def _object_of(self, value: Opaque, key: str) -> Any:
        name = value.name if isinstance(value.name, str) else "a computed class"
        if value.arguments is None:
            found = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        elif value.state is None and name in _PLAIN:
            return self._plain(_PLAIN[name], value.arguments, key)
        elif name == "_io.BytesIO" and _is_file_in_memory(value.state):
            file = io.BytesIO(value.state[0])
            file.seek(value.state[1])
            return file
        array = array_of(value)
        if array is not None:
            return array
        if name not in self._allow:
            text = f"unsafe: the value needs {name}, which is code: allow={{{name!r}}} would run it"
            raise UnsafeError(f"{text} [{self._path}, key '{key}']", self._path, key)
        module, _, attribute = name.rpartition(".")
        callable_ = getattr(importlib.import_module(module), attribute)
        return callable_ if value.arguments is None else self._rebuilt(callable_, value, key)

    def _plain(self, kind: Any, arguments: Any, key: str) -> Any:
        made = self(arguments, key)
        try:
            return kind(*made)
        except Exception as error:
            text = f"corrupt: the value is no {kind.__name__}: {error} [{self._path}, key '{key}']"
            raise CorruptError(text, self._path, key) from None

    def _rebuilt(self, callable_: Any, value: Opaque, key: str) -> Any:
        """As pickle does it."""
        arguments = self(value.arguments, key)
        make = callable_.__new__ if value.by_new else callable_
        made = make(*([callable_] if value.by_new else []), *arguments, **self(value.keywords, key))
        for item in value.list_items:
            made.append(self(item, key))
        for name, item in value.dict_items:
            made[self(name, key)] = self(item, key)
        if value.state is not None:
            _set_state(made, self(value.state, key))
        return made


def _is_file_in_memory(state: Any) -> bool:
    """Content, position and no attributes."""
    is_of_three = type(state) is tuple and len(state) == 3
    return is_of_three and type(state[0]) is bytes and type(state[1]) is int and 0 <= state[1] < 1 << 63 and state[2] is None


def _set_state(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    for name, item in {**(state or {}), **(slots or {})}.items():
        setattr(made, name, item)
