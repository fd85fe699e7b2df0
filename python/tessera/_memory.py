"""Memory of numpy, torch and whatever speaks DLPack, for the bytes of tensors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera import _core
from tessera._errors import InvalidArgumentError, UnsupportedError

#: Bytes of an element, by torch's name of the dtype.
SIZES: dict[str, int] = {name: size for name, size, _ in _core.DTYPES}
#: safetensors' names, by torch's.
SAFETENSORS: dict[str, str] = {name: short for name, _, short in _core.DTYPES}
_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_NOT_OF_NUMPY = ("complex32", "float4_e2m1fn_x2")
_BY_TORCH = "read tensors of torch, by framework='torch' or .torch()"


@dataclass(frozen=True)
class Memory:
    """Where elements go: `owner` has it for as long as this lives."""

    owner: Any
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    def request(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """What `_core` reads: this box of a tensor, into this memory, which has to be kept until then."""
        return (name, (offsets, sizes), self.address, self.dtype, self.shape, self.strides)


def _imported(name: str, what_for: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{what_for} needs {name}, which is not installed") from error


def numpy_dtype(dtype: str) -> Any:
    """numpy's dtype of this name of torch's."""
    numpy = _imported("numpy", "reading into arrays")
    if dtype in _OF_ML_DTYPES:
        try:
            return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), dtype))
        except ImportError as error:
            raise UnsupportedError(
                f"unsupported: numpy has no {dtype} without the package ml_dtypes: install that, or {_BY_TORCH}"
            ) from error
    if dtype in _NOT_OF_NUMPY:
        raise UnsupportedError(f"unsupported: numpy has no {dtype}: {_BY_TORCH}")
    return numpy.dtype(dtype)


def torch_dtype(dtype: str) -> Any:
    """torch's dtype of this name."""
    torch = _imported("torch", "reading into tensors of torch")
    try:
        return getattr(torch, dtype)
    except AttributeError as error:
        raise UnsupportedError(f"unsupported: torch {torch.__version__} has no {dtype}") from error


def empty(shape: tuple[int, ...], dtype: str, framework: str) -> Any:
    """An array or tensor whose elements are not set."""
    if framework == "torch":
        return _imported("torch", "reading into tensors of torch").empty(shape, dtype=torch_dtype(dtype))
    return _imported("numpy", "reading into arrays").empty(shape, numpy_dtype(dtype))


def as_dtype(made: Any, dtype: str, framework: str) -> Any:
    """A copy, with elements of this type."""
    if framework == "torch":
        return made.detach().to(torch_dtype(dtype), copy=True)
    return made.astype(numpy_dtype(dtype))


def fill(target: Any, read: Callable[[str], Any]) -> None:
    """Copies what `read` gives in the framework of `target`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        target.detach().copy_(read("torch"))
    else:
        target[...] = read("numpy")


class Loaded:
    """Makes arrays or tensors of what `_core` has read into memory. Those of one storage share it."""

    def __init__(self, framework: str) -> None:
        self._is_torch = framework == "torch"
        self._storages: dict[int, Any] = {}

    def __call__(self, core: Any) -> Any:
        memory, address, offset, strides, conj, neg = core.memory()
        made = (self._tensor if self._is_torch else self._array)(core, memory, address, offset, strides)
        if conj:
            made = made.conj()
        if neg:
            made = made._neg_view() if self._is_torch else -made
        return made if not self._is_torch else _with_gradient(made, core)

    def _array(self, core: Any, memory: Any, address: int, offset: int, strides: tuple[int, ...]) -> Any:
        numpy = _imported("numpy", "loading arrays")
        dtype = numpy_dtype(core.dtype)
        if 0 in core.shape:
            return numpy.empty(core.shape, dtype)
        size = dtype.itemsize
        return numpy.ndarray(core.shape, dtype, memory, offset * size, tuple(stride * size for stride in strides))

    def _tensor(self, core: Any, memory: Any, address: int, offset: int, strides: tuple[int, ...]) -> Any:
        torch = _imported("torch", "loading tensors of torch")
        dtype = torch_dtype(core.dtype)
        if 0 in core.shape:
            return torch.empty(core.shape, dtype=dtype)
        if address not in self._storages:
            self._storages[address] = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=dtype)
        return made.set_(self._storages[address], offset, core.shape, strides)


def _with_gradient(tensor: Any, core: Any) -> Any:
    torch = sys.modules["torch"]
    if core.parameter:
        return torch.nn.Parameter(tensor, requires_grad=core.requires_grad)
    return tensor.requires_grad_() if core.requires_grad else tensor


def framework_of(name: str | None) -> str:
    """ "torch" or "numpy"; safetensors' own names count, too. None: torch where the program has imported it."""
    if name is None:
        return "numpy" if sys.modules.get("torch") is None else "torch"
    for framework, names in (("torch", ("torch", "pt", "pytorch")), ("numpy", ("numpy", "np"))):
        if name in names:
            return framework
    raise InvalidArgumentError(f"invalid_argument: there is no framework {name!r}: torch, numpy")


def name_of_dtype(dtype: Any) -> str:
    """Our name of a dtype of torch's or numpy's, of a class of numbers (`float`, `numpy.float32`), or of a name of one."""
    name = str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")
    if name not in SIZES or not getattr(dtype, "isnative", True):
        name = _name_of_numpys(dtype) or str(dtype)
    if name not in SIZES:
        raise UnsupportedError(f"unsupported: there is no dtype {name!r}; the names are torch's: {', '.join(SIZES)}")
    return name


_OF_PYTHON = {bool: "bool", complex: "complex128", float: "float64", int: "int64"}  # as torch and numpy take them


def _name_of_numpys(dtype: Any) -> str | None:
    """What numpy calls what it takes for a dtype; classes of numbers have a name without it."""
    if isinstance(dtype, type) and dtype in _OF_PYTHON:
        return _OF_PYTHON[dtype]
    try:
        made = importlib.import_module("numpy").dtype(dtype)
    except Exception:  # it takes it for none, or is not there
        return None
    return str(made.name) if made.isnative else None


def require_initialized(tensor: Any, torch: Any) -> None:
    """Throws `unsupported` for what a lazy module has before it ran once."""
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"unsupported: a {type(tensor).__name__}, which has no shape before its module has run once")


def memory_of(target: Any) -> Memory:
    """Throws `invalid_argument` or `unsupported` for what cannot be filled."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(target, torch.Tensor):
        return _of_torch(target, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        return _of_numpy(target)
    if hasattr(target, "__dlpack__"):
        return _of_numpy(from_dlpack(target))
    raise InvalidArgumentError(
        f"invalid_argument: {type(target).__name__} is no array of numpy, no tensor of torch, and has no __dlpack__"
    )


def _of_torch(tensor: Any, torch: Any) -> Memory:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(f"unsupported: memory of a {type(tensor).__name__}: give its local tensor")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UnsupportedError(f"unsupported: memory of a {tensor.layout} tensor on {tensor.device} cannot be filled")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError("unsupported: a conjugate or negative view cannot be filled: resolve it first")
    address = tensor.data_ptr()
    return Memory(tensor, address, name_of_dtype(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))


def _of_numpy(array: Any) -> Memory:
    if not array.flags.writeable:
        raise InvalidArgumentError("invalid_argument: the array is read-only")
    if not array.dtype.isnative:
        raise UnsupportedError(f"unsupported: an array of dtype {array.dtype}, whose bytes are swapped")
    dtype = name_of_dtype(array.dtype)
    size = SIZES[dtype]
    if any(stride % size for stride in array.strides) or not array.flags.aligned:
        raise UnsupportedError("unsupported: the array's elements are not aligned")
    return Memory(array, array.ctypes.data, dtype, array.shape, tuple(stride // size for stride in array.strides))


def from_dlpack(thing: Any) -> Any:
    """An array of numpy over the memory of whatever speaks DLPack."""
    numpy = _imported("numpy", "memory that speaks DLPack")
    try:
        return numpy.from_dlpack(thing)
    except (BufferError, RuntimeError, TypeError) as error:
        raise UnsupportedError(f"unsupported: memory that numpy does not take by DLPack: {error}") from error
