"""What the tests of `tessera.torch` share."""

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
