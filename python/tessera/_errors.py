"""The exceptions of the library: one class, and a subclass for each code."""

from __future__ import annotations

import errno
from typing import Any


class Error(Exception):
    """What a file, a store, a peer or a caller made impossible.

    Each code has a subclass, which is also the exception of Python's own that fits, so that
    `except FileNotFoundError` or `except KeyError` work as they are.

    >>> import tessera
    >>> try:
    ...     tessera.open("/no/such/checkpoint")
    ... except tessera.Error as error:
    ...     print(error.code, error.path)
    not_found /no/such/checkpoint
    """

    #: One of the names in `tessera/error.h`: "not_found", "corrupt", ...
    code: str = "io"

    def __init__(
        self,
        text: str,
        path: str | None = None,
        key: str | None = None,
        offset: int | None = None,
        peers: dict[int, Error] | None = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        #: The file, directory or URL; None: it is about none.
        self.path = path
        #: The tensor or value.
        self.key = key
        #: In bytes, in the file.
        self.offset = offset
        #: The errors of the ranks that failed, where several raised it together.
        self.peers = peers or {}
        if isinstance(self, OSError):
            self._tell_system_names()

    def _tell_system_names(self) -> None:
        for name, value in (("filename", self.path), ("strerror", self.text)):
            setattr(self, name, value)

    def __init_subclass__(cls, code: str | None = None, number: int | None = None) -> None:
        """`code` is the subclass's; `number` the `errno` of one that is an OSError."""
        if code:
            cls.code = code
        if number:
            cls.errno = number  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.path, self.key, self.offset, self.peers)


class InvalidArgumentError(Error, ValueError, code="invalid_argument"):
    """The caller asked for something that makes no sense.

    >>> with tessera.open(example) as checkpoint:
    ...     checkpoint["model.w"].read_into(numpy.zeros((2, 2)))
    Traceback (most recent call last):
    tessera._errors.InvalidArgumentError: invalid_argument: the memory is (2, 2), the slice is (3, 4)
    """


class NotFoundError(Error, FileNotFoundError, code="not_found", number=errno.ENOENT):
    """There is no such file, directory or object.

    >>> tessera.NotFoundError.code, issubclass(tessera.NotFoundError, FileNotFoundError)
    ('not_found', True)
    """


class NoCheckpointError(NotFoundError):
    """There is no checkpoint at the place that was opened: nothing at all, or a directory with no file of one.

    The one error after which a program may begin afresh: a layer or an optimizer that a checkpoint
    lacks, damage, a directory with a part of a checkpoint, and ranks of which some see it raise others.

    >>> try:
    ...     tessera.open("/no/such/checkpoint")
    ... except tessera.NoCheckpointError:
    ...     print("a new run")
    a new run
    """


class KeyNotFoundError(Error, KeyError, code="not_found"):
    """The checkpoint has no such tensor or value.

    >>> with tessera.open(example) as checkpoint:
    ...     try:
    ...         checkpoint["model.x"]
    ...     except KeyError as error:
    ...         print(error.key)
    model.x
    """


class AlreadyExistsError(Error, FileExistsError, code="already_exists", number=errno.EEXIST):
    """The target exists, and `overwrite` was not given.

    >>> try:
    ...     tessera.convert(example, existing)
    ... except FileExistsError as error:
    ...     print(error.code)
    already_exists
    """


class CorruptError(Error, ValueError, code="corrupt"):
    """Bytes contradict the format, their checksum or each other.

    >>> tessera.CorruptError.code, issubclass(tessera.CorruptError, ValueError)
    ('corrupt', True)
    """


class IncompleteError(Error, ValueError, code="incomplete"):
    """A part of a whole is missing: a truncated file, a hole in a tensor.

    >>> tessera.IncompleteError.code, issubclass(tessera.IncompleteError, ValueError)
    ('incomplete', True)
    """


class UnsupportedError(Error, ValueError, code="unsupported"):
    """Well formed, but this version does not handle it.

    >>> tessera.UnsupportedError.code, issubclass(tessera.UnsupportedError, ValueError)
    ('unsupported', True)
    """


class UnsafeError(Error, ValueError, code="unsafe"):
    """It would run code or leave the checkpoint's directory.

    >>> tessera.UnsafeError.code, issubclass(tessera.UnsafeError, ValueError)
    ('unsafe', True)
    """


class LimitError(Error, ValueError, code="limit"):
    """A size or count exceeds a stated cap.

    >>> tessera.LimitError.code, issubclass(tessera.LimitError, ValueError)
    ('limit', True)
    """


class ConflictError(Error, OSError, code="conflict", number=errno.EBUSY):
    """Two writers, a file that was replaced, or two pieces that disagree.

    >>> tessera.ConflictError.code, issubclass(tessera.ConflictError, OSError)
    ('conflict', True)
    """


class IoError(Error, OSError, code="io", number=errno.EIO):
    """The operating system or the store refused.

    >>> tessera.IoError.code, issubclass(tessera.IoError, OSError)
    ('io', True)
    """


class OutOfSpaceError(Error, OSError, code="out_of_space", number=errno.ENOSPC):
    """The device or the quota has no room left.

    >>> tessera.OutOfSpaceError.code, issubclass(tessera.OutOfSpaceError, OSError)
    ('out_of_space', True)
    """


class DeadlineError(Error, TimeoutError, code="timeout", number=errno.ETIMEDOUT):
    """A deadline passed.

    >>> tessera.DeadlineError.code, issubclass(tessera.DeadlineError, TimeoutError)
    ('timeout', True)
    """


class PeerFailedError(Error, RuntimeError, code="peer_failed"):
    """Other ranks failed: `peers` has what they raised.

    >>> tessera.PeerFailedError.code, issubclass(tessera.PeerFailedError, RuntimeError)
    ('peer_failed', True)
    """


class MismatchError(Error, ValueError, code="mismatch"):
    """Shapes, dtypes, names or world sizes differ that should agree.

    >>> tessera.MismatchError.code, issubclass(tessera.MismatchError, ValueError)
    ('mismatch', True)
    """


class CancelledError(Error, RuntimeError, code="cancelled"):
    """The caller asked for the work to end before it was done.

    >>> tessera.CancelledError.code, issubclass(tessera.CancelledError, RuntimeError)
    ('cancelled', True)
    """


_BY_CODE: dict[str, type[Error]] = {kind.code: kind for kind in Error.__subclasses__() if kind is not KeyNotFoundError}


def error_of(
    code: str,
    text: str,
    path: str | None,
    key: str | None,
    offset: int | None,
    peers: dict[int, Error],
    is_no_checkpoint: bool,
) -> Error:
    """What `_core` raises."""
    kind = NoCheckpointError if is_no_checkpoint else _BY_CODE[code]
    if kind is NotFoundError and key is not None:
        kind = KeyNotFoundError
    return kind(text, path, key, offset, peers)
