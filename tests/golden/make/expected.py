"""How expected.json describes what PyTorch reads: by a leaf's name its dtype, shape and CRC-32, or its repr."""
import zlib

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def is_plain(value):
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(is_plain(part) for item in value.items() for part in item)
    return value is None or type(value) in (bool, int, float, str, bytes)


def describe(value):
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return {"value": repr(value)} if is_plain(value) else {"object": type(value).__name__}
    raw = bytes(value.detach().clone(memory_format=torch.contiguous_format).untyped_storage())
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "crc32": zlib.crc32(raw)}


def dcp_tree(reader):
    """The tree of a checkpoint, as PyTorch's own reader rebuilds it without a process group."""
    tree = {}
    _load_state_dict(tree, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def dcp_leaves(reader):
    """Every leaf by the name that DCP flattens it to."""
    tree = dcp_tree(reader)
    leaves = {}
    for name, path in (reader.read_metadata().planner_data or {name: (name,) for name in tree}).items():
        value = tree
        for part in path:
            value = value[part]
        leaves[name] = value
    return leaves
