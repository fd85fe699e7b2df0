"""`tessera.torch.FileSystemWriter` in torch's own saves."""

import io
import os
import pickle
import threading
import time
import warnings

import pytest

import tessera

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera.torch  # noqa: E402
from tessera import _core  # noqa: E402
from tests_of_torch import same, state_of  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(state, path, **options):
    return dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path, **options))


def load(state, path):
    dcp.load(state, checkpoint_id=path)
    return state


def items(path):
    """The bytes of every item, by name."""
    with open(path / ".metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    made = {}
    for index, info in stored.items():
        assert isinstance(info, _StorageInfo)
        with open(path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            made[index] = file.read(info.length)
    return made


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_torch_loads_what_it_wrote(options, tmp_path):
    save(state_of(True), tmp_path / "a", **options)
    assert same(load(state_of(False), tmp_path / "a"), state_of(True))
    ours = state_of(False)
    tessera.torch.load(ours, checkpoint_id=tmp_path / "a")
    assert same(ours, state_of(True))
    report = tessera.verify(tmp_path / "a")
    assert report.findings == [] and report.bytes_unchecked == 0


def tensor_of(name):
    dtype = getattr(torch, name)
    bits = torch.arange(24, dtype=torch.uint8)
    try:
        return bits.to(dtype).reshape(4, 6)
    except (RuntimeError, NotImplementedError):
        return bits.view(dtype)


def test_items_are_the_bytes_of_torch_save(tmp_path):
    dtypes = [name for name, _, _ in _core.DTYPES if hasattr(torch, name)]
    state = {name: tensor_of(name) for name in dtypes}
    state.update(
        {"none": torch.empty(0, 3), "one": torch.tensor(2.5), "rows": torch.arange(12.0).reshape(4, 3)[1:3]},
        parameter=torch.nn.Parameter(torch.ones(3)),
        quantized=torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        step=7,
        large=torch.arange(100_000.0),
    )
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    save(state, tmp_path / "ours")
    theirs, ours = items(tmp_path / "torch"), items(tmp_path / "ours")
    assert len(dtypes) > 20 and theirs.keys() == ours.keys()
    assert [index.fqn for index in theirs if theirs[index] != ours[index]] == []


def test_a_sparse_tensor_is_an_item_by_torch_save(tmp_path):
    """torch's own writer refuses it."""
    sparse = torch.eye(3).to_sparse()
    save({"w": sparse}, tmp_path)
    (item,) = items(tmp_path).values()
    assert torch.equal(torch.load(io.BytesIO(item)).to_dense(), torch.eye(3))


def test_views_of_all_kinds(tmp_path):
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "t": base.transpose(0, 2),
        "wide": torch.arange(5.0).expand(4, 5),
        "step": base[:, ::2, 1:],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "tied": base,
        "tied_again": base,
        "overlapping": torch.as_strided(base, (3, 4), (1, 2)),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    save(state, tmp_path / "a")
    assert same(load({name: torch.zeros_like(tensor) for name, tensor in state.items()}, tmp_path / "a"), state)


def test_an_old_checkpoint_stays_until_the_new_one_is_there(tmp_path):
    path = tmp_path / "a"
    writer = tessera.torch.FileSystemWriter(path)
    seen = []
    for value in (1.0, 2.0, 3.0):
        dcp.save({"w": torch.full((3,), value)}, storage_writer=writer)
        seen.append(load({"w": torch.zeros(3)}, path)["w"][0].item())
    assert seen == [1.0, 2.0, 3.0]
    before = tessera.open(path).save_id

    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            raise ValueError("no data")

    with pytest.raises(BaseException, match="no data"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=writer, planner=Failing())
    assert tessera.open(path).save_id == before and tessera.verify(path).findings == []
    # What is left of a save that failed goes with the next one.
    dcp.save({"w": torch.full((3,), 4.0)}, storage_writer=writer)
    assert sum(name.endswith(".distcp") for name in os.listdir(path)) == 2


def test_a_failed_save_keeps_nobody_out(tmp_path):
    """Its exception has its frames, and these have its lock."""

    class Failing(dcp.DefaultSavePlanner):
        def finish_plan(self, plan):
            raise ValueError("no plan")

    try:
        dcp.save({"w": torch.ones(3)}, storage_writer=tessera.torch.FileSystemWriter(tmp_path), planner=Failing())
    except BaseException as error:
        assert "no plan" in str(error)
        save({"w": torch.ones(3)}, tmp_path)
    assert load({"w": torch.zeros(3)}, tmp_path)["w"].all()


def test_two_saves_into_one_directory(tmp_path):
    """The one that began first loses, and loses nothing."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            begun.set()
            assert go_on.wait(60)
            return super().resolve_data(item)

    raised = []

    def first():
        try:
            dcp.save({"w": torch.ones(3)}, storage_writer=tessera.torch.FileSystemWriter(tmp_path), planner=Slow())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(60)
    save({"w": torch.full((3,), 2.0)}, tmp_path)
    go_on.set()
    thread.join()
    assert len(raised) == 1 and "conflict" in str(raised[0])
    assert load({"w": torch.zeros(3)}, tmp_path)["w"][0] == 2.0


def test_overwrite_is_refused_where_it_is_not_wanted(tmp_path):
    save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(BaseException, match="already_exists") as raised:
        save({"w": torch.zeros(3)}, tmp_path, overwrite=False)
    assert isinstance(raised.value.failures[0][0], FileExistsError)
    assert load({"w": torch.zeros(3)}, tmp_path)["w"].all()


def test_metadata_has_no_path_in_it(tmp_path):
    """Python 3.13 pickles one as pathlib._local.PosixPath, which Pythons before it cannot import."""
    save({"w": torch.ones(3)}, tmp_path)
    assert b"pathlib" not in (tmp_path / ".metadata").read_bytes()


def test_plans_that_torch_caches(tmp_path):
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = tessera.torch.FileSystemWriter(tmp_path / "0")
    for step in range(3):
        state = {"w": torch.full((3,), float(step)), "step": step}
        dcp.save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=planner)
        dcp.save(state, checkpoint_id=tmp_path / "same", storage_writer=writer, planner=planner)
        assert same(load({"w": torch.zeros(3), "step": -1}, tmp_path / str(step)), state)
    assert same(load({"w": torch.zeros(3), "step": -1}, tmp_path / "same"), state)


def test_what_torch_writes_itself(tmp_path):
    with pytest.warns(UserWarning, match="torch's own code"):
        dcp.save({"w": torch.ones(3)}, storage_writer=tessera.torch.FileSystemWriter(tmp_path / "a"), use_collectives=False, no_dist=True)
    assert (tmp_path / "a" / "__0.metadata").exists()
    assert tessera.load(tmp_path / "a")["w"].tolist() == [1.0] * 3


def test_a_value_of_any_class_is_written(tmp_path):
    save({"w": torch.ones(3), "when": time.struct_time(range(9))}, tmp_path)
    with pytest.raises(tessera.UnsafeError):
        tessera.torch.load({"w": torch.zeros(3), "when": None}, checkpoint_id=tmp_path)
    into = {"w": torch.zeros(3), "when": None}
    tessera.torch.load(into, checkpoint_id=tmp_path, allow={"time.struct_time"})
    assert into["when"].tm_year == 0


def test_a_flipped_bit_is_found(tmp_path):
    save({"w": torch.arange(1000.0), "step": 3}, tmp_path)
    data = next(file for file in tmp_path.iterdir() if file.suffix == ".distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(tessera.CorruptError) as raised:
        tessera.torch.load({"w": torch.zeros(1000), "step": 0}, checkpoint_id=tmp_path)
    assert raised.value.path == str(data)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BaseException) as raised:
        save({"w": torch.ones(3)}, tmp_path / "file")
    assert isinstance(raised.value.failures[0][0], tessera.Error)


def test_async_saves_by_a_thread(tmp_path):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        state = {"w": torch.ones(3), "step": 1}
        writer = tessera.torch.FileSystemWriter(tmp_path / "a")
        future = dcp.async_save(state, storage_writer=writer)
        state["w"].zero_()
        future.result()
        assert load({"w": torch.zeros(3), "step": 0}, tmp_path / "a")["w"].all()
    finally:
        torch.distributed.destroy_process_group()
