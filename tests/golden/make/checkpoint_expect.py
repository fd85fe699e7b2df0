"""Writes expected.json beside the checkpoints of tests/golden/checkpoints: PyTorch's own reading.

    python checkpoint_expect.py tests/golden/checkpoints

The checkpoints were made by e1.py, e2.py, e3.py (c1), mp1.py (c2*), mp2.py (fsdp1*), g4.py, hand.py, qz.py,
olmo_st.py, the small files by e5.py and legfmt.py, streams by stream.py, *_old_local by old_local.py,
ranks_* by dtensor_ranks.py, with what PyTorch gathers from them in ranks_*_full.pt.
The ranks' files of mp2.py (*_legacy, *_local) are expected to hold what PyTorch itself gathered into *_model.pt and, for
the optimizer, saved as DCP: the exp_avg of the gathered *_optim.pt are those of exp_avg_sq with use_orig_params=True, a
defect of torch 2.13 on CPU.
For every name that DCP flattens to: dtype, shape and CRC-32 of a tensor's elements, or the repr of a value.
"""
import json
import logging
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # DTensors in the files
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

from expected import dcp_leaves, dcp_tree, describe

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def read(path):
    if path.is_dir() and (path / ".metadata").exists():
        return dcp_leaves(dcp.FileSystemReader(path))
    if path.name.endswith("_legacy"):
        return read_legacy(path)
    if path.name.endswith("_local"):
        return read_local(path)
    if path.is_dir() and path.name.startswith("ranks_"):
        return read(root / f"{path.name}_full.pt")
    if path.suffix == ".pt":
        tree = torch.load(path, weights_only=False)
        return flatten_state_dict(tree)[0] if isinstance(tree, dict) else {}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def in_group(world, work):
    """What `work` returns in rank 0 of a process group that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return work()
    finally:
        dist.destroy_process_group()


def full_state(directory):
    base = directory.parent / directory.name.removesuffix("_legacy").removesuffix("_local").removesuffix("_old")
    model, gathered = [torch.load(f"{base}_{part}.pt", weights_only=False) for part in ("model", "optim")]
    optim = dcp_tree(dcp.FileSystemReader(base))["optim"]
    for name, state in optim["state"].items():
        assert all(torch.equal(state[key], gathered["state"][name][key]) for key in ("step", "exp_avg_sq"))
    return model, optim


def read_legacy(directory):
    model, optim = full_state(directory)
    world = len(list(directory.glob("rank*.pt")))
    tree = in_group(world, lambda: torch.load(directory / "rank0.pt", weights_only=False))
    train = {key: value for key, value in tree.items() if key not in ("model", "optim")}
    return flatten_state_dict({"model": model, "optim": optim, "train": train})[0]


def read_local(directory):
    model, optim = full_state(directory)
    groups = torch.load(directory / "optim/rank0.pt", weights_only=False)["param_groups"]
    if "param_names" in groups[0]:  # the optimizer counts parameters, not flat parameters
        for group in groups:
            group["param_names"] = [name.replace("_fsdp_wrapped_module.", "") for name in group["param_names"]]
        ids = {name: index for group in groups for name, index in zip(group["param_names"], group["params"])}
        optim = {"state": {ids[name]: state for name, state in optim["state"].items()}, "param_groups": groups}
    else:  # in the order of modules, as the flat parameters are
        optim["param_groups"][0]["params"] = list(optim["state"])
    tree = {"model": model, "optim": optim}
    if (directory / "train").exists():
        tree["train"] = torch.load(directory / "train/rank0.pt", weights_only=False)
    return flatten_state_dict(tree)[0]


root = pathlib.Path(sys.argv[1])
expected = {
    path.name: {name: describe(value) for name, value in sorted(read(path).items())}
    for path in sorted(root.iterdir())
    if path.name != "expected.json"
}
(root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
