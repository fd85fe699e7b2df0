"""How long a training stands still for a save in the background:  stall_python.py copy|torch|kept|tessera DIRECTORY [small]

`kept` is torch with one stager for all saves, `copy` no save: tensors copied into memory that is there, by two threads. Each save
is awaited before the next one. Prints "seconds N": the median of five calls, from the second on, in milliseconds.
"""
import concurrent.futures
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import tessera.torch

warnings.simplefilter("ignore")
who, directory = sys.argv[1:3]
rows = 10 if "small" in sys.argv else 1000
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
state = {f"w{i}": torch.rand(rows, 1000) for i in range(125)}
copies = [torch.zeros_like(tensor) for tensor in state.values()]
stager = DefaultStager(StagingOptions(False, False, False, False))
pool = concurrent.futures.ThreadPoolExecutor(2)


def copy():
    list(pool.map(torch.Tensor.copy_, copies, state.values()))
    done = concurrent.futures.Future()
    done.set_result(None)
    return done


def begin_save():
    if who == "copy":
        return copy()
    if who == "tessera":
        return tessera.torch.async_save(state, checkpoint_id=directory)
    kept = {"async_stager": stager} if who == "kept" else {}
    return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(directory), **kept)


stalls = []
for _ in range(6):
    begin = time.perf_counter()
    future = begin_save()
    stalls.append(time.perf_counter() - begin)
    future.result()
    time.sleep(0.2)
print("seconds", round(1000 * statistics.median(stalls[1:]), 1))
dist.destroy_process_group()
