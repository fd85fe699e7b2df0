"""`torch.distributed.checkpoint.async_save` with Tessera's writers: one of each process group, which is kept."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tessera import _core
from tessera._background import CheckpointWriter
from tessera.torch import _tree
from tessera.torch._group import Group, agree, group_of
from tessera.torch._save import options_of, plans_here, save, writer_of
from tessera.torch._writer import FileSystemWriter


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Any:
    """`dcp.async_save`: copies the state, and saves it in the background. Returns a future, a `tessera.PendingSave`.

    The arguments are torch's. A `tessera.CheckpointWriter` is made at the first call of a process group, with connections of its own,
    and is kept as long as the process group is: from the second save on its memory is there. So there is one save at a time, the
    next call waits for the last one, and raises its error if nobody has asked its future for it. The end of the program waits, too.

    By a process, that is one of the writer's, which finishes what all ranks have copied although they are killed; its
    `tessera.CheckpointWriter` is another one than that of saves by a thread.

    With `async_stager` and with another writer than ours it is torch's own `async_save`, whose future has torch's errors; so is by a
    process what `save` leaves to torch's planning. By a thread that is, except tensors on a device, copied to new memory each time.

    >>> import tessera.torch, torch
    >>> future = tessera.torch.async_save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step700", no_dist=True)
    >>> future.result().total_bytes > 0
    True
    """
    group = group_of(process_group, no_dist)  # refuses a rank that is in none
    writer = writer_of(checkpoint_id, storage_writer)
    by_process = async_checkpointer_type == AsyncCheckpointerType.PROCESS

    def by_torch() -> Any:
        return state_dict_saver.async_save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )

    if async_stager is not None or not isinstance(writer, FileSystemWriter):
        return by_torch()
    plans = plans_here(writer, planner, use_collectives)
    if by_process and not plans:
        return by_torch()
    saves = _saves_of(group, process_group, by_process)
    if plans:
        state = _State(state_dict, group.size if group else 1)
        told = agree(group, None, state.told)
        if _FAILED in told or _LEFT_TO_TORCH not in told:
            return saves.begin(state, writer)
        if by_process:
            return by_torch()
        state_dict = state.states
    staged = _Staged(state_dict, writer, group if plans else None)
    return saves.begin_by_torch(
        lambda: save(
            staged.get(),
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    )


_FAILED, _LEFT_TO_TORCH = "failed", "left to torch"


class _State:
    """What this rank saves, or why it cannot."""

    def __init__(self, state_dict: dict[str, Any], ranks: int) -> None:
        self.told = ""  # to the other ranks
        self.states: dict[str, Any] = {}  # of its parts that have one, too
        self._tree: Any = None
        self._failure: BaseException | None = None
        try:
            self.states = _tree.states_of(state_dict)
            self._tree = _core.make_tree(self.states, _tree.describe_for_ranks(ranks, self.states, from_devices=True))
        except _tree.LeftToTorch:
            self.told = _LEFT_TO_TORCH
            self._tree = _core.make_tree({}, _tree.describe_for_ranks(ranks, {}))  # for a save that another rank fails
        except BaseException as error:  # also Ctrl-C: the other ranks have to hear of it
            self.told = _FAILED
            self._failure = error

    def tree(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._tree


class _Staged:
    """A copy of the state."""

    def __init__(self, state_dict: dict[str, Any], writer: FileSystemWriter, told: Group | None) -> None:
        """`told`: the ranks that first hear of each other in the save, and so of what fails here."""
        self._told = told
        self._staged: Any = None
        self._failure: Exception | None = None
        try:
            states = _tree.states_of(state_dict)
            plans_itself = any(_tree.speaks(leaf.value, "__create_write_items__") for leaf in _tree.leaves(states))
            # torch's newer stager alone keeps attributes, and the older one alone copies all that torch can save.
            stager = DefaultStager(StagingOptions(False, False, False, False)) if plans_itself else writer
            self._staged = stager.stage(states)
        except Exception as error:
            self._failure = error

    def get(self) -> Any:
        if self._failure is not None:
            agree(self._told, self._failure)
        return self._staged


class _Saves:
    """Those of a process group, one after the other."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._by_torch: Future[Any] | None = None

    def begin(self, state: _State, writer: FileSystemWriter) -> Any:
        if self._by_torch is not None:
            wait([self._by_torch])
            self._by_torch = None
        return self._writer._begin(state.tree, writer.directory, options_of(writer))

    def begin_by_torch(self, work: Any) -> Any:
        before = [future for future in (self._writer._last, self._by_torch) if future is not None]

        def save_next() -> Any:
            wait(before)
            return work()

        executor = ThreadPoolExecutor(1)
        self._by_torch = executor.submit(save_next)
        executor.shutdown(wait=False)
        return self._by_torch


#: Of process groups that are still there: by whether a process saves.
_kept: weakref.WeakKeyDictionary[Any, dict[bool, _Saves]] = weakref.WeakKeyDictionary()
_alone: dict[bool, _Saves] = {}  # of this process without others
_lock = threading.Lock()


def _saves_of(group: Group | None, process_group: Any, by_process: bool) -> _Saves:
    with _lock:
        is_alone = group is None or group.size == 1
        key = None if is_alone else process_group or dist.group.WORLD
        known = _alone if is_alone else _kept.setdefault(key, {})
        if by_process not in known:
            # Programs that call this expect a thread like any other. Beside workers that load data there may be no idle processor.
            known[by_process] = _Saves(CheckpointWriter(key, idle=False, process=by_process))
        return known[by_process]


def _forget() -> None:
    """In a child of fork(): they are its parent's, and so is who has the lock."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()
    _alone.clear()


os.register_at_fork(after_in_child=_forget)
