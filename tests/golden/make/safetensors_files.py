"""Writes dtypes.safetensors (every dtype, odd names), empty.safetensors and olmo.safetensors (names that are base64 of
pickled key paths, as OLMo makes them) with the safetensors library.

usage: safetensors_files.py OUT_DIRECTORY
"""
import base64
import pickle
import sys

import safetensors.torch
import torch

DTYPES = ("float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 "
          "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2").split()

tensors = {}
for i, name in enumerate(DTYPES):
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251) + 0
    tensors[name] = raw.view(dtype).reshape(3, 2)
tensors["scalar"] = torch.tensor(7.0)
tensors["none"] = torch.empty(0, 4)
tensors["none too"] = torch.empty(2, 0)
tensors["quote \" slash \\ / tab \t bell \x07 del \x7f"] = torch.ones(1)
tensors["größe 漢字 🙂"] = torch.ones(1, dtype=torch.int8)
tensors["../../etc/passwd"] = torch.ones(1, dtype=torch.int8)
out = sys.argv[1]
safetensors.torch.save_file(tensors, f"{out}/dtypes.safetensors", {"format": 'p"t\n\x1f'})
safetensors.torch.save_file({}, f"{out}/empty.safetensors")


def olmo_name(keys, pickled):
    return base64.urlsafe_b64encode(pickle.dumps((keys, pickled))).decode()


groups = torch.frombuffer(bytearray(pickle.dumps([{"lr": 0.1, "params": [0]}])), dtype=torch.uint8)
safetensors.torch.save_file({
    olmo_name(("transformer.wte.weight",), False): torch.ones(2),
    olmo_name(("state", 0, "step"), False): torch.tensor(1.0),
    olmo_name(("param_groups",), True): groups,
}, f"{out}/olmo.safetensors")
