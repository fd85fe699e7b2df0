"""dcp.load of SOURCE into DTensors of as many ranks as there are, and dcp.save to TARGET."""
import os
import resource
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

warnings.simplefilter("ignore")
source, target = sys.argv[1:3]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
dist.barrier()
begin = time.perf_counter()
state = {}
for name, entry in dcp.FileSystemReader(source).read_metadata().state_dict_metadata.items():
    if not isinstance(entry, TensorStorageMetadata):
        state[name] = None
    elif entry.size:
        state[name] = zeros(entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=[Shard(0)])
    else:
        state[name] = torch.zeros((), dtype=entry.properties.dtype)
dcp.load(state, checkpoint_id=source)
dcp.save(state, checkpoint_id=target)
dist.barrier()
if dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"seconds {time.perf_counter() - begin:.3f} peak_mb {peak}", flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # Gloo's threads sometimes abort a Python process that ends in the ordinary way
