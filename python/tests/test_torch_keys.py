"""What `tessera.torch.load` says of keys, beside torch's `load_state_dict` and `dcp.load`."""

import warnings

import pytest

import tessera

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera.torch  # noqa: E402
from tests_of_torch import SAVES, run_ranks  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def model_of(names):
    return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})


@pytest.mark.parametrize("saver", SAVES)
def test_the_same_keys_as_a_module_says(saver, tmp_path):
    saved, wanted = model_of("abc").state_dict(), model_of("bcd").state_dict()
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    SAVES[saver](saved, tmp_path / "a")
    keys = tessera.torch.load(wanted, checkpoint_id=tmp_path / "a", strict=False)
    module = model_of("bcd")
    theirs = module.load_state_dict(saved, strict=False)
    assert keys._fields == theirs._fields
    assert keys.missing_keys == sorted(theirs.missing_keys) == ["d.bias", "d.weight"]
    assert keys.unexpected_keys == sorted(theirs.unexpected_keys) == ["a.bias", "a.weight"]
    assert all(torch.equal(wanted[name], (saved if name in saved else before)[name]) for name in wanted)


def test_a_strict_load_misses_nothing_and_says_what_is_left(tmp_path):
    saved = {"model": {"w": torch.ones(3), "v": torch.ones(1)}, "step": 7, "empty": {}}
    tessera.torch.save(saved, checkpoint_id=tmp_path / "a")
    into = {"model": {"w": torch.zeros(3)}}
    keys = tessera.torch.load(into, checkpoint_id=tmp_path / "a")
    missing, unexpected = keys
    assert (missing, unexpected) == ([], ["model.v", "step"]) and into["model"]["w"].tolist() == [1, 1, 1]
    assert repr(tessera.torch.load({**saved, "step": 0}, checkpoint_id=tmp_path / "a")) == "<All keys matched successfully>"
    with pytest.raises(tessera.KeyNotFoundError, match="'model.x'"):
        tessera.torch.load({"model": {"x": torch.zeros(3)}}, checkpoint_id=tmp_path / "a", strict=True)


def test_a_shape_that_differs_is_refused_all_the_same(tmp_path):
    tessera.torch.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    into = {"w": torch.zeros(4), "x": torch.zeros(1)}
    with pytest.raises(tessera.MismatchError):
        tessera.torch.load(into, checkpoint_id=tmp_path / "a", strict=False)
    assert into["w"].tolist() == [0, 0, 0, 0]


class Part:
    """A Stateful that has more than was saved."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = {**state, "loaded": True}


def test_objects_with_a_state_keep_what_is_missing(tmp_path):
    tessera.torch.save({"part": Part(a=torch.ones(2), n=3)}, checkpoint_id=tmp_path / "a")
    part = Part(a=torch.zeros(2), n=0, new="as it was")
    keys = tessera.torch.load({"part": part}, checkpoint_id=tmp_path / "a", strict=False)
    assert keys == (["part.new"], [])
    assert part.state.pop("a").tolist() == [1, 1] and part.state == {"n": 3, "new": "as it was", "loaded": True}


def test_planners_decide_themselves(tmp_path):
    tessera.torch.save({"w": torch.ones(3), "v": torch.ones(1)}, checkpoint_id=tmp_path / "a")

    def load(planner, **more):
        return tessera.torch.load({"w": torch.zeros(3), "x": torch.zeros(1)}, checkpoint_id=tmp_path / "a", planner=planner, **more)

    for kind in (dcp.DefaultLoadPlanner, tessera.torch.LoadPlanner):
        assert load(kind(allow_partial_load=True)) == (["x"], ["v"])
        with pytest.raises(tessera.Error):
            load(kind())
        with pytest.raises(TypeError, match="allow_partial_load"):
            load(kind(), strict=False)


def test_readers_of_torchs_tell_the_same(tmp_path):
    tessera.torch.save({"w": torch.ones(3), "v": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    for reader in (dcp.FileSystemReader, tessera.torch.FileSystemReader):
        into = {"w": torch.zeros(3), "x": torch.zeros(1)}
        keys = tessera.torch.load(into, storage_reader=reader(str(tmp_path / "a")), strict=False)
        assert keys == (["x"], ["v"]) and into["w"].tolist() == [1, 1, 1]


def own_layers(rank, ranks, path):
    """Each rank holds other layers, as in a pipeline, and one that nobody has saved."""
    layers = {f"layer{number}": torch.full((2,), float(number)) for number in range(8)}
    SAVES["ours"](layers, path)
    into = {f"layer{number}": torch.zeros(2) for number in (rank, rank + 2)}
    into[f"new{rank}"] = torch.zeros(1)
    planner = tessera.torch.LoadPlanner(allow_partial_load=True)
    loads = (
        lambda: tessera.torch.load(into, checkpoint_id=path, strict=False),
        lambda: tessera.torch.load(into, checkpoint_id=path, planner=planner),
    )
    for load in loads:
        keys = load()
        assert keys.missing_keys == [f"new{number}" for number in range(ranks)]
        assert keys.unexpected_keys == [f"layer{number}" for number in range(ranks + 2, 8)]
        assert into[f"layer{rank + 2}"].tolist() == [rank + 2.0] * 2
    with pytest.raises(tessera.KeyNotFoundError):
        tessera.torch.load(into, checkpoint_id=path)


def test_all_ranks_are_told_the_same(tmp_path):
    run_ranks(own_layers, 3, str(tmp_path / "a"))


def other_checkpoints(rank, ranks, path):
    """Directories that are not those of rank 0."""
    state = {"w": torch.full((2,), float(rank)), f"own{rank}": torch.ones(1)}
    tessera.torch.save(state, checkpoint_id=f"{path}{rank}", no_dist=True)
    into = {"w": torch.zeros(2)}
    keys = tessera.torch.load(into, checkpoint_id=f"{path}{rank}", strict=False)
    assert keys == ([], ["own0"]) and into["w"].tolist() == [rank, rank]


def test_ranks_that_see_different_checkpoints(tmp_path):
    run_ranks(other_checkpoints, 3, str(tmp_path / "a"))
