"""Kinds of checkpoints in directories as people have them: each function makes one in the folder of a `Case`, and says
which program reads it. What docs/guide/what-is-in-a-directory.md says of a file or an option is declared where the file
is made; beside.py has what lies beside a checkpoint, mishaps.py what happened to it."""
import dataclasses
import json
import pathlib
import random
from collections.abc import Callable

import safetensors.torch
import torch

import peers
import values
import worlds

DTYPES = ("float32", "float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool")


@dataclasses.dataclass
class Case:
    rng: random.Random
    root: pathlib.Path  # of the folders of this case
    folder: pathlib.Path  # in which the checkpoint is made
    kind: str = ""  # of checkpoint, a function of this module
    place: pathlib.Path = None  # what is opened
    read: Callable = None  # by the peer: (folder, names or None)
    want: dict = None  # what the peer reads before anything is damaged
    drawn: list = dataclasses.field(default_factory=list)  # what was done, for people
    needs: set = dataclasses.field(default_factory=set)  # options that an error has to name, then it works
    meant: str = None  # which file of a conflict is opened
    fatal: str = ""  # the code of a refusal for good
    told: list = dataclasses.field(default_factory=list)  # what that refusal has to name
    notes: list = dataclasses.field(default_factory=list)  # what warnings have to name
    states: dict = dataclasses.field(default_factory=dict)  # of files, as the table has to have them
    extra: dict = dataclasses.field(default_factory=dict)  # what is read that the peer passes over, with a warning
    extra_in: dict = dataclasses.field(default_factory=dict)  # by name: its file
    overlaid: dict = dataclasses.field(default_factory=dict)  # by file: what it has of older tensors
    missing: bool = False  # files are: `here` is what can be read
    here: list = None
    rank: int = 0
    flipped: bool = False  # verify finds a fault
    shards: dict = None  # the files that are read, and the names in each where these are known

    def did(self, text):
        self.drawn.append(text)

    def write(self, name, tensors, metadata=None):
        safetensors.torch.save_file(tensors, self.folder / name, metadata or self.rng.choice([None, {"format": "pt"}]))

    def rewrite(self, name, added):
        """The file with more tensors, or newer ones, and its metadata."""
        with safetensors.safe_open(self.folder / name, "pt") as file:
            metadata = file.metadata()
        self.write(name, {**peers.safetensors_file(self.folder / name), **added}, metadata)

    def text(self, name, text="{}"):
        (self.folder / name).write_text(text)

    def index(self, name, file_of):
        self.text(name, json.dumps({"metadata": {}, "weight_map": file_of}))

    def is_stale(self):
        """Whether an index names none of the files, without which their numbers would say what there is."""
        return self.kind == "unindexed" and "stale_index" in self.drawn

    def tell(self, file):
        """What is damaged is named. An index of nothing is said first."""
        if not self.is_stale():
            self.told.append(file)

    def damaged_file(self):
        return self.rng.choice(sorted(self.shards))


def tensor(rng, dtype=None):
    shape = [rng.randint(1, 6) if rng.random() < 0.95 else 0 for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    return values.t(dtype or rng.choice(DTYPES), shape, rng.randrange(10**6))


def model(rng):
    layers = rng.randint(1, 4)
    names = ["embed.weight", "norm.weight"] + [f"layers.{i}.{part}" for i in range(layers) for part in ("w", "b")]
    return {name: tensor(rng) for name in rng.sample(names, rng.randint(2, len(names)))}


def divided(rng, tensors, count):
    """Names in `count` files, none of them empty."""
    names = list(tensors)
    rng.shuffle(names)
    count = min(count, len(names))
    cuts = sorted(rng.sample(range(1, len(names)), count - 1))
    return [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)])]


# Kinds of checkpoints.


def single(case):
    case.write("model.safetensors", model(case.rng))
    case.read = peers.transformers
    case.shards = {"model.safetensors": None}


def other_name(case):
    name = case.rng.choice(("diffusion_pytorch_model", "consolidated", "adapter_model", "model.fp16", "weights", "ema"))
    case.write(f"{name}.safetensors", model(case.rng))
    case.did(f"alone: {name}.safetensors")
    case.read = lambda folder, names: peers.safetensors_file(folder / f"{name}.safetensors", names)
    case.shards = {f"{name}.safetensors": None}


def write_shards(case, stem, end, write):
    tensors = model(case.rng)
    parts = divided(case.rng, tensors, case.rng.randint(1, 4))
    case.shards = {}
    for i, names in enumerate(parts):
        file = f"{stem}-{i + 1:05}-of-{len(parts):05}{end}"
        write(file, {name: tensors[name] for name in names})
        case.shards[file] = names
    return {name: file for file, names in case.shards.items() for name in names}


def sharded(case):
    file_of = write_shards(case, "model", ".safetensors", case.write)
    case.index("model.safetensors.index.json", file_of)
    case.read = peers.transformers


def variants(case):
    """As diffusers keeps a model in two precisions; it reads the one without a word in its name."""
    tensors = model(case.rng)
    case.write("diffusion_pytorch_model.safetensors", tensors)
    halves = {name: values.t("float16", tensor.shape) for name, tensor in tensors.items()}
    case.write("diffusion_pytorch_model.fp16.safetensors", halves)
    case.read = lambda folder, names: peers.safetensors_file(folder / "diffusion_pytorch_model.safetensors", names)
    case.shards = {"diffusion_pytorch_model.safetensors": None}
    case.needs.add("open")
    case.meant = "diffusion_pytorch_model.safetensors"


def unindexed(case):
    write_shards(case, "model", ".safetensors", case.write)
    case.read = lambda folder, names: peers.each_file(sorted(folder.glob("model-*.safetensors")), names)


def torch_single(case):
    tree = {**model(case.rng), "extra": {"step": case.rng.randrange(99), "scale": tensor(case.rng)}}
    torch.save(tree, case.folder / "pytorch_model.bin")
    case.read = peers.transformers
    case.shards = {"pytorch_model.bin": None}


def torch_sharded(case):
    file_of = write_shards(case, "pytorch_model", ".bin", lambda file, part: torch.save(part, case.folder / file))
    case.index("pytorch_model.bin.index.json", file_of)
    case.read = peers.transformers


def mistral(case):
    """consolidated-*.safetensors with their index."""
    file_of = write_shards(case, "consolidated", ".safetensors", case.write)
    case.index("consolidated.safetensors.index.json", file_of)
    case.read = lambda folder, names: peers.indexed(
        folder / "consolidated.safetensors.index.json", peers.safetensors_file, names
    )


def mistral_beside_model(case):
    """As in repositories of Mistral, whose transformers' form comes first."""
    mistral(case)
    case.states = {file: "not part of it" for file in case.shards}
    single(case)


def adapter_beside_torch(case):
    case.write("adapter_model.safetensors", model(case.rng))
    case.states["adapter_model.safetensors"] = "not part of it"
    torch_single(case)


def adapter_alone(case):
    """As peft reads it."""
    torch.save(model(case.rng), case.folder / "adapter_model.bin")
    case.read = lambda folder, names: peers.torch_file(folder / "adapter_model.bin", names)
    case.shards = {"adapter_model.bin": None}


def tied(case):
    """What `save_model` of safetensors leaves: one tensor, and its other names in the metadata."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.norm = torch.nn.Linear(3, 3)
            self.lm_head = torch.nn.Linear(3, 5, bias=False)
            self.lm_head.weight = self.embed.weight

    made = Tied()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(values.t("float32", parameter.shape, case.rng.randrange(10**6)))
    safetensors.torch.save_model(made, case.folder / "model.safetensors")

    def read(folder, names):
        other = Tied()
        safetensors.torch.load_model(other, folder / "model.safetensors")
        return peers.chosen({name: tensor.detach() for name, tensor in other.state_dict().items()}, names)

    case.read = read
    case.shards = {"model.safetensors": None}


def vllm(case):
    ranks = case.rng.randint(1, 3)
    tensors = model(case.rng)
    parts = divided(case.rng, tensors, case.rng.randint(1, 3))
    for rank in range(ranks):
        for i, names in enumerate(parts):
            own = {name: tensor(case.rng, "float16") for name in names}
            case.write(f"model-rank-{rank}-part-{i}.safetensors", own)
    case.rank = case.rng.randrange(ranks)
    case.needs.add("--rank")
    case.shards = {f"model-rank-{case.rank}-part-{i}.safetensors": names for i, names in enumerate(parts)}
    for rank in set(range(ranks)) - {case.rank}:
        case.states.update({f"model-rank-{rank}-part-{i}.safetensors": "not part of it" for i in range(len(parts))})
    case.read = lambda folder, names: peers.each_file([folder / file for file in case.shards], names)


class World:
    """What `worlds.save_dcp` saves: some of it cut over ranks, the rest on whichever rank its planner chooses."""

    def __init__(self, ranks, tree, cut):
        self.more = {"mesh": (ranks,)}
        self.tree = tree
        self.cut = cut

    def value(self):
        made = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.tree.items()}
        made.update({name: values.sharded(tensor.clone(), 0) for name, tensor in self.cut.items()})
        return {"model": made}


def dcp(case):
    ranks = case.rng.choice((1, 2, 2, 3))
    cut = {
        f"cut{i}": values.t("float32", (case.rng.randint(1, 7), 2), case.rng.randrange(10**6))
        for i in range(case.rng.randint(0, 2))
    }
    worlds.save_dcp(World(ranks, {**model(case.rng), "step": case.rng.randrange(99)}, cut), case.folder)
    case.read = peers.dcp_directory
    case.shards = {path.name: None for path in case.folder.glob("*.distcp")}


# Those that people have most come twice.
KINDS = (
    single,
    other_name,
    sharded,
    sharded,
    unindexed,
    torch_single,
    torch_sharded,
    torch_sharded,
    mistral,
    tied,
    vllm,
    variants,
    dcp,
    dcp,
    mistral_beside_model,
    adapter_beside_torch,
    adapter_alone,
)
