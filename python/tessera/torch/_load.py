"""`torch.distributed.checkpoint.load` with Tessera's plan, reader and errors."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.stateful import Stateful

from tessera import _core
from tessera._checkpoint import Checkpoint
from tessera._errors import Error, IncompleteError, KeyNotFoundError, MismatchError
from tessera._memory import Loaded
from tessera.torch._data import Values
from tessera.torch._fill import Fill, materialized, require_fillable
from tessera.torch._group import Group, agree, errors_of_torch, group_of
from tessera.torch._keys import IncompatibleKeys, Keys, of_checkpoint, of_planner, tell_of_left
from tessera.torch._planner import LoadPlanner
from tessera.torch._reader import FileSystemReader
from tessera.torch._tree import Leaf, LeftToTorch, leaves, parts_of, speaks, states_of

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
    strict: bool = True,
    partial: bool = False,
) -> IncompatibleKeys:
    """`dcp.load`: fills the tensors of `state_dict` in place and replaces its values.

    The arguments are torch's, and `allow` is `LoadPlanner`'s. Keys that are missing and tensors of
    other shapes are found before anything is changed. What fails raises a `tessera.Error`, on all
    ranks. With `strict=False` keys that the checkpoint lacks stay as they are. Returned are the keys
    that are missing, and those of the checkpoint that no rank's state has, which are no error: the
    same on all ranks. How many these are, and the first of them, goes to the logger "tessera" (info);
    where ranks have keys of their own (`dataloader.dp_rank_3`) and not all of them are loaded, a
    warning says so. A `planner` decides itself whether keys may be missing (`allow_partial_load`);
    one that is not derived from torch's `DefaultLoadPlanner` tells no keys.

    What lies in a file that is missing is incomplete for who asks for it, on all ranks before anything is changed. With
    `partial` the checkpoint is what it is without: such keys are missing. A `storage_reader` has its own.

    Without a `planner` it also loads what writer processes keep in memory of the save to PLACE (`keep` of `async_save`): `arena://PLACE`.

    >>> import tessera.torch, torch
    >>> state = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    >>> tessera.torch.load(state, checkpoint_id=example)
    <All keys matched successfully>
    >>> state["step"]
    7
    """
    if planner is not None and not strict:
        raise TypeError("load() takes strict=False without a planner: give that one allow_partial_load=True")
    group = group_of(process_group, no_dist)
    if storage_reader is None:
        if checkpoint_id is None:
            raise TypeError("load() needs a checkpoint_id or a storage_reader")
        storage_reader = FileSystemReader(checkpoint_id, partial=partial)
    elif partial:
        raise TypeError("load() takes partial=True without a storage_reader: give it to that one")
    elif checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    if planner is None and type(storage_reader) is FileSystemReader and storage_reader.plans_here:
        keys = _load_here(state_dict, storage_reader, group, allow, strict)
        if keys is not None:
            found = keys.of_all(group)
            if group is None or group.rank == 0:
                tell_of_left(keys.taken(found), found.unexpected_keys, str(storage_reader.checkpoint_id))
            return found
    planner = planner or LoadPlanner(allow=allow, allow_partial_load=not strict)
    with errors_of_torch(group, lambda: getattr(storage_reader, "failure", None)):
        state_dict_loader.load(
            state_dict,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    return of_planner(planner).of_all(group)


def _load_here(
    state_dict: dict[str, Any],
    reader: FileSystemReader,
    group: Group | None,
    allow: Collection[str],
    strict: bool,
) -> Keys | None:
    """None: some rank leaves it to torch."""
    states: dict[str, Any] = {}
    filling = failure = None
    try:
        # In one order on all ranks: a state may be gathered by collectives.
        states = states_of({key: state_dict[key] for key in sorted(state_dict)})
        filling = _Filling(states, reader.opened(("dcp", "arena")), allow, strict)
    except LeftToTorch:
        pass
    except BaseException as error:
        failure = error
    takers = [key for key in states if isinstance(state_dict[key], Stateful)]
    answers = agree(group, failure, (filling is not None, bool(takers)))
    if not all(fills for fills, _ in answers):
        return None
    assert filling is not None
    try:
        filling.run()
    except BaseException as error:
        failure = error
    agree(group, failure)
    for key in (key for key in states if key not in takers):
        state_dict[key] = states[key]
    if any(takes for _, takes in answers):
        try:
            for key in takers:
                state_dict[key].load_state_dict(states[key])
        except BaseException as error:
            failure = error
        agree(group, failure)
    return filling.keys


class _Filling:
    """A state dict that is about to be filled. Raises for what does not fit before anything changes."""

    def __init__(self, states: dict[str, Any], checkpoint: Checkpoint, allow: Collection[str], strict: bool) -> None:
        self._checkpoint = checkpoint
        self._fill = Fill(checkpoint)
        self._values: list[tuple[Leaf, Any]] = []  # and tensors that are made here
        convert = Values(checkpoint.path, allow)
        missing: list[Leaf] = []
        unlike: list[str] = []
        wanted = list(leaves(states))
        for leaf in wanted:
            if leaf.name not in checkpoint:
                missing.append(leaf)
                continue
            found = checkpoint._value(leaf.name, Loaded("torch"))
            if isinstance(found, _core.Tensor):
                unlike += self._add_tensor(leaf, found)
            else:
                self._values.append((leaf, convert(found, leaf.name)))
        self._require_all(missing, unlike, strict)
        self.keys = of_checkpoint((leaf.name for leaf in wanted), checkpoint)

    def run(self) -> None:
        self._fill.run()
        for leaf, value in self._values:
            leaf.container[leaf.key] = value

    def _add_tensor(self, leaf: Leaf, found: Any) -> list[str]:
        try:
            target = leaf.value if speaks(leaf.value, "__create_chunk_list__") else materialized(leaf.value)
            size = _size_of(target)
            if size is not None and size != found.shape:
                return [f"'{leaf.name}' is {found.shape}, and the target {size}"]
            for offsets, part in parts_of(leaf.name, target):
                require_fillable(part)
                _require_inside(offsets, part, found)
                self._fill.add(leaf.name, offsets, part.detach())
        except IncompleteError:  # of a file that is missing
            raise
        except Exception as error:  # of torch's and of the target's own code
            why = error.text.partition(": ")[2] if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            return [f"'{leaf.name}' is a tensor, and the target cannot be filled: {why}"]
        if target is not leaf.value:
            self._values.append((leaf, target))
        return []

    def _require_all(self, missing: list[Leaf], unlike: list[str], strict: bool) -> None:
        where = self._checkpoint.path
        for leaf in missing:
            # torch before 2.4 saved what is in a list, or in a dict without tensors, as one value.
            if any(".".join(leaf.path[:end]) in self._checkpoint for end in range(1, len(leaf.path))):
                raise LeftToTorch
        if missing and strict:
            names = _some([repr(leaf.name) for leaf in missing])
            raise KeyNotFoundError(f"not_found: the checkpoint has no {names} [{where}]", where, missing[0].name)
        if unlike:
            raise MismatchError(f"mismatch: {_some(unlike)} [{where}]", where)


def _size_of(target: Any) -> tuple[int, ...] | None:
    """None: it has no word for that."""
    if isinstance(target, torch.Tensor) and not isinstance(target, ShardedTensor) and target.is_nested:
        raise MismatchError("mismatch: a nested tensor has no shape")
    size = getattr(target, "size", None)
    found = size() if callable(size) else None
    return tuple(found) if isinstance(found, (tuple, list)) else None


def _require_inside(offsets: tuple[int, ...], part: torch.Tensor, found: Any) -> None:
    ends = [begin + size for begin, size in zip(offsets, part.shape)]
    if len(ends) != len(found.shape) or any(end > size for end, size in zip(ends, found.shape)):
        raise MismatchError(f"mismatch: a part of {tuple(part.shape)} at {offsets} is not inside of {found.shape}")


def _some(texts: list[str]) -> str:
    more = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
