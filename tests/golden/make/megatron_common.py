"""A checkpoint of Megatron-Core with tensors, an object and common state: trainers/megatron.

    torchrun --nproc-per-node 2 megatron_common.py tests/golden/trainers/megatron

Made with megatron-core 0.16.1 and torch 2.13 on the CPU.
"""
import os
import sys

import torch
import torch.distributed as dist

# Megatron asks for a GPU in passing.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.cuda.nvtx.range_push = lambda *_, **__: None
torch.cuda.nvtx.range_pop = lambda *_, **__: None


def main():
    from megatron.core.dist_checkpointing import ShardedTensor, save
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.arange(48.0).view(8, 6).chunk(world, 0)[rank].contiguous()
    state = {
        "model": {
            "w": ShardedTensor.from_rank_offsets("decoder.layers.w", part, (0, rank, world), replica_id=0),
            "b": ShardedTensor.from_rank_offsets("decoder.final.b", torch.ones(5), replica_id=rank),
        },
        "obj": ShardedObject("rng", {"a": torch.tensor([1, 2]), "s": "x"}, (1,), (0,), replica_id=rank),
        "iteration": 7,
        "args": {"hidden": 6},
    }
    os.makedirs(sys.argv[1], exist_ok=True)
    save(state, sys.argv[1], validate_access_integrity=False)


if __name__ == "__main__":  # Megatron writes in processes that import this file
    main()
