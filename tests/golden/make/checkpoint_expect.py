"""Writes expected.json beside the checkpoints of tests/golden/checkpoints: PyTorch's own reading.

    python checkpoint_expect.py tests/golden/checkpoints

The checkpoints were made by e1.py, e2.py, e3.py (c1), mp1.py (c2*), mp2.py (fsdp1*), g4.py, hand.py, qz.py,
olmo_st.py, and the small files by e5.py and legfmt.py.
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
import torch.distributed.tensor  # DTensors in the files
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def read(path):
    if path.is_dir() and (path / ".metadata").exists():
        return read_dcp(path)
    if path.suffix == ".pt":
        tree = torch.load(path, weights_only=False)
        return flatten_state_dict(tree)[0] if isinstance(tree, dict) else {}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def read_dcp(directory):
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


def is_plain(value):
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def describe(value):
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return {"value": repr(value)} if is_plain(value) else {"object": type(value).__name__}
    raw = bytes(value.detach().clone(memory_format=torch.contiguous_format).untyped_storage())
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "crc32": zlib.crc32(raw)}


root = pathlib.Path(sys.argv[1])
expected = {
    path.name: {name: describe(value) for name, value in sorted(read(path).items())}
    for path in sorted(root.iterdir())
    if path.name != "expected.json"
}
(root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
