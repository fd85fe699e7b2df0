"""Files of one rank each with DTensors, as fully_shard and trainers around it save them.

    python dtensor_ranks.py tests/golden/checkpoints

ranks_fsdp2_ws2, ranks_fsdp2_ws3: {model,optim,extra_state}_world_size_N_rank_R.pt of an FSDP2 model and AdamW.
ranks_fsdp1_ws2:                  the same of an FSDP1 model with sharded state dicts (ShardedTensors).
ranks_mesh_ws4:                   rank{r}.pt of DTensors on 2-D meshes: replicated and sharded, both dimensions on one of
                                  the tensor's, FSDP2 over tensor parallelism, uneven sizes.
ranks_*_full.pt:                  what PyTorch gathers from them, on rank 0.
"""
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.simplefilter("ignore")
out = pathlib.Path(sys.argv[1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 2)
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale


def gathered(value):
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return [gathered(item) for item in value] if isinstance(value, list) else value


def save_parts(name, rank, parts):
    directory = out / name
    directory.mkdir(exist_ok=True)
    for part, tree in parts.items():
        torch.save(tree, directory / f"{part}_world_size_{dist.get_world_size()}_rank_{rank}.pt")


def step(model, optimizer):
    torch.manual_seed(1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def extra(rank):
    return {"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.01]}, "rng": {"random": rank}}


def save_full(name, rank, tree):
    full = gathered(tree)
    if rank == 0:
        torch.save(full, out / f"{name}_full.pt")


def fsdp2(rank, world):
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    tree = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    name = f"ranks_fsdp2_ws{world}"
    save_parts(name, rank, {**tree, "extra_state": extra(rank)})
    save_full(name, rank, {**tree, "train": extra(0)})


def fsdp1(rank, world):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        tree = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    save_parts("ranks_fsdp1_ws2", rank, tree)
    full = {key: value if not hasattr(value, "local_shards") else gather_shards(value)
            for key, value in tree["model"].items()}
    state = {name: {key: gather_shards(value) if hasattr(value, "local_shards") else value
                    for key, value in values.items()} for name, values in tree["optim"]["state"].items()}
    full = {"model": full, "optim": {"state": state, "param_groups": tree["optim"]["param_groups"]}}
    if rank == 0:
        torch.save(full, out / "ranks_fsdp1_ws2_full.pt")


def gather_shards(value):
    whole = torch.empty(value.size()) if dist.get_rank() == 0 else None
    value.gather(dst=0, out=whole)
    return whole


def meshes(rank, world):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = {str(placements): distribute_tensor(torch.randn(5, 3), mesh, placements) for placements in (
        (Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(0)),
        (Shard(0), Shard(0)), (Replicate(), Replicate()))}
    hybrid = Model()
    fully_shard(hybrid, mesh=mesh)
    tensor_parallel = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(tensor_parallel, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(tensor_parallel, mesh=mesh["dp"])
    parameter = nn.Parameter(distribute_tensor(torch.randn(4), mesh, (Shard(0), Replicate())))
    tree = {"values": {f"v{i}": value for i, value in enumerate(values.values())}, "hybrid": hybrid.state_dict(),
            "tensor_parallel": tensor_parallel.state_dict(), "parameter": parameter, "number": 3}
    directory = out / "ranks_mesh_ws4"
    directory.mkdir(exist_ok=True)
    torch.save(tree, directory / f"rank{rank}.pt")
    save_full("ranks_mesh_ws4", rank, tree)
    if rank == 0:
        for key, value in tensor_parallel.state_dict().items():
            print(key, value.placements, value._spec.shard_order)


def run(rank, world, works):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29714", RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for work in works:
        work(rank, world)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for world, works in ((2, (fsdp2, fsdp1)), (3, (fsdp2,)), (4, (meshes,))):
        mp.spawn(run, args=(world, works), nprocs=world)
