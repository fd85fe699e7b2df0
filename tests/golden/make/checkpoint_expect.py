"""Writes expected.json beside the DCP checkpoints of tests/golden/checkpoints: PyTorch's own reading.

    python checkpoint_expect.py tests/golden/checkpoints

The checkpoints were made by e1.py, e2.py, e3.py (c1), mp1.py (c2*), mp2.py (fsdp1*), g4.py and hand.py.
For every name that DCP flattens to: dtype, shape and CRC-32 of a tensor's elements, or the repr of a value.
"""
import json
import logging
import pathlib
import sys
import warnings
import zlib

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def read(directory):
    tree = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(tree, storage_reader=dcp.FileSystemReader(directory), planner=planner, no_dist=True)
    mappings = dcp.FileSystemReader(directory).read_metadata().planner_data
    flat = {}
    for name, path in mappings.items():
        value = tree
        for part in path:
            value = value[part]
        flat[name] = value
    return flat


def describe(value):
    if not isinstance(value, torch.Tensor):
        return {"value": repr(value)}
    raw = bytes(value.detach().clone(memory_format=torch.contiguous_format).untyped_storage())
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "crc32": zlib.crc32(raw)}


root = pathlib.Path(sys.argv[1])
expected = {
    directory.name: {name: describe(value) for name, value in sorted(read(directory).items())}
    for directory in sorted(root.iterdir())
    if directory.is_dir()
}
(root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
