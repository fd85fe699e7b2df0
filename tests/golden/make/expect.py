"""Says how PyTorch reads torch.save files: every tensor's name, type, geometry and the CRC-32 of its elements.

usage: expect.py DIRECTORY FILE.pt ... > torch_expected.json     (names are relative to DIRECTORY)
"""
import json
import os
import sys
import warnings
import zlib

import torch
import torch.distributed.tensor  # DTensors in the files

warnings.simplefilter("ignore")


def raw(tensor):
    """The stored elements, row-major: lazy bits are not applied."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


def walk(name, value, out):
    if isinstance(value, dict):
        for key, item in value.items():
            walk(f"{name}.{key}", item, out)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for index, item in enumerate(value):
            walk(f"{name}.{index}", item, out)
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu":
            out[name] = {
                "dtype": str(value.dtype)[6:], "shape": list(value.shape), "strides": list(value.stride()),
                "offset": value.storage_offset(), "requires_grad": value.requires_grad,
                "parameter": isinstance(value, torch.nn.Parameter), "conj": value.is_conj(), "neg": value.is_neg(),
                "crc32": zlib.crc32(raw(value)),
            }


lines = []
for name in sys.argv[2:]:
    tensors = {}
    walk("", torch.load(os.path.join(sys.argv[1], name), weights_only=False), tensors)
    rows = [f"  {json.dumps(key)}: {json.dumps(tensors[key])}" for key in sorted(tensors)]
    lines.append(json.dumps(name) + ": {\n" + ",\n".join(rows) + "\n}")
print("{\n" + ",\n".join(lines) + "\n}")
