"""numpy's arrays, scalars and dtypes out of what their pickles ask for, and back: bytes with a shape, and nothing is called by name."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from tessera._memory import SIZES
from tessera._values import Opaque

# What numpy has, and what Python can multiply in no time.
_MOST_DIMENSIONS = 64
_MOST_BITS = 63

# Private modules of numpy, before numpy 2 and since.
_CORES = ("numpy.core", "numpy._core")
#: By which arrays are written.
ARRAYS: frozenset[str] = frozenset(f"{core}.multiarray._reconstruct" for core in _CORES)
_SCALARS = frozenset(f"{core}.multiarray.scalar" for core in _CORES)
_BUFFERS = frozenset(f"{core}.numeric._frombuffer" for core in _CORES)  # since protocol 5
#: What `array_of` may know.
NAMES: frozenset[str] = ARRAYS | _SCALARS | _BUFFERS | {"numpy.dtype"}
# Booleans, numbers and texts: no objects, records or dates.
_DTYPE = re.compile("[biufcSU][0-9]{1,9}")


class _Pickled(bytearray):
    """The memory of an array that a pickle described as one of numpy. So it is written back as one, and not as a tensor."""


def array_of(value: Opaque, texts: bool = True) -> Any:
    """The array, scalar or dtype that `value` describes. None: it describes another thing, or numpy is not there.

    Without `texts` those of booleans and numbers alone that a tensor may have.
    """
    if value.name not in NAMES or value.keywords or value.list_items or value.dict_items or value.by_new:
        return None
    try:
        if value.name in ARRAYS:
            return _array(value, texts)
        if value.state is None and value.name in _SCALARS:
            dtype, content = value.arguments or ()
            return _filled((), _dtype(dtype, texts), content, False)[()]
        if value.state is None and value.name in _BUFFERS:
            content, dtype, shape, order, *axes = value.arguments or ()
            if len(axes) != {"C": 0, "F": 0, "K": 1}[order]:
                raise TypeError
            filled = _filled(shape, _dtype(dtype, texts), content, order == "F")
            return _transposed(filled, *axes) if axes else filled
        return _dtype(value, texts)
    except (ImportError, LookupError, OverflowError, TypeError, ValueError):
        return None


def _dtype(value: Any, texts: bool) -> Any:
    import numpy

    if isinstance(value, numpy.dtype):  # made before, of a value of its own
        return value
    if not isinstance(value, Opaque) or value.name != "numpy.dtype":
        raise TypeError
    # Records and arrays inside, which plain dtypes have not. A ninth part is metadata.
    (text, *_), (_, order, *inside, _, _, _) = value.arguments or (), value.state
    if not _DTYPE.fullmatch(text) or order not in ("<", ">", "|", "=") or inside != [None, None, None]:
        raise TypeError
    dtype = numpy.dtype(order + text)
    if not texts and dtype.name not in SIZES:
        raise TypeError
    return dtype


def _array(value: Opaque, texts: bool) -> Any:
    kind = (value.arguments or (None,))[0]
    if not isinstance(kind, Opaque) or kind.name != "numpy.ndarray" or kind.arguments is not None:
        raise TypeError
    _, shape, dtype, is_fortran, content = value.state
    if type(is_fortran) is not bool or type(content) is not bytes:
        raise TypeError
    return _filled(shape, _dtype(dtype, texts), content, is_fortran)


def _filled(shape: Any, dtype: Any, content: Any, is_fortran: bool) -> Any:
    import numpy

    if type(shape) is not tuple or type(content) not in (bytes, bytearray):
        raise TypeError
    if len(shape) > _MOST_DIMENSIONS or not all(
        type(size) is int and size >= 0 and size.bit_length() <= _MOST_BITS for size in shape
    ):
        raise TypeError
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError
    # With memory of its own, which may be written.
    return numpy.ndarray(shape, dtype, _Pickled(content), order="F" if is_fortran else "C")


# Since numpy 2.4.
def _transposed(array: Any, axes: Any) -> Any:
    if type(axes) is not tuple or not all(type(axis) is int for axis in axes) or sorted(axes) != list(range(array.ndim)):
        raise TypeError
    return array.transpose(axes)


def opaque_of_numpy(thing: Any) -> Opaque | None:
    """What numpy's own pickle would say of a dtype, of a scalar, and of an array that `array_of` has made.

    None: it is another thing, or holds no booleans and numbers that a tensor may have.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(thing, numpy.dtype) and thing.name in SIZES:
        _, arguments, state = thing.__reduce__()
        return Opaque("numpy.dtype", arguments, state)
    if isinstance(thing, numpy.generic) and thing.dtype.name in SIZES and type(thing).__module__ == "numpy":
        function, arguments = thing.__reduce__()
        return Opaque(f"{function.__module__}.scalar", arguments)
    if type(thing) is numpy.ndarray and thing.dtype.name in SIZES and _is_pickled(thing):
        function, (_, *arguments), state = thing.__reduce__()
        return Opaque(f"{function.__module__}._reconstruct", (Opaque("numpy.ndarray"), *arguments), state)
    return None


def _is_pickled(array: Any) -> bool:
    while array is not None and not isinstance(array, _Pickled):
        array = getattr(array, "base", None)  # as_strided() puts an object of its own between
    return array is not None
