"""Writes scripted.pt and traced.pt of tests/golden/libtorch into the current folder, by torch 2.13, and those of
tests/golden/libtorch-2.11 by that version.

    python libtorch.py
"""
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(4, 3)
        self.register_buffer("buf", torch.arange(5))
        self.register_buffer("tmp", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.l(x)


torch.manual_seed(51)
net = Net()
torch.jit.save(torch.jit.script(net), "scripted.pt")
torch.jit.save(torch.jit.trace(net, torch.zeros(1, 4)), "traced.pt")
