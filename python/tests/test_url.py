"""Checkpoints behind URLs; TESSERA_TEST_URL names a place in a store that may be written to."""

import os

import numpy
import pytest

import tessera

URL = os.environ.get("TESSERA_TEST_URL")
pytestmark = pytest.mark.skipif(URL is None, reason="no store: TESSERA_TEST_URL is not set")


def test_a_checkpoint_in_a_store_is_saved_read_and_converted(tmp_path):
    state = {"model": {"w": numpy.arange(12.0).reshape(3, 4)}, "step": 7}
    report = tessera.save_file(state, f"{URL}/step1")
    assert report.files > 0 and report.requests > 0
    with tessera.open(f"{URL}/step1") as checkpoint:
        assert checkpoint["step"] == 7 and checkpoint["model.w"][1:, :2].tolist() == [[4.0, 5.0], [8.0, 9.0]]
    assert tessera.convert(f"{URL}/step1", tmp_path / "model.safetensors", only=["model"]).requests > 0
    assert tessera.verify(f"{URL}/step1").findings == []
    assert tessera.diff(f"{URL}/step1", f"{URL}/step1") == []
    with pytest.raises(FileNotFoundError):
        tessera.open(f"{URL}/step2")
    with pytest.raises(FileExistsError):
        tessera.save_file(state, f"{URL}/step1", overwrite=False)


def test_the_drop_in_reads_from_a_store(torch):
    import tessera.torch

    state = {"w": torch.arange(6.0), "step": 3}
    tessera.save_file(state, f"{URL}/torch")
    into = {"w": torch.zeros(6), "step": 0}
    tessera.torch.load(into, checkpoint_id=f"{URL}/torch")
    assert torch.equal(into["w"], state["w"]) and into["step"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_calls_reach_a_store(torch):
    import torch.distributed.checkpoint as dcp

    import tessera.torch

    state = {"w": torch.arange(6.0), "step": 3}
    with tessera.torch.install():
        dcp.save(state, checkpoint_id=f"{URL}/dcp")
        into = {"w": torch.zeros(6), "step": 0}
        dcp.load(into, checkpoint_id=f"{URL}/dcp")
    assert torch.equal(into["w"], state["w"]) and into["step"] == 3
    assert tessera.verify(f"{URL}/dcp").findings == []
