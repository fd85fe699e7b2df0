"""One job of `bench/run python`, done by torch or by tessera.torch:  dcp_python.py WHO JOB DIRECTORY [small]

WHO: torch; storage (torch's functions with our reader and writer); tessera. JOB: save or load, with "-items" for 20,000
tensors of 1 KiB and "-large" for 200 of 4 MB; under torchrun every tensor is a DTensor. Prints "seconds N".
"""
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
who, job, directory = sys.argv[1:4]
small = "small" in sys.argv
job, what = job.split("-")
count, shape = ((2000, (256,)) if small else (20_000, (256,))) if what == "items" else (20 if small else 200, (1000, 1000))
torch.set_num_threads(1)
state = {f"layers.{i}.weight": torch.rand(shape) for i in range(count)}
if "RANK" in os.environ:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}


def save():
    if who == "tessera":
        tessera.torch.save(state, checkpoint_id=directory)
    else:
        kind = dcp.FileSystemWriter if who == "torch" else tessera.torch.FileSystemWriter
        dcp.save(state, storage_writer=kind(directory))


def load():
    if who == "tessera":
        tessera.torch.load(state, checkpoint_id=directory)
    else:
        kind = dcp.FileSystemReader if who == "torch" else tessera.torch.FileSystemReader
        dcp.load(state, storage_reader=kind(directory))


if who != "torch":
    import tessera.torch
work = {"save": save, "load": load}[job]
work()  # warms up
if job == "save":
    os.sync()
if dist.is_initialized():
    dist.barrier()
begin = time.perf_counter()
work()
if dist.is_initialized():
    dist.barrier()
if not dist.is_initialized() or dist.get_rank() == 0:
    print("seconds", round(time.perf_counter() - begin, 4))
if dist.is_initialized():
    dist.destroy_process_group()
