"""Trains the GPT of examples/train_gpt with Python's fully_shard and torch.distributed.checkpoint.

A twin with a subset of the flags, for comparison: it reads the checkpoints that train_gpt saves, and
train_gpt reads those that it saves. Run by torchrun. --steps counts from the start of the training.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt import VOCABULARY, Gpt, Text, initialise, learning_rate, parameter_groups
from ranks import finish


def arguments():
    parser = argparse.ArgumentParser()
    for name, default in dict(dim=256, layers=8, heads=8, seq=128, batch=8, steps=10, warmup=100, seed=0).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in dict(lr=1e-3, clip=1.0).items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--schedule-steps", type=int, default=0, help="length of the schedule when it is not --steps")
    parser.add_argument("--one-group", action="store_true", help="one parameter group instead of two")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--data", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--save", help="directory of the checkpoint after the last step")
    parser.add_argument("--dump", help="torch.save file of the full state after the last step")
    parser.add_argument("--metrics")
    return parser.parse_args()


def build(args, mesh):
    torch.manual_seed(args.seed)
    model = Gpt(args.dim, args.layers, args.heads, args.seq, args.tied)
    initialise(model)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = parameter_groups(model, args.weight_decay)
    if args.one_group:
        groups = [{"params": list(model.parameters()), "weight_decay": args.weight_decay}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    return model, optimizer


def resume(path, model, optimizer):
    """Loads a checkpoint; returns the steps it has behind it."""
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(next(iter(optim_state["state"].values()))["step"].item())


def step(args, model, optimizer, text, done):
    rank, world = dist.get_rank(), dist.get_world_size()
    begin, end = args.batch * rank // world, args.batch * (rank + 1) // world
    rows = text.batch(done, begin, end)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args.lr, args.warmup, args.schedule_steps or args.steps, done)
    logits = model(rows[:, :-1]).reshape(-1, VOCABULARY)
    loss = F.cross_entropy(logits, rows[:, 1:].reshape(-1), reduction="sum") / (args.batch * args.seq)
    (loss * world).backward()  # fully_shard averages over ranks
    if args.clip > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item()


def full(value):
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main():
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = build(args, mesh)
    text = Text(args.data, args.seq, args.seed)
    done = resume(args.resume, model, optimizer) if args.resume else 0
    rows = ["step,loss"]
    while done < args.steps:
        loss = step(args, model, optimizer, text, done)
        done += 1
        rows.append(f"{done},{loss:.9g}")
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    if args.save:
        dcp.save(state, checkpoint_id=args.save)
    whole = full(state) if args.dump else None
    if dist.get_rank() == 0:
        if args.dump:
            torch.save(whole, args.dump)
        if args.metrics:
            with open(args.metrics, "w", encoding="ascii") as file:
                file.write("\n".join(rows) + "\n")
        print(f"python fully_shard: {dist.get_world_size()} ranks, step {done}", *rows[-1:], flush=True)
    finish()


if __name__ == "__main__":
    main()
