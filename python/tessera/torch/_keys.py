"""Which keys a state dict and a checkpoint do not both have, as all ranks see it."""

from __future__ import annotations

import hashlib
import logging
import warnings
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from tessera import _core
from tessera._checkpoint import Checkpoint
from tessera._memory import Loaded
from tessera.torch._group import Group, agree


_NAMED = 5  # keys that the log names


class IncompatibleKeys(NamedTuple):
    """What `load` returns, as `torch.nn.Module.load_state_dict` does: sorted, and the same on all ranks.

    >>> import tessera.torch, torch
    >>> state = {"model": {"w": torch.zeros(3, 4), "bias": torch.zeros(4)}}
    >>> tessera.torch.load(state, checkpoint_id=example, strict=False)
    IncompatibleKeys(missing_keys=['model.bias'], unexpected_keys=['step'])
    >>> tessera.torch.IncompatibleKeys([], [])
    <All keys matched successfully>
    """

    #: Of some rank's state dict; the checkpoint lacks them.
    missing_keys: list[str]
    #: The checkpoint's, in no rank's state dict.
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        if not self.missing_keys and not self.unexpected_keys:
            return "<All keys matched successfully>"
        return f"IncompatibleKeys(missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys})"


class Keys:
    """What this rank sees: the keys of its state dict, and those of the checkpoint."""

    def __init__(self, wanted: Iterable[str], found: Iterable[str]) -> None:
        self._wanted = set(wanted)
        self._found = sorted(found)
        self._missing = sorted(self._wanted.difference(self._found))

    def taken(self, of_all: IncompatibleKeys) -> list[str]:
        """The checkpoint's keys that some rank wants."""
        left = set(of_all.unexpected_keys)
        return [name for name in self._found if name not in left]

    def of_all(self, group: Group | None) -> IncompatibleKeys:
        """What all ranks see together. Collective; names travel only where ranks differ."""
        found, missing, unexpected = self._found, self._missing, self._unexpected(self._found)
        digests = agree(group, None, (_digest(found), _digest((missing, unexpected))))
        if group is not None and any(names != digests[0][0] for names, _ in digests):
            # Ranks that see different checkpoints have no list of keys in common: rank 0's counts.
            found = agree(group, None, found if group.rank == 0 else None)[0]
            unexpected = self._unexpected(found)
        if any(one != digests[0] for one in digests):
            # A bit for each key, since ranks with different layers would send nearly all names.
            kept = agree(group, None, (missing, zlib.compress(bytes(unexpected))))
            missing = sorted({name for theirs, _ in kept for name in theirs})
            unexpected = [all(bits) for bits in zip(*(zlib.decompress(packed) for _, packed in kept))]
        return IncompatibleKeys(missing, [name for name, is_so in zip(found, unexpected) if is_so])

    def _unexpected(self, found: list[str]) -> list[bool]:
        return [name not in self._wanted for name in found]


def of_checkpoint(wanted: Iterable[str], checkpoint: Checkpoint) -> Keys:
    """An empty dict that nobody wants does not count: it holds nothing, and a state dict has no key for it."""
    mine, tensors = set(wanted), set(checkpoint.names())
    keys = [
        name
        for name in checkpoint
        if name in tensors or name in mine or not _is_empty(checkpoint._value(name, Loaded("torch")))
    ]
    return Keys(mine, keys)


def tell_of_left(taken: list[str], left: list[str], where: str, ranks: int = 1) -> None:
    """What a load has not asked for: without its optimizer a state is loaded well, and trains on with fresh moments.

    `ranks`: of so many this one alone is known.
    """
    if not left:
        return
    what = "key of the checkpoint was" if len(left) == 1 else "keys of the checkpoint were"
    some = ", ".join(left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
    who = " by rank 0" if ranks > 1 else ""
    logging.getLogger("tessera").info("%d %s not asked for%s: %s [%s]", len(left), what, who, some, where)
    for note in _core.notes_of_left_ranks(taken, left, ranks):
        warnings.warn(f"{note} [{where}]", stacklevel=3)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def of_planner(planner: Any) -> Keys:
    """Of one that has planned a load. Planners of another kind than torch's own tell no keys."""
    metadata, state = getattr(planner, "metadata", None), getattr(planner, "state_dict", None)
    if not isinstance(metadata, Metadata) or not isinstance(state, dict):
        return Keys((), ())
    return Keys(state, metadata.state_dict_metadata)


def _digest(what: Any) -> bytes:
    return hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).digest()
