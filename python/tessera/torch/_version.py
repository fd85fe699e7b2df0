"""Whether this torch is one that the classes of this package fit."""

from __future__ import annotations

import re
import warnings

import torch
from torch.distributed.checkpoint import (
    _async_process_executor,
    _storage_utils,
    default_planner,
    filesystem,
    planner_helpers,
    utils,
)

#: Tested; the newest and the oldest.
OLDEST, NEWEST = (2, 11), (2, 13)

_HOOKS = {
    filesystem.FileSystemReader: ("read_metadata", "read_data", "reset", "set_up_storage_reader"),
    filesystem.FileSystemWriter: (
        "finish",
        "prepare_global_plan",
        "prepare_local_plan",
        "reset",
        "set_up_storage_writer",
        "stage",
        "storage_meta",
        "write_data",
    ),
    default_planner.DefaultLoadPlanner: ("load_bytes", "resolve_tensor", "commit_tensor"),
    _async_process_executor: ("_AsyncCheckpointProcess",),
    _async_process_executor._AsyncCheckpointProcess: ("save",),
    _storage_utils: ("_storage_setup",),
    planner_helpers: ("_create_chunk_list", "_init_state_dict"),
    utils: ("find_tensor_shard",),
    filesystem: ("CURRENT_DCP_VERSION", "SerializationFormat", "_StorageInfo", "_split_by_size_and_type"),
}


def check() -> None:
    """Raises ImportError for what is missing, and warns of a torch that nobody has tried."""
    for owner, names in _HOOKS.items():
        for name in names:
            if not hasattr(owner, name):
                where = getattr(owner, "__name__", str(owner))
                raise ImportError(f"torch {torch.__version__} has no {where}.{name}, which tessera.torch needs")
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(numbers[1]), int(numbers[2])) if numbers else NEWEST
    if not OLDEST <= version <= NEWEST:
        tested = " to ".join(".".join(map(str, one)) for one in (OLDEST, NEWEST))
        warnings.warn(f"tessera.torch is tested with torch {tested}, and this is {torch.__version__}", stacklevel=3)
