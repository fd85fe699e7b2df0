"""`torch.distributed.checkpoint.async_save` with Tessera's writers: one of each process group, which is kept."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401: see the end of this file
import io
import os
import threading
import warnings
import weakref
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from tessera import _core
from tessera._background import CheckpointWriter, require_may_keep, without_frames
from tessera._errors import CancelledError, Error, InvalidArgumentError, UnsupportedError
from tessera.torch import _tree
from tessera.torch._group import Group, agree, error_of_ranks, group_of
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
    keep: float = 0.0,
) -> Any:
    """`dcp.async_save`: copies the state, and saves it in the background. Returns a future, a `tessera.PendingSave`.

    The arguments are torch's. A `tessera.CheckpointWriter` is made at the first call of a process group, with connections of its own,
    and is kept as long as the process group is: from the second save on its memory is there. So there is one save at a time, the
    next call waits for the last one, and raises its error if nobody has asked its future for it. The end of the program waits, too.
    Callbacks of a save do not call this. While tensors on a device are copied, the host has them twice.

    By a process, that is one of the writer's, which finishes what all ranks have copied although they are killed; its
    `tessera.CheckpointWriter` is another one than that of saves by a thread. If such a process is lost, the save that it had fails on all
    ranks, and later calls make new ones, with a warning where it was lost. When all ranks have died it keeps what they had copied last for
    `keep` seconds: `tessera.torch.load` of `arena://` and the `checkpoint_id` takes it from memory, on this host and any number of ranks.
    A call with another `keep` makes a new writer. By a thread it is `invalid_argument`, and so is it for what torch saves by itself.

    With `async_stager` and with another writer than ours it is torch's own `async_save`, whose future has torch's errors; so is by a
    process what `save` leaves to torch's planning. By a thread such a state, except tensors on a device, is copied to new memory each
    time, and as its collectives are those of `process_group`, the next call begins when it has ended. A `storage_writer` saves with
    the directory and the options that it has at the call.

    >>> import tessera.torch, torch
    >>> future = tessera.torch.async_save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step700", no_dist=True)
    >>> future.result().total_bytes > 0
    True
    """
    if _core.is_on_errand():
        raise InvalidArgumentError("invalid_argument: async_save is called by a callback of a save in the background")
    group = group_of(process_group, no_dist)  # refuses a rank that is in none
    kept = _kept_of(group, process_group)
    kept.wait_for_left()  # before anything of this call is sent over the group, or changes what that save has
    writer = writer_of(checkpoint_id, storage_writer)
    by_process = async_checkpointer_type == AsyncCheckpointerType.PROCESS
    is_ours = async_stager is None and isinstance(writer, FileSystemWriter)
    own = writer.for_one_save() if is_ours else writer

    def by_torch() -> Any:
        return state_dict_saver.async_save(
            _with_copies_of_what_torch_shares(_tree.states_of(state_dict)) if is_ours else state_dict,
            storage_writer=own,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=writer if is_ours else async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )

    plans = is_ours and plans_here(writer, planner, use_collectives)
    require_may_keep(keep, by_process and plans)
    if not is_ours or (by_process and not plans):
        return kept.begin_by_torch(by_torch)
    if plans:
        state = _State(state_dict, kept, keep)
        answers = agree(group, None, (state.told, kept.needs_new(by_process, keep)))
        told = [one for one, _ in answers]
        if _FAILED in told or _LEFT_TO_TORCH not in told:
            earlier = kept.end(by_process, state) if any(needs_new for _, needs_new in answers) else None
            kept.make(by_process, keep)
            return kept.begin(by_process, state, writer, earlier)
        state_dict = state.states
        if by_process:
            return kept.begin_by_torch(by_torch)
    staged = _Staged(state_dict, writer, kept, group if use_collectives else None, asked=plans)
    # Where the library plans, `save` itself tells the ranks first of all what has failed on one of them.
    return kept.begin_left(
        staged,
        lambda state: save(
            state,
            storage_writer=own,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        ),
        tells=plans,
    )


_FAILED, _LEFT_TO_TORCH = "failed", "left to torch"


class _State:
    """What this rank saves, or why it cannot."""

    def __init__(self, state_dict: dict[str, Any], kept: _OfGroup, keep: float) -> None:
        self.told = ""  # to the other ranks
        self.states: dict[str, Any] = {}  # of its parts that have one, too
        self._tree: Any = None
        self._failure: BaseException | None = None
        ranks = kept.ranks
        try:
            kept.require_taken()
            self.states = _tree.states_of(state_dict)
            self._tree = _core.make_tree(self.states, _tree.describe_for_ranks(ranks, self.states, from_devices=True))
        except _tree.LeftToTorch:
            self.told = _LEFT_TO_TORCH if keep == 0 else _FAILED
            if keep > 0:
                self.fail(InvalidArgumentError("invalid_argument: a state that only torch can save is not kept (keep)"))
            self._tree = _core.make_tree({}, _tree.describe_for_ranks(ranks, {}))  # for a save that another rank fails
        except BaseException as error:
            self.told = _FAILED
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Also by Ctrl-C: the other ranks have to hear of it."""
        self._failure = self._failure or error

    def tree(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._tree


class _Staged:
    """A copy of the state, or why there is none."""

    def __init__(
        self, state_dict: dict[str, Any], writer: FileSystemWriter, kept: _OfGroup, group: Group | None, asked: bool
    ) -> None:
        """`group`: the ranks that have to hear of what fails here. `asked`: the parts of the state were."""
        self.group = group
        self.raised: BaseException | None = None  # here, and not by the future
        self.failure: Exception | None = None
        self._staged: Any = None
        try:
            self.raised = kept.untaken or kept.wait_for_writers()
            if self.raised is None:
                self._staged = _copied(state_dict if asked else _tree.states_of(state_dict), writer)
            else:
                kept.require_taken(self.raised)
        except Exception as error:
            without_frames(error)
            self.failure = error
        except BaseException as error:
            self.raised = error
            self.failure = CancelledError("cancelled: interrupted")

    def take(self) -> Any:
        staged, self._staged = self._staged, None
        return staged


def _copied(states: dict[str, Any], writer: FileSystemWriter) -> Any:
    try:
        plans_itself = any(_tree.speaks(leaf.value, "__create_write_items__") for leaf in _tree.leaves(states))
        if plans_itself:  # torch's newer stager alone keeps attributes, and the older one alone copies all that torch can save
            return DefaultStager(StagingOptions(False, False, False, False)).stage(states)
        return writer.stage(_with_copies_of_what_torch_shares(states))
    except (Error, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(f"unsupported: torch cannot copy this state: {type(error).__name__}: {error}") from error


def _with_copies_of_what_torch_shares(state: Any) -> Any:
    """torch's older stager gives back DTensors of no dimension and files in memory as they are."""
    if isinstance(state, DTensor):
        if state.dim() > 0:
            return state
        return state.detach().clone().requires_grad_(state.requires_grad)
    if isinstance(state, io.BytesIO):
        copy = io.BytesIO(state.getvalue())
        copy.seek(state.tell())
        return copy
    if isinstance(state, dict):
        return {key: _with_copies_of_what_torch_shares(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):  # which the stager makes plain ones, too
        copies = [_with_copies_of_what_torch_shares(value) for value in state]
        return copies if isinstance(state, list) else tuple(copies)
    return state


class _Left(Future[Any]):
    """A save that is left to torch's planning. It knows whether somebody has taken its error."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.is_taken = False

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.is_taken = True
        return error

    def untaken(self) -> BaseException | None:
        return None if self.is_taken or not self.done() else super().exception()

    def run(self, work: Any) -> None:
        try:
            result = work()
        except BaseException as error:
            self.set_exception(without_frames(error))
        else:
            self.set_result(result)
        finally:
            _under_way.discard(self)


class _Saves:
    """Those of a writer, one after the other."""

    def __init__(self, writer: CheckpointWriter, keep: float) -> None:
        self._writer = writer
        self.keep = keep

    def begin(self, state: _State, writer: FileSystemWriter) -> Any:
        return self._writer._begin(state.tree, writer.directory, options_of(writer))

    def wait(self) -> None:
        self._writer.wait()

    def end(self) -> None:
        self._writer.close()

    @property
    def loss(self) -> str:
        """Why this rank's writer is of no use any more. Empty: it is."""
        if getattr(self._writer._carrier, "has_failed", False):
            return "the connections of the writer in the background have failed"
        try:
            self._writer.require_alive()
        except Error as error:
            return error.text.removeprefix(f"{error.code}: ")
        return ""


class _OfGroup(dict[bool, _Saves]):
    """What is kept for a process group: its writers, by whether a process saves, and the last save that was left to torch."""

    def __init__(self, ranks: int = 1, process_group: Any = None) -> None:
        super().__init__()
        self.ranks = ranks
        self._group = weakref.ref(process_group) if process_group is not None else lambda: None
        self._left: Future[Any] | None = None
        self._lock = threading.Lock()

    def make(self, by_process: bool, keep: float) -> None:
        with self._lock:  # all ranks make one
            if by_process not in self:
                # Programs that call this expect a thread like any other. Beside workers that load data there may be no idle processor.
                self[by_process] = _Saves(CheckpointWriter(self._group(), idle=False, process=by_process, keep=keep), keep)

    def needs_new(self, by_process: bool, keep: float) -> bool:
        """Whether this rank's writer is of no use any more, or not the one that is asked for."""
        return by_process in self and (self[by_process].loss != "" or self[by_process].keep != keep)

    def end(self, by_process: bool, state: _State) -> Error | None:
        """Ends the writer of all ranks, which some need no more: the next save has a new one. An error of it that nobody took fails
        `state`, and is returned."""
        saves = self.pop(by_process, None)
        if saves is None:
            return None
        try:
            try:
                if saves.loss:
                    warnings.warn(f"{saves.loss}: tessera.torch.async_save goes on with a new writer", stacklevel=3)
                saves.wait()
            finally:
                saves.end()
        except Error as error:
            state.fail(_of_earlier(error))
            return error
        except BaseException as error:
            state.fail(error)
        return None

    def wait_for_left(self) -> None:
        """Raises its error if nobody has taken that. Of several ranks the others have to hear of it: later."""
        if self._left is not None:
            wait([self._left])
            error = self.untaken
            if error is not None and self.ranks == 1:
                self._left = None
                raise error

    @property
    def untaken(self) -> BaseException | None:
        """The error of the last save that was left to torch, where nobody has taken it."""
        return self._left.untaken() if isinstance(self._left, _Left) else None

    def require_taken(self, error: BaseException | None = None) -> None:
        """Throws what the other ranks hear of that, or of another error of an earlier save."""
        error = error or self.untaken
        if error is not None:
            raise _of_earlier(error)

    def begin(self, by_process: bool, state: _State, writer: FileSystemWriter, earlier: Error | None) -> Any:
        """`earlier`: an error that is to be raised, of a writer that was ended."""
        pending = self[by_process].begin(state, writer)
        error, self._left = self.untaken or earlier, None
        if error is not None:
            pending.add_done_callback(lambda save: save.exception())  # takes it: it is told here
            raise error
        return pending

    def wait_for_writers(self) -> BaseException | None:
        """Returns the error of a save that nobody has taken."""
        try:
            for saves in list(self.values()):
                saves.wait()
        except Error as error:
            return error
        return None

    def begin_by_torch(self, begin: Any) -> Any:
        """A save of torch's own, whose ranks hear nothing of an earlier one."""
        self.warn()
        begun = begin()
        if self.ranks > 1:  # its collectives are the group's
            self._left = getattr(begun, "upload_completion", begun)
        return begun

    def warn(self) -> None:
        error, self._left = self.untaken, None
        if error is not None:
            warnings.warn(f"an earlier save in the background has failed, and nobody took its error: {error}", stacklevel=4)

    def begin_left(self, staged: _Staged, work: Any, tells: bool) -> _Left:
        """`work` saves a state that is left to torch, and with `tells` begins by an `agree`."""
        self._left = None
        if staged.raised is not None and staged.group is None:
            raise staged.raised
        left = _Left()

        def save_it() -> Any:
            if staged.failure is not None or not tells:
                agree(staged.group, staged.failure)
            return work(staged.take())

        self._left = left
        _under_way.add(left)
        threading.Thread(target=left.run, args=(save_it,), name="tessera async_save").start()
        if staged.raised is not None:
            left.is_taken = True  # it is told here
            raise staged.raised
        return left


def _of_earlier(error: BaseException) -> Error:
    """What the ranks hear of it where it fails a later save."""
    said = error_of_ranks({0: error}) if not isinstance(error, Error) else error
    text = f"{said.code}: an earlier save had failed: {said.text.removeprefix(f'{said.code}: ')}"
    return type(said)(text, said.path, said.key, said.offset)


#: Of process groups that are still there.
_kept: weakref.WeakKeyDictionary[Any, _OfGroup] = weakref.WeakKeyDictionary()
_alone = _OfGroup()  # of this process without others
_lock = threading.Lock()
_under_way: set[_Left] = set()


def _kept_of(group: Group | None, process_group: Any) -> _OfGroup:
    if group is None or group.size == 1:
        return _alone
    key = process_group or dist.group.WORLD
    with _lock:
        if key not in _kept:
            _kept[key] = _OfGroup(group.size, key)
        return _kept[key]


def _forget() -> None:
    """In a child of fork(): they are its parent's, and so is who has the lock."""
    global _lock, _alone
    _lock = threading.Lock()
    _kept.clear()
    _under_way.clear()
    _alone = _OfGroup()


def _warn_at_the_end() -> None:
    for kept in (_alone, *_kept.values()):
        kept.warn()


os.register_at_fork(after_in_child=_forget)
atexit.register(_warn_at_the_end)
# At the end of the program executors take no more work, before threads are waited for. A save has such. What was registered last
# is called first, which is ours: `concurrent.futures.thread` has been imported.
threading._register_atexit(lambda: wait(list(_under_way)))  # type: ignore[attr-defined]
