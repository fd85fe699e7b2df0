"""`tessera.torch` on several ranks: FSDP1, FSDP2 and DTensors, both directions."""

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import LOADS, SAVES, cleared, run_ranks, same, trained, whole  # noqa: E402


# What is loaded by "ours" has been saved for the road before.
ROADS = (("torch", "reader"), ("torch", "ours"), ("writer", "torch"), ("writer", "ours"), ("ours", "torch"), ("ours", "ours"))


def round_trips(rank, ranks, directory, earlier):
    for kind in ("fsdp1", "fsdp2"):
        state, into = trained(kind, 2)[2], trained(kind, 1)[2]
        expected = whole(state)
        for saver, loader in ROADS:
            path = f"{directory}/{kind}-{ranks}-{saver}"
            if loader != "ours":
                SAVES[saver](state, path)
                assert tessera.verify(path).findings == [], path
            LOADS[loader](cleared(into), path)
            assert same(whole(into), expected), (kind, saver, loader)
        if earlier:
            LOADS["ours"](cleared(into), f"{directory}/{kind}-{earlier}-ours")
            close(whole(into), expected)  # other numbers of ranks sum in other orders


def close(a, b):
    if isinstance(a, torch.Tensor):
        return torch.testing.assert_close(a, b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key])


@pytest.mark.parametrize("ranks, earlier", [(1, 0), (2, 1), (4, 2)])
def test_fsdp_in_both_directions(ranks, earlier, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "fsdp"
    directory.mkdir(exist_ok=True)
    run_ranks(round_trips, ranks, str(directory), earlier)


class Failing(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if torch.distributed.get_rank() == 1:
            raise ValueError("rank 1 has no data")
        return super().resolve_data(item)


def one_rank_fails(rank, ranks, path):
    state = {"w": torch.full((4,), 1.0), f"own{rank}": torch.ones(2), "step": 1}
    SAVES["writer"](state, path)
    save_id = tessera.open(path).save_id
    with pytest.raises(BaseException, match="rank 1 has no data"):
        dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path), planner=Failing())
    assert tessera.open(path).save_id == save_id and tessera.verify(path).findings == []
    torch.distributed.barrier()
    SAVES["writer"](state, path)
    assert tessera.verify(path).findings == []


def test_a_rank_that_fails(tmp_path):
    run_ranks(one_rank_fails, 2, str(tmp_path / "a"))


def no_checkpoint(rank, ranks, path):
    """Ranks that look into directories of which one has a checkpoint."""
    state = {"w": torch.ones(3)}
    places = {"here": f"{path}/here", "none": f"{path}/none", "mixed": f"{path}/{'here' if rank == 0 else 'none'}"}
    SAVES["ours"](state, places["here"])
    planned_by_torch = lambda state, path: tessera.torch.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner())
    for load in (LOADS["ours"], planned_by_torch):
        with pytest.raises(tessera.NoCheckpointError):
            load({"w": torch.zeros(3)}, places["none"])
        for place, tree in (("here", {"w": torch.zeros(3), "optim": torch.zeros(1)}), ("mixed", {"w": torch.zeros(3)})):
            with pytest.raises(BaseException) as raised:
                load(tree, places[place])
            assert not isinstance(raised.value, tessera.NoCheckpointError), (place, raised.value)


def test_no_checkpoint_is_what_no_rank_sees(tmp_path):
    run_ranks(no_checkpoint, 2, str(tmp_path))


def many_ranks(rank, ranks, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    value = torch.arange(33.0).reshape(11, 3)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {"w": distribute_tensor(value, mesh, [Shard(0)]), f"own{rank}": torch.full((1000,), float(rank)), "same": value}
    into = {"w": distribute_tensor(torch.zeros(11, 3), mesh, [Shard(1)]), f"own{rank}": torch.zeros(1000), "same": value * 0}
    for saver, loader in (("writer", "reader"), ("ours", "ours")):
        SAVES[saver](state, f"{path}-{saver}")
        LOADS[loader](cleared(into), f"{path}-{saver}")
        assert same(whole(into), whole(state)), (saver, loader)


def test_eight_ranks(tmp_path):
    run_ranks(many_ranks, 8, str(tmp_path / "a"))
