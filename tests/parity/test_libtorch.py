"""Archives of libtorch and TorchScript beside what libtorch and torch.jit.load say of them (docs/formats/torchscript.md)."""
import json
import os
import pathlib
import subprocess

import pytest
import safetensors.torch
import torch
from torch import nn

TESSERA, TOOL = os.environ["TESSERA_COMMAND"], os.environ["TESSERA_LIBTORCH_TOOL"]
# By 2.13. libtorch 2.11 writes the files that its folder lacks bit for bit as they are here.
GOLDEN = pathlib.Path(os.environ["TESSERA_GOLDEN"]) / "libtorch"
BY_2_11 = GOLDEN.with_name("libtorch-2.11")
SEEDS = int(os.environ.get("TESSERA_LIBTORCH_SEEDS", "50"))


def tessera(*arguments):
    done = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stderr, done.stdout)
    return done.stdout


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(-1).untyped_storage().tolist() == b.contiguous().view(-1).untyped_storage().tolist()


def named(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def require_same(path, expected, work):
    """Every tensor by every way: into safetensors, into torch.save's file, into DCP and back."""
    tessera("convert", path, work / "a.safetensors", "--overwrite")
    found = safetensors.torch.load_file(work / "a.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(found[name], tensor.detach()), name
    tessera("convert", path, work / "a.pt", "--overwrite")
    state = torch.load(work / "a.pt", weights_only=True)
    assert {name: tensor for name, tensor in state.items() if torch.is_tensor(tensor)}.keys() == expected.keys()
    assert all(same(state[name], tensor.detach()) for name, tensor in expected.items())
    tessera("convert", path, work / "dcp", "--to", "dcp", "--overwrite")
    tessera("diff", path, work / "dcp")
    tessera("verify", path)
    assert json.loads(tessera("stat", path, "--json"))["kind"] == "torchscript"


@pytest.mark.parametrize("path", [GOLDEN / "net.pt", *(folder / f"{name}.pt" for folder in (GOLDEN, BY_2_11) for name in ("scripted", "traced"))],
                         ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_modules(path, tmp_path):
    require_same(path, named(torch.jit.load(path)), tmp_path)


def test_tensors_and_values_of_cpp(tmp_path):
    tessera("convert", GOLDEN / "tensor.pt", tmp_path / "t.pt")
    assert torch.equal(torch.load(tmp_path / "t.pt"), torch.arange(6).reshape(2, 3))
    tessera("convert", GOLDEN / "vec.pt", tmp_path / "v.pt")
    ones, zeros = torch.load(tmp_path / "v.pt")
    assert torch.equal(ones, torch.ones(2)) and torch.equal(zeros, torch.zeros(3))
    tessera("convert", GOLDEN / "pick.pt", tmp_path / "p.pt")
    ours, theirs = torch.load(tmp_path / "p.pt"), torch.load(GOLDEN / "pick.pt", weights_only=False)
    assert ours.keys() == theirs.keys() == {"a"} and torch.equal(ours["a"], theirs["a"])


@pytest.mark.parametrize("folder", [GOLDEN, BY_2_11], ids=lambda folder: folder.name)
def test_an_optimizer_of_cpp_goes_on_in_python(folder, tmp_path):
    tessera("convert", folder / "opt.pt", tmp_path / "opt.pt")
    state = torch.load(tmp_path / "opt.pt")
    assert state["param_groups"] == [{"params": [0, 1, 2, 3, 4, 5], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01,
                                      "amsgrad": False}]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (3,), (2, 2), (2,), (2,), (2,))]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], torch.full((3, 4), 0.1))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def by_pickle_load(path):
    """What C++ prints of the file: the first word of each line is a name, the second a dtype or a kind."""
    return subprocess.run([TOOL, "read", str(path)], capture_output=True, text=True, check=False)


def test_pickle_load_takes_plain_dicts_and_no_ordered_ones(tmp_path):
    """docs/formats/torchscript.md says so to whoever converts for C++."""
    weights = nn.Linear(2, 2).state_dict()
    for plain in (dict(weights), {"model": dict(weights), "step": 7, "names": ["a"], "state": {"deep": {"n": 0.5}}}):
        torch.save(plain, tmp_path / "plain.pt")
        tessera("convert", tmp_path / "plain.pt", tmp_path / "dcp", "--to", "dcp", "--overwrite")
        tessera("convert", tmp_path / "dcp", tmp_path / "back.pt", "--overwrite")
        done = by_pickle_load(tmp_path / "back.pt")
        assert done.returncode == 0, done.stderr
        prefix = "model." if "model" in plain else ""
        assert f"{prefix}weight Float" in done.stdout and f"{prefix}bias Float" in done.stdout
        if prefix:
            assert "step Int" in done.stdout and "names GenericList" in done.stdout and "state.deep.n Double" in done.stdout
    for ordered in (weights, {"model": weights}):
        torch.save(ordered, tmp_path / "ordered.pt")
        for only in ([], ["--only=model"] if "model" in ordered else ["--only=weight"]):
            tessera("convert", tmp_path / "ordered.pt", tmp_path / "back.pt", "--overwrite", *only)
            done = by_pickle_load(tmp_path / "back.pt")
            assert done.returncode == 1 and "Expected GenericDict but got None" in done.stderr


class Odd(nn.Module):
    """What a module of TorchScript may hold besides."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 3)
        self.again = self.lin
        self.list = nn.ModuleList([nn.Linear(1, 1), nn.BatchNorm1d(2)])
        self.plain = torch.arange(4)  # neither a parameter nor a buffer
        self.rate = 0.5
        self.names = ["a", "b"]
        self.table = {"k": torch.ones(2)}
        self.nothing = None
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool), persistent=False)

    def forward(self, x):
        return self.lin(x) + torch.tensor([1.0, 2.0, 3.0]) * self.rate


def test_what_modules_hold_besides(tmp_path):
    module = torch.jit.script(Odd())
    torch.jit.save(module, tmp_path / "odd.pt")
    rows = {row["name"]: row for row in json.loads(tessera("ls", tmp_path / "odd.pt", "--json"))}
    for name, tensor in named(module).items():
        assert rows[name]["shape"] == list(tensor.shape), name
    assert rows["again.weight"]["shape"] == [3, 2] and rows["rate"]["value"] == 0.5
    assert rows["plain"]["shape"] == [4] and "nothing" not in rows and "training" not in rows
    done = subprocess.run([TESSERA, "ls", str(tmp_path / "odd.pt")], capture_output=True, text=True, check=True)
    assert "besides parameters and buffers" in done.stderr and "plain" in done.stderr
    traced = torch.jit.trace(Odd(), torch.zeros(1, 2))
    torch.jit.save(traced, tmp_path / "traced.pt")
    constants = [row for row in json.loads(tessera("ls", tmp_path / "traced.pt", "--json")) if row["name"].startswith("CONSTANTS.")]
    assert any(row.get("shape") == [3] for row in constants)


def test_generated_modules_of_cpp(tmp_path):
    """C++ -> command -> C++, and what Python gets of it."""
    for seed in range(SEEDS):
        work = tmp_path / str(seed)
        work.mkdir()
        subprocess.run([TOOL, "write", str(seed), str(work)], check=True)
        for name in ("net", "opt"):
            if not (work / f"{name}.pt").exists():
                continue
            expected = torch.load(work / f"{name}.ref.pt", weights_only=False)
            tessera("convert", work / f"{name}.pt", work / "a.safetensors", "--overwrite", "--keep-duplicates")
            found = safetensors.torch.load_file(work / "a.safetensors")
            assert found.keys() == expected.keys(), seed
            for key, tensor in expected.items():
                assert same(found[key], tensor), (seed, key)
        tessera("convert", work / "net.pt", work / "back.pt")
        back = subprocess.run([TOOL, "read", str(work / "back.pt")], capture_output=True, text=True, check=True).stdout
        reference = subprocess.run([TOOL, "read", str(work / "net.ref.pt")], capture_output=True, text=True, check=True).stdout
        assert sorted(back.splitlines()) == sorted(reference.splitlines()), seed
