"""Writes the DCP variants of tests/golden/variants with PyTorch (and zstandard).

    python dcp_variants.py OUT

c2_nocoll  saved without collectives, two ranks: `__{rank}.metadata`
c_zstd     items inside zstd frames
c2_st      data files in the safetensors format; c2_st_obj the same with values in front of it
m2d        four ranks as a 2 x 2 mesh: blocks, uneven ones, and a tensor split twice along one dimension
c2_multi   a file for every item
old        as torch 2.1 wrote `.metadata`: the older TensorProperties, no version, no storage_meta, indices without a
           hint, containers without tensors in one item (P-11). The items are torch's; `.metadata` is pickled here from
           torch's own objects, and torch loads it
olmo_core  `_StorageInfo` of olmo_core's file system
"""
import io
import os
import pathlib
import pickle
import sys
import types
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")


def start(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617", RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def two_ranks(rank, ranks):
    start(rank, ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {
        "s0": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]),
        "s1": distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)]),
        "rep": distribute_tensor(torch.ones(3), mesh, [Replicate()]),
        "tiny": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),
        "plain": torch.arange(4.0), "step": torch.tensor(3.0),
    }
    values = {"obj": {"x": 1, "y": [1, 2]}}
    dcp.save({**tensors, **values}, checkpoint_id="c2_nocoll", use_collectives=False)
    dcp.save({**tensors, **values}, storage_writer=dcp.FileSystemWriter("c2_multi", single_file_per_rank=False))
    safetensors = {"serialization_format": SerializationFormat.SAFETENSORS}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter("c2_st", **safetensors))
    dcp.save({**tensors, **values}, storage_writer=dcp.FileSystemWriter("c2_st_obj", **safetensors))
    dist.destroy_process_group()


def four_ranks(rank, ranks):
    start(rank, ranks)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dcp.save({
        "blocks": distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(torch.arange(14.0).reshape(7, 2), mesh, [Shard(0), Shard(0)]),
        "hybrid": distribute_tensor(torch.arange(9.0).reshape(3, 3), mesh, [Replicate(), Shard(0)]),
        "tiny": distribute_tensor(torch.arange(2.0).reshape(1, 2), mesh, [Shard(0), Shard(1)]),
    }, checkpoint_id="m2d")
    dist.destroy_process_group()


def item(file, value):
    stream = io.BytesIO()
    torch.save(value, stream)
    info = _StorageInfo(os.path.basename(file.name), file.tell(), len(stream.getvalue()))
    file.write(stream.getvalue())
    return info


def old():
    os.makedirs("old", exist_ok=True)
    weight = torch.arange(6.0).reshape(3, 2)
    moment = torch.full((3, 2), 0.5, dtype=torch.float16)
    groups = {"lr": 0.1, "params": ["w"]}
    tensors, items = {}, {}
    with open("old/__0_0.distcp", "wb") as file:
        for name, tensor, cuts in (("model.w", weight, (0, 2, 3)), ("optim.state.w.exp_avg", moment, (0, 3))):
            chunks = []
            for begin, end in zip(cuts, cuts[1:]):
                offset = torch.Size([begin, 0])
                chunks.append(m.ChunkStorageMetadata(offset, torch.Size([end - begin, 2])))
                items[m.MetadataIndex(name, offset)] = item(file, tensor[begin:end].clone())
            properties = OldProperties(dtype=tensor.dtype, layout=torch.strided, requires_grad=False,
                                       memory_format=torch.contiguous_format, pin_memory=False)
            tensors[name] = m.TensorStorageMetadata(properties, tensor.size(), chunks)
        for name, value in (("optim.param_groups", [groups]), ("optim.cfg", {"a": {"b": 1}, "c": (2, 3)})):
            tensors[name] = m.BytesStorageMetadata()
            items[m.MetadataIndex(name)] = item(file, value)
    paths = {"model.w": ("model", "w"), "optim.state.w.exp_avg": ("optim", "state", "w", "exp_avg"),
             "optim.param_groups": ("optim", "param_groups"), "optim.cfg": ("optim", "cfg")}
    metadata = m.Metadata(tensors, paths, items)
    del metadata.__dict__["storage_meta"], metadata.__dict__["version"]
    pathlib.Path("old/.metadata").write_bytes(pickle.dumps(metadata))


def olmo_core():
    """The class is olmo_core's by name only: pickle asks for no more."""
    dcp.save({"w": torch.arange(4.0), "n": 3}, checkpoint_id="olmo_core")
    path = pathlib.Path("olmo_core/.metadata")
    text = path.read_bytes()
    metadata = pickle.loads(text)
    name = "olmo_core.distributed.checkpoint.filesystem"
    for part in ("olmo_core", "olmo_core.distributed", "olmo_core.distributed.checkpoint", name):
        sys.modules[part] = types.ModuleType(part)

    class Info:
        def __init__(self, info):
            self.relative_path, self.offset, self.length = info.relative_path, info.offset, info.length

    Info.__module__, Info.__name__, Info.__qualname__ = name, "_StorageInfo", "_StorageInfo"
    sys.modules[name]._StorageInfo = Info
    metadata.storage_data = {index: Info(info) for index, info in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    mp.spawn(two_ranks, args=(2,), nprocs=2)
    mp.spawn(four_ranks, args=(4,), nprocs=4)
    dcp.save({"a": torch.arange(1000.0), "b": {"c": 1}, "z": torch.zeros(10)},
             storage_writer=dcp.FileSystemWriter("c_zstd", _extensions=[ZStandard()]))
    old()
    olmo_core()
