"""OLMo's four checkpointers on models in training (checkpoint-rows O-30 to O-80): what ai2-olmo saved of its own model in FSDP1,
two ranks and four in a hybrid mesh, Tessera verifies, unshards and converts, and OLMo goes on from that bit for bit.

olmo_fsdp.py is the peer. PYTHONPATH has olmo_stubs, see there.
"""
import collections
import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from programs import run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytest.importorskip("olmo.checkpoint")
import olmo_fsdp as peer  # noqa: E402
from olmo.checkpoint import load_model_state  # noqa: E402

peer.adapted()
TESSERA = os.environ["TESSERA_COMMAND"]
PEER = Path(peer.__file__)
KINDS = {"full": "olmo-full", "torch_new": "olmo-torch-new", "torch_legacy": "olmo-legacy", "local": "olmo-local"}
PAIRS = list(itertools.permutations(KINDS, 2))
SAVED, LAST = 4, 8  # the step that is saved, and where trainings end

pytestmark = pytest.mark.filterwarnings("ignore")

# A run of OLMo's without a break, which saved each kind at step SAVED. losses: the rows after it.
Run = collections.namedtuple("Run", "directory config ranks losses")


def rows_after(file):
    return [line for line in file.read_text(encoding="ascii").splitlines()[1:] if int(line.split(",")[0]) > SAVED]


def train(jobs, ranks, directory):
    """Trainings of the peer one after another, in one start of its processes."""
    file = directory / "jobs.json"
    file.write_text(json.dumps(jobs, default=str), encoding="utf-8")
    run([PEER, file], ranks, timeout=240)


def start(factory, name, ranks, **more):
    directory = factory.mktemp(name)
    config = peer.write_config(directory / "config.yaml", **more)
    saves = {str(SAVED): [[kind, directory / kind] for kind in KINDS]}
    train([{"config": config, "steps": LAST, "losses": directory / "losses.csv", "saves": saves}], ranks, directory)
    return Run(directory, config, ranks, rows_after(directory / "losses.csv"))


def go_on(run_, sources, into, **more):
    """What OLMo's losses are after it restored each of `sources`, (kind, directory)."""
    jobs = [{"config": run_.config, "steps": LAST, "load": source, "losses": into / f"{i}.csv", **more}
            for i, source in enumerate(sources)]
    train(jobs, run_.ranks, into)
    return [rows_after(job["losses"]) for job in jobs]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return start(tmp_path_factory, "plain", 2)


@pytest.fixture(scope="module")
def dropout(tmp_path_factory):
    return start(tmp_path_factory, "dropout", 2, dropout=0.1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Two copies of the model, each on two ranks."""
    return start(tmp_path_factory, "hybrid", 4, dropout=0.1, hybrid=True)


@pytest.fixture(params=["plain", "hybrid"])
def saved(request):
    return request.getfixturevalue(request.param)


def tessera(*words, code=0):
    done = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def clean(value):
    """Without FSDP's wrappers in names, and dicts of any type as plain ones."""
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value.replace("_fsdp_wrapped_module.", "") if isinstance(value, str) else value


def same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            same(*pair, f"{where}/{i}")
    elif type(a).__module__ == "numpy":
        assert (a == b).all(), where
    else:
        assert a == b, where


def loaded(directory):
    """{"model": ..., "optim": ..., "train": ...} of an unsharded checkpoint."""
    return {part: clean(torch.load(directory / f"{part}.pt")) for part in ("model", "optim", "train")}


def by_name(optim):
    """OLMo unshards a local checkpoint's optimizer by numbers: the names are in the groups."""
    names = {number: name for group in optim["param_groups"] for number, name in zip(group["params"], group["param_names"])}
    return {"state": {names[number]: state for number, state in optim["state"].items()},
            "param_groups": [{**group, "params": group["param_names"]} for group in optim["param_groups"]]}


def unsharded_by_olmo(kind, run_, work):
    """What OLMo's and PyTorch's own code makes of a checkpoint; without what it has no code for."""
    directory = run_.directory / kind
    if kind == "full":
        return loaded(directory)
    if kind == "torch_new":
        model = peer.OLMo(peer.TrainConfig.load(directory / "config.yaml").model)
        load_model_state(directory, model)
        dcp_to_torch_save(directory / "model_and_optim", work / "whole.pt")
        whole = torch.load(work / "whole.pt")
        same(dict(model.state_dict()), clean(whole["model"]))
        return {"model": dict(model.state_dict()), "optim": clean(whole["optim"]), "train": torch.load(directory / "train/rank0.pt")}
    model, optim, trainer = peer.checkpointer(kind, None).unshard_checkpoint(directory)
    optim = clean(optim)
    return {"model": clean(model), "optim": by_name(optim) if kind == "local" else optim, "train": trainer}


@pytest.mark.parametrize("kind", KINDS)
def test_unsharded_is_what_olmo_unshards(saved, kind, tmp_path):
    """O-43, O-16, O-62, O-76. Of a hybrid run OLMo cannot unshard torch_legacy, whose shards are DTensors there."""
    tessera("unshard", saved.directory / kind, tmp_path / "ours", "--quiet")
    found = loaded(tmp_path / "ours")
    if kind == "torch_legacy" and saved.ranks > 2:
        with pytest.raises(Exception, match="process group has not been initialized"):
            peer.checkpointer(kind, None).unshard_checkpoint(saved.directory / kind)
        kind = "local"
    expected = unsharded_by_olmo(kind, saved, tmp_path)
    if kind == "torch_legacy":
        assert "rng" not in expected["train"]  # OLMo leaves it out
        del found["train"]["rng"]
    same(expected, found)


def test_olmo_goes_on_as_if_it_had_not_stopped(plain, dropout, tmp_path):
    """The peer itself: from each kind, bit for bit. `full` has rank 0's random numbers for all ranks (OQ-15)."""
    for run_ in (plain, dropout):
        (tmp_path / run_.directory.name).mkdir()
        found = go_on(run_, [(kind, run_.directory / kind) for kind in KINDS], tmp_path / run_.directory.name)
        for kind, losses in zip(KINDS, found):
            has_own_numbers = kind != "full" or run_ is plain
            assert (losses == run_.losses) == has_own_numbers, f"{run_.directory.name} {kind}"


def test_olmo_needs_local_world_size(plain, tmp_path):
    """OQ-16: it reads a `full` optimizer on so many ranks of a host. As it is by default, one, the other ranks' moments are not
    there, without an error."""
    assert go_on(plain, [("full", plain.directory / "full")], tmp_path, local_world_size=1) != [plain.losses]


def test_olmo_goes_on_in_a_hybrid_mesh(hybrid, tmp_path):
    """From `torch_new` it does not: PyTorch cuts the optimizer's tensors over all ranks, and FSDP joins them over those of one
    copy. Most of its state is wrong then, without an error, and the losses leave the uninterrupted run after one step."""
    found = dict(zip(KINDS, go_on(hybrid, [(kind, hybrid.directory / kind) for kind in KINDS], tmp_path)))
    assert found["local"] == found["torch_legacy"] == hybrid.losses
    loss = {kind: [row.split(",")[1] for row in rows] for kind, rows in {**found, "": hybrid.losses}.items()}
    assert loss["torch_new"][0] == loss[""][0] and loss["torch_new"][1] != loss[""][1]
    assert found["full"] != hybrid.losses  # OQ-15


@pytest.mark.parametrize("kind", KINDS)
def test_verified_and_told(saved, kind):
    """Every checksum there is; the kind is told by the files alone."""
    directory = saved.directory / kind
    about = json.loads(tessera("stat", directory, "--json"))
    assert about["kind"] == KINDS[kind]
    assert about["world_size"] == (0 if kind == "full" else saved.ranks)
    assert tessera("verify", directory).startswith("ok: 66 tensors")


def test_kinds_are_one_state(saved):
    """All four have the same tensors and values, by one set of names; a local checkpoint's optimizer has numbers for names."""
    for a, b in itertools.combinations([kind for kind in KINDS if kind != "local"], 2):
        assert "equal" in tessera("diff", saved.directory / a, saved.directory / b)
    tessera("diff", saved.directory / "local", saved.directory / "full", code=1)
    only = ["--only", "model"]
    assert "equal" in tessera("diff", saved.directory / "local", saved.directory / "full", *only)


@pytest.mark.parametrize("kind", KINDS)
def test_unsharded_files_need_no_trust(saved, kind, tmp_path):
    """OQ-07: torch.load executes nothing of them."""
    tessera("unshard", saved.directory / kind, tmp_path / "out", "--quiet")
    for part in ("model", "optim"):
        assert torch.load(tmp_path / f"out/{part}.pt", weights_only=True)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_converted_checkpoints_are_equal(saved, source, target, tmp_path):
    tessera("convert", saved.directory / source, tmp_path / "out", "--to", KINDS[target], "--ranks", 2, "--quiet")
    tessera("unshard", tmp_path / "out", tmp_path / "whole", "--quiet")
    same(loaded(saved.directory / "full"), loaded(tmp_path / "whole"))
    assert tessera("verify", tmp_path / "out").startswith("ok: ")


def test_olmo_goes_on_from_converted_checkpoints(plain, tmp_path):
    """Theirs to ours to theirs: each kind from each other, by OLMo's own restore. Flat parameters are OLMo's files, byte for
    byte, and so is the optimizer, unless it was in DCP, which has entries of a dict in another order."""
    sources = []
    for source, target in PAIRS:
        out = tmp_path / f"{source}-{target}"
        tessera("convert", plain.directory / source, out, "--to", KINDS[target], "--ranks", 2, "--quiet")
        sources.append((target, out))
        if target == "local":
            parts = ["model"] if source == "torch_new" else ["model", "optim"]
            for file in (f"{part}/rank{rank}.pt" for part in parts for rank in range(2)):
                assert (out / file).read_bytes() == (plain.directory / "local" / file).read_bytes(), file
    for pair, losses in zip(PAIRS, go_on(plain, sources, tmp_path)):
        assert losses == plain.losses, pair
