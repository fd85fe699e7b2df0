"""The functions on FSDP1's optimizer state in PyTorch: what bench/optim_state.cpp does.

optim_state.py wide|small flat|original ROUNDS, under torchrun.
"""
import pathlib
import re
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples/peers"))
from ranks import finish

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self, count, size):
        super().__init__()
        for i in range(count):
            self.register_parameter(f"p{i}", nn.Parameter(torch.ones(size, size)))


class Model(nn.Module):
    def __init__(self, wide):
        super().__init__()
        for i in range(10 if wide else 100):
            self.add_module(f"b{i}", Block(1, 1000) if wide else Block(100, 8))


def peak_memory():
    with open("/proc/self/status", encoding="ascii") as status:
        return int(re.search(r"VmHWM:\s+(\d+)", status.read())[1]) // 1024


def seconds(work):
    dist.barrier()
    begin = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - begin, result


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(
        Model(sys.argv[1] == "wide"), auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=sys.argv[2] == "original", device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        if parameter.numel() > 0:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    at_rest = peak_memory()
    fsdp = FullyShardedDataParallel
    optimizer.load_state_dict(fsdp.shard_full_optim_state_dict(
        fsdp.full_optim_state_dict(model, optimizer, rank0_only=False), model, optim=optimizer))
    for _ in range(int(sys.argv[3])):
        full_save, full = seconds(lambda: fsdp.full_optim_state_dict(model, optimizer, rank0_only=False))
        full_load, _ = seconds(lambda full=full: optimizer.load_state_dict(
            fsdp.shard_full_optim_state_dict(full, model, optim=optimizer)))
        del full
        sharded_save, chunks = seconds(lambda: fsdp.sharded_optim_state_dict(model, optimizer))
        sharded_load, _ = seconds(lambda chunks=chunks: optimizer.load_state_dict(
            fsdp.flatten_sharded_optim_state_dict(chunks, model, optimizer)))
        del chunks
        if dist.get_rank() == 0:
            print(f"full_save {full_save:.5f} full_load {full_load:.5f} sharded_save {sharded_save:.5f} "
                  f"sharded_load {sharded_load:.5f} above_mb {peak_memory() - at_rest} peak_mb {peak_memory()}", flush=True)
    finish()


main()
