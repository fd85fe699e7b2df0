"""`torch.distributed.checkpoint.save` and `async_save` with Tessera's plan, writer and errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tessera import _core
from tessera._reports import SaveReport
from tessera.torch import _tree
from tessera.torch._group import Group, agree, errors_of_torch, group_of
from tessera.torch._writer import FileSystemWriter


def _writer_of(checkpoint_id: str | os.PathLike[str] | None, storage_writer: Any) -> Any:
    if storage_writer is None:
        if checkpoint_id is None:
            raise TypeError("a save needs a checkpoint_id or a storage_writer")
        return FileSystemWriter(checkpoint_id, thread_count=2)
    if checkpoint_id is not None:
        storage_writer.reset(checkpoint_id)
    return storage_writer


def _plans_here(writer: Any, planner: Any, use_collectives: bool) -> bool:
    return planner is None and use_collectives and type(writer) is FileSystemWriter and writer.plans_here


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    values: str = "warn",
    copies: str | None = None,
) -> SaveReport | Metadata:
    """`dcp.save`: every rank saves what it holds, and the checkpoint appears in one step.

    The arguments are torch's. `values` and `copies` say what is done where ranks hold other values,
    or other elements of what should be the same: "warn", "refuse", or "keep" what each one has. Without
    `copies` a warning tells of tensors, and those below an optimizer are refused: with one rank's
    moments on all of them a training would go on, and lose what it had. What fails raises a `tessera.Error`, on all ranks.

    A planner, another writer than ours, tensors on a device, sparse ones and those that bring torch's
    protocol for shards are left to torch's own planning, which returns torch's `Metadata`.

    >>> import tessera.torch, torch
    >>> report = tessera.torch.save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step600", no_dist=True)
    >>> tessera.verify(directory + "/step600").findings
    []
    """
    group = group_of(process_group, no_dist)
    writer = _writer_of(checkpoint_id, storage_writer)
    if _plans_here(writer, planner, use_collectives):
        here = copies or writer.copies
        policies = {"values": values, "copies": here or "warn", "same_optimizer": here is None}
        report = _save_here(state_dict, writer, group, policies)
        if report is not None:
            return report
    with errors_of_torch(group), _told(writer, copies):
        made: Metadata = state_dict_saver.save(
            state_dict,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    return made


@contextlib.contextmanager
def _told(writer: Any, copies: str | None) -> Iterator[None]:
    """A plan of torch's has no names for what each rank has: such a difference is refused."""
    if copies is None or not isinstance(writer, FileSystemWriter):
        yield
        return
    before, writer.copies = writer.copies, "refuse" if copies == "keep" else copies
    try:
        yield
    finally:
        writer.copies = before


def _save_here(
    state_dict: dict[str, Any], writer: FileSystemWriter, group: Group | None, policies: dict[str, Any]
) -> SaveReport | None:
    """None: some rank leaves it to torch."""
    tree = failure = None
    try:
        state = _tree.states_of(state_dict)
        tree = _core.make_tree(state, _tree.describe_for_ranks(group.size if group else 1, state))
    except _tree.LeftToTorch:
        pass
    except BaseException as error:
        failure = error
    if not all(agree(group, failure, tree is not None)):
        return None
    assert tree is not None
    options = {**writer.options, **policies}
    return SaveReport(**_core.save(tree, writer.directory, options, group, None))


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
    """`dcp.async_save`: copies the state, and saves it in the background. Returns a future.

    The arguments are torch's. By a thread it is our `save`; with `async_stager` or by a process it is
    torch's own, with our writer.

    >>> import tessera.torch, torch
    >>> future = tessera.torch.async_save({"w": torch.zeros(3)}, checkpoint_id=directory + "/step700", no_dist=True)
    >>> future.result().total_bytes > 0
    True
    """
    group_of(process_group, no_dist)  # refuses a rank that is in none
    writer = _writer_of(checkpoint_id, storage_writer)
    by_thread = async_checkpointer_type == AsyncCheckpointerType.THREAD and async_stager is None
    if not by_thread or not isinstance(writer, FileSystemWriter):
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
    staged: Any = None
    failure: Exception | None = None
    try:
        staged = _staged(_tree.states_of(state_dict), writer)
    except Exception as error:
        failure = error
    executor = ThreadPoolExecutor(1)
    future: Future[Any] = executor.submit(
        _save_staged,
        staged,
        failure,
        storage_writer=writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )
    executor.shutdown(wait=False)
    return future


def _staged(states: dict[str, Any], writer: FileSystemWriter) -> Any:
    """A copy. What plans itself keeps its attributes in torch's newer stager alone, which torch takes where no writer is given."""
    if any(_tree.speaks(leaf.value, "__create_write_items__") for leaf in _tree.leaves(states)):
        return DefaultStager(StagingOptions(False, False, False, False)).stage(states)
    return writer.stage(states)


def _save_staged(staged: Any, failure: Exception | None, *, process_group: Any, no_dist: bool, **arguments: Any) -> Any:
    """What has failed on this rank already is told to the others, which save."""
    if failure is not None:
        is_told = _plans_here(arguments["storage_writer"], arguments["planner"], arguments["use_collectives"])
        agree(group_of(process_group, no_dist) if is_told else None, failure)
    return save(staged, process_group=process_group, no_dist=no_dist, **arguments)
