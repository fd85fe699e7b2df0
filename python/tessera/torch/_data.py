"""torch's dataclasses and values of what the core has decoded: nothing is imported or called but what is named here."""

from __future__ import annotations

import collections
import contextlib
import enum
import gc
import importlib
import io
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tessera import _core
from tessera._arrays import array_of
from tessera._errors import CorruptError, Error, UnsafeError
from tessera._memory import Loaded, torch_dtype
from tessera._values import Opaque


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


def read_metadata(content: bytes, path: str) -> dcp.Metadata:
    """What the bytes of a `.metadata` say, as torch's planners and readers take it. Raises what `_core` finds in them.

    Layouts, memory formats and pinned memory, which torch calls deprecated, are the default ones.
    """
    with _without_collector():
        version, checkpoint_id, save_id, has_paths, entries = _core.dcp_metadata(content, path)
        storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        state = {name: _entry(name, tensor, parts, storage) for name, _, tensor, parts in entries}
        paths = {name: steps for name, steps, _, _ in entries if steps is not None}
    meta = dcp.StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return dcp.Metadata(state, paths if has_paths else None, storage, meta, version)


def _entry(name: str, tensor: Any, parts: list[Any], storage: dict[dcp.MetadataIndex, _StorageInfo]) -> Any:
    """A tensor or value as torch has it, whose items are put into `storage`."""
    if tensor is None:
        (item,) = parts
        storage[dcp.MetadataIndex(name)] = _StorageInfo(*item)
        return dcp.BytesStorageMetadata()
    dtype, shape, requires_grad = tensor
    chunks = []
    for number, (begin, sizes, item) in enumerate(parts):
        offsets = torch.Size(begin)
        chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(sizes)))
        storage[dcp.MetadataIndex(name, offsets, number)] = _StorageInfo(*item)
    properties = dcp.TensorProperties(dtype=torch_dtype(dtype), requires_grad=requires_grad)
    return dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)


_PLAIN = {"torch.Size": torch.Size, "torch.device": torch.device}

# torch's own, found without asking its `__getattr__`, which imports modules.
_SETTINGS = {
    f"torch.{name}": found
    for name, found in vars(torch).items()
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format))
}

# What is there before a file is read: none of it is given a state by one.
_SHARED = (type, enum.Enum, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)

# What each `install` allows all readers. It keeps them alive: who has not kept one cannot remove it.
installed: dict[object, frozenset[str]] = {}
# What each of them tells writers of tensors that differ between ranks.
copies: dict[object, str | None] = {}


class Values:
    """Values with what torch keeps in place of `Opaque`.

    Values of known classes are made already, except texts of numpy. Classes and functions are imported and called if `allow`
    names them. Any other raises `unsafe`.
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
            for name, item in items:  # update() of a Counter would count
                value[name] = item
        elif isinstance(value, list):
            value[:] = [self(item, key) for item in value]
        elif type(value) is collections.deque:
            parts = [self(item, key) for item in value]
            value.clear()
            value.extend(parts)
        elif type(value) is slice:
            return slice(self(value.start, key), self(value.stop, key), self(value.step, key))
        elif type(value) is tuple:
            return tuple(self(item, key) for item in value)
        elif isinstance(value, (set, frozenset)):
            return type(value)(self(item, key) for item in value)
        return value

    def _object_of(self, value: Opaque, key: str) -> Any:
        name = value.name if isinstance(value.name, str) else "a computed class"
        if value.arguments is None and name in _SETTINGS:
            return _SETTINGS[name]
        if value.arguments is not None and value.state is None and name in _PLAIN:
            return self._plain(_PLAIN[name], value.arguments, key)
        if name == "_io.BytesIO" and _is_file_in_memory(value.state):
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
        try:
            callable_ = getattr(importlib.import_module(module), attribute)
            return callable_ if value.arguments is None else self._rebuilt(callable_, value, key)
        except Error:
            raise
        except Exception as error:
            text = f"corrupt: the value is no {name}: {type(error).__name__}: {error} [{self._path}, key '{key}']"
            raise CorruptError(text, self._path, key) from error

    def _plain(self, kind: Any, arguments: Any, key: str) -> Any:
        made = self(arguments, key)
        try:
            return kind(*made)
        except Exception as error:
            text = f"corrupt: the value is no {kind.__name__}: {error} [{self._path}, key '{key}']"
            raise CorruptError(text, self._path, key) from None

    def _rebuilt(self, callable_: Any, value: Opaque, key: str) -> Any:
        """As pickle does it, but for what was there before: a class, a function or a member of an enumeration stays as it is."""
        arguments = self(value.arguments, key)
        make = callable_.__new__ if value.by_new else callable_
        made = make(*([callable_] if value.by_new else []), *arguments, **self(value.keywords, key))
        if isinstance(made, _SHARED) and (value.list_items or value.dict_items or value.state is not None):
            text = f"unsafe: the value would change {made!r}, which it has not made [{self._path}, key '{key}']"
            raise UnsafeError(text, self._path, key)
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
    if state:
        vars(made).update(state)
    for name, item in (slots or {}).items():
        setattr(made, name, item)


def value_of_item(content: bytes, path: str, key: str, convert: Values) -> Any:
    """The value whose item torch's reader has read from `path`."""
    return convert(_core.archive_value(content, path, key, Loaded("torch")), key)
