"""The planner of loads whose values are data."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint._traverse import set_element


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, but for values: they are read as data and put where they belong.

    Arrays and scalars of numpy are data. A value that needs a class is refused (`unsafe`), unless
    `allow` names it.

    >>> import tessera.torch, torch
    >>> state = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    >>> reader = tessera.torch.FileSystemReader(example)
    >>> torch.distributed.checkpoint.load(state, storage_reader=reader, planner=tessera.torch.LoadPlanner())
    >>> state["step"]
    7
    """

    def __init__(self, *arguments: Any, allow: Collection[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Names of classes and functions, "module.name", that values may need: they are imported and called.
        self.allow = frozenset(allow)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """For readers that give bytes: torch's, which reads plain data alone here."""
        self.load_value(read_item, torch.load(value, weights_only=True))

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """What `load_bytes` does, for a value that is read already."""
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], value)
        else:
            self.state_dict[read_item.dest_index.fqn] = value
