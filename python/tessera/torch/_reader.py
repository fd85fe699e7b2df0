"""The reader of `torch.distributed.checkpoint`, which reads with Tessera."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tessera._checkpoint import Checkpoint, open
from tessera._errors import Error, MismatchError
from tessera._memory import Loaded
from tessera.torch import _data
from tessera.torch._fill import Fill, Presence
from tessera.torch._keys import of_planner, tell_of_left
from tessera.torch._plain import saved
from tessera.torch._planner import LoadPlanner as OurPlanner
from tessera.torch._stores import READABLE, is_foreign, is_url_of


class NoMetadata(BaseException):
    """What `read_metadata` raised. torch 2.11 and 2.12 drop every `Exception` there, and the reason with it."""


class FileSystemReader(filesystem.FileSystemReader):
    """torch's `FileSystemReader`, checked by digests, in parallel, straight into the target's memory.

    Nothing that the checkpoint says is imported or run. The path may be a URL. `threads` read. With `partial` what lies in
    missing files is left out; else it is incomplete for who asks for it, before any rank's memory is written.

    >>> import tessera.torch, torch
    >>> state = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    >>> torch.distributed.checkpoint.load(state, storage_reader=tessera.torch.FileSystemReader(example))
    >>> state["model"]["w"][2, 3].item(), state["step"]
    (11.0, 7)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        threads: int = 2,
        partial: bool = False,
    ) -> None:
        super().__init__(path, _extension_registry)
        self._given = path
        self._threads = threads
        self._partial = partial
        self._needs_torch = _extension_registry is not None
        self._is_torchs = False
        self._opened: Checkpoint | None = None
        #: What `read_metadata` raised: torch gives its text alone.
        self.failure: Error | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._given = checkpoint_id
        self._opened = None
        self.failure = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url_of(READABLE, checkpoint_id) or super().validate_checkpoint_id(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self._given

    @property
    def plans_here(self) -> bool:
        """Whether `tessera.torch.load` may plan for it. Else torch does."""
        return not self._needs_torch and not is_foreign(self)

    def opened(self, kinds: Collection[str] = ("dcp",)) -> Checkpoint:
        """The checkpoint as it is now, which is of one of these kinds: torch's planner knows one alone."""
        opened = open(self._given, threads=self._threads, partial=self._partial)
        if opened.kind not in kinds:
            raise MismatchError(f"mismatch: a {opened.kind} checkpoint, not dcp [{self._given}]", str(self._given))
        return opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None and self.failure is not None:
            # torch looks for a rank's own metadata when there is none of all.
            raise NoMetadata(str(self.failure)) from self.failure
        try:
            metadata = self._metadata(rank)
        except Error as error:
            self.failure = error
            raise
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _metadata(self, rank: int | None) -> Metadata:
        self._is_torchs = rank is not None or not self.plans_here
        if self._is_torchs:
            if not is_foreign(self):
                warnings.warn("stream extensions and loads without collectives are read by torch's own code", stacklevel=4)
            path = self._get_metadata_path(rank)
            with self.fs.create_stream(path, "rb") as file:
                return _data.read_metadata(file.read(), str(path))
        self._opened = self.opened()
        # Compared with its digest, and from whatever store the checkpoint is in.
        metadata = _data.read_metadata(self._opened._core.file(".metadata"), f"{self._opened.path}/.metadata")
        if self._partial:
            entries = metadata.state_dict_metadata
            metadata.state_dict_metadata = {name: entries[name] for name in entries if name in self._opened}
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Here each rank's error still reaches all of them before any has written memory."""
        plan = super().prepare_local_plan(plan)
        if self._is_torchs or self._opened is None:
            return plan
        presence = Presence(self._opened)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                presence.require_all(item.storage_index.fqn)
            else:
                presence.require_elements(item.storage_index.fqn, self._offsets(item), item.lengths)
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._is_torchs:
            return super().read_data(plan, cast(LoadPlanner, _DataAlone(planner, self)))
        if self._opened is None:
            self._opened = self.opened()
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        # What is refused is refused before any memory is written.
        convert = _data.Values(str(self._given), getattr(planner, "allow", ()))
        read = [(item, self._value(item.storage_index, convert)) for item in values]
        self._read_tensors((item for item in plan.items if item.type != LoadItemType.BYTE_IO), planner)
        for item, value in read:
            _give(planner, item, value)
        self._tell_of_left(planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _tell_of_left(self, planner: LoadPlanner) -> None:
        """By rank 0, which does not know what the plans of others want."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and dist.get_rank() != 0:
            return
        keys = of_planner(planner)
        alone = keys.of_all(None)
        tell_of_left(keys.taken(alone), alone.unexpected_keys, str(self._given), ranks)

    def _value(self, index: MetadataIndex, convert: _data.Values) -> Any:
        assert self._opened is not None
        return convert(self._opened._value(index.fqn, Loaded("torch")), index.fqn)

    def _read_tensors(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        assert self._opened is not None
        fill = Fill(self._opened)
        done: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            target = planner.resolve_tensor(item).detach()
            self._require_shape(item, target)
            fill.add(item.storage_index.fqn, self._offsets(item), target)
            done.append((item, target))
        fill.run()
        for item, target in done:
            planner.commit_tensor(item, target)

    def _require_shape(self, item: ReadItem, target: torch.Tensor) -> None:
        if tuple(target.shape) != tuple(item.lengths):
            raise MismatchError(
                f"mismatch: {tuple(target.shape)} is to be filled with {tuple(item.lengths)} elements"
                f" [{self._given}, key '{item.storage_index.fqn}']",
                str(self._given),
                item.storage_index.fqn,
            )

    def _offsets(self, item: ReadItem) -> tuple[int, ...]:
        """Where the wanted elements begin in the whole tensor."""
        begin = item.storage_index.offset or (0,) * len(item.lengths)
        return tuple(chunk + inside for chunk, inside in zip(begin, item.storage_offsets))


def _give(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    if isinstance(planner, OurPlanner):
        planner.load_value(item, value)
    else:
        planner.load_bytes(item, io.BytesIO(saved(value)))


class _DataAlone:
    """A planner as torch's own reader asks it. A value reaches it as data, whatever its bytes would make torch.load do."""

    def __init__(self, planner: LoadPlanner, reader: FileSystemReader) -> None:
        self._planner = planner
        self._path = str(reader.path)
        self._convert = _data.Values(self._path, getattr(planner, "allow", ()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        _give(self._planner, item, _data.value_of_item(value.getvalue(), self._path, item.storage_index.fqn, self._convert))
