"""Every public name says what it is and shows it; the examples run."""

import doctest
import importlib
import pathlib

import numpy
import pytest

import tessera

PACKAGE = pathlib.Path(tessera.__file__).parent


@pytest.mark.parametrize("name", tessera.__all__)
def test_a_public_name_has_an_example(name):
    thing = getattr(tessera, name)
    assert thing.__doc__ and ">>> " in thing.__doc__


def test_public_names_for_torch_have_one(torch):
    module = importlib.import_module("tessera.torch")
    for name in module.__all__:
        assert ">>> " in getattr(module, name).__doc__, name


def modules():
    files = [file.relative_to(PACKAGE) for folder in ("", "torch") for file in (PACKAGE / folder).glob("_*.py")]
    return sorted(".".join(file.with_suffix("").parts) for file in files if file.stem not in ("__init__", "__main__"))


@pytest.mark.parametrize("name", modules())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_examples_run(name, example, tmp_path, request):
    if name.startswith("torch."):
        request.getfixturevalue("torch")
    existing = str(tmp_path / "existing.pt")
    tessera.save_file({"step": 1}, existing)
    names = {"tessera": tessera, "numpy": numpy, "example": example, "existing": existing, "directory": str(tmp_path)}
    module = importlib.import_module(f"tessera.{name}")
    failed, _ = doctest.testmod(module, extraglobs=names)
    assert failed == 0
