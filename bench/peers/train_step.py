"""A training step of train_gpt's default model in PyTorch: single, or fsdp2, fsdp1 or ddp under torchrun.

CFG=dim,layers,heads,sequence,batch a rank,vocabulary. Prints the median of 20 steps after warming up, and the
mean time that rank 0's process computed in one.
"""
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

DIM, LAYERS, HEADS, SEQ, BATCH, VOCABULARY = map(int, os.environ.get("CFG", "256,8,8,128,4,256").split(","))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, length, 3, HEADS, DIM // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQ, DIM)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, rank = Gpt(), 0
    if sys.argv[1] != "single":
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    if sys.argv[1] == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif sys.argv[1] == "fsdp1":
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                                         device_id=torch.device("cpu"))
    elif sys.argv[1] == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1))
    times = []
    for index in range(25):
        if index == 5:
            cpu = time.process_time()
        begin = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index >= 5:
            times.append(time.perf_counter() - begin)
    if rank == 0:
        print(f"ms/step {1000 * statistics.median(times):.3f}")
        print(f"cpu ms/step {1000 * (time.process_time() - cpu) / len(times):.3f}")
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads sometimes abort a Python process that ends in the ordinary way


main()
