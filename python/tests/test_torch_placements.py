"""What PyTorch's suites check of resharding, meshes and models on ranks, with our classes in the places of torch's.

A case is a function of `CASES`, named as the suite that has it: all run one after another in the same four ranks.
TESSERA_CASES names those that are to run.
"""

import itertools
import os
import pickle

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import LOADS, SAVES, cleared, run_ranks, same, whole  # noqa: E402

RANKS = 4
ROADS = {"writer": ("torch", "reader"), "ours": ("torch", "ours")}


def round_trip(path, state, *intos, expected=None):
    """Both of our savers, and what each is read by; `intos` may be sharded in other ways."""
    expected = whole(state) if expected is None else expected
    for saver, loaders in ROADS.items():
        SAVES[saver](state, f"{path}-{saver}")
        for number, into in enumerate(intos):
            for loader in loaders:
                LOADS[loader](cleared(into), f"{path}-{saver}")
                assert same(whole(into), expected), (saver, loader, number)


def meshes():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))


def dtensor_resharding(path):
    """Placements into others, on meshes of one dimension and two, with shards of unequal size and of none.

    A third of all pairs: each way comes first and second, and meets each mesh. TESSERA_CASES=dtensor_resharding takes all.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, square = meshes()
    ways = [(line, (placement,)) for placement in (Shard(0), Shard(1), Replicate())]
    ways += [(square, pair) for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)]
    value = torch.rand((5, 3), generator=torch.Generator().manual_seed(1))
    state, into = {}, {}
    step = 1 if os.environ.get("TESSERA_CASES") else 3
    for (a, before), (b, after) in itertools.product(enumerate(ways), repeat=2):
        if (a + b) % step != 0:
            continue
        state[f"{a}-{b}"] = distribute_tensor(value, *before)
        into[f"{a}-{b}"] = distribute_tensor(torch.zeros(5, 3), *after)
    round_trip(path, state, into)


def sharded_tensor_resharding(path):
    """Chunks by rows and by columns, several on a rank, and none on some; and a tensor that is whole on every rank."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata

    def rows(*parts):
        begins = itertools.accumulate([0] + [size for _, size in parts[:-1]])
        return EnumerableShardingSpec(
            [ShardMetadata([begin, 0], [size, 20], f"rank:{rank}/cpu") for begin, (rank, size) in zip(begins, parts)]
        )

    specs = [
        ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(RANKS)]),
        ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(RANKS)]),
        ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in (0, 1, 1, 0)]),
        rows((0, 2), (1, 1), (0, 3), (1, 3), (3, 1)),
        rows((1, 8), (0, 2)),
    ]
    value = torch.rand((10, 20), generator=torch.Generator().manual_seed(1))
    state, into = {"whole-whole": value}, {"whole-whole": torch.zeros(10, 20)}
    for (a, before), (b, after) in itertools.product(enumerate(specs), repeat=2):
        state[f"{a}-{b}"] = sharded_tensor.rand(before, 10, 20)
        into[f"{a}-{b}"] = sharded_tensor.zeros(after, 10, 20)
    for number, spec in enumerate(specs):
        state[f"{number}-whole"], into[f"{number}-whole"] = sharded_tensor.rand(spec, 10, 20), torch.zeros(10, 20)
        state[f"whole-{number}"], into[f"whole-{number}"] = value, sharded_tensor.zeros(spec, 10, 20)
    round_trip(path, state, into)


def dtensor_checkpoint(path):
    """Tensors of all ranks, of some of them, and of each one."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, _ = meshes()
    some = DeviceMesh("cpu", [0, 2])
    value = torch.arange(24.0).reshape(6, 4)
    state = {
        "sharded": distribute_tensor(value, line, [Shard(0)]),
        "replicated": distribute_tensor(value + 1, line, [Replicate()]),
        "some": distribute_tensor(value + 2, some, [Shard(0)]),
        "plain": value + 3,
    }
    into = {
        "sharded": distribute_tensor(torch.zeros(6, 4), line, [Replicate()]),
        "replicated": torch.zeros(6, 4),
        "some": distribute_tensor(torch.zeros(6, 4), line, [Shard(1)]),
        "plain": distribute_tensor(torch.zeros(6, 4), some, [Shard(0)]),
    }
    expected = {key: value + number for number, key in enumerate(state)}
    if torch.distributed.get_rank() not in (0, 2):
        del into["plain"], expected["plain"]
    for saver, loaders in ROADS.items():
        SAVES[saver](state, f"{path}-{saver}")
        for loader in loaders:
            LOADS[loader](cleared(into), f"{path}-{saver}")
            for key, target in into.items():
                assert key == "plain" or same(whole(target), expected[key]), (saver, loader, key)
            if "plain" in into:
                assert same(whole(into["plain"]), expected["plain"]), (saver, loader)


class Net(torch.nn.Module):
    def __init__(self, fill):
        super().__init__()
        torch.manual_seed(1 if fill else 2)
        self.net1, self.net2, self.net3 = torch.nn.Linear(5, 16), torch.nn.Linear(16, 4), torch.nn.Linear(4, 6)

    def forward(self, x):
        return self.net3(self.net2(self.net1(x).relu()).relu())


def model_of(kind, fill):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    line, square = meshes()
    model, plan = Net(fill), {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=line, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "hsdp1":
        hybrid = ShardingStrategy.HYBRID_SHARD
        return FullyShardedDataParallel(
            model, device_mesh=square, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=hybrid
        )
    if kind == "tp":
        return parallelize_module(model, square["tp"], plan)
    if kind == "fsdp2_tp":
        return fully_shard(parallelize_module(model, square["tp"], plan), mesh=square["dp"])
    return fully_shard(model, mesh=square if kind == "hsdp2" else line)


KINDS = ("fsdp1", "fsdp2", "hsdp1", "hsdp2", "tp", "fsdp2_tp", "ddp")


def state_of_training(kind, fill):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = model_of(kind, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(10.0).reshape(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}


def model_and_optimizer_of_every_kind(path):
    """fsdp_model_state, fsdp_optim_state, hsdp_checkpoint, tp_checkpoint, fsdp_tp_checkpoint_conversion."""
    intos = [state_of_training(kind, False) for kind in KINDS]
    for number, kind in enumerate(KINDS):
        round_trip(f"{path}-{kind}", state_of_training(kind, True), intos[(number + 3) % len(KINDS)])


def helpers_of_state_dicts(path):
    """state_dict: whole states on rank 0 and on all, states in one level, and what is broadcast after a load."""
    from torch.distributed.checkpoint import state_dict as helpers

    options = helpers.StateDictOptions(flatten_optimizer_state_dict=True)
    model = model_of("fsdp2", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(10.0).reshape(2, 5)).sum().backward()
    optimizer.step()
    other = model_of("fsdp2", False)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    for saver, loaders in ROADS.items():
        state = dict(zip(("model", "optimizer"), helpers.get_state_dict(model, optimizer, options=options)))
        SAVES[saver](state, f"{path}-{saver}")
        for loader in loaders:
            into = dict(zip(("model", "optimizer"), helpers.get_state_dict(other, other_optimizer, options=options)))
            LOADS[loader](into, f"{path}-{saver}")
            helpers.set_state_dict(
                other, other_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"], options=options
            )
            made = dict(zip(("model", "optimizer"), helpers.get_state_dict(other, other_optimizer, options=options)))
            assert same(whole(made), whole(state))
    full = helpers.StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = helpers.get_model_state_dict(model, options=full)
    if torch.distributed.get_rank() == 0:
        tessera.torch.save(gathered, checkpoint_id=f"{path}-full", no_dist=True)
    torch.distributed.barrier()
    into = {}
    if torch.distributed.get_rank() == 0:
        into = {name: torch.zeros_like(tensor) for name, tensor in gathered.items()}
        tessera.torch.load(into, checkpoint_id=f"{path}-full", no_dist=True)
    sent = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    helpers.set_model_state_dict(other, into, options=sent)
    assert same(whole(helpers.get_model_state_dict(other)), whole(helpers.get_model_state_dict(model)))


def what_the_metadata_says(path):
    """planner: global plan, duplicates that are dropped, indexes with hints."""
    state = state_of_training("fsdp2_tp", True) | {"plain": torch.ones(3), "value": [1, 2], "step": 7}
    theirs = dcp.save(state, checkpoint_id=f"{path}-torch")
    ours = dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(f"{path}-writer"))
    tessera.torch.save(state, checkpoint_id=f"{path}-ours")
    planned = dcp.FileSystemReader(f"{path}-ours").read_metadata()
    theirs = dcp.FileSystemReader(f"{path}-torch").read_metadata()
    if torch.distributed.get_rank() == 0:
        assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.planner_data == theirs.planner_data
    assert planned.planner_data == theirs.planner_data
    assert planned.storage_data.keys() == theirs.storage_data.keys()
    for name, entry in theirs.state_dict_metadata.items():
        found = planned.state_dict_metadata[name]
        chunks = [sorted((chunk.offsets, chunk.sizes) for chunk in getattr(of, "chunks", ())) for of in (found, entry)]
        assert chunks[0] == chunks[1] and type(found) is type(entry), name
        assert getattr(found, "properties", None) == getattr(entry, "properties", None), name


def keys_in_another_order(path):
    """e2e: a state whose order differs from rank to rank, and whose parts talk to other ranks while they are loaded."""

    class Talking:
        def __init__(self, value):
            self.value = torch.full((2,), float(value))

        def state_dict(self):
            torch.distributed.all_reduce(torch.ones(1))
            return {"value": self.value}

        def load_state_dict(self, state):
            torch.distributed.all_reduce(torch.ones(1))
            self.value = state["value"]

    names = "abcd"
    rank = torch.distributed.get_rank()
    turned = names[rank:] + names[:rank]
    for saver, loaders in ROADS.items():
        SAVES[saver]({name: Talking(ord(name)) for name in turned}, f"{path}-{saver}")
        for loader in loaders:
            into = {name: Talking(0) for name in turned}
            LOADS[loader](into, f"{path}-{saver}")
            assert all(into[name].value.tolist() == [ord(name)] * 2 for name in names), (saver, loader)


def groups_of_some_ranks(path):
    """save_load_api: a save and a load by the ranks of a group alone."""
    group = torch.distributed.new_group([1, 3])
    rank = torch.distributed.get_rank()
    if rank in (1, 3):
        state = {"w": torch.ones(3), f"own{rank}": torch.full((2,), float(rank))}
        into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(f"{path}-writer"), process_group=group)
        tessera.torch.save(state, checkpoint_id=f"{path}-ours", process_group=group)
        for saver in ROADS:
            dcp.load(cleared(into), storage_reader=tessera.torch.FileSystemReader(f"{path}-{saver}"), process_group=group)
            assert same(into, state)
            tessera.torch.load(cleared(into), checkpoint_id=f"{path}-{saver}", process_group=group)
            assert same(into, state) and set(tessera.open(f"{path}-{saver}")) == {"w", "own1", "own3"}
    torch.distributed.barrier()


def duplicates_go_where_they_are_told(path):
    """dedup_tensors: to the lowest rank, or spread."""
    state = {f"w{number}": torch.full((50,), float(number)) for number in range(8)}
    writer = tessera.torch.FileSystemWriter(path)
    made = dcp.save(state, storage_writer=writer, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    if torch.distributed.get_rank() == 0:
        assert {info.relative_path[:4] for info in made.storage_data.values()} == {"__0_"}
    made = dcp.save(state, storage_writer=writer)
    if torch.distributed.get_rank() == 0:
        assert len({info.relative_path[:4] for info in made.storage_data.values()}) == RANKS


def stages_of_a_pipeline(path):
    """pipeline: every rank has layers of its own, and somebody wants them all."""
    rank = torch.distributed.get_rank()
    state = {"layers": {str(rank): torch.full((3,), float(rank))}, "optimizer": {f"lr{rank}": rank}}
    into = {"layers": {str(of): torch.zeros(3) for of in range(RANKS)}, "optimizer": {f"lr{of}": -1 for of in range(RANKS)}}
    expected = {
        "layers": {str(of): torch.full((3,), float(of)) for of in range(RANKS)},
        "optimizer": {f"lr{of}": of for of in range(RANKS)},
    }
    round_trip(path, state, into, expected=expected)


def fine_tuning(path):
    """A base is loaded into a model that has more; only the new part is trained, saved and loaded."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    base = state_of_training("fsdp2", True)["model"]
    wanted = state_of_training("fsdp2", False)["model"] | {"head.weight": torch.full((2,), 5.0)}
    expected = whole(base) | {"head.weight": torch.full((2,), 5.0)}
    for saver in ROADS:
        SAVES[saver](base, f"{path}-{saver}")
        for load in (dcp.load, tessera.torch.load):
            cleared(wanted)["head.weight"].fill_(5.0)
            reader = tessera.torch.FileSystemReader(f"{path}-{saver}")
            load(wanted, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
            assert same(whole(wanted), expected)


def one_rank_cannot_read(path):
    """checkpoint: what fails on one rank fails on all, and the memory of the one stays as it is."""
    from torch.distributed.tensor import Shard, distribute_tensor

    line, _ = meshes()
    rank = torch.distributed.get_rank()
    sharded = distribute_tensor(torch.ones(RANKS, 1000), line, [Shard(0)])
    dcp.save({"w": sharded}, storage_writer=tessera.torch.FileSystemWriter(path))
    # Each rank wants what rank 2 has written.
    wanted = {"w": distribute_tensor(torch.zeros(RANKS, 1000), line, [Shard(0)])}
    if rank == 2:
        (name,) = {info.relative_path for index, info in dcp.FileSystemReader(path).read_metadata().storage_data.items()
                   if index.offset[0] == 2}
        with open(f"{path}/{name}", "r+b") as file:
            file.seek(2000)
            file.write(b"\0\1\2\3")
    torch.distributed.barrier()
    for loader, kind in (("reader", BaseException), ("ours", tessera.CorruptError)):
        with pytest.raises(kind, match="corrupt"):
            LOADS[loader](wanted, path)
    if rank == 2:
        assert not wanted["w"].to_local().any()


def hostile_metadata(path):
    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (f"{path}-ran",))

    if torch.distributed.get_rank() == 0:
        os.mkdir(path)
        with open(f"{path}/.metadata", "wb") as file:
            pickle.dump(Hostile(), file)
    torch.distributed.barrier()
    into = {"w": torch.zeros(3)}
    for loader, kind in (("reader", BaseException), ("ours", tessera.UnsafeError)):
        with pytest.raises(kind, match="unsafe"):
            LOADS[loader](into, path)
    torch.distributed.barrier()
    assert not os.path.exists(f"{path}-ran") and not into["w"].any()


CASES = (
    dtensor_resharding, sharded_tensor_resharding, dtensor_checkpoint, model_and_optimizer_of_every_kind,
    helpers_of_state_dicts, what_the_metadata_says, keys_in_another_order, groups_of_some_ranks,
    duplicates_go_where_they_are_told, stages_of_a_pipeline, fine_tuning, one_rank_cannot_read, hostile_metadata,
)  # fmt: skip


def all_cases(rank, ranks, directory, names):
    for case in CASES:
        if not names or case.__name__ in names:
            try:
                case(f"{directory}/{case.__name__}")
            except BaseException as error:
                raise AssertionError(case.__name__) from error


def test_what_torchs_suites_check_on_ranks(tmp_path):
    run_ranks(all_cases, RANKS, str(tmp_path), os.environ.get("TESSERA_CASES", "").split())
