"""PyTorch's GradScaler (one rank) and ShardedGradScaler (two, three) and Tessera's, on the same scaled gradients.

TESSERA_GRAD_SCALER_STEPS names the C++ program. Run with --peer DIR this file is one rank of the PyTorch side.
"""
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/peers"))
from ranks import finish

PARAMETERS = [(3, torch.float32), (0, torch.float32), (5, torch.float16), (4, torch.bfloat16)]
ELEMENTS, STEPS = 12, 40
START = {"scale": 512.0, "growth_factor": 3.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 2}


def run_ranks(world, *command):
    port = str(free_port())
    ranks = [subprocess.Popen(command, env={
        **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for rank in range(world)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()


def peer(directory):
    import torch.distributed as dist
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD) if world > 1 else torch.amp.GradScaler("cpu")
    if world == 1:
        # Unlike the sharded one it refuses float16 gradients, by this argument alone.
        unscale = scaler._unscale_grads_
        scaler._unscale_grads_ = lambda *arguments: unscale(*arguments[:3], True)
    scaler.load_state_dict(torch.load(f"{directory}/start.pt")["scaler"])
    parameters = [torch.ones(size, dtype=dtype, requires_grad=True) for size, dtype in PARAMETERS]
    optimizer = torch.optim.SGD(parameters, lr=0.25)
    gradients = torch.from_file(f"{directory}/gradients", size=STEPS * world * ELEMENTS).view(STEPS, world, ELEMENTS)
    with open(f"{directory}/peer.{rank}", "w") as out, open(f"{directory}/new_scales") as new_scales:
        for step, new_scale in enumerate(map(float, new_scales)):
            pieces = gradients[step, rank].split([size for size, _ in PARAMETERS])
            for parameter, piece in zip(parameters, pieces):
                parameter.grad = piece.to(parameter.dtype)
            loss = scaler.scale(torch.full([1], 3, dtype=torch.float16)).item()
            scaler.step(optimizer)
            scaler.update(new_scale or None)
            values = [scaler.get_scale(), scaler._get_growth_tracker()] + [v for p in parameters for v in p.tolist()]
            print(" ".join("%.9g" % value for value in [loss, *values]), file=out)
    if rank == 0:
        torch.save(scaler.state_dict(), f"{directory}/end.pt")
    finish()


def make_gradients(world):
    """About one step in three has an inf or a nan, of one rank and one dtype."""
    choose = random.Random(world)
    gradients = torch.randn(STEPS, world, ELEMENTS, generator=torch.Generator().manual_seed(world)) * 300
    for step in range(STEPS):
        if choose.random() < 0.3:
            gradients[step, choose.randrange(world), choose.randrange(ELEMENTS)] = choose.choice(
                [float("inf"), float("-inf"), float("nan"), 1e6])  # the last is infinite in float16 alone
    return gradients


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scales_trackers_and_parameters_equal(world, tmp_path):
    torch.save({"scaler": START}, tmp_path / "start.pt")
    (tmp_path / "gradients").write_bytes(make_gradients(world).numpy().tobytes())
    (tmp_path / "new_scales").write_text("".join("100.5\n" if step == 17 else "0\n" for step in range(STEPS)))
    run_ranks(world, os.environ["TESSERA_GRAD_SCALER_STEPS"], str(tmp_path))
    run_ranks(world, sys.executable, __file__, "--peer", str(tmp_path))
    scales = set()
    for rank in range(world):
        ours, theirs = ((tmp_path / f"{side}.{rank}").read_text().splitlines() for side in ("ours", "peer"))
        assert len(ours) == STEPS
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine == other, f"rank {rank}, step {step}"
            scales.add(mine.split()[1])
    assert len(scales) > 5  # it grew and backed off


def test_pytorch_loads_our_state(tmp_path):
    import torch.distributed.checkpoint as dcp

    torch.save({"scaler": START}, tmp_path / "start.pt")
    (tmp_path / "gradients").write_bytes(torch.ones(1, 1, ELEMENTS).numpy().tobytes())
    (tmp_path / "new_scales").write_text("0\n")
    run_ranks(1, os.environ["TESSERA_GRAD_SCALER_STEPS"], str(tmp_path))
    scaler = torch.amp.GradScaler("cpu")
    tree = {"scaler": scaler.state_dict()}
    dcp.load(tree, checkpoint_id=tmp_path / "end", no_dist=True)
    assert tree["scaler"] == {**START, "scale": 1536.0, "_growth_tracker": 0}
    assert [type(value) for value in tree["scaler"].values()] == [type(value) for value in START.values()]
    scaler.load_state_dict(tree["scaler"])
    assert scaler.get_scale() == 1536.0


if __name__ == "__main__":
    peer(sys.argv[2])
