"""Training steps beside a save in the background:  async_python.py torch|tessera DIRECTORY [small]

Prints "seconds N": how much longer the steps took than as many steps without a save.
"""
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tessera.torch

warnings.simplefilter("ignore")
who, directory = sys.argv[1:3]
count = 500 if "small" in sys.argv else 5000
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
state = {f"layers.{i}.weight": torch.rand(256) for i in range(count)} | {f"w{i}": torch.rand(1000, 1000) for i in range(50)}
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
batch = torch.rand(8, 64)


def steps(seconds):
    """As many as fit; returns their number and the time of one."""
    begin, done = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        model(batch).sum().backward()
        done += 1
    return done, (time.perf_counter() - begin) / done


def begin_save(path):
    if who == "torch":
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path))
    return tessera.torch.async_save(state, checkpoint_id=path)


begin_save(directory + "/0").result()
steps(1)
_, alone = steps(2)
os.sync()
begin = time.perf_counter()
future, done = begin_save(directory + "/1"), 0
while not future.done():
    model(batch).sum().backward()
    done += 1
print("seconds", round(time.perf_counter() - begin - done * alone, 4))
future.result()
dist.destroy_process_group()
