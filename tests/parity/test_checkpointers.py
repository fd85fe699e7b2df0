"""OLMo's four checkpointers on models in training (checkpoint-rows O-30 to O-80): what ai2-olmo saved of its own model in FSDP1,
two ranks and four in a hybrid mesh, Tessera verifies, unshards and converts, and OLMo goes on from that bit for bit.

olmo_fsdp.py is the peer, olmo_runs.py starts it. PYTHONPATH has olmo_stubs, see there.
"""
import itertools
import json
import os
import subprocess

import pytest
import torch

pytest.importorskip("olmo.checkpoint")
import olmo_fsdp as peer  # noqa: E402
from olmo_runs import KINDS, go_on, loaded, same, tessera, unsharded_by_olmo  # noqa: E402

RANKS = {kind: [] if kind == "full" else ["--ranks", 2] for kind in KINDS}
PAIRS = list(itertools.permutations(KINDS, 2))

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["plain", "hybrid"])
def saved(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_unsharded_is_what_olmo_unshards(saved, kind, tmp_path):
    """O-43, O-16, O-62, O-76. Of a hybrid run OLMo cannot unshard torch_legacy, whose shards are DTensors there."""
    tessera("unshard", saved.directory / kind, tmp_path / "ours", "--quiet")
    found = loaded(tmp_path / "ours")
    if kind == "torch_legacy" and saved.ranks > 2:
        with pytest.raises(Exception, match="process group has not been initialized"):
            peer.checkpointer(kind, None).unshard_checkpoint(saved.directory / kind)
        kind = "local"
    expected = unsharded_by_olmo(kind, saved.directory / kind, tmp_path)
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
    assert found["local"] == found["torch_legacy"] == found["full"] == hybrid.losses
    loss = {kind: [row.split(",")[1] for row in rows] for kind, rows in {**found, "": hybrid.losses}.items()}
    assert loss["torch_new"][0] == loss[""][0] and loss["torch_new"][1] != loss[""][1]


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
    tessera("convert", saved.directory / source, tmp_path / "out", "--to", KINDS[target], *RANKS[target], "--quiet")
    tessera("unshard", tmp_path / "out", tmp_path / "whole", "--quiet")
    same(loaded(saved.directory / "full"), loaded(tmp_path / "whole"))
    assert tessera("verify", tmp_path / "out").startswith("ok: ")


def test_olmo_goes_on_from_converted_checkpoints(plain, tmp_path):
    """Theirs to ours to theirs: each kind from each other, by OLMo's own restore. Flat parameters are OLMo's files, byte for
    byte, and so is the optimizer, unless it was in DCP, which has entries of a dict in another order."""
    sources = []
    for source, target in PAIRS:
        out = tmp_path / f"{source}-{target}"
        tessera("convert", plain.directory / source, out, "--to", KINDS[target], *RANKS[target], "--quiet")
        sources.append((target, out))
        if target == "local":
            parts = ["model"] if source == "torch_new" else ["model", "optim"]
            for file in (f"{part}/rank{rank}.pt" for part in parts for rank in range(2)):
                assert (out / file).read_bytes() == (plain.directory / "local" / file).read_bytes(), file
    for pair, losses in zip(PAIRS, go_on(plain, sources, tmp_path)):
        assert losses == plain.losses, pair


def saved_by_ranks(run_, kind, cut, directory):
    """The `full` state, saved by as many ranks of Tessera's, which hold it cut so."""
    words = [run_.directory / "full", directory, kind, cut, run_.ranks, run_.ranks // 2]
    subprocess.run([os.environ["TESSERA_OLMO_SAVE_TOOL"], *map(str, words)], check=True)
    (directory / "config.yaml").write_bytes((run_.directory / kind / "config.yaml").read_bytes())
    return directory


@pytest.fixture(scope="module")
def by_ranks(plain, tmp_path_factory):
    """(kind, cut) -> directory."""
    into = tmp_path_factory.mktemp("by_ranks")
    cases = [(kind, cut) for kind in KINDS for cut in ("rows", "flat") if (kind, cut) != ("local", "rows")]
    return {(kind, cut): saved_by_ranks(plain, kind, cut, into / f"{kind}-{cut}") for kind, cut in cases}


def test_olmo_goes_on_from_what_ranks_saved(plain, by_ranks, tmp_path):
    """O-40, O-50, O-60, O-72: no rank had all of it."""
    found = go_on(plain, [(kind, directory) for (kind, _), directory in by_ranks.items()], tmp_path)
    for case, losses in zip(by_ranks, found):
        assert losses == plain.losses, case


def test_what_ranks_saved_is_what_olmo_saved(plain, by_ranks, tmp_path):
    """By OLMo's and PyTorch's own code, by ours, and flat parameters byte for byte."""
    for case, directory in by_ranks.items():
        (tmp_path / directory.name).mkdir()
        saved, wanted = (unsharded_by_olmo(case[0], of, tmp_path / directory.name) for of in (directory, plain.directory / case[0]))
        same(wanted, saved)
        assert tessera("verify", directory).startswith("ok: 66 tensors"), case
    for file in (f"{part}/rank{rank}.pt" for part in ("model", "optim") for rank in range(2)):
        assert (by_ranks["local", "flat"] / file).read_bytes() == (plain.directory / "local" / file).read_bytes(), file


def test_olmo_goes_on_from_what_a_hybrid_mesh_saved(hybrid, tmp_path):
    """`torch_legacy` has DTensors there (O-60)."""
    sources = [(kind, saved_by_ranks(hybrid, kind, "flat", tmp_path / kind)) for kind in KINDS]
    for (kind, directory), losses in zip(sources, go_on(hybrid, sources, tmp_path)):
        right = 1 if kind == "torch_new" else len(hybrid.losses)
        assert [row.split(",")[1] for row in losses[:right]] == [row.split(",")[1] for row in hybrid.losses[:right]], kind
        assert tessera("verify", directory).startswith("ok: 66 tensors"), kind
