"""PyTorch DCP saving and loading the tensors of bench/save_load.cpp: torchrun ... DIRECTORY ROUNDS [cuda]."""
import os
import resource
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

warnings.simplefilter("ignore")
LAYERS, DIM, VOCABULARY = map(int, os.environ.get("BENCH_SHAPE", "12,1024,32000").split(","))


def shapes():
    yield "wte.weight", (VOCABULARY, DIM)
    for i in range(LAYERS):
        yield f"h.{i}.attn.qkv.weight", (3 * DIM, DIM)
        yield f"h.{i}.attn.out.weight", (DIM, DIM)
        yield f"h.{i}.mlp.up.weight", (4 * DIM, DIM)
        yield f"h.{i}.mlp.down.weight", (DIM, 4 * DIM)
        yield f"h.{i}.ln1.weight", (DIM,)
        yield f"h.{i}.ln2.weight", (DIM,)


def main():
    directory, rounds = sys.argv[1], int(sys.argv[2])
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def rows(shape):
        return distribute_tensor(torch.rand(shape, device=device), mesh, [Shard(0)])

    model = {name: rows(shape) for name, shape in shapes()}
    state = {
        name: {"exp_avg": rows(shape), "exp_avg_sq": rows(shape), "step": torch.tensor(10.0)}
        for name, shape in shapes()
    }
    tree = {"model": model, "optim": {"state": state, "param_groups": [{"lr": 1e-3}]}}
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        dcp.save(tree, checkpoint_id=directory)
        dist.barrier()
        saved = time.perf_counter()
        dcp.load(tree, checkpoint_id=directory)
        dist.barrier()
        loaded = time.perf_counter()
        if dist.get_rank() == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"save {saved - begin:.3f} load {loaded - saved:.3f} peak_mb {peak}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads sometimes abort a Python process that ends in the ordinary way


main()
