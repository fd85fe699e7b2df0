"""Compares what the command and the package make of a drawn directory with what its peer reads."""
import json
import re
import warnings

import numpy
import safetensors.torch
import torch

import checks
import peers
from checks import failure

try:
    import tessera
except ImportError:  # a build without it: the command alone
    tessera = None

# What goes on after a refusal, as its text says it.
ADVICE = re.compile(
    r"--partial|--ignore-index|--accept trailing-bytes|--rank R|open the (?:file or the index|one)|conflict: the tensor"
)
WITH_TENSORS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
READERS = {
    "out.pt": (peers.torch_file, []),
    "out.safetensors": (peers.safetensors_file, ["--keep-duplicates"]),
    "out": (peers.dcp_directory, ["--to", "dcp"]),
}


class Way:
    """How the place is opened: it begins with no option and takes those that refusals name."""

    def __init__(self, case):
        self.case = case
        self.place = case.place
        self.options = []
        self.taken = set()
        self.target = None  # of the conversion

    def follow(self, text):
        """Whether the refusal says how to go on, in a way that was not gone yet."""
        found = ADVICE.search(text)
        words = found.group().replace("conflict: the tensor", "open").split() if found else [""]
        if not found or words[0] in self.taken:
            return False
        self.taken.add(words[0])
        if words[0] == "open":
            self.place = self.case.place / (self.case.meant or "")
        else:
            self.options += [str(self.case.rank) if word == "R" else word for word in words]
        return True

    def keywords(self):
        known = {"--partial": {"partial": True}, "--ignore-index": {"ignore_index": True},
                 "--rank": {"rank": self.case.rank}, "--accept": {"accept": ["trailing-bytes"]}}
        return {key: value for word in self.taken if word in known for key, value in known[word].items()}

    def but(self, option):
        """The options without one."""
        return [word for word in self.options if word != option]


def text_of(done):
    return done.stderr.decode(errors="replace").strip()


def last_line(done):
    return text_of(done).splitlines()[-1] if text_of(done) else ""


def compare(step, want, found):
    for name in sorted(want.keys() | found.keys()):
        if name not in found:
            raise failure(f"{step} lacks what the peer reads", name)
        if name not in want:
            raise failure(f"{step} has what nobody knows of", name)
        if not peers.same(want[name], found[name]):
            raise failure(f"{step} differs", f"{name}: {found[name]!r}, expected {want[name]!r}")


def tensors_of(leaves):
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def convert(case, tools, way):
    """Reads everything, by the options that refusals name; answers what there is then, or the refusal."""
    target = case.rng.choice(sorted(READERS))
    while True:
        done = tools.run("convert", "--quiet", way.place, case.root / target, *READERS[target][1], *way.options)
        if done.returncode == 0:
            way.target = case.root / target
            return READERS[target][0](way.target, None), ""
        if not way.follow(last_line(done)):
            return None, last_line(done)


def judge_refusal(case, tools, way, refusal):
    code = refusal.removeprefix("tessera: ").split(":")[0]
    if not case.fatal:
        kind = "false refusal" if peers.reads(case.read, case.folder, None) else "refusal without an option"
        raise failure(kind, f"{refusal} after {sorted(way.taken)}")
    if peers.reads(case.read, case.folder, None):
        raise failure("false refusal", f"the peer reads all of it: {refusal}")
    if case.fatal not in ("any", code):
        raise failure("another code", f"{refusal}, expected {case.fatal}")
    for name in case.told:
        if name not in refusal and (case.folder / name).resolve().name not in refusal:
            raise failure("a refusal does not name a file", f"{name}: {refusal}")
    if tools.run("verify", "--quiet", way.place, *way.options).returncode != 1:
        raise failure("verify passes what is refused", refusal)
    return "refused for good"


def wanted(case):
    """What is read in the end."""
    here = case.want if case.here is None else {name: case.want[name] for name in case.here}
    return {**here, **case.extra}


def judge_list(tools, way, want):
    done = tools.run("ls", "--json", way.place, *way.options)
    listed = {row["name"]: (row["dtype"], row["shape"]) for row in json.loads(done.stdout) if "dtype" in row}
    expected = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors_of(want).items()}
    if listed != expected:
        raise failure("ls differs", f"{listed}, expected {expected}")


def judge_table(case, tools, way):
    """Every file with tensors is in the table, as what the guide says, and what is odd is warned of."""
    done = tools.run("stat", "--json", way.place, *way.options)
    if done.returncode != 0:
        raise failure("stat refuses what is read", last_line(done))
    for note in case.notes:
        if way.place.is_dir() and note not in text_of(done):
            raise failure("silent", f"no warning names {note}: {text_of(done)}")
    if not way.place.is_dir() and way.place.suffix != ".json":  # one file, whatever lies beside it
        return
    states = {row["file"]: row["state"] for row in json.loads(done.stdout)["directory"]}
    for file in sorted(case.folder.iterdir()):
        if file.name.endswith(WITH_TENSORS) and not file.is_dir() and file.name not in states:
            raise failure("silent", f"{file.name} is in no row")
    expected = {**{file: "used" for file in case.shards}, **case.states}
    for file, state in sorted(expected.items()):
        if way.place.is_dir() and states.get(file) != state:
            raise failure("another state", f"{file}: {states.get(file)}, expected {state}")


def judge_some(case, tools, way, want):
    """One tensor alone, without --partial: what is missing elsewhere does not matter, if something tells what is."""
    options = way.options if case.kind == "unindexed" else way.but("--partial")
    some = [name for name, leaf in tensors_of(want).items() if leaf.dtype != torch.bfloat16]
    if not some:
        return
    name = case.rng.choice(sorted(some))
    done = tools.run("cat", "--quiet", way.place, name, "--npy", "-", *options)
    if done.returncode != 0:
        raise failure("cat refuses what is there", last_line(done))
    path = case.root / "one.npy"
    path.write_bytes(done.stdout)
    if not peers.same(torch.from_numpy(numpy.load(path)), want[name]):
        raise failure("cat differs", name)


def judge_missing(case, tools, way):
    """What lies in a missing file is refused with the option that leaves it out."""
    away = sorted(set(case.want) - set(case.here or case.want))
    if not away or "--ignore-index" in way.taken or not way.place.is_dir() and not way.place.name.endswith(".json"):
        return
    name = case.rng.choice(away)
    done = tools.run("cat", "--quiet", way.place, name, *way.but("--partial"))
    if done.returncode != 3 or "--partial" not in last_line(done) and "incomplete" not in last_line(done):
        raise failure("cat of what is missing", f"{done.returncode} {last_line(done)}")


def judge_package(case, way, want):
    """`tessera.load`: whole by the same options, and refused without them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare("tessera.load", want, peers.flat(tessera.load(str(way.place), framework="torch", **way.keywords())))
        if case.here is not None and case.here and case.kind != "unindexed":
            name = case.rng.choice(sorted(case.here))
            keywords = {key: value for key, value in way.keywords().items() if key != "partial"}
            found = tessera.load(str(way.place), only=[name], framework="torch", **keywords)
            compare("tessera.load of one", {name: want[name]}, peers.flat(found))
        if not way.taken:
            return
        try:
            tessera.load(str(case.place), framework="torch")
        except tessera.Error as error:
            if not ADVICE.search(str(error)):
                raise failure("the package names no option", str(error)) from error
            return
    raise failure("the package needs no option", f"{sorted(way.taken)}")


def judge_padded(case, tools, way, want):
    """What was converted beside one of its tensors with more rows, of zeros or not, and perhaps another element."""
    name = case.rng.choice([name for name, leaf in tensors_of(want).items() if leaf.dim() and leaf.numel()] or [None])
    if name is None or case.rng.random() < 0.7:
        return
    rows, is_zero, is_changed = len(want[name]), case.rng.random() < 0.5, case.rng.random() < 0.3
    padded = torch.cat([want[name], torch.zeros(case.rng.randint(1, 4), *want[name].shape[1:]).to(want[name].dtype)])
    if not is_zero:
        padded[-1].fill_(1)
    if is_changed:
        padded.view(-1).view(torch.uint8)[0] ^= 1
    other = case.root / "padded.safetensors"
    safetensors.torch.save_file({name: padded}, other)
    found = [row for row in json.loads(tools.run("diff", "--json", way.target, other).stdout) if row["name"] == name]
    told = [(row["kind"], row.get("common_rows"), row.get("different"), row.get("rest_is_zero")) for row in found]
    if told != [("shape", rows, int(is_changed), is_zero)]:
        raise failure("diff of a padded tensor", f"{name}: {found}, expected {rows}, {int(is_changed)}, {is_zero}")
    part = case.root / "part.safetensors"
    done = tools.run("convert", "--quiet", other, part, "--slice", f"{name}[0:{rows}]")
    if done.returncode != 0 or not peers.same(peers.safetensors_file(part)[name], padded[:rows]):
        raise failure("convert --slice", f"{name}: {text_of(done)}")


def judge_verify(case, tools, way):
    done = tools.run("verify", "--quiet", way.place, *way.options)
    if done.returncode != (1 if case.flipped else 0):
        raise failure("verify", f"exit {done.returncode}: {text_of(done)} {done.stdout.decode()[:300]}")
    if case.missing and tools.run("verify", "--quiet", way.place, *way.but("--partial")).returncode != 1:
        raise failure("verify passes what is missing", str(way.options))


def judge(case, tools):
    """How the directory was read; raises a `Failure` for anything that nobody wants."""
    way = Way(case)
    found, refusal = convert(case, tools, way)
    if found is None:
        return judge_refusal(case, tools, way, refusal)
    if case.fatal:
        raise failure("damage is read", f"{case.told}, options {way.options}")
    if way.taken != case.needs:
        raise failure("other options", f"{sorted(way.taken)}, expected {sorted(case.needs)}")
    want = wanted(case)
    compare("convert", tensors_of(want), tensors_of(found))
    judge_list(tools, way, want)
    judge_table(case, tools, way)
    judge_some(case, tools, way, want)
    judge_missing(case, tools, way)
    judge_verify(case, tools, way)
    judge_padded(case, tools, way, want)
    if tessera is not None:
        judge_package(case, way, want)
    return "refused with an option, read with it" if way.taken else "read equal"
