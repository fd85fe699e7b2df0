"""`tessera.torch`: torch's own loads with our reader, and ours, on one rank and several."""

import functools
import os
import pathlib
import pickle
import sys
import warnings

import numpy
import pytest

import tessera

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera.torch  # noqa: E402
from tests_of_torch import LOADS, run_ranks, same, state_of  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path):
    dcp.save(state_of(True), checkpoint_id=tmp_path / "torch")
    return tmp_path / "torch"


def loads(path):
    def planner(state):
        dcp.load(state, storage_reader=tessera.torch.FileSystemReader(path), planner=tessera.torch.LoadPlanner())

    return {name: functools.partial(load, path=path) for name, load in LOADS.items()} | {"planner": planner}


@pytest.mark.parametrize("name", ["torch", "reader", "planner", "ours"])
def test_what_torch_saved_is_loaded(name, saved):
    state = state_of(False)
    weight = state["model"]["w"]
    loads(saved)[name](state)
    assert same(state, state_of(True)) and state["model"]["w"] is weight


def test_what_we_saved_is_loaded(tmp_path):
    state = {"w": torch.arange(6.0), "step": 3}
    tessera.save_file(state, tmp_path / "ours")
    into = {"w": torch.zeros(6), "step": 0}
    tessera.torch.load(into, checkpoint_id=tmp_path / "ours")
    assert same(into, state)


def test_targets_of_other_dtypes_strides_and_ties(saved):
    tied = torch.zeros(4, 6)
    state = {"model": {"w": torch.zeros(6, 4, dtype=torch.float64).t()}, "optim": {"state": {0: {"exp_avg": tied}}}}
    loads(saved)["reader"](state)
    assert torch.equal(state["model"]["w"], state_of(True)["model"]["w"].double())
    twice = {"model": {"w": tied}, "optim": {"state": {0: {"exp_avg": tied}}}}
    loads(saved)["reader"](twice)
    assert torch.equal(tied, state_of(True)["optim"]["state"][0]["exp_avg"]) or torch.equal(tied, torch.arange(24.0).reshape(4, 6))
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    loads(saved)["ours"]({"model": {"w": parameter}})
    assert torch.equal(parameter.detach(), state_of(True)["model"]["w"]) and parameter.requires_grad


def test_paths_as_python_3_13_pickles_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    dcp.save({"w": torch.ones(2), "where": pathlib.PosixPath("/a/b")}, checkpoint_id=tmp_path / "a")
    monkeypatch.undo()
    assert b"pathlib._local" in (tmp_path / "a" / ".metadata").read_bytes()
    for name in ("reader", "planner", "ours"):
        into = {"w": torch.zeros(2), "where": None}
        loads(tmp_path / "a")[name](into)
        assert into["w"].all() and str(into["where"]) == "/a/b"


def metadata_of_ranks(rank, ranks, path):
    from torch.distributed.checkpoint._extension import StreamTransformExtension
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    class Plain(StreamTransformExtension):
        registry_name = staticmethod(lambda: "stream.plain")
        from_descriptor = staticmethod(lambda version: Plain())
        get_descriptor = staticmethod(lambda: "stream.plain/1")
        transform_to = staticmethod(lambda output: output)
        transform_from = staticmethod(lambda source: source)

    sharded = distribute_tensor(torch.arange(35.0).reshape(7, 5), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    state = state_of(True) | {"sharded": sharded, "grad": torch.ones(2, requires_grad=True)}
    for name, extensions in (("plain", None), ("extended", [Plain()])):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{path}-{name}", _extensions=extensions))
        theirs = dcp.FileSystemReader(f"{path}-{name}").read_metadata()
        ours = tessera.torch._data.read_metadata(pathlib.Path(f"{path}-{name}/.metadata").read_bytes(), path)
        for part in ("state_dict_metadata", "planner_data", "storage_data", "version"):
            assert getattr(ours, part) == getattr(theirs, part), part
        hints = [{(index.fqn, index.offset): index.index for index in of.storage_data if index.index} for of in (ours, theirs)]
        assert hints[0] == hints[1]
        assert ours.storage_meta.save_id == theirs.storage_meta.save_id
        assert ours.storage_meta.checkpoint_id == str(theirs.storage_meta.checkpoint_id)


def test_the_metadata_is_what_torch_would_read(tmp_path):
    run_ranks(metadata_of_ranks, 2, str(tmp_path / "a"))


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def untouched(state):
    return same(state, state_of(False))


@pytest.mark.parametrize("name", ["reader", "planner", "ours"])
def test_a_hostile_metadata_runs_nothing(name, saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Hostile(str(tmp_path / "ran"))))
    state = state_of(False)
    with pytest.raises(BaseException) as raised:
        loads(saved)[name](state)
    assert "unsafe" in str(raised.value) and ".metadata" in str(raised.value)
    assert not (tmp_path / "ran").exists() and untouched(state)
    if name == "ours":
        assert isinstance(raised.value, tessera.UnsafeError) and raised.value.path.endswith(".metadata")


class Settings:
    def __init__(self):
        self.lr = 0.1


@pytest.mark.parametrize("name", ["reader", "planner", "ours"])
@pytest.mark.parametrize("kind", ["code", "class"])
def test_a_hostile_value_runs_nothing(name, kind, tmp_path):
    state = state_of(True)
    state["step"] = Hostile(str(tmp_path / "ran")) if kind == "code" else Settings()
    dcp.save(state, checkpoint_id=tmp_path / "hostile")
    into = state_of(False)
    with pytest.raises(BaseException) as raised:
        loads(tmp_path / "hostile")[name](into)
    assert "unsafe" in str(raised.value) and not (tmp_path / "ran").exists() and untouched(into)
    if name == "ours":
        assert isinstance(raised.value, tessera.UnsafeError)


def test_classes_that_are_allowed_are_made(tmp_path):
    settings = Settings()
    settings.parts = [Settings(), (1, 2)]
    state = {"w": torch.ones(2), "settings": settings, "again": [settings, Settings]}
    dcp.save(state, checkpoint_id=tmp_path / "classes")
    into = {"w": torch.zeros(2), "settings": None, "again": None}
    name = f"{__name__}.Settings"
    with pytest.raises(tessera.UnsafeError, match=name) as raised:
        tessera.torch.load(into, checkpoint_id=tmp_path / "classes")
    assert raised.value.key in ("settings", "again") and not into["w"].any()
    tessera.torch.load(into, checkpoint_id=tmp_path / "classes", allow={name})
    made = into["settings"]
    assert type(made) is Settings and made.lr == 0.1 and made.parts[0].lr == 0.1 and made.parts[1] == (1, 2)
    assert into["again"][1] is Settings and into["again"][0].lr == 0.1


def test_a_flipped_bit_is_found(tmp_path):
    tessera.save_file({"w": torch.arange(6.0), "step": 3}, tmp_path / "ours")
    (data,) = tmp_path.glob("ours/__0_1*")
    content = bytearray(data.read_bytes())
    content[content.index(numpy.float32(5).tobytes())] ^= 1
    data.write_bytes(content)
    with pytest.raises(tessera.CorruptError) as raised:
        tessera.torch.load({"w": torch.zeros(6), "step": 0}, checkpoint_id=tmp_path / "ours")
    assert raised.value.path == str(data)


def test_missing_keys_and_other_shapes_change_nothing(saved):
    state = state_of(False)
    state["model"]["more"] = torch.zeros(2)
    with pytest.raises(BaseException, match="more"):
        loads(saved)["ours"](state)
    state = state_of(False)
    state["model"]["w"] = torch.zeros(3, 3)
    with pytest.raises(BaseException, match="model.w"):
        loads(saved)["ours"](state)
    assert not state["model"]["half"].any()
    with pytest.raises(FileNotFoundError):
        tessera.torch.load({}, checkpoint_id=saved / "none")
    tessera.save_file({"w": torch.zeros(2)}, saved.parent / "w.safetensors")
    with pytest.raises(tessera.MismatchError, match="safetensors"):
        tessera.torch.load({"w": torch.zeros(2)}, checkpoint_id=saved.parent / "w.safetensors")


def resharded(rank, ranks, path, saved_by):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(35.0).reshape(7, 5)
    fill = distribute_tensor(whole, mesh, [Shard(0)])
    if saved_by == ranks:
        dcp.save({"w": fill, "step": 3}, checkpoint_id=path)
    into = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "step": 0}
    tessera.torch.load(into, checkpoint_id=path)
    assert torch.equal(into["w"].full_tensor(), whole) and into["step"] == 3


def test_sharded_tensors_on_other_numbers_of_ranks(tmp_path):
    path = str(tmp_path / "sharded")
    run_ranks(resharded, 2, path, 2)
    run_ranks(resharded, 3, path, 2)
