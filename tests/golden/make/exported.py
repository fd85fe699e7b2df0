"""Writes net.pt2, forms.pt2, two.pt2, old.pt2 and older.pt2 of tests/golden/exported into the current folder, by torch 2.13, and
net.pt2 of tests/golden/libtorch-2.11 by that version.

    python exported.py

`expected` gives what torch.export.load says of one, by name; tests/parity/test_exported.py uses it, and the models.
"""
import io
import json
import zipfile

import torch
from torch.export import export
from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter
from torch.export.pt2_archive._package import load_pt2, package_pt2

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(4, 3)
        self.register_buffer("buf", torch.arange(5))
        self.register_buffer("tmp", torch.tensor([1.0, 2.0]), persistent=False)

    def forward(self, x):
        return self.l(x) + self.tmp.sum()


class Forms(torch.nn.Module):
    """Weights that share storages, views of them, and each dtype."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.b = torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        base = torch.arange(12.0)
        for name, tensor in {"base": base, "turned": base.view(3, 4).t(), "part": base[3:9].view(2, 3), "step": base[1::4],
                             "alone": torch.rand(6, 2).t(), "none": torch.zeros(0, 3), "point": torch.tensor(7.0)}.items():
            self.register_buffer(name, tensor)
        for dtype in DTYPES:
            raw = torch.arange(2 * dtype.itemsize, dtype=torch.uint8)
            self.register_buffer("of_" + str(dtype).removeprefix("torch."), (raw % 2).bool() if dtype == torch.bool else raw.view(dtype))
        self.fixed = torch.tensor([5, 6])

    def forward(self, x):
        return self.b(self.a(x)) + self.fixed.sum()


def models():
    torch.manual_seed(51)
    return {"net": export(Net(), (torch.zeros(1, 4),)), "forms": export(Forms(), (torch.zeros(1, 3),))}


def expected(path):
    """The weights and constants of each model."""
    return {name: {**program.state_dict, **program.constants} for name, program in load_pt2(str(path)).exported_programs.items()}


def save_without_tables(path, to):
    """The state dict and the constants by torch.save, as torch had them before there were tables; 2.13 reads both."""
    reader = PT2ArchiveReader(str(path))
    with PT2ArchiveWriter(str(to)) as writer:
        for name in reader.get_file_names():
            if name.startswith(("models/", "data/sample_inputs/", "archive_")):
                writer.write_bytes(name, reader.read_bytes(name))
        for model, program in load_pt2(str(path)).exported_programs.items():
            for folder, tensors in (("weights", program.state_dict), ("constants", program.constants)):
                out = io.BytesIO()
                torch.save(tensors, out)
                writer.write_bytes(f"data/{folder}/{model}.pt", out.getvalue())


def save_as_before_2_8(path, to):
    """A zip of Python's, of one model; 2.13 reads it, too."""
    reader = PT2ArchiveReader(str(path))
    program = load_pt2(str(path)).exported_programs["model"]
    with zipfile.ZipFile(to, "w") as made:
        version = json.loads(reader.read_bytes("models/model.json"))["schema_version"]
        made.writestr("serialized_exported_program.json", reader.read_bytes("models/model.json"))
        made.writestr("version", f"{version['major']}.{version['minor']}")
        for name, tensors in (("state_dict", program.state_dict), ("constants", program.constants),
                              ("example_inputs", program.example_inputs)):
            out = io.BytesIO()
            torch.save(tensors, out)
            made.writestr(f"serialized_{name}.pt", out.getvalue())


if __name__ == "__main__":
    made = models()
    torch.export.save(made["net"], "net.pt2")
    torch.export.save(made["forms"], "forms.pt2")
    package_pt2("two.pt2", exported_programs={"a": made["net"], "b": made["net"]})
    save_without_tables("net.pt2", "old.pt2")
    save_as_before_2_8("net.pt2", "older.pt2")
