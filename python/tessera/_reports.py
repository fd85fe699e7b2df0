"""What calls report, with the fields of the command's `--json`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class IoReport:
    """What a call has moved.

    >>> with tessera.open(example) as checkpoint:
    ...     checkpoint["model.w"].read_into(numpy.zeros((3, 4), "float32")).bytes_needed
    48
    """

    #: Bytes of the elements that were asked for.
    bytes_needed: int = 0
    #: From the store, without metadata.
    bytes_read: int = 0
    #: Read, but covered by no checksum.
    bytes_unchecked: int = 0
    bytes_written: int = 0
    #: To object stores and web servers, by this process while the call ran.
    requests: int = 0
    retries: int = 0
    bytes_again: int = 0


@dataclass(frozen=True)
class File:
    """An object that belongs to a checkpoint.

    >>> with tessera.open(example) as checkpoint:
    ...     [file.name for file in checkpoint.files][0]
    '.metadata'
    """

    name: str
    size: int


@dataclass(frozen=True)
class SaveReport(IoReport):
    """What `save_file` has done.

    >>> tessera.save_file({"step": 1}, directory + "/step.pt").files
    1
    """

    files: int = 0
    total_bytes: int = 0
    #: Of a safetensors file, whose metadata has them: those that are no tensors.
    values_in_metadata: int = 0


@dataclass(frozen=True)
class ConvertReport(IoReport):
    """What `convert` has done.

    >>> tessera.convert(example, directory + "/all.pt").tensors
    1
    """

    #: What was written: the file, or the directory of a kind that is one.
    target: str = ""
    tensors: int = 0
    #: Values that are no tensors and travel in the file's metadata.
    values_in_metadata: int = 0
    #: Of the target, made by an interrupted run and found right.
    bytes_resumed: int = 0
    #: What the caller should know.
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a checkpoint.

    >>> tessera.verify("/no/such/checkpoint").findings[0].code
    'not_found'
    """

    code: str
    text: str


@dataclass(frozen=True)
class CheckedBytes:
    """How bytes of a file were checked.

    >>> {checked.checked_by for checked in tessera.verify(example).files}
    {'digests'}
    """

    file: str
    #: "digests" (of blocks), "crc32" (of an archive's records), "sha256" or "git_sha1" (by which the Hugging Face Hub
    #: names the file) or "nothing".
    checked_by: str
    bytes: int


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` has found.

    >>> tessera.verify(example).tensors
    1
    """

    #: Empty: all is well.
    findings: list[Finding]
    tensors: int
    #: Checked by a checksum.
    bytes: int
    #: The format has no checksum for these.
    bytes_unchecked: int
    #: Both, by file and by what they were compared with.
    files: list[CheckedBytes]


@dataclass(frozen=True)
class Difference:
    """Something in which two checkpoints differ.

    >>> [(found.kind, found.name) for found in tessera.diff(example, existing)]
    [('missing', 'model.w'), ('value', 'step')]
    """

    #: "missing" (only in the first), "extra" (only in the second), "shape", "dtype", "value", "type".
    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class TensorStats:
    """What numbers a tensor holds. A complex element is two, its real and its imaginary part.

    >>> tessera.stats(example)[0].numbers
    12
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    #: 0 also of a storage of quantized elements, whose bits are no numbers by themselves.
    numbers: int
    nan: int
    positive_infinity: int
    negative_infinity: int
    #: The index of the first element that is NaN or infinite.
    first_not_finite: tuple[int, ...] | None
    zeros: int
    #: Of the finite numbers, as all that follows; None where there are none.
    smallest: int | float | None
    largest: int | float | None
    mean: float | None
    #: The root of the mean squared difference from the mean.
    std: float | None
    #: The root of the sum of the squares.
    norm: float | None
    #: e, where the median magnitude of what is not zero is from 2**e to below 2**(e + 1).
    median_exponent: int | None
    #: How many numbers have such a magnitude, for e from -47 (and all below) to 16 (and all above); zeros are not among them.
    exponents: list[int]
    #: "no numbers", "empty", "not finite", "zero", "constant", "tiny" (the median magnitude is below 2**-50) or "huge" (2**50
    #: and more): the first that is true.
    suspect: str | None


@dataclass(frozen=True)
class ScannedName:
    """A class or function that pickles name.

    >>> tessera.scan(example).names[0].kind
    'vetted'
    """

    name: str
    #: "vetted" (used like this it does nothing but build data), "allowed" (by the caller), "unknown" (nobody has looked
    #: at it: it may run code) or "dangerous".
    kind: str
    pickles: int
    first: str
    #: Why a name that is vetted otherwise is not here: how it is used.
    how: str


@dataclass(frozen=True)
class ScanReport:
    """What `scan` has found.

    >>> tessera.scan(example).pickles
    3
    """

    names: list[ScannedName]
    pickles: int
    #: What could not be scanned to its end, and what Python may read and Tessera does not.
    problems: list[str]

    @property
    def dangerous(self) -> list[ScannedName]:
        """The names that run code, open files or reach the system."""
        return [name for name in self.names if name.kind == "dangerous"]

    @property
    def unknown(self) -> list[ScannedName]:
        """The names at which nobody has looked."""
        return [name for name in self.names if name.kind == "unknown"]

    @property
    def clean(self) -> bool:
        """Nothing unknown, nothing dangerous, and no problem."""
        return not (self.dangerous or self.unknown or self.problems)


@dataclass(frozen=True)
class SealReport:
    """What `seal` has done.

    >>> tessera.seal(example).files
    3
    """

    #: All files had digests already.
    was_sealed: bool
    #: None: the digests are inside the file.
    side_file: str | None
    files: int
    bytes: int
