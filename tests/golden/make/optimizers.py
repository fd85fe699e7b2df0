"""State dicts of torch.optim's optimizers, and the steps that led to them: tests/golden/optimizers.pt.

Two parameters of two groups take three steps with gradients of this file; the state dict and the parameters
follow, then two steps more, to see that a loaded state goes on alike. Where the name says so the first
parameter is complex.
"""

import copy
import math
import pathlib
import sys

import torch

SHAPES = [(3, 2), (4,)]
OPTIMIZERS = {
    "Adam": dict(lr=0.02, betas=(0.8, 0.95), amsgrad=True),
    "AdamW": dict(lr=0.02, weight_decay=0.1),
    "AdamW complex": dict(lr=0.02, weight_decay=0.1),
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "SGD without momentum": dict(lr=0.1),
    "Adagrad": dict(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5),
    "RMSprop": dict(lr=0.01, momentum=0.5, centered=True),
    "LBFGS": dict(lr=0.5, max_iter=2, history_size=3),
}


def values(step, like):
    if like.is_complex():
        return torch.complex(values(step, like.real), values(step + 20, like.imag))
    count = math.prod(like.shape)
    return torch.tensor([math.sin(1.0 + 10 * step + i) for i in range(count)], dtype=torch.float32).reshape(like.shape)


def steps(optimizer, params, first, count):
    for step in range(first, first + count):
        def closure(step=step):
            for p in params:
                p.grad = values(step, p) + 0.1 * p.detach()
            return torch.tensor(1.0)
        optimizer.step(closure)


def run(kind, options):
    types = [torch.complex64 if kind.endswith("complex") else torch.float32, torch.float32]
    shapes = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(SHAPES, types)]
    params = [torch.nn.Parameter(values(0, shape)) for shape in shapes]
    groups = [{"params": params}] if kind == "LBFGS" else [
        {"params": [params[0]]}, {"params": [params[1]], "weight_decay": 0.25}]
    optimizer = getattr(torch.optim, kind.split()[0])(groups, **options)
    steps(optimizer, params, 1, 3)
    made = copy.deepcopy({"state": optimizer.state_dict(), "params": [p.detach() for p in params]})
    steps(optimizer, params, 4, 2)
    made["later"] = [p.detach().clone() for p in params]
    return made


def main():
    torch.save({kind: run(kind, options) for kind, options in OPTIMIZERS.items()}, pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
