"""The ranks of a process group, as `_core` and the calls of this package use them."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tessera._errors import (
    Error,
    InvalidArgumentError,
    NoCheckpointError,
    NotFoundError,
    PeerFailedError,
    UnsupportedError,
)


class Group:
    """Carries messages by the collectives of a process group, from any one thread."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        # The current device is known to each thread alone.
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def gather(self, message: Any, root: int) -> list[Any] | None:
        self._choose_device()
        all_messages: list[Any] | None = [None] * self.size if self.rank == root else None
        dist.gather_object(message, all_messages, group=self._group, group_dst=root)
        return all_messages

    def all_gather(self, message: Any) -> list[Any]:
        self._choose_device()
        all_messages: list[Any] = [None] * self.size
        dist.all_gather_object(all_messages, message, group=self._group)
        return all_messages

    def broadcast(self, message: Any, root: int) -> Any:
        self._choose_device()
        one = [message]
        dist.broadcast_object_list(one, group=self._group, group_src=root)
        return one[0]

    def scatter(self, messages: list[Any], root: int) -> Any:
        self._choose_device()
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, messages if self.rank == root else None, group=self._group, group_src=root)
        return mine[0]

    def _choose_device(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)


_A_YEAR = datetime.timedelta(days=365)
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _noted(call: _Call) -> _Call:
    """Whoever has failed is marked."""

    @functools.wraps(call)
    def noted(group: OwnGroup, *arguments: Any) -> Any:
        try:
            return call(group, *arguments)
        except BaseException:
            group.has_failed = True
            raise

    return cast(_Call, noted)


class OwnGroup:
    """The same ranks, with connections of their own that torch does not know of: for threads beside the training, whose collectives
    their messages never meet. It outlives the process group. All its ranks make one."""

    def __init__(self, process_group: Any) -> None:
        if not dist.is_gloo_available():
            raise UnsupportedError("unsupported: saves in the background by several ranks need a torch with Gloo")
        ranks = Group(process_group)
        self.rank, self.size = ranks.rank, ranks.size
        name = ranks.broadcast(uuid.uuid4().hex, 0)  # torch's names of groups may come twice, and differ between ranks
        c10d: Any = dist  # whose annotations lack much
        store = c10d.PrefixStore(f"tessera/{name}", c10d.distributed_c10d._get_default_store())
        self._gloo: Any = c10d.ProcessGroupGloo(store, self.rank, self.size, c10d.constants.default_pg_timeout)
        # Ranks may save hours apart. Of one that dies the connections are closed.
        self._gloo._set_default_timeout(_A_YEAR)
        self.has_failed = False  # then its ranks are no longer at the same message

    @_noted
    def gather(self, message: bytes, root: int) -> list[bytes] | None:
        sizes = self._sizes(len(message))
        found = _memory_for(sizes) if self.rank == root else []
        options = dist.GatherOptions()
        options.rootRank = root
        self._gloo.gather([found] if found else [], [_padded(message, max(sizes))], options).wait()
        return _without_padding(found, sizes) if found else None

    @_noted
    def all_gather(self, message: bytes) -> list[bytes]:
        sizes = self._sizes(len(message))
        found = _memory_for(sizes)
        self._gloo.allgather([found], [_padded(message, max(sizes))]).wait()
        return _without_padding(found, sizes)

    @_noted
    def broadcast(self, message: bytes, root: int) -> bytes:
        (size,) = self._tell(torch.tensor([len(message)]), root).tolist()
        found = self._tell(_padded(message if self.rank == root else b"", size), root)
        return _without_padding([found], [size])[0]

    @_noted
    def scatter(self, messages: list[bytes], root: int) -> bytes:
        mine = [len(message) for message in messages] if self.rank == root else [0] * self.size
        sizes = self._tell(torch.tensor(mine), root).tolist()
        sent = [[_padded(message, max(sizes)) for message in messages]] if self.rank == root else []
        (found,) = _memory_for([max(sizes)])
        options = dist.ScatterOptions()
        options.rootRank = root
        self._gloo.scatter([found], sent, options).wait()
        return _without_padding([found], [sizes[self.rank]])[0]

    def _sizes(self, size: int) -> list[int]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._gloo.allgather([sizes], [torch.tensor([size])]).wait()
        return [int(one) for one in sizes]

    def _tell(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensor], options).wait()
        return tensor


def _padded(message: bytes, size: int) -> torch.Tensor:
    """Gloo takes messages of one length, and not none at all."""
    return torch.frombuffer(bytearray(message.ljust(max(size, 1), b"\0")), dtype=torch.uint8)


def _memory_for(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.empty(max(1, *sizes), dtype=torch.uint8) for _ in sizes]


def _without_padding(found: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    return [ctypes.string_at(one.data_ptr(), size) for one, size in zip(found, sizes)]


def group_of(process_group: Any, no_dist: bool) -> Group | None:
    """None: this process is alone. Throws `invalid_argument` for a group that it is not in."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_rank(process_group) < 0:
        raise InvalidArgumentError(
            f"invalid_argument: rank {dist.get_rank()} is not in `process_group`, whose ranks alone take part"
        )
    return Group(process_group)


def agree(group: Group | None, error: BaseException | None, answer: Any = None) -> list[Any]:
    """The answers of all ranks. If some have an error instead, all raise the same: a `tessera.Error`, whatever it was."""
    if group is None:
        if error is None:
            return [answer]
        if isinstance(error, Error) or not isinstance(error, Exception):
            raise error
        raise error_of_ranks({0: error}) from error
    mine = error if error is None or isinstance(error, Error) else error_of_ranks({group.rank: error})
    try:
        answers = group.all_gather((mine, answer))
    except Exception as lost:  # torch's, for a rank that is gone
        if error is not None and not isinstance(error, Exception):  # Ctrl-C
            raise error from lost
        raise PeerFailedError(f"peer_failed: {lost}") from error or lost
    failures = {rank: failure for rank, (failure, _) in enumerate(answers) if failure is not None}
    if error is not None and not isinstance(error, Exception):  # Ctrl-C
        raise error
    if failures:
        raise error_of_ranks(failures, group.size) from error
    return [answer for _, answer in answers]


def error_of_ranks(failures: Mapping[int, BaseException], ranks: int = 1) -> Error:
    """What all `ranks` raise where these have failed: the error that they share, else `peer_failed`."""
    peers = {rank: error for rank, error in failures.items() if isinstance(error, Error)}
    first = peers[min(peers)] if peers else None
    if first is not None and len(peers) == len(failures):
        if all(type(error) is type(first) for error in peers.values()):
            shared = type(first)(first.text, first.path, first.key, first.offset, peers if len(peers) > 1 else None)
            return _seen_by(shared, len(peers), ranks)
    text = "; ".join(f"rank {rank}: {_text_of(error)}" for rank, error in sorted(failures.items()))
    return PeerFailedError(f"peer_failed: {text}", peers=peers)


def _seen_by(error: Error, failed: int, ranks: int) -> Error:
    """That there is no checkpoint is true where no rank sees one; else it is one that some do not find."""
    if not isinstance(error, NoCheckpointError) or failed == ranks:
        return error
    return NotFoundError(error.text, error.path, error.key, error.offset, error.peers)


def _text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def errors_of_torch(group: Group | None, known: Callable[[], Error | None] = lambda: None) -> Iterator[None]:
    """What torch's own planning on `group` raises inside, as a `tessera.Error`. `known`: one that torch has only the text of."""
    ranks = group.size if group else 1
    try:
        yield
    except CheckpointException as failure:
        failures = {rank: error for rank, (error, _) in failure.failures.items()}
        error = known()
        if error is not None:
            raise _seen_by(error, len(failures), ranks) from failure
        raise error_of_ranks(failures, ranks) from failure
    except Error:
        raise
    except Exception as failure:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        raise known() or error_of_ranks({rank: failure}) from failure
