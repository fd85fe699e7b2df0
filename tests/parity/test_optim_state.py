"""PyTorch's FSDP1 takes optimizer states that Tessera wrote, whole and sharded, and trains on with the same losses.

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
    finish()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What both sides wrote: Tessera its states after three steps and the losses of two more, PyTorch the losses alone."""
    path = tmp_path_factory.mktemp("optim_state")
    subprocess.run([os.environ["TESSERA_OPTIM_STATE_STEPS"], str(GOLDEN / "optim_state"), str(path)], check=True, timeout=200)
    subprocess.run([sys.executable, "-W", "ignore", __file__, "--peer", str(path)], check=True, timeout=300)
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


if __name__ == "__main__":
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as temporary:
        mp.spawn(run_peer, args=(2, f"{temporary}/store", sys.argv[2]), nprocs=2)
