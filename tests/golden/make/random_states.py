"""States of torch's generator of the CPU as torch.get_rng_state() gives them, and what is drawn from there on:
tests/golden/random_states.pt.

The second state has half of a pair of normal numbers in store; the third was reached by more draws than the
generator makes at once.
"""
import pathlib
import sys

import torch


def case(seed, prepare):
    torch.manual_seed(seed)
    prepare()
    state = torch.get_rng_state()
    draws = {"uniform": torch.rand(5), "normal": torch.randn(3, dtype=torch.float64), "order": torch.randperm(7)}
    return {"seed": seed, "state": state, "draws": draws, "after": torch.get_rng_state()}


CASES = {
    "fresh": case(5, lambda: None),
    "half a pair": case(2**31 + 7, lambda: torch.randn(1, dtype=torch.float64)),
    "used": case(11, lambda: torch.rand(1000)),
}

if __name__ == "__main__":
    torch.save(CASES, pathlib.Path(sys.argv[1]) / "random_states.pt")
