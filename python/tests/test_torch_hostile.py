"""Hostile pickles on every road of `tessera.torch`: classes and functions of the process stay what they are, and nothing runs.

TESSERA_HOSTILE is their number, TESSERA_SEED the seed. `make soak` makes 10,000 of them.
"""

import codecs
import collections
import enum
import importlib
import io
import os
import pathlib
import pickle
import random
import struct
import sys
import types
import zipfile

import numpy
import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera._values import Opaque  # noqa: E402
from tessera.torch import _data  # noqa: E402
from torch.distributed.checkpoint import _extension, filesystem, metadata  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

RAN = []


def trap(*arguments, **keywords):
    RAN.append(arguments)


def shared(*arguments):
    """Allowed, and gives what was there before."""
    return (Settings, Color.RED, trap, collections)[len(arguments) % 4]


class Settings:
    kept = "of the class"

    def __init__(self, *arguments):
        self.lr = 0.1

    def __eq__(self, other):
        return type(other) is Settings


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


HERE = __name__
ALLOWED = {f"{HERE}.{name}" for name in ("Settings", "Color", "shared")}
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
NAMES = [
    *((METADATA, name) for name in ("MetadataIndex", "Metadata", "ChunkStorageMetadata", "TensorStorageMetadata")),
    *((METADATA, name) for name in ("BytesStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((METADATA, f"_MEM_FORMAT_ENCODING.{name}") for name in metadata._MEM_FORMAT_ENCODING.__members__),
    (FILESYSTEM, "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("builtins", "getattr"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    (numpy._core.multiarray._reconstruct.__module__, "_reconstruct"),
    ("_io", "BytesIO"),
    *((HERE, name) for name in ("Settings", "Color", "shared")),
]
# What no road may take, import or call; torch imports some of its parts when somebody asks for them.
FORBIDDEN = [(HERE, "trap"), ("os", "mkdir"), ("builtins", "setattr"), ("antigravity", "fly"), ("this", "s")]
FORBIDDEN += [("torch", name) for name in ("_inductor", "_export", "onnx") if f"torch.{name}" not in sys.modules]
ATTRIBUTES = ["__init__", "__eq__", "__hash__", "__setstate__", "__class__", "__dict__", "__code__", "__bases__", "kept"]
ATTRIBUTES += ["fqn", "offset", "sizes", "RED", "_member_map_", "_value_", "value", "lr", "relative_path", "TORCH_CHANNELS_LAST"]


THEIRS = filesystem.FileSystemReader


class Program:
    """Opcodes, drawn at random, that push one value."""

    def __init__(self, rng):
        self.rng = rng
        self.memo = 0

    def text(self, text):
        return b"X" + struct.pack("<I", len(text.encode())) + text.encode()

    def name(self):
        module, name = self.rng.choice(NAMES if self.rng.random() < 0.9 else FORBIDDEN)
        if self.rng.random() < 0.5:
            return self.text(module) + self.text(name) + b"\x93"  # STACK_GLOBAL
        return f"c{module}\n{name}\n".encode()

    def tuple(self, depth):
        return b"(" + b"".join(self.value(depth - 1) for _ in range(self.rng.randrange(4))) + b"t"

    def dict(self, depth):
        pairs = (self.text(self.rng.choice(ATTRIBUTES)) + self.value(depth - 1) for _ in range(self.rng.randrange(4)))
        return b"}(" + b"".join(pairs) + b"u"

    def state(self, depth):
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.dict(depth)
        if kind == 1:
            return b"N" + self.dict(depth) + b"\x86"  # (None, slots)
        if kind == 2:
            return self.dict(depth) + self.dict(depth) + b"\x86"
        return self.value(depth - 1)

    def atom(self):
        return self.rng.choice(
            [b"N", b"\x88", b"K\x03", b")", b"]", b"}", self.text(self.rng.choice(ATTRIBUTES)), self.text("red"), self.name(), b"C\x01a"]
        )

    def value(self, depth=3):
        if depth <= 0:
            return self.atom()
        value = self.rng.choice(
            [self.atom, self.built, self.built, self.called, self.found, lambda d: self.tuple(d), self.filled, self.named_again]
        )
        made = value() if value == self.atom else value(depth)
        if self.rng.random() < 0.2:
            self.memo += 1
            made += b"r" + struct.pack("<I", 1000 + self.memo)  # LONG_BINPUT
        return made

    def called(self, depth):
        arguments = self.tuple(depth)
        return self.rng.choice(
            [
                self.name() + arguments + b"R",
                self.name() + arguments + b"\x81",  # NEWOBJ
                self.name() + arguments + self.dict(depth) + b"\x92",  # NEWOBJ_EX
                b"(" + self.name() + self.atom() + b"o",  # OBJ
                b"(" + self.atom() + f"i{HERE}\nSettings\n".encode(),  # INST
            ]
        )

    def found(self, depth):
        return b"cbuiltins\ngetattr\n" + self.name() + self.text(self.rng.choice(ATTRIBUTES)) + b"\x86R"

    def built(self, depth):
        what = self.rng.choice([self.name, lambda: self.called(depth - 1), lambda: self.found(depth - 1)])
        return what() + self.state(depth) + b"b"

    def filled(self, depth):
        into = self.rng.choice([self.name, lambda: self.called(depth - 1), lambda: b"}", lambda: b"]"])
        return into() + (self.dict(depth)[1:] if self.rng.random() < 0.7 else self.value(depth - 1) + b"a")

    def named_again(self, depth):
        if self.memo == 0:
            return self.atom()
        return b"j" + struct.pack("<I", 1000 + self.rng.randint(1, self.memo)) + self.state(depth) + b"b"


MARK = "what is hostile is put here"


def grafted(rng, base, program):
    """The metadata of an honest checkpoint, with the program somewhere."""
    made = pickle.loads(pickle.dumps(base))
    place = rng.randrange(7)
    if place == 0:
        made.planner_data["w"] = MARK
    elif place == 1:
        made.state_dict_metadata["x"] = MARK
    elif place == 2:
        made.storage_meta.checkpoint_id = MARK
    elif place == 3:
        made.version = MARK
    elif place == 4:
        made.storage_data[MARK] = made.storage_data[metadata.MetadataIndex("x")]
    elif place == 5:
        made.storage_data[metadata.MetadataIndex("x")] = MARK
    else:
        made.state_dict_metadata["w"].properties.dtype = MARK
    return pickle.dumps(made, protocol=2).replace(Program(rng).text(MARK), program)


def archived(pickled):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


class Checkpoint:
    """A directory with a tensor and a value, whose files are written anew for each program."""

    def __init__(self, path):
        self.path = path
        dcp.save({"w": torch.ones(2), "x": 7}, checkpoint_id=path)
        self.base = pickle.loads((path / ".metadata").read_bytes())
        self.base.storage_data[metadata.MetadataIndex("x")] = filesystem._StorageInfo("x.distcp", 0, 0)

    def write(self, meta, value):
        self.base.storage_data[metadata.MetadataIndex("x")].length = len(value)
        (self.path / "x.distcp").write_bytes(value)
        for name in (".metadata", "__0.metadata"):
            (self.path / name).write_bytes(pickle.dumps(self.base) if meta is None else meta)

    def write_hostile(self, rng):
        program = Program(rng).value()
        honest = archived(pickle.dumps(7, protocol=2))
        kind = rng.choice(["whole", "grafted", "value", "value"])
        if kind == "whole":
            self.write(b"\x80\x04" + program + b".", honest)
        elif kind == "grafted":
            self.write(grafted(rng, self.base, program), honest)
        else:
            self.write(None, archived(b"\x80\x02" + program + b"."))
        return kind


class Registry(_extension.ExtensionRegistry):
    """Which makes torch's own code read."""


def by_rank(path, into):
    """As in a load without collectives."""
    reader = tessera.torch.FileSystemReader(path)
    reader.set_up_storage_reader(reader.read_metadata(rank=0), False, rank=0, use_collectives=False)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(into, None, False)
    planner.metadata = reader.read_metadata(rank=0)
    reader.read_data(planner.create_local_plan(), planner)


ROADS = {
    "rank": by_rank,
    "extensions": lambda path, into: dcp.load(into, storage_reader=tessera.torch.FileSystemReader(path, Registry())),
    "reader": lambda path, into: dcp.load(into, storage_reader=tessera.torch.FileSystemReader(path)),
    "planner": lambda path, into: dcp.load(
        into, storage_reader=THEIRS(path), planner=tessera.torch.LoadPlanner(allow=ALLOWED)
    ),
    "ours": lambda path, into: tessera.torch.load(into, checkpoint_id=path, allow=ALLOWED),
}


def attempt(road, path):
    into = {"w": torch.zeros(2), "x": 0}
    try:
        ROADS[road](path, into)
        return True
    except tessera.Error:
        return False
    except BaseException:
        assert road != "ours", "tessera.torch.load raises tessera.Error alone"
        return False


def roots():
    """What files may name, and what reads them, with all that hangs on it."""
    things = {}
    for module, name in NAMES + FORBIDDEN[:3]:
        found = importlib.import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
        things[f"{module}.{name}"] = found
    for module in (metadata, filesystem, _data, collections, pathlib, enum, sys.modules[HERE], Opaque, tessera._errors):
        for name, thing in vars(module).items():
            if isinstance(thing, (type, types.FunctionType, enum.Enum)):
                things[f"{module.__name__}:{name}"] = thing
    return things


def attributes_of(thing):
    if isinstance(thing, type):
        for kind in thing.__mro__:
            yield from ((f"{kind.__name__}.{name}", value) for name, value in list(vars(kind).items()))
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__bases__", "__name__", "__qualname__", "__class__", "__dict__"):
        yield name, getattr(thing, name, None)


def snapshot():
    taken = {}
    for label, thing in roots().items():
        taken[label] = thing
        for name, value in attributes_of(thing):
            if isinstance(value, (dict, types.MappingProxyType)):
                taken.update(((label, name, key), item) for key, item in value.items())
            elif isinstance(value, (list, tuple)):
                taken.update(((label, name, i), item) for i, item in enumerate(value))
            elif name not in ("__dict__",):
                taken[label, name] = value
                if isinstance(value, types.FunctionType):
                    taken[label, name, "code"] = value.__code__
    return taken


def differences(before, after):
    # What pickle notes of a class when it first writes an object.
    before, after = ({key: value for key, value in of.items() if "__slotnames__" not in str(key)} for of in (before, after))
    changed = [key for key in before.keys() & after.keys() if not (before[key] is after[key] or _is_made(before[key], after[key]))]
    return sorted(map(str, [*changed, *(before.keys() ^ after.keys())]))


def _is_made(a, b):
    """Bound anew whenever it is asked for."""
    return type(a) is type(b) and isinstance(a, (str, types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)) and a == b


STATES = {
    "a class": f"c{METADATA}\nMetadataIndex\nN}}X\x08\0\0\0__init__cpathlib\nPosixPath\ns\x86b".encode("latin-1"),
    "a member": b"cbuiltins\ngetattr\nc" + f"{METADATA}\n_MEM_FORMAT_ENCODING\n".encode()
    + b"X\x17\0\0\0TORCH_CONTIGUOUS_FORMAT\x86R}X\x07\0\0\0_value_K\x01sb",
    "an allowed class": f"c{HERE}\nshared\n)R".encode() + b"N}X\x04\0\0\0keptK\x01s\x86b",
    "an allowed class by its attributes": f"c{HERE}\nshared\n)R".encode() + b"}X\x04\0\0\0keptK\x01sb",
    "an allowed member": f"c{HERE}\nColor\nX\x03\0\0\0red\x85R".encode("latin-1") + b"}X\x04\0\0\0kindK\x01sb",
    "a member by its slots": f"c{HERE}\nColor\nX\x03\0\0\0red\x85R".encode("latin-1") + b"N}X\x04\0\0\0kindK\x01s\x86b",
    "a function": f"c{HERE}\nshared\nK\x01K\x02\x86R".encode() + b"}X\x04\0\0\0kindK\x01sb",
    "a module": f"c{HERE}\nshared\n(K\x01K\x02K\x03tR".encode() + b"}X\x04\0\0\0kindK\x01sb",
    "what torch imports": b"ctorch\n_inductor\n",
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("what", STATES)
def test_nothing_that_was_there_gets_a_state(what, road, tmp_path):
    checkpoint = Checkpoint(tmp_path)
    honest = archived(pickle.dumps(7, protocol=2))
    checkpoint.write(None, honest)
    assert attempt(road, tmp_path)
    pickled = b"\x80\x02" + STATES[what] + b"."
    with tessera.torch.install(allow=ALLOWED):
        before, modules = snapshot(), set(sys.modules)
        for meta, value in ((pickled, honest), (None, archived(pickled))):
            if meta is not None and road == "planner":
                continue  # there torch reads the metadata
            checkpoint.write(meta, value)
            assert not attempt(road, tmp_path)
            assert differences(before, snapshot()) == [] and set(sys.modules) == modules
    assert RAN == []


def test_hostile_files_change_nothing(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    number = int(os.environ.get("TESSERA_HOSTILE", "300"))
    seed = int(os.environ.get("TESSERA_SEED", "1"))
    checkpoint.write(None, archived(pickle.dumps(7, protocol=2)))
    assert all(attempt(road, tmp_path) for road in ROADS)
    counts = collections.Counter()
    codecs.lookup("latin-1")  # which readers of pickles may ask for
    with tessera.torch.install(allow=ALLOWED):
        before, modules = snapshot(), set(sys.modules)
        for file in range(number):
            kind = checkpoint.write_hostile(random.Random(seed * 1_000_003 + file))
            for road in ROADS:
                if road != "planner" or kind == "value":  # there torch reads the metadata
                    counts[kind, road, "loaded" if attempt(road, tmp_path) else "refused"] += 1
            assert RAN == [], (seed, file)
            if file % 100 == 0 or file == number - 1:
                assert differences(before, snapshot()) == [], (seed, file)
                assert set(sys.modules) == modules, (seed, file)
    print(number, "hostile files:", dict(sorted((" ".join(key), count) for key, count in counts.items())))
    assert any(key[2] == "loaded" for key in counts) and any(key[2] == "refused" for key in counts)
