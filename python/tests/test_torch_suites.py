"""What PyTorch's suites check of planners, formats and values in one process, with our classes in the places of torch's."""

import io
import warnings

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import LOADS, SAVES, same  # noqa: E402
from torch.distributed.checkpoint import format_utils  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys  # noqa: E402
from torch.distributed.checkpoint.stateful import Stateful  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")

OURS = [pytest.param(name, id=name) for name in ("writer", "ours")]


def model_and_optimizer(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 1), torch.nn.EmbeddingBag(5, 10))
    optimizer = torch.optim.Adam(list(model[:2].parameters()), lr=0.1)
    model[:2](torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", list(LOADS))
def test_a_model_and_its_optimizer(saver, loader, tmp_path):
    """file_system_checkpoint_cpu, nested_dict: int keys, lists of dicts, and numbers in them."""
    state, into = model_and_optimizer(1), model_and_optimizer(2)
    assert not same(state, into)
    SAVES[saver](state, tmp_path)
    LOADS[loader](into, tmp_path)
    assert same(state, into)


@pytest.mark.parametrize("saver", OURS)
def test_a_checkpoint_becomes_a_file_of_torchs(saver, tmp_path):
    """format_utils, both ways."""
    state = model_and_optimizer(1)
    SAVES[saver](state, tmp_path / "dcp")
    format_utils.dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt")
    assert same(found["model"], dict(state["model"])) and torch.equal(
        found["optimizer"]["state"]["0"]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"]
    )
    torch.save(state, tmp_path / "whole.pt")
    format_utils.torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "again")
    for loader in ("reader", "ours"):
        into = model_and_optimizer(2)
        LOADS[loader](into, tmp_path / "again")
        assert same(into, state)


@pytest.mark.parametrize("saver", OURS)
def test_a_file_of_torchs_is_loaded_as_if_it_were_a_checkpoint(saver, tmp_path):
    """torch_save_to_dcp: torch's reader of files beside our writer."""
    state = model_and_optimizer(1)["model"]
    torch.save(state, tmp_path / "file.pt")
    into = model_and_optimizer(2)["model"]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        dcp.load(
            into,
            storage_reader=format_utils.BroadcastingTorchSaveReader(tmp_path / "file.pt"),
            planner=format_utils.DynamicMetaLoadPlanner(),
        )
    finally:
        torch.distributed.destroy_process_group()
    SAVES[saver](into, tmp_path / "dcp")
    assert same(tessera.load(tmp_path / "dcp", framework="torch"), dict(state))


@pytest.mark.parametrize("saver", OURS)
def test_a_part_of_a_checkpoint_by_its_keys(saver, tmp_path):
    """e2e: states that are made from what is there."""
    state = model_and_optimizer(1)
    SAVES[saver](state, tmp_path)
    reader = tessera.torch.FileSystemReader(tmp_path)
    assert same(_load_state_dict_from_keys("model", storage_reader=reader)["model"], dict(state["model"]))
    found = _load_state_dict_from_keys({"optimizer.state.0", "model.0.bias"}, storage_reader=reader)
    assert list(found["model"]) == ["0.bias"]
    assert torch.equal(found["optimizer"]["state"]["0"]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    everything = _load_state_dict_from_keys(storage_reader=reader)
    assert same(everything["optimizer"]["param_groups"], state["optimizer"]["param_groups"])


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("load", [dcp.load, tessera.torch.load])
def test_a_load_of_what_is_there(saver, load, tmp_path):
    """planner: allow_partial_load, strict without it, and other sizes."""
    SAVES[saver]({"a": torch.ones(2), "n": 1}, tmp_path)
    reader = tessera.torch.FileSystemReader(tmp_path)
    into = {"a": torch.zeros(2), "b": torch.zeros(3), "n": 0, "m": 5}
    load(into, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert into["a"].all() and not into["b"].any() and (into["n"], into["m"]) == (1, 5)
    with pytest.raises(BaseException, match="'?b'?"):
        load({"a": torch.zeros(2), "b": torch.zeros(3)}, storage_reader=reader, planner=DefaultLoadPlanner())
    with pytest.raises(BaseException, match="[Ss]ize|shape"):
        load({"a": torch.zeros(3)}, storage_reader=reader, planner=DefaultLoadPlanner())


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", list(LOADS))
def test_what_is_stateful_is_asked_and_what_is_not_is_replaced(saver, loader, tmp_path):
    class State(dict):
        replaced = False

        def __setitem__(self, key, value):
            self.replaced = True
            super().__setitem__(key, value)

    class Empty(Stateful):
        loaded = None

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.loaded = state

    state = State(part=Empty())
    SAVES[saver](state, tmp_path / "a")
    LOADS[loader](state, tmp_path / "a")
    assert state["part"].loaded == {} and not state.replaced
    state = State(part={"w": torch.ones(2), "bytes": [1, 2, 3]})
    SAVES[saver](state, tmp_path / "b")
    LOADS[loader](state, tmp_path / "b")
    assert state.replaced


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", list(LOADS))
def test_a_state_of_nothing(saver, loader, tmp_path):
    SAVES[saver]({}, tmp_path)
    LOADS[loader]({}, tmp_path)
    assert tessera.verify(tmp_path).findings == []


class Losses(Stateful):
    """As trainers keep what is no tensor: in a file in memory."""

    def __init__(self, losses):
        self.losses = losses

    def state_dict(self):
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"step": torch.tensor(len(self.losses), dtype=torch.int32), "losses": file}

    def load_state_dict(self, state):
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


@pytest.mark.parametrize("saver", OURS)
@pytest.mark.parametrize("loader", list(LOADS))
def test_files_in_memory(saver, loader, tmp_path):
    SAVES[saver]({"losses": Losses([2.5, 1.5])}, tmp_path)
    into = {"losses": Losses([])}
    LOADS[loader](into, tmp_path)
    assert into["losses"].losses == [2.5, 1.5]


@pytest.mark.parametrize("saver", OURS)
def test_keys_with_points_and_slashes(saver, tmp_path):
    state = {"a.b": torch.ones(1), "c/d": torch.ones(2), "": torch.ones(3), "e": {"f.g": {"h": torch.ones(4)}}, "../x": 5}
    SAVES[saver](state, tmp_path / "a")
    for load in LOADS.values():
        into = {"a.b": torch.zeros(1), "c/d": torch.zeros(2), "": torch.zeros(3), "e": {"f.g": {"h": torch.zeros(4)}}, "../x": 0}
        load(into, tmp_path / "a")
        assert same(into, state)
