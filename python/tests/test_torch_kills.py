"""SIGKILLs of torch's saves with our writer: what was there before loads, in torch and here.

TESSERA_KILLS is their number, TESSERA_SEED the seed. `make soak` makes 500 of them.
"""

import os
import random
import time

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import start_ranks  # noqa: E402

RANKS = 2


def saves_without_end(rank, ranks, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    for step in range(1, 10_000):
        sharded = distribute_tensor(torch.full((64, 1000), float(step)), mesh, [Shard(0)])
        state = {"w": sharded, f"own{rank}": torch.full((50_000,), float(step)), "step": step}
        dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path, thread_count=2))
        if rank == 0:
            with open(f"{path}.saved", "w") as file:
                file.write(str(step))


def require_whole(path, load):
    """Every tensor and value of one and the same save."""
    into = {"w": torch.zeros(64, 1000), "own0": torch.zeros(50_000), "own1": torch.zeros(50_000), "step": 0}
    load(into, path)
    for name in ("w", "own0", "own1"):
        assert (into[name] == into["step"]).all(), (name, into["step"])
    return into["step"]


def kill(processes, rng):
    order = processes if rng.random() < 0.75 else processes[::-1]
    together = rng.random() < 0.5
    for process in order:
        process.kill()
        if not together:
            time.sleep(rng.uniform(0, 0.2))
    for process in processes:
        process.join(60)


def test_kills_lose_nothing(tmp_path):
    rng = random.Random(int(os.environ.get("TESSERA_SEED", "1")))
    found = []
    path = str(tmp_path / "over")
    for _ in range(int(os.environ.get("TESSERA_KILLS", "10"))):
        processes = start_ranks(saves_without_end, RANKS, path)
        first = time.monotonic()
        while not os.path.exists(f"{path}.saved") and time.monotonic() < first + 60:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        kill(processes, rng)
        with open(f"{path}.saved") as file:
            saved = int(file.read() or 0)
        by_torch = require_whole(path, lambda into, path: dcp.load(into, checkpoint_id=path, no_dist=True))
        ours = require_whole(path, lambda into, path: tessera.torch.load(into, checkpoint_id=path, no_dist=True))
        assert by_torch == ours >= saved and tessera.verify(path).findings == []
        found.append(ours)
        os.remove(f"{path}.saved")
    # The steps begin anew each time, in a directory that what was killed has left as it is.
    assert len(set(found)) > 1 or len(found) < 5
