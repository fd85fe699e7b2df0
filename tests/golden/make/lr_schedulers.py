"""Rates and state dicts of torch.optim's schedulers, step by step: tests/golden/lr_schedulers.pt.

Each schedule runs for an optimizer of two groups. `rates` are those of the steps from the beginning on, `state` the
scheduler's state dict after SAVED_AFTER of them.
"""

import copy
import math
import pathlib
import sys

import torch
from torch.optim import lr_scheduler

RATES = [0.1, 0.025]
STEPS, SAVED_AFTER = 24, 9


def factor(epoch):
    return 1 / (1 + epoch)


def warm_up(optimizer):
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=6)
    then = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=0.001)
    last = lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)
    return lr_scheduler.SequentialLR(optimizer, [first, then, last], milestones=[6, 18])


SCHEDULES = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=11),
    "linear": lambda o: lr_scheduler.LinearLR(o, start_factor=0.2, end_factor=0.9, total_iters=12),
    "linear to zero": lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=12),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=0.005),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, factor),
    "lambdas": lambda o: lr_scheduler.LambdaLR(o, [factor, lambda epoch: 0.5**epoch]),
    "warm-up": warm_up,
}
PLATEAUS = {
    "min": dict(factor=0.5, patience=1),
    "max": dict(mode="max", factor=0.25, patience=0, threshold=0.3, threshold_mode="abs", cooldown=2),
    "bounded": dict(factor=0.5, patience=0, threshold=0.05, min_lr=[0.03, 0.01], eps=1e-3),
    "max of parts": dict(mode="max", factor=0.5, patience=2, threshold=0.1),
    "min of absolutes": dict(factor=0.5, patience=1, threshold=0.2, threshold_mode="abs", min_lr=0.001),
}


def metric(step):
    """Falls, then goes up and down; once it is not a number."""
    return math.nan if step == 13 else 2 / (1 + step) + math.sin(step)


def optimizer_of_two_groups():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in RATES]
    return torch.optim.SGD(groups)


def run(make, step):
    optimizer = optimizer_of_two_groups()
    scheduler = make(optimizer)
    rates, state = [list(scheduler.get_last_lr())], None
    for number in range(1, STEPS + 1):
        optimizer.step()
        step(scheduler, number)
        rates.append(list(scheduler.get_last_lr()))
        assert rates[-1] == [group["lr"] for group in optimizer.param_groups]
        if number == SAVED_AFTER:
            state = copy.deepcopy(scheduler.state_dict())
    return {"rates": rates, "state": state}


def main():
    schedules = {name: run(make, lambda s, _: s.step()) for name, make in SCHEDULES.items()}
    plateaus = {name: run(lambda o, of=options: lr_scheduler.ReduceLROnPlateau(o, **of),
                          lambda s, number: s.step(metric(number))) for name, options in PLATEAUS.items()}
    torch.save({"schedules": schedules, "plateaus": plateaus,
                "metrics": [metric(step) for step in range(STEPS + 1)]}, pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
