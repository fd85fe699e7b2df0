"""Opening, slices and values, beside numpy and torch."""

import collections
import os
import pathlib
import re
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera


def test_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tessera.__version__)


def test_a_checkpoint_is_a_mapping(example):
    with tessera.open(example) as checkpoint:
        assert (checkpoint.kind, list(checkpoint), len(checkpoint)) == ("dcp", ["model.w", "step"], 2)
        assert "step" in checkpoint and "stop" not in checkpoint and 5 not in checkpoint
        assert checkpoint["step"] == 7 and checkpoint.get("stop") is None
        assert checkpoint.names("model.*") == ["model.w"]
        assert checkpoint.world_size == 1 and checkpoint.warnings == [] and checkpoint.path == example
        assert list(checkpoint.only("model")) == ["model.w"]
        assert "dcp" in repr(checkpoint) and "float32 [3, 4]" in repr(checkpoint["model.w"])


def test_paths_are_of_any_kind(example):
    for path in (example, pathlib.Path(example), "file://" + example):
        with tessera.open(path) as checkpoint:
            assert checkpoint["step"] == 7
    with pytest.raises(TypeError):
        tessera.open(5)


def test_a_whole_module_is_its_state_dict(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(model, tmp_path / "whole.pt")
    with pytest.warns(UserWarning, match="the file is a whole module, torch.nn.modules.container.Sequential"):
        checkpoint = tessera.open(tmp_path / "whole.pt")
    assert list(checkpoint) == list(model.state_dict())
    assert numpy.array_equal(checkpoint["1.running_var"].numpy(), numpy.ones(3, numpy.float32))
    with tessera.open(tmp_path / "whole.pt", raw=True) as raw:
        assert len(raw) == 1 and raw.warnings == []
    tessera.convert(tmp_path / "whole.pt", tmp_path / "again" / "whole.pt", raw=True)
    assert (tmp_path / "again" / "whole.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_a_closed_checkpoint_says_so(example):
    checkpoint = tessera.open(example)
    weight = checkpoint["model.w"]
    checkpoint.close()
    checkpoint.close()
    for use in (lambda: checkpoint["step"], lambda: weight[0], lambda: weight.numpy(), lambda: len(checkpoint)):
        with pytest.raises(tessera.InvalidArgumentError, match="closed"):
            use()
    assert weight.shape == (3, 4) and "closed" in repr(checkpoint)


def test_a_slice_reads_its_bytes_alone(tmp_path):
    path = tmp_path / "large.safetensors"
    tessera.save_file({"w": numpy.zeros((4096, 1024), "float32")}, path)
    with tessera.open(path) as checkpoint:
        rows = numpy.empty((8, 1024), "float32")
        report = checkpoint["w"].read_into(rows, slice(0, 8))
        assert report.bytes_needed == rows.nbytes
        assert report.bytes_read <= 2 << 20  # digests are of blocks of a MiB


INDICES = st.one_of(
    st.integers(-4, 3), st.slices(4), st.just(Ellipsis), st.just(None), st.builds(slice, *[st.none()] * 3)
)
CUBE = numpy.arange(64, dtype="int32").reshape(4, 4, 4)


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    path = tmp_path_factory.mktemp("cube") / "cube.pt"
    tessera.save_file({"w": CUBE}, path)
    with tessera.open(path) as checkpoint:
        yield checkpoint["w"]


@settings(max_examples=300, deadline=None)
@given(index=st.one_of(INDICES, st.lists(INDICES, max_size=5).map(tuple)))
def test_an_index_means_what_it_means_in_numpy(cube, index):
    try:
        expected = CUBE[index]
    except IndexError:
        with pytest.raises(IndexError):
            cube[index]
        return
    found = cube[index]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found == expected).all()


@settings(max_examples=100, deadline=None)
@given(index=st.one_of(INDICES, st.lists(INDICES, max_size=3).map(tuple)))
def test_torch_gets_the_same(cube, index):
    torch = pytest.importorskip("torch")
    try:
        expected = CUBE[index]
    except IndexError:
        return
    assert torch.equal(cube.torch(index), torch.from_numpy(numpy.array(expected)))


def test_what_is_no_basic_index_is_refused(cube):
    for index in ([0, 1], True, "0", 1.0, numpy.array([1])):
        with pytest.raises(TypeError, match="indexed by integers"):
            cube[index]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_memory_of_any_strides_is_filled(cube, data):
    begin = data.draw(st.tuples(*[st.integers(0, 3)] * 3))
    end = tuple(data.draw(st.integers(low, 4)) for low in begin)
    index = tuple(slice(low, high) for low, high in zip(begin, end))
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * 3))
    order = data.draw(st.permutations(range(3)))
    sizes = [(high - low) * step for low, high, step in zip(begin, end, steps)]
    memory = numpy.full([sizes[axis] for axis in order], -1, "int64").transpose(numpy.argsort(order))
    target = memory[tuple(slice(None, None, step) for step in steps)]
    cube.read_into(target, index)
    assert (target == CUBE[index]).all()
    assert (memory == -1).sum() == memory.size - target.size


def test_memory_that_cannot_be_filled_is_refused(cube):
    read_only = numpy.zeros((4, 4, 4), "int32")
    read_only.flags.writeable = False
    overlapping = numpy.lib.stride_tricks.as_strided(numpy.zeros(100, "int32"), (4, 4, 4), (16, 16, 4))
    wrong = numpy.zeros((4, 4), "int32")
    backwards = numpy.zeros((4, 4, 4), "int32")[::-1]
    for target in (read_only, overlapping, wrong, backwards, "text", b"bytes"):
        with pytest.raises(tessera.InvalidArgumentError):
            cube.read_into(target)
    for target in (numpy.zeros((4, 4, 4), ">i4"), numpy.zeros((4, 4, 4), "U1")):
        with pytest.raises(tessera.UnsupportedError):
            cube.read_into(target)


def test_elements_are_converted_and_the_rest_is_refused(cube):
    target = numpy.zeros((4, 4, 4), "float64")
    cube.read_into(target)
    assert (target == CUBE).all()
    with pytest.raises(tessera.Error):
        cube.read_into(numpy.zeros((4, 4, 4), "int8"))


DTYPES = [float, "f8", "float64", "float", "<f8", numpy.float64, numpy.dtype("f8"), numpy.double]


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_a_dtype_is_whatever_numpy_takes_for_one(dtype, example, tmp_path):
    assert tessera.load(example, framework="numpy", dtype=dtype)["model"]["w"].dtype == numpy.float64
    with tessera.open(example) as checkpoint:
        assert checkpoint["model.w"].numpy(dtype=dtype).dtype == numpy.float64
    tessera.convert(example, tmp_path / "x.safetensors", only=["model"], dtype=dtype)
    with tessera.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint["model.w"].dtype == "float64"


@pytest.mark.parametrize("dtype", ["float31", ",", object, dict, type(None), str, 3, ">f8", numpy.dtype(">f8"), "M8[ns]"], ids=repr)
def test_what_is_no_dtype(dtype, example):
    with pytest.raises(tessera.UnsupportedError, match="there is no dtype"):
        tessera.load(example, dtype=dtype)


def test_arrays_of_zero_elements_and_dimensions(tmp_path):
    path = tmp_path / "odd.safetensors"
    state = {"none": numpy.zeros((0, 3), "float16"), "one": numpy.array(2.5), "long": numpy.zeros((1,) * 10)}
    tessera.save_file(state, path)
    with tessera.open(path) as checkpoint:
        for name, array in state.items():
            assert checkpoint[name][...].shape == array.shape
        assert checkpoint["one"][()] == 2.5 and checkpoint["none"][:, 1:].shape == (0, 2)
        assert numpy.asarray(checkpoint["one"]) == 2.5 and len(checkpoint["none"]) == 0


def test_values_are_plain_objects(tmp_path):
    names = {
        "none": None, "bool": True, "int": -(10**40), "float": 0.1, "complex": 1 - 2j, "text": "ü\udfff", "bytes": b"\0",
        "bytearray": bytearray(b"x"), "list": [1, [2, (3,)]], "tuple": (1, "a"), "set": {1, 2}, "frozen": frozenset({3}),
        5: "five", (1, 2): "pair", "lone\ud800": 1, "dict": {}, "empty": [],
        "ordered": collections.OrderedDict(b=1, a=2), "default": collections.defaultdict(list, x=[1]),
    }  # fmt: skip
    tessera.save_file(names, tmp_path / "values.pt")
    back = tessera.load(tmp_path / "values.pt")
    assert back == names
    assert all(type(back[key]) is type(value) for key, value in names.items())
    assert back["default"].default_factory is list and list(back["ordered"]) == ["b", "a"]


def test_what_is_shared_is_shared(tmp_path):
    inner = [1, 2]
    array = numpy.arange(3.0)
    tessera.save_file({"a": inner, "b": [inner, inner], "x": array, "y": array}, tmp_path / "shared.pt")
    back = tessera.load(tmp_path / "shared.pt", framework="numpy")
    assert back["a"] is back["b"][0] and back["b"][0] is back["b"][1]
    back["x"][0] = 5
    assert back["y"][0] == 5


def test_tensors_in_tuples_are_read_with_their_value(tmp_path):
    tessera.save_file({"pair": (1, numpy.arange(4)), "n": 1}, tmp_path / "pair.pt")
    with tessera.open(tmp_path / "pair.pt") as checkpoint:
        one, tensor = checkpoint["pair"]
        assert one == 1 and tensor[1:3].tolist() == [1, 2] and tensor.shape == (4,)
        target = numpy.zeros(2)
        tensor.read_into(target, slice(2, 4))
        assert target.tolist() == [2.0, 3.0]


def test_a_part_is_loaded(example):
    assert tessera.load(example, only=["step"]) == {"step": 7}
    loaded = tessera.load(example, framework="numpy", dtype="float64")
    assert loaded["model"]["w"].dtype == numpy.float64 and loaded["model"]["w"][2, 3] == 11
    with pytest.raises(tessera.KeyNotFoundError):
        tessera.load(example, only=["modle"])
    with pytest.raises(tessera.UnsupportedError, match="float33"):
        tessera.load(example, dtype="float33")


@pytest.mark.parametrize("only", [["encoder"], ["encoder.*"], ["encoder.w", "encoder.b"]])
def test_a_part_is_loaded_and_converted_alike(only, tmp_path):
    part = {"w": numpy.ones(2), "b": numpy.zeros(1)}
    tessera.save_file({"encoder": part, "encoder2": part, "step": 7}, tmp_path / "a")
    tessera.convert(tmp_path / "a", tmp_path / "b.safetensors", only=only)
    assert sorted(tessera.open(tmp_path / "b.safetensors")) == ["encoder.b", "encoder.w"]
    loaded = tessera.load(tmp_path / "a", only=only)
    assert list(loaded) == ["encoder"] and sorted(loaded["encoder"]) == ["b", "w"]


def test_a_hundred_thousand_tiny_items(tmp_path):
    count = 100_000
    tessera.save_file({str(i): i for i in range(count)}, tmp_path / "many.pt")
    with tessera.open(tmp_path / "many.pt") as checkpoint:
        assert len(checkpoint) == count and checkpoint["99999"] == 99999


def test_a_tree_in_a_header_takes_time_in_proportion(tmp_path):
    def seconds(count):
        path = tmp_path / f"{count}.safetensors"
        tessera.save_file({"w": numpy.zeros(1), "pairs": [(i, i) for i in range(count)]}, path)
        took = []
        for _ in range(3):
            begin = time.perf_counter()
            tessera.open(path).close()
            took.append(time.perf_counter() - begin)
        return min(took)

    assert seconds(128_000) < 24 * seconds(16_000)  # 8 times as many


def test_types_that_numpy_lacks(tmp_path, torch):
    half = torch.arange(4.0).to(torch.bfloat16)
    tessera.save_file({"w": half}, tmp_path / "half.safetensors")
    with tessera.open(tmp_path / "half.safetensors") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), half)
        target = numpy.zeros(4, "float32")
        checkpoint["w"].read_into(target)
        assert target.tolist() == [0, 1, 2, 3]
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            with pytest.raises(tessera.UnsupportedError, match="ml_dtypes"):
                checkpoint["w"].numpy()
        else:
            assert checkpoint["w"].numpy().astype("float32").tolist() == [0, 1, 2, 3]


def test_opening_reads_no_element_and_leaks_no_file(example):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with tessera.open(example) as checkpoint:
            checkpoint["model.w"][0]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
