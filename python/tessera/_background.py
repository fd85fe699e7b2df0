"""Saves in the background: `tessera/checkpoint_writer.h` for Python."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from tessera import _core
from tessera._checkpoint import Path
from tessera._errors import CancelledError, Error, InvalidArgumentError, PeerFailedError
from tessera._operations import DescribedState
from tessera._reports import SaveReport


class PendingSave(Future[SaveReport]):
    """A save that was begun: a `concurrent.futures.Future`, which is done when the save is decided.

    `result()` is the report. It raises what failed, as `exception()` returns it, on every rank the same with the share of
    each; an error that either has told is taken, and no later call of the writer raises it. Callbacks run on a thread of
    the writer's: the next save begins when they have returned, and a writer is not called there, except to close it (the end of the
    program waits for what is under way then).
    A save that was begun cannot be cancelled. In a child of fork() the calls are `invalid_argument`.

    >>> with tessera.CheckpointWriter() as writer:
    ...     pending = writer.save({"w": numpy.zeros(3)}, directory + "/step800")
    ...     pending.staged(), pending.result().files > 0
    (True, True)
    """

    def __init__(self, state: DescribedState | None = None) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._state_described = state
        self._cause: BaseException | None = None
        self._is_told = threading.Lock()  # taken by who tells that it is decided
        self._is_heard = threading.Event()  # when callbacks have returned
        self._pending: Any = None  # of _core

    def staged(self) -> bool:
        """Whether all tensors of this rank were copied. If not, `result()` says why."""
        return bool(self._pending.staged())

    def done(self) -> bool:
        """Whether it is decided: the checkpoint is there, or the save has failed."""
        return bool(self._pending.done())

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits, at most `timeout` seconds (`TimeoutError`), and returns what was saved. Raises what failed."""
        self._wait(timeout)
        try:
            report = SaveReport(**self._pending.result())
        except Error as error:
            error.__cause__ = self._cause
            raise
        if self._state_described is not None:
            self._state_described.warn(report)
        return report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as `result` does, and returns what failed."""
        self._wait(timeout)
        try:
            self._pending.result()
        except Error as error:
            error.__cause__ = self._cause
            return error
        return None

    def add_done_callback(self, fn: Callable[[Future[SaveReport]], object]) -> None:
        """`fn(self)` is called when it is decided, or at once if it is already. What it raises is logged."""
        self._pending.done()  # refuses children of fork(), where nobody would call it
        super().add_done_callback(fn)

    def _wait(self, timeout: float | None) -> None:
        self._pending.require_may_wait()
        if not self._pending.done():
            super().result(timeout)

    def _tell(self) -> None:
        """It is decided. What came of it is looked up when somebody asks: until then nobody has taken an error."""
        if self._is_told.acquire(blocking=False):
            try:
                self.set_result(None)  # type: ignore[arg-type]
            finally:
                self._is_heard.set()


class Carrier(Protocol):
    """Carries messages of bytes between ranks. All ranks make the same calls in the same order, from one thread."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, message: bytes, root: int) -> list[bytes] | None: ...
    def all_gather(self, message: bytes) -> list[bytes]: ...
    def broadcast(self, message: bytes, root: int) -> bytes: ...
    def scatter(self, messages: list[bytes], root: int) -> bytes: ...


_A_YEAR = 365 * 24 * 3600.0  # in seconds: as good as infinity


class CheckpointWriter:
    """Saves in the background: copies tensors into memory that it keeps, and saves from there by a thread of its own.

    It is made once. Of several ranks each makes one over `group`: a process group of torch, beside which it makes connections for its
    own messages (so all ranks of `group` call this), or what has `rank`, `size`, `gather(message, root)`, `all_gather(message)`,
    `broadcast(message, root)` and `scatter(messages, root)` for bytes, and is used by nobody else. None: this process alone.

    `bytes` is the size of the memory (`bytes_of`), which is made and touched at once; 0: the first save makes it, and one that
    needs more makes it anew. While an earlier save is under way, the next one waits, or with `if_busy="refuse"` fails
    (`limit`). A save takes at most `rate` bytes a second from the memory; 0: any. With `idle` its threads run only where a
    processor has nothing else to do: where none has, a save takes long. `threads` copy. `end_within` is how many seconds the
    end of the writer waits for what is under way; the end of the program is one, too.

    With `process` it is no thread that saves but a process of its own, `tessera writer`, which outlives this one: what all ranks have
    copied is saved although they are killed. `path` is then one that all ranks reach. `program` is the command (None: TESSERA_COMMAND of
    the environment, or the one of this package), and who gives no sign of life for `silence` seconds is lost. A writer whose process
    is gone stays that way (`require_alive`).

    A process whose program has died keeps the snapshot of its last save in memory for `keep` seconds: who starts again on this host
    opens or loads `arena://` and the save's path, on any number of ranks, once all ranks have copied, whether it is on a disk yet or not.
    It ends earlier when a new writer has completed a save into the same run, and a program that ends well leaves none; one that ends
    by an exception does not. Without `process` it is `invalid_argument`. With `partner=1` the process of a rank on another host has a
    copy, for when this host is lost.

    >>> with tessera.CheckpointWriter() as writer:
    ...     weights = numpy.ones(3)
    ...     pending = writer.save({"w": weights}, directory + "/step900")
    ...     weights[:] = 0
    ...     report = pending.result()
    >>> tessera.load(directory + "/step900", framework="numpy")["w"].tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        group: Any = None,
        *,
        bytes: int = 0,
        if_busy: str = "wait",
        rate: int = 0,
        idle: bool = True,
        threads: int = 2,
        end_within: float = 600.0,
        process: bool = False,
        program: Path | None = None,
        silence: float = 30.0,
        keep: float = 0.0,
        partner: int = 0,
    ) -> None:
        require_may_keep(keep, process)
        options = {
            "bytes": _counted("bytes", bytes),
            "if_busy": if_busy,
            "rate": _counted("rate", rate),
            "idle": idle,
            "threads": threads,
            "end_within_ms": _counted("end_within", round(min(end_within, _A_YEAR) * 1000)),
            "process": process,
            "program": (os.fspath(program) if program else _command()) if process else "",
            "silence_ms": _counted("silence", round(min(silence, _A_YEAR) * 1000)),
            "keep_ms": _counted("keep", round(min(keep, _A_YEAR) * 1000)),
            "partner": _counted("partner", partner),
        }
        self._carrier = _carrier_of(group)
        self._writer = _core.Writer(options, self._carrier)
        self._last: PendingSave | None = None
        self._end = weakref.finalize(self, _end, self._writer, os.getpid())  # also at the end of the program
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:  # such a process ends without that
            from multiprocessing.util import Finalize

            Finalize(self, _end, (self._writer, os.getpid()), exitpriority=0)
            Finalize(None, _core.await_ends_left, exitpriority=-1)

    def save(
        self,
        tree: Any,
        path: Path,
        *,
        kind: str | None = None,
        overwrite: bool = True,
        single_writer: bool = False,
        keep_duplicates: bool = False,
        threads: int = 2,
        values: str = "refuse",
        copies: str = "warn",
    ) -> PendingSave:
        """Returns when all tensors of `tree` are copied: the caller may change, free or replace whatever it leads to.

        The tree and the options are those of `save_file`; `values` and `copies` say what is done where ranks hold other values, or
        other elements of a tensor, in a DCP checkpoint: "refuse", "warn", or "keep" what each one has. Every rank calls it, in the
        same order. What a rank cannot take part with (objects that are no data, no memory) is the error of `result()` on all.

        Raises the error of an earlier save that nobody has taken; nothing is saved then. Ctrl-C ends the save.
        """
        options = {
            "kind": kind,
            "overwrite": overwrite,
            "single_writer": single_writer,
            "keep_duplicates": keep_duplicates,
            "threads": threads,
            "values": values,
            "copies": copies,
        }
        state = DescribedState(tree)
        return self._begin(state.tree, path, options, state)

    def wait(self) -> None:
        """Waits until all saves are decided and all callbacks have returned. Raises an error that nobody has taken."""
        last = self._last
        if last is not None and not self._writer.is_closed and not _core.is_on_errand():
            last._wait(None)  # which Ctrl-C ends, and the next wait, too
            last._is_heard.wait()
        self._writer.wait()

    def require_alive(self) -> None:
        """Raises `io`, saying how it ended, if the process that saves for this rank is gone (`process`).

        Then every later save of this writer fails on all ranks. To go on, ranks ask this after a save that failed, tell each other,
        and if one has lost its process all close their writers and make new ones. Not collective; does not wait.
        """
        self._writer.require_alive()

    def close(self) -> None:
        """Waits for what is under way, for `end_within` seconds at most; Ctrl-C stops it. Warnings say what was lost, and which
        errors nobody took. In a callback of a save it returns at once, and what is under way goes on."""
        self._end()

    @staticmethod
    def bytes_of(tree: Any) -> int:
        """How much memory a save of the tree needs: for `bytes`.

        >>> tessera.CheckpointWriter.bytes_of({"w": numpy.zeros(1000)}) >= 8000
        True
        """
        return int(_core.bytes_of(DescribedState(tree).tree()))

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self.wait()
            else:
                self._writer.leave()
        finally:
            self.close()

    def _begin(
        self, tree: Callable[[], Any], path: Path, options: dict[str, Any], state: DescribedState | None = None
    ) -> PendingSave:
        """Saves what `tree` returns, of `_core.make_tree`. What it raises fails the save on all ranks."""
        pending = PendingSave(state)
        interrupt: BaseException | None = None
        try:
            made = tree()
        except Exception as error:
            pending._cause = without_frames(error)
            made = _failed(error)
        except BaseException as error:
            if self._carrier is None:
                raise
            interrupt = error
            made = _failed(CancelledError("cancelled: interrupted"))
        pending._pending = self._writer.save(made, os.fspath(path), options, pending._tell)
        if pending._pending.done():  # nobody hears of what is refused at once
            pending._tell()
        else:
            self._last = pending
        if interrupt is not None:
            pending.add_done_callback(lambda _: pending.exception())  # takes it: it is told here
            raise interrupt
        return pending


def without_frames(error: BaseException) -> BaseException:
    """The same, which says where it was raised (from Python 3.11 on), and no longer keeps the state that was there: a frame has
    those of its callers, and all their variables."""
    if error.__traceback__ is not None and hasattr(error, "add_note"):
        error.add_note("".join(["raised here:\n", *traceback.format_tb(error.__traceback__)]).rstrip())
    rest, seen = [error], set[int]()
    while rest:
        one = rest.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            rest.extend(linked for linked in (one.__cause__, one.__context__) if linked is not None)
    return error


def _command() -> str:
    """Where `tessera` is. Empty: the library looks for it, and says where."""
    if os.environ.get("TESSERA_COMMAND"):
        return ""
    from tessera.__main__ import command

    try:
        return command()
    except FileNotFoundError:
        return ""


def require_may_keep(keep: float, process: bool) -> None:
    """A thread has nothing left when its program dies."""
    if keep > 0 and not process:
        raise InvalidArgumentError(f"invalid_argument: keep is {keep}, but it is no process that saves")


def _counted(name: str, number: int) -> int:
    if number < 0:
        raise InvalidArgumentError(f"invalid_argument: {name} is {number}, expected 0 or more")
    return number


def _carrier_of(group: Any) -> Carrier | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and isinstance(group, distributed.ProcessGroup):
        from tessera.torch._group import OwnGroup

        return OwnGroup(group) if group.size() > 1 else None
    carrier: Carrier | None = group
    return carrier


def _failed(error: Exception) -> Any:
    """A tree that fails its save as `error` says."""
    if not isinstance(error, Error):
        return _core.failed_tree(PeerFailedError.code, f"{type(error).__name__}: {error}", None, None)
    message = error.text.removeprefix(f"{error.code}: ")
    if error.path or error.key:  # which are said in brackets behind it
        message = message.rpartition(" [")[0] or message
    return _core.failed_tree(error.code, message, error.path, error.key)


def _end(writer: Any, process: int) -> None:
    if process == os.getpid():  # a child of fork() has no part of it
        if getattr(sys, "last_value", None) is not None:  # the program ends by that exception
            writer.leave()
        writer.close()


atexit.register(_core.await_ends_left)  # of writers that callbacks have ended
