"""One `.metadata` in every form that Python pickles it in: tests/golden/dcp_forms.

    for python in python3.9 python3.10 ...; do $python metadata_forms.py write OUT; done
    python metadata_forms.py check OUT         # the one that has PyTorch
    python metadata_forms.py ranks tests/golden/sharded_forms

`write` needs no PyTorch: stand-ins have the names and the attributes of its classes, and the interpreter pickles them
(`pyVERSION-pPROTOCOL.metadata`). `check` writes the same metadata with PyTorch's own classes (`torch-VERSION-p...`; the older
classes of torch 2.1: `torch-VERSION-old-p4`), the forms of which there is no interpreter here (`hand-...`), `forms.txt`, the
listing that is true of all of them, and lets PyTorch read every file. `tessera-p4` is what Tessera writes of py3.11.2-p4:

    build/release/tests/parity/reencode_metadata OUT/py3.11.2-p4.metadata OUT/tessera-p4.metadata

    CLASS(value)                 members of an Enum: Python up to 3.10, and again from 3.11.4 on
    getattr(CLASS, 'NAME')       Python 3.11.0 to 3.11.3, Debian 12's among them, and enum.pickle_by_enum_name
    CLASS.NAME, NAME             as a global: enum.pickle_by_global_name, and a __reduce__ that gives a name
    pathlib.PosixPath(parts...)  up to 3.12; 3.13 has pathlib._local.PosixPath(path), 3.14 pathlib.PosixPath(path)
"""
import dataclasses
import enum
import pathlib
import pickle
import sys
import types

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
PATH = pathlib.PurePosixPath("forms", "step1")


def record(module, name, **fields):
    """A dataclass of that name, as far as pickle sees it."""
    made = dataclasses.make_dataclass(name, list(fields))
    made.__module__ = module
    setattr(sys.modules[module], name, made)
    return made


def named(module, name):
    """An object that is pickled as a global, as PyTorch's dtypes are."""
    def reduce(self):
        return name
    made = type(name, (), {"__reduce__": reduce, "__module__": module})()
    setattr(sys.modules[module], name, made)
    return made


def stand_ins():
    module = None
    for name in ("torch", "torch.serialization", "torch.distributed", "torch.distributed.checkpoint", METADATA, FILESYSTEM):
        module = sys.modules[name] = types.ModuleType(name)
    found = types.SimpleNamespace(float32=named("torch", "float32"), bfloat16=named("torch", "bfloat16"))

    class Size(tuple):
        def __reduce__(self):
            return Size, (tuple(self),)

    def _get_layout(name):
        return name

    class Layout:
        def __reduce__(self):
            return _get_layout, ("torch.strided",)

    for made, home in ((Size, "torch"), (_get_layout, "torch.serialization")):
        made.__module__, made.__qualname__ = home, made.__name__
        setattr(sys.modules[home], made.__name__, made)
    found.Size, found.strided = Size, Layout()
    found.format = enum.Enum("_MEM_FORMAT_ENCODING", {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1,
                                                      "TORCH_PRESERVE_FORMAT": 2}, module=METADATA)
    sys.modules[METADATA]._MEM_FORMAT_ENCODING = found.format
    for name, fields in (("ChunkStorageMetadata", "offsets sizes"), ("TensorStorageMetadata", "properties size chunks"),
                         ("BytesStorageMetadata", ""), ("StorageMeta", "checkpoint_id save_id load_id modules"),
                         ("Metadata", "state_dict_metadata planner_data storage_data storage_meta version")):
        setattr(found, name, record(METADATA, name, **dict.fromkeys(fields.split())))

    class TensorProperties:
        def __init__(self, *state):
            self.state = state

        def __getstate__(self):
            return self.state

    class MetadataIndex:
        def __init__(self, fqn, offset=None, index=None):
            self.fqn, self.index = fqn, index
            if offset is not None:
                self.offset = offset

    class _StorageInfo:
        def __init__(self, relative_path, offset, length):
            self.relative_path, self.offset, self.length = relative_path, offset, length

    for made, home in ((TensorProperties, METADATA), (MetadataIndex, METADATA), (_StorageInfo, FILESYSTEM)):
        made.__module__, made.__qualname__ = home, made.__name__
        setattr(sys.modules[home], made.__name__, made)
        setattr(found, made.__name__, made)
    found.properties = lambda dtype, last: TensorProperties(
        dtype, found.strided, False, found.format.TORCH_CHANNELS_LAST if last else found.format.TORCH_CONTIGUOUS_FORMAT, False)
    return found


def real():
    import torch
    from torch.distributed._shard.sharded_tensor import metadata as old
    from torch.distributed.checkpoint import filesystem, metadata

    def properties(dtype, last):
        return metadata.TensorProperties(dtype=dtype, memory_format=torch.channels_last if last else torch.contiguous_format)

    def older(dtype, last):
        return old.TensorProperties(dtype=dtype, memory_format=torch.channels_last if last else torch.contiguous_format)
    return types.SimpleNamespace(**vars(metadata), float32=torch.float32, bfloat16=torch.bfloat16, Size=torch.Size,
                                 _StorageInfo=filesystem._StorageInfo, properties=properties, older=older)


def metadata_of(m, properties, path):
    def tensor(dtype, last, size, *boxes):
        chunks = [m.ChunkStorageMetadata(m.Size(offsets), m.Size(sizes)) for offsets, sizes in boxes]
        return m.TensorStorageMetadata(properties(dtype, last), m.Size(size), chunks)
    entries = {"model.w": tensor(m.float32, False, (3, 2), ((0, 0), (2, 2)), ((2, 0), (1, 2))),
               "model.conv": tensor(m.bfloat16, True, (1, 3, 4, 4), ((0, 0, 0, 0), (1, 3, 4, 4))),
               "step": m.BytesStorageMetadata()}
    items = {m.MetadataIndex("model.w", m.Size((0, 0)), 0): m._StorageInfo("__0_0.distcp", 0, 1000),
             m.MetadataIndex("model.w", m.Size((2, 0)), 1): m._StorageInfo("__1_0.distcp", 0, 70000),
             m.MetadataIndex("model.conv", m.Size((0, 0, 0, 0)), 0): m._StorageInfo("__0_0.distcp", 1000, 3000000000),
             m.MetadataIndex("step"): m._StorageInfo("__0_0.distcp", 3000001000, 500)}
    paths = {"model.w": ("model", "w"), "model.conv": ("model", "conv"), "step": ("step",)}
    return m.Metadata(entries, paths, items, m.StorageMeta(path, "save", None, []), "1.0.0")


def version():
    return ".".join(map(str, sys.version_info[:3]))


def write(out):
    m = stand_ins()
    metadata = metadata_of(m, m.properties, pathlib.PosixPath(PATH))
    for protocol in range(2, 6):
        (out / f"py{version()}-p{protocol}.metadata").write_bytes(pickle.dumps(metadata, protocol))


class Call:
    """Is pickled as a call."""
    def __init__(self, callable, *arguments):
        self.call = callable, arguments

    def __reduce__(self):
        return self.call


def by_hand(m, out):
    cls = m._MEM_FORMAT_ENCODING
    before = cls.__reduce_ex__
    forms = {"3.14-p5": (lambda self, protocol: (cls, (self.value,)), 5),
             "dotted-p4": (lambda self, protocol: f"{cls.__name__}.{self.name}", 4),
             "global-p4": (lambda self, protocol: self.name, 4), "global-p2": (lambda self, protocol: self.name, 2)}
    for member in cls:
        setattr(sys.modules[METADATA], member.name, member)
    for name, (reduce, protocol) in forms.items():
        cls.__reduce_ex__ = reduce
        path = Call(pathlib.PosixPath, str(PATH)) if name == "3.14-p5" else pathlib.PosixPath(PATH)
        (out / f"hand-{name}.metadata").write_bytes(pickle.dumps(metadata_of(m, m.properties, path), protocol))
    cls.__reduce_ex__ = before


def check(out):
    from dcp_listing import listing
    m = real()
    metadata = metadata_of(m, m.properties, pathlib.PosixPath(PATH))
    for protocol in range(2, 6):
        (out / f"torch-{version()}-p{protocol}.metadata").write_bytes(pickle.dumps(metadata, protocol))
    older = metadata_of(m, m.older, pathlib.PosixPath(PATH))
    (out / f"torch-{version()}-old-p4.metadata").write_bytes(pickle.dumps(older, 4))
    by_hand(m, out)
    text = "".join(line + "\n" for line in listing(metadata))
    (out / "forms.txt").write_text(text)
    sys.modules.setdefault("pathlib._local", pathlib)
    for path in sorted(out.glob("*.metadata")):
        assert "".join(line + "\n" for line in listing(pickle.loads(path.read_bytes()))) == text, path


def rank_file(out):
    """A ShardedTensor of one rank: getattr names its memory format and the class of its process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed._shard import sharded_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(torch.arange(6.0).reshape(3, 2), [0, 0], 0)
    torch.save({"w": sharded_tensor.init_from_local_shards([shard], 3, 2)}, out / "rank0.pt")


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[2])
    target.mkdir(exist_ok=True)
    {"write": write, "check": check, "ranks": rank_file}[sys.argv[1]](target)
