"""Values that are no tensors: what comes back as it was, what is refused, and what can be allowed."""

import collections
import datetime
import os
import pathlib
import pickle
import types

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera._arrays import array_of  # noqa: E402
from tessera._values import Opaque  # noqa: E402
from tests_of_torch import LOADS, SAVES, run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def through(value, path):
    """What our two loaders make of what each of the three has saved."""
    for saver, save in SAVES.items():
        save({"x": value}, f"{path}-{saver}")
        for loader in ("reader", "ours"):
            into = {"x": None}
            LOADS[loader](into, f"{path}-{saver}")
            yield into["x"]


def require_same(found, value):
    assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
    assert found.tobytes() == value.tobytes()


@pytest.mark.parametrize("value", [numpy.float32(1.5), numpy.int64(-3), numpy.bool_(True), numpy.str_("ü"), numpy.complex128(1j)])
def test_scalars_of_numpy(value, tmp_path):
    for found in through(value, tmp_path / "a"):
        require_same(found, value)


def test_the_random_state_of_numpy_goes_on(tmp_path):
    generator = numpy.random.RandomState(7)
    for found in through(generator.get_state(), tmp_path / "a"):
        other = numpy.random.RandomState(1)
        other.set_state(found)
        assert other.randint(1 << 30) == numpy.random.RandomState(7).randint(1 << 30)
        found[1][0] = 1  # it may be written


DTYPES = st.sampled_from(["?", "i1", "<i4", ">i4", "u8", "<f2", ">f8", "c8", "S3", "<U2", ">U1", "S0", "U0"])


@given(DTYPES, st.lists(st.integers(0, 3), max_size=3), st.booleans(), st.integers(0, 9), st.integers(2, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_drawn_arrays(dtype, shape, is_fortran, seed, protocol):
    value = numpy.random.default_rng(seed).integers(0, 100, shape).astype(dtype, order="F" if is_fortran else "C")
    found = array_of(opaque(value, protocol))
    require_same(found, value)
    assert found.flags.writeable and found.flags.f_contiguous == value.flags.f_contiguous


def opaque(value, protocol):
    """As our reader gives what a pickle asks for."""
    callable_, arguments, *state = value.__reduce_ex__(protocol)
    name = f"{callable_.__module__}.{callable_.__qualname__}"

    def plain(part):
        if isinstance(part, numpy.dtype):
            return Opaque("numpy.dtype", part.__reduce__()[1], part.__reduce__()[2])
        if isinstance(part, type):
            return Opaque(f"{part.__module__}.{part.__qualname__}")
        if isinstance(part, pickle.PickleBuffer):
            return bytearray(part.raw())
        return tuple(plain(item) for item in part) if isinstance(part, tuple) else part

    return Opaque(name, plain(tuple(arguments)), plain(state[0]) if state else None)


F4 = Opaque("numpy.dtype", ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))
ARRAY, RECONSTRUCT = Opaque("numpy.ndarray"), "numpy._core.multiarray._reconstruct"


@pytest.mark.parametrize(
    "state",
    [
        (1, (2,), F4, False, b"1234"),
        (1, (1,), F4, False, b"12345678"),
        (1, (-1,), F4, False, b"1234"),
        (1, (1 << 62, 1 << 62), F4, False, b""),
        (1, (True,), F4, False, b"1234"),
        (1, None, F4, False, b""),
        (1, (1,), F4, False, [1]),
        (1, (1,), "f4", False, b"1234"),
        (1, (0,), Opaque("numpy.dtype", ("O8", False, True), (3, "|", None, None, None, -1, -1, 63)), False, []),
        (1, (0,), Opaque("numpy.dtype", ("V8", False, True), (3, "|", None, ("a",), {"a": 1}, 8, 1, 16)), False, b""),
        (1, (0,), Opaque("numpy.dtype", ("f4", False, True), (3, "<", (F4, 2), None, None, -1, -1, 0)), False, b""),
        (1, (0,), Opaque("numpy.dtype", ("f7", False, True), (3, "<", None, None, None, -1, -1, 0)), False, b""),
        (1, (0,), Opaque("numpy.dtype", ("f4,f4", False, True), (3, "<", None, None, None, -1, -1, 0)), False, b""),
        (1, (0,), Opaque("numpy.dtype", (4, False, True), (3, "<", None, None, None, -1, -1, 0)), False, b""),
        (1, (0,), Opaque("numpy.dtype", ("f4", False, True), None), False, b""),
        (1, (0,), F4),
        None,
    ],
)
def test_what_is_no_array(state):
    assert array_of(Opaque(RECONSTRUCT, (ARRAY, (0,), b"b"), state)) is None


def test_nothing_else_of_numpy_is_data():
    for kind in (Opaque("numpy.matrix"), Opaque("numpy.ndarray", ()), None, "numpy.ndarray"):
        assert array_of(Opaque(RECONSTRUCT, (kind, (0,), b"b"), (1, (1,), F4, False, b"1234"))) is None
    assert array_of(Opaque("numpy.load", ("x",))) is None and array_of(Opaque(Opaque("a.b"), ())) is None


@pytest.mark.parametrize("value", [
    pathlib.PosixPath("/a/b"), torch.device("meta"), torch.Size([2, 0]), torch.float16, datetime.datetime(2020, 1, 2), range(3),
    collections.deque([1, numpy.int64(2), numpy.str_("a")], 4), (slice(1, 2), ...), numpy.dtype("f4"), (collections.Counter("aab"),),
])
def test_plain_values(value, tmp_path):
    for found in through(value, tmp_path / "a"):
        assert type(found) is type(value) and found == value


class Bogus:
    def __reduce__(self):
        return torch.device, ("cuda:0", 1, 2, 3)


def test_arguments_that_do_not_fit(tmp_path):
    dcp.save({"x": 1, "y": Bogus()}, checkpoint_id=tmp_path)
    with pytest.raises(tessera.CorruptError, match="the value is no device") as raised:
        tessera.torch.load({"x": 0, "y": None}, checkpoint_id=tmp_path)
    assert raised.value.key == "y" and raised.value.path


@pytest.mark.parametrize("value", [collections.UserList([1, 2]), types.SimpleNamespace(a=1)])
def test_classes_that_are_allowed(value, tmp_path):
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    dcp.save({"x": value}, checkpoint_id=tmp_path)
    for loader in ("reader", "ours"):
        with pytest.raises(BaseException, match="unsafe.*allow"):
            LOADS[loader]({"x": None}, str(tmp_path))
    into = {"x": None}
    tessera.torch.load(into, checkpoint_id=tmp_path, allow={name})
    assert into["x"] == value
    # Programs with a planner of their own.
    installed = tessera.torch.install(allow={name})
    with tessera.torch.install():
        into = {"x": None}
        dcp.load(into, checkpoint_id=str(tmp_path))
        assert into["x"] == value
    installed.remove()
    installed.remove()
    with tessera.torch.install(), pytest.raises(BaseException, match="unsafe"):
        dcp.load({"x": None}, checkpoint_id=str(tmp_path))


class Nested:
    def __reduce__(self):
        return torch.device, (os.getpid,)


def test_arguments_that_are_code(tmp_path):
    dcp.save({"x": Nested()}, checkpoint_id=tmp_path)
    with pytest.raises(tessera.UnsafeError, match="getpid"):
        tessera.torch.load({"x": None}, checkpoint_id=tmp_path)


def allowed_for_good(rank, ranks, path):
    value = types.SimpleNamespace(a=1)
    dcp.save({"x": value}, checkpoint_id=path)
    tessera.torch.install(allow={"types.SimpleNamespace"})  # nobody keeps it
    for _ in range(3):
        with tessera.torch.install():
            pass
    into = {"x": None}
    dcp.load(into, checkpoint_id=path)
    assert into["x"] == value


def test_what_is_installed_for_good_stays(tmp_path):
    run_ranks(allowed_for_good, 1, str(tmp_path / "a"))


def test_tensors_without_elements_of_their_own(tmp_path):
    state = {"x": torch.empty(2, device="meta")}
    for save in ("writer", "ours"):
        with pytest.raises(BaseException, match="unsupported: the tensor is on the device meta.*'x'"):
            SAVES[save](state, str(tmp_path / save))
        assert not (tmp_path / save / ".metadata").exists()
