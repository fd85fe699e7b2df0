"""What happened to a checkpoint. Those of `BEFORE` are what its peer has to read; after those of `AFTER` it reads less,
or nothing. Each answers false where it has no sense."""
import hashlib
import json
import shutil

import safetensors.torch
import torch

import peers
from places import model, tensor

def overlaid(case, kind):
    """An older tensor lies in another shard than the one that the index names."""
    if kind not in ("sharded", "mistral") or len(case.shards) < 2 or case.is_stale():
        return False
    new, old = case.rng.sample(sorted(case.shards), 2)
    name = case.rng.choice(case.shards[new])
    case.rewrite(old, {name: tensor(case.rng)})
    case.did(f"{name} of {new} is in {old}, too")
    case.states[old] = "used"
    case.overlaid[old] = name
    case.notes += [old, name]


def unlisted(case, kind):
    if kind != "sharded":
        return False
    file = case.damaged_file()
    case.extra["unlisted"] = tensor(case.rng)
    case.rewrite(file, {"unlisted": case.extra["unlisted"]})
    case.extra_in["unlisted"] = file
    case.notes.append("unlisted")
    case.did(f"the index does not name a tensor of {file}")


def aliased(case, kind):
    """Another name of a tensor in the metadata of its file, as `save_model` notes it. A word that only happens to be a
    tensor's name (docs/formats/safetensors.md) is doubted."""
    if kind not in ("single", "sharded", "unindexed", "other_name"):
        return False
    file = case.damaged_file()
    held = peers.safetensors_file(case.folder / file)
    name = case.rng.choice(sorted(held))
    alias = case.rng.choice((f"alias.{name.split('.')[-1]}", "alias.weight", "base_model"))
    safetensors.torch.save_file(held, case.folder / file, {"format": "pt", alias: name})
    if "." in alias and (alias.split(".")[-1] == name.split(".")[-1] or "." in name):
        case.extra[alias] = held[name]
    else:
        case.notes.append(alias)
    case.extra_in[alias] = file
    case.did(f"{alias} is {name} in the metadata of {file}")


def stray(case, kind):
    if kind != "sharded":
        return False
    case.write("model.safetensors", model(case.rng))
    case.needs.add("open")
    case.meant = "model.safetensors.index.json"


def stale_index(case, kind):
    """The index is of other files than those that hold everything."""
    if kind not in ("unindexed", "single"):
        return False
    names = list(case.read(case.folder, None))
    file_of = {name: f"model-{i % 30 + 1:05}-of-00030.safetensors" for i, name in enumerate(names)}
    case.index("model.safetensors.index.json", file_of)
    files = [case.folder / file for file in case.shards]
    case.read = lambda folder, names: peers.each_file([folder / file.name for file in files], names)
    case.needs.add("open" if kind == "single" else "--ignore-index")
    case.meant = "model.safetensors"


BEFORE = (overlaid, unlisted, aliased, stray, stale_index)


def lost(case, kind):
    """Files lie on another node, or were left out on purpose."""
    may_lack = kind in ("sharded", "torch_sharded", "unindexed", "dcp", "mistral") and not case.is_stale()
    if not may_lack or len(case.shards) < 2:
        return False
    for file in case.rng.sample(sorted(case.shards), case.rng.randint(1, len(case.shards) - 1)):
        (case.folder / file).unlink()
        del case.shards[file]
        case.did(f"{file} is not here")
        if kind != "unindexed":
            case.states[file] = "missing"
            case.notes.append(file)
    case.needs.add("--partial")
    case.missing = True
    if kind == "dcp":
        case.here = [name for name in case.want if peers.reads(case.read, case.folder, [name])]
    else:
        case.here = [name for names in case.shards.values() for name in names]
    # Nothing can be told of what the index does not name and whose file is away.
    for name in [name for name, file in case.extra_in.items() if file not in case.shards]:
        case.extra.pop(name, None)
    case.notes = [note for note in case.notes if case.extra_in.get(note) in (None, *case.shards)]
    for file in case.overlaid:
        if file not in case.shards:
            case.notes = [note for note in case.notes if note != case.overlaid[file]]


def trailing(case, kind):
    """torch.load and dcp.load pass over them without a word, safetensors refuses them."""
    file = case.damaged_file()
    with open(case.folder / file, "ab") as out:
        out.write(bytes(case.rng.choice((1, 8, 16, 4096))))
    case.did(f"bytes behind the end of {file}")
    if kind != "dcp":
        case.needs.add("--accept")
        case.notes.append(file)


def cut(case, kind):
    for file in case.rng.sample(sorted(case.shards), case.rng.randint(1, len(case.shards))):
        path = case.folder / file
        data = path.read_bytes()
        path.write_bytes(data[: -case.rng.randint(1, 3)] if file.endswith(".safetensors") else data[: len(data) // 2])
        case.did(f"{file} is cut short")
        case.tell(file)
    case.fatal = "incomplete"


def pointer(case, kind):
    """Cloned without git-lfs."""
    file = case.damaged_file()
    case.text(file, f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    case.did(f"{file} is a pointer of git-lfs")
    case.fatal = "any"
    case.tell(file)


def emptied(case, kind):
    file = case.damaged_file()
    (case.folder / file).write_bytes(b"")
    case.did(f"{file} is empty")
    case.fatal = "incomplete"
    case.tell(file)


def unfinished(case, kind):
    # Without its .metadata the directory is that of another kind that lies there.
    if kind != "dcp" or any((case.folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin")):
        return False
    (case.folder / ".metadata").unlink()
    case.fatal = "incomplete"


AFTER = (lost, lost, trailing, trailing, cut, pointer, emptied, unfinished)


def in_hub_cache(case):
    """The files become blobs that are named by their content, and a snapshot has links to them."""
    hub = case.root / "models--someone--something"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots" / hashlib.sha1(case.folder.name.encode()).hexdigest()
    snapshot.mkdir(parents=True)
    for path in sorted(case.folder.iterdir()):
        if path.is_dir():
            shutil.move(path, snapshot / path.name)
            continue
        data = path.read_bytes()
        is_large = path.suffix in (".safetensors", ".bin", ".pt", ".pth")
        made = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        name = made.hexdigest()
        (hub / "blobs" / name).write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(snapshot.name)
    (hub / "blobs" / f"{'1' * 64}.incomplete").write_bytes(b"half")
    for file in sorted(case.states):
        if case.states[file] == "missing":
            (snapshot / file).symlink_to(f"../../blobs/{'1' * 64}")
    shutil.rmtree(case.folder)
    case.folder = snapshot
    case.did("in a cache of the Hub")


def flip(case):
    """A bit of the last byte of a blob's tensors. None of bool's, which have no byte but 0 and 1."""
    path = case.folder / case.damaged_file()
    if path.suffix != ".safetensors":
        return
    data = bytearray(path.read_bytes())
    if len(data) == 8 + int.from_bytes(data[:8], "little"):
        return
    if any(tensor.dtype == torch.bool for tensor in peers.safetensors_file(path).values()):
        return
    data[-1] ^= 0x10
    path.resolve().write_bytes(data)
    case.flipped = True
    case.did(f"a bit of the blob of {path.name} is flipped")


def open_by_name(case):
    """A file, or the index of a set, instead of the directory; either may be a link."""
    named = {"single": "model.safetensors", "tied": "model.safetensors", "torch_single": "pytorch_model.bin",
             "sharded": "model.safetensors.index.json", "torch_sharded": "pytorch_model.bin.index.json"}
    if case.kind in named:
        case.place = case.folder / named[case.kind]
        case.did(f"opened by the name {named[case.kind]}")
