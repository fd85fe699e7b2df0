"""`torch.distributed.checkpoint.save` with Tessera's plan, writer and errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from tessera import _core
from tessera._reports import SaveReport
from tessera.torch import _tree
from tessera.torch._group import Group, agree, errors_of_torch, group_of
from tessera.torch._writer import FileSystemWriter


def writer_of(checkpoint_id: str | os.PathLike[str] | None, storage_writer: Any) -> Any:
    if storage_writer is None:
        if checkpoint_id is None:
            raise TypeError("a save needs a checkpoint_id or a storage_writer")
        return FileSystemWriter(checkpoint_id, thread_count=2)
    if checkpoint_id is not None:
        storage_writer.reset(checkpoint_id)
    return storage_writer


def plans_here(writer: Any, planner: Any, use_collectives: bool) -> bool:
    """Whether the library plans, if the state has nothing that only torch can resolve."""
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
    writer = writer_of(checkpoint_id, storage_writer)
    if plans_here(writer, planner, use_collectives):
        report = _save_here(state_dict, writer, group, options_of(writer, values, copies))
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


def options_of(writer: FileSystemWriter, values: str = "warn", copies: str | None = None) -> dict[str, Any]:
    """As `_core` takes them."""
    here = copies or writer.copies
    return {**writer.options, "values": values, "copies": here or "warn", "same_optimizer": here is None}


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
    state_dict: dict[str, Any], writer: FileSystemWriter, group: Group | None, options: dict[str, Any]
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
    return SaveReport(**_core.save(tree, writer.directory, options, group, None))
