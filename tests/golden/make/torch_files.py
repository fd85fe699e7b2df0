"""Writes kinds.pt, many.pt, a.b.c.pt, train.pt, nocrc.pt, item.pt, legacy.pt and script.pt with torch.save.

usage: torch_files.py OUT_DIRECTORY
"""
import collections
import io
import os
import pathlib
import random
import sys
import warnings

import numpy
import torch

warnings.simplefilter("ignore")
os.chdir(sys.argv[1])  # the file's stem becomes the archive's folder

DTYPES = ("float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 complex64 "
          "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2").split()


def of_dtype(name):
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
    return raw.view(dtype).reshape(3, 2)


base = torch.arange(24.0).reshape(4, 6)
tagged = torch.ones(2)
tagged.tag = "x"
parameter = torch.nn.Parameter(torch.full((3,), 2.0))
with_state = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
with_state.note = ["a", base]
shared = {"lr": 0.1}
module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

kinds = {
    "dtypes": {name: of_dtype(name) for name in DTYPES},
    "views": {
        "base": base, "rows": base[1:3], "columns": base[:, 2:4], "transposed": base.t(), "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(1000, 1000), "scalar": torch.tensor(3.5), "last": base[3, 5], "empty": torch.empty(0, 3),
        "empty view": base[4:, 6:], "one": base[:1, :1], "again": base, "channels": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    },
    "lazy": {"conj": torch.tensor([1 + 2j, 3 - 4j]).conj(), "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
             "conj too": torch.tensor([1j]).conj()},
    "grad": torch.ones(2, requires_grad=True),
    "parameter": parameter, "parameter again": parameter, "parameter with state": with_state,
    "tensor with state": tagged, "buffer": torch.nn.parameter.Buffer(torch.ones(2)),
    "storages": [torch.ones(3).untyped_storage(), torch.ones(3)._typed_storage(), torch.ones(2)._typed_storage()],
    "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "sparse": torch.eye(3).to_sparse(), "meta": torch.empty(2, device="meta"),
    "state_dict": module.state_dict(),
    "plain": [None, True, 1, -1, 255, 256, 65536, 2**31, -(2**63), 2**100, 1.5, float("nan"), 2 + 3j, "text", "größe", "",
              b"bytes", b"", bytearray(b"array"), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (), [], {}, {1, }, frozenset({2}),
              torch.Size([2, 3]), torch.float32, torch.float8_e4m3fn, torch.device("cpu"), torch.strided],
    "groups": [shared, shared, {"params": list(range(1500))}],
    "keys": {0: "int", "0": "text", 10: torch.ones(1), "cpu": "0", "storage": "cpu", (1, 2): "tuple", None: 1},
    "default": collections.defaultdict(dict, {1: {"step": torch.tensor(1.0)}}),
    "ordered": collections.OrderedDict(a=1, b=2),
}
torch.save(kinds, "kinds.pt")
torch.save({f"layer.{i}": torch.full((1 + i % 3,), float(i)) for i in range(300)}, "many.pt")
torch.save(1, "a.b.c.pt")
torch.save({  # as OLMo's train.pt
    "epoch": 0, "global_step": 5, "checkpoints": [pathlib.Path("/a/step5")],
    "rng": {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.random.get_rng_state()},
}, "train.pt")

stream = io.BytesIO()
torch.save(base[1:, 1:3].clone(), stream)
with open("item.pt", "wb") as out:
    out.write(stream.getvalue())

torch.serialization.set_crc32_options(False)
torch.save({"a": base, "none": torch.empty(0)}, "nocrc.pt")
torch.serialization.set_crc32_options(True)

torch.save({"a": base}, "legacy.pt", _use_new_zipfile_serialization=False)
torch.jit.save(torch.jit.script(torch.nn.Identity()), "script.pt")
