"""Places on the Hugging Face Hub, beside the one of tests/stores; only where the checkout is at hand."""

import pathlib
import sys

import numpy
import pytest

import tessera

STORES = pathlib.Path(__file__).resolve().parents[2] / "tests/stores"
if not (STORES / "hub_server.py").exists():
    pytest.skip("no checkout: there is no server", allow_module_level=True)
sys.path.append(str(STORES))
import hub_server  # noqa: E402


@pytest.fixture
def model(monkeypatch, tmp_path):
    """The place of a private model, with a DCP checkpoint below."""
    saved = tmp_path / "saved"
    state = {"w": numpy.arange(6.0), "b": numpy.zeros(2)}
    tessera.save_file(state, saved / "model.safetensors")
    tessera.save_file(state, saved / "step1")
    files = {str(path.relative_to(saved)): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    hub = hub_server.Hub(private=hub_server.Repo(files, readers={"hf_good"}))
    with hub.serving() as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        yield "hf://org/private"
    assert hub.leaks == []


def test_a_model_is_opened_loaded_and_converted(model, tmp_path):
    with tessera.open(model) as checkpoint:
        assert sorted(checkpoint) == ["b", "w"]
        assert checkpoint["w"][2:4].tolist() == [2.0, 3.0]
    assert tessera.load(f"{model}/model.safetensors", framework="numpy")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    tessera.convert(model, tmp_path / "copy.safetensors")
    assert tessera.diff(model, tmp_path / "copy.safetensors") == []


def test_errors_say_what_to_do(model, monkeypatch):
    with pytest.raises(tessera.Error, match="read only"):
        tessera.save_file({"w": numpy.zeros(2)}, f"{model}/new.safetensors")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with pytest.raises(FileNotFoundError, match="set HF_TOKEN"):
        tessera.open(model)


def test_the_drop_in_reads_from_the_hub(torch, model):
    import tessera.torch

    into = {"w": torch.zeros(6, dtype=torch.float64)}
    tessera.torch.load(into, checkpoint_id=f"{model}/step1")
    assert into["w"].tolist() == [0, 1, 2, 3, 4, 5]
