"""train_gpt beside itself on other numbers of ranks, and beside Python's fully_shard with real checkpoints."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from programs import PEERS, TESSERA, TRAIN_GPT, Result, free_port, largest_difference, launch, losses, run, started

OLMO_UNSHARDS = """
import pathlib, sys, torch
import olmo_fsdp as peer
peer.adapted()
kind, directory, out = sys.argv[1:]
model, optim, _ = peer.checkpointer(kind, None).unshard_checkpoint(pathlib.Path(directory))
names = {key: name.replace("_fsdp_wrapped_module.", "") for group in optim["param_groups"]
         for key, name in zip(group["params"], group["param_names"])}
torch.save({"model": dict(model), "optim": {names[key]: dict(state) for key, state in optim["state"].items()}}, out)
"""

# Nothing here is divisible by 2 or 3 that could be: uneven shards, uneven batches.
MODEL = "--dim 40 --layers 2 --heads 4 --seq 31".split()
SCHEDULE = "--batch 7 --lr 3e-3 --warmup 4 --weight-decay 0.1 --clip 1 --seed 5".split()
TWIN = PEERS / "train_gpt.py"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    words = ["".join(random.Random(i).choices("etaoinshrdlu", k=2 + i % 6)) for i in range(300)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=20000)), encoding="ascii")
    return path


@pytest.fixture(scope="module")
def train(data):
    """Runs train_gpt with the flags of these tests and more; returns the result."""

    def start(ranks, *more, model=MODEL, launcher=run):
        return launcher([TRAIN_GPT, *model, *SCHEDULE, "--data", data, "--threads", "1", *more], ranks)

    return start


def own_lines(err):
    """Standard error less warnings, and less what libtorch logs itself, such as a failed reverse look-up without a network."""
    return [line for line in err.strip().splitlines() if not line.startswith(("[W", "tessera: warning: "))]


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    """Losses of 12 steps on one rank, without sharding."""
    path = tmp_path_factory.mktemp("single") / "single.csv"
    train(1, "--steps", "12", "--sharding", "none", "--metrics", path)
    return losses(path)


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory):
    """A run of 12 steps on two ranks, with checkpoints every 4."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, "--steps", "12", "--save", folder / "run", "--save-every", "4", "--metrics", folder / "run.csv")
    return folder


def check(ours, expected):
    assert sorted(ours) == sorted(expected)
    difference = largest_difference(ours, expected)
    print(f"largest relative difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, []), (3, []), (1, ["--accumulate", "3"]),
                                             (3, ["--accumulate", "4"]), (3, ["--sharding", "fsdp1"]),
                                             (3, ["--flat", "--accumulate", "2"]),
                                             (2, ["--sharding", "ddp", "--accumulate", "2"])])
def test_loss_does_not_depend_on_ranks_or_micro_batches(train, single, tmp_path, ranks, more):
    train(ranks, "--steps", "12", "--metrics", tmp_path / "m.csv", *more)
    check(losses(tmp_path / "m.csv"), single)


def test_loss_with_a_tied_head_does_not_depend_on_ranks(train, tmp_path):
    train(1, "--tied", "--steps", "8", "--sharding", "none", "--metrics", tmp_path / "one.csv")
    train(2, "--tied", "--steps", "8", "--metrics", tmp_path / "two.csv")
    check(losses(tmp_path / "two.csv"), losses(tmp_path / "one.csv"))


def test_same_loss_as_python_from_the_same_seed(single, data, tmp_path):
    run([TWIN, *MODEL, *SCHEDULE, "--data", data, "--steps", "12", "--metrics", tmp_path / "py.csv"], 2)
    check(losses(tmp_path / "py.csv"), single)


def test_resume_on_other_ranks_from_the_latest_complete_checkpoint(train, single, saved, tmp_path):
    shutil.copytree(saved / "run", tmp_path / "run")
    shutil.copy(saved / "run.csv", tmp_path / "run.csv")
    (tmp_path / "run/step12/.metadata").unlink()  # what a kill during the save leaves
    resumed = train(3, "--steps", "12", "--save", tmp_path / "run", "--resume", "latest", "--metrics",
                    tmp_path / "run.csv")
    assert "after step 8" in resumed.out[0]
    check(losses(tmp_path / "run.csv"), single)
    assert (tmp_path / "run/step12/.metadata").exists()


def test_resume_across_ways_of_sharding(train, single, tmp_path):
    """A checkpoint does not say how it was sharded; PyTorch's FSDP2 loads that of FSDP1's flat parameters."""
    flags = ["--steps", "12", "--save", tmp_path / "run", "--save-every", "4", "--metrics", tmp_path / "run.csv"]
    train(3, *flags, "--sharding", "fsdp1")
    for steps, ranks, sharding in (([8, 12], 2, "ddp"), ([12], 3, "fsdp1"), ([8, 12], 2, "fsdp2")):
        for step in steps:
            shutil.rmtree(tmp_path / f"run/step{step}")
        train(ranks, *flags, "--sharding", sharding, "--resume", "latest")
        check(losses(tmp_path / "run.csv"), single)
    result = run([PEERS / "load_checkpoint.py", tmp_path / "run/step4", *MODEL], 2)
    assert json.loads(result.out[0].strip().splitlines()[-1])["step"] == 4


def test_flat_layout_goes_on_from_rows_and_pytorch_and_they_from_it(train, single, data, tmp_path):
    """ShardLayout::flat saves boxes of each parameter, which PyTorch's FSDP2 and rows load; and it loads theirs."""
    flags = ["--steps", "12", "--save", tmp_path / "run", "--save-every", "4", "--metrics", tmp_path / "run.csv"]
    train(3, *flags, "--flat")
    check(losses(tmp_path / "run.csv"), single)
    result = run([PEERS / "load_checkpoint.py", tmp_path / "run/step12", *MODEL], 2)
    assert json.loads(result.out[0].strip().splitlines()[-1])["step"] == 12
    python = [TWIN, *MODEL, *SCHEDULE, "--data", data]
    run([*python, "--steps", "12", "--resume", tmp_path / "run/step8", "--metrics", tmp_path / "py.csv"], 2)
    check(losses(tmp_path / "py.csv"), {step: single[step] for step in range(9, 13)})
    for steps, more in (([8, 12], []), ([12], ["--flat"])):  # rows from flat shards of 3 ranks, and those from rows of 2
        for step in steps:
            shutil.rmtree(tmp_path / f"run/step{step}")
        train(2, *flags, *more, "--resume", "latest")
        check(losses(tmp_path / "run.csv"), single)
    # What PyTorch saves comes back bit for bit.
    run([*python, "--steps", "5", "--save", tmp_path / "py/step5", "--dump", tmp_path / "py.pt"], 2)
    train(3, "--flat", "--steps", "5", "--resume", tmp_path / "py/step5", "--save", tmp_path / "ours")
    run([PEERS / "load_checkpoint.py", tmp_path / "ours/step5", "--dump", tmp_path / "ours.pt", *MODEL], 1)
    require_same_state(tmp_path / "ours.pt", tmp_path / "py.pt")


@pytest.mark.parametrize("kind", ["full", "torch_new", "torch_legacy", "local"])
def test_training_goes_on_from_each_of_olmos_kinds(train, single, tmp_path, kind):
    """checkpoint-rows O-40, O-50, O-60, O-72: saved by flat parameters on two ranks, resumed elsewhere, told by its files."""
    flags = ["--steps", "12", "--save", tmp_path / "run", "--save-every", "4", "--metrics", tmp_path / "run.csv"]
    train(2, *flags, "--sharding", "fsdp1", "--checkpointer", kind)
    check(losses(tmp_path / "run.csv"), single)
    if kind in ("local", "torch_legacy"):  # from own files, and saved again
        shutil.rmtree(tmp_path / "run/step12")
        train(2, *flags, "--sharding", "fsdp1", "--checkpointer", kind, "--resume", "latest")
        check(losses(tmp_path / "run.csv"), single)
    for step in (8, 12):
        shutil.rmtree(tmp_path / f"run/step{step}")
    train(3, *flags, "--sharding", "fsdp2", "--resume", "latest")
    check(losses(tmp_path / "run.csv"), single)


@pytest.mark.parametrize("kind", ["torch_legacy", "local"])
def test_olmo_unshards_what_train_gpt_saves(train, tmp_path, kind):
    """checkpoint-rows O-62, O-76: OLMo's own unsharding gives the tensors that `tessera unshard` gives."""
    train(2, "--steps", "4", "--save", tmp_path / "run", "--save-every", "4", "--sharding", "fsdp1", "--checkpointer", kind)
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here / 'olmo_stubs'}:{here}", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    subprocess.run([sys.executable, "-c", OLMO_UNSHARDS, kind, tmp_path / "run/step4", tmp_path / "olmo.pt"], env=environment,
                   check=True, timeout=120)
    subprocess.run([TESSERA, "unshard", tmp_path / "run/step4", tmp_path / "ours", "--quiet"], check=True, timeout=120)
    theirs = torch.load(tmp_path / "olmo.pt", weights_only=True)
    ours = torch.load(tmp_path / "ours/model.pt", weights_only=True)
    assert sorted(theirs["model"]) == sorted(ours)
    for name, tensor in theirs["model"].items():
        assert torch.equal(tensor, ours[name]), name
    ours = torch.load(tmp_path / "ours/optim.pt", weights_only=True)["state"]
    theirs = theirs["optim"]
    assert sorted(theirs) == sorted(ours) != []
    for key, state in theirs.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, ours[key][name]), (key, name)


def test_latest_passes_over_damaged_checkpoints(train, saved, tmp_path):
    shutil.copytree(saved / "run", tmp_path / "run")
    marker = tmp_path / "run/step12/.metadata"
    marker.write_bytes(marker.read_bytes()[:-100])
    next((tmp_path / "run/step8").glob("*.distcp")).unlink()
    resumed = train(2, "--steps", "4", "--save", tmp_path / "run", "--resume", "latest")
    assert "after step 4" in resumed.out[0]


def test_going_back_leaves_later_checkpoints_behind(train, saved, tmp_path):
    shutil.copytree(saved / "run", tmp_path / "run")
    train(2, "--steps", "5", "--save", tmp_path / "run", "--resume", tmp_path / "run/step4")
    again = train(2, "--steps", "5", "--save", tmp_path / "run", "--resume", "latest")
    assert "after step 5" in again.out[0] and "step12 is passed over" in again.out[0]


def test_latest_of_damaged_checkpoints_alone_is_an_error(train, saved, tmp_path):
    shutil.copytree(saved / "run/step12", tmp_path / "run/step12")
    next((tmp_path / "run/step12").glob("*.distcp")).unlink()
    result = train(2, "--steps", "4", "--save", tmp_path / "run", "--resume", "latest", launcher=launch)
    assert result.codes == [3, 3] and all("corrupt: every checkpoint" in err for err in result.err), str(result)
    # What is no checkpoint at all does not count: a killed first save leaves it.
    (tmp_path / "run/step12/.metadata").unlink()
    afresh = train(2, "--steps", "4", "--save", tmp_path / "run", "--resume", "latest")
    assert "starting afresh" in afresh.out[0] and (tmp_path / "run/step4/.metadata").exists()


# Ends twice: before the ranks have met, and when the first checkpoint is the only one.
UNLUCKY = """
[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 9
"$@" --steps 12
[ $TORCHELASTIC_RESTART_COUNT = 2 ] || [ $RANK = 1 ] && exit 0
rm -r "$RUN/step8" "$RUN/step12"
exit 9
"""


def test_one_command_line_serves_torchrun_and_its_restarts(train, single, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    flags = ["--save", tmp_path / "run", "--save-every", "4", "--resume", "latest", "--metrics", tmp_path / "run.csv"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2",
                "--max-restarts", "2", "--master-port", str(free_port()), "sh", "-c", UNLUCKY, "sh"]
    result = train(1, *flags, launcher=lambda command, ranks: run([*torchrun, *command], ranks))
    assert result.out[0].count("starting afresh") == 1, str(result)
    assert result.out[0].count("after step 4") == 1, str(result)
    check(losses(tmp_path / "run.csv"), single)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun_starts_ranks(train, single, tmp_path):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    start = lambda more: lambda command, ranks: launch([*mpirun, *more, *command], ranks)
    place = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    result = train(1, "--steps", "12", "--metrics", tmp_path / "m.csv", launcher=start(place))
    assert result.codes == [0], str(result)
    check(losses(tmp_path / "m.csv"), single)
    # Without a place to meet nobody trains alone.
    result = train(1, "--steps", "1", launcher=start([]))
    assert result.codes != [0] and "MASTER_ADDR is not set, and mpirun started 2 ranks" in result.err[0], str(result)


def test_keep_removes_older_checkpoints_and_what_kills_left(train, tmp_path):
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1/__0_0_x.distcp").write_bytes(b"half")
    train(2, "--steps", "6", "--save", tmp_path, "--save-every", "2", "--keep", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step4", "step6"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pytorch_loads_what_train_gpt_saves(saved, tmp_path, ranks):
    exported = tmp_path / "model.safetensors"
    run([TESSERA, "convert", saved / "run/step12", exported, "--only", "model.*"])
    result = run([PEERS / "load_checkpoint.py", saved / "run/step12", "--safetensors", exported, *MODEL], ranks)
    report = json.loads(result.out[0].strip().splitlines()[-1])
    parameters = 2 * 12 + 2 + 4
    assert report["step"] == 12
    assert report["safetensors"] == {"tensors": parameters, "values": 0}
    assert report["dcp_to_torch"]["tensors"] == 4 * parameters  # weight, exp_avg, exp_avg_sq, step
    assert report["dcp_to_torch"]["values"] == 2 * 12  # two groups


@pytest.mark.parametrize("more", [[], ["--save-every", "3", "--async", "thread"]], ids=["waits", "thread"])
def test_sigterm_to_one_rank_saves_and_ends_all(train, tmp_path, more):
    """fault-rows F27: all ranks end behind the same step, with a checkpoint from which the training goes on."""
    flags = ["--save", tmp_path / "run", "--metrics", tmp_path / "run.csv", *more]
    ranks = train(2, "--steps", "100000", *flags, launcher=started)
    while ranks[0].poll() is None and len(losses_so_far(tmp_path / "run.csv")) < 4:
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGTERM)
    result = Result(ranks, 60)
    assert result.codes == [128 + signal.SIGTERM] * 2, str(result)
    assert "rank 1 is told to end" in result.err[0]
    step = int(result.out[0].split("told to end: stopped after step ")[1])
    assert f"saved {tmp_path}/run/step{step}\n" in result.out[0]
    on = train(3, "--steps", str(step + 1), *flags, "--resume", "latest")
    assert f"after step {step}" in on.out[0]


def test_restart_from_memory_on_other_ranks(train, single, tmp_path, monkeypatch):
    """Trainers that are killed leave their last save in the memory of their writer processes."""
    monkeypatch.setenv("TESSERA_COMMAND", str(TESSERA))
    monkeypatch.setenv("TESSERA_ARENA_DIR", str(tmp_path / "arenas"))
    flags = ["--save", tmp_path / "run", "--metrics", tmp_path / "run.csv", "--async", "process"]
    ranks = train(2, "--steps", "100000", *flags, "--save-every", "4", "--keep-in-memory", "60", launcher=started)
    while ranks[0].poll() is None and len(losses_so_far(tmp_path / "run.csv")) < 9:
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    Result(ranks, 60)
    step = max(losses(tmp_path / "run.csv")) // 4 * 4  # or the one before, if it was not decided
    on = train(3, "--steps", str(step + 1), *flags, "--resume", "latest")
    assert on.out[0].startswith(f"resumed from arena://{tmp_path}/run/step"), on.out[0]
    assert (tmp_path / "run" / f"step{step + 1}" / ".metadata").exists()
    assert not list((tmp_path / "arenas").iterdir())  # of the dead ones and of itself


def test_a_second_job_is_refused(train, tmp_path):
    """fault-rows C10: while the first one lives; behind its death the run is free at once."""
    flags = ["--save", tmp_path / "run", "--resume", "latest"]
    [first] = train(1, "--steps", "100000", "--metrics", tmp_path / "m.csv", *flags, launcher=started)
    while first.poll() is None and not losses_so_far(tmp_path / "m.csv"):
        time.sleep(0.01)
    second = train(2, "--steps", "1", *flags, launcher=launch)
    assert second.codes == [3, 3] and "another job" in second.err[0] and "tessera-lease-1.txt" in second.err[1]
    first.kill()
    first.communicate()
    assert "starting afresh" in train(2, "--steps", "1", *flags).out[0]


def losses_so_far(path):
    return losses(path) if path.exists() else {}


@pytest.mark.parametrize("way", ["thread", "process", "overlap"])
def test_pytorch_loads_what_each_way_in_the_background_saves(train, saved, tmp_path, monkeypatch, way):
    """checkpoint-rows P-31, P-32: bit for bit what the same training saves while its steps wait."""
    monkeypatch.setenv("TESSERA_COMMAND", str(TESSERA))
    train(2, "--steps", "12", "--save", tmp_path / "run", "--save-every", "4", "--async", way)
    for step in ("step4", "step8", "step12"):
        ours, waited = (loaded_by_pytorch(run / step, tmp_path / "state.pt") for run in (tmp_path / "run", saved / "run"))
        assert list(ours) == list(waited) and len(ours) > 4 * 30
        for name, value in ours.items():
            assert same_bits(value, waited[name]), (step, name)


def test_saves_as_often_as_they_cost(train, single, tmp_path):
    """First when ten steps are measured, at the same steps on all ranks; what goes on from there is the same training."""
    flags = ["--steps", "12", "--save", tmp_path / "run", "--metrics", tmp_path / "run.csv"]
    train(2, *flags, "--save-every", "auto", "--async", "overlap")
    steps = {checkpoint.name for checkpoint in (tmp_path / "run").glob("step*")}
    assert {"step10", "step12"} <= steps <= {"step10", "step11", "step12"}
    for step in steps - {"step10"}:
        shutil.rmtree(tmp_path / "run" / step)
    resumed = train(3, *flags, "--resume", "latest")
    assert "after step 10" in resumed.out[0]
    check(losses(tmp_path / "run.csv"), single)


def loaded_by_pytorch(checkpoint, file):
    """All that `dcp.load` makes of it, by names."""
    dcp_to_torch_save(checkpoint, file)
    return dict(leaves(torch.load(file, weights_only=False)))


def leaves(value, name=""):
    if not isinstance(value, (dict, list)):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{name}.{key}")


def same_bits(a, b):
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def test_python_goes_on_from_what_train_gpt_saves(single, saved, data, tmp_path):
    run([TWIN, *MODEL, *SCHEDULE, "--data", data, "--steps", "12", "--resume", saved / "run/step8", "--metrics",
         tmp_path / "py.csv"], 2)
    ours = losses(tmp_path / "py.csv")
    check(ours, {step: single[step] for step in range(9, 13)})


@pytest.mark.parametrize(("ranks", "more"), [(1, []), (2, []), (4, []), (2, ["--one-group"]), (2, ["--tied"])])
def test_train_gpt_takes_what_pytorch_saves(train, data, tmp_path, ranks, more):
    python = [TWIN, *MODEL, *SCHEDULE, "--data", data, *more]
    run([*python, "--steps", "5", "--schedule-steps", "8", "--save", tmp_path / "py/step5", "--dump",
         tmp_path / "py.pt"], ranks)
    ours = [word for word in more if word == "--tied"]
    # Saved again without a step between: all tensors, steps and groups are the same.
    again = train(2, *ours, "--steps", "5", "--resume", tmp_path / "py/step5", "--save", tmp_path / "ours")
    assert "after step 5" in again.out[0]
    run([PEERS / "load_checkpoint.py", tmp_path / "ours/step5", "--dump", tmp_path / "ours.pt", *MODEL, *more], 1)
    require_same_state(tmp_path / "ours.pt", tmp_path / "py.pt")
    # And training goes on as it does in Python.
    run([*python, "--steps", "8", "--resume", tmp_path / "py/step5", "--metrics", tmp_path / "py.csv"], ranks)
    train(3, *ours, "--steps", "8", "--resume", tmp_path / "py/step5", "--metrics", tmp_path / "ours.csv")
    check(losses(tmp_path / "ours.csv"), losses(tmp_path / "py.csv"))


def require_same_state(ours, python):
    ours, python = (torch.load(path, weights_only=False) for path in (ours, python))
    assert sorted(ours["model"]) == sorted(python["model"])
    for name, tensor in python["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
    assert sorted(ours["optim"]["state"]) == sorted(python["optim"]["state"])
    for name, state in python["optim"]["state"].items():
        for key, tensor in state.items():
            assert torch.equal(ours["optim"]["state"][name][key], tensor), (name, key)
    assert ours["optim"]["param_groups"] == python["optim"]["param_groups"]


def test_bf16_learns(train, single, tmp_path):
    train(2, "--dtype", "bf16", "--steps", "12", "--metrics", tmp_path / "m.csv")
    assert largest_difference(losses(tmp_path / "m.csv"), single) < 0.02


def test_bench_and_its_proof_that_blocks_are_freed(train):
    for sharding in ("fsdp2", "fsdp1", "ddp"):
        for ranks in (1, 2):
            assert "ms/step " in train(ranks, "--bench", "2", "--sharding", sharding).out[0]


def copy_of(saved, tmp_path):
    return shutil.copytree(saved / "run/step12", tmp_path / "bad")


def missing(saved, tmp_path):
    return tmp_path / "nowhere"


def empty(saved, tmp_path):
    (tmp_path / "bad").mkdir()
    return tmp_path / "bad"


def truncated_marker(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    data = (directory / ".metadata").read_bytes()
    (directory / ".metadata").write_bytes(data[: len(data) // 2])
    return directory


def without_data_file(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    sorted(directory.glob("*.distcp"))[1].unlink()
    return directory


def truncated_data_file(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    path = sorted(directory.glob("*.distcp"))[1]
    path.write_bytes(path.read_bytes()[:-1000])
    return directory


def good(saved, tmp_path):
    return copy_of(saved, tmp_path)


OTHER_WIDTH = "--dim 48 --layers 2 --heads 4 --seq 31".split()
MORE_LAYERS = "--dim 40 --layers 3 --heads 4 --seq 31".split()
FEWER_LAYERS = "--dim 40 --layers 1 --heads 4 --seq 31".split()
OTHER_HEADS = "--dim 40 --layers 2 --heads 8 --seq 31".split()


@pytest.mark.parametrize(("make", "model", "says"), [
    (missing, MODEL, "not_found"),
    (empty, MODEL, "not_found"),
    (truncated_marker, MODEL, ""),
    (without_data_file, MODEL, "incomplete"),
    (truncated_data_file, MODEL, ""),
    (good, OTHER_WIDTH, "mismatch"),
    (good, MORE_LAYERS, "mismatch"),
    (good, FEWER_LAYERS, "mismatch"),
    (good, OTHER_HEADS, "mismatch"),
])
def test_bad_checkpoints_are_one_clear_error_on_every_rank(train, saved, tmp_path, make, model, says):
    directory = make(saved, tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    result = train(2, "--steps", "20", "--resume", directory, "--save", tmp_path / "new", "--metrics",
                   tmp_path / "m.csv", model=model, launcher=lambda *args: launch(*args, timeout=30))
    assert result.codes == [3, 3], str(result)
    for err in result.err:
        assert len(own_lines(err)) == 1, err
        assert own_lines(err)[0].startswith("train_gpt: rank ") and says in err and "bad" in err + "bad" * (make is missing), err
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("flags", "code"), [(["--data", "nowhere.txt"], "not_found"),
                                             (["--device", "cuda"], "unsupported")])  # this libtorch is the CPU's
def test_bad_input_without_a_checkpoint(train, tmp_path, monkeypatch, flags, code):
    monkeypatch.chdir(tmp_path)
    result = train(2, *flags, launcher=lambda *args: launch(*args, timeout=30))
    assert result.codes == [3, 3], str(result)
    assert all(code in err and len(own_lines(err)) == 1 for err in result.err), str(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--heads", "7"], ["--resume", "latest"], ["--keep", "2"], ["--dtype", "fp8"],
                                   ["--device", "tpu"], ["--nonsense"], ["--steps", "-1"]])
def test_wrong_usage_is_exit_code_2(train, flags):
    result = train(1, *flags, launcher=launch)
    assert result.codes == [2] and result.err[0].strip(), str(result)
