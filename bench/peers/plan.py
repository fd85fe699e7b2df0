"""PyTorch's planner and pickle for a job in which every rank has a slice of every tensor: plan.py RANKS TENSORS.

Prints one line of JSON with the keys of bench_plan, whose job this is.
"""
import json
import pickle
import resource
import sys
import time
import warnings

import torch
from torch.distributed.checkpoint import default_planner, metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo

warnings.simplefilter("ignore")
ROWS, COLUMNS = 4, 1024  # of a rank's slice
PROPERTIES = metadata.TensorProperties(dtype=torch.float32)


def item_of(rank, ranks, tensor):
    """As the planner makes it: no two items share an object."""
    offsets = torch.Size([rank * ROWS, 0])
    chunk = metadata.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([ROWS, COLUMNS]))
    data = planner.TensorWriteData(
        chunk=chunk, properties=PROPERTIES, size=torch.Size([ranks * ROWS, COLUMNS]))
    return planner.WriteItem(
        index=metadata.MetadataIndex(f"model.layers.{tensor}.weight", torch.Size([rank * ROWS, 0])),
        type=planner.WriteItemType.SHARD, tensor_data=data)


def plan_of(rank, ranks, tensors):
    return planner.SavePlan([item_of(rank, ranks, i) for i in range(tensors)], planner_data={})


def timed(work):
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def main():
    ranks, tensors = map(int, sys.argv[1:3])
    plans = [plan_of(rank, ranks, tensors) for rank in range(ranks)]
    plan_s, (plans, whole) = timed(lambda: default_planner.create_default_global_save_plan(plans))
    validate_s, errors = timed(lambda: default_planner._validate_global_plan(plans, whole))
    assert not errors, errors[:3]
    whole.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 0, 100) for rank, plan in enumerate(plans) for item in plan.items
    }
    encode_s, encoded = timed(lambda: pickle.dumps(whole))
    decode_s, _ = timed(lambda: pickle.loads(encoded))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"plan_s": plan_s, "validate_s": validate_s, "encode_s": encode_s, "decode_s": decode_s,
                      "peak_mib": peak, "chunks": ranks * tensors}))


main()
