"""PyTorch's FSDP2, FSDP1 and DDP and Tessera's, on two and three real ranks: the same losses, norms and parameters.

TESSERA_FSDP_STEPS names the C++ program. Run with --peer DIR MODE... this file is one rank of the PyTorch side.
"""
import os
import pathlib
import subprocess
import sys
from functools import partial

import numpy
import pytest
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/peers"))
from ranks import finish

V, D, F, ROWS, LENGTH, STEPS = 17, 10, 13, 2, 7, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.up = nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.ln(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.h = nn.ModuleList([Block() for _ in range(3)])
        self.ln = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def make_net():
    torch.manual_seed(5)
    return Net()


def make_tokens(world):
    return torch.randint(V, (STEPS, world, ROWS, LENGTH), generator=torch.Generator().manual_seed(6))


def shard(net, kind, mesh):
    from torch.distributed.fsdp import (FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy,
                                        fully_shard)
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind.startswith("fsdp1"):
        strategy = ShardingStrategy.SHARD_GRAD_OP if kind == "fsdp1_zero2" else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy,
                                        device_id=torch.device("cpu"), use_orig_params=kind == "fsdp1_orig")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "fsdp2_bf16" else MixedPrecisionPolicy()
    for block in net.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def whole_parameters(net, kind):
    from torch.distributed.fsdp import FullyShardedDataParallel

    if kind.startswith("fsdp1"):
        with FullyShardedDataParallel.summon_full_params(net):
            return [p.detach().clone() for p in net.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in net.parameters()]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train_peer(directory, modes):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tokens = make_tokens(world)
    for mode in modes:
        kind, _, optimizer = mode.partition(".")
        net = shard(make_net(), kind, mesh)
        with open(f"{directory}/{mode}.peer_shard.{rank}", "wb") as out:
            for p in net.parameters():
                out.write(local(p.detach()).contiguous().numpy().tobytes())
        if optimizer == "sgd":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
        with open(f"{directory}/{mode}.peer.{rank}", "w") as out:
            for step in range(STEPS):
                batch = tokens[step, rank]
                logits = net(batch[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.reshape(-1, V), batch[:, 1:].reshape(-1))
                loss.backward()
                clip = net.clip_grad_norm_ if kind.startswith("fsdp1") else partial(
                    nn.utils.clip_grad_norm_, net.parameters())
                norm = clip(1.0)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                dtype = str(next(p.grad.dtype for p in net.parameters() if p.grad is not None))
                optimizer.step()
                optimizer.zero_grad()
                print("%.9g %.9g %s" % (loss.item(), norm.item(), dtype), file=out)
        whole = whole_parameters(net, kind)
        if rank == 0:
            with open(f"{directory}/{mode}.peer_final", "wb") as out:
                for p in whole:
                    out.write(p.contiguous().numpy().tobytes())
    finish()


def torchrun(world, *command, **environment):
    launch = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
              "--nproc-per-node", str(world)]
    subprocess.run([*launch, *command], check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


KINDS = ["fsdp2", "fsdp1", "fsdp1_orig", "fsdp1_zero2", "ddp", "fsdp2_bf16"]
MODES = [f"{kind}.{optimizer}" for kind in KINDS for optimizer in ("sgd", "adamw")]


@pytest.fixture(scope="module", params=[2, 3])
def trained(request, tmp_path_factory):
    """Every mode trained by Tessera through shared memory and by PyTorch."""
    world = request.param
    path = tmp_path_factory.mktemp(f"world{world}")
    weights = b"".join(p.detach().numpy().tobytes() for p in make_net().parameters())
    (path / "weights").write_bytes(weights)
    (path / "tokens").write_bytes(make_tokens(world).numpy().tobytes())
    torchrun(world, os.environ["TESSERA_FSDP_STEPS"], str(path), *MODES, TESSERA_SAME_HOST="1")
    torchrun(world, sys.executable, __file__, "--peer", str(path), *MODES)
    return world, path


def rows(path):
    return [line.split() for line in path.open()]


@pytest.mark.parametrize("mode", MODES)
def test_losses_norms_and_parameters_equal(trained, mode):
    world, path = trained
    rel = 2e-2 if "bf16" in mode else 1e-6
    for rank in range(world):
        ours, peer = rows(path / f"{mode}.ours.{rank}"), rows(path / f"{mode}.peer.{rank}")
        assert len(ours) == len(peer) == STEPS
        for mine, theirs in zip(ours, peer):
            assert float(mine[0]) == pytest.approx(float(theirs[0]), rel=rel), f"loss of rank {rank}"
            assert float(mine[1]) == pytest.approx(float(theirs[1]), rel=rel), f"norm of rank {rank}"
            assert (mine[2], theirs[2]) == ("Float", "torch.float32")
    ours, peer = (torch.from_numpy(numpy.fromfile(path / f"{mode}.{side}", dtype="float32"))
                  for side in ("final", "peer_final"))
    limit = 3e-2 if "bf16" in mode else 1e-6 if mode.endswith("sgd") else 1e-3
    assert (ours - peer).norm() / peer.norm() <= limit


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1_orig", "fsdp1_zero2"])
def test_shards_are_the_same_bytes_before_the_first_step(trained, kind):
    world, path = trained
    for rank in range(world):
        ours = (path / f"{kind}.sgd.shard.{rank}").read_bytes()
        assert len(ours) > 0 and ours == (path / f"{kind}.sgd.peer_shard.{rank}").read_bytes()


def test_gloo_gives_the_same_bits_for_two_ranks(trained):
    world, path = trained
    if world != 2:
        pytest.skip("sums of three depend on their order")
    modes = ["fsdp2.sgd", "fsdp1.sgd", "ddp.sgd"]
    before = [(path / f"{mode}.ours.{rank}").read_bytes() for mode in modes for rank in range(world)]
    torchrun(world, os.environ["TESSERA_FSDP_STEPS"], str(path), *modes, TESSERA_SAME_HOST="0")
    assert before == [(path / f"{mode}.ours.{rank}").read_bytes() for mode in modes for rank in range(world)]


if __name__ == "__main__":
    train_peer(sys.argv[2], sys.argv[3:])
