"""The same for the names of `tessera.torch`."""

from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import tessera.torch


def drop_in(state: dict[str, Any], path: str) -> None:
    reader = tessera.torch.FileSystemReader(path, threads=4, partial=True)
    load(state, storage_reader=reader, planner=tessera.torch.LoadPlanner())
    keys = tessera.torch.load(state, checkpoint_id=path, strict=False, partial=True)
    missing: list[str] = keys.missing_keys
    print(missing, keys == tessera.torch.IncompatibleKeys([], []))
    writer = tessera.torch.FileSystemWriter(path, thread_count=2, single_writer=True)
    with tessera.torch.install():
        save(state, storage_writer=writer)
    report = tessera.torch.save(state, checkpoint_id=path, values="refuse")
    if isinstance(report, tessera.SaveReport):
        print(report.files)
    print(tessera.torch.async_save(state, checkpoint_id=path).result())
