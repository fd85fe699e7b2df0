"""Writes the items of a plan into data files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tessera import _core
from tessera._errors import UnsupportedError
from tessera.torch._plain import dtype_name, is_plain, saved

#: Items are handed to `_core` in groups of as many, or of as many bytes.
_ITEMS, _BYTES = 512, 64 << 20


@dataclass(frozen=True)
class Written(WriteResult):
    """torch's result of an item; the last one of a file has its digests, too."""

    receipt: tuple[Any, ...] | None = None


class Batch:
    """Items that are written together, and the memory of their tensors."""

    def __init__(self) -> None:
        self.items: list[WriteItem] = []
        self.data: list[Any] = []
        self.bytes = 0
        self.on_device = False

    def add(self, item: WriteItem, data: Any) -> None:
        self.items.append(item)
        if isinstance(data, io.BytesIO):
            data = data.getvalue()
            self.bytes += len(data)
        else:
            if data.is_meta:
                raise UnsupportedError(f"unsupported: the tensor is on the device meta, without elements [key '{item.index.fqn}']",
                                       key=item.index.fqn)
            data = data.detach()
            self.bytes += data.numel() * data.element_size()
            self.on_device = self.on_device or data.device.type != "cpu"
        self.data.append(data)

    def copy(self) -> None:
        """From a device."""
        self.data = [data.cpu() if isinstance(data, torch.Tensor) else data for data in self.data]

    def contents(self) -> list[Any]:
        """As `_core` takes them: bytes, or where a tensor's elements are."""
        # What is made of a tensor here has to live as long as the batch.
        self.data = [_content(data) if isinstance(data, torch.Tensor) else (data, data) for data in self.data]
        return [content for content, _ in self.data]


def _content(tensor: torch.Tensor) -> tuple[Any, Any]:
    """What `_core` takes, and who has the memory."""
    if not is_plain(tensor):
        # Sparse, quantized and others: an item like any other, made by torch.
        made = saved(tensor)
        return made, made
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return (tensor.data_ptr(), dtype_name(tensor), tensor.shape, tensor.stride()), tensor


def _batches(items: Iterable[WriteItem], planner: SavePlanner, ahead: int) -> Iterator[Batch]:
    batch = Batch()
    for item in items:
        batch.add(item, planner.resolve_data(item))
        if len(batch.items) >= _ITEMS or batch.bytes >= (ahead if batch.on_device else _BYTES):
            yield batch
            batch = Batch()
    if batch.items:
        yield batch


class DataFile:
    """One data file. Items come in torch's order: values, then tensors."""

    def __init__(self, directory: str, name: str, items: list[WriteItem]) -> None:
        self._directory = directory
        self._name = name
        self._core: Any = None  # while it is written
        self._is_stopped = False
        self._items = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)

    def write(self, planner: SavePlanner, ahead: int) -> list[Written]:
        """Writes all items, and makes the file durable. `ahead`: bytes that are copied from a device meanwhile."""
        results: list[Written] = []
        self._core = _core.DataFile(self._directory, self._name)
        try:
            with ThreadPoolExecutor(1) as copying:
                before: tuple[Batch, Future[None] | None] | None = None
                for batch in _batches(self._items, planner, ahead):
                    copied = self._start_copy(batch, copying)
                    if before is not None:
                        results += self._write_batch(*before)
                    before = (batch, copied)
                if before is not None:
                    results += self._write_batch(*before)
            results[-1] = replace(results[-1], receipt=self._core.finish())
        finally:
            self._core.drop()
        return results

    def stop(self) -> None:
        """From another thread: the writing ends with `cancelled`."""
        self._is_stopped = True
        core = self._core
        if core is not None:
            core.stop()

    @staticmethod
    def _start_copy(batch: Batch, copying: ThreadPoolExecutor) -> Future[None] | None:
        if not batch.on_device:
            return None
        # The thread that copies does not wait for the streams of this one.
        torch.accelerator.synchronize()
        return copying.submit(batch.copy)

    def _write_batch(self, batch: Batch, copied: Future[None] | None) -> list[Written]:
        if copied is not None:
            copied.result()
        if self._is_stopped:
            self._core.stop()
        places = self._core.write(batch.contents())
        return [
            Written(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(self._name, offset, length))
            for item, (offset, length) in zip(batch.items, places)
        ]
