"""OLMo's checkpointers in C++ save what OLMo goes on from (checkpoint-rows O-40, O-50, O-60, O-72): a training of ai2-olmo's is
restored by Tessera from each kind, saved again as each kind, and OLMo's losses are those of the uninterrupted run, bit for bit.

checkpointer_tool.cpp takes the same jobs as the peer, olmo_fsdp.py. PYTHONPATH has olmo_stubs, see there.
"""
import itertools
import os

import pytest

pytest.importorskip("olmo.checkpoint")
import olmo_fsdp as peer  # noqa: E402
from olmo_runs import KINDS, LAST, LATER, SAVED, go_on, loaded, same, tessera, train, unsharded_by_olmo, write_batches  # noqa: E402

TOOL = os.environ["TESSERA_CHECKPOINTER_TOOL"]

pytestmark = pytest.mark.filterwarnings("ignore")


def save_again(run_, pairs, into, wrap="fsdp1", ranks=None, steps=SAVED):
    """Tessera restores each first kind, trains to `steps` and saves as the second. Returns (kind, directory) for go_on."""
    batches = write_batches(run_.config, steps, into / "batches")
    jobs = []
    for source, of_source in itertools.groupby(pairs, lambda pair: pair[0]):
        saves = [[kind, into / f"{source}-{kind}"] for _, kind in of_source]
        jobs.append({"config": run_.config, "steps": steps, "batches": batches, "wrap": wrap,
                     "copies": 1 if ranks else run_.ranks // 2,
                     "load": [source, run_.directory / source], "saves": {str(steps): saves}})
    train(jobs, ranks or run_.ranks, into, program=TOOL)
    return [(kind, into / f"{source}-{kind}") for source, kind in pairs]


def require_flat_files(run_, again):
    """Whichever kind was restored, the flat parameters saved are OLMo's files."""
    for source, rank in itertools.product(KINDS, range(2)):
        file = f"model/rank{rank}.pt"
        assert (again / f"{source}-local" / file).read_bytes() == (run_.directory / "local" / file).read_bytes(), source


@pytest.fixture(scope="module")
def again(plain, tmp_path_factory):
    """Each kind restored and saved as each kind by two ranks with FSDP1."""
    into = tmp_path_factory.mktemp("again")
    save_again(plain, list(itertools.product(KINDS, KINDS)), into)
    return into


def test_olmo_goes_on_from_each_kind(plain, again, tmp_path):
    pairs = list(itertools.product(KINDS, KINDS))
    found = go_on(plain, [(kind, again / f"{source}-{kind}") for source, kind in pairs], tmp_path)
    for pair, losses in zip(pairs, found):
        assert losses == plain.losses, pair


def test_random_numbers_of_each_rank_go_on(dropout, tmp_path):
    """With dropout; `full` has those of rank 0 alone (OQ-15)."""
    pairs = list(itertools.product(KINDS, repeat=2))
    made = save_again(dropout, pairs, tmp_path)
    require_flat_files(dropout, tmp_path)
    taken = [(pair, source) for pair, source in zip(pairs, made) if "full" not in pair]
    for (pair, _), losses in zip(taken, go_on(dropout, [source for _, source in taken], tmp_path)):
        assert losses == dropout.losses, pair


def test_olmo_goes_on_after_a_training_in_cpp(plain, tmp_path):
    """Four steps in C++ first: its sums are in another order."""
    pairs = [(kind, kind) for kind in KINDS]
    sources = save_again(plain, pairs, tmp_path, steps=LAST)
    expected = [[float(cell) for cell in row.split(",")] for row in plain.later]
    for (kind, _), losses in zip(sources, go_on(plain, sources, tmp_path, steps=LATER)):
        found = [[float(cell) for cell in row.split(",")] for row in losses]
        assert len(found) == LATER - LAST
        for row, wanted in zip(found, expected):
            assert row == pytest.approx(wanted, rel=1e-5), kind


@pytest.mark.parametrize("kind", KINDS)
def test_olmo_unshards_what_was_saved(plain, again, kind, tmp_path):
    """OLMo's and PyTorch's own code, ours, and what was restored."""
    directory = again / f"local-{kind}"
    tessera("unshard", directory, tmp_path / "ours", "--quiet")
    found, expected = loaded(tmp_path / "ours"), unsharded_by_olmo(kind, directory, tmp_path)
    first = loaded(plain.directory / "full")
    if kind == "torch_legacy":
        assert "rng" not in expected["train"]
        expected["train"]["rng"] = found["train"]["rng"]
    same(expected, found)
    same({part: first[part] for part in ("model", "optim")}, {part: found[part] for part in ("model", "optim")})
    assert tessera("verify", directory).startswith("ok: ")


def test_olmo_loads_a_full_one_without_ranks(plain, again):
    model = peer.OLMo.from_checkpoint(again / "local-full")
    same(loaded(plain.directory / "full")["model"], dict(model.state_dict()))


def test_flat_parameters_are_olmos_byte_for_byte(plain, again):
    require_flat_files(plain, again)


@pytest.mark.parametrize("wrap", ["fsdp2", "ddp"])
def test_other_ways_of_sharding_save_the_same(plain, wrap, tmp_path):
    """All but `local`, whose files are flat parameters."""
    pairs = [("local", kind) for kind in KINDS if kind != "local"]
    for pair, losses in zip(pairs, go_on(plain, save_again(plain, pairs, tmp_path, wrap), tmp_path)):
        assert losses == plain.losses, pair


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_save_the_same(plain, ranks, tmp_path):
    for _, directory in save_again(plain, [("local", kind) for kind in KINDS], tmp_path, "fsdp1", ranks):
        tessera("unshard", directory, directory.with_suffix(".whole"), "--quiet")
        found, expected = loaded(directory.with_suffix(".whole")), loaded(plain.directory / "full")
        same({part: expected[part] for part in ("model", "optim")}, {part: found[part] for part in ("model", "optim")})


def test_a_hybrid_mesh_saves_what_olmo_goes_on_from(hybrid, tmp_path):
    """Of `torch_new` OLMo gets the optimizer wrong, whoever saved it: see test_checkpointers.py. `torch_legacy` has DTensors
    (O-60)."""
    sources = save_again(hybrid, [("local", kind) for kind in KINDS], tmp_path)
    for _, directory in sources:
        assert tessera("verify", directory).startswith("ok: "), directory
        tessera("unshard", directory, directory.with_suffix(".whole"), "--quiet")
        same(loaded(hybrid.directory / "full")["model"], loaded(directory.with_suffix(".whole"))["model"])
    for (kind, _), losses in zip(sources, go_on(hybrid, sources, tmp_path)):
        right = 1 if kind == "torch_new" else LAST - SAVED
        assert [row.split(",")[1] for row in losses[:right]] == [row.split(",")[1] for row in hybrid.losses[:right]], kind
    # DTensors, OLMo's and ours, on three ranks that have no copies.
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/torch_legacy").symlink_to(tmp_path / "local-torch_legacy")
    for run_ in (hybrid, hybrid._replace(directory=tmp_path / "ours")):
        into = tmp_path / f"from {run_.directory.name}"
        into.mkdir()
        (_, whole), = save_again(run_, [("torch_legacy", "full")], into, ranks=3)
        same(loaded(hybrid.directory / "full")["model"], loaded(whole)["model"])
        same(loaded(hybrid.directory / "full")["optim"]["state"], loaded(whole)["optim"]["state"])
