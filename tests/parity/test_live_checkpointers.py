"""OLMo's checkpoints restored into live models of Tessera (checkpoint-rows O-41, O-51, O-61, O-73, OQ-15, OQ-16): a training of
ai2-olmo's, saved as each kind by two ranks, goes on in C++ as it went on in Python, on other ranks and sharded otherwise.

olmo_fsdp.py is the peer and checkpointer_tool.cpp its counterpart. PYTHONPATH has olmo_stubs, see there.
"""
import collections
import json
import os
from pathlib import Path

import numpy as np
import pytest
from programs import launch

pytest.importorskip("olmo.checkpoint")
from olmo_runs import KINDS, LAST, SAVED, rows_after, train, write_batches  # noqa: E402

TOOL = os.environ["TESSERA_CHECKPOINTER_TOOL"]
WAYS = ["fsdp1", "fsdp2", "ddp"]
Run = collections.namedtuple("Run", "directory config batches losses")

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(lines):
    """(loss, learning rate, norm of the gradients) of each step."""
    return [list(map(float, line.split(",")[1:])) for line in lines]


def with_batches(run_):
    """The run, its losses as numbers, and the tokens of its steps."""
    return Run(run_.directory, run_.config, write_batches(run_.config, LAST, run_.directory / "batches"), rows(run_.losses))


@pytest.fixture(scope="module", name="plain")
def plain_with_batches(plain):
    return with_batches(plain)


@pytest.fixture(scope="module", name="dropout")
def dropout_with_batches(dropout):
    return with_batches(dropout)


def jobs_for(run_, kinds, ways, work, **more):
    """Trainings in C++ that go on from the kinds."""
    return [{"config": str(run_.config), "steps": LAST, "batches": str(run_.batches), "wrap": way, **more,
             "load": [kind, str(run_.directory / kind)], "losses": str(work / f"{kind}-{way}.csv")}
            for kind in kinds for way in ways]


def go_on(jobs, ranks, work):
    train(jobs, ranks, work, program=TOOL)
    return [rows(rows_after(Path(job["losses"]))) for job in jobs]


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


def test_a_config_of_another_kind_is_refused(plain, tmp_path):
    (tmp_path / "jobs.json").write_text(json.dumps([{"config": str(plain.config), "steps": LAST,
                                                     "load": ["torch_new", str(plain.directory / "local")]}]), encoding="utf-8")
    result = launch([TOOL, tmp_path / "jobs.json"], 2)
    assert result.codes == [1, 1]
    assert all("invalid_argument" in err and "torch_new" in err for err in result.err)
