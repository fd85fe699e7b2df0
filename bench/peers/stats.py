"""Numbers of each tensor by torch, on a mapped safetensors file.

    stats.py make FILE MEGABYTES DTYPE
    stats.py measure FILE          prints "seconds N", without the imports
"""
import sys
import time

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def make(path, megabytes, dtype):
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, dtype)
    rows = max(1, megabytes * 1_000_000 // (40 * 4096 * dtype.itemsize))
    save_file({f"layers.{i}.weight": torch.randn(rows, 4096, generator=generator).mul_(0.02).to(dtype) for i in range(40)}, path)


def measure(path):
    begin = time.perf_counter()
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            tensor.isnan().sum().item()
            tensor.isinf().sum().item()
            torch.aminmax(tensor)
            torch.linalg.vector_norm(tensor, dtype=torch.float32).item()
    print("seconds", time.perf_counter() - begin)


if sys.argv[1] == "make":
    make(sys.argv[2], int(sys.argv[3]), sys.argv[4])
else:
    measure(sys.argv[2])
