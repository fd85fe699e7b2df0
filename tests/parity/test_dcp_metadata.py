"""Spec F-03: what Tessera writes as `.metadata` is, in PyTorch, the object that PyTorch had written."""
import io
import os
import pathlib
import pickle
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

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


def archive(tensor):
    item = io.BytesIO()
    torch.save(tensor, item)
    return item.getvalue()


def write_rows(directory, tensors):
    """A checkpoint that keeps every row of each tensor as a chunk, in two data files."""
    files = [bytearray(), bytearray()]
    entries, places = {}, {}
    for name, tensor in tensors.items():
        chunks = []
        for row in range(tensor.shape[0]):
            offset, size = torch.Size([row, 0]), torch.Size([1, tensor.shape[1]])
            item = archive(tensor[row : row + 1].clone())
            file = row % 2
            chunks.append(ChunkStorageMetadata(offset, size))
            places[MetadataIndex(name, offset, row)] = _StorageInfo(f"__{file}_0.distcp", len(files[file]), len(item))
            files[file] += item
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), chunks)
    for number, content in enumerate(files):
        (directory / f"__{number}_0.distcp").write_bytes(content)
    metadata = Metadata(entries, {name: (name,) for name in tensors}, places)
    (directory / "theirs").write_bytes(pickle.dumps(metadata))
    return metadata


@pytest.mark.filterwarnings("ignore")
def test_pytorch_loads_many_chunks(tmp_path):
    generator = torch.Generator().manual_seed(7)
    state = {
        "blocks.0.weight": torch.randn(8000, 3, generator=generator),
        "blocks.1.weight": torch.randn(5000, 2, generator=generator).to(torch.bfloat16),
    }
    theirs = write_rows(tmp_path, state)
    reencode(tmp_path / "theirs", tmp_path / ".metadata")
    # More than one of the pieces, which are frames, in which it is written.
    assert (tmp_path / ".metadata").stat().st_size > 1 << 20
    ours = dcp.FileSystemReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.storage_data.items()) == list(theirs.storage_data.items())
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, tensor in state.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
