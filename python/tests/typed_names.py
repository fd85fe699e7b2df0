"""Every public name as a typed program uses it; `test_types.py` gives this to mypy."""

from typing import Any

import tessera


def read(path: str) -> tuple[int, ...]:
    with tessera.open(path, threads=2) as checkpoint:
        kind: str = checkpoint.kind
        files: list[tessera.File] = checkpoint.files
        sizes: list[int] = [file.size for file in files]
        tensor = checkpoint["w"]
        assert isinstance(tensor, tessera.Tensor)
        pieces: list[tessera.Piece] = tensor.pieces
        report: tessera.IoReport = tensor.read_into(memoryview(b""))
        rows: Any = tensor[0:2]
        part: tessera.Checkpoint = checkpoint.only(["model"])
    version: str = tessera.__version__
    print(version, kind, sizes, pieces, report.bytes_read, rows, part, tensor.dtype)
    return tensor.shape


def read_as_safetensors(path: str) -> list[str]:
    with tessera.safe_open(path, framework="np", device="cpu", mmap=True) as file:
        part: tessera.TensorSlice = file.get_slice("w")
        print(part.get_shape(), part.get_dtype(), file.metadata(), file.offset_keys())
        return file.keys()


def whole(path: str, target: str) -> int:
    state: Any = tessera.load(path, only=["model"], framework="torch", dtype="bfloat16", mmap=False)
    saved: tessera.SaveReport = tessera.save_file(state, target, overwrite=True)
    made: tessera.ConvertReport = tessera.convert(path, target, only=["model"], progress=print)
    verified: tessera.VerifyReport = tessera.verify(target)
    findings: list[tessera.Finding] = verified.findings
    files: list[tessera.CheckedBytes] = verified.files
    differences: list[tessera.Difference] = tessera.diff(path, target)
    numbers: list[tessera.TensorStats] = tessera.stats(path, only=["model"], threads=1)
    scanned: tessera.ScanReport = tessera.scan(path)
    names: list[tessera.ScannedName] = scanned.dangerous
    sealed: tessera.SealReport = tessera.seal(path)
    print(made.target, findings, files, differences, names, numbers, sealed.files, tessera.Opaque("package.Class").name)
    return saved.files


def in_the_background(path: str) -> int:
    needed: int = tessera.CheckpointWriter.bytes_of({"n": 1})
    with tessera.CheckpointWriter(bytes=needed, if_busy="wait", rate=0, idle=False, threads=2, end_within=60.0) as writer:
        pending: tessera.PendingSave = writer.save({"n": 1}, path, kind="dcp", values="warn")
        staged: bool = pending.staged() and pending.done()
        pending.add_done_callback(print)
        failed: BaseException | None = pending.exception(timeout=60)
        print(staged, failed)
        writer.wait()
        return pending.result().files


ERRORS: list[type[tessera.Error]] = [
    tessera.AlreadyExistsError,
    tessera.CancelledError,
    tessera.ConflictError,
    tessera.CorruptError,
    tessera.DeadlineError,
    tessera.IncompleteError,
    tessera.InvalidArgumentError,
    tessera.IoError,
    tessera.KeyNotFoundError,
    tessera.LimitError,
    tessera.MismatchError,
    tessera.NoCheckpointError,
    tessera.NotFoundError,
    tessera.OutOfSpaceError,
    tessera.PeerFailedError,
    tessera.UnsafeError,
    tessera.UnsupportedError,
]


def code_of(error: tessera.Error) -> tuple[str, str | None, str | None, int | None]:
    return error.code, error.path, error.key, error.offset
