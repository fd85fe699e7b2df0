"""Trees of PyTorch's objects through every kind of file and back: what they were is what comes out."""
import json
import os
import subprocess
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

TESSERA = os.environ["TESSERA_COMMAND"]
KINDS = ["a.safetensors", "dcp"]

pytestmark = pytest.mark.filterwarnings("ignore")
warnings.simplefilter("ignore")


def tessera(*arguments, code=0):
    done = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def convert(source, target, *options):
    tessera("convert", source, target, "--quiet", *(["--to", "dcp"] if "." not in target.name else []), *options)


def load_dcp(directory):
    tree = {}
    _load_state_dict(tree, storage_reader=dcp.FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def cat(path, name):
    return json.loads(tessera("cat", path, name, "--json"))["values"]


def lazy_bits():
    c = torch.complex(torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 1)
    return {
        "conj": c.conj(),
        "transposed": c.conj().t(),
        "neg": torch._neg_view(torch.arange(4.0)),
        "half": torch._neg_view(torch.arange(4).to(torch.bfloat16)),
        "integers": torch._neg_view(torch.arange(4)),
        "imag": c.clone().conj().imag,
        "both": torch._neg_view(c.conj()),
    }


def test_conjugate_and_negative_bits_are_resolved(tmp_path):
    tree = lazy_bits()
    expected = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in tree.items()}
    torch.save(tree, tmp_path / "x.pt")
    torch.save(expected, tmp_path / "plain.pt")
    dcp.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size == (tmp_path / "x.pt").stat().st_size
    kept = torch.load(tmp_path / "y.pt", weights_only=True)
    assert all(kept[n].is_conj() == t.is_conj() and kept[n].is_neg() == t.is_neg() for n, t in tree.items())
    for source in ["x.pt", "theirs"]:
        convert(tmp_path / source, tmp_path / f"{source}.safetensors")
        convert(tmp_path / source, tmp_path / f"{source}-dcp")
        convert(tmp_path / source, tmp_path / f"{source}-16.pt", "--dtype", "bf16")
        found = [safetensors.torch.load_file(tmp_path / f"{source}.safetensors"), load_dcp(tmp_path / f"{source}-dcp")]
        for tensors in found:
            assert all(torch.equal(tensors[name], t) and not tensors[name].is_conj() for name, t in expected.items())
        halves = torch.load(tmp_path / f"{source}-16.pt", weights_only=True)
        for name, t in expected.items():
            assert torch.equal(halves[name].resolve_conj().resolve_neg(), t.to(torch.bfloat16) if t.is_floating_point() else t), name
        for target in [f"{source}.safetensors", f"{source}-dcp", "plain.pt"]:
            tessera("diff", tmp_path / source, tmp_path / target)
        assert cat(tmp_path / source, "neg") == [-0.0, -1, -2, -3]
        assert cat(tmp_path / source, "integers") == [0, -1, -2, -3]
        assert cat(tmp_path / source, "imag") == [-1, -2, -3, -4, -5, -6]
        tessera("verify", tmp_path / source)
    tessera("diff", tmp_path / "x.pt", tmp_path / "y.pt")
    torch.save({name: t.resolve_conj().resolve_neg().conj() for name, t in tree.items()}, tmp_path / "other.pt")
    assert "conj" in tessera("diff", tmp_path / "x.pt", tmp_path / "other.pt", code=1)
