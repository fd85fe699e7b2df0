"""Ranks save a state to a bucket by ai2-olmo's RemoteFileSystemWriter, and load it by its reader.

    torchrun ... olmo_store.py save|load DIRECTORY URL BYTES

Each rank has tensors of 64 MiB of its own. The writer puts files into DIRECTORY and uploads them. Rank 0 prints "seconds N"
without imports. PYTHONPATH has olmo_stubs.
"""
import os
import pathlib
import sys
import time

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from olmo import checkpoint, util  # noqa: E402


class Reader(checkpoint.RemoteFileSystemReader):
    """With the two methods that StorageReader declares since torch 2.3."""

    def reset(self, checkpoint_id=None):
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def resource_path(folder, name, local_cache=None, **_):
    """In the place of cached_path, which is not installed."""
    copy = pathlib.Path(sys.argv[2]) / f"downloaded-{dist.get_rank()}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(util.get_bytes_range(f"{folder}/{name}", 0, util.file_size(f"{folder}/{name}")))
    return copy


checkpoint.resource_path = resource_path
what, directory, url, size = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
count = int(size) // (64 << 20)
state = {f"tensor{i}": torch.full((16 << 20,), float(rank)) for i in range(count) if i % ranks == rank}
dist.barrier()
begin = time.perf_counter()
if what == "save":
    dcp.save(state, storage_writer=checkpoint.RemoteFileSystemWriter(directory, upload_to=url, save_overwrite=True))
else:
    dcp.load(state, storage_reader=Reader(url))
dist.barrier()
if rank == 0:
    print("seconds", time.perf_counter() - begin)
dist.destroy_process_group()
