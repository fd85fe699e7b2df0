"""PyTorch DCP saving and loading tensors of 16 bytes in one process: tiny.py DIRECTORY TENSORS."""
import json
import resource
import sys
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")


def main():
    directory, tensors = sys.argv[1], int(sys.argv[2])
    tree = {f"tensor{i}": torch.ones(4) for i in range(tensors)}
    begin = time.perf_counter()
    dcp.save(tree, checkpoint_id=directory, no_dist=True)
    saved = time.perf_counter()
    dcp.load(tree, checkpoint_id=directory, no_dist=True)
    loaded = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"save_s": saved - begin, "load_s": loaded - saved, "peak_mib": peak}))


main()
