"""`tessera.torch` on several ranks: FSDP1, FSDP2 and DTensors, both directions."""

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import run_ranks, same  # noqa: E402


def model_of(kind):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def trained(kind, steps):
    """A model and its optimizer's state, as torch's helpers give it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.arange(14.0).reshape(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # torch cannot load param_groups on a rank that holds nothing of a parameter.
    return {"model": model_state, "optimizer": optimizer_state["state"], "step": steps}


def whole(state):
    """With every tensor gathered."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    if hasattr(state, "local_shards"):
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, [(s.metadata.shard_offsets, s.tensor) for s in state.local_shards()])
        parts = sorted((part for rank in parts for part in rank), key=lambda part: part[0])
        return torch.cat([tensor for _, tensor in parts])
    return state.clone() if isinstance(state, torch.Tensor) else state


SAVES = {
    "torch": lambda state, path: dcp.save(state, checkpoint_id=path),
    "writer": lambda state, path: dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path)),
}
LOADS = {
    "torch": lambda state, path: dcp.load(state, checkpoint_id=path),
    "reader": lambda state, path: dcp.load(state, storage_reader=tessera.torch.FileSystemReader(path)),
    "ours": lambda state, path: tessera.torch.load(state, checkpoint_id=path),
}


def cleared(state):
    """Its tensors hold zeros, and its values nothing."""
    for key, value in state.items():
        if isinstance(value, dict):
            cleared(value)
        elif hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shard.tensor.zero_()
        elif isinstance(value, torch.Tensor):
            value.zero_()
        else:
            state[key] = None
    return state


def round_trips(rank, ranks, directory, earlier):
    for kind in ("fsdp1", "fsdp2"):
        state = trained(kind, 2)
        expected, into = whole(state), trained(kind, 1)
        for saver, loader in (("torch", "reader"), ("torch", "ours"), ("writer", "torch"), ("writer", "ours")):
            path = f"{directory}/{kind}-{ranks}-{saver}"
            if loader != "ours":
                SAVES[saver](state, path)
                assert tessera.verify(path).findings == [], path
            LOADS[loader](cleared(into), path)
            assert same(whole(into), expected), (kind, saver, loader)
        if earlier:
            LOADS["ours"](cleared(into), f"{directory}/{kind}-{earlier}-writer")
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
