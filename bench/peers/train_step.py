"""A training step of train_gpt's default model in PyTorch: single, or fsdp2, fsdp1 or ddp under torchrun.

CFG=dim,layers,heads,sequence,batch a rank,vocabulary. Prints the median of 20 steps after warming up, and the
mean time that rank 0's process computed in one. With --windows it measures as bench/step.cpp does, whose models and
options it has too: windows of --steps steps, each of which ends with a wait for the device.
"""
import argparse
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
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


class LlamaBlock(nn.Module):
    """Of the shape of Llama 3's, without positions: a key and a value for four queries, 3.5 times as wide inside."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, 1e-5), nn.RMSNorm(DIM, 1e-5)
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, DIM // 4, bias=False), nn.Linear(DIM, DIM // 4, bias=False)
        inside = DIM * 7 // 2
        self.gate, self.up = nn.Linear(DIM, inside, bias=False), nn.Linear(DIM, inside, bias=False)
        self.down = nn.Linear(inside, DIM, bias=False)

    def forward(self, x):
        def by_heads(y, heads):
            return y.view(*y.shape[:2], heads, -1).transpose(1, 2)

        y = self.norm1(x)
        attended = F.scaled_dot_product_attention(
            by_heads(self.q(y), HEADS), by_heads(self.k(y), HEADS // 4), by_heads(self.v(y), HEADS // 4),
            is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        z = self.norm2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Gpt(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(SEQ, DIM)
        self.h = nn.ModuleList(block() for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln(x))


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("sharding", choices=["single", "fsdp2", "fsdp1", "ddp"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--block", default="gpt", choices=["gpt", "llama"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true", help="AdamW in one kernel, instead of foreach")
    parser.add_argument("--clip", type=float, default=0)
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4, help="of a window")
    parser.add_argument("--profile", action="store_true", help="count launches and waits of one step; one rank")
    return parser.parse_args()


def sharded(model, options, device):
    if options.sharding == "fsdp2":
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if options.bf16 else \
            MixedPrecisionPolicy()
        for block in model.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if options.sharding == "fsdp1":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                                        device_id=device)
    if options.sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    return model


def print_steps(step):
    """Steps one by one, with the CPU time of the process."""
    times = []
    for index in range(25):
        if index == 5:
            cpu = time.process_time()
        begin = time.perf_counter()
        step()
        if index >= 5:
            times.append(time.perf_counter() - begin)
    print(f"ms/step {1000 * statistics.median(times):.3f}")
    print(f"cpu ms/step {1000 * (time.process_time() - cpu) / len(times):.3f}")


def print_windows(step, options):
    def wait():
        if options.device == "cuda":
            torch.cuda.synchronize()

    times = []
    for window in range(-1, options.windows):  # the first one warms up
        wait()
        begin = time.perf_counter()
        for _ in range(options.steps):
            step()
        wait()
        if window >= 0:
            times.append((time.perf_counter() - begin) / options.steps)
    peak = torch.cuda.max_memory_allocated() / 1e6 if options.device == "cuda" else \
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"ms/step {1000 * statistics.median(times):.3f}")
    print(f"peak_mb {peak:.0f}")


def print_profile(step, device):
    """What a thread of the host asked of CUDA in one step, as bench/step.cpp counts it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    names = [event.name() for event in profile.profiler.kineto_results.events()
             if event.device_type() == torch.autograd.DeviceType.CPU]
    launches = sum("LaunchKernel" in name for name in names)
    copies = sum(name.startswith(("cudaMemcpy", "cudaMemset")) for name in names)
    waits = sum(name.startswith("cuda") and "Synchronize" in name for name in names)
    operators = sum(name.startswith("aten::") for name in names)
    print(f"launches {launches} copies {copies} waits {waits} operators {operators}")


def main():
    options = arguments()
    torch.manual_seed(0)
    rank, device = 0, torch.device(options.device)
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.sharding != "single":
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
        rank = dist.get_rank()
    with device:
        model = Gpt(Block if options.block == "gpt" else LlamaBlock)
    model = sharded(model, options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=not options.fused, fused=options.fused)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1)).to(device)
    # Unsharded, weights stay float32 and matrix products cast them.
    autocast = options.bf16 and options.sharding == "single"

    def step():
        with torch.autocast(options.device, torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss.backward()
        if options.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), options.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    with open(os.devnull, "w") as nowhere:
        stdout = sys.stdout
        sys.stdout = stdout if rank == 0 else nowhere
        if options.windows > 0:
            print_windows(step, options)
        else:
            print_steps(step)
        if options.profile:
            print_profile(step, device)
        sys.stdout = stdout
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Gloo's threads sometimes abort a Python process that ends in the ordinary way


main()
