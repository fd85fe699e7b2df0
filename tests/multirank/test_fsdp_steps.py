"""PyTorch's fully_shard and Tessera's, on two and three real ranks: the same losses and gradient norms.

TESSERA_FSDP_LOSSES names the C++ program. Run with --peer DIR this file is one rank of the PyTorch side.
"""
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

V, D, F, ROWS, LENGTH, STEPS = 17, 10, 13, 2, 7, 5


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


def train_peer(directory):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    net = make_net()
    for block in net.h:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    tokens = make_tokens(world)
    with open(f"{directory}/peer.{rank}", "w") as out:
        for step in range(STEPS):
            batch = tokens[step, rank]
            logits = net(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.reshape(-1, V), batch[:, 1:].reshape(-1))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            optimizer.step()
            optimizer.zero_grad()
            print("%.9g %.9g" % (loss.item(), norm.item()), file=out)
    dist.destroy_process_group()


def torchrun(world, *command, **environment):
    launch = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone",
              "--nproc-per-node", str(world)]
    subprocess.run([*launch, *command], check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.mark.parametrize("world", [2, 3])
def test_losses_and_norms_equal(tmp_path, world):
    """Through shared memory, and through Gloo: for two ranks the same bits."""
    weights = b"".join(p.detach().numpy().tobytes() for p in make_net().parameters())
    (tmp_path / "weights").write_bytes(weights)
    (tmp_path / "tokens").write_bytes(make_tokens(world).numpy().tobytes())
    torchrun(world, os.environ["TESSERA_FSDP_LOSSES"], str(tmp_path), TESSERA_SAME_HOST="0")
    through_gloo = [(tmp_path / f"ours.{rank}").read_bytes() for rank in range(world)]
    torchrun(world, os.environ["TESSERA_FSDP_LOSSES"], str(tmp_path), TESSERA_SAME_HOST="1")
    if world == 2:
        assert through_gloo == [(tmp_path / f"ours.{rank}").read_bytes() for rank in range(world)]
    torchrun(world, sys.executable, __file__, "--peer", str(tmp_path))
    for rank in range(world):
        ours, peer = ([[float(x) for x in line.split()] for line in (tmp_path / f"{side}.{rank}").open()]
                      for side in ("ours", "peer"))
        assert len(ours) == len(peer) == STEPS
        for mine, theirs in zip(ours, peer):
            assert mine == pytest.approx(theirs, rel=1e-6), f"rank {rank}"


if __name__ == "__main__":
    train_peer(sys.argv[2])
