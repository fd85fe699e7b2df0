"""Every public name says what it is and shows it; the examples run."""

import doctest
import importlib
import inspect
import pkgutil

import numpy
import pytest

import tessera


def documented():
    return [getattr(tessera, name) for name in tessera.__all__]


@pytest.mark.parametrize("thing", documented(), ids=tessera.__all__)
def test_a_public_name_has_an_example(thing):
    assert thing.__doc__ and ">>> " in thing.__doc__
    signature_of = thing.__init__ if inspect.isclass(thing) else thing
    assert signature_of is not None


def modules():
    return [module.name for module in pkgutil.iter_modules(tessera.__path__) if module.name not in ("_core", "tests")]


@pytest.mark.parametrize("name", modules())
def test_examples_run(name, example, tmp_path):
    existing = str(tmp_path / "existing.pt")
    tessera.save_file({"step": 1}, existing)
    names = {"tessera": tessera, "numpy": numpy, "example": example, "existing": existing, "directory": str(tmp_path)}
    module = importlib.import_module(f"tessera.{name}")
    failed, _ = doctest.testmod(module, extraglobs=names)
    assert failed == 0
