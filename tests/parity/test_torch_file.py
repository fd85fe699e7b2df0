"""Spec F-01, F-06: PyTorch and safetensors load what Tessera writes, and Tessera rewrites their files to the byte."""
import io
import os
import subprocess

import pytest
import safetensors.torch
import torch

TOOL = os.environ["TESSERA_TORCH_FILE_TOOL"]
DTYPES = ("float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 complex64 "
          "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2").split()

pytestmark = pytest.mark.filterwarnings("ignore")


def tool(*words):
    subprocess.run([TOOL, *map(str, words)], check=True)


def numbered(name):
    dtype = getattr(torch, name)
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype).reshape(3, 2)


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes(a.clone().untyped_storage()) == bytes(b.clone().untyped_storage())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    tool("write", directory)
    return directory


@pytest.mark.parametrize("mmap", [False, True])
def test_pytorch_loads_a_tree_made_by_hand(written, mmap):
    tree = torch.load(written / "all.pt", weights_only=True, mmap=mmap)
    assert list(tree["dtypes"]) == DTYPES
    for name, tensor in tree["dtypes"].items():
        assert same_bytes(tensor, numbered(name)), name
    base, column = tree["views"]
    assert base.untyped_storage().data_ptr() == column.untyped_storage().data_ptr()
    assert torch.equal(column, base[:, 1])
    assert isinstance(tree["parameter"], torch.nn.Parameter) and tree["parameter"].requires_grad
    assert torch.equal(tree["halves"], torch.cat([numbered("float32")] * 2))
    assert tree["groups"][0] is tree["groups"][1] and tree["groups"][0] == {"lr": 0.1, "betas": (0.9, 0.99)}
    assert tree["plain"] == [None, True, -1, 2**40, 1.5, "text", (), b"\x00\xff"]
    assert tree["dtype"] is torch.bfloat16 and tree[7] == "int key"


def test_safetensors_is_the_library_s_file(written):
    tensors = {name: numbered(name) for name in DTYPES if name not in ("complex32", "complex128")}
    assert (written / "all.safetensors").read_bytes() == safetensors.torch.save(tensors, {"format": "pt"})
    for name, tensor in safetensors.torch.load_file(written / "all.safetensors").items():
        assert same_bytes(tensor, tensors[name]), name


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def trees():
    model, optimizer = trained()
    base = torch.randn(6, 6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "training": {"model": model.state_dict(), "optim": optimizer.state_dict(), "sched": scheduler.state_dict(), "step": 2},
        "module": model,
        "parameters": list(model.parameters()),
        "views": [base[i:, ::2] for i in range(6)] + [base.t(), base],
        "many": {str(i): torch.full((i % 4,), i) for i in range(1500)},
        "rng": torch.random.get_rng_state(),
        "numpy": base.numpy(),
        "none": None,
    }


@pytest.mark.parametrize("name", ["training", "module", "parameters", "views", "many", "rng", "numpy", "none"])
def test_rewrites_to_the_byte(name, tmp_path):
    torch.save(trees()[name], tmp_path / f"{name}.pt")
    tool("rewrite", tmp_path / f"{name}.pt", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / f"{name}.pt").read_bytes()


def test_rewrites_a_stream(tmp_path):
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3)}, stream)
    (tmp_path / "in").write_bytes(stream.getvalue())
    tool("rewrite", tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == stream.getvalue()
