"""Parameters after PyTorch's DistributedDataParallel trained two ranks of 5 and 7 batches under Join:
tests/golden/join.pt, by divide_by_initial_world_size.

The model is tanh(x @ first) @ second in float64; `start` has its first parameters.
"""

import os
import pathlib
import sys

import torch
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join

BATCHES = [5, 7]


def grid(count, offset):
    return torch.sin(torch.arange(count, dtype=torch.float64) + offset)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(grid(12, 0).view(4, 3))
        self.second = torch.nn.Parameter(grid(6, 40).view(3, 2))

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


def batch(rank, number):
    return grid(20, 100 * rank + 10 * number).view(5, 4)


def train(rank, divide, found):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=len(BATCHES))
    model = Model()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Join([ddp], divide_by_initial_world_size=divide):
        for number in range(BATCHES[rank]):
            optimizer.zero_grad()
            ddp(batch(rank, number)).square().mean().backward()
            optimizer.step()
    if rank == 0:  # which had fewer: Join has sent it the others' parameters
        end = {name: value.detach() for name, value in model.named_parameters()}
        torch.save({"start": start, "end": end}, found)
    torch.distributed.destroy_process_group()


def main():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29547")
    out = pathlib.Path(sys.argv[1])
    golden = {}
    for divide in (True, False):
        part = out.with_suffix(".part")
        mp.spawn(train, (divide, part), nprocs=len(BATCHES))
        found = torch.load(part)
        part.unlink()
        golden["start"] = found["start"]
        golden["by all ranks" if divide else "by those with input"] = found["end"]
    torch.save(golden, out)


if __name__ == "__main__":
    main()
