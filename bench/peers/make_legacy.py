"""A legacy checkpoint of OLMo by real ShardedTensors, all ranks in one process: RANKS OUT LAYERS WIDTH VOCABULARY."""
import pathlib
import sys

import torch
import torch.distributed as dist
from model_shapes import GROUP, parameters
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.testing._internal.distributed.fake_pg import FakeStore


def sharded(tensor, rank, ranks):
    """This rank's chunk of dimension 0, with the list of all chunks that each rank's file repeats."""
    chunks, metadata, row = tensor.chunk(ranks), [], 0
    for index, chunk in enumerate(chunks):
        offsets = [row] + [0] * (tensor.dim() - 1)
        metadata.append(ShardMetadata(offsets, list(chunk.shape), f"rank:{index}/cpu"))
        row += chunk.shape[0]
    local = [Shard(chunks[rank].clone(), metadata[rank])] if rank < len(chunks) else []
    properties = TensorProperties(dtype=tensor.dtype, layout=tensor.layout)
    whole = ShardedTensorMetadata(metadata, tensor.shape, properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)


def main():
    ranks, out, sizes = int(sys.argv[1]), pathlib.Path(sys.argv[2]), map(int, sys.argv[3:6])
    out.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=random) for name, shape in parameters(*sizes)}
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        state = {name: {"exp_avg": sharded(tensor * 0.5, rank, ranks), "step": torch.tensor(10.0),
                        "exp_avg_sq": sharded(tensor * 0.25, rank, ranks)} for name, tensor in model.items()}
        torch.save({"model": {name: sharded(tensor, rank, ranks) for name, tensor in model.items()},
                    "optim": {"state": state, "param_groups": [{**GROUP, "params": list(model)}]},
                    "epoch": 0, "global_step": 10}, out / f"rank{rank}.pt")
        dist.destroy_process_group()


main()
