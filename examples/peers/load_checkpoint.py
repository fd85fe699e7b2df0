"""Reads a checkpoint of train_gpt with PyTorch, in every way there is, and compares all tensors bit for bit.

    torchrun --nproc-per-node N load_checkpoint.py CHECKPOINT [--safetensors FILE] [--dump FILE] MODEL FLAGS

Ways: dcp.load into a Python FSDP2 model and its AdamW over N ranks; format_utils dcp_to_torch; and the
model's tensors in a safetensors file. The last line printed is a JSON object of what was compared.
"""

import argparse
import json
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt import Gpt, parameter_groups
from ranks import finish


def load_into_fsdp2(args):
    """The full state of a model and an optimizer that took the checkpoint; it differs from it at first."""
    torch.manual_seed(12345)
    model = Gpt(args.dim, args.layers, args.heads, args.seq, args.tied)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = parameter_groups(model, weight_decay=0.5)
    if args.one_group:
        groups = [{"params": list(model.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.123)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=args.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    model_state, optim_state = get_state_dict(model, optimizer)
    return full({"model": model_state, "optim": optim_state})


def full(value):
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def leaves(tree, prefix=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{prefix}.{index}")
    else:
        yield prefix, tree


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
    )


def compare(ours, theirs, what):
    """Number of equal tensors and of equal other values; exits on a difference."""
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    if set(ours) != set(theirs):
        raise SystemExit(f"{what}: names differ: {sorted(set(ours) ^ set(theirs))[:5]}")
    tensors = 0
    for name, value in ours.items():
        is_tensor = isinstance(value, torch.Tensor)
        tensors += is_tensor
        if not (same_bits(value, theirs[name]) if is_tensor else value == theirs[name]):
            raise SystemExit(f"{what}: {name} differs: {value} and {theirs[name]}")
    return {"tensors": tensors, "values": len(ours) - tensors}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--safetensors")
    parser.add_argument("--dump", help="torch.save file for the state that dcp.load gave")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--one-group", action="store_true")
    for name in ("dim", "layers", "heads", "seq"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded = load_into_fsdp2(args)
    if dist.get_rank() == 0:
        report = {"ranks": dist.get_world_size(), "step": int(next(iter(loaded["optim"]["state"].values()))["step"])}
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(args.checkpoint, f"{folder}/whole.pt")
            whole = torch.load(f"{folder}/whole.pt", weights_only=False)
        whole = {key: whole[key] for key in ("model", "optim")}
        report["dcp_to_torch"] = compare(loaded, whole, "dcp.load and dcp_to_torch")
        if args.safetensors:
            exported = load_file(args.safetensors)
            model = {f"model.{name}": tensor for name, tensor in loaded["model"].items()}
            report["safetensors"] = compare(model, exported, "dcp.load and safetensors")
        if args.dump:
            torch.save(loaded, args.dump)
        print(json.dumps(report), flush=True)
    finish()


if __name__ == "__main__":
    main()
