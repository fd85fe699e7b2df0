"""Directories of which files are missing, or that hold more than one checkpoint: the options of `open` and of what opens."""

import json
import os
import pickle

import numpy
import pytest
from safetensors.numpy import save_file

import tessera

ONES = numpy.ones(2, dtype=numpy.float32)


@pytest.fixture
def shards(tmp_path):
    """`a` in one file, and `b` in one that is not there."""
    save_file({"a": ONES}, tmp_path / "one.safetensors")
    names = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tmp_path


def test_what_is_missing_matters_to_who_asks(shards):
    with tessera.open(shards) as checkpoint:
        numpy.testing.assert_array_equal(numpy.asarray(checkpoint["a"]), ONES)
        assert checkpoint.names() == ["a", "b"]
        assert any("two.safetensors" in text for text in checkpoint.warnings)
        with pytest.raises(tessera.IncompleteError, match="partial"):
            checkpoint["b"]
        with pytest.raises(tessera.IncompleteError, match="two.safetensors"):
            checkpoint.load(framework="numpy")
    numpy.testing.assert_array_equal(tessera.load(shards, only=["a"], framework="numpy")["a"], ONES)
    with tessera.safe_open(shards, framework="np") as file:
        numpy.testing.assert_array_equal(file.get_tensor("a"), ONES)
        assert file.keys() == ["a", "b"] and sorted(file.offset_keys()) == ["a", "b"]
        with pytest.raises(tessera.IncompleteError):
            file.get_tensor("b")
    assert [finding.code for finding in tessera.verify(shards).findings] == ["incomplete"]


def test_partial(shards):
    assert list(tessera.load(shards, framework="numpy", partial=True)) == ["a"]
    with tessera.open(shards, partial=True) as checkpoint:
        assert list(pickle.loads(pickle.dumps(checkpoint))) == ["a"]
    with tessera.safe_open(shards, framework="np", partial=True) as file:
        assert file.keys() == ["a"]
    assert tessera.verify(shards, partial=True).findings == []
    report = tessera.convert(shards, shards / "out.pt", partial=True)
    assert report.tensors == 1


def load_ours(torch, state, path, **how):
    import tessera.torch

    return tessera.torch.load(state, checkpoint_id=path, no_dist=True, **how)


def load_by_reader(torch, state, path, **how):
    import torch.distributed.checkpoint as dcp

    import tessera.torch

    planner = tessera.torch.LoadPlanner(allow_partial_load=not how.pop("strict", True))
    reader = tessera.torch.FileSystemReader(path, **how)
    return dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("load", [load_ours, load_by_reader])
def test_nothing_is_written_before_the_missing_file_is_told(load, torch, tmp_path):
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False)
    dcp.save({"a": torch.ones(2), "b": torch.ones(3), "n": 7}, storage_writer=writer, no_dist=True)
    found = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    lost = {index.fqn: where.relative_path for index, where in found.items()}
    assert len(set(lost.values())) == 3
    refusals = (tessera.IncompleteError, dcp.CheckpointException)  # torch's load wraps it
    os.remove(tmp_path / lost["b"])
    for wanted in (torch.zeros(3), torch.zeros(3, dtype=torch.float64)):  # the latter is read aside
        state = {"a": torch.zeros(2), "b": wanted, "n": 0}
        with pytest.raises(refusals, match=lost["b"]):
            load(torch, state, tmp_path)
        assert state["a"].tolist() == [0, 0] and state["n"] == 0
        load(torch, state, tmp_path, partial=True, strict=False)
        assert state["a"].tolist() == [1, 1] and wanted.tolist() == [0, 0, 0] and state["n"] == 7
    with tessera.open(tmp_path) as checkpoint:
        assert list(pickle.loads(pickle.dumps(checkpoint))) == ["a", "b", "n"]
    os.remove(tmp_path / lost["n"])
    state = {"a": torch.zeros(2), "n": 0}
    with pytest.raises(refusals, match=lost["n"]):
        load(torch, state, tmp_path)
    assert state["a"].tolist() == [0, 0]


def test_ignore_index_and_rank(tmp_path):
    save_file({"a": ONES}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(tessera.IncompleteError, match="--ignore-index"):
        tessera.load(tmp_path)
    assert list(tessera.load(tmp_path, framework="numpy", ignore_index=True)) == ["a"]
    os.mkdir(tmp_path / "ranks")
    for rank in range(2):
        save_file({"a": ONES * rank}, tmp_path / f"ranks/model-rank-{rank}-part-0.safetensors")
    with pytest.raises(tessera.UnsupportedError, match="vLLM"):
        tessera.load(tmp_path / "ranks")
    numpy.testing.assert_array_equal(tessera.load(tmp_path / "ranks", framework="numpy", rank=1)["a"], ONES)


def test_ranks_that_are_none(tmp_path):
    save_file({"a": ONES}, tmp_path / "model-rank-0-part-0.safetensors")
    for rank in (-1, 2**40, -(2**40), "0"):
        with pytest.raises(tessera.InvalidArgumentError, match="rank is"):
            tessera.open(tmp_path, rank=rank)


def test_accept(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": ONES}, path)
    path.write_bytes(path.read_bytes() + bytes(16))
    with pytest.raises(tessera.CorruptError, match="--accept trailing-bytes"):
        tessera.load(path)
    for accept in ("trailing-bytes", ["trailing-bytes"]):
        numpy.testing.assert_array_equal(tessera.load(path, framework="numpy", accept=accept)["a"], ONES)
        assert tessera.convert(path, tmp_path / "a.pt", accept=accept, overwrite=True).tensors == 1
