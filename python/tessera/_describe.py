"""What `_core` has to know of objects that are saved."""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from typing import Any

from tessera import _arrays, _known, _memory
from tessera._errors import UnsupportedError
from tessera._values import Opaque

Description = tuple[Any, ...] | None


def describe(thing: Any) -> Description:
    """As `tree_of` of python/src/trees.h wants it; None for what is no data."""
    try:
        return _described(thing)
    except UnsupportedError as error:  # whose key `_core` knows
        return ("unsupported", error.text.removeprefix("unsupported: "))


def is_array(found: Description) -> bool:
    """Whether it says that the thing is an array of numpy and no tensor."""
    return found is not None and found[0] == "value" and isinstance(found[1], Opaque) and found[1].name in _arrays.ARRAYS


def _described(thing: Any) -> Description:
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(thing, torch.Tensor):
            return _of_tensor(thing, torch)
        if isinstance(thing, torch.dtype):
            return ("global", "torch", str(thing).removeprefix("torch."))
    known = _known.described(thing)
    if known is not None:
        return known
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(thing, (numpy.ndarray, numpy.generic)):
        return _of_scalar(thing) if isinstance(thing, numpy.generic) else _of_array(thing)
    if isinstance(thing, Mapping):
        return of_mapping(thing)
    if hasattr(thing, "__dlpack__"):
        return _of_array(_memory.from_dlpack(thing))
    return None


_PLAIN = (bool, bytes, complex, float, int, str)


def _of_scalar(scalar: Any) -> Description:
    value = scalar.item()
    # A date or a time may become a number, whose unit nobody knows, and another type may become a scalar again.
    if type(value) not in _PLAIN or scalar.dtype.kind in "mM":
        raise UnsupportedError(f"unsupported: a scalar of numpy of dtype {scalar.dtype}: Python has no number or text like it")
    return ("value", value)


def of_mapping(thing: Mapping[Any, Any]) -> Description:
    """A dict of the kind that a checkpoint has for it."""
    if isinstance(thing, collections.OrderedDict):
        return ("ordered_dict", dict(thing), getattr(thing, "_metadata", None))
    if isinstance(thing, collections.defaultdict):
        factory = thing.default_factory
        name = factory.__name__ if isinstance(factory, type) and factory.__module__ == "builtins" else None
        return ("default_dict", dict(thing), name)
    return ("value", dict(thing))


def _of_tensor(tensor: Any, torch: Any) -> Description:
    _memory.require_initialized(tensor, torch)
    try:
        return _of_elements(tensor, torch)
    except (MemoryError, UnsupportedError):
        raise
    except Exception as error:  # torch's: nested tensors, those of its transforms, without storage
        why = str(error).partition("\n")[0]
        raise UnsupportedError(f"unsupported: a {type(tensor).__name__} whose elements torch does not give: {why}") from error


def _of_elements(tensor: Any, torch: Any) -> Description:
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.device.type == "meta":
        raise UnsupportedError(f"unsupported: a {plain.layout} tensor of {plain.dtype} on {plain.device}")
    if type(plain) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedError(f"unsupported: a {type(plain).__name__}: give its local tensor")
    plain = plain.cpu().resolve_conj().resolve_neg()
    storage = plain.untyped_storage()
    dtype = _memory.name_of_dtype(plain.dtype)
    return (
        "tensor",
        storage.data_ptr(),
        storage.nbytes(),
        plain.storage_offset(),
        dtype,
        tuple(plain.shape),
        plain.stride(),
        bool(tensor.requires_grad),
        isinstance(tensor, torch.nn.Parameter),
        plain,
    )


def _of_array(array: Any) -> Description:
    numpy = sys.modules["numpy"]
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise UnsupportedError("unsupported: a masked array, whose mask would be lost: give its data and its mask")
    plain = numpy.ascontiguousarray(array).reshape(array.shape)
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    dtype = _memory.name_of_dtype(plain.dtype)
    strides = tuple(stride // plain.dtype.itemsize for stride in plain.strides)
    return ("tensor", plain.ctypes.data, plain.nbytes, 0, dtype, plain.shape, strides, False, False, plain)
