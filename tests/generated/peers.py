"""What the programs that people read a directory with make of it: the truth that tessera is compared with.

Each reads a file or a folder, all of it or some names, and answers a dict of tensors (and values) by flat names."""
import json

import safetensors
import torch
import torch.distributed.checkpoint as dcp

import checks


def flat(tree, prefix=""):
    """The leaves of nested dicts, their keys joined by dots."""
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves.update(flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def chosen(leaves, names):
    return leaves if names is None else {name: leaves[name] for name in names}


def safetensors_file(path, names=None):
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}


def torch_file(path, names=None):
    return chosen(flat(torch.load(path, weights_only=True)), names)


def indexed(index, read, names=None):
    """What the index names, each from the file that it names."""
    file_of = json.loads(index.read_text())["weight_map"]
    wanted = {}
    for name in file_of if names is None else names:
        wanted.setdefault(file_of[name], []).append(name)
    found = {}
    for file, own in wanted.items():
        found.update(read(index.parent / file, own))
    return found


def transformers(folder, names=None):
    """As its documentation has it: the index of a sharded checkpoint says in which file each parameter is; without one
    all is in one file of the usual name; safetensors comes before files of torch.save."""
    for usual, read in (("model.safetensors", safetensors_file), ("pytorch_model.bin", torch_file)):
        index = folder / f"{usual}.index.json"
        if index.exists():
            return indexed(index, read, names)
        if (folder / usual).exists():
            return read(folder / usual, names)
    raise FileNotFoundError(folder)


def each_file(paths, names=None):
    """Programs that take whatever lies there (mlx, vLLM): each file is opened, and a name is where it is found."""
    found = {}
    for path in paths:
        found.update(safetensors_file(path))
    return chosen(found, names)


def dcp_directory(folder, names=None):
    if names is None:
        return flat(checks.dcp_load(folder))
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {}
    for name in names:
        entry = entries[name]
        is_tensor = hasattr(entry, "size")
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else 0
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def reads(read, *arguments):
    """Whether a peer does."""
    try:
        read(*arguments)
    except (Exception, checks.CheckpointException):  # noqa: BLE001
        return False
    return True


def same(a, b):
    """Bit for bit; values by what they are."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    # `cat` copies: a view of bytes wants a stride of one, which one element of numpy's need not have.
    bits = [torch.cat([tensor.detach().reshape(-1)]).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
