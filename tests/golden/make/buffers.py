"""The state_dict of a module with buffers that are not persistent: tests/golden/buffers.pt."""
import pathlib
import sys

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.register_buffer("offset", torch.tensor([3.0]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.linear = nn.Linear(2, 2)
        self.rotary = Rotary()
        self.layers = nn.Sequential(Rotary(), nn.BatchNorm1d(2))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(Net().state_dict(), pathlib.Path(sys.argv[1]) / "buffers.pt")
