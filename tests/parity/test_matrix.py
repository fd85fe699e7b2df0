"""Spec F-00 to F-07: every readable kind into every writable kind and back.

Each case converts one golden that PyTorch, safetensors or OLMo's code wrote, and then
- the target is read by its own readers (torch.load, DCP, safetensors, ai2-olmo) and is what `expected.json` says that
  they read in the source,
- `tessera diff` finds no difference to the source,
- the way back to the source's kind finds no difference either, and no other byte where the kind fixes bytes.
What cannot work is listed in REFUSED: one error, nothing left behind.
"""
import ast
import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import zipfile

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor  # DTensors in the files
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

# OLMo 0.6 calls torch.load as it was before 2.6 (OQ-07).
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
TESSERA = os.environ["TESSERA_COMMAND"]
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN / "make"))

from expected import dcp_tree, describe  # noqa: E402  (beside the makers of expected.json)

# special.pt names it.
sys.modules["__main__"].Point = collections.namedtuple("Point", "x y", module="__main__")

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = {
    "dcp": ["--to", "dcp"],
    "dcp-3": ["--to", "dcp", "--ranks", "3"],
    "torch": ["--to", "torch"],
    # The readers below look for every name.
    "safetensors": ["--to", "safetensors", "--keep-duplicates"],
    "safetensors-set": ["--to", "safetensors", "--max-shard-size", "100", "--keep-duplicates"],
    "olmo-full": ["--to", "olmo-full"],
    "olmo-full-safetensors": ["--safetensors"],
    "olmo-torch-new": ["--to", "olmo-torch-new", "--ranks", "2"],
    "olmo-legacy": ["--to", "olmo-legacy", "--ranks", "2"],
    "olmo-local": ["--to", "olmo-local", "--ranks", "2"],
}
SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors"}
OLMO = [name for name in TARGETS if name.startswith("olmo")]
SAFETENSORS = ["safetensors", "safetensors-set"]

# What an OLMo kind makes of a tree, see "Writing" in docs/formats/olmo.md: (name in the source, name in the target).
STATE = []  # model, optim and train already
MODEL = [(r"^", "model.")]
PARTS = [(r"^(?!model\.|optim\.|train\.)", "train.")]
LOOKED_THROUGH = [(r"^app\.", "")]
# The way back, as rules of --rename.
RENAMED = {"MODEL": [r"^model\.=>"], "PARTS": [r"^train\.=>"], "LOOKED_THROUGH": ["^=>app."], "STATE": []}

Source = collections.namedtuple("Source", "path back tree exact", defaults=("STATE", False))
# `back`: the target that is of the source's kind. `exact`: Python wrote the file: read and written, it keeps each byte.
SOURCES = {
    "dcp": Source("checkpoints/c1", "dcp", "PARTS"),
    "dcp-threads": Source("checkpoints/c2_thr", "dcp-3", "MODEL"),
    "dcp-fsdp2": Source("checkpoints/g4_ws2", "dcp-3", "LOOKED_THROUGH"),
    "dcp-fsdp1": Source("checkpoints/fsdp1_uop1_ws4", "dcp-3"),
    "dcp-several-files": Source("variants/c2_multi", "dcp", "MODEL"),
    "dcp-no-collectives": Source("variants/c2_nocoll", "dcp", "MODEL"),
    "dcp-safetensors": Source("variants/c2_st_obj", "dcp", "MODEL"),
    "dcp-zstd": Source("variants/c_zstd", "dcp", "MODEL"),
    "dcp-2d-mesh": Source("variants/m2d", "dcp-3", "MODEL"),
    "dcp-olmo-core": Source("variants/olmo_core", "dcp", "MODEL"),
    "torch": Source("checkpoints/fsdp1_uop1_ws2_model.pt", "torch", "MODEL", True),
    "torch-many": Source("many.pt", "torch", "MODEL", True),
    "torch-state": Source("checkpoints/ranks_fsdp1_ws2_full.pt", "torch", "STATE", True),
    "torch-numbers": Source("checkpoints/ranks_fsdp2_ws2_full.pt", "torch", "STATE", True),
    "torch-objects": Source("torch_variants/special.pt", "torch", "MODEL", True),
    "torch-trainer": Source("checkpoints/w2.pt", "torch", "STATE", True),
    "torch-integer": Source("checkpoints/i7.pt", "torch", "STATE", True),
    "torch-1.6": Source("torch_variants/torch_1_6.pt", "torch", "MODEL"),
    "torch-stream": Source("checkpoints/stream.pt", "torch", "PARTS"),
    "safetensors": Source("dtypes.safetensors", "safetensors", "MODEL", True),
    "safetensors-empty": Source("empty.safetensors", "safetensors"),
    "safetensors-olmo": Source("checkpoints/olmo.safetensors", "safetensors", "MODEL", True),
    "safetensors-index": Source("checkpoints/c2_hf_cons", "safetensors-set", "MODEL"),
    "safetensors-dcp": Source("c2_hf_dist", "safetensors-set", "MODEL"),
    "safetensors-quantized": Source("checkpoints/qz", "safetensors-set", "MODEL"),
    "olmo-full": Source("full", "olmo-full", "STATE", True),
    "olmo-torch-new": Source("new", "olmo-torch-new"),
    "olmo-legacy": Source("checkpoints/fsdp1_uop1_ws4_legacy", "olmo-legacy"),
    "olmo-local": Source("checkpoints/fsdp1_uop1_ws4_local", "olmo-local"),
    "olmo-local-unaligned": Source("checkpoints/fsdp1_uop0_ws2_old_local", "olmo-local"),
    # Rank files are read only; what they hold is what DCP holds.
    "rank-files": Source("checkpoints/ranks_mesh_ws4", "dcp-3", "MODEL"),
    "world-size-files": Source("checkpoints/ranks_fsdp1_ws2", "dcp-3"),
    "world-size-numbers": Source("checkpoints/ranks_fsdp2_ws3", "dcp-3"),
}

CONFIG = GOLDEN / "yaml/config.yaml"

NO_STATE = "mismatch: the checkpoint has no model"
NO_NAMES = "mismatch: parameters have numbers, and the group's param_names do not say what they are"
ONE_TYPE = "unsupported: a flat parameter holds one floating-point type"
ONLY_TENSORS = "unsupported: flat parameters hold tensors only"
REFUSED = {
    # A distributed checkpoint is a dict: PyTorch's loader fails on anything else.
    ("torch-integer", "dcp", "dcp-3"): "mismatch: the checkpoint is an integer, expected a dict of names",
    # An OLMo checkpoint is a model, or a model with the state of its training.
    ("torch-integer", *OLMO): "mismatch: the checkpoint is an integer",
    ("torch-trainer", *OLMO): NO_STATE,
    ("safetensors-empty", *OLMO): NO_STATE,
    # OLMo's state goes by names, these have numbers and say no names.
    ("torch-numbers", *OLMO): NO_NAMES,
    ("world-size-numbers", *OLMO): NO_NAMES,
    # Local checkpoints lay a unit's parameters end to end in one tensor.
    ("dcp", "olmo-local"): ONE_TYPE,
    ("torch-1.6", "olmo-local"): ONE_TYPE,
    ("safetensors", "olmo-local"): ONE_TYPE,
    ("safetensors-olmo", "olmo-local"): ONE_TYPE,
    ("safetensors-quantized", "olmo-local"): ONE_TYPE,
    ("dcp-threads", "olmo-local"): ONLY_TENSORS,
    ("dcp-several-files", "olmo-local"): ONLY_TENSORS,
    ("dcp-no-collectives", "olmo-local"): ONLY_TENSORS,
    ("dcp-safetensors", "olmo-local"): ONLY_TENSORS,
    ("dcp-zstd", "olmo-local"): ONLY_TENSORS,
    ("dcp-olmo-core", "olmo-local"): ONLY_TENSORS,
    ("torch-objects", "olmo-local"): ONLY_TENSORS,
    ("rank-files", "olmo-local"): ONLY_TENSORS,
    # Safetensors has no such element types.
    ("torch-1.6", *SAFETENSORS, "olmo-full-safetensors"): "unsupported: safetensors has no element type for complex128",
    ("torch-objects", *SAFETENSORS): "unsupported: safetensors has no element type for complex32",
    # OLMo puts values that are no tensors into a plain pickle, which has no place for the tensor in one of them.
    ("torch-objects", "olmo-full-safetensors"): "unsupported: a tensor in a plain pickle",
}
# OLMo gathers ranks by operations that torch has not for every tensor.
PEERS_CANNOT = {
    ("safetensors", "olmo-legacy"),  # copying float4
    ("torch-objects", "olmo-legacy"),  # comparing sparse tensors
}
REASONS = {(source, target): reason for (source, *targets), reason in REFUSED.items() for target in targets}
# Each OLMo kind has its own way to list the parameters of a group (numbers or names, FSDP's wrappers or not).
LISTS = re.compile(r"\boptim\.param_groups\.\d+\.(params|param_names)$")


def run(*words):
    return subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=False)


def tessera(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def convert(source, target, name, *more):
    """Into a target of TARGETS. OLMo's safetensors are what `unshard` writes."""
    command = "unshard" if name == "olmo-full-safetensors" else "convert"
    config = ["--config", CONFIG] if name in OLMO else []
    return run(command, source, target, "--quiet", *TARGETS[name], *config, *more)


def assert_same(a, b, olmo):
    """By `tessera diff`; between OLMo kinds lists of parameters may differ, and OLMo chooses the types of its dicts."""
    done = run("diff", a, b, "--json", "--quiet")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert not [d for d in found if not (olmo and (LISTS.search(d["name"]) or d["kind"] == "type"))], found


def named(path, scratch):
    """With the names that olmo-local has numbers for in its optimizer's state."""
    tessera("unshard", path, scratch, "--quiet")
    return scratch


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Checkpoints of OLMo's directory kinds, put together from goldens."""
    root = tmp_path_factory.mktemp("built")
    (root / "full").mkdir()
    for part, golden in (("model", "fsdp1_uop1_ws2_model"), ("optim", "fsdp1_uop1_ws2_optim"), ("train", "w2")):
        torch.save(torch.load(GOLDEN / f"checkpoints/{golden}.pt"), root / f"full/{part}.pt")
    shutil.copy(CONFIG, root / "full/config.yaml")
    shutil.copytree(GOLDEN / "checkpoints/fsdp1_uop1_ws2", root / "new/model_and_optim")
    (root / "new/train").mkdir()
    for rank in (0, 1):  # every rank has its own (L03)
        shutil.copy(GOLDEN / "checkpoints/w2.pt", root / f"new/train/rank{rank}.pt")
    return root


# What is expected --------------------------------------------------------------------------------


def flat(tree):
    return {name: describe(value) for name, value in flatten_state_dict(tree)[0].items()}


EXPECTED = {folder: json.loads((GOLDEN / folder / "expected.json").read_text())
            for folder in ("checkpoints", "variants", "torch_variants")}


def prefixed(prefix, rows):
    return {f"{prefix}.{name}": row for name, row in rows.items()}


def expected_of(source):
    """Name -> what PyTorch reads there. None: a tree without names, or of objects that only `diff` compares."""
    path, checkpoints = SOURCES[source].path, EXPECTED["checkpoints"]
    if source in ("torch-objects", "torch-integer"):
        return None
    if path == "full":
        return {**prefixed("model", checkpoints["fsdp1_uop1_ws2_model.pt"]),
                **prefixed("optim", checkpoints["fsdp1_uop1_ws2_optim.pt"]), **prefixed("train", checkpoints["w2.pt"])}
    if path == "new":
        return {**checkpoints["fsdp1_uop1_ws2"], **prefixed("train", checkpoints["w2.pt"])}
    if source == "dcp-olmo-core":  # torch cannot import its class
        return flat({"w": torch.arange(4.0), "n": 3})
    folder, name = path.rpartition("/")[::2]
    if folder == "torch_variants":
        return EXPECTED[folder][name.removesuffix(".pt")]
    if path in EXPECTED["variants"]:
        return EXPECTED["variants"][path]
    if folder == "checkpoints":
        return checkpoints[name]
    load = safetensors.torch.load_file if path.endswith(".safetensors") else torch.load
    return flat(dict(load(GOLDEN / path)))


def with_names(rows):
    """Optimizer state by numbers, as local checkpoints have it, by names (O-42)."""
    names = {}
    for key, row in rows.items():
        if key.startswith("optim.param_groups.") and key.endswith(".param_names"):
            numbers = rows[key.removesuffix("_names") + "s"]
            names.update(zip(*(ast.literal_eval(value["value"]) for value in (numbers, row))))
    def name_of(match):
        number = int(match[1])
        return "optim.state." + names[number].replace("_fsdp_wrapped_module.", "") + "."
    if not any(isinstance(number, int) for number in names):
        return rows
    return {re.sub(r"^optim\.state\.(\d+)\.", name_of, key): row for key, row in rows.items()}


def in_olmo(source, rows):
    for pattern, prefix in globals()[SOURCES[source].tree]:
        rows = {re.sub(pattern, prefix, name): row for name, row in rows.items()}
    return {name: row for name, row in with_names(rows).items() if not LISTS.search(name)}


# Readers -----------------------------------------------------------------------------------------


def load_dcp(directory):
    return dcp_tree(dcp.FileSystemReader(directory))


def load_set(directory):
    index = directory / "model.safetensors.index.json"
    if not index.exists():  # one file is enough
        return safetensors.torch.load_file(directory / "model.safetensors")
    index = json.loads(index.read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        found = safetensors.torch.load_file(directory / file)
        assert set(found) == {name for name, holder in index["weight_map"].items() if holder == file}
        tensors.update(found)
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    if again and all(t.itemsize > 1 or t.dtype == torch.uint8 for t in again.values()):
        dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(directory), no_dist=True)
        assert flat(again) == flat(tensors)
    return tensors


def checkpointer(name):
    olmo = pytest.importorskip("olmo.checkpoint")
    return getattr(olmo, name)(types.SimpleNamespace(save_overwrite=True), thread_count=2)


def load_parts(directory):
    """The files of a full checkpoint by OLMo's own function."""
    load = pytest.importorskip("olmo.checkpoint").load_state_dict
    tree = {"model": load(directory, "model.pt")}
    if any(directory.glob("optim.*")):
        tree["optim"] = load(directory, "optim.pt")
    if (directory / "train.pt").exists():
        tree["train"] = torch.load(directory / "train.pt")
    return tree


def load_torch_new(directory):
    tree = load_dcp(directory / "model_and_optim")
    if (directory / "train").exists():
        tree["train"] = torch.load(directory / "train/rank1.pt")
    return tree


def load_legacy(directory):
    # What its unshard_checkpoint calls; that one insists on an optimizer.
    tree = checkpointer("TorchLegacyShardedCheckpointer")._unshard(directory, torch.device("cpu"), skip_keys={"rng"})
    parts = {part: tree.pop(part) for part in ("model", "optim") if part in tree}
    return {**parts, "train": tree} if tree else parts


def load_local(directory):
    has = {part: (directory / part).exists() for part in ("optim", "train")}
    model, optim, train = checkpointer("LocalShardedCheckpointer").unshard_checkpoint(
        directory, load_optimizer_state=has["optim"], load_trainer_state=has["train"])
    tree = {"model": model, "train": train}
    if optim is not None:
        names = {name.replace("_fsdp_wrapped_module.", "")
                 for group in optim["param_groups"] for name in group.get("param_names", [])}
        optim["state"] = dict(optim["state"])
        full = checkpointer("FullCheckpointer")
        tree["optim"] = full._make_optim_state_dict_compatible(optim, {name: {name} for name in names})
    return tree


READERS = {
    "dcp": load_dcp,
    "dcp-3": load_dcp,
    "torch": lambda file: torch.load(file, weights_only=False),
    "safetensors": safetensors.torch.load_file,
    "safetensors-set": load_set,
    "olmo-full": load_parts,
    "olmo-full-safetensors": load_parts,
    "olmo-torch-new": load_torch_new,
    "olmo-legacy": load_legacy,
    "olmo-local": load_local,
}


def assert_read_by_its_own_readers(source, target, out):
    tree = READERS[target](out)
    expected = expected_of(source)
    if expected is None or not isinstance(tree, dict):
        return
    if target in SAFETENSORS:
        values = tuple(f"{name}." for name, row in expected.items() if "crc32" not in row)
        expected = {name: row for name, row in expected.items() if "crc32" in row}
        # Tensors inside of values have names that go on from the value's.
        assert {name: describe(tensor) for name, tensor in tree.items() if not name.startswith(values)} == expected
        return
    found = flat({key: value for key, value in tree.items() if value is not None or key not in ("optim", "train")})
    if target in OLMO:
        expected = in_olmo(source, expected)
        found = {name: row for name, row in found.items() if not LISTS.search(name)}
    if target == "olmo-legacy":  # OLMo leaves it out (O-62)
        expected = {name: row for name, row in expected.items() if not name.startswith("train.rng")}
    assert found == expected


# The matrix --------------------------------------------------------------------------------------


def path_of(source, built):
    path = SOURCES[source].path
    return built / path if path in ("full", "new") else GOLDEN / path


def stem_of(path):
    """torch.save's archives are named inside as the file was."""
    return zipfile.ZipFile(path).namelist()[0].partition("/")[0] if zipfile.is_zipfile(path) else "out"


def content(file):
    """What the format fixes: of safetensors all but the header, whose order of keys is free."""
    whole = file.read_bytes()
    return whole[8 + int.from_bytes(whole[:8], "little"):] if file.suffix == ".safetensors" else whole


def assert_same_bytes(a, b):
    files = [(p, b / p.name) for p in a.iterdir()] if a.is_dir() else [(a, b)]
    for mine, yours in files:
        assert content(mine) == content(yours), mine


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_matrix(source, target, built, tmp_path):
    path, row, olmo = path_of(source, built), SOURCES[source], target in OLMO
    out = tmp_path / (stem_of(path) + SUFFIXES.get(target, ""))
    done = convert(path, out, target)
    if (source, target) in REASONS:
        assert done.returncode == 3 and done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if not line.startswith("tessera: warning: ")]
        assert len(lines) == 1 and lines[0].startswith(f"tessera: {REASONS[source, target]}")
        assert not list(tmp_path.iterdir())
        return
    assert done.returncode == 0, done.stderr
    if (source, target) not in PEERS_CANNOT:
        assert_read_by_its_own_readers(source, target, out)
    if row.exact and target == row.back:
        assert_same_bytes(path, out)
    # Names of an OLMo kind that are not the source's are translated on the way back.
    rules = RENAMED[row.tree] if olmo else []
    if target == "olmo-local" or (olmo and row.back == "olmo-local"):
        out = named(out, tmp_path / "named")
    reference = named(path, tmp_path / "reference") if olmo and row.back == "olmo-local" else path
    if not rules:
        assert_same(reference, out, olmo)
    back = tmp_path / ("back" + SUFFIXES.get(row.back, ""))
    done = convert(out, back, row.back, *(word for rule in rules for word in ("--rename", rule)))
    assert done.returncode == 0, done.stderr
    if row.back == "olmo-local":
        back, reference = named(back, tmp_path / "named-back"), named(path, tmp_path / "again")
    assert_same(reference, back, olmo or row.back == "olmo-local")
