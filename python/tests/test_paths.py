"""Paths that are no UTF-8, as Linux has them, and what is no path."""

import os
import pathlib

import numpy
import pytest

import tessera

STATE = {"w": numpy.arange(3.0), "step": 7}


@pytest.fixture
def odd(tmp_path):
    """Bytes of 0x80 and 0xff in names; Python has lone surrogates in their places."""
    directory = tmp_path / "d\udc80"
    directory.mkdir()
    return str(directory / "x\udcff")


@pytest.mark.parametrize("ending", ["", ".pt", ".safetensors"])
def test_every_job_takes_them(ending, odd):
    path = odd + ending
    tessera.save_file(STATE, path)
    for given in (path, os.fsencode(path), pathlib.Path(path)):
        with tessera.open(given) as checkpoint:
            assert checkpoint.path == path and (checkpoint["w"][:] == STATE["w"]).all()
    assert tessera.verify(path).findings == [] and tessera.scan(path).problems == []
    target = f"{odd}-2.pt"
    assert tessera.convert(path, target).target == target and tessera.diff(path, target) == []
    with pytest.raises(tessera.AlreadyExistsError) as raised:
        tessera.convert(path, target)
    assert raised.value.path == target and target in str(raised.value)


def test_errors_and_findings_name_them(odd):
    with pytest.raises(tessera.NotFoundError) as raised:
        tessera.open(odd)
    assert raised.value.path == odd and odd in str(raised.value) and raised.value.filename == odd
    tessera.save_file(STATE, odd)
    files = [f"{odd}/{name}" for name in os.listdir(odd) if name.endswith(".distcp")]
    for file in files:
        with open(file, "r+b") as opened:
            opened.write(b"\1")
    (finding,) = tessera.verify(odd).findings
    assert any(file in finding.text for file in files)
    with pytest.raises(tessera.CorruptError) as raised:
        tessera.load(odd)
    assert raised.value.path in files


def test_a_side_file_has_no_name_for_them(odd):
    tessera.save_file(STATE, f"{odd}.pt")
    with pytest.raises(tessera.UnsupportedError, match="not UTF-8"):
        tessera.seal(f"{odd}.pt")
    assert (tessera.load(f"{odd}.pt", framework="numpy")["w"] == STATE["w"]).all()


def test_torch_reads_what_is_saved_there(torch, odd):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    import tessera.torch

    state = {"w": torch.arange(3.0), "step": 7}
    tessera.torch.save(state, checkpoint_id=f"{odd}-ours", no_dist=True)
    dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(f"{odd}-writer"), no_dist=True)
    dcp.save(state, checkpoint_id=f"{odd}-torch", no_dist=True)
    for path in (f"{odd}-ours", f"{odd}-writer", f"{odd}-torch"):
        for load in (dcp.load, tessera.torch.load):
            into = {"w": torch.zeros(3), "step": 0}
            load(into, checkpoint_id=path, no_dist=True)
            assert torch.equal(into["w"], state["w"]) and into["step"] == 7
        assert str(dcp.FileSystemReader(path).read_metadata().storage_meta.checkpoint_id) == path


def test_what_is_no_path():
    for given in ("a\0b", b"a\0b"):
        with pytest.raises(ValueError, match="null byte"):
            tessera.open(given)
    for given in (3, None, ["a"]):
        with pytest.raises(TypeError):
            tessera.open(given)
