"""`torch.distributed.checkpoint.load` with Tessera's reader and errors."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from tessera._errors import Error, PeerFailedError
from tessera.torch._planner import LoadPlanner
from tessera.torch._reader import FileSystemReader


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

    The arguments are torch's, and `allow` is `LoadPlanner`'s. What fails raises a `tessera.Error`; where ranks fail, all of them do.

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
    try:
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner or LoadPlanner(allow=allow),
            process_group=process_group,
            no_dist=no_dist,
        )
    except CheckpointException as failure:
        raise getattr(storage_reader, "failure", None) or _error_of(failure) from failure


def _error_of(failure: CheckpointException) -> Error:
    peers = {rank: error for rank, (error, _) in failure.failures.items() if isinstance(error, Error)}
    first = peers[min(peers)] if peers else None
    if first is not None and len(peers) == len(failure.failures):
        if all(type(error) is type(first) for error in peers.values()):
            return type(first)(first.text, first.path, first.key, first.offset, peers if len(peers) > 1 else None)
    text = "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(failure.failures.items()))
    return PeerFailedError(f"peer_failed: {text}", peers=peers)
