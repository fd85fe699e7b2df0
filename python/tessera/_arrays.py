"""numpy's arrays, scalars and dtypes out of what their pickles ask for: bytes with a shape, and nothing is called by name."""

from __future__ import annotations

import math
import re
from typing import Any

from tessera._values import Opaque

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before numpy 2, and since
_ARRAYS = {f"{module}._reconstruct" for module in _MODULES}
_SCALARS = {f"{module}.scalar" for module in _MODULES}
_NAMES = _ARRAYS | _SCALARS | {"numpy.dtype"}
# Booleans, numbers and texts: no objects, records or dates.
_DTYPE = re.compile("[biufcSU][0-9]{1,9}")
_BEFORE_SIZES = 5  # of a dtype's state: version, byte order, and what plain dtypes have None for


def array_of(value: Opaque) -> Any:
    """The array, scalar or dtype that `value` describes. None: it describes another thing, or numpy is not there."""
    if value.name not in _NAMES:
        return None
    try:
        if value.name in _ARRAYS:
            return _array(value)
        if value.name in _SCALARS and value.state is None:
            dtype, content = value.arguments or ()
            return _filled((), _dtype(dtype), content, False)[()]
        return _dtype(value)
    except (ImportError, OverflowError, TypeError, ValueError):
        return None


def _dtype(value: Any) -> Any:
    import numpy

    if not isinstance(value, Opaque) or value.name != "numpy.dtype":
        raise TypeError
    (text, *_), (_, order, *plain) = value.arguments or (), value.state[:_BEFORE_SIZES]
    if not _DTYPE.fullmatch(text) or order not in ("<", ">", "|", "=") or any(part is not None for part in plain):
        raise TypeError
    return numpy.dtype(order + text)


def _array(value: Opaque) -> Any:
    kind = (value.arguments or (None,))[0]
    if not isinstance(kind, Opaque) or kind.name != "numpy.ndarray" or kind.arguments is not None:
        raise TypeError
    _, shape, dtype, is_fortran, content = value.state
    return _filled(shape, _dtype(dtype), content, is_fortran)


def _filled(shape: Any, dtype: Any, content: Any, is_fortran: Any) -> Any:
    import numpy

    if not all(type(size) is int and size >= 0 for size in shape) or type(content) is not bytes:
        raise TypeError
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError
    # With memory of its own, which may be written.
    return numpy.ndarray(shape, dtype, content, order="F" if is_fortran else "C").copy("K")
