"""What the tests of `tessera.torch` share."""

import os
import socket
import warnings

import torch


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
    # What is forked has imported torch already.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "tessera.torch"])
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
