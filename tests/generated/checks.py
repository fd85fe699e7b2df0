"""What must hold for a drawn tree: each step compares Tessera with torch and raises a `Failure` that names the step."""
import collections
import json
import pathlib
import random
import re
import shutil
import subprocess
import tempfile

import numpy
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import draws
import values
import worlds

# Targets of `convert`, and what they are written to.
TARGETS = {
    "torch": ("b.pt", []),
    "safetensors": ("b.safetensors", ["--keep-duplicates"]),
    "safetensors-set": ("set", ["--to", "safetensors", "--max-shard-size", "64", "--keep-duplicates"]),
    "dcp": ("dcp", ["--to", "dcp"]),
    "dcp-3": ("dcp3", ["--to", "dcp", "--ranks", "3"]),
}


torch.set_num_threads(1)


class Failure(AssertionError):
    """One kind of failure each, so that several are reduced and reported in one run."""


KINDS = {}


def failure(step, text):
    kind = KINDS.setdefault(step, type(f"Failure_{re.sub(r'[^a-z0-9]+', '_', step)}", (Failure,), {}))
    return kind(f"{step}: {text}")


class Tools:
    """The command under test, and a folder for the files of one case."""

    def __init__(self, command, layouts=None):
        # They run in another folder.
        self.command = pathlib.Path(command).resolve(strict=True)
        self.layouts = layouts and pathlib.Path(layouts).resolve(strict=True)
        self.outcomes = collections.Counter()
        self.without = draws.KNOWN
        base = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="generated-", dir=base))
        self.root = self.home / "case"
        self.root.mkdir()

    def fresh(self):
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self.root

    def close(self):
        shutil.rmtree(self.home)

    def run(self, *arguments):
        done = subprocess.run([self.command, *map(str, arguments)], capture_output=True, cwd=self.root, timeout=60)
        if done.returncode < 0 or b"Sanitizer" in done.stderr:
            raise failure(f"{arguments[0]} crashes", f"{done.returncode} {done.stderr.decode(errors='replace')[-600:]}")
        return done


class Refused(Exception):
    """A refusal that is documented for what the case holds."""


def run_or_refuse(tools, allowed, *arguments):
    """The output of a command that must work, or be refused for one of `allowed`."""
    done = tools.run(*arguments)
    if done.returncode == 0:
        return done.stdout
    text = done.stderr.decode(errors="replace").strip()
    # What cannot be read does not verify either: that is its answer "no".
    if (done.returncode == 3 or arguments[0] == "verify" and done.returncode == 1) and allowed(text):
        raise Refused(text)
    step = f"{arguments[0]} {re.sub('[^a-z_]+', ' ', text.split('[')[0])[:70]}"
    said = done.stdout.decode(errors="replace")[:300]
    raise failure(step, f"{' '.join(map(str, arguments))}: exit {done.returncode}: {text} {said}")


def torch_load(path):
    return torch.load(path, weights_only=False)


def dcp_load(path):
    """A DCP checkpoint as torch makes a tree of it by itself, and the gradients that its `.metadata` asks for, which
    torch's loader passes over. Torch has no tensor of a type without a storage class that needs one, but Parameters."""
    tree = {}
    reader = dcp.FileSystemReader(path)
    _load_state_dict(tree, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    metadata = reader.read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        properties = getattr(entry, "properties", None)
        if properties and properties.requires_grad and properties.dtype in torch.storage._dtype_to_storage_type_map():
            tensor = tree
            for step in metadata.planner_data[name]:
                tensor = tensor[step]
            tensor.requires_grad_()
    return tree


def dcp_save(tree, path):
    dcp.save(tree, checkpoint_id=path, no_dist=True)


def check_tree(case, tools):
    """A tree that torch.save wrote, to each kind of the case and back."""
    folder = tools.fresh()
    try:
        torch.save(case.value(), folder / "a.pt")
        want = torch_load(folder / "a.pt")
    except (RuntimeError, NotImplementedError, AttributeError, UnicodeError):
        return "torch refuses"
    allowed = lambda text: refusal_is_documented(text, want)  # noqa: E731
    for step in case.more.get("steps", ()):
        run_step(STEPS, step, tools, folder, want, allowed, case)
    return "checked"


def run_step(steps, step, tools, folder, want, allowed, case):
    world = "world " if "mesh" in case.more else ""
    try:
        tools.outcomes[f"{world}{step}: {steps[step](tools, folder, want, allowed, case) or 'done'}"] += 1
    except Refused:
        tools.outcomes[f"{world}{step}: refused as documented"] += 1


def check_world(case, tools):
    """What several ranks saved with torch, to other kinds and back."""
    folder = tools.fresh()
    try:
        worlds.save_dcp(case, folder / "a")
        want = dcp_load(folder / "a")
    except (Exception, CheckpointException):  # noqa: BLE001
        return "torch refuses"
    # torch loads one of two leaves that get one path, of 0 beside "0".
    allowed = lambda text: refusal_is_documented(text, want) or (  # noqa: E731
        text.startswith("tessera: conflict: the path of this leaf runs through") and has_clashing_keys(case.value()))
    for step in case.more["steps"]:
        run_step(WORLD_STEPS, step, tools, folder, want, allowed, case)
    return "checked"


def check_world_torch(tools, folder, want, allowed, case):
    run_or_refuse(tools, allowed, "verify", "a")
    run_or_refuse(tools, allowed, "convert", "a", "b.pt", *how(case))
    if found := values.difference(want, torch_load(folder / "b.pt")):
        raise failure("dcp to torch", found)
    if is_part_of_a_rank(tools, case, "b.pt"):
        return "one rank's part inside of a tuple"
    run_or_refuse(tools, allowed, "diff", "a", "b.pt")
    return None


def check_world_target(name):
    def check(tools, folder, want, allowed, case):
        target, options = TARGETS[name]
        run_or_refuse(tools, allowed, "convert", "a", target, *options, *how(case))
        run_or_refuse(tools, allowed, "verify", target)
        run_or_refuse(tools, allowed, "diff", "a", target)
        if name.startswith("dcp"):
            if found := values.difference(want, dcp_load(folder / target)):
                raise failure("dcp to dcp", found)
        else:
            check_safetensors(folder / target, want)
        run_or_refuse(tools, allowed, "convert", target, "back.pt")
        if found := values.difference(want, torch_load(folder / "back.pt")):
            raise failure(f"dcp to {name.split('-')[0]} to torch", found)
        (folder / "back.pt").unlink()
    return check


def sharded_inside(value, inside=False):
    """Whether a tuple or an object holds what is sharded: it is a value of its own in every rank's file."""
    if type(value) is worlds.Marked:
        return inside
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        return any(sharded_inside(item, inside) for item in items)
    items = value if isinstance(value, tuple) else vars(value).values() if isinstance(value, values.Box) else ()
    return any(sharded_inside(item, True) for item in items)


def is_part_of_a_rank(tools, case, file):
    """Whether torch's file of a world is a file of one rank: a rank's part of a tensor inside a tuple makes it that, and
    it says so. In a DCP checkpoint that is a value as any other, so the two have no common form to be compared in."""
    if "mesh" not in case.more or not sharded_inside(worlds.marked(case)):
        return False
    done = tools.run("ls", file)
    if done.returncode == 0:  # this rank's part is all of it
        return False
    text = done.stderr.decode(errors="replace")
    if done.returncode != 3 or not text.startswith("tessera: incomplete: one rank's part") or "--part" not in text:
        raise failure("a rank's part is not named", f"exit {done.returncode}: {text}")
    return True


def check_rank_files(tools, folder, want, allowed, case):
    if sharded_inside(worlds.marked(case)):
        return "sharded inside of a tuple"
    allowed = lambda text: refusal_is_documented(text, case.value())  # noqa: E731  the keys are no names here
    try:
        worlds.save_rank_files(case, folder / "ranks")
    except (Exception, CheckpointException):  # noqa: BLE001
        return "torch refuses"
    run_or_refuse(tools, allowed, "verify", "ranks")
    run_or_refuse(tools, allowed, "convert", "ranks", "r.pt")
    tree = case.value()
    if isinstance(tree.get("model"), dict):  # OLMo's legacy form: docs/formats/rank-files.md
        tree = as_training(tree)
    if found := values.difference(in_order(tree), in_order(torch_load(folder / "r.pt"))):
        raise failure("rank files to torch", found)


def by_name(tree):
    """A training with its optimizer's state and groups by names, as `olmo-local` has them by numbers."""
    for group in tree.get("optim", {}).get("param_groups", []):
        if "param_names" in group:
            names = dict(zip(group["params"], group.pop("param_names")))
            group["params"] = list(names.values())
            state = tree["optim"]["state"]
            for number, name in names.items():
                if number in state:
                    state[name] = state.pop(number)
    return tree


def as_training(tree):
    """The same with the trainer's values below "train"."""
    rest = dict(tree)
    parts = {part: rest.pop(part) for part in ("model", "optim") if part in rest}
    return {**parts, "train": rest} if rest else parts


def in_order(tree):
    """The same with sorted dicts: ranks put together what units divide, in their order."""
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=str)}
    return [in_order(item) for item in tree] if type(tree) is list else tree


def check_training(case, tools):
    """A model and its optimizer, to a kind of OLMo's and back."""
    folder = tools.fresh()
    torch.save(case.value(), folder / "a.pt")
    want = torch_load(folder / "a.pt")
    allowed = lambda text: refusal_is_documented(text, want)  # noqa: E731
    kind = case.more["olmo"][1]
    try:
        run_or_refuse(tools, allowed, "convert", "a.pt", "olmo", *case.more["olmo"])
        run_or_refuse(tools, allowed, "verify", "olmo")
        run_or_refuse(tools, allowed, "convert", "olmo", "back.pt")
        run_or_refuse(tools, allowed, "diff", "olmo", "back.pt")
    except Refused:
        tools.outcomes[f"{kind}: refused as documented"] += 1
        return "checked"
    got = by_name(torch_load(folder / "back.pt"))
    want = by_name(as_training(want))
    if kind == "olmo-local":  # what has no elements may lose its state, which no rank holds: docs/formats/olmo.md
        for name, tensor in want["model"].items():
            if tensor.numel() == 0:
                want.get("optim", {}).get("state", {}).pop(name, None)
                got.get("optim", {}).get("state", {}).pop(name, None)
    if "--no-orig-params" in case.more["olmo"]:  # parameters come in the order of units, all of a unit with state
        state = want.get("optim", {}).get("state", {})
        for name in [name for name in got.get("optim", {}).get("state", {}) if name not in state]:
            del got["optim"]["state"][name]
        for group in [*want.get("optim", {}).get("param_groups", []), *got.get("optim", {}).get("param_groups", [])]:
            group["params"].sort()
    if found := values.difference(in_order(want), in_order(got)):
        raise failure(f"{kind} and back", found)
    tools.outcomes[f"{kind}: done"] += 1
    return "checked"


def check_torch(tools, folder, want, allowed, case):
    run_or_refuse(tools, allowed, "verify", "a.pt")
    run_or_refuse(tools, allowed, "convert", "a.pt", "b.pt", *how(case))
    if found := values.difference(want, torch_load(folder / "b.pt"), exact=True):
        raise failure("torch to torch", found)
    run_or_refuse(tools, allowed, "diff", "a.pt", "b.pt")


def how(case):
    """Options that must not matter."""
    draw = random.Random(case.more["seed"])
    threads = draw.choice([[], ["--threads", "1"], ["--threads", "4"]])
    return [*threads, *draw.choice([[], [], ["--memory", "1MiB"], ["--resume"]])]


def check_target(name):
    def check(tools, folder, want, allowed, case):
        target, options = TARGETS[name]
        run_or_refuse(tools, allowed, "convert", "a.pt", target, *options, *how(case))
        path = folder / target
        run_or_refuse(tools, allowed, "verify", target)
        run_or_refuse(tools, allowed, "diff", "a.pt", target)
        (check_dcp if name.startswith("dcp") else check_safetensors)(path, want)
        run_or_refuse(tools, allowed, "convert", target, "back.pt")
        if found := values.difference(want, torch_load(folder / "back.pt")):
            raise failure(f"{name.split('-')[0]} and back", found)
        (folder / "back.pt").unlink()
    return check


def filled(tree):
    """The same with a value in the place of every empty dict, which has a name too, though not to torch."""
    def item_of(item):
        return 0 if isinstance(item, dict) and not item else filled(item)

    if isinstance(tree, dict):
        return {key: item_of(item) for key, item in tree.items()}
    return [item_of(item) for item in tree] if type(tree) is list else tree


def flat(tree):
    """Names and tensors as torch names them; None where names of leaves clash."""
    try:
        names = flatten_state_dict(filled(tree))[0]
    except ValueError:
        return None
    return {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}


def has_clashing_keys(value):
    """Whether a dict has two keys that DCP writes alike."""
    if isinstance(value, dict):
        return len(set(map(str, value))) < len(value) or any(map(has_clashing_keys, value.values()))
    return type(value) is list and any(map(has_clashing_keys, value))


def has_nan_key(value):
    """Whether a dict has NaN as a key, wherever it is."""
    if isinstance(value, dict):
        return any(key != key for key in value) or any(map(has_nan_key, value.values()))
    items = value if isinstance(value, (list, tuple)) else vars(value).values() if isinstance(value, values.Box) else ()
    return any(map(has_nan_key, items))


def elements_differ(tensor, raw, cast):
    """Whether `raw` is other than the tensor's elements; after a cast all NaNs are one."""
    want = values.bits(tensor)
    if want == raw or not cast or len(want) != len(raw):
        return want != raw
    # A complex number is two real ones.
    dtype = tensor.dtype.to_real() if tensor.dtype.is_complex else tensor.dtype
    got = torch.frombuffer(bytearray(raw), dtype=dtype)
    tensor = torch.frombuffer(bytearray(want), dtype=dtype)
    return not bool(((got == tensor) & (got.signbit() == tensor.signbit()) | got.isnan() & tensor.isnan()).all())


def check_layouts(tools, folder, want, allowed, case):
    """Into random layouts on random ranks, and saved from others."""
    tensors = flat(want)
    if tensors is None or "mesh" in case.more and has_clashing_keys(case.value()):
        return "names clash"
    source = "a" if "mesh" in case.more else "a.pt"
    done = subprocess.run([tools.layouts, source, str(case.more["seed"]), "pieces", "saved"], capture_output=True,
                          cwd=folder, timeout=60)
    text = done.stderr.decode(errors="replace").strip()
    if done.returncode == 3 and allowed(f"tessera: {text}"):
        raise Refused
    if done.returncode != 0:
        raise failure(f"layouts {re.sub('[^a-z_]+', ' ', text.split('[')[0])[:70]}", f"exit {done.returncode}: {text}")
    raw, at = (folder / "pieces").read_bytes(), 0
    for line in done.stdout.decode().split("\n")[:-1]:  # names may hold what else Python takes for the end of a line
        piece = json.loads(line)
        tensor = values.resolved(tensors[piece["name"]])
        stored, tensor = tensor.dtype, tensor.to(values.dtype_of(piece["dtype"]))
        if "range" in piece:
            tensor = tensor.reshape(-1)[slice(*piece["range"])]
        else:
            tensor = tensor[tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["sizes"]))]
        size = tensor.numel() * tensor.dtype.itemsize
        if elements_differ(tensor, raw[at : at + size], tensor.dtype != stored):
            raise failure("loaded into another layout", f"{piece} of {values.describe_tensor(tensors[piece['name']])}")
        at += size
    saved = dcp_load(folder / "saved")
    for name, tensor in saved.items():
        if found := values.difference(values.resolved(tensors[name]), tensor):
            raise failure("saved from another layout", f"{name!r}{found}")
    run_or_refuse(tools, allowed, "verify", "saved")


def parsed(text, dtype):
    """An element as `cat` prints it, as bytes."""
    if isinstance(text, str) and text.startswith("0x"):
        return int(text, 16).to_bytes(dtype.itemsize, "little")
    if dtype == torch.bool:
        return bytes([{"True": True, "False": False, True: True, False: False}[text]])
    number = complex(text) if dtype.is_complex else float(text) if dtype.is_floating_point else int(text)
    return values.bits(torch.tensor(number, dtype=dtype))


def prints(texts, elements):
    try:
        return len(texts) == elements.numel() and not any(
            elements_differ(element, parsed(text, elements.dtype), cast=True)
            for element, text in zip(elements, texts))
    except (ValueError, KeyError):
        return False


def sliced(tensor, draw):
    """A slice as `cat` takes it, or none, and the part of the tensor."""
    if tensor.dim() == 0 or draw.randrange(2):
        return "", tensor
    index = [sorted(draw.choices(range(-size, size + 1), k=2)) for size in tensor.shape]
    return f"[{','.join(f'{a}:{b}' for a, b in index)}]", tensor[tuple(slice(a, b) for a, b in index)]


def check_cat(tools, folder, want, allowed, case):
    """Elements of slices as text, as JSON and as .npy."""
    draw = random.Random(case.more["seed"])
    source = "a" if "mesh" in case.more else "a.pt"
    for name, tensor in (flat(want) or {}).items():
        slices, part = sliced(tensor, draw)
        if "\0" in name or draw.randrange(4) == 0 or part.numel() > 500:
            continue
        elements = values.resolved(part).reshape(-1)
        lines = run_or_refuse(tools, allowed, "cat", "--", source, name + slices).decode().split()
        if not prints(lines, elements):
            raise failure("cat prints others", f"{name + slices!r}: {lines!s:.200} of {part}")
        entry = json.loads(run_or_refuse(tools, allowed, "cat", "--json", "--", source, name + slices))["values"]
        if not prints(entry, elements):
            raise failure("cat prints others as JSON", f"{name + slices!r}: {entry!s:.200} of {part}")
        run_or_refuse(tools, allowed, "cat", "--npy", "x.npy", "--", source, name + slices)
        array = numpy.load(folder / "x.npy")
        (folder / "x.npy").unlink()
        elements = elements.float() if part.dtype == torch.bfloat16 else elements
        if array.shape != tuple(part.shape) or array.tobytes() != values.bits(elements):
            raise failure("cat writes others as .npy", f"{name + slices!r}: {array!r:.200} of {part}")


def slots(tree):
    """Every place of the tree whose value can be replaced."""
    if isinstance(tree, (dict, list)):
        for key, item in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            yield tree, key, item
            yield from slots(item)


def other_than(value):
    """A value that differs, a little; the same object when there is none."""
    if isinstance(value, torch.Tensor) and value.numel() > 0 and not value.is_quantized:
        raw = bytearray(values.bits(value))
        raw[-1] ^= 1
        return torch.frombuffer(raw, dtype=torch.uint8).view(value.dtype).view(value.shape)
    if type(value) in (bool, int):
        return value - 1 if type(value) is int else not value
    if type(value) in (str, bytes):
        return value + value[:1] if value else value
    if type(value) is float and value == value:
        return -value
    return value


def check_diff(tools, folder, want, allowed, case):
    """One leaf is changed: diff says so."""
    source = "a" if "mesh" in case.more else "a.pt"
    places = [(parent, key, value) for parent, key, value in slots(want) if other_than(value) is not value]
    if not places:
        return "nothing to change"
    parent, key, value = random.Random(case.more["seed"]).choice(places)
    parent[key] = other_than(value)
    torch.save(want, folder / "changed.pt")
    parent[key] = value
    if is_part_of_a_rank(tools, case, "changed.pt"):
        return "one rank's part inside of a tuple"
    for pair in ((source, "changed.pt"), ("changed.pt", source)):
        done = tools.run("diff", *pair)
        if done.returncode == 3 and allowed(done.stderr.decode(errors="replace")):
            raise Refused
        if done.returncode != 1:
            text = f"{key!r}: {value!r:.100} became {other_than(value)!r:.100}: {done.stderr!r}"
            raise failure("diff passes over a change", text)


def check_safetensors(path, want):
    got = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        got.update(safetensors.deserialize(file.read_bytes()))
    tensors = flat(want)
    if tensors is None:
        return
    for name, tensor in tensors.items():
        if name not in got:
            raise failure("safetensors lacks a tensor", f"{name!r} of {list(got)}")
        entry = got[name]
        shape = list(tensor.shape)
        if entry["dtype"] == "F4":  # counts values, two a byte
            shape[-1] *= 2
        if list(entry["shape"]) != shape or bytes(entry["data"]) != values.bits(tensor):
            raise failure("safetensors holds others", f"{name!r}: {entry['dtype']} {entry['shape']}")


def check_dcp(path, want):
    """torch reads it as it reads what it saves of the same tree."""
    try:
        dcp_save(values.with_signs(want), path.parent / "theirs")
        theirs = dcp_load(path.parent / "theirs")
    except (Exception, CheckpointException):  # noqa: BLE001  torch has no closed set of errors
        shutil.rmtree(path.parent / "theirs", ignore_errors=True)
        return
    shutil.rmtree(path.parent / "theirs")
    try:
        ours = dcp_load(path)
    except (Exception, CheckpointException) as error:  # noqa: BLE001
        raise failure("torch cannot load our dcp", repr(error)[:300]) from None
    if found := values.difference(theirs, ours):
        raise failure("torch loads another tree from our dcp", found)


SHARED_STEPS = {"layouts": check_layouts, "cat": check_cat, "diff": check_diff}
WORLD_STEPS = {**SHARED_STEPS, "torch": check_world_torch, "ranks": check_rank_files,
               **{name: check_world_target(name) for name in TARGETS if name != "torch"}}
STEPS = {**SHARED_STEPS, "torch": check_torch, **{name: check_target(name) for name in TARGETS if name != "torch"}}


def dtypes(tree):
    return {str(tensor.dtype)[6:] for _, tensor in values.leaves(tree)}


FLOATING = {"float32", "float64", "float16", "bfloat16"}
# What may be refused, the reason as a pattern, and whether the tree is such a one. Each is documented: docs/formats.
REFUSALS = [
    # docs/formats/safetensors.md
    (r"unsupported: safetensors has no element type for (complex128|complex32)",
     lambda tree, found: found[1] in dtypes(tree)),
    (r"unsupported: safetensors has no F4 scalar", lambda tree, found: "float4_e2m1fn_x2" in dtypes(tree)),
    (r"unsupported: a name that safetensors reserves", lambda tree, found: "__metadata__" in (flat(tree) or {})),
    # docs/formats/olmo.md
    (r"unsupported: a flat parameter holds one floating-point type",
     lambda tree, found: len(dtypes(tree)) > 1 or dtypes(tree) - FLOATING),
    (r"unsupported: parameters of one flat parameter are in two groups",
     lambda tree, found: len(tree["optim"]["param_groups"]) == 2),
    (r"mismatch: parameters of one flat parameter differ in 'step'",
     lambda tree, found: len(tree["optim"]["state"]) > 1),
    # docs/formats/torch-save.md
    (r"unsupported: NaN as a key of a dict", lambda tree, found: has_nan_key(tree)),
    # docs/formats/safetensors.md
    (r"conflict: two leaves of the tree would have this name; torch files alone can hold both",
     lambda tree, found: flat(tree) is None),
]


def refusal_is_documented(text, tree):
    return any((found := re.match("tessera: " + pattern, text)) and holds(tree, found) for pattern, holds in REFUSALS)


def check(case, tools):
    if "olmo" in case.more:
        return check_training(case, tools)
    return (check_world if "mesh" in case.more else check_tree)(case, tools)
