"""What is done with whole checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from tessera import _core
from tessera._checkpoint import Checkpoint, Path, Progress, listed, open
from tessera._describe import Description, describe, is_array
from tessera._memory import name_of_dtype
from tessera._reports import (
    CheckedBytes,
    ConvertReport,
    Difference,
    Finding,
    SaveReport,
    ScannedName,
    ScanReport,
    SealReport,
    TensorStats,
    VerifyReport,
)


def load(
    path: Path,
    *,
    only: Sequence[str] = (),
    framework: str | None = None,
    dtype: Any = None,
    mmap: bool = False,
    threads: int = 2,
    partial: bool = False,
    ignore_index: bool = False,
    rank: int | None = None,
    accept: Sequence[str] = (),
    progress: Progress | None = None,
) -> Any:
    """Reads a checkpoint of any kind whole, or what `only` chooses of it.

    `framework` is "torch" or "numpy". Without it the program says: where it has imported torch already, tensors become
    torch's, and elsewhere arrays of numpy. numpy has no bfloat16 and no 8-bit floats without the package ml_dtypes.
    Floating-point tensors of 16 bits and more are converted to `dtype`. Values are objects of Python, of numpy (arrays, scalars and dtypes of
    numbers) and of torch (dtypes, devices, sizes; where the program has imported it), and `Opaque` where they have another class: nothing
    is imported or called because a file names it. `progress(done, total)` hears of bytes. `partial`, `ignore_index`, `rank`
    and `accept` are those of `open`.

    With `mmap` nothing is read where a local file has the bytes of a tensor as they are wanted: in one piece, plain, and
    aligned. Those of safetensors and torch.save mostly lie so, those of DCP mostly do not. The tensor or array is a view of
    the mapped file. It can be written, and the file stays as it is. Tensors of one storage share its memory, as with
    `torch.load(mmap=True)`: what is written into one is seen in all that overlap. All else is read, as are tensors whose
    own elements share a place (of `expand`), and with `dtype` everything. Mapped bytes are
    not compared with digests or checksums: `verify` does that. A file that is replaced or removed later stays whole for
    who has mapped it; where one is cut off or written into in its place, the process ends by SIGBUS or sees other bytes.

    >>> import tessera
    >>> tessera.load(example, only=["step"])
    {'step': 7}
    """
    with open(
        path, threads=threads, partial=partial, ignore_index=ignore_index, rank=rank, accept=accept
    ) as checkpoint:
        chosen = checkpoint.only(only) if only else checkpoint
        return chosen.load(framework=framework, dtype=dtype, mmap=mmap, progress=progress)


def save_file(
    state: Any,
    path: Path,
    *,
    kind: str | None = None,
    overwrite: bool = True,
    single_writer: bool = False,
    keep_duplicates: bool = False,
    threads: int = 2,
    progress: Progress | None = None,
) -> SaveReport:
    """Saves a tree of tensors and values by this process: one file, or a DCP directory.

    The name says the kind (`.safetensors`, `.pt`; else DCP), unless `kind` does. The target appears
    whole or not at all, with digests. Arrays of numpy become tensors, except those that `load` has
    made of a pickle's, and views of them that are plain arrays, too: these stay what they were. In a safetensors file they are
    values of its metadata, which a warning says: `numpy.array(x)` is a tensor. Scalars of numpy stay numbers of
    numpy, its texts become Python's; its dates, times and long doubles are `unsupported`. A safetensors
    file has a tensor of several names (tied weights) once, and notes the others as safetensors'
    `save_model` does; with `keep_duplicates` it has it under each name.

    >>> import numpy, tessera
    >>> report = tessera.save_file({"w": numpy.zeros(3)}, directory + "/model.safetensors")
    >>> report.files
    1
    """
    options = {
        "kind": kind,
        "overwrite": overwrite,
        "single_writer": single_writer,
        "keep_duplicates": keep_duplicates,
        "threads": threads,
    }
    described = DescribedState(state)
    report = SaveReport(**_core.save(described.tree(), os.fspath(path), options, None, progress))
    described.warn(report)
    return report


class DescribedState:
    """What is saved, and how many arrays of it are values."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._arrays = 0

    def tree(self) -> Any:
        """Of `_core`."""
        try:
            return _core.make_tree(self._state, self._describe)
        finally:
            self._state = None  # also that of a save that fails, whose future may be kept

    def _describe(self, thing: Any) -> Description:
        found = describe(thing)
        self._arrays += is_array(found)
        return found

    def warn(self, report: SaveReport) -> None:
        """For the caller's caller."""
        if self._arrays and report.values_in_metadata:
            warnings.warn(
                f"{self._arrays} arrays that were values where they were loaded are values here, too: they travel in the file's metadata, "
                "which only tessera reads; numpy.array(x) makes a tensor of one",
                stacklevel=3,
            )


def convert(
    source: Path | Checkpoint,
    target: Path,
    *,
    to: str | None = None,
    only: Sequence[str] = (),
    rename: Sequence[str] = (),
    dtype: Any = None,
    dequantize: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> ConvertReport:
    """Streams a checkpoint of any kind into another, in bounded memory.

    `to` is the kind, if the target's name does not say it. `only` takes what it takes in `load`, and
    "model" and "optim" wherever they lie. `rename` has rules `RE=>TO`: matches of RE, in RE2's syntax,
    become TO, in which `\\1` and `$1` are its first group. `slice` has rules like "embed[0:10]": of that
    tensor those rows alone. The other options are those of the command: `ranks`, `overwrite`,
    `resume`, `threads`, `memory` (bytes), `max_shard_size` (bytes), `keep_duplicates`, `allow_wrap`,
    `single_writer`, `unit`, `orig_params`, `olmo_safetensors`, `model_only`, `config`, `header_limit`,
    `part`, `raw`, `partial`, `ignore_index`, `rank`, `accept`.

    >>> import tessera
    >>> report = tessera.convert(example, directory + "/model.safetensors", only=["model"])
    >>> report.tensors
    1
    """
    _require_known(options)
    options.update(
        slice=listed(options.get("slice", ())),
        accept=listed(options.get("accept", ())),
        to=to,
        only=listed(only),
        rename=listed(rename),
        dtype=None if dtype is None else name_of_dtype(dtype),
        dequantize=None if dequantize is None else name_of_dtype(dequantize),
    )
    if isinstance(source, Checkpoint):
        made = _core.convert_opened(source._core, os.fspath(target), options, progress)
    else:
        made = _core.convert(os.fspath(source), os.fspath(target), options, progress)
    return ConvertReport(**made)


_CONVERT_OPTIONS = frozenset(
    (
        "accept",
        "allow_wrap",
        "config",
        "header_limit",
        "ignore_index",
        "keep_duplicates",
        "max_shard_size",
        "memory",
        "model_only",
        "olmo_safetensors",
        "orig_params",
        "overwrite",
        "part",
        "partial",
        "rank",
        "ranks",
        "raw",
        "resume",
        "single_writer",
        "slice",
        "threads",
        "unit",
    )
)


def _require_known(options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - _CONVERT_OPTIONS)
    if unknown:
        raise TypeError(f"convert() has no option {unknown[0]!r}: {', '.join(sorted(_CONVERT_OPTIONS))}")


def verify(
    path: Path,
    *,
    read_data: bool = True,
    threads: int = 2,
    partial: bool = False,
    ignore_index: bool = False,
    rank: int | None = None,
    accept: Sequence[str] = (),
    progress: Progress | None = None,
) -> VerifyReport:
    """Checks structure, coverage, sizes and every checksum that there is.

    A checkpoint that cannot be opened is a finding, not an exception, and so is a file that is missing, unless `partial`
    leaves out what lies there. `ignore_index`, `rank` and `accept` are those of `open`.

    >>> import tessera
    >>> tessera.verify(example).findings
    []
    """
    how = {"partial": partial, "ignore_index": ignore_index, "rank": rank, "accept": listed(accept)}
    made = _core.verify(os.fspath(path), read_data, threads, how, progress)
    made["findings"] = [Finding(code, text) for code, text in made["findings"]]
    made["files"] = [CheckedBytes(*checked) for checked in made["files"]]
    return VerifyReport(**made)


def diff(a: Path | Checkpoint, b: Path | Checkpoint, *, progress: Progress | None = None) -> list[Difference]:
    """Compares two checkpoints of any kinds by name, and tensors bit for bit. Empty: they are equal.

    >>> import tessera
    >>> tessera.diff(example, example)
    []
    """
    left = a if isinstance(a, Checkpoint) else open(a)
    right = b if isinstance(b, Checkpoint) else open(b)
    found = _core.diff(left._core, right._core, progress)
    return [Difference(kind, name, text) for kind, name, text in found]


def stats(
    checkpoint: Path | Checkpoint,
    *,
    only: Sequence[str] = (),
    threads: int = 2,
    progress: Progress | None = None,
) -> list[TensorStats]:
    """Counts and sums the numbers of each tensor, or of those that `only` chooses: NaN, infinities, zeros, range, mean,
    standard deviation, norm. Values are left out. The same bits for any number of threads.

    >>> import tessera
    >>> [(tensor.name, tensor.nan, tensor.suspect) for tensor in tessera.stats(example)]
    [('model.w', 0, None)]
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open(checkpoint)
    chosen = opened.only(only) if only else opened
    return [TensorStats(**made) for made in _core.stats(chosen._core, threads, progress)]


def scan(path: Path, *, allow: Sequence[str] = ()) -> ScanReport:
    """Lists every class and function that the pickles name, without running anything. `allow` has names or globs of your
    own classes ("my_project.*"), which do not count as unknown.

    >>> import tessera
    >>> tessera.scan(example).clean
    True
    """
    made = _core.scan(os.fspath(path), list(allow))
    made["names"] = [ScannedName(*name) for name in made["names"]]
    return ScanReport(**made)


def seal(
    path: Path,
    *,
    threads: int = 2,
    ignore_index: bool = False,
    accept: Sequence[str] = (),
    progress: Progress | None = None,
) -> SealReport:
    """Adds digests to a checkpoint that somebody else wrote. From then on every read is checked. `ignore_index` and
    `accept` are those of `open`; digests are of all files, so there is neither `partial` nor `rank`.

    >>> import tessera
    >>> tessera.seal(example).was_sealed
    True
    """
    how = {"ignore_index": ignore_index, "accept": listed(accept)}
    return SealReport(**_core.seal(os.fspath(path), threads, how, progress))
