"""State dicts of ranks as `_core` takes them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Shard

from tessera._describe import Description, describe, of_mapping
from tessera._errors import MismatchError, UnsupportedError
from tessera._memory import SIZES, require_initialized
from tessera.torch._plain import dtype_name, is_plain, saved


class LeftToTorch(Exception):
    """The state holds what torch's own planner has to resolve: tensors on a device, sparse, quantized; objects that plan themselves."""


def states_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With the state of each `Stateful` in its place."""
    return {key: item.state_dict() if isinstance(item, Stateful) else item for key, item in state_dict.items()}


class Leaf:
    """What a state dict has at `path`: in `container`, by `key`."""

    def __init__(self, path: tuple[str, ...], container: Any, key: Any) -> None:
        self.name = ".".join(path)
        self.path = path
        self.container = container
        self.key = key

    @property
    def value(self) -> Any:
        return self.container[self.key]


def leaves(container: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """As torch flattens: dicts, and lists that hold tensors or dicts."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    for key, value in list(items):
        deeper = (*path, str(key))
        if isinstance(value, Mapping) or (isinstance(value, list) and _is_taken_apart(value)):
            yield from leaves(value, deeper)
        else:
            yield Leaf(deeper, container, key)


def _is_taken_apart(values: list[Any]) -> bool:
    return any(
        isinstance(value, (Mapping, torch.Tensor)) or (isinstance(value, list) and _is_taken_apart(value))
        for value in values
    )


def _mappings_taken_apart(container: Any) -> set[int]:
    """Those that `leaves` goes down into, by identity. A list above one is taken apart, too. The state may contain itself."""
    seen: set[int] = set()
    rest = [container]
    while rest:
        found = rest.pop()
        if isinstance(found, (Mapping, list)) and id(found) not in seen:
            seen.add(id(found))
            rest.extend(found.values() if isinstance(found, Mapping) else found)
    return seen


def speaks(thing: Any, question: str) -> bool:
    """Whether it answers one of the questions of torch's protocol for sharded objects itself. A DTensor asks its local part."""
    asked = thing._local_tensor if isinstance(thing, DTensor) else thing
    return not isinstance(asked, type) and hasattr(asked, question)


def parts_of(name: str, thing: Any) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Where each part that this rank holds begins in the whole tensor, and the part: as torch asks for them.

    Raises `mismatch` for what has no such parts and for a part that is not what it is said to be, without the key.
    """
    if isinstance(thing, DTensor) and thing.device_mesh.get_coordinate() is None:
        return  # other ranks hold it
    for number, chunk in enumerate(_chunks_of(thing)):
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        part = find_tensor_shard(thing, MetadataIndex(name, chunk.offsets, number))
        if tuple(part.shape) == sizes:
            if part.numel() > 0 or _is_empty(thing):
                yield offsets, part
        elif part.numel() > 0 or 0 not in sizes:  # one without elements may have any shape
            raise MismatchError(
                f"mismatch: a part of a {type(thing).__name__} is {tuple(part.shape)}, and {sizes} belong at {offsets}"
            )


def _chunks_of(thing: Any) -> list[ChunkStorageMetadata]:
    if isinstance(thing, DTensor) and any(placement.is_partial() for placement in thing.placements):
        raise UnsupportedError("unsupported: a DTensor of partial sums: redistribute it first")
    if not isinstance(thing, torch.Tensor) and not speaks(thing, "__create_chunk_list__"):
        raise MismatchError(f"mismatch: a {type(thing).__name__} has no elements of a tensor")
    return list(_create_chunk_list(thing))


def _is_empty(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and 0 in thing.size()


def describe_for_ranks(ranks: int, state: Any, from_devices: bool = False) -> Callable[[Any], Description]:
    """`describe` for `_core.make_tree` of this state, where so many ranks hold one tensor. `from_devices`: what is there is copied
    to memory of this process, and left to torch otherwise."""
    apart = _mappings_taken_apart(state)

    def described(thing: Any) -> Description:
        # torch takes every mapping apart that it comes to, a Counter, too. One in a tuple it pickles.
        if isinstance(thing, Mapping) and (type(thing) is not collections.Counter or id(thing) in apart):
            return of_mapping(thing)
        if speaks(thing, "__create_write_items__"):
            raise LeftToTorch
        try:
            return _described(thing, ranks, from_devices)
        except (MismatchError, UnsupportedError) as error:  # whose key `_core` knows
            return (error.code, error.text.removeprefix(f"{error.code}: "))

    return described


def _described(thing: Any, ranks: int, from_devices: bool) -> Description:
    if isinstance(thing, (DTensor, ShardedTensor)):
        return _sharded(thing, ranks, from_devices)
    if isinstance(thing, torch.Tensor):
        require_initialized(thing, torch)
    if isinstance(thing, torch.Tensor) and thing.is_nested:
        raise UnsupportedError("unsupported: a nested tensor")
    if isinstance(thing, torch.Tensor) and not is_plain(thing, from_devices):
        raise LeftToTorch
    # What becomes plain data elsewhere keeps its class here, as torch keeps it.
    found = describe(thing) if isinstance(thing, (torch.Tensor, torch.dtype)) else None
    if found is None or found[0] == "unsupported":
        return ("archive", _pickled(thing))
    return _of_its_own_elements(found) if found[0] == "tensor" else found


def _of_its_own_elements(found: tuple[Any, ...]) -> Description:
    """A tensor without the rest of its storage, which DCP does not keep: a copy of it would be as large."""
    what, address, _, offset, dtype, shape, strides, *rest = found
    return (what, address + offset * SIZES[dtype], _span(shape, strides) * SIZES[dtype], 0, dtype, shape, strides, *rest)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from its first one to its last one."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def _pickled(thing: Any) -> bytes:
    try:
        return saved(thing)
    except Exception as error:
        raise UnsupportedError(f"unsupported: torch.save cannot pickle a {type(thing).__name__}: {error}") from error


def _sharded(tensor: Any, ranks: int, from_devices: bool) -> Description:
    parts = []
    kept = []
    for offsets, part in parts_of("", tensor):
        part = part.detach()
        if not is_plain(part, from_devices):
            raise LeftToTorch
        part = part.cpu().resolve_conj().resolve_neg()
        kept.append(part)
        size = _span(part.shape, part.stride()) * part.element_size()
        parts.append((part.data_ptr(), size, 0, part.stride(), offsets, tuple(part.shape)))
    shape = tuple(tensor.shape if isinstance(tensor, DTensor) else tensor.size())
    placement = _placement(tensor, ranks) if isinstance(tensor, DTensor) else None
    return ("sharded", dtype_name(tensor), shape, parts, bool(tensor.requires_grad), placement, kept)


def _placement(tensor: DTensor, ranks: int) -> tuple[int, int, int] | None:
    """What each rank holds, where that follows from one cut over all ranks in their order."""
    mesh = tensor.device_mesh
    shards = [i for i, placement in enumerate(tensor.placements) if type(placement) is Shard]
    others = [placement for placement in tensor.placements if type(placement) is not Shard]
    if len(shards) > 1 or not all(placement.is_replicate() for placement in others):
        return None
    if mesh.size() != ranks or mesh.mesh.flatten().tolist() != list(range(ranks)):
        return None
    if not shards:
        return (1, 1, 0)
    (cut,) = shards
    shard = tensor.placements[cut]
    assert isinstance(shard, Shard)
    stride = 1
    for later in range(cut + 1, mesh.ndim):
        stride *= mesh.size(later)
    return (mesh.size(cut), stride, shard.dim)
