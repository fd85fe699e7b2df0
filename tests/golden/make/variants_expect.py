"""Writes tests/golden/variants/expected.json: how PyTorch reads what dcp_variants.py and mp1.py wrote.

    python variants_expect.py tests/golden

Where torch has no reader for what its own writer left, the files are first put into a form that it reads: the
`__{rank}.metadata` of a save without collectives are merged, and data files in the safetensors format are cut free
of the values in front and get their extension. Needs zstandard.
"""
import io
import json
import logging
import pathlib
import pickle
import shutil
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from expected import dcp_leaves, describe

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


def merged(directory, scratch):
    """One `.metadata` out of those of the ranks."""
    whole, seen = None, set()
    for path in sorted(directory.glob("__*.metadata")):
        part = pickle.loads(path.read_bytes())
        for file in directory.glob("*.distcp"):
            shutil.copy(file, scratch)
        if whole is None:
            whole = pickle.loads(path.read_bytes())
            whole.storage_data = {}
            for entry in whole.state_dict_metadata.values():
                if not isinstance(entry, BytesStorageMetadata):
                    entry.chunks = []
        for index, info in part.storage_data.items():
            if (index.fqn, index.offset) in seen:
                continue
            seen.add((index.fqn, index.offset))
            whole.storage_data[index] = info
            entry = part.state_dict_metadata[index.fqn]
            if not isinstance(entry, BytesStorageMetadata):
                chunks = [chunk for chunk in entry.chunks if chunk.offsets == index.offset]
                whole.state_dict_metadata[index.fqn].chunks += chunks
    (scratch / ".metadata").write_bytes(pickle.dumps(whole))
    return dcp_leaves(dcp.FileSystemReader(scratch))


def from_safetensors(directory, scratch):
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    leaves, ends = {}, {}
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
            item = (directory / info.relative_path).read_bytes()[info.offset:info.offset + info.length]
            leaves[index.fqn] = torch.load(io.BytesIO(item), weights_only=False)
    for file in directory.glob("*.distcp"):
        (scratch / (file.stem + ".safetensors")).write_bytes(file.read_bytes()[ends.get(file.name, 0):])
    return {**leaves, **dcp_leaves(dcp.HuggingFaceStorageReader(scratch))}


def read(directory):
    with tempfile.TemporaryDirectory() as scratch:
        if (directory / "__0.metadata").exists():
            return merged(directory, pathlib.Path(scratch))
        if directory.name.startswith("c2_st"):
            return from_safetensors(directory, pathlib.Path(scratch))
    is_dcp = (directory / ".metadata").exists()
    return dcp_leaves(dcp.FileSystemReader(directory) if is_dcp else dcp.HuggingFaceStorageReader(directory))


golden = pathlib.Path(sys.argv[1])
names = sorted(f"variants/{path.name}" for path in (golden / "variants").iterdir() if path.is_dir())
names += ["c2_hf_cons/sharded", "c2_hf_dist"]
skipped = {"variants/olmo_core"}  # torch cannot import its class; tests compare it by hand
expected = {
    name: {leaf: describe(value) for leaf, value in sorted(read(golden / name).items())}
    for name in names if name not in skipped
}
(golden / "variants/expected.json").write_text(json.dumps(expected, indent=1) + "\n")
