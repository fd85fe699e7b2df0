"""What `tessera.load` gives where nobody says."""

import os
import subprocess
import sys

import numpy
import pytest

import tessera

PROGRAM = """
import sys
sys.modules["ml_dtypes"] = None  # as where it is not installed
if {hidden}:
    sys.modules["torch"] = None
if {imports}:
    import torch
import tessera
try:
    with tessera.open({path!r}) as checkpoint:
        assert type(checkpoint.load()["w"]) is type(tessera.load({path!r})["w"])
    print(type(tessera.load({path!r})["w"]).__module__, "torch" in sys.modules)
except tessera.UnsupportedError as error:
    print(error)
"""


def printed(path, imports=False, hidden=False):
    """By a process of its own: this one may have imported torch long ago."""
    program = PROGRAM.format(path=str(path), imports=imports, hidden=hidden)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def half(tmp_path, torch):
    """bfloat16, which numpy lacks."""
    tessera.save_file({"w": torch.arange(3.0).to(torch.bfloat16)}, tmp_path / "half.safetensors")
    return tmp_path / "half.safetensors"


@pytest.fixture
def single(tmp_path):
    tessera.save_file({"w": numpy.arange(3, dtype="float32")}, tmp_path / "single.safetensors")
    return tmp_path / "single.safetensors"


def test_arrays_where_torch_is_not_imported(single):
    assert printed(single) == "numpy False"
    assert printed(single, hidden=True) == "numpy True"  # as a name that cannot be imported


def test_tensors_where_the_program_has_imported_torch(single, half):
    assert printed(single, imports=True) == "torch True"
    assert printed(half, imports=True) == "torch True"


def test_without_torch_the_error_says_both_ways_out(half):
    text = printed(half)
    assert text.startswith("unsupported: numpy has no bfloat16 without the package ml_dtypes: install that")
    assert "framework='torch'" in text


def test_who_names_a_framework_gets_that(single, torch):
    for name, kind in (("numpy", numpy.ndarray), ("np", numpy.ndarray), ("torch", torch.Tensor), (None, torch.Tensor)):
        assert type(tessera.load(single, framework=name)["w"]) is kind
        assert type(tessera.open(single).load(framework=name)["w"]) is kind
