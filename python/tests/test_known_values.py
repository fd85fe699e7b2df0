"""Values of classes that everybody knows: what a file has of them comes back as it was, and nothing is made of what does not fit."""

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import random
import string
import struct
import sys
import warnings
import uuid
import zipfile

import numpy
import pytest

import tessera
from tessera import Opaque

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def require_same(found, value):
    assert type(found) is type(value), (found, value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        # numpy's own unpickling turns big-endian numbers around, if the pickle is none of protocol 5.
        found, value = (item.astype(item.dtype.newbyteorder("=")) for item in (found, value))
        assert found.dtype == value.dtype and found.shape == value.shape and found.tobytes() == value.tobytes()
        if isinstance(value, numpy.ndarray):
            assert found.flags.writeable and found.flags.f_contiguous == value.flags.f_contiguous
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for key, item in value.items():
            require_same(found[key], item)
    elif isinstance(value, (list, tuple, collections.deque)):
        assert len(found) == len(value) and getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
        for one, item in zip(found, value):
            require_same(one, item)
    elif isinstance(value, slice):
        require_same((found.start, found.stop, found.step), (value.start, value.stop, value.step))
    elif isinstance(value, decimal.Decimal):
        assert str(found) == str(value)
    else:
        assert found == value and getattr(found, "fold", 0) == getattr(value, "fold", 0)


class Draw:
    """Values, by a generator that has a seed."""

    def __init__(self, seed, torch=None, fold=False):
        self.random = random.Random(seed)
        self.torch = torch
        self.fold = fold  # before protocol 4, pickle loses which of two equal times it is

    def value(self, depth=2):
        kinds = [self.array, self.scalar, self.span, self.moment, self.number, self.name, self.constant]
        if depth > 0:
            kinds += [self.counter, lambda: self.deque(depth), lambda: slice(self.value(0), None, self.number())]
        if self.torch is not None:
            kinds.append(self.of_torch)
        return self.random.choice(kinds)()

    def bytes_of(self, dtype, count):
        raw = self.random.randbytes(count * dtype.itemsize)
        return bytes(byte & 1 for byte in raw) if dtype.kind == "b" else raw

    def dtype(self):
        return numpy.dtype(self.random.choice("<>") + self.random.choice(DTYPES))

    def array(self):
        shape = tuple(self.random.randrange(4) for _ in range(self.random.randrange(4)))
        dtype = self.dtype()
        count = int(numpy.prod(shape))
        order = self.random.choice("CF")
        array = numpy.frombuffer(self.bytes_of(dtype, count), dtype).reshape(shape, order=order).copy("K")
        axes = self.random.sample(range(array.ndim), array.ndim)
        return self.random.choice([array, array.transpose(axes)])

    def scalar(self):
        dtype = self.dtype()
        return numpy.frombuffer(self.bytes_of(dtype, 1), dtype)[0]

    def integer(self):
        bits = self.random.choice([3, 8, 40, 70])
        return self.random.getrandbits(bits) * self.random.choice([1, -1])

    def span(self):
        return range(self.integer(), self.integer(), self.integer() or 1)

    def zone(self):
        offset = datetime.timedelta(minutes=self.random.randrange(-1439, 1440))
        return self.random.choice(
            [None, datetime.timezone.utc, datetime.timezone(offset), datetime.timezone(offset, self.text())]
        )

    def moment(self):
        clock = [self.random.randrange(bound) for bound in (24, 60, 60)]
        micros = self.random.choice([0, self.random.randrange(1_000_000)])
        day = datetime.date.fromordinal(self.random.randrange(1, datetime.date.max.toordinal() + 1))
        time = datetime.time(*clock, micros, tzinfo=self.zone(), fold=int(self.fold and clock[0] % 2))
        delta = datetime.timedelta(self.random.randrange(-999_999_999, 1_000_000_000), clock[0], micros)
        both = datetime.datetime.combine(day, time)
        return self.random.choice([day, time, both, delta, self.zone() or datetime.timezone.utc])

    def number(self):
        decimals = ["1.5", "-0", "1E+999", "NaN", "-Infinity", "0.1e-70", str(self.integer())]
        return self.random.choice(
            [
                decimal.Decimal(self.random.choice(decimals)),
                fractions.Fraction(self.integer(), abs(self.integer()) + 1),
                uuid.UUID(int=self.random.getrandbits(128), is_safe=self.random.choice(list(uuid.SafeUUID))),
            ]
        )

    def text(self):
        return "".join(self.random.choice(string.printable + "äß€") for _ in range(self.random.randrange(1, 6)))

    def name(self):
        parts = [self.text().replace("/", "").replace("\0", "") or "a" for _ in range(self.random.randrange(3))]
        kind = self.random.choice([pathlib.Path, pathlib.PurePosixPath, pathlib.PureWindowsPath])
        return kind(self.random.choice(["", "/", "c:/"]), *parts)

    def constant(self):
        return self.random.choice([..., NotImplemented, self.dtype()])

    def counter(self):
        return collections.Counter({self.text(): self.integer() for _ in range(self.random.randrange(4))})

    def deque(self, depth):
        items = [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return collections.deque(items, self.random.choice([None, len(items), len(items) + 3]))

    def of_torch(self):
        torch = self.torch
        sizes = torch.Size(self.random.randrange(5) for _ in range(self.random.randrange(3)))
        device = torch.device(self.random.choice(["cpu", "cuda", "cuda:1", "meta"]))
        dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint3, torch.bits8, torch.quint4x2]
        return self.random.choice([self.random.choice(dtypes), sizes, device])


@pytest.mark.parametrize("seed", range(20))
def test_drawn_values_through_every_kind_that_keeps_them(seed, tmp_path, torch):
    protocol = [2, 3, 4, 5][seed % 4]
    draw = Draw(seed, torch, fold=protocol > 3)
    state = {f"{number}": draw.value() for number in range(20)}
    state["again"] = [state["3"], state["3"]]
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    require_same(torch.load(tmp_path / "a.pt", weights_only=False), state)
    tessera.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    tessera.convert(tmp_path / "dcp", tmp_path / "b.pt")
    require_same(torch.load(tmp_path / "b.pt", weights_only=False), state)
    for source in ("a.pt", "dcp", "b.pt"):
        require_same(tessera.load(tmp_path / source), state)
    loaded = tessera.load(tmp_path / "a.pt")
    assert loaded["again"][0] is loaded["again"][1]
    for target in ("c.pt", "c"):
        tessera.save_file(loaded, tmp_path / target)
        require_same(tessera.load(tmp_path / target), state)
    written = torch.load(tmp_path / "c.pt", weights_only=False)
    require_same(written, state)
    assert written["again"][0] is written["again"][1] is written["3"]


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "olmo-full", "olmo-legacy", "olmo-local", "olmo-torch-new"])
@pytest.mark.filterwarnings("ignore:.*there are no optim")
def test_drawn_values_of_a_trainer_in_every_kind(kind, tmp_path, torch):
    draw = Draw(kind, torch)
    state = {f"{number}": draw.value() for number in range(60)}
    torch.save({"model": {"w": torch.ones(2, 3), "b": torch.zeros(3)}, "train": state}, tmp_path / "a.pt")
    tessera.convert(tmp_path / "a.pt", tmp_path / kind, to=kind)
    require_same(tessera.load(tmp_path / kind)["train"], state)
    tessera.convert(tmp_path / kind, tmp_path / "b.pt")
    require_same(torch.load(tmp_path / "b.pt", weights_only=False)["train"], state)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_of_pickle(protocol, tmp_path):
    draw = Draw(100 + protocol, fold=protocol > 3)
    state = {f"{number}": draw.value() for number in range(200)}
    (tmp_path / "a.pt").write_bytes(archive(pickle.dumps(state, protocol)))
    require_same(tessera.load(tmp_path / "a.pt", framework="numpy"), state)


def test_the_states_of_generators(tmp_path, torch):
    states = {"python": random.getstate(), "numpy": numpy.random.RandomState(3).get_state()}
    torch.save(states, tmp_path / "a.pt")
    found = tessera.load(tmp_path / "a.pt")
    other = numpy.random.RandomState(1)
    other.set_state(found["numpy"])
    assert other.randint(1 << 30) == numpy.random.RandomState(3).randint(1 << 30)
    assert found["python"] == states["python"]


def test_what_is_loaded_of_numpy_is_saved_as_it_was(tmp_path, torch):
    state = {"a": numpy.arange(4, dtype=">i4"), "w": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    loaded = tessera.load(tmp_path / "a.pt", framework="numpy")
    loaded["a"][1] = 9
    loaded["part"], loaded["new"] = loaded["a"][::2], loaded["a"] + 1
    tessera.save_file(loaded, tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert type(back["a"]) is numpy.ndarray and back["a"].tolist() == [0, 9, 2, 3]
    # A view is of the file's memory, what was computed is another array.
    assert type(back["part"]) is numpy.ndarray and back["part"].tolist() == [0, 2]
    assert isinstance(back["w"], torch.Tensor) and isinstance(back["new"], torch.Tensor)


def test_loaded_arrays_in_a_safetensors_file_are_told_of(tmp_path):
    (tmp_path / "a.pt").write_bytes(archive(pickle.dumps({"a": numpy.arange(4.0), "step": 7}, 2)))
    loaded = tessera.load(tmp_path / "a.pt", framework="numpy")
    loaded["rows"] = numpy.lib.stride_tricks.as_strided(loaded["a"], (2, 2), (8, 8))
    loaded["matrix"] = loaded["a"].view(numpy.matrix)  # of a class of its own: a tensor
    with pytest.warns(UserWarning, match="2 arrays .* in the file's metadata"):
        report = tessera.save_file(loaded, tmp_path / "a.safetensors")
    assert report.values_in_metadata == 3
    with tessera.safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert list(file.keys()) == ["matrix"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tessera.save_file(loaded, tmp_path / "b.pt").values_in_metadata == 0
        own = {"a": numpy.array(loaded["a"]), "step": 7}
        assert tessera.save_file(own, tmp_path / "b.safetensors").values_in_metadata == 1
    again = tessera.load(tmp_path / "a.safetensors", framework="numpy")
    require_same(again["a"], loaded["a"])
    require_same(again["rows"], numpy.array([[0.0, 1.0], [1.0, 2.0]]))


def test_values_of_torch_need_torch(tmp_path):
    names = {"device": Opaque("torch.device", ("cpu",)), "dtype": Opaque("torch.float32"), "size": Opaque("torch.Size", ((1, 2),))}
    tessera.save_file(names, tmp_path / "a.pt")
    found = tessera.load(tmp_path / "a.pt", framework="numpy")
    torch = sys.modules.get("torch")
    if torch is None:
        assert [value.name for value in found.values()] == [value.name for value in names.values()]
    else:
        assert found == {"device": torch.device("cpu"), "dtype": torch.float32, "size": torch.Size([1, 2])}


def test_without_numpy_its_arrays_are_opaque_with_their_elements(tmp_path, monkeypatch):
    arrays = {"rows": numpy.arange(6).reshape(2, 3), "columns": numpy.arange(6, dtype=">f4").reshape(2, 3, order="F"), "none": numpy.ones((0, 2))}
    state = {**arrays, "scalar": numpy.float64(1.5)}
    (tmp_path / "a.pt").write_bytes(archive(pickle.dumps(state, 2)))
    torch = sys.modules.get("torch")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "numpy", None)
        found = tessera.load(tmp_path / "a.pt", framework="torch")
        assert all(isinstance(value, Opaque) for value in found.values())
        tessera.save_file(found, tmp_path / "b.pt")
        with tessera.open(tmp_path / "a.pt") as checkpoint:
            elements = checkpoint["columns"].elements
            assert (elements.dtype, elements.shape) == ("float32", (2, 3))
        if torch is not None:
            assert {name: value.elements.tolist() for name, value in found.items()} == {
                name: value.tolist() for name, value in state.items()
            }
    require_same(tessera.load(tmp_path / "b.pt", framework="numpy"), state)


class Call:
    """Pickled as a call of `function`, which nobody makes before it is loaded."""

    def __init__(self, function, arguments, state=None, items=None, pairs=None):
        self.reduced = (function, arguments, state, None if items is None else iter(items))
        self.reduced += (None if pairs is None else iter(pairs),)

    def __reduce__(self):
        return self.reduced


class Thing:
    """A class of nobody's."""


RECONSTRUCT, ARRAY = numpy.ones(1).__reduce__()[0], (numpy.ndarray, (0,), b"b")
SCALAR, BUFFER = numpy.float64(1).__reduce__()[0], numpy.ones(1).__reduce_ex__(5)[0]
F4, OBJECTS = numpy.dtype("f4"), numpy.dtype("O")
HUGE = 1 << 62


def hostile():
    """Calls with arguments of which their class would make nothing, or what no honest pickle has."""
    yield from (
        Call(RECONSTRUCT, ARRAY, (1, shape, F4, False, content))
        for shape, content in [
            ((2,), b"1234"), ((1,), b"12345"), ((-1,), b"1234"), ((HUGE, HUGE), b""), ((HUGE, HUGE, 4), b""), ((HUGE,), b"1234"),
            ((1.0,), b"1234"), ("1", b"1234"), ((1,), [1]), ((1,), "1234"), (None, b""), ((True,), b"1234"), ((1,) * 65, b"1234"),
        ]
    )  # fmt: skip
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), OBJECTS, False, [Thing]))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), OBJECTS, False, b"12345678"))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), numpy.dtype("M8[s]"), False, b"12345678"))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), numpy.dtype("f4,i4"), False, b"12345678"))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), "f4", False, b"1234"))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), F4, 0, b"1234"))
    yield Call(RECONSTRUCT, ARRAY, (1, (1,), F4))
    yield Call(RECONSTRUCT, (numpy.matrix, (0,), b"b"), (1, (1,), F4, False, b"1234"))
    yield Call(SCALAR, (F4, b"12"))
    yield Call(SCALAR, (OBJECTS, b"12345678"))
    yield Call(SCALAR, (OBJECTS, Thing))
    yield Call(SCALAR, (F4,))
    yield Call(BUFFER, (b"12", F4, (1,), "C"))
    yield Call(BUFFER, (b"1234", F4, (1,), "K"))
    yield Call(BUFFER, (b"1234", F4, (HUGE, 4), "F"))
    yield from (Call(BUFFER, (b"12345678", F4, (1, 2), "K", axes)) for axes in [None, (0,), (0, 0), (1, 2), (1, -2), (True, 0), [1, 0], (HUGE, 0)])
    yield Call(BUFFER, (b"12345678", F4, (1, 2), "C", (1, 0)))
    yield Call(numpy.dtype, ("f4", False, True), (3, "<", (F4, (2,)), None, None, -1, -1, 0))
    yield Call(numpy.dtype, ("f4", False, True), (3, "x", None, None, None, -1, -1, 0))
    yield Call(numpy.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))
    yield Call(numpy.dtype, ("f99", False, True), (3, "<", None, None, None, -1, -1, 0))
    yield Call(datetime.date, (b"\x07\xe8\x0d\x01",))
    yield Call(datetime.date, (b"\x07\xe8\x02\x1e",))
    yield Call(datetime.datetime, (b"\x07\xe8\x01\x01\xff\xff\xff\xff\xff\xff",))
    yield Call(datetime.datetime, (b"\x07\xe8\x01\x01\x00\x00\x00\x00\x00\x00", Call(Thing, ())))
    yield Call(datetime.time, (b"\x01",))
    yield Call(datetime.timedelta, (HUGE, 0, 0))
    yield Call(datetime.timedelta, (0, -1, 0))
    yield Call(datetime.timedelta, (0.5, 0, 0))
    yield Call(datetime.timezone, (datetime.timedelta(2),))
    yield Call(decimal.Decimal, ("x",))
    yield Call(decimal.Decimal, ("1E+" + "9" * 30,))
    yield Call(decimal.Decimal, ("9" * 1_000_000,))
    yield Call(decimal.Decimal, ((0, (1,), 1 << 40),))
    yield Call(fractions.Fraction, (1, 0))
    yield Call(fractions.Fraction, (2, 4))
    yield Call(fractions.Fraction, ("1e999999999",))
    yield Call(fractions.Fraction, (1 << 100_000, 3))
    yield Call(uuid.UUID, ("00000000-0000-0000-0000-000000000005",))
    yield Call(range, (0, 1, 0))
    yield Call(range, ("a", 1, 1))
    yield Call(range, (0, 1 << 8_000_000, (1 << 4_000_000) + 1))
    yield Call(slice, ())
    yield Call(collections.Counter, (7,))
    yield Call(collections.Counter, ({},), {"update": 1})
    yield Call(collections.Counter, (), pairs=[("a", 1)])
    yield Call(collections.deque, ((), -1))
    yield Call(collections.deque, ((), 1 << 70))
    yield Call(collections.deque, ((), 1), items=[1, 2])
    yield Call(collections.deque, ("abc",))
    yield Call(pathlib.PosixPath, (1,))
    yield Call(pathlib.PurePosixPath, ("a",), {"_drv": "x"})
    yield Call(pathlib.WindowsPath, ("c:/",))
    yield Call(pathlib.PureWindowsPath, ("a",) * 100_000)


@pytest.mark.parametrize("number", range(len(list(hostile()))))
def test_what_does_not_fit_stays_as_it_is(number, tmp_path):
    value = list(hostile())[number]
    (tmp_path / "a.pt").write_bytes(archive(pickle.dumps({"a": value}, protocol=2)))
    before = set(sys.modules)
    try:
        found = tessera.load(tmp_path / "a.pt", framework="numpy")["a"]
    except tessera.Error as error:
        assert error.code in ("unsafe", "corrupt", "unsupported")
        return
    assert type(found) is Opaque and set(sys.modules) <= before | {"decimal", "fractions", "uuid"}
    # What it was is written again.
    tessera.save_file({"a": found}, tmp_path / "b.pt")
    again = tessera.load(tmp_path / "b.pt", framework="numpy")["a"]
    assert type(again) is Opaque and again.name == found.name


def test_a_shape_whose_product_nobody_waits_for(tmp_path):
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    dtype = b"cnumpy\ndtype\nX\x02\0\0\0f4\x89\x88\x87R(K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    for size, dimensions in ((2_000, 10_000), (8, 20_000), (20_000, 64)):
        shape = b"(\x8b" + struct.pack("<i", size) + b"\x7f" * size + b"q\x05" + b"h\x05" * (dimensions - 1) + b"t"
        (tmp_path / "a.pt").write_bytes(archive(b"\x80\x03" + array + b"(K\x01" + shape + dtype + b"\x89C\0tb."))
        assert type(tessera.load(tmp_path / "a.pt", framework="numpy")) is Opaque


def archive(pickled):
    """A file of torch.save that holds nothing but this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/byteorder", "little")
        made.writestr("archive/version", "3\n")
    return file.getvalue()


def test_keys_that_have_no_hash(tmp_path):
    # A deque has none in any version, so these pickles are written by hand.
    contents = {"dict": b"}ccollections\ndeque\n)RK\x01s.", "set": b"c__builtin__\nset\n]ccollections\ndeque\n)Ra\x85R."}
    for kind, content in contents.items():
        (tmp_path / f"{kind}.pt").write_bytes(archive(b"\x80\x02" + content))
        with pytest.raises(tessera.UnsupportedError, match="deque"):
            tessera.load(tmp_path / f"{kind}.pt", framework="numpy")


def test_sizes_and_devices_that_torch_has_no_place_for(tmp_path, torch):
    sizes = [((1 << 70,),), ((True,),), (1,), ((1,), 2)]
    devices = [("cuda", 1000), ("nosuch",), ("cpu", 1 << 70), (3,), ("cuda:1",), ("cpu", 0, 1)]
    calls = [(torch.Size, given) for given in sizes] + [(torch.device, given) for given in devices]
    (tmp_path / "a.pt").write_bytes(archive(pickle.dumps([Call(*call) for call in calls], 2)))
    assert {type(found) for found in tessera.load(tmp_path / "a.pt")} == {Opaque}


def test_metadata_of_a_dtype_is_kept(tmp_path, torch):
    dtype = numpy.dtype("i4", metadata={"unit": "m"})
    state = {"dtype": dtype, "array": numpy.arange(3).astype(dtype), "scalar": Call(SCALAR, (dtype, b"1234"))}
    torch.save(state, tmp_path / "a.pt")
    found = tessera.load(tmp_path / "a.pt")
    assert {type(value) for value in found.values()} == {Opaque}
    tessera.save_file(found, tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert back["dtype"].metadata == back["array"].dtype.metadata == {"unit": "m"} and back["array"].tolist() == [0, 1, 2]


def test_values_in_many_places_do_not_multiply(tmp_path):
    content, items = bytes(1 << 20), list(range(10_000))
    arrays = [Call(RECONSTRUCT, ARRAY, (1, (1 << 20,), numpy.dtype("u1"), False, content)) for _ in range(300)]
    for values in (arrays, [Call(collections.deque, (items,)) for _ in range(3000)]):
        (tmp_path / "a.pt").write_bytes(archive(pickle.dumps(values, 2)))
        with pytest.raises(tessera.LimitError):
            tessera.load(tmp_path / "a.pt", framework="numpy")


def test_derived_classes_are_nobodys(tmp_path):
    class Moment(datetime.datetime):
        pass

    for value in (Moment(2024, 1, 1), datetime.datetime(2024, 1, 1, tzinfo=Zone())):
        with pytest.raises(tessera.UnsupportedError):
            tessera.save_file({"a": value}, tmp_path / "a.pt")


class Zone(datetime.tzinfo):
    pass


def test_a_container_that_holds_itself(tmp_path):
    ring = collections.deque()
    ring.append(ring)
    with pytest.raises(tessera.InvalidArgumentError, match="contains itself"):
        tessera.save_file({"a": ring}, tmp_path / "a.pt")


def test_one_meaning_that_was_pickled_in_several_ways_is_no_difference(tmp_path):
    def saved(name, protocol, bytes_order, order, last=4.0):
        array = numpy.array([[1.0, 2.0], [3.0, last]], bytes_order + "f8", order=order)
        queue = Call(collections.deque, ((), 3), items=[last]) if protocol == 2 else Call(collections.deque, ([last], 3))
        state = {
            "array": array, "inside": collections.deque([[array], {"a": (array,)}]), "keys": ({numpy.float64(last): 1}, {numpy.float64(last)}),
            "scalar": numpy.float64(last), "queue": (queue,), "fraction": Call(fractions.Fraction, ("1/3",) if protocol == 2 else (1, 3)),
        }  # fmt: skip
        content = pickle.dumps(state, protocol)
        if protocol == 2:  # as numpy 1 has it
            content = content.replace(b"cnumpy._core.", b"cnumpy.core.")
        (tmp_path / name).write_bytes(archive(content))
        return tmp_path / name

    first, second = saved("a.pt", 2, ">", "C"), saved("b.pt", 5, "<", "F")
    assert tessera.diff(first, second) == tessera.diff(second, first) == []
    found = {row.name: (row.kind, row.text) for row in tessera.diff(first, saved("c.pt", 5, "<", "F", last=5.0))}
    differs = "1 of 4 elements differ, first at [1, 1], largest difference 1"
    assert found == {
        "array": ("value", differs),
        "inside": ("value", "a tensor or array in it: " + differs),
        "keys": ("value", "({np.float64(4.0): 1}, {np.float64(4.0)}) / ({np.float64(5.0): 1}, {np.float64(5.0)})"),
        "scalar": ("value", "np.float64(4.0) / np.float64(5.0)"),
        "queue": ("value", "(deque([4.0], maxlen=3),) / (deque([5.0], maxlen=3),)"),
    }


def test_what_differs_is_shown(tmp_path):
    one, other = list(range(1000)), list(range(1000))
    other[900] = "x"
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    for name, state in {"a": (one, float("nan"), numpy.ones(2)), "b": (other, nan, numpy.ones(2, "f4"))}.items():
        content = pickle.dumps(dict(zip(("list", "nan", "array"), state)), 2)
        (tmp_path / f"{name}.pt").write_bytes(archive(content))
    after = ", 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 912, 913, 914, 915, ..."
    assert {row.name: (row.kind, row.text) for row in tessera.diff(tmp_path / "a.pt", tmp_path / "b.pt")} == {
        "list": ("value", f"...896, 897, 898, 899, 900{after} / ...896, 897, 898, 899, 'x'{after}"),
        "nan": ("value", "both look like nan, and differ in what that does not show"),
        "array": ("dtype", "float64 / float32"),
    }


def test_nested_as_deep_as_a_pickle_may(tmp_path):
    for name, number in {"a": b"K\x01", "b": b"K\x02"}.items():
        content = b"\x80\x02}X\x01\0\0\0a" + b"ccollections\ndeque\n)R" * 990 + number + b"a" * 990 + b"s."
        (tmp_path / f"{name}.pt").write_bytes(archive(content))
    (found,) = tessera.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.kind == "value" and found.text.startswith("both look like deque([deque([")
