"""Spec F-03: what Tessera writes as `.metadata` is, in PyTorch, the object that PyTorch had written."""
import os
import pathlib
import pickle
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "dcp"
# The last one is cut on purpose.
METADATA = sorted(path for path in GOLDEN.glob("*.metadata") if path.stem != "c1t")


def reencode(source, target):
    subprocess.run([os.environ["TESSERA_REENCODE_METADATA"], source, target], check=True)


@pytest.mark.parametrize("path", METADATA, ids=lambda path: path.stem)
def test_same_object(path, tmp_path):
    reencode(path, tmp_path / "out")
    ours = pickle.loads((tmp_path / "out").read_bytes())
    theirs = pickle.loads(path.read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data == theirs.storage_data
    theirs_by_identity = {index: index.index for index in theirs.storage_data}
    for index in ours.storage_data:
        assert index.index == theirs_by_identity[index]
    assert ours.version == theirs.version
    assert (ours.storage_meta is None) == (theirs.storage_meta is None)
    if theirs.storage_meta:
        assert ours.storage_meta.checkpoint_id == str(theirs.storage_meta.checkpoint_id)
        assert ours.storage_meta.save_id == theirs.storage_meta.save_id
        assert ours.storage_meta.modules == theirs.storage_meta.modules


@pytest.mark.filterwarnings("ignore")
def test_pytorch_loads_it(tmp_path):
    state = {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "h": torch.ones(5, dtype=torch.bfloat16)},
        "scalar": torch.tensor(3),
        "steps": [1, 2],
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    dcp.save(state, checkpoint_id=tmp_path / "c")
    metadata = tmp_path / "c" / ".metadata"
    reencode(metadata, tmp_path / "ours")
    metadata.unlink()
    (tmp_path / "ours").rename(metadata)
    loaded = {
        "model": {"w": torch.zeros(3, 4), "h": torch.zeros(5, dtype=torch.bfloat16)},
        "scalar": torch.tensor(0),
        "steps": None,
        "groups": [{"lr": None, "betas": None}],
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert torch.equal(loaded["model"]["w"], state["model"]["w"])
    assert torch.equal(loaded["model"]["h"], state["model"]["h"])
    assert loaded["scalar"] == 3
    assert loaded["steps"] == [1, 2]
    assert loaded["groups"] == state["groups"]
