"""fsdp1_uop0_ws2_old_local: the local checkpoint fsdp1_uop0_ws2_local as torch 2.0 would have written it on 5 ranks.

    python old_local.py tests/golden/checkpoints

No torch that can be installed here writes `_shard_indices` and `_shard_param_offsets`, so they are computed: each flat
parameter is cut into 5 equal parts, the last ones padded with zeros; `_shard_indices` are the first and last parameter
with elements in the part, `_shard_param_offsets` the first and last element of each. A part of padding alone has (0, 0)
and (). The train state differs by rank in "rng", as OLMo's does.
"""
import math
import pathlib
import sys

import torch

RANKS = 5
root = pathlib.Path(sys.argv[1])
source = root / "fsdp1_uop0_ws2_local"
target = root / "fsdp1_uop0_ws2_old_local"
for part in ("model", "optim", "train"):
    (target / part).mkdir(parents=True, exist_ok=True)


def load(part):
    return [torch.load(source / part / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def whole(parts, padded):
    return torch.cat(parts)[: sum(map(len, parts)) - padded]


def part_of(flat, rank):
    size = math.ceil(len(flat) / RANKS)
    part = flat[rank * size : (rank + 1) * size]
    return torch.cat([part, torch.zeros(size - len(part))]), size - len(part)


def places(numels, rank):
    size, begin, found = math.ceil(sum(numels) / RANKS), 0, []
    for index, count in enumerate(numels):
        first, last = max(rank * size, begin), min((rank + 1) * size, begin + count) - 1
        if first <= last:
            found.append((index, (first - begin, last - begin)))
        begin += count
    if not found:
        return (0, 0), ()
    return (found[0][0], found[-1][0]), tuple(offsets for _, offsets in found)


models, optims = load("model"), load("optim")
for rank in range(RANKS):
    modules, state = [], {}
    for index, module in enumerate(models[0]["modules"]):
        first, second = (model["modules"][index]["handles"][0] for model in models)
        padded = second["flat_param._shard_numel_padded"]
        flat = whole([first["flat_param.data"], second["flat_param.data"]], padded)
        data, padding = part_of(flat, rank)
        indices, offsets = places(first["flat_param._numels"], rank)
        handle = {"flat_param.data": data, "flat_param._shard_param_offsets": offsets,
                  "flat_param._shard_indices": indices, "flat_param._shard_numel_padded": padding}
        for key in ("_fqns", "_numels", "_numels_with_padding", "_shapes"):
            handle["flat_param." + key] = tuple(first["flat_param." + key])
        modules.append({"handles": [handle], "name": module["name"]})
        states = [optim["state"][index] for optim in optims]
        state[index] = {key: value if value.dim() == 0
                        else part_of(whole([value, states[1][key]], padded), rank)[0]
                        for key, value in states[0].items()}
    torch.save({"modules": modules}, target / f"model/rank{rank}.pt")
    torch.save({"state": state, "param_groups": optims[0]["param_groups"]}, target / f"optim/rank{rank}.pt")
    train = {"epoch": 1, "global_step": 5, "world_size": RANKS, "checkpoints": [],
             "rng": {"torch": torch.full((4,), rank, dtype=torch.uint8), "python": (3, (rank, 624), None)}}
    torch.save(train, target / f"train/rank{rank}.pt")
(target / "metadata.yaml").write_text(f"world_size: {RANKS}\n")
(target / "config.yaml").write_text("sharded_checkpointer: local\n")
