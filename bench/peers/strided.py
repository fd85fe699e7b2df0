#!/usr/bin/env python3
"""strided.py make DIRECTORY | convert SOURCE TARGET: tensors at strides by torch.save, and to safetensors by its own library."""
import sys

import torch


def make(directory):
    generator = torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    square = random(8192, 8192)
    tensors = {
        "contiguous": square,
        "transposed": square.t(),
        "channels_last": random(256, 64, 64, 64).to(memory_format=torch.channels_last),
        "every_other": random(8192, 16384)[:, ::2],
        "expanded": random(8192).expand(8192, 8192),
        "permuted": random(128, 256, 32, 64).permute(3, 1, 0, 2),
    }
    for name, tensor in tensors.items():
        torch.save({"w": tensor}, f"{directory}/{name}.pt")


def convert(source, target):
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in torch.load(source).items()}, target)


{"make": make, "convert": convert}[sys.argv[1]](*sys.argv[2:])
