"""What `tessera.torch` fills: targets without memory, of other kinds, and sharded objects that describe themselves.

Whatever fails is a `tessera.Error` on all ranks.
"""

import numpy
import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import LOADS, SAVES, run_ranks  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties  # noqa: E402
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUE = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def saved(tmp_path):
    tessera.torch.save({"a": VALUE, "b": {"c": [VALUE + 1]}, "n": 3}, checkpoint_id=tmp_path / "a")
    return tmp_path / "a"


class Model:
    """A Stateful whose tensors have no memory yet."""

    def state_dict(self):
        return {"c": [torch.empty(8, 4, device="meta")]}

    def load_state_dict(self, state):
        self.loaded = state["c"][0]


def require_made(loader, path):
    model = Model()
    parameter = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.float64, device="meta"))
    state = {"a": parameter, "b": model, "n": 0}
    LOADS[loader](state, path)
    assert state["a"].device.type == "cpu" and state["a"].dtype == torch.float64
    assert torch.equal(state["a"], VALUE.double())
    assert torch.equal(model.loaded, VALUE + 1)


def test_tensors_on_the_meta_device_are_made(saved):
    require_made("ours", str(saved))


def test_a_failed_load_leaves_tensors_on_the_meta_device(saved):
    state = {"b": {"c": [torch.empty(8, 4, device="meta")]}, "a": torch.zeros(3)}
    with pytest.raises(tessera.MismatchError, match="'a'"):
        tessera.torch.load(state, checkpoint_id=saved)
    assert state["b"]["c"][0].is_meta


def meta_on_ranks(rank, ranks, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    value = torch.arange(15.0).reshape(5, 3)  # uneven
    mesh = init_device_mesh("cpu", (ranks,))
    tessera.torch.save({"a": distribute_tensor(value, mesh, [Shard(0)])}, checkpoint_id=path)
    for loader in ("torch", "reader", "ours"):
        state = {"a": distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [Shard(1)])}
        LOADS[loader](state, path)
        assert isinstance(state["a"], DTensor) and state["a"].to_local().device.type == "cpu", loader
        assert torch.equal(state["a"].full_tensor(), value), loader


    tessera.torch.save({"a": VALUE, "b": {"c": [VALUE + 1]}, "n": 3}, checkpoint_id=f"{path}-plain")
    for loader in ("torch", "reader", "ours"):
        require_made(loader, f"{path}-plain")


def test_tensors_on_the_meta_device_are_made_as_torch_makes_them(tmp_path):
    run_ranks(meta_on_ranks, 2, str(tmp_path / "a"))


def unfillable():
    class NoNumbers:
        size = "large"

    uninitialized = torch.nn.UninitializedParameter()
    return {
        "array": numpy.zeros((8, 4), dtype="float32"),
        "number": 5,
        "none": None,
        "object": NoNumbers(),
        "class": torch.Tensor,
        "storage": torch.UntypedStorage(128),
        "uninitialized": uninitialized,
        "expanded": torch.zeros(1, 4).expand(8, 4),
        "nested": torch.nested.nested_tensor([torch.zeros(4)] * 8),
        "jagged": torch.nested.nested_tensor([torch.zeros(4)] * 8, layout=torch.jagged),
        "sparse": torch.zeros(8, 4).to_sparse(),
        "compressed": torch.zeros(8, 4).to_sparse_csr(),
        "shape": torch.zeros(4, 8),
    }


@pytest.mark.parametrize("name", unfillable())
def test_what_cannot_be_filled_is_a_mismatch_and_nothing_changes(name, saved):
    other = torch.zeros(8, 4)
    state = {"a": unfillable()[name], "b": {"c": [other]}}
    with pytest.raises(tessera.MismatchError, match="'a'"):
        tessera.torch.load(state, checkpoint_id=saved)
    assert not other.any()


class Broken:
    def state_dict(self):
        return {"c": [torch.zeros(8, 4)]}

    def load_state_dict(self, state):
        raise ValueError("no place for it")


class Unpicklable:
    def __reduce__(self):
        raise ValueError("I stay here")


def unsaveable():
    return {
        "lambda": lambda: 1,
        "nested": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)], layout=torch.jagged),
        "generator": (i for i in range(3)),
        "object": Unpicklable(),
        "class": type("Local", (), {}),
    }


@pytest.mark.parametrize("name", unsaveable())
def test_what_cannot_be_saved_is_named(name, tmp_path):
    state = {"w": torch.ones(2), "deep": {"x": unsaveable()[name]}}
    with pytest.raises(tessera.UnsupportedError) as raised:
        tessera.torch.save(state, checkpoint_id=tmp_path / "a")
    assert raised.value.key == "deep.x"
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path / "b")
    with pytest.raises(tessera.Error):
        future.result()
    assert not (tmp_path / "a" / ".metadata").exists() and not (tmp_path / "b" / ".metadata").exists()


def test_what_the_state_itself_raises(saved, tmp_path):
    with pytest.raises(tessera.Error, match="ValueError: no place for it") as raised:
        tessera.torch.load({"b": Broken()}, checkpoint_id=saved)
    assert isinstance(raised.value.__cause__, ValueError)

    class Failing(dcp.DefaultLoadPlanner):
        def set_up_planner(self, *arguments):
            raise ValueError("no plan")

    with pytest.raises(tessera.Error, match="no plan"):
        tessera.torch.load({"a": torch.zeros(8, 4)}, checkpoint_id=saved, planner=Failing())


def one_rank_fails(rank, ranks, path):
    tessera.torch.save({"a": VALUE, "b": {"c": [VALUE]}}, checkpoint_id=path)
    for target in (numpy.zeros((8, 4)), torch.zeros(1, 4).expand(8, 4), torch.zeros(8, 4).to_sparse()):
        state = {"a": target if rank == 1 else torch.zeros(8, 4)}
        with pytest.raises(tessera.MismatchError, match="'a'"):
            tessera.torch.load(state, checkpoint_id=path)
        assert rank == 1 or not state["a"].any()
    with pytest.raises(tessera.Error, match="no place for it"):
        tessera.torch.load({"b": Broken() if rank == 1 else {"c": [torch.zeros(8, 4)]}}, checkpoint_id=path)
    value = (lambda: 1) if rank == 1 else 1
    for state in ({"x": value}, {"a": VALUE, "y": {"x": value}}):
        with pytest.raises(tessera.UnsupportedError, match="pickle"):
            tessera.torch.save(state, checkpoint_id=path)

    class NoState(Broken):
        def state_dict(self):
            raise ValueError("no state")

    future = tessera.torch.async_save({"x": NoState() if rank == 1 else 1}, checkpoint_id=path)
    with pytest.raises(tessera.Error, match="no state"):
        future.result(60)
    assert tessera.verify(path).findings == []


def test_errors_of_one_rank_are_everybodys(tmp_path):
    run_ranks(one_rank_fails, 2, str(tmp_path / "a"))


class Own:
    """Two bands of rows that describe themselves, and are no tensor."""

    def __init__(self, value, *bands):
        self.size = value.size
        self.bands = {torch.Size([begin, 0]): value[begin:end].clone() for begin, end in bands}

    def chunks(self):
        return [ChunkStorageMetadata(offsets, part.size()) for offsets, part in self.bands.items()]

    def items(self, fqn):
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.bands[chunk.offsets]), size=self.size()
                ),
            )
            for chunk in self.chunks()
        ]

    def __create_chunk_list__(self):
        return self.chunks()

    def __get_tensor_shard__(self, index):
        return self.bands[index.offset]


def test_an_object_that_is_no_tensor_is_filled_as_it_says(saved):
    own = Own(torch.full((8, 4), -1.0), (0, 3), (6, 8))
    tessera.torch.load({"a": own}, checkpoint_id=saved)
    assert all(torch.equal(part, VALUE[begin : begin + len(part)]) for (begin, _), part in own.bands.items())
    # What it says is not what it has.
    for wrong in (torch.zeros(2, 4), torch.zeros(3, 3), torch.empty(3, 4, device="meta")):
        own = Own(torch.full((8, 4), -1.0), (0, 3))
        chunks = own.chunks()
        own.chunks = lambda chunks=chunks: chunks
        own.bands[torch.Size([0, 0])] = wrong
        with pytest.raises(tessera.MismatchError, match="'a'"):
            tessera.torch.load({"a": own}, checkpoint_id=saved)
    own = Own(VALUE, (0, 3))
    own.bands = {torch.Size([6, 0]): torch.zeros(3, 4)}
    with pytest.raises(tessera.MismatchError, match="not inside"):
        tessera.torch.load({"a": own}, checkpoint_id=saved)
    own.bands = {torch.Size([6]): torch.zeros(2)}
    with pytest.raises(tessera.MismatchError, match="not inside"):
        tessera.torch.load({"a": own}, checkpoint_id=saved)


def uneven(value, rows, rank, mesh, speaks):
    """A DTensor with so many rows on each rank; its local part describes itself, or does not."""
    from torch.distributed.tensor import DTensor, Shard

    begin = sum(rows[:rank])
    local = value[begin : begin + rows[rank]].clone()
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
    if speaks:
        own = Own(value, (begin, begin + rows[rank]))
        part = own.bands[torch.Size([begin, 0])] = made._local_tensor
        part.__create_chunk_list__ = own.chunks
        part.__create_write_items__ = lambda fqn, _: own.items(fqn)
        part.__get_tensor_shard__ = own.__get_tensor_shard__
    return made


def uneven_dtensors(rank, ranks, directory):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    for saver in SAVES:
        path = f"{directory}/{saver}"
        SAVES[saver]({"a": uneven(VALUE, [3, 5], rank, mesh, True)}, path)
        assert numpy.array_equal(tessera.load(path)["a"], VALUE.numpy()), saver
        for loader in LOADS:
            into = uneven(torch.full((8, 4), -1.0), [2, 6], rank, mesh, True)
            LOADS[loader]({"a": into}, path)
            assert torch.equal(into._local_tensor, VALUE[:2] if rank == 0 else VALUE[2:]), (saver, loader)
    state = {"a": uneven(VALUE, [3, 5], rank, mesh, True)}
    tessera.torch.async_save(state, checkpoint_id=f"{directory}/async").result(60)
    assert numpy.array_equal(tessera.load(f"{directory}/async")["a"], VALUE.numpy())
    # Nobody says where its parts are: by its placements every rank has four rows.
    into = uneven(torch.full((8, 4), -1.0), [3, 5], rank, mesh, False)
    with pytest.raises(tessera.MismatchError, match="'a'"):
        tessera.torch.load({"a": into}, checkpoint_id=f"{directory}/ours")
    assert (into._local_tensor == -1).all()
    with pytest.raises(tessera.MismatchError, match="'a'"):
        tessera.torch.save({"a": into}, checkpoint_id=f"{directory}/more")


def test_uneven_dtensors_that_describe_themselves(tmp_path):
    run_ranks(uneven_dtensors, 2, str(tmp_path))


def shards_wrappers(rank, ranks, directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    mesh = init_device_mesh("cpu", (ranks,))

    def tables(value, *of_ranks):
        bands = of_ranks[rank]
        local = LocalShardsWrapper([value[begin:end].clone() for begin, end in bands], [(begin, 0) for begin, _ in bands])
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())

    value = VALUE.bfloat16()
    for saver in SAVES:
        path = f"{directory}/{saver}"
        # The last rank has none.
        SAVES[saver]({"a": tables(value, [(0, 3), (3, 5)], [(5, 8)], [])}, path)
        assert torch.equal(tessera.load(path, framework="torch")["a"], value), saver
        for loader in LOADS:
            into = tables(torch.full_like(value, -1), [(6, 8)], [], [(0, 5), (5, 6)])
            LOADS[loader]({"a": into}, path)
            for part, (begin, _) in zip(into._local_tensor.local_shards(), into._local_tensor.local_offsets()):
                assert torch.equal(part, value[begin : begin + len(part)]), (saver, loader)


def test_dtensors_of_several_local_shards(tmp_path):
    run_ranks(shards_wrappers, 3, str(tmp_path))
