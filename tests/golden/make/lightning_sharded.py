"""A sharded checkpoint as Lightning writes it, with what is neither a model nor an optimizer in meta.pt: trainers/lightning.

    torchrun --nproc-per-node 2 lightning_sharded.py tests/golden/trainers/lightning

Made with lightning 2.6.6 and torch 2.13 on the CPU.
"""
import pathlib
import sys

import torch
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME, _distributed_checkpoint_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

out = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 5)
fully_shard(model)
out.mkdir(exist_ok=True)
_distributed_checkpoint_save({"model": get_model_state_dict(model)}, out)
if dist.get_rank() == 0:
    torch.save({"epoch": 3, "hp": {"a": 1}}, out / _METADATA_FILENAME)
dist.destroy_process_group()
