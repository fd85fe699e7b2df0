"""PyTorch's FSDP1 takes optimizer states that Tessera wrote, whole and sharded, and trains on with the same losses. What
get_state_dict gives on one side is what set_state_dict takes on the other, bit for bit (checkpoint-rows P-30).

TESSERA_OPTIM_STATE_STEPS names the C++ program; TESSERA_GOLDEN is tests/golden. Run with --peer DIR this file is the PyTorch
side.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

GOLDEN = pathlib.Path(os.environ["TESSERA_GOLDEN"])
sys.path[:0] = [str(GOLDEN / "make"), str(pathlib.Path(__file__).resolve().parents[2] / "examples/peers")]
NAMES = ["nested", "dummy", "transformer"]
KINDS = ["flat", "original"]
CASES = [(name, kind) for name in NAMES for kind in KINDS]
MORE_STEPS = 2
# States by name: how the model is sharded, and in which form the state is.
BY_NAME = [("nested", "flat"), ("nested", "original"), ("dummy", "flat"), ("dummy", "original"), ("dummy", "rows"),
           ("dummy", "plain")]
FORMS = {"sharded": {}, "sharded_flat": {"flatten_optimizer_state_dict": True}, "full": {"full_state_dict": True},
         "full_flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True}}


def load_full(model, optimizer, path):
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    content = torch.load(f"{path}.pt", weights_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        assert not model.load_state_dict(content["model"], strict=False).missing_keys
        state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optim"])
    optimizer.load_state_dict(state)


def load_sharded(model, optimizer, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        content = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        dcp.load(content, checkpoint_id=path)
        model.load_state_dict(content["model"])
        state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optim"])
    optimizer.load_state_dict(state)


def made(name, kind):
    """A model in which no step has been made, its optimizer, and what train() takes besides."""
    import optim_state
    import torch
    from torch.distributed.fsdp import fully_shard

    plain, batches = optim_state.make(name)
    model = plain
    if kind == "rows":
        fully_shard(plain)
    elif kind != "plain":
        model = optim_state.wrapped(plain, kind == "original")
    return plain, model, torch.optim.Adam(model.parameters(), lr=0.5), batches


def state_by_name(model, optimizer, options):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options)))


def exchange_by_name(directory):
    """Takes what Tessera saved and saves it again under taken/; saves the states of a training of its own under own/."""
    import optim_state
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    for name, kind in BY_NAME:
        for form, arguments in FORMS.items():
            options = StateDictOptions(**arguments)
            _, model, optimizer, _ = made(name, kind)
            state = state_by_name(model, optimizer, options)
            dcp.load(state, checkpoint_id=f"{directory}/{name}.{kind}.{form}")
            # It sees what kind of keys there are; but told so, it fails for whole states.
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"],
                           options=StateDictOptions(full_state_dict=options.full_state_dict))
            dcp.save(state_by_name(model, optimizer, options), checkpoint_id=f"{directory}/taken/{name}.{kind}.{form}")
            plain, model, optimizer, batches = made(name, kind)
            optim_state.train(plain, model, optimizer, batches[:1])
            dcp.save(state_by_name(model, optimizer, options), checkpoint_id=f"{directory}/own/{name}.{kind}.{form}")


def run_peer(rank, world, store, directory):
    import optim_state
    import torch
    import torch.distributed as dist
    from ranks import finish

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    optim_state.mend_original_states()
    for name, kind in CASES:
        for form, load in (("full", load_full), ("sharded", load_sharded)):
            plain, batches = optim_state.make(name)
            model = optim_state.wrapped(plain, kind == "original")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
            # Another state than the one that is loaded; a sharded one is loaded in place.
            optim_state.train(plain, model, optimizer, batches[:1])
            load(model, optimizer, f"{directory}/{name}.{kind}")
            assert optimizer.param_groups[0]["lr"] == 0.01
            losses = optim_state.train(plain, model, optimizer, batches[:MORE_STEPS])
            pathlib.Path(f"{directory}/{name}.{kind}.{form}.peer{rank}").write_text(" ".join(map(repr, losses)))
    exchange_by_name(directory)
    finish()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What both sides wrote: Tessera its states after three steps and the losses of two more, PyTorch the losses alone."""
    path = tmp_path_factory.mktemp("optim_state")
    steps = [os.environ["TESSERA_OPTIM_STATE_STEPS"], str(GOLDEN / "optim_state")]
    subprocess.run([*steps, str(path)], check=True, timeout=200)
    subprocess.run([sys.executable, "-W", "ignore", __file__, "--peer", str(path)], check=True, timeout=300)
    (path / "own_taken").mkdir()
    subprocess.run([*steps, str(path / "own_taken"), str(path / "own")], check=True, timeout=200)
    return path


def losses_of(path):
    return [float(word) for word in path.read_text().split()]


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("name, kind", CASES)
def test_pytorch_trains_on_from_our_state(directory, name, kind, form):
    ours = losses_of(directory / f"{name}.{kind}.losses")
    assert len(ours) == MORE_STEPS
    for rank in range(2):
        assert losses_of(directory / f"{name}.{kind}.{form}.peer{rank}") == pytest.approx(ours, rel=2e-6)


def content(path):
    """All that a distributed checkpoint holds."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for group in state["optim"].get("param_groups", []):
        group["params"].sort()  # flat parameters stand in the order of units
    return state


def assert_same(one, other, place=""):
    """Tensors bit for bit. Options by value: an option of C++ that is a real number may be an integer in Python, and PyTorch
    gives tuples of whole states as lists."""
    import torch

    if isinstance(one, dict):
        assert sorted(one) == sorted(other), place
        for key in one:
            assert_same(one[key], other[key], f"{place}/{key}")
    elif torch.is_tensor(one):
        assert one.dtype == other.dtype and one.shape == other.shape, place
        assert torch.equal(bits(one), bits(other)), place
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for index, (mine, theirs) in enumerate(zip(one, other)):
            assert_same(mine, theirs, f"{place}/{index}")
    else:
        assert one == other, place


def bits(tensor):
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name, kind", BY_NAME)
def test_states_by_name_are_what_pytorch_sets(directory, name, kind, form):
    ours = content(directory / f"{name}.{kind}.{form}")
    assert len(ours["model"]) > 5 and len(ours["optim"]) > 0
    assert_same(ours, content(directory / "taken" / f"{name}.{kind}.{form}"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name, kind", BY_NAME)
def test_pytorch_s_states_by_name_are_what_is_set(directory, name, kind, form):
    assert_same(content(directory / "own" / f"{name}.{kind}.{form}"), content(directory / "own_taken" / f"{name}.{kind}.{form}"))


if __name__ == "__main__":
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as temporary:
        mp.spawn(run_peer, args=(2, f"{temporary}/store", sys.argv[2]), nprocs=2)
