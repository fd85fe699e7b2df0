"""ai2-olmo's own checkpointers on its own model in FSDP1: what bench_checkpointers does with Tessera's.

checkpointers.py --kind KIND --config FILE [--save DIRECTORY] [--restore DIRECTORY], under torchrun. One step has been trained.
Prints one line of JSON, by rank 0: seconds of the slowest rank, and how far the peak of memory rose above what was in use
before, in MB, of the rank where it rose most. Nothing is durable: OLMo syncs no file.
"""
import argparse
import gc
import json
import os
import pathlib
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/parity"))
import olmo_fsdp  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def memory(what):
    """VmRSS or VmHWM, in MB."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{what}:\s+(\d+)", status)[1]) / 1024


def measured(work):
    """[seconds, MB above rest], each of the rank where it is most."""
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    at_rest = memory("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    work()
    most = torch.tensor([time.perf_counter() - begin, memory("VmHWM") - at_rest])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def main():
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--config", "--save", "--restore"):
        parser.add_argument(name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    olmo_fsdp.adapted()
    dist.init_process_group("gloo")
    training, found = olmo_fsdp.Training({"config": options.config}), {}
    training.step()
    if options.save:
        found["save_s"], found["save_above_mb"] = measured(lambda: training.save(options.kind, options.save))
    if options.restore:
        found["restore_s"], found["restore_above_mb"] = measured(lambda: training.restore(options.kind, options.restore))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as in olmo_fsdp.py


main()
