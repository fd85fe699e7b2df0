"""Which tensors are elements in memory, one by one, and bytes of torch.save for what is not."""

from __future__ import annotations

import io
from typing import Any

import torch

from tessera._memory import SIZES


def is_plain(tensor: torch.Tensor, anywhere: bool = False) -> bool:
    """Whether its elements are in memory of this process, or `anywhere` in that of a device, of a dtype that the library knows."""
    is_there = tensor.device.type == "cpu" or (anywhere and tensor.device.type != "meta")
    is_dense = is_there and tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_dense and dtype_name(tensor) in SIZES


def dtype_name(tensor: Any) -> str:
    """As the library has it."""
    return str(tensor.dtype).removeprefix("torch.")


def saved(thing: Any) -> bytes:
    """What torch.save makes of it."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()
