"""OLMo's checkpoints restored into live models of Tessera (checkpoint-rows O-41, O-51, O-61, O-73, OQ-15, OQ-16): a training of
ai2-olmo's, saved as each kind by two ranks, goes on in C++ as it went on in Python, on other ranks and sharded otherwise.

olmo_fsdp.py is the peer and checkpointer_tool.cpp its counterpart. PYTHONPATH has olmo_stubs, see there.
"""
import collections
import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from programs import launch, run

pytest.importorskip("olmo.checkpoint")
import olmo_fsdp as peer  # noqa: E402

TOOL = os.environ["TESSERA_CHECKPOINTER_TOOL"]
KINDS = list(peer.KINDS)
WAYS = ["fsdp1", "fsdp2", "ddp"]
SAVED, LAST = 4, 8  # the step that is saved, and where trainings end

# A run of OLMo's without a break, which saved each kind at step SAVED. losses: the rows after it.
Run = collections.namedtuple("Run", "directory config batches losses")

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(file):
    """(loss, learning rate, norm of the gradients) of each step after SAVED."""
    with open(file, encoding="ascii", newline="") as lines:
        return [list(map(float, row[1:])) for row in list(csv.reader(lines))[1:] if int(row[0]) > SAVED]


def write_batches(config, file):
    """The tokens of each step, in the order in which OLMo deals them out to ranks."""
    run_ = peer.TrainConfig.load(config)
    data = peer.MemMapDataset(*run_.data.paths, chunk_size=run_.model.max_sequence_length,
                              memmap_dtype=run_.data.effective_memmap_dtype)
    order = iter(peer.IterableDataset(data, run_.global_train_batch_size, seed=run_.seed, epoch=0, drop_last=True, num_threads=0,
                                      start_index=0, rank=0, world_size=1))
    count = LAST * run_.global_train_batch_size
    np.stack([next(order)["input_ids"].numpy().astype(np.int64) for _ in range(count)]).tofile(file)
    return file


def start(factory, name, **more):
    directory = factory.mktemp(name)
    config = peer.write_config(directory / "config.yaml", **more)
    saves = {str(SAVED): [[kind, str(directory / kind)] for kind in KINDS]}
    jobs = [{"config": str(config), "steps": LAST, "losses": str(directory / "losses.csv"), "saves": saves}]
    (directory / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    run([peer.__file__, directory / "jobs.json"], 2, timeout=240)
    return Run(directory, config, write_batches(config, directory / "batches"), rows(directory / "losses.csv"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return start(tmp_path_factory, "plain")


@pytest.fixture(scope="module")
def dropout(tmp_path_factory):
    return start(tmp_path_factory, "dropout", dropout=0.1)


def jobs_for(run_, kinds, ways, work, **more):
    """Trainings in C++ that go on from the kinds."""
    return [{"config": str(run_.config), "steps": LAST, "batches": str(run_.batches), "wrap": way, **more,
             "load": [kind, str(run_.directory / kind)], "losses": str(work / f"{kind}-{way}.csv")}
            for kind in kinds for way in ways]


def go_on(jobs, ranks, work):
    file = work / f"jobs-{ranks}.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    run([TOOL, file], ranks, timeout=240)
    return [rows(job["losses"]) for job in jobs]


def assert_close(found, expected, job):
    assert len(found) == len(expected) == LAST - SAVED, job
    np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(job))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_training_goes_on_in_cpp(plain, ranks, tmp_path):
    """Each kind of two ranks, on one rank, two and four, as FSDP1, FSDP2 and DDP."""
    jobs = jobs_for(plain, KINDS, ["none"] if ranks == 1 else WAYS, tmp_path)
    for job, found in zip(jobs, go_on(jobs, ranks, tmp_path)):
        assert_close(found, plain.losses, job)


def test_random_numbers_go_on_in_cpp(dropout, tmp_path):
    """With dropout each rank draws what it would have drawn in Python. `full` has rank 0's numbers alone (OQ-15)."""
    kinds = [kind for kind in KINDS if kind != "full"]
    jobs = jobs_for(dropout, kinds, WAYS, tmp_path)
    for job, found in zip(jobs, go_on(jobs, 2, tmp_path)):
        assert_close(found, dropout.losses, job)
    other, = go_on(jobs_for(dropout, ["full"], ["fsdp1"], tmp_path), 2, tmp_path)
    losses = [[row[0] for row in of] for of in (other, dropout.losses)]
    assert not np.allclose(*losses, rtol=1e-5)
    np.testing.assert_allclose(*losses, rtol=0.05)


def test_a_hybrid_mesh_goes_on_in_cpp(plain, tmp_path):
    """Two copies of the model on two ranks each."""
    jobs = jobs_for(plain, KINDS, ["fsdp1", "fsdp2"], tmp_path, copies=2)
    for job, found in zip(jobs, go_on(jobs, 4, tmp_path)):
        assert_close(found, plain.losses, job)


def saved_again(run_, work):
    """Every kind, restored in C++ and saved as every kind: (source, target, directory)."""
    made = [(source, target, work / f"{source}-{target}") for source in KINDS for target in KINDS]
    jobs = [{"config": str(run_.config), "steps": SAVED, "load": [source, str(run_.directory / source)],
             "saves": {str(SAVED): [[target, str(at)] for of, target, at in made if of == source]}} for source in KINDS]
    (work / "saves.json").write_text(json.dumps(jobs), encoding="utf-8")
    run([TOOL, work / "saves.json"], 2, timeout=240)
    return made


def olmo_goes_on(run_, made, work):
    """What OLMo's rows are after it restored each."""
    jobs = [{"config": str(run_.config), "steps": LAST, "load": [target, str(at)], "losses": str(at) + ".csv"}
            for _, target, at in made]
    (work / "olmo.json").write_text(json.dumps(jobs), encoding="utf-8")
    run([peer.__file__, work / "olmo.json"], 2, timeout=300)
    return [rows(job["losses"]) for job in jobs]


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_olmo_goes_on_from_what_cpp_saves(name, request, tmp_path):
    """Theirs to ours to theirs, bit for bit. Flat parameters are OLMo's files, byte for byte. With dropout `full` has no random
    numbers of rank 1 (OQ-15)."""
    run_ = request.getfixturevalue(name)
    made = saved_again(run_, tmp_path)
    for source, target, at in made:
        if target == "local":
            for file in ("model/rank0.pt", "model/rank1.pt"):
                assert (at / file).read_bytes() == (run_.directory / "local" / file).read_bytes(), at
    for (source, target, _), found in zip(made, olmo_goes_on(run_, made, tmp_path)):
        if name == "plain" or "full" not in (source, target):
            assert found == run_.losses, f"{source} {target}"


def test_a_config_of_another_kind_is_refused(plain, tmp_path):
    (tmp_path / "jobs.json").write_text(json.dumps([{"config": str(plain.config), "steps": LAST,
                                                     "load": ["torch_new", str(plain.directory / "local")]}]), encoding="utf-8")
    result = launch([TOOL, tmp_path / "jobs.json"], 2)
    assert result.codes == [1, 1]
    assert all("invalid_argument" in err and "torch_new" in err for err in result.err)
