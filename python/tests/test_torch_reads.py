"""How many bytes a load reads of a checkpoint with digests."""

import os

import pytest

torch = pytest.importorskip("torch")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import SAVES, run_ranks, same  # noqa: E402

TENSORS = 12
SHAPE = (1024, 1024)  # 4 MiB; in four parts 1 MiB, so that each lies in two blocks with one digest
MOST = 1.05


def read_by(work):
    """The bytes that this process reads from files while `work` runs."""
    counts = lambda: int(open("/proc/self/io").read().split("rchar:")[1].split()[0])
    before = counts()
    work()
    return counts() - before


def tensors():
    return {f"w{number}": torch.arange(1024 * 1024, dtype=torch.float32).reshape(SHAPE) + number for number in range(TENSORS)}


@pytest.fixture
def saved(tmp_path):
    SAVES["ours"](tensors(), str(tmp_path / "a"))
    return str(tmp_path / "a")


def roads(path):
    """Ways to load it, and what each has loaded."""
    into = {name: torch.zeros(SHAPE) for name in reversed(tensors())}
    yield "torch.load", lambda: tessera.torch.load(into, checkpoint_id=path), lambda: into
    whole = {}
    yield "load", lambda: whole.update(tessera.load(path, framework="torch")), lambda: whole


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="nothing counts reads")
def test_one_process(saved):
    for name, work, loaded in roads(saved):
        assert read_by(work) <= MOST * TENSORS * (4 << 20), name
        assert same(dict(sorted(loaded().items())), dict(sorted(tensors().items()))), name


def pieces_of_one_mib(rank, ranks, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors().items()}
    SAVES["ours"](state, path)
    into = {name: torch.zeros_like(state[name]) for name in reversed(state)}
    read = read_by(lambda: tessera.torch.load(into, checkpoint_id=path))
    assert all(torch.equal(into[name].to_local(), state[name].to_local()) for name in state)
    assert read <= MOST * TENSORS * (1 << 20), read / (TENSORS << 20)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="nothing counts reads")
def test_four_ranks(tmp_path):
    run_ranks(pieces_of_one_mib, 4, str(tmp_path / "a"))
