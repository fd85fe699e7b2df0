"""make OUT MB [unchecked]: a .pt of that size, without CRC-32s if asked. measure IN OUT: torch.load of IN, torch.save to OUT, and an fsync of that."""
import os
import sys
import time

import torch

if sys.argv[1] == "make":
    torch.serialization.set_crc32_options("unchecked" not in sys.argv)
    random = torch.Generator().manual_seed(0)
    each = int(sys.argv[3]) * 1_000_000 // 40 // 4
    torch.save({f"layer.{i}": torch.randn(each, generator=random) for i in range(40)}, sys.argv[2])
else:
    begin = time.perf_counter()
    tree = torch.load(sys.argv[2])
    loaded = time.perf_counter()
    torch.save(tree, sys.argv[3])
    saved = time.perf_counter()
    with open(sys.argv[3], "rb") as file:
        os.fsync(file.fileno())
    done = time.perf_counter()
    print(f"read {loaded - begin:.4f} write {saved - loaded:.4f} write_durable {done - loaded:.4f}")
