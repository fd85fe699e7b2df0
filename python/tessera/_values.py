"""What a checkpoint holds beside tensors, plain data and values of known classes: kept, never imported and never called."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Opaque:
    """An object or class that a pickle names.

    >>> Opaque("torch.float32").name
    'torch.float32'
    """

    #: "module.name" of the class or function; of one that is computed, the Opaque that it is.
    name: str | Opaque
    #: What it would be called with. None: it is the class or function itself.
    arguments: tuple[Any, ...] | None = None
    #: What its `__setstate__` would get.
    state: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)
    list_items: tuple[Any, ...] = ()
    dict_items: tuple[tuple[Any, Any], ...] = ()
    #: It is made by `__new__` alone, as objects without a `__reduce__` of their own are.
    by_new: bool = False
    #: Of an array or scalar of numpy, where numpy is not installed: its elements, as the checkpoint's tensors come.
    elements: Any = None


_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}


def dict_of(ordered: bool, items: list[tuple[Any, Any]], factory: Any, state: Any) -> dict[Any, Any]:
    """An OrderedDict or a defaultdict. A factory that is no type of Python's own is left out."""
    if ordered:
        made: collections.OrderedDict[Any, Any] = collections.OrderedDict(items)
        if isinstance(state, dict) and "_metadata" in state:  # of a module's state dict
            made._metadata = state["_metadata"]  # type: ignore[attr-defined]
        return made
    name = factory.name if isinstance(factory, Opaque) and factory.arguments is None else None
    return collections.defaultdict(_FACTORIES.get(name) if isinstance(name, str) else None, items)
