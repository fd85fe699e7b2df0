"""A local checkpoint of OLMo, flat parameters with FSDP's record of each shard: RANKS OUT LAYERS WIDTH VOCABULARY."""
import pathlib
import sys

import torch
from model_shapes import GROUP, blocks
from torch.distributed.fsdp._flat_param import _ShardParamInfo

WRAPPED = "_fsdp_wrapped_module."


def main():
    ranks, out, sizes = int(sys.argv[1]), pathlib.Path(sys.argv[2]), map(int, sys.argv[3:6])
    random = torch.Generator().manual_seed(0)
    units, names = [], []
    for block, rows in blocks(*sizes):
        parts = [torch.randn(shape, generator=random).flatten() for _, shape in rows]
        padding = -sum(part.numel() for part in parts) % ranks
        units.append((block, rows, parts, padding, torch.cat([*parts, torch.full((padding,), 42.0)])))
        names += [f"{block}.{WRAPPED}{name}" if block else WRAPPED + name for name, _ in rows]
    for part in ("model", "optim", "train"):
        (out / part).mkdir(parents=True)
    for rank in range(ranks):
        modules, state, number = [], {}, 0
        for block, rows, parts, padding, flat in units:
            size = flat.numel() // ranks
            begin, infos, at = rank * size, [], 0
            for part in parts:
                low, high = max(begin, at), min(begin + size, at + part.numel())
                if low < high:
                    infos.append(_ShardParamInfo(True, low - begin, high - low, low - at, high - at - 1))
                    piece = flat[low:high]
                    state[number] = {"step": torch.tensor(10.0), "exp_avg": piece * 0.5, "exp_avg_sq": piece * piece}
                else:
                    infos.append(_ShardParamInfo(False, None, None, None, None))
                at, number = at + part.numel(), number + 1
            numels = tuple(part.numel() for part in parts)
            modules.append({"name": WRAPPED + block if block else "", "handles": [{
                "flat_param.data": flat[begin:begin + size].clone(),
                "flat_param._fqns": tuple(name for name, _ in rows),
                "flat_param._shapes": tuple(torch.Size(shape) for _, shape in rows),
                "flat_param._numels": numels,
                "flat_param._numels_with_padding": numels + ((padding,) if padding else ()),
                "flat_param._shard_numel_padded": 0,
                "flat_param._shard_param_infos": tuple(infos)}]})
        group = {**GROUP, "params": list(range(number)), "param_names": names}
        torch.save({"modules": modules}, out / f"model/rank{rank}.pt")
        torch.save({"state": state, "param_groups": [group]}, out / f"optim/rank{rank}.pt")
        torch.save({"epoch": 0, "global_step": 10, "world_size": ranks}, out / f"train/rank{rank}.pt")
    (out / "metadata.yaml").write_text(f"world_size: {ranks}\n")


main()
