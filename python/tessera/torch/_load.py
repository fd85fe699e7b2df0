"""`torch.distributed.checkpoint.load` with Tessera's plan, reader and errors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from tessera import _core
from tessera._checkpoint import Checkpoint
from tessera._errors import Error, KeyNotFoundError, MismatchError
from tessera._memory import Loaded
from tessera.torch._data import Values
from tessera.torch._fill import Fill
from tessera.torch._group import agree, error_of_ranks, group_of
from tessera.torch._planner import LoadPlanner
from tessera.torch._reader import FileSystemReader
from tessera.torch._tree import LeftToTorch, parts_of, states_of

_NAMED = 20  # keys that an error names, at most


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    allow: Collection[str] = (),
) -> None:
    """`dcp.load`: fills the tensors of `state_dict` in place and replaces its values.

    The arguments are torch's, and `allow` is `LoadPlanner`'s. Keys that are missing and tensors of
    other shapes are found before anything is changed. What fails raises a `tessera.Error`, on all
    ranks.

    >>> import tessera.torch, torch
    >>> state = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    >>> tessera.torch.load(state, checkpoint_id=example)
    >>> state["step"]
    7
    """
    if storage_reader is None:
        if checkpoint_id is None:
            raise TypeError("load() needs a checkpoint_id or a storage_reader")
        storage_reader = FileSystemReader(checkpoint_id)
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    if planner is None and type(storage_reader) is FileSystemReader and storage_reader.plans_here:
        if _load_here(state_dict, storage_reader, process_group, no_dist, allow):
            return
    try:
        state_dict_loader.load(
            state_dict,
            storage_reader=storage_reader,
            planner=planner or LoadPlanner(allow=allow),
            process_group=process_group,
            no_dist=no_dist,
        )
    except CheckpointException as failure:
        known: Error | None = getattr(storage_reader, "failure", None)
        raise known or error_of_ranks({rank: error for rank, (error, _) in failure.failures.items()}) from failure


def _load_here(
    state_dict: dict[str, Any],
    reader: FileSystemReader,
    process_group: Any,
    no_dist: bool,
    allow: Collection[str],
) -> bool:
    """False: some rank leaves it to torch."""
    group = group_of(process_group, no_dist)
    states: dict[str, Any] = {}
    filling = failure = None
    try:
        # In one order on all ranks: a state may be gathered by collectives.
        states = states_of({key: state_dict[key] for key in sorted(state_dict)})
        filling = _Filling(states, reader.opened(), allow)
    except LeftToTorch:
        pass
    except BaseException as error:
        failure = error
    if not all(agree(group, failure, filling is not None)):
        return False
    assert filling is not None
    try:
        filling.run()
    except BaseException as error:
        failure = error
    agree(group, failure)
    for key in states:
        item = state_dict[key]
        if isinstance(item, Stateful):
            item.load_state_dict(states[key])
        else:
            state_dict[key] = states[key]
    return True


class _Leaf:
    """What a state dict has at `path`: in `container`, by `key`."""

    def __init__(self, path: tuple[str, ...], container: Any, key: Any) -> None:
        self.name = ".".join(path)
        self.path = path
        self.container = container
        self.key = key

    @property
    def value(self) -> Any:
        return self.container[self.key]


def _leaves(container: Any, path: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    """As torch flattens: dicts, and lists that hold tensors or dicts."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in list(items):
        deeper = (*path, str(key))
        if isinstance(value, Mapping) or (isinstance(value, list) and _is_taken_apart(value)):
            yield from _leaves(value, deeper)
        else:
            yield _Leaf(deeper, container, key)


def _is_taken_apart(values: list[Any]) -> bool:
    return any(
        isinstance(value, (Mapping, torch.Tensor)) or (isinstance(value, list) and _is_taken_apart(value))
        for value in values
    )


class _Filling:
    """A state dict that is about to be filled. Raises for what does not fit before anything changes."""

    def __init__(self, states: dict[str, Any], checkpoint: Checkpoint, allow: Collection[str]) -> None:
        self._checkpoint = checkpoint
        self._fill = Fill(checkpoint)
        self._values: list[tuple[_Leaf, Any]] = []
        convert = Values(checkpoint.path, allow)
        missing: list[_Leaf] = []
        unlike: list[str] = []
        for leaf in _leaves(states):
            if leaf.name not in checkpoint:
                missing.append(leaf)
                continue
            found = checkpoint._value(leaf.name, Loaded("torch"))
            if isinstance(found, _core.Tensor):
                unlike += self._add_tensor(leaf, found)
            else:
                self._values.append((leaf, convert(found, leaf.name)))
        self._require_all(missing, unlike)

    def run(self) -> None:
        self._fill.run()
        for leaf, value in self._values:
            leaf.container[leaf.key] = value

    def _add_tensor(self, leaf: _Leaf, found: Any) -> list[str]:
        target = leaf.value
        if not hasattr(target, "size"):
            return [f"'{leaf.name}' is a tensor, and the target {type(target).__name__}"]
        if tuple(target.size()) != found.shape:
            return [f"'{leaf.name}' is {found.shape}, and the target {tuple(target.size())}"]
        for offsets, part in parts_of(target):
            self._fill.add(leaf.name, offsets, part.detach())
        return []

    def _require_all(self, missing: list[_Leaf], unlike: list[str]) -> None:
        where = self._checkpoint.path
        for leaf in missing:
            # torch before 2.4 saved what is in a list, or in a dict without tensors, as one value.
            if any(".".join(leaf.path[:end]) in self._checkpoint for end in range(1, len(leaf.path))):
                raise LeftToTorch
        if missing:
            names = _some([repr(leaf.name) for leaf in missing])
            raise KeyNotFoundError(f"not_found: the checkpoint has no {names} [{where}]", where, missing[0].name)
        if unlike:
            raise MismatchError(f"mismatch: {_some(unlike)} [{where}]", where)


def _some(texts: list[str]) -> str:
    more = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
