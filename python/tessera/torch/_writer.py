"""The writer of `torch.distributed.checkpoint`, which writes with Tessera."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import uuid
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tessera import _core
from tessera._errors import ConflictError
from tessera.torch import _data
from tessera.torch._copies import Held, held_by, judge, require_policy
from tessera.torch._files import DataFile, Written
from tessera.torch._stores import WRITABLE, is_foreign, is_url_of


class _Attempt:
    """The directory of a save that goes on, on the coordinator."""

    _lock = threading.Lock()
    _of: weakref.WeakValueDictionary[str, _Attempt] = weakref.WeakValueDictionary()

    def __init__(self, directory: str, overwrite: bool, single_writer: bool) -> None:
        self._directory = directory
        # A save of this process that has failed keeps the directory's lock as long as somebody keeps its exception. It
        # gives way to the next one; should it still run, its commit is a conflict.
        with self._lock:
            earlier = self._of.get(directory)
            if earlier is not None:
                earlier.close()
            self._core: Any = _core.DcpDirectory(directory, overwrite, single_writer)
            self._of[directory] = self

    def commit(self, metadata: Metadata, save_id: str, receipts: list[tuple[Any, ...]]) -> None:
        with self._lock:
            core, self._core = self._core, None
        if core is None:
            raise ConflictError(f"conflict: a later save has begun here [{self._directory}]", self._directory)
        try:
            core.commit(pickle.dumps(metadata), save_id, receipts)
        finally:
            core.close()

    def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.close()


class FileSystemWriter(filesystem.FileSystemWriter):
    """torch's `FileSystemWriter`: with digests, written fast, and committed in one step.

    A checkpoint that is there stays whole until the new one is, and readers of the old one go on
    until the next save. The files are always synced. The path may be a URL, for whose store
    `single_writer` says that nobody else saves there. `copies` says what is done where ranks hold
    different elements of a plain tensor, of which one rank's are saved: "warn" or "refuse"; without it
    those below an optimizer are refused, and of others a warning tells. The other arguments are torch's.

    >>> import tessera.torch, torch
    >>> writer = tessera.torch.FileSystemWriter(directory + "/step500")
    >>> metadata = torch.distributed.checkpoint.save({"w": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    >>> tessera.verify(directory + "/step500").findings
    []
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        single_writer: bool = False,
        copies: str | None = None,
    ) -> None:
        require_policy(copies)
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self._given = os.fspath(path)
        self._single_writer = single_writer
        #: What it was told, or else the last `install` was.
        self.copies = copies or next((told for told in reversed(_data.copies.values()) if told), None)
        self._needs_torch = bool(_extensions) or serialization_format != SerializationFormat.TORCH_SAVE
        self._is_torchs = False
        self._attempt: _Attempt | None = None
        self._committed = ""  # the last save's id

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attempt": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._given = os.fspath(checkpoint_id)
        self._close()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self._given if "://" in self._given else self.path

    @property
    def directory(self) -> str:
        """The path or URL as it was given."""
        return self._given

    def for_one_save(self) -> FileSystemWriter:
        """As it is now: a save that begins later has this directory and these options, whatever becomes of `self`."""
        own = copy.copy(self)
        own.save_id = str(uuid.uuid4())
        return own

    @property
    def plans_here(self) -> bool:
        """Whether `tessera.torch.save` may plan for it. Else torch does."""
        return not self._needs_torch and not is_foreign(self)

    @property
    def options(self) -> dict[str, Any]:
        """What it was told, as `_core.save` takes it."""
        return {
            "overwrite": self.overwrite,
            "single_writer": self._single_writer,
            "threads": self.thread_count,
            "one_file_an_item": not self.single_file_per_rank,
        }

    def storage_meta(self) -> StorageMeta | None:
        # A text, and not a path: how Python 3.13 pickles paths torch cannot read under older ones.
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url_of(WRITABLE, checkpoint_id) or super().validate_checkpoint_id(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._close()
        self._is_torchs = not self.plans_here or not self.use_collectives
        if self._is_torchs and not is_foreign(self):
            what = "stream extensions, safetensors and saves without collectives are written by torch's own code"
            warnings.warn(what, stacklevel=2)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return super().prepare_local_plan(plan) if self._is_torchs else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self._is_torchs:
            if self.save_id == self._committed:  # torch does not reset a writer for each save
                self.save_id = str(uuid.uuid4())
            self._attempt = _Attempt(self._given, self.overwrite, self._single_writer)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._is_torchs:
            return super().write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(self._write_files(plan, planner) + held_by(planner))
        except BaseException:
            self._close()
            raise
        return future

    def _write_files(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if self.single_file_per_rank:
            bins = filesystem._split_by_size_and_type(self.thread_count, plan.items)
        else:
            bins = [[item] for item in plan.items]
        # Drawn by each rank for each save: torch may give a plan once more that it had cached.
        attempt = _core.new_attempt()
        names = (f"{plan.storage_data.prefix}{number}_{attempt}.distcp" for number in range(len(bins)))
        files = [DataFile(self._given, name, items) for name, items in zip(names, bins) if items]
        if self.thread_count == 1 or len(files) < 2:
            results = [file.write(planner, self.per_thread_copy_ahead) for file in files]
        else:
            results = self._write_by_threads(files, planner)
        return [result for one in results for result in one]

    def _write_by_threads(self, files: list[DataFile], planner: SavePlanner) -> list[list[Written]]:
        with ThreadPoolExecutor(self.thread_count) as pool:
            futures = [pool.submit(file.write, planner, self.per_thread_copy_ahead) for file in files]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        future.result()
            except BaseException:
                for future, file in zip(futures, files):
                    future.cancel()
                    file.stop()
                raise
        return [future.result() for future in futures]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._is_torchs:
            return super().finish(metadata, results)
        assert self._attempt is not None
        all_results = [result for of_rank in results for result in of_rank]
        try:
            judge([result for result in all_results if isinstance(result, Held)], self.copies, self._given)
        except BaseException:
            self._close()
            raise
        written = [result for result in all_results if not isinstance(result, Held)]
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = self.storage_meta()
        receipts = [getattr(result, "receipt", None) for result in written]
        self._attempt.commit(metadata, self.save_id, [receipt for receipt in receipts if receipt is not None])
        self._committed = self.save_id
        self._attempt = None

    def _close(self) -> None:
        """Of a save that has failed."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()
