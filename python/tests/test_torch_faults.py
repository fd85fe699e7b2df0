"""Saves of several ranks that cannot end: a full disk, a rank that dies, Ctrl-C. What was there before stays whole."""

import os
import resource
import signal
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import SAVES, run_ranks, start_ranks  # noqa: E402

BEFORE = 1.0


def state_of_a_rank(rank, elements, value):
    return {"w": torch.full((elements,), value), f"own{rank}": torch.full((elements,), value), "value": value}


def require_before(path, elements=100_000):
    """In torch and here."""
    into = {"w": torch.zeros(elements), "own0": torch.zeros(elements), "own1": torch.zeros(elements), "value": 0.0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert into.pop("value") == BEFORE and all((tensor == BEFORE).all() for tensor in into.values())
    assert tessera.verify(path).findings == []


def no_space(rank, ranks, path, kind, save):
    SAVES[save](state_of_a_rank(rank, 100_000, BEFORE), path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if kind == "limit" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    with pytest.raises(BaseException, match="io: write|out_of_space") as raised:
        SAVES[save](state_of_a_rank(rank, 3_000_000, 2.0), path)
    if save == "ours":
        assert isinstance(raised.value, tessera.Error) and isinstance(raised.value, OSError)
    if rank == 0:
        require_before(path)
    torch.distributed.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # What the failed one has left is no hindrance.
    SAVES[save](state_of_a_rank(rank, 100_000, BEFORE), path)
    if rank == 0:
        require_before(path)


@pytest.mark.parametrize("save", ["writer", "ours"])
@pytest.mark.parametrize("kind", ["limit", "disk"])
def test_a_full_disk(kind, save, tmp_path):
    if kind == "disk":
        mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(tmp_path)]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting a small disk needs root")
    try:
        run_ranks(no_space, 2, str(tmp_path / "a"), kind, save)
    finally:
        if kind == "disk":
            subprocess.run(["umount", str(tmp_path)], check=True)


class Dying:
    """Part of a state: it kills its process when it is asked for."""

    def state_dict(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def load_state_dict(self, state):
        pass


class KillingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        os.kill(os.getpid(), signal.SIGKILL)


def one_dies(rank, ranks, path, save):
    SAVES[save](state_of_a_rank(rank, 100_000, BEFORE), path)
    state = state_of_a_rank(rank, 100_000, 2.0)
    with pytest.raises(BaseException) as raised:
        if save == "ours":
            tessera.torch.save(state | ({"z": Dying()} if rank == 1 else {}), checkpoint_id=path)
        else:
            planner = KillingPlanner() if rank == 1 else None
            dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path), planner=planner)
    if save == "ours":
        assert isinstance(raised.value, tessera.PeerFailedError), raised.value
    require_before(path)
    os._exit(0)  # the group has lost a rank, and cannot be ended in good order


@pytest.mark.parametrize("save", ["writer", "ours"])
def test_a_rank_that_dies(save, tmp_path):
    path = str(tmp_path / "a")
    processes = start_ranks(one_dies, 2, path, save)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    require_before(path)


def saves_until_interrupted(rank, ranks, path, interrupted):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = state_of_a_rank(rank, 1_000_000, BEFORE)
    kinds = KeyboardInterrupt if rank in interrupted else (KeyboardInterrupt, tessera.Error)
    with pytest.raises(kinds):
        while True:
            tessera.torch.save(state, checkpoint_id=path)
            open(f"{path}.saved{rank}", "w").close()
    os._exit(0)


@pytest.mark.parametrize("interrupted", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_ctrl_c(interrupted, tmp_path):
    path = str(tmp_path / "a")
    processes = start_ranks(saves_until_interrupted, 2, path, interrupted)
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(os.path.exists(f"{path}.saved{rank}") for rank in (0, 1)):
        time.sleep(0.01)
    time.sleep(0.05)
    for rank in interrupted:
        os.kill(processes[rank].pid, signal.SIGINT)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    require_before(path, 1_000_000)
