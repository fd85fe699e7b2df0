"""`torch.distributed.checkpoint` with Tessera's reader: checked by digests, in parallel, and nothing is run.

    import torch.distributed.checkpoint as dcp
    import tessera.torch

    dcp.load(state, storage_reader=tessera.torch.FileSystemReader("run/step400"))
    tessera.torch.load(state, checkpoint_id="run/step400")
"""

from tessera.torch._load import load
from tessera.torch._planner import LoadPlanner
from tessera.torch._reader import FileSystemReader
from tessera.torch._writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter", "LoadPlanner", "load"]
