"""The pair of DCP checkpoints that accelerate makes of an FSDP model and its optimizer: trainers/accelerate.

    torchrun --nproc-per-node 2 accelerate_fsdp.py 2 tests/golden/trainers/accelerate

The number is FSDP's version. Made with accelerate 1.15 and torch 2.13 on the CPU; version 1 gives the same files of the same sizes.
"""
import os
import sys
import types

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

version, out = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
# What the two functions ask of an Accelerator, which does not shard on a CPU.
accelerator = types.SimpleNamespace(
    process_index=dist.get_rank(), num_processes=dist.get_world_size(), is_fsdp2=version == 2, wait_for_everyone=dist.barrier,
    is_main_process=dist.get_rank() == 0)
PartialState(cpu=True)
model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
if version == 2:
    fully_shard(model)
else:
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
os.makedirs(out, exist_ok=True)
dist.barrier()
save_fsdp_model(plugin, accelerator, model, out)
save_fsdp_optimizer(plugin, accelerator, optimizer, model, out)
dist.destroy_process_group()
