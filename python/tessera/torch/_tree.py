"""State dicts of ranks as `_core` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tessera._describe import Description, describe
from tessera._errors import UnsupportedError
from tessera.torch._plain import dtype_name, is_plain, saved


class LeftToTorch(Exception):
    """The state holds tensors that torch's own planner has to resolve: on a device, sparse, quantized."""


def states_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With the state of each `Stateful` in its place."""
    return {key: item.state_dict() if isinstance(item, Stateful) else item for key, item in state_dict.items()}


def parts_of(tensor: Any) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Where each part that this rank holds begins in the whole tensor, and the part."""
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise UnsupportedError("unsupported: a DTensor of partial sums: redistribute it first")
        local = tensor.to_local()
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(sizes) == tuple(local.shape) and (local.numel() > 0 or tensor.numel() == 0):
            yield tuple(offsets), local
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
    else:
        yield (0,) * tensor.dim(), tensor


def describe_for_ranks(ranks: int) -> Callable[[Any], Description]:
    """`describe` for `_core.make_tree`, where so many ranks hold one tensor."""

    def described(thing: Any) -> Description:
        if isinstance(thing, (DTensor, ShardedTensor)):
            return _sharded(thing, ranks)
        if isinstance(thing, torch.Tensor) and not is_plain(thing):
            raise LeftToTorch
        # What becomes plain data elsewhere keeps its class here, as torch keeps it.
        found = describe(thing) if isinstance(thing, (torch.Tensor, torch.dtype, Mapping)) else None
        return ("archive", saved(thing)) if found is None or found[0] == "unsupported" else found

    return described


def _sharded(tensor: Any, ranks: int) -> Description:
    parts = []
    kept = []
    for offsets, part in parts_of(tensor):
        part = part.detach()
        if not is_plain(part):
            raise LeftToTorch
        part = part.resolve_conj().resolve_neg()
        storage = part.untyped_storage()
        kept.append(part)
        parts.append(
            (storage.data_ptr(), storage.nbytes(), part.storage_offset(), part.stride(), offsets, tuple(part.shape))
        )
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
