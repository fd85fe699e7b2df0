"""Trees as they are handed over: views of one memory in any order, scalars of numpy, and what a checkpoint has no place for."""

import itertools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera

TARGETS = ["x.pt", "x.safetensors", "x"]


def require_same(state, path):
    tessera.save_file(state, path)
    back = tessera.load(path, framework="numpy")
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


NUMBERS = [numpy.float16(1.5), numpy.float64(0.1), numpy.uint64(2**64 - 1), numpy.bool_(True), numpy.complex64(1 + 2j)]
TEXTS = [(numpy.str_("é"), "é"), (numpy.bytes_(b"a"), b"a"), (numpy.void(b"ab"), b"ab")]


def test_scalars_stay_numbers_of_numpy_and_texts_become_pythons(tmp_path):
    expected = {**{str(number): number for number in NUMBERS}, **{repr(scalar): plain for scalar, plain in TEXTS}}
    state = {**{str(number): number for number in NUMBERS}, **{repr(scalar): scalar for scalar, _ in TEXTS}}
    for name in ("x.pt", "x.safetensors", "x"):
        tessera.save_file(state, tmp_path / name)
        found = tessera.load(tmp_path / name, framework="numpy")
        assert found == expected and {key: type(item) for key, item in found.items()} == {
            key: type(item) for key, item in expected.items()
        }


def test_keys_that_are_scalars_have_names_as_numbers_have(tmp_path):
    state = {"state": {numpy.int64(3): {"step": 1}, 4: {"step": 2}}}
    tessera.save_file(state, tmp_path / "dcp")
    with tessera.open(tmp_path / "dcp") as checkpoint:
        assert list(checkpoint) == ["state.3.step", "state.4.step"]
    tessera.save_file(state, tmp_path / "a.pt")
    assert tessera.load(tmp_path / "a.pt") == state


def tied_model(torch):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(70, 50)
            self.norm = torch.nn.LayerNorm(50)
            self.head = torch.nn.Linear(50, 70, bias=False)
            self.head.weight = self.emb.weight

    return Tied()


def tied(torch, state):
    names = {"emb.weight", "head.weight"} & set(state)
    return len(names) == 2 and len({state[name].untyped_storage().data_ptr() for name in names}) == 1


def test_tied_tensors_as_safetensors_has_them(tmp_path, torch):
    theirs_of = pytest.importorskip("safetensors.torch")
    model, path = tied_model(torch), lambda name: str(tmp_path / name)
    state = model.state_dict()
    torch.save(state, path("a.pt"))
    theirs_of.save_model(model, path("theirs.safetensors"))
    report = tessera.convert(path("a.pt"), path("ours.safetensors"))
    assert report.notes == ["head.weight is emb.weight: tied tensors are written once (--keep-duplicates)"]
    tessera.save_file(state, path("saved.safetensors"))
    tessera.convert(path("theirs.safetensors"), path("again.safetensors"))
    for name in ("theirs", "ours", "saved", "again"):
        file = path(f"{name}.safetensors")
        assert sorted(theirs_of.load_file(file)) == ["emb.weight", "norm.bias", "norm.weight"], name
        with theirs_of.safe_open(file, "pt") as opened:
            assert opened.metadata()["head.weight"] == "emb.weight", name
        fresh = tied_model(torch)
        assert theirs_of.load_model(fresh, file) == (set(), []) and fresh.head.weight is fresh.emb.weight
        assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
        # Back, and what has no ties.
        assert tessera.diff(path("a.pt"), file) == [], name
        tessera.convert(file, path(f"{name}.pt"))
        back = torch.load(path(f"{name}.pt"))
        assert tied(torch, back) and torch.equal(back["head.weight"], state["head.weight"]), name
        tessera.convert(file, path(f"{name}-dcp"), to="dcp")
        assert all(found.kind == "type" for found in tessera.diff(path("a.pt"), path(f"{name}-dcp"))), name
        loaded = tessera.load(file, framework="torch")
        assert torch.equal(loaded["head.weight"], state["head.weight"])
        assert tessera.verify(file).findings == [], name


def test_both_of_tied_tensors_for_who_needs_them(tmp_path, torch):
    theirs_of = pytest.importorskip("safetensors.torch")
    state, path = tied_model(torch).state_dict(), lambda name: str(tmp_path / name)
    torch.save(state, path("a.pt"))
    assert tessera.convert(path("a.pt"), path("ours.safetensors"), keep_duplicates=True).notes == []
    tessera.save_file(state, path("saved.safetensors"), keep_duplicates=True)
    for name in ("ours", "saved"):
        found = theirs_of.load_file(path(f"{name}.safetensors"))
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
    for refused in ("b.pt", "b"):
        with pytest.raises(tessera.InvalidArgumentError):
            tessera.save_file(state, path(refused), keep_duplicates=True)
    with pytest.raises(tessera.InvalidArgumentError):
        tessera.convert(path("a.pt"), path("b.pt"), keep_duplicates=True)


# Their item() is such a scalar again, has lost the names of fields, or is an object of a class.
OTHERS = [numpy.longdouble(1.5), numpy.clongdouble(1.5), numpy.zeros(1, [("a", "i4")])[0], numpy.datetime64("2020-01-01")]
# Their item() is a number without its unit, or None.
OTHERS += [numpy.datetime64(1, "ns"), numpy.timedelta64(5, "Y"), numpy.timedelta64(5, "ns"), numpy.timedelta64(5, "s")]
OTHERS += [numpy.datetime64("NaT"), numpy.datetime64("NaT", "ns"), numpy.timedelta64("NaT", "D")]


@pytest.mark.parametrize("scalar", OTHERS, ids=lambda scalar: f"{scalar.dtype}-{scalar}")
def test_scalars_that_python_has_nothing_for(scalar, tmp_path):
    for tree in ({"a": {"x": scalar}}, {"a": {scalar: 1}} if scalar.dtype.kind != "V" else {"a": [scalar]}):
        with pytest.raises(tessera.UnsupportedError, match="numpy") as refused:
            tessera.save_file(tree, tmp_path / "x.pt")
        assert refused.value.key.startswith("a.") and str(scalar.dtype) in str(refused.value)
    array = numpy.array([scalar, scalar])
    with pytest.raises(tessera.UnsupportedError):
        tessera.save_file({"x": array}, tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []


def test_depth_ends_where_no_path_grows():
    with pytest.raises(tessera.LimitError, match="too deep"):
        tessera._core.make_tree({"a": object()}, lambda thing: ("value", object()))
    deepest = "leaf"
    for _ in range(1000):
        deepest = [deepest]
    tessera._core.make_tree(deepest, lambda thing: None)
    with pytest.raises(tessera.LimitError, match="too deep"):
        tessera._core.make_tree([deepest], lambda thing: None)
