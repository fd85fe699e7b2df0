"""make OUT CHUNKS: a DCP checkpoint with many chunks whose data files are holes. load OUT: times pickle.load of it."""
import os
import pathlib
import pickle
import sys
import time

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties,
                                                   TensorStorageMetadata)

RANKS, ROWS, COLUMNS, ITEM = 1000, 4, 1024, 17_000  # ITEM: bytes that a chunk has in its file


def make(out, chunks):
    ranks = min(RANKS, chunks)
    tensors, storage = {}, {}
    for number in range(chunks // ranks):
        name, boxes = f"model.layers.{number}.weight", []
        for rank in range(ranks):
            offset = torch.Size([rank * ROWS, 0])
            boxes.append(ChunkStorageMetadata(offset, torch.Size([ROWS, COLUMNS])))
            storage[MetadataIndex(name, offset)] = _StorageInfo(f"__{rank}_0.distcp", number * ITEM, ITEM)
        properties = TensorProperties(dtype=torch.float32)
        tensors[name] = TensorStorageMetadata(properties, torch.Size([ranks * ROWS, COLUMNS]), boxes)
    out.mkdir(parents=True)
    with open(out / ".metadata", "wb") as file:
        pickle.dump(Metadata(tensors, storage_data=storage), file)
    for rank in range(ranks):
        (out / f"__{rank}_0.distcp").touch()
        os.truncate(out / f"__{rank}_0.distcp", len(tensors) * ITEM)


if sys.argv[1] == "make":
    make(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
else:
    with open(pathlib.Path(sys.argv[2]) / ".metadata", "rb") as stream:
        begin = time.perf_counter()
        pickle.load(stream)
        print(f"seconds {time.perf_counter() - begin:.4f}")
