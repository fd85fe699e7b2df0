"""Writes NAME.txt beside each tests/golden/dcp/NAME.metadata: what PyTorch reads in it.

    python dcp_listing.py DIR
"""
import pathlib
import pickle
import sys

from torch.distributed.checkpoint.metadata import BytesStorageMetadata


def box(numbers):
    return "[" + ", ".join(map(str, numbers)) + "]"


def place(info):
    transforms = ",".join(info.transform_descriptors or [])
    return f"{info.relative_path} {info.offset} {info.length} {transforms or '-'}"


def path_of(planner_data, name):
    if not planner_data or name not in planner_data:
        return "-"
    return "/".join(f"#{part}" if isinstance(part, int) else part for part in planner_data[name])


def listing(metadata):
    infos = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    meta = getattr(metadata, "storage_meta", None)
    yield f"version {metadata.version or '-'}"
    yield f"checkpoint {meta.checkpoint_id if meta else '-'} {meta.save_id if meta else '-'}"
    for name, entry in metadata.state_dict_metadata.items():
        path = path_of(metadata.planner_data, name)
        if isinstance(entry, BytesStorageMetadata):
            yield f"bytes {name} {path} {place(infos[name, None])}"
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        yield f"tensor {name} {path} {dtype} {box(entry.size)} {int(entry.properties.requires_grad)}"
        for chunk in entry.chunks:
            yield f"chunk {box(chunk.offsets)} {box(chunk.sizes)} {place(infos[name, chunk.offsets])}"


def main():
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.metadata")):
        try:
            metadata = pickle.loads(path.read_bytes())
        except (pickle.UnpicklingError, EOFError):
            continue  # one is cut on purpose
        path.with_suffix(".txt").write_text("".join(line + "\n" for line in listing(metadata)))


main()
