"""What a save costs a training in PyTorch, as bench/training_saves.cpp has it:  training_saves.py WAY DIRECTORY SHAPE SAVES

WAY: none, save (dcp.save), async (dcp.async_save by default). SHAPE: width,layers,batch.
"""
import os
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.simplefilter("ignore")
way, directory, shape, saves = sys.argv[1:5]
width, layers, rows = map(int, shape.split(","))
torch.set_num_threads(1)
for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 29562)):
    os.environ.setdefault(name, str(value))
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
for layer in net:
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
batch = torch.randn(rows, width)
asking = dist.new_group()  # the saves have the other one


def step():
    begin = time.perf_counter()
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def begin_save(path):
    model, optim = get_state_dict(net, optimizer)
    state = {"model": model, "optim": optim}
    if way == "save":
        dcp.save(state, checkpoint_id=path)
        return None
    return dcp.async_save(state, checkpoint_id=path)


def is_under_way(future):
    mine = torch.tensor([0 if future is None or future.done() else 1])
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=asking)
    return bool(mine.item())


for _ in range(3):
    step()
for i in range(-1, int(saves)):
    alone = statistics.median(step() for _ in range(8))
    begin = time.perf_counter()
    future = begin_save(f"{directory}/{i % 2}") if way != "none" else None
    call = time.perf_counter() - begin
    beside = []
    while True:
        beside.append(step())
        if not is_under_way(future):
            break
    took = time.perf_counter() - begin
    if future is not None:
        future.result()
    if dist.get_rank() == 0 and i >= 0:
        print(f"call {1000 * call:.2f} cost {1000 * (took - len(beside) * alone):.2f} "
              f"step {(took - call) / (len(beside) * alone):.3f} steps {len(beside)} alone {1000 * alone:.2f}", flush=True)
dist.destroy_process_group()
os._exit(0)  # at the end of Python libtorch sometimes aborts: a thread of its own is not joined
