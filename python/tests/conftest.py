"""What all tests share: an example, and the switch that hides torch (TESSERA_WITHOUT_TORCH=1)."""

import os
import sys

if os.environ.get("TESSERA_WITHOUT_TORCH"):
    sys.modules["torch"] = None  # importing it fails, as where it is not installed

import numpy
import pytest

import tessera


@pytest.fixture
def example(tmp_path):
    """A DCP directory with the tensor model.w and the value step."""
    path = str(tmp_path / "step400")
    tessera.save_file({"model": {"w": numpy.arange(12, dtype="float32").reshape(3, 4)}, "step": 7}, path)
    return path


@pytest.fixture
def torch():
    """The module; tests that need it are skipped where it is hidden."""
    return pytest.importorskip("torch")
