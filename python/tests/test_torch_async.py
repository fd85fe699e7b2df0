"""`tessera.torch.async_save` stands on one `CheckpointWriter` of each process group."""

import copy
import datetime
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tessera.torch import _async  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402
from tests_of_torch import cleared, run_ranks, same, start_ranks, state_of  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="torch.distributed is unavailable")


def training():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.ones(8, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_optimizer_goes_on_and_what_is_saved_is_of_the_call_r15(tmp_path):
    model, optimizer = training()
    step(model, optimizer)
    for number in range(20):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "step": number}
        expected = copy.deepcopy(state)
        future = tessera.torch.async_save(state, checkpoint_id=tmp_path / f"{number}")
        assert isinstance(future, tessera.PendingSave) and future.staged()
        while not future.done():
            step(model, optimizer)
        assert future.result().files > 0
        for load in (dcp.load, tessera.torch.load):
            into = cleared(copy.deepcopy(expected))
            load(into, checkpoint_id=tmp_path / f"{number}")
            assert same(into, expected)


def test_torch_loads_all_that_a_state_may_hold(tmp_path):
    for name, save in {"async": lambda *a, **k: tessera.torch.async_save(*a, **k).result(), "save": tessera.torch.save}.items():
        save(state_of(True), checkpoint_id=tmp_path / name)
    into = state_of(False)
    dcp.load(into, checkpoint_id=tmp_path / "async")
    assert same(into, state_of(True))
    assert tessera.diff(tmp_path / "async", tmp_path / "save") == []
    assert tessera.verify(tmp_path / "async").bytes_unchecked == 0


def test_views_do_not_take_the_memory_of_all_of_their_storage(tmp_path):
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    state = {"column": large[:, 3], "rows": large[5:7], "t": large[:4, :4].T, "one": large[9, 9], "none": large[:0],
             "expanded": large[0, :1].expand(1000), "bits": torch.view_as_complex(large[:2, :4].reshape(2, 2, 2)).conj()}  # fmt: skip
    tree = tessera._core.make_tree(state, tessera.torch._tree.describe_for_ranks(1, state))
    assert tessera._core.bytes_of(tree) < large.nbytes * 1.01  # the column spans all of it
    tree = tessera._core.make_tree(state | {"column": 0}, tessera.torch._tree.describe_for_ranks(1, state))
    assert tessera._core.bytes_of(tree) < large.nbytes // 20
    expected = {name: tensor.clone() for name, tensor in state.items()}
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path)
    large.zero_()
    future.result()
    found = tessera.load(tmp_path, framework="torch")
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.resolve_conj()), name


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_the_second_save_has_the_memory_of_the_first(tmp_path):
    state = {str(i): torch.ones(1 << 18) for i in range(64)}
    tessera.torch.async_save(state, checkpoint_id=tmp_path).result()
    saves = _async._alone[False]
    after_first = resident()
    for _ in range(10):
        tessera.torch.async_save(state, checkpoint_id=tmp_path).result()
        assert _async._alone == {False: saves}
    assert resident() < after_first + (8 << 20)  # of 64 MiB


def test_an_error_that_nobody_took_is_raised_by_the_next_call_r13(tmp_path):
    (tmp_path / "file").write_text("no directory")
    state = {"w": torch.ones(4)}
    tessera.torch.async_save(state, checkpoint_id=tmp_path / "file")
    with pytest.raises(tessera.AlreadyExistsError, match="an earlier save in the background"):
        tessera.torch.async_save(state, checkpoint_id=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path / "file")
    assert isinstance(future.exception(), tessera.AlreadyExistsError)
    tessera.torch.async_save(state, checkpoint_id=tmp_path / "a").result()


class Own(torch.Tensor):
    """Which torch's planner has to resolve."""


def test_what_is_left_to_torch_is_saved_in_turn(tmp_path):
    state = {"w": torch.ones(1000)}
    special = {"w": torch.ones(4).as_subclass(Own)}
    futures = []
    for number in range(3):
        futures.append(tessera.torch.async_save(state, checkpoint_id=tmp_path))
        futures.append(tessera.torch.async_save(special, checkpoint_id=tmp_path))
        assert not isinstance(futures[-1], tessera.PendingSave)
    futures.append(tessera.torch.async_save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner()))
    for future in futures:
        future.result(60)
    assert torch.equal(tessera.load(tmp_path, framework="torch")["w"], state["w"])


class Asked:
    """A part of the state that counts how often it is asked."""

    def __init__(self, state):
        self.state, self.count = state, 0

    def state_dict(self):
        self.count += 1
        return self.state

    def load_state_dict(self, state):
        raise NotImplementedError


def test_parts_of_the_state_are_asked_once(tmp_path):
    for tensor in (torch.ones(4), torch.ones(4).as_subclass(Own)):
        part = Asked({"w": tensor})
        tessera.torch.async_save({"part": part}, checkpoint_id=tmp_path).result(60)
        assert part.count == 1 and tessera.load(tmp_path, framework="torch")["part"]["w"].all()


class Elsewhere:
    """A writer of somebody else's."""

    def __new__(cls, path):
        return dcp.FileSystemWriter(path)


def test_what_is_torchs_own(tmp_path):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        state = {"w": torch.ones(4)}
        stager = DefaultStager(StagingOptions(False, False, False, False))
        for name, arguments in {
            "stager": {"checkpoint_id": tmp_path / "stager", "async_stager": stager},
            "writer": {"storage_writer": Elsewhere(tmp_path / "writer")},
        }.items():
            future = tessera.torch.async_save(state, **arguments)
            assert not isinstance(future, tessera.PendingSave)
            future.result(60)
            assert tessera.load(tmp_path / name, framework="torch")["w"].all()
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_of_a_device_are_copied_to_this_process(tmp_path, monkeypatch):
    """Without a device: what is told to be on one."""
    from tessera.torch import _plain

    def is_plain(tensor, anywhere=False):
        return anywhere and _plain.is_plain(tensor)

    monkeypatch.setattr("tessera.torch._tree.is_plain", is_plain)
    state = {"w": torch.nn.Parameter(torch.ones(4))}
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path)
    assert isinstance(future, tessera.PendingSave)
    with torch.no_grad():
        state["w"].zero_()
    future.result()
    assert tessera.load(tmp_path, framework="torch")["w"].all()


def test_a_child_of_fork_saves_by_a_writer_of_its_own_r18(tmp_path):
    state = {"w": torch.ones(1 << 20)}
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path / "parent")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if child == 0:
        wrong = 1
        try:
            small = {"w": torch.full((4,), 2.0)}
            tessera.torch.async_save(small, checkpoint_id=tmp_path / "child", no_dist=True).result(60)
            try:
                future.result()
            except tessera.InvalidArgumentError:
                wrong = 0
        finally:
            os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    future.result()
    assert tessera.load(tmp_path / "parent")["w"].all() and tessera.load(tmp_path / "child")["w"].tolist() == [2] * 4


AT_THE_END = """
    import sys, time, warnings
    import torch, tessera.torch

    class Late(torch.distributed.checkpoint.DefaultSavePlanner):
        def create_local_plan(self):
            time.sleep(1)
            return super().create_local_plan()

    warnings.filterwarnings("ignore", message="torch.distributed is")
    state = {"w": torch.ones(1 << 24), "v": torch.ones(1)}
    planner = Late() if sys.argv[2] == "torch" else None
    tessera.torch.async_save(state, checkpoint_id=sys.argv[1], planner=planner, no_dist=True)
    state["w"].zero_()
"""


@pytest.mark.parametrize("who", ["us", "torch"])
def test_the_end_of_the_program_waits_r12(who, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(AT_THE_END), tmp_path / "a", who]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tessera.load(tmp_path / "a", framework="torch")["w"].all()
    (tmp_path / "file").write_text("no directory")
    ended = subprocess.run([*command[:3], tmp_path / "file", who], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "nobody took its error" in ended.stderr


def loaded_by_both(expected, path):
    for load in (dcp.load, tessera.torch.load):
        into = cleared(copy.deepcopy(expected))
        load(into, checkpoint_id=path)
        assert same(into, expected), load


def of_two_ranks(rank, ranks, directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    warnings.simplefilter("ignore")

    def state(number):
        value = torch.arange(1000.0).reshape(100, 10) + number
        return {
            "rows": distribute_tensor(value, mesh, [Shard(0)]), "columns": distribute_tensor(value, mesh, [Shard(1)]),
            "whole": distribute_tensor(value, mesh, [Replicate()]), "plain": value.clone(), f"own{rank}": value + rank, "n": number,
        }  # fmt: skip

    for number in range(5):
        now = state(number)
        future = tessera.torch.async_save(now, checkpoint_id=f"{directory}/{number}")
        assert isinstance(future, tessera.PendingSave)
        for tensor in now.values():  # a step, whose collectives do not meet those of the save
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        for _ in range(20):
            torch.distributed.all_reduce(torch.ones(10))
        assert future.result(60).files > 0
        loaded_by_both(state(number), f"{directory}/{number}")
    assert len(_async._kept) == 1 and not _async._alone

    # What one rank cannot save is the error of all, and the next save works. Who has not taken it hears of it there.
    future = tessera.torch.async_save({"x": threading.Lock() if rank == 1 else 1}, checkpoint_id=f"{directory}/x")
    with pytest.raises(tessera.UnsupportedError, match="pickle"):
        future.result(60)
    future = tessera.torch.async_save({"x": threading.Lock() if rank == 1 else 1}, checkpoint_id=f"{directory}/x")
    if rank == 0:
        assert isinstance(future.exception(60), tessera.UnsupportedError)
        future = tessera.torch.async_save({"x": 1}, checkpoint_id=f"{directory}/x")
        assert isinstance(future.exception(60), tessera.UnsupportedError)
    else:
        while not future.done():
            time.sleep(0.01)
        with pytest.raises(tessera.UnsupportedError, match="an earlier save"):
            tessera.torch.async_save({"x": 1}, checkpoint_id=f"{directory}/x")
    tessera.torch.async_save({"x": 1}, checkpoint_id=f"{directory}/x").result(60)

    # One rank holds what only torch can resolve, and another one fails at that.
    special = torch.ones(4).as_subclass(Own)
    future = tessera.torch.async_save({f"w{rank}": special if rank == 1 else threading.Lock()}, checkpoint_id=f"{directory}/y")
    with pytest.raises(tessera.UnsupportedError, match="pickle"):
        future.result(60)
    tessera.torch.async_save({f"w{rank}": special if rank == 1 else 1}, checkpoint_id=f"{directory}/y").result(60)

    # A group of its own has a writer of its own, and gives its memory back when it goes.
    other = torch.distributed.new_group(list(range(ranks)))
    tessera.torch.async_save(state(7), checkpoint_id=f"{directory}/z", process_group=other).result(60)
    assert len(_async._kept) == 2 and not _async._alone
    torch.distributed.destroy_process_group(other)
    del other
    gc.collect()
    assert len(_async._kept) == 1

    # Some of the ranks.
    some = torch.distributed.new_group([1])
    if rank == 1:
        tessera.torch.async_save({"n": 1}, checkpoint_id=f"{directory}/some", process_group=some).result(60)

    # A writer of one's own beside the group.
    with tessera.CheckpointWriter(torch.distributed.group.WORLD, idle=False) as writer:
        writer.save({f"own{rank}": torch.ones(4), "n": 1}, f"{directory}/own")
    assert set(tessera.open(f"{directory}/own")) == {"own0", "own1", "n"}

    # Each alone.
    tessera.torch.async_save({"n": rank}, checkpoint_id=f"{directory}/alone{rank}", no_dist=True).result(60)
    assert len(_async._alone) == 1


def test_two_ranks(tmp_path):
    run_ranks(of_two_ranks, 2, str(tmp_path))


def of_calls_in_callbacks(rank, ranks, directory):
    refused = []

    def call(_):
        try:
            tessera.torch.async_save({"n": 1}, checkpoint_id=f"{directory}/b")
        except tessera.InvalidArgumentError:
            refused.append(rank)

    future = tessera.torch.async_save({f"own{rank}": torch.ones(1 << 22)}, checkpoint_id=f"{directory}/a")
    if rank == 0:
        future.add_done_callback(call)
    future.result(60)
    tessera.torch.async_save({"n": 2}, checkpoint_id=f"{directory}/c").result(60)
    assert refused == [0] * (rank == 0)


def test_a_callback_of_one_rank_may_not_save(tmp_path):
    run_ranks(of_calls_in_callbacks, 2, str(tmp_path))
    assert not (tmp_path / "b").exists()


def of_connections_that_are_lost(rank, ranks, directory):
    saves = [tessera.torch.async_save({"n": 1}, checkpoint_id=f"{directory}/a")]
    saves[0].result(60)
    before = _async._kept[torch.distributed.group.WORLD][False]
    before._writer._carrier._gloo = None
    future = tessera.torch.async_save({"n": 2}, checkpoint_id=f"{directory}/a")
    failure = future.exception(60)
    assert isinstance(failure, tessera.PeerFailedError) and "AttributeError: " in str(failure), repr(failure)
    tessera.torch.async_save({"n": 3}, checkpoint_id=f"{directory}/a").result(60)
    assert _async._kept[torch.distributed.group.WORLD][False] is not before


def test_connections_that_are_lost_are_made_anew(tmp_path):
    run_ranks(of_connections_that_are_lost, 2, str(tmp_path))
    assert tessera.load(tmp_path / "a")["n"] == 3


def of_messages_far_apart(rank, ranks, _):
    from tessera.torch._group import OwnGroup

    torch.distributed.constants.default_pg_timeout = datetime.timedelta(seconds=1)
    group = OwnGroup(torch.distributed.group.WORLD)
    for late in range(ranks):
        if rank == late:
            time.sleep(2)
        assert group.all_gather(b"x") == [b"x"] * ranks
        assert group.broadcast(b"y", 0) == b"y" and group.scatter([b"z"] * ranks, 1) == b"z"
        assert (group.gather(b"g", 0) or [b"g"])[0] == b"g"


def test_messages_may_be_far_apart():
    run_ranks(of_messages_far_apart, 2, None)


def of_ranks_by_a_process(rank, ranks, directory):
    kind = AsyncCheckpointerType.PROCESS
    for number in range(3):
        state = {f"own{rank}": torch.full((1000,), float(number)), "n": number}
        future = tessera.torch.async_save(state, checkpoint_id=f"{directory}/step{number}", async_checkpointer_type=kind)
        assert isinstance(future, tessera.PendingSave)
        state[f"own{rank}"].fill_(-1)
        future.result(60)
    assert _async._kept[torch.distributed.group.WORLD].keys() == {True}
    assert len(writer_processes()) == 1


def writer_processes():
    """Those of this process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as line:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid() and line.read().split("\0")[1:2] == ["writer"]:
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            pass
    return found


def test_two_ranks_by_a_process(tmp_path):
    run_ranks(of_ranks_by_a_process, 2, str(tmp_path))
    for number in range(3):
        state = {"own0": torch.zeros(1000), "own1": torch.zeros(1000), "n": -1}
        dcp.load(state, checkpoint_id=str(tmp_path / f"step{number}"), no_dist=True)
        assert state["n"] == number and (state["own0"] == number).all() and (state["own1"] == number).all()
    assert not list(tmp_path.glob(".tessera*"))


def of_ranks_that_are_killed(rank, ranks, directory):
    for number, keep in ((0, 0.0), (1, 60.0), (2, 60.0)):
        state = {f"own{rank}": torch.full((1000,), float(number)), "n": number}
        tessera.torch.async_save(
            state,
            checkpoint_id=f"{directory}/step{number}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            keep=keep,
        ).result(60)
    assert len(writer_processes()) == 1  # that of the first one has ended
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def into_ranks(rank, ranks, directory, before):
    state = {f"own{other}": torch.zeros(1000) for other in range(before)} | {"n": -1}
    tessera.torch.load(state, checkpoint_id=f"arena://{directory}/step2")
    assert state.pop("n") == 2 and all((tensor == 2).all() for tensor in state.values())


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_ranks_start_again_from_what_processes_keep(before, after, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_ARENA_DIR", str(tmp_path / "arenas"))
    directory = str(tmp_path / "run")
    processes = start_ranks(with_arenas_in, before, str(tmp_path / "arenas"), of_ranks_that_are_killed, directory)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * before
    try:
        with tessera.open(f"arena://{directory}/step2") as kept:
            assert kept.kind == "arena" and kept.world_size == before
        run_ranks(with_arenas_in, after, str(tmp_path / "arenas"), into_ranks, directory, before)
    finally:
        for notice in (tmp_path / "arenas").iterdir():  # whose processes end then
            notice.unlink()


def with_arenas_in(rank, ranks, arenas, body, *arguments):
    """The server that ranks are forked from has the environment of an earlier test."""
    os.environ["TESSERA_ARENA_DIR"] = arenas
    body(rank, ranks, *arguments)


def test_only_our_process_keeps(tmp_path):
    kind = AsyncCheckpointerType.PROCESS
    planner = type("Planner", (dcp.DefaultSavePlanner,), {})()
    for options in ({}, {"async_checkpointer_type": kind, "planner": planner}):
        with pytest.raises(ValueError, match="invalid_argument: keep is"):
            tessera.torch.async_save({"n": 1}, checkpoint_id=tmp_path / "a", no_dist=True, keep=5.0, **options)
    state = {"odd": torch.ones(4).as_subclass(type("Odd", (torch.Tensor,), {}))}  # which torch's planner has to resolve
    with pytest.raises(ValueError, match="only torch can save"):
        tessera.torch.async_save(
            state, checkpoint_id=tmp_path / "a", no_dist=True, keep=5.0, async_checkpointer_type=kind
        ).result(60)


def of_a_process_that_is_killed(rank, ranks, directory):
    victim = rank == ranks - 1

    def save(number):
        state = {f"own{rank}": torch.full((1000,), float(number)), "n": number}
        return tessera.torch.async_save(
            state, checkpoint_id=f"{directory}/step{number}", async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )

    def kept():
        return (_async._kept[torch.distributed.group.WORLD] if ranks > 1 else _async._alone)[True]

    def gone(caught):
        return [str(one.message) for one in caught if "was ended by signal 9" in str(one.message)]

    save(0).result(60)
    first = kept()
    if victim:  # it dies while it is handed the save
        (process,) = writer_processes()
        os.kill(process, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
    future = save(1)
    takes = victim and ranks > 1
    if takes:
        with pytest.raises(tessera.Error, match="was ended by signal 9"):
            future.result(60)
    while not future.done():
        time.sleep(0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if takes:
            with pytest.raises(tessera.Error, match="an earlier save had failed"):
                save(2).result(60)
        else:
            with pytest.raises(tessera.Error, match="was ended by signal 9.*an earlier save in the background"):
                save(2)
        assert save(3).result(60).files > 0
    assert len(gone(caught)) == victim and kept() is not first

    second = kept()
    if victim:  # it dies between two saves
        os.kill(*writer_processes(), signal.SIGKILL)
        while not second.loss:
            time.sleep(0.01)
    if ranks > 1:
        torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert save(4).result(60).files > 0
    assert len(gone(caught)) == victim and kept() is not second and len(writer_processes()) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_is_lost_is_replaced(ranks, tmp_path):
    run_ranks(of_a_process_that_is_killed, ranks, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step0", "step3", "step4"]
    for number in (0, 3, 4):
        state = {f"own{rank}": torch.zeros(1000) for rank in range(ranks)}
        dcp.load(state, checkpoint_id=str(tmp_path / f"step{number}"), no_dist=True)
        assert all((tensor == number).all() for tensor in state.values())


def of_a_group_that_goes(rank, ranks, directory):
    future = tessera.torch.async_save({"w": torch.ones(1 << 22), f"own{rank}": torch.ones(1 << 22)}, checkpoint_id=f"{directory}/a")
    is_under_way = not future.done()
    torch.distributed.destroy_process_group()
    gc.collect()
    assert is_under_way and future.result().files > 0 and not _async._kept
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=ranks)
    tessera.torch.async_save({f"own{rank}": 1}, checkpoint_id=f"{directory}/b").result(60)


def test_the_process_group_goes_away_r17(tmp_path):
    run_ranks(of_a_group_that_goes, 2, str(tmp_path))
    assert tessera.verify(tmp_path / "a").findings == [] and set(tessera.open(tmp_path / "b")) == {"own0", "own1"}


def messages(rank, ranks, _):
    from tessera.torch._group import OwnGroup

    group = OwnGroup(torch.distributed.group.WORLD)
    for mine in (b"", b"x" * (1 + rank * 1000), b"" if rank == 1 else b"\0\1"):
        all_messages = torch.distributed.all_gather_object(found := [None] * ranks, mine) or found
        assert group.all_gather(mine) == all_messages
        for root in range(ranks):
            assert group.gather(mine, root) == (all_messages if rank == root else None)
            assert group.broadcast(mine if rank == root else b"none", root) == all_messages[root]
            assert group.scatter(all_messages if rank == root else [], root) == mine


def test_messages_of_any_length(tmp_path):
    run_ranks(messages, 3, str(tmp_path))


def one_is_killed(rank, ranks, directory):
    state = {"w": torch.ones(1 << 20), f"own{rank}": 1}
    tessera.torch.async_save(state, checkpoint_id=f"{directory}/a").result(60)
    torch.distributed.barrier()
    if rank == 1:
        os._exit(9)
    time.sleep(0.5)
    try:
        tessera.torch.async_save(state, checkpoint_id=f"{directory}/a").result(60)
    except tessera.PeerFailedError:
        os._exit(3)


def test_a_rank_that_dies_is_an_error(tmp_path):
    processes = start_ranks(one_is_killed, 2, str(tmp_path))
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [3, 9]
    assert tessera.load(tmp_path / "a", framework="torch")["w"].all()
