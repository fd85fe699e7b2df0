"""Archives of torch.export beside what torch.export.load says of them (docs/formats/torchscript.md)."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch.export.pt2_archive._package import load_pt2, package_pt2

TESSERA = os.environ["TESSERA_COMMAND"]
GOLDEN = pathlib.Path(os.environ["TESSERA_GOLDEN"])
sys.path.insert(0, str(GOLDEN / "make"))
import exported  # noqa: E402

# safetensors has no such elements, and its Python package no such types.
NOT_IN_SAFETENSORS = {torch.complex32, torch.complex128}


def tessera(*arguments, code=0):
    done = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == code, (arguments, done.stderr, done.stdout)
    return done.stdout + done.stderr


def raw(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(raw(found[name]), raw(tensor)), name


def require_same(path, expected, work):
    """Every tensor by every verb: into safetensors, torch.save's file and DCP, and beside that."""
    assert json.loads(tessera("stat", path, "--json"))["kind"] == "exported"
    rows = {row["name"]: row for row in json.loads(tessera("ls", path, "--json"))}
    assert {name: (row["shape"], row["dtype"]) for name, row in rows.items()} == {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in expected.items()}
    tessera("verify", path)
    tessera("convert", path, work / "a.pt", "--overwrite")
    state = torch.load(work / "a.pt", weights_only=True)
    require_equal(state, expected)
    for name, tensor in expected.items():
        assert state[name].stride() == tensor.stride() and state[name].storage_offset() == tensor.storage_offset(), name
    tessera("convert", path, work / "dcp", "--to", "dcp", "--overwrite")
    tessera("diff", path, work / "dcp")
    kept = {name: tensor for name, tensor in expected.items() if tensor.dtype not in NOT_IN_SAFETENSORS}
    only = [f"--only={name}" for name in kept]
    tessera("convert", path, work / "a.safetensors", "--overwrite", "--keep-duplicates", *only)
    require_equal(safetensors.torch.load_file(work / "a.safetensors"), kept)
    tessera("diff", work / "a.pt", work / "dcp")


@pytest.mark.parametrize("name", ["exported/net", "exported/forms", "libtorch-2.11/net"])
def test_models(name, tmp_path):
    path = GOLDEN / f"{name}.pt2"
    program = torch.export.load(path)
    require_same(path, {**program.state_dict, **program.constants}, tmp_path)


@pytest.mark.parametrize("name", ["net", "forms"])
def test_what_older_torch_wrote(name, tmp_path):
    path = GOLDEN / f"exported/{name}.pt2"
    (made,) = exported.expected(path).values()
    exported.save_without_tables(path, tmp_path / "old.pt2")
    require_same(tmp_path / "old.pt2", made, tmp_path)
    exported.save_as_before_2_8(path, tmp_path / "older.pt2")
    require_same(tmp_path / "older.pt2", made, tmp_path)


def test_two_models(tmp_path):
    path = GOLDEN / "exported/two.pt2"
    tessera("convert", path, tmp_path / "two.pt")
    found = torch.load(tmp_path / "two.pt", weights_only=True)
    for model, expected in exported.expected(path).items():
        require_equal(found[model], expected)
    names = {row["name"] for row in json.loads(tessera("ls", path, "--json"))}
    assert names == {f"{model}.{name}" for model in "ab" for name in ("l.weight", "l.bias", "buf", "tmp")}
    assert tessera("cat", path, "b.tmp") == "1 2\n"


def test_symbolic_shapes_and_names(tmp_path):
    """A model with a size that is a symbol has none in its weights; names and folders as people give them."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(exported.Net(), (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    package_pt2(str(tmp_path / "m.pt2"), exported_programs={"deep/er model": program})
    (expected,) = exported.expected(tmp_path / "m.pt2").values()
    require_same(tmp_path / "m.pt2", expected, tmp_path)


def test_a_weight_of_a_class_of_its_own(tmp_path):
    """torch pickles it: it stays what torch.save made, with the tensors inside."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("two", TwoTensor(torch.arange(2.0), torch.arange(2.0) + 5))

        def forward(self, x):
            return x + self.plain

    program = torch.export.export(Model(), (torch.zeros(2),))
    torch.export.save(program, tmp_path / "m.pt2")
    assert type(load_pt2(str(tmp_path / "m.pt2")).exported_programs["model"].state_dict["two"]) is TwoTensor
    names = [row["name"] for row in json.loads(tessera("ls", tmp_path / "m.pt2", "--json"))]
    assert "plain" in names and any(name.startswith("two") for name in names)
    tessera("verify", tmp_path / "m.pt2")
    tessera("convert", tmp_path / "m.pt2", tmp_path / "m.pt")
    back = torch.load(tmp_path / "m.pt", weights_only=False)
    assert torch.equal(back["two"].a, torch.arange(2.0)) and torch.equal(back["two"].b, torch.arange(2.0) + 5)


def test_scan_says_what_torch_would_run(tmp_path):
    """Expressions of sizes are text that sympy evaluates, so the archive of a stranger may run anything."""
    said = tessera("scan", GOLDEN / "exported/net.pt2", code=3)
    assert "models/model.json, which torch.export.load evaluates" in said
    ran, evil = tmp_path / "ran", tmp_path / "evil.pt2"
    reader = exported.PT2ArchiveReader(str(GOLDEN / "exported/net.pt2"))
    model = json.loads(reader.read_bytes("models/model.json"))
    model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0] = {
        "as_expr": {"expr_str": f"__import__('pathlib').Path({str(ran)!r}).touch()", "hint": {"as_int": 1}}}
    with exported.PT2ArchiveWriter(str(evil)) as writer:
        for name in reader.get_file_names():
            if name.startswith(("models/", "data/", "archive_")):
                writer.write_bytes(name, json.dumps(model).encode() if name == "models/model.json" else reader.read_bytes(name))
    assert "models/model.json" in tessera("scan", evil, code=3)
    tessera("ls", evil)
    tessera("convert", evil, tmp_path / "out.safetensors")
    assert not ran.exists()
    with pytest.raises(Exception):  # noqa: B017: whatever sympy says
        torch.export.load(evil)
    assert ran.exists()
