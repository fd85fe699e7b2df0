"""Trees as they are handed over: views of one memory in any order, scalars of numpy, and what a checkpoint has no place for."""

import itertools
import subprocess
import sys
import textwrap

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera

TARGETS = ["x.pt", "x.safetensors", "x"]


def require_same(state, path):
    tessera.save_file(state, path)
    back = tessera.load(path)
    assert list(back) == list(state)
    for key, array in state.items():
        numpy.testing.assert_array_equal(back[key], numpy.asarray(array), key)
    return back


@pytest.mark.parametrize("target", TARGETS)
def test_views_of_one_array_in_any_order(target, tmp_path):
    whole = numpy.arange(10, dtype="float32")
    views = {"part": whole[:2], "none": whole[:0], "whole": whole, "rows": whole.reshape(2, 5), "end": whole[10:]}
    views["bits"] = whole.view("uint32")[:3]
    for number, order in enumerate(itertools.permutations(views)):
        if number % 7 == 0:
            require_same({key: views[key] for key in order}, tmp_path / target)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["u1", "i2", "f4", "f8"]), st.integers(0, 12), st.integers(0, 12)), min_size=1))
def test_drawn_views_of_one_memory(tmp_path_factory, drawn):
    memory = numpy.arange(96, dtype="u1")
    state = {str(i): memory.view(dtype)[begin:end] for i, (dtype, begin, end) in enumerate(drawn)}
    require_same(state, tmp_path_factory.mktemp("views") / "x.safetensors")


@pytest.mark.parametrize("order", [["part", "whole"], ["whole", "part"]])
def test_what_begins_in_one_place_is_one_storage_in_either_order(order, tmp_path, torch):
    whole = numpy.arange(10, dtype="float32")
    views = {"part": whole[:2], "whole": whole}
    require_same({key: views[key] for key in order}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt")
    back["whole"][1] = 9
    assert back["part"].tolist() == [0, 9]


@pytest.mark.parametrize("target", TARGETS)
def test_tensors_over_views_of_one_array(target, tmp_path, torch):
    whole = numpy.arange(10, dtype="float32")
    state = {"part": torch.from_numpy(whole[:2]), "none": torch.from_numpy(whole[:0]), "whole": torch.from_numpy(whole)}
    require_same(state, tmp_path / target)
    if target == "x.pt":
        back = torch.load(tmp_path / target)
        assert all(torch.equal(back[key], state[key]) for key in state)
