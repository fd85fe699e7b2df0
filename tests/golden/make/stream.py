"""Streams of torch.save from before 1.6, and in stream_view.pt and stream_first.pt what torch up to 0.4 and 0.3 wrote.

    python stream.py tests/golden/checkpoints

stream.pt: torch's own (_use_new_zipfile_serialization=False). The others are pickled by hand from the
description in docs/formats/torch-stream.md, because no torch that can be installed writes them; torch reads both.
"""
import collections
import pathlib
import pickle
import struct
import sys

import torch

out = pathlib.Path(sys.argv[1])
torch.manual_seed(3)
shared = torch.arange(12.0)
module = torch.nn.Linear(3, 2)
tree = {
    "plain": torch.randn(4, 3),
    "shared": shared.reshape(3, 4),
    "transposed": shared.reshape(3, 4).t(),
    "row": shared[4:8],
    "int": torch.arange(5),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7.5, dtype=torch.float64),
    "model": module.state_dict(),
    "parameter": module.weight,
    "epoch": 3,
    "lr": [0.1, 0.2],
}
torch.save(tree, out / "stream.pt", _use_new_zipfile_serialization=False)


class Storage:
    """Stands for a storage in the pickle; `id` is its persistent id."""

    def __init__(self, key, count, view=None):
        self.id = ("storage", torch.FloatStorage, key, "cpu", count, view)


class Rebuilt:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Pickler(pickle._Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, Storage) else None


def write(name, value, storages):
    with open(out / name, "wb") as file:
        pickle.dump(0x1950A86A20F9469CFC6C, file, protocol=2)
        pickle.dump(1001, file, protocol=2)
        sizes = {"short": 2, "int": 4, "long": 4}
        pickle.dump({"protocol_version": 1001, "little_endian": True, "type_sizes": sizes}, file, protocol=2)
        Pickler(file, protocol=2).dump(value)
        pickle.dump(sorted(storages), file, protocol=2)
        for key in sorted(storages):
            elements = storages[key]
            file.write(struct.pack(f"<q{len(elements)}f", len(elements), *elements))


base = [float(i) for i in range(10)]
write("stream_view.pt", collections.OrderedDict(
    whole=Rebuilt(torch._utils._rebuild_tensor_v2, Storage("71", 10), 0, (2, 5), (5, 1), False,
                  collections.OrderedDict()),
    part=Rebuilt(torch._utils._rebuild_tensor_v2, Storage("71", 10, ("72", 4, 5)), 1, (2, 2), (2, 1), False,
                 collections.OrderedDict()),
    again=Rebuilt(torch._utils._rebuild_tensor_v2, Storage("71", 10, ("72", 4, 5)), 0, (5,), (1,), False,
                  collections.OrderedDict())), {"71": base})
write("stream_first.pt", {"weight": Rebuilt(torch._utils._rebuild_tensor, Storage("9", 6), 0, (3, 2), (2, 1))},
      {"9": base[:6]})
for name in ("stream_view.pt", "stream_first.pt"):
    print(name, torch.load(out / name, weights_only=False))
