"""What the tests of `tessera.torch` share."""

import os
import socket
import warnings

import torch
import torch.distributed.checkpoint as dcp

import tessera.torch

SAVES = {
    "torch": lambda state, path: dcp.save(state, checkpoint_id=path),
    "writer": lambda state, path: dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path)),
    "ours": lambda state, path: tessera.torch.save(state, checkpoint_id=path),
}
LOADS = {
    "torch": lambda state, path: dcp.load(state, checkpoint_id=path),
    "reader": lambda state, path: dcp.load(state, storage_reader=tessera.torch.FileSystemReader(path)),
    "ours": lambda state, path: tessera.torch.load(state, checkpoint_id=path),
}


def state_of(fill):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "model": {"w": base, "half": base.to(torch.bfloat16), "none": torch.empty(0, 3), "one": torch.tensor(2.5)},
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": base + 1}}, "groups": [{"lr": 0.1, "params": [0]}]},
        "step": 7,
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "by_dtype": (1, {torch.float32: (torch.Size([1]), torch.device("cpu"))}),
        "text": "ü",
    }
    if fill:
        return state
    empty = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    empty["optim"] = {
        "state": {0: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(4, 6)}},
        "groups": [{"lr": 0.0, "params": []}],
    }
    return {**empty, "step": 0, "size": None, "dtype": None, "by_dtype": None, "text": ""}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def model_of(kind):
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False))
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def trained(kind, steps):
    """A model, its optimizer and the state of both, as torch's helpers give it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.arange(14.0).reshape(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # torch cannot load param_groups on a rank that holds nothing of a parameter.
    return model, optimizer, {"model": model_state, "optimizer": optimizer_state["state"]}


def whole(state):
    """With every tensor gathered."""
    if isinstance(state, dict):
        sharded = {key: value for key, value in state.items() if hasattr(value, "local_shards")}
        gathered = _gathered(sharded) if sharded else {}
        return {key: gathered[key] if key in gathered else whole(value) for key, value in state.items()}
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    return state.clone() if isinstance(state, torch.Tensor) else state


def _gathered(sharded):
    """ShardedTensors that every rank has by the same keys, in one call."""
    ranks = [None] * torch.distributed.get_world_size()
    mine = {key: [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()] for key, value in sharded.items()}
    torch.distributed.all_gather_object(ranks, mine)
    gathered = {key: torch.zeros(value.size(), dtype=value.dtype) for key, value in sharded.items()}
    for key, shards in (item for rank in ranks for item in rank.items()):
        for offsets, tensor in shards:
            gathered[key][tuple(slice(begin, begin + size) for begin, size in zip(offsets, tensor.size()))] = tensor
    return gathered


def cleared(state):
    """Its tensors hold zeros, and its values nothing."""
    for key, value in state.items():
        if isinstance(value, dict):
            cleared(value)
        elif hasattr(value, "local_shards"):
            for shard in value.local_shards():
                shard.tensor.zero_()
        elif isinstance(value, torch.Tensor):
            value.zero_()
        else:
            state[key] = None
    return state


def _rank(body, rank, ranks, port, arguments):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    body(rank, ranks, *arguments)
    torch.distributed.destroy_process_group()


def start_ranks(body, ranks, *arguments):
    """Begins `body(rank, ranks, ...)` in as many processes."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    # What is forked has imported all this already; the first DTensor imports torch._dynamo, which takes a second.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo", "tessera.torch"]
    )
    processes = [context.Process(target=_rank, args=(body, rank, ranks, port, arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def run_ranks(body, ranks, *arguments):
    """The same, and waits for them."""
    processes = start_ranks(body, ranks, *arguments)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * ranks
