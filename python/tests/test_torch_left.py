"""Saves of `tessera.torch.async_save` that are left to torch's planning: on a thread, by the collectives of the process group."""

import io
import os
import shutil
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.torch import _async  # noqa: E402
from tests_of_torch import run_ranks  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="torch.distributed is unavailable")


class Own(torch.Tensor):
    """Which torch's planner has to resolve."""


def special():
    return torch.ones(4).as_subclass(Own)


class Late(dcp.DefaultSavePlanner):
    """Plans when it is told to."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        assert self.go.wait(60)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_writer_that_is_used_again_leaves_a_save_that_is_left_to_torch_its_directory(tmp_path):
    writer, planner = tessera.torch.FileSystemWriter(tmp_path / "a"), Late()
    future = tessera.torch.async_save({"w": torch.ones(4)}, storage_writer=writer, planner=planner)
    writer.reset(tmp_path / "b")
    writer.single_file_per_rank = False
    planner.go.set()
    future.result(60)
    assert tessera.load(tmp_path / "a", framework="torch")["w"].all() and not (tmp_path / "b").exists()
    futures = [tessera.torch.async_save({"w": special()}, storage_writer=writer, planner=planner) for _ in range(2)]
    assert len({future.result(60).storage_meta.save_id for future in futures}) == 2


def test_an_error_of_a_save_left_to_torch_is_raised_by_the_next_call_r13(tmp_path):
    (tmp_path / "file").write_text("no directory")
    for state in ({"w": torch.ones(4)}, {"w": special()}):
        future = tessera.torch.async_save({"w": special()}, checkpoint_id=tmp_path / "file")
        with pytest.raises(tessera.AlreadyExistsError):
            tessera.torch.async_save(state, checkpoint_id=tmp_path / "a")
        assert not (tmp_path / "a").exists()
        assert isinstance(future.exception(), tessera.AlreadyExistsError)
        tessera.torch.async_save({"w": special()}, checkpoint_id=tmp_path / "file").exception()
        tessera.torch.async_save(state, checkpoint_id=tmp_path / "a").result(60)
        tessera.torch.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "file")
        with pytest.raises(tessera.AlreadyExistsError, match="an earlier save"):
            tessera.torch.async_save({"w": special()}, checkpoint_id=tmp_path / "b")
        assert not (tmp_path / "b").exists()
        shutil.rmtree(tmp_path / "a")


def test_what_is_left_to_torch_is_of_the_call_r15(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        scalar = distribute_tensor(torch.tensor(1.0), init_device_mesh("cpu", (1,)), [Replicate()])
        file = io.BytesIO(b"abc")
        planner = Late()
        state = {"deep": [{"scalar": scalar}], "file": file, "w": torch.ones(4)}
        future = tessera.torch.async_save(state, checkpoint_id=tmp_path, planner=planner)
        with torch.no_grad():
            scalar.to_local().fill_(7)
        state["w"].fill_(7)
        file.write(b"x" * 1000)
        planner.go.set()
        future.result(60)
        scalar.to_local().fill_(0)
        into = {"deep": [{"scalar": scalar}], "file": None, "w": torch.zeros(4)}
        dcp.load(into, checkpoint_id=tmp_path)
        assert scalar.to_local().item() == 1 and into["file"].getvalue() == b"abc" and into["w"].tolist() == [1] * 4
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_copied_for_torch_is_an_error(tmp_path):
    future = tessera.torch.async_save({"x": threading.Lock()}, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner())
    assert isinstance(future.exception(60), tessera.UnsupportedError) and "torch cannot copy" in str(future.exception())


class Part:
    """Of the state. It counts how often it is asked."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        self.count += 1
        return {"w": special()}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_parts_of_a_state_that_a_process_of_torchs_saves_are_asked_once(tmp_path, monkeypatch):
    def saved_by_torch(state_dict, **_):
        saved.append(_stateful_to_state_dict(state_dict))

    from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict

    saved, part = [], Part()
    monkeypatch.setattr(_async.state_dict_saver, "async_save", saved_by_torch)
    monkeypatch.setattr(_async, "_alone", alone := _async._OfGroup())
    tessera.torch.async_save({"part": part}, checkpoint_id=tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    assert part.count == 1 and saved[0]["part"]["w"].all() and not alone


def of_saves_that_torch_plans(rank, ranks, directory):
    own = torch.ones(1 << 18)
    for number in range(10):  # whose collectives are not at once those of the call behind it
        state = {"w": special(), f"own{rank}": own}
        left = tessera.torch.async_save(state, checkpoint_id=f"{directory}/left")
        future = tessera.torch.async_save({"n": number}, checkpoint_id=f"{directory}/a")
        assert left.done() and future.result(60).files > 0 and not isinstance(left, tessera.PendingSave)

    # An error that one rank has not taken is the next call's there, and the next save's on the others.
    for behind in ({"n": 1}, {"w": special()}):
        left = tessera.torch.async_save({"w": special()}, checkpoint_id=f"{directory}/file")
        if rank == 0:
            assert isinstance(left.exception(60), tessera.AlreadyExistsError)
            future = tessera.torch.async_save(behind, checkpoint_id=f"{directory}/b")
            with pytest.raises(tessera.AlreadyExistsError, match="an earlier save"):
                future.result(60)
        else:
            with pytest.raises(tessera.AlreadyExistsError):
                tessera.torch.async_save(behind, checkpoint_id=f"{directory}/b")
        assert not os.path.exists(f"{directory}/b")
        tessera.torch.async_save({"n": 1}, checkpoint_id=f"{directory}/c").result(60)

    # Ctrl-C on one rank while it copies for torch.
    class Interrupted:
        def state_dict(self):
            raise KeyboardInterrupt

        def load_state_dict(self, state):
            raise NotImplementedError

    state, planner = {"n": 1}, dcp.DefaultSavePlanner()
    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            tessera.torch.async_save({**state, "x": Interrupted()}, checkpoint_id=f"{directory}/d", planner=planner)
    else:
        future = tessera.torch.async_save(state, checkpoint_id=f"{directory}/d", planner=planner)
        with pytest.raises(tessera.CancelledError):
            future.result(60)
    tessera.torch.async_save({"n": 1}, checkpoint_id=f"{directory}/d", planner=planner).result(60)


def test_two_ranks_whose_saves_torch_plans(tmp_path):
    (tmp_path / "file").write_text("no directory")
    run_ranks(of_saves_that_torch_plans, 2, str(tmp_path))
