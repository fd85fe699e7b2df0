"""The same for the names of `tessera.torch`."""

from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load

import tessera.torch


def drop_in(state: dict[str, Any], path: str) -> None:
    reader = tessera.torch.FileSystemReader(path, threads=4)
    load(state, storage_reader=reader, planner=tessera.torch.LoadPlanner())
    tessera.torch.load(state, checkpoint_id=path)
