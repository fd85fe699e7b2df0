"""Basic indexing of numpy, as the box of elements that it needs and what is done with that."""

from __future__ import annotations

import operator
from typing import Any

Shape = tuple[int, ...]


def box_of(index: Any, shape: Shape) -> tuple[Shape, Shape, tuple[Any, ...]]:
    """(offsets, sizes, rest): `tensor[index]` is `box[rest]`, for the box of these offsets and sizes."""
    parts = _one_per_dimension(index if isinstance(index, tuple) else (index,), len(shape))
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[int | slice | None] = []
    dimension = 0
    for part in parts:
        if part is None:
            rest.append(None)
            continue
        begin, count, left = _in_dimension(part, shape[dimension], dimension)
        offsets.append(begin)
        sizes.append(count)
        rest.append(left)
        dimension += 1
    return tuple(offsets), tuple(sizes), tuple(rest)


def _one_per_dimension(parts: tuple[Any, ...], dimensions: int) -> list[Any]:
    ellipses = sum(part is Ellipsis for part in parts)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = sum(part is not None and part is not Ellipsis for part in parts)
    if given > dimensions:
        raise IndexError(f"too many indices: the tensor has {dimensions} dimensions, {given} were indexed")
    if not ellipses:
        parts = (*parts, Ellipsis)
    whole: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            whole.extend([slice(None)] * (dimensions - given))
        else:
            whole.append(part)
    return whole


def _in_dimension(part: Any, size: int, dimension: int) -> tuple[int, int, int | slice]:
    """(begin, count, what picks the wanted elements among these)."""
    if isinstance(part, slice):
        wanted = range(size)[part]
        if not wanted:
            return 0, 0, slice(None)
        low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1])
        return low, high - low + 1, slice(None, None, wanted.step)
    number = _number(part)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dimension {dimension} with size {size}")
    return number % size, 1, 0


def _number(part: Any) -> int:
    try:
        if not isinstance(part, bool):
            return operator.index(part)
    except TypeError:
        pass
    raise TypeError(
        f"a tensor is indexed by integers, slices, '...' and None, not by {type(part).__name__}: read it first"
    )
