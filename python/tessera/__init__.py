"""Tessera reads, converts and checks sharded checkpoints.

    import tessera

    with tessera.open("run/step400") as checkpoint:
        rows = checkpoint["model.embed.weight"][10:20]
"""

from tessera import _core
from tessera._background import CheckpointWriter, PendingSave
from tessera._checkpoint import Checkpoint, open
from tessera._errors import (
    AlreadyExistsError,
    CancelledError,
    ConflictError,
    CorruptError,
    DeadlineError,
    Error,
    IncompleteError,
    InvalidArgumentError,
    IoError,
    KeyNotFoundError,
    LimitError,
    MismatchError,
    NoCheckpointError,
    NotFoundError,
    OutOfSpaceError,
    PeerFailedError,
    UnsafeError,
    UnsupportedError,
)
from tessera._operations import convert, diff, load, save_file, scan, seal, stats, verify
from tessera._reports import (
    ConvertReport,
    Difference,
    File,
    CheckedBytes,
    Finding,
    IoReport,
    SaveReport,
    ScannedName,
    ScanReport,
    SealReport,
    TensorStats,
    VerifyReport,
)
from tessera._safe_open import TensorSlice, safe_open
from tessera._tensor import Piece, Tensor
from tessera._values import Opaque

__version__: str = _core.VERSION

__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "Checkpoint",
    "CheckpointWriter",
    "ConflictError",
    "ConvertReport",
    "CorruptError",
    "DeadlineError",
    "Difference",
    "Error",
    "File",
    "CheckedBytes",
    "Finding",
    "IncompleteError",
    "InvalidArgumentError",
    "IoError",
    "IoReport",
    "KeyNotFoundError",
    "LimitError",
    "MismatchError",
    "NoCheckpointError",
    "NotFoundError",
    "Opaque",
    "OutOfSpaceError",
    "PeerFailedError",
    "PendingSave",
    "Piece",
    "SaveReport",
    "ScanReport",
    "ScannedName",
    "SealReport",
    "Tensor",
    "TensorSlice",
    "TensorStats",
    "UnsafeError",
    "UnsupportedError",
    "VerifyReport",
    "convert",
    "diff",
    "load",
    "open",
    "safe_open",
    "save_file",
    "scan",
    "seal",
    "stats",
    "verify",
]
