"""Writes tests/golden/torch_variants: torch.save archives as other versions of torch and other programs leave them, built
record by record and loaded by torch here; tests/golden/torch_variants/expected.json says what torch reads in them.

    python torch_variants.py OUT

The pickle and the storages are torch's own. What differs is the zip around them: the records that older torch does not
write, the order of storages, alignment, and headers as Python's zipfile writes them.
"""
import collections
import datetime
import io
import json
import os
import pathlib
import sys
import warnings
import zipfile
import zlib

import numpy
import torch

warnings.simplefilter("ignore")

TREE = collections.OrderedDict(
    (f"layer.{i}", torch.arange(float(4 + i)).to(dtype))
    for i, dtype in enumerate((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                               torch.int16, torch.int8, torch.uint8, torch.complex64, torch.complex128, torch.float32)))


def records(value, name):
    """The records of torch's own file, by name without the folder, in its order."""
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as archive:
        return {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}


def write(name, parts, compression=zipfile.ZIP_STORED):
    """With zipfile: no data descriptors, sizes in the local headers, no padding."""
    with zipfile.ZipFile(f"{name}.pt", "w", compression) as archive:
        for record, content in parts.items():
            info = zipfile.ZipInfo(f"{name}/{record}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = compression
            archive.writestr(info, content)
    found = torch.load(f"{name}.pt", weights_only=False)
    assert all(torch.equal(found[key], value) for key, value in TREE.items()), name


def without(parts, *names):
    return {record: content for record, content in parts.items() if record not in names}


def storages_as_text(parts):
    """data/0, data/1, data/10, data/11, data/2 ...: the order of names as text."""
    return dict(sorted(parts.items(), key=lambda item: (item[0] != "data.pkl", item[0])))


def special():
    """What torch.save says of things that are more than a tensor of a module."""
    Point = collections.namedtuple("Point", "x y")
    sys.modules["__main__"].Point = Point
    Point.__module__ = "__main__"
    sparse = torch.eye(3).to_sparse()
    tensor = torch.ones(2, dtype=torch.complex32)
    return {
        "csr": torch.eye(3).to_sparse_csr(), "coo": sparse,
        "per channel": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "half complex": tensor, "imaginary": torch.ones(2, dtype=torch.complex128).conj().imag,
        "numpy": [numpy.float64(1.5), numpy.int64(3), numpy.bool_(True), numpy.arange(3, dtype=">i4"),
                  numpy.array(["a", "bc"]), numpy.zeros((0, 2)), numpy.float32(0.5)],
        "dates": [datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.timedelta(1, 2, 3)],
        "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")], "point": Point(1, torch.ones(1)),
        "sets": [{1, 2}, frozenset({"a"})], "slice": slice(1, None, 2), "range": range(3),
        "default": collections.defaultdict(list, a=[1]), "counter": collections.Counter({"one": 2, "two": 1}),
        "deque": collections.deque([1, 2], 3), "big": 1 << 200, "dtype": torch.quint8, "device": torch.device("cuda", 1),
        "ordered": collections.OrderedDict([(("a", 1), torch.Size([1, 2]))]), "generator": torch.Generator().get_state()[:16],
    }


def expect(name):
    tree = torch.load(f"{name}.pt", weights_only=False)
    rows = {}
    for key, value in tree.items():
        raw = bytes(value.clone(memory_format=torch.contiguous_format).untyped_storage())
        rows[key] = {"dtype": str(value.dtype)[6:], "shape": list(value.shape), "crc32": zlib.crc32(raw)}
    return rows


os.makedirs(f"{sys.argv[1]}/torch_variants", exist_ok=True)
os.chdir(f"{sys.argv[1]}/torch_variants")
parts = records(TREE, "archive")
old = without(parts, ".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
write("torch_1_6", storages_as_text(old))
write("byteorder", {**old, "byteorder": b"little"})
write("serialization_id", without(parts, ".format_version", ".storage_alignment"))
write("backwards", dict(reversed(old.items())))
write("version_first", {"version": b"3\n", **without(old, "version")})
write("deflated", old, zipfile.ZIP_DEFLATED)
torch.save(special(), "special.pt")
names = sorted(path.stem for path in pathlib.Path(".").glob("*.pt") if path.stem != "special")
with open("expected.json", "w", encoding="utf-8") as out:
    json.dump({name: expect(name) for name in names}, out, indent=1)
    out.write("\n")
