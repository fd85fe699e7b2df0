"""Whether ranks hold the same of what torch's plan writes once: plain tensors, of which one rank's elements are saved."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from tessera import _core
from tessera._errors import InvalidArgumentError, MismatchError

#: As `sampled` of the library: bytes that are digested whole, and windows of what is larger.
_WHOLE, _WINDOWS, _WINDOW = 64 << 10, 64, 1 << 10
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their size in bytes
_NAMED = 20  # keys that are named, at most

POLICIES = (None, "warn", "refuse")


def require_policy(copies: str | None) -> None:
    if copies not in POLICIES:
        raise InvalidArgumentError(f"invalid_argument: copies is None, 'warn' or 'refuse', and not {copies!r}")


@dataclass(frozen=True)
class Held(WriteResult):
    """Among the results of a rank: digests of the plain tensors that it holds, by name."""

    digests: dict[str, bytes] = field(default_factory=dict)


def held_by(planner: Any) -> list[Held]:
    """Empty: this process is alone, or the planner does not show its state."""
    state = getattr(planner, "state_dict", None)
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    if is_alone or not isinstance(state, dict):
        return []
    digests = {name: _digest(value) for name, value in state.items() if _is_plain(value)}
    return [Held(index=MetadataIndex(""), size_in_bytes=0, storage_data=None, digests=digests)]


def judge(held: Sequence[Held], copies: str | None, where: str) -> None:
    """Raises `mismatch` or warns, as `copies` says; None: it raises for what is below an optimizer, and warns of the rest."""
    unlike = _unlike(one.digests for one in held)
    refused = unlike if copies == "refuse" else [name for name in unlike if _core.is_optimizer_name(name)]
    if refused and copies != "warn":
        raise MismatchError(
            f"mismatch: ranks hold different elements of {_some(refused)}: all would get one rank's at the next load."
            " copies='warn' (of save, FileSystemWriter and install) saves one rank's; tessera.torch.save(copies='keep') saves"
            f" what each has, if no planner and no tensor leaves the save to torch [{where}, key '{refused[0]}']",
            where,
            refused[0],
        )
    if unlike:
        warnings.warn(f"ranks hold different elements of {_some(unlike)}: one rank's are saved [{where}]", stacklevel=2)


def _unlike(ranks: Iterable[dict[str, bytes]]) -> list[str]:
    first: dict[str, bytes] = {}
    unlike = set()
    for digests in ranks:
        for name, digest in digests.items():
            if first.setdefault(name, digest) != digest:
                unlike.add(name)
    return sorted(unlike)


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _is_plain(value: Any) -> bool:
    is_known = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_known and value.layout is torch.strided and not value.is_quantized and value.device.type != "meta"


def _digest(tensor: torch.Tensor) -> bytes:
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    sample = _sample(tensor.detach().resolve_conj().resolve_neg()).contiguous().cpu().view(torch.uint8)
    content = ctypes.string_at(sample.data_ptr(), sample.numel()) if sample.numel() else b""
    return hashlib.blake2b(form.encode() + content, digest_size=8).digest()


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, or windows from the first to the last, whatever the strides are. What differs between these alone is
    not seen."""
    size, window = tensor.numel(), _WINDOW // tensor.element_size()
    if size * tensor.element_size() <= _WHOLE:
        return tensor.reshape(-1)
    begins = [number * (size - window) // (_WINDOWS - 1) for number in range(_WINDOWS)]
    if tensor.is_contiguous():
        return torch.cat([tensor.view(-1)[begin : begin + window] for begin in begins])
    # To flatten it would copy all of it. Not every dtype has an index, and integers of its size do.
    places = torch.cat([torch.arange(begin, begin + window, device=tensor.device) for begin in begins])
    words = tensor.view(_WORDS.get(tensor.element_size(), tensor.dtype))
    return words[torch.unravel_index(places, words.shape)]
