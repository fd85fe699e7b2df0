"""IN: opens a .safetensors file, reads a thousand tensors of it, and a thousand more."""
import random
import sys
import time

import numpy  # noqa: F401  (its import is not measured)
from safetensors import safe_open


def read_some(file, names):
    begin = time.perf_counter()
    for name in random.choices(names, k=1000):
        file.get_tensor(name)
    return time.perf_counter() - begin


random.seed(1)
begin = time.perf_counter()
with safe_open(sys.argv[1], framework="np") as file:
    opened = time.perf_counter() - begin
    names = list(file.keys())
    first = read_some(file, names)
    print(f"open {opened:.5f} first {first:.5f} second {read_some(file, names):.5f}")
