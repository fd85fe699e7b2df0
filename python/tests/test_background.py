"""`tessera.CheckpointWriter`: what it saves, whom it tells, and what it does beside signals, forks and the end of the program."""

import asyncio
import concurrent.futures
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import numpy
import pytest

import tessera

SIZE = 1 << 20  # elements of a float32 that is saved
SLOW = 4 << 20  # bytes a second: a second for one of these


@pytest.fixture(autouse=True)
def interruptible():
    """Also where whoever started the tests ignores SIGINT, as a shell does for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def array():
    return numpy.arange(SIZE, dtype="float32")


def loaded(path):
    return tessera.load(path, framework="numpy")


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("name", ["step400", "model.pt", "model.safetensors"])
def test_what_is_saved_is_of_the_call_r15(name, process, array, tmp_path):
    values = {"list": [1], "bytes": bytearray(b"abc")} if name != "model.safetensors" else {}
    with tessera.CheckpointWriter(process=process) as writer:
        for number in range(3):
            array[:] = number
            values["n"] = number
            pending = writer.save({"w": array, "view": array[10:20], **values}, tmp_path / name)
            assert pending.staged()
            array[:] = -1
            values.get("list", []).append(number)
            values["n"] = -1
            assert pending.result().files > 0 and pending.exception() is None and pending.done()
            found = loaded(tmp_path / name)
            assert (found["w"] == number).all() and (found["view"] == number).all() and found["n"] == number
            assert "list" not in values or found["list"] == [1] + list(range(number))
            assert tessera.verify(tmp_path / name).findings == []


def test_a_relative_path_is_that_of_the_call(array, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with tessera.CheckpointWriter(idle=False, rate=SLOW * 4) as writer:
        writer.save({"w": array}, "a.pt")
        monkeypatch.chdir(tmp_path)
    assert (tmp_path / "there" / "a.pt").exists()


def test_other_threads_run_while_it_waits(tmp_path):
    """The lock of the interpreter is free in save(), wait() and close()."""
    ticks = []
    done = threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    writer = tessera.CheckpointWriter(idle=False, rate=SLOW)
    first = {"w": numpy.zeros(SIZE // 4, "float32")}
    writer.save(first, tmp_path / "a")
    counts = []
    for call in (lambda: writer.save(first, tmp_path / "b"), writer.wait, lambda: writer.save(first, tmp_path / "c"), writer.close):
        before = len(ticks)
        call()
        counts.append(len(ticks) - before)
    done.set()
    thread.join()
    assert min(counts[0], counts[1], counts[3]) > 10


def test_it_is_a_future(array, tmp_path):
    with tessera.CheckpointWriter(idle=False, rate=SLOW) as writer:
        heard = []
        pending = writer.save({"w": array}, tmp_path / "a")
        pending.add_done_callback(heard.append)
        assert not pending.done() and pending.running() and not pending.cancel()
        with pytest.raises(concurrent.futures.TimeoutError):
            pending.result(timeout=0.01)
        with pytest.raises(concurrent.futures.TimeoutError):
            pending.exception(timeout=0.01)
        assert concurrent.futures.wait([pending], timeout=60).done == {pending}
        writer.wait()
        assert heard == [pending]

        async def awaited():
            return await asyncio.wrap_future(writer.save({"w": array[:10]}, tmp_path / "b"))

        assert asyncio.run(awaited()).files > 0
        (tmp_path / "file").write_text("")
        failing = writer.save({"w": array[:10]}, tmp_path / "file" / "c")
        assert [type(one.exception()) for one in concurrent.futures.as_completed([failing])] == [tessera.AlreadyExistsError]


def test_an_error_that_nobody_took_is_raised_by_the_next_call_r13(array, tmp_path):
    (tmp_path / "file").write_text("no directory")
    bad, good = tmp_path / "file" / "a", tmp_path / "b"
    with tessera.CheckpointWriter(idle=False) as writer:
        pending = writer.save({"w": array}, bad)
        with pytest.raises(tessera.AlreadyExistsError, match="an earlier save"):
            writer.save({"w": array}, good)
        assert not good.exists()
        with pytest.raises(tessera.AlreadyExistsError):
            pending.result()
        for take in (lambda p: p.exception(), lambda p: p.add_done_callback(lambda p: p.exception())):
            take(writer.save({"w": array}, bad))
            writer.save({"w": array}, good).result()
        writer.save({"w": array}, bad)
        with pytest.raises(tessera.AlreadyExistsError):
            writer.wait()
        writer.wait()
    writer = tessera.CheckpointWriter()
    writer.save({"w": array}, bad)
    with pytest.warns(UserWarning, match="nobody took its error"):
        writer.close()
    with pytest.raises(tessera.AlreadyExistsError), tessera.CheckpointWriter() as writer:
        writer.save({"w": array}, bad)


def test_what_cannot_be_saved_fails_its_save_alone(array, tmp_path):
    class Own:
        pass

    with tessera.CheckpointWriter(idle=False) as writer:
        pending = writer.save({"w": array, "deep": {"x": Own()}}, tmp_path / "a")
        assert not pending.staged()
        with pytest.raises(tessera.UnsupportedError, match="Own is no tensor") as raised:
            pending.result()
        assert raised.value.key == "deep.x" and raised.value.__cause__.key == "deep.x"
        cycle = []
        cycle.append(cycle)
        assert isinstance(writer.save(cycle, tmp_path / "a").exception(), tessera.InvalidArgumentError)
        writer.save({"w": array}, tmp_path / "a").result()
        with pytest.raises(TypeError):
            writer.save({"w": array}, tmp_path / "b", rename=["a=>b"])
        with pytest.raises(tessera.InvalidArgumentError, match="values"):
            writer.save({"w": array}, tmp_path / "b", values="maybe")


def test_one_that_refuses_skips_saves_r11(array, tmp_path):
    with tessera.CheckpointWriter(idle=False, if_busy="refuse", rate=SLOW) as writer:
        first = writer.save({"w": array}, tmp_path / "a")
        refused = writer.save({"w": array}, tmp_path / "b")
        assert refused.done() and not refused.staged()
        heard = []
        refused.add_done_callback(heard.append)
        assert heard == [refused]
        with pytest.raises(tessera.LimitError, match="under way"):
            refused.result()
        writer.save({"w": array}, tmp_path / "b")  # dropped: no later call raises it
        first.result()
        writer.wait()
        writer.save({"w": array}, tmp_path / "b").result()


def test_the_next_save_waits_for_the_last_one_r11(array, tmp_path):
    with tessera.CheckpointWriter(idle=False, rate=SLOW) as writer:
        first = writer.save({"w": array}, tmp_path / "a")
        second = writer.save({"w": array}, tmp_path / "b")
        assert first.done() and not second.done()
        assert tessera.load(tmp_path / "b")["w"].shape == (SIZE,)  # waits, too
        assert second.done()


def test_memory_stays_as_it_is(tmp_path):
    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    state = {str(i): numpy.ones(SIZE // 4, "float32") for i in range(32)}
    needed = tessera.CheckpointWriter.bytes_of(state)
    assert needed >= 32 * SIZE
    with tessera.CheckpointWriter(idle=False, bytes=needed) as writer:
        writer.save(state, tmp_path / "a").result()
        after_first = resident()
        for _ in range(20):
            writer.save(state, tmp_path / "a").result()
        assert resident() < after_first + needed // 4
        with pytest.raises(tessera.LimitError, match="bytes"):
            writer.save({"w": numpy.ones(16 * SIZE)}, tmp_path / "a").result()


def test_callbacks_may_end_a_writer_but_not_call_it(array, tmp_path):
    writer, other = tessera.CheckpointWriter(idle=False, rate=SLOW), tessera.CheckpointWriter(idle=False, rate=SLOW // 4)
    later = other.save({"w": array}, tmp_path / "later")
    raised, done = [], threading.Event()

    def hear(pending):
        calls = (lambda: writer.save({"w": array}, tmp_path / "b"), writer.wait, later.result, later.exception, other.wait)
        for call in calls:
            try:
                call()
            except tessera.InvalidArgumentError as error:
                raised.append(str(error))
        raised.append(later.done())
        writer.close()
        done.set()

    pending = writer.save({"w": array[: SIZE // 4]}, tmp_path / "a")
    pending.add_done_callback(hear)
    assert done.wait(60) and len(raised) == 6 and raised.pop() is False and all("a callback" in text for text in raised)
    assert pending.result().files > 0 and later.result().files > 0
    other.close()
    with pytest.raises(tessera.InvalidArgumentError, match="closed"):
        writer.save({"w": array}, tmp_path / "b")


def test_a_save_that_failed_does_not_keep_the_state(tmp_path):
    class Part:
        def __init__(self):
            self.array = numpy.ones(4)

    def failed(writer):
        part = Part()
        return weakref.ref(part), weakref.ref(part.array), writer.save({"w": part.array, "x": part}, tmp_path / "a")

    with tessera.CheckpointWriter(idle=False) as writer:
        part, array, pending = failed(writer)
        error = pending.exception()
        assert sys.version_info < (3, 11) or "in _begin" in error.__cause__.__notes__[0]
        del error
        gc.collect()
        assert part() is None and array() is None
        assert pending.exception() is not None


def test_a_writer_that_nobody_has_any_more_waits_for_its_saves(array, tmp_path):
    pending = tessera.CheckpointWriter(idle=False, rate=SLOW).save({"w": array}, tmp_path / "a")
    gc.collect()
    assert pending.done() and loaded(tmp_path / "a")["w"][-1] == SIZE - 1


def interrupted(call, after=0.3):
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()
    return time.monotonic() - begin


def test_ctrl_c_ends_waits(array, tmp_path):
    """The save goes on where its caller only waits for it."""
    with tessera.CheckpointWriter(idle=False, rate=SLOW // 4) as writer:
        first = writer.save({"w": array}, tmp_path / "a")
        assert interrupted(first.result) < 2 and interrupted(writer.wait) < 2
        assert not first.done()
        assert interrupted(lambda: writer.save({"w": array}, tmp_path / "b")) < 2
        first.result()
        writer.wait()  # the save that was interrupted has failed, and was told
        assert not (tmp_path / "b").exists()
        writer.save({"w": array[:10]}, tmp_path / "b").result()


def test_ctrl_c_ends_a_wait_for_callbacks(array, tmp_path):
    go = threading.Event()
    with tessera.CheckpointWriter(idle=False, if_busy="refuse", rate=SLOW // 2) as writer:
        pending = writer.save({"w": array}, tmp_path / "a")
        pending.add_done_callback(lambda _: go.wait(60))
        assert not writer.save({"w": array}, tmp_path / "b").staged()  # refused
        assert interrupted(writer.wait) < 1.5
        pending.result()
        begin = time.monotonic()
        threading.Timer(5, go.set).start()
        assert interrupted(writer.wait) < 2 and interrupted(writer.wait) < 2
        go.set()
        writer.wait()
        assert time.monotonic() - begin < 4


def test_ctrl_c_ends_the_end(array, tmp_path):
    writer = tessera.CheckpointWriter(idle=False, rate=SLOW // 8)
    pending = writer.save({"w": array}, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert interrupted(writer.close) < 4
        assert isinstance(pending.exception(), tessera.CancelledError) and not (tmp_path / "a").exists()


def no_more_tasks_than(count):
    """A thread that has been joined may stand in /proc a little longer."""
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > count and time.monotonic() < end:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task")) <= count


def test_a_child_of_fork_has_no_part_of_it_r18(array, tmp_path):
    tasks = len(os.listdir("/proc/self/task"))
    with tessera.CheckpointWriter(idle=False, rate=SLOW) as writer:
        pending = writer.save({"w": array}, tmp_path / "a")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads
            child = os.fork()
        if child == 0:
            wrong = 1
            try:
                calls = (pending.result, pending.done, pending.staged, pending.exception, writer.wait)
                calls += (lambda: pending.add_done_callback(print), lambda: writer.save({"n": 1}, tmp_path / "b"))
                refused = 0
                for call in calls:
                    try:
                        call()
                    except tessera.InvalidArgumentError:
                        refused += 1
                writer.close()
                del pending, writer
                gc.collect()
                with tessera.CheckpointWriter(idle=False) as own:
                    own.save({"w": array[:10]}, tmp_path / "c").result()
                wrong = len(calls) - refused
            finally:
                os._exit(wrong)
        assert os.waitpid(child, 0)[1] == 0
        pending.result()
    assert (loaded(tmp_path / "a")["w"] == array).all() and loaded(tmp_path / "c")["w"].size == 10
    assert no_more_tasks_than(tasks)


def test_a_child_that_a_callback_forks_saves_r18(array, tmp_path):
    def fork(_):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads
            child = os.fork()
        if child == 0:
            wrong = 1
            try:
                with tessera.CheckpointWriter(idle=False) as own:
                    own.save({"w": array[:10]}, tmp_path / "child").result()
                wrong = 0
            finally:
                os._exit(wrong)
        codes.append(os.waitpid(child, 0)[1])

    codes = []
    with tessera.CheckpointWriter(idle=False) as writer:
        writer.save({"w": array}, tmp_path / "a").add_done_callback(fork)
    assert codes == [0] and loaded(tmp_path / "child")["w"].size == 10


AT_THE_END = """
    import os, sys, threading, time
    import numpy, tessera

    directory, how = sys.argv[1:3]
    rate = 4 << 20
    writer = tessera.CheckpointWriter(idle=False, rate=rate, end_within=1.0 if how == "short" else 60)
    pending = writer.save({"w": numpy.ones((20 if how == "short" else 1) << 20, "float32")}, directory + "/a")
    if how == "callback":
        pending.add_done_callback(lambda save: print("heard", save.result().files > 0, flush=True))
    if how in ("closed", "dropped"):  # in a callback, while it saves
        def end(_):
            global writer
            if how == "closed":
                writer.close()
            del writer
            print("ended", pending.done(), flush=True)
        other = tessera.CheckpointWriter(idle=False)
        other.save({"w": numpy.ones(4)}, directory + "/b").add_done_callback(end)
        other.wait()
    if how == "failed":
        pending = writer.save({"w": object()}, directory + "/b")
    if how == "raised":
        raise ValueError("the training")
    if how == "daemon":
        def save():
            while True:
                try:
                    writer.save({"w": numpy.ones(1 << 16)}, directory + "/b")
                except tessera.Error:
                    pass
        threading.Thread(target=save, daemon=True).start()
        time.sleep(0.5)
    sys.exit(7)
"""


@pytest.mark.parametrize("how", ["nothing", "callback", "closed", "dropped", "failed", "raised", "daemon", "short"])
def test_the_end_of_the_program_waits_r12(how, tmp_path):
    for _ in range(3 if how == "daemon" else 1):
        command = [sys.executable, "-c", textwrap.dedent(AT_THE_END), tmp_path, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == (1 if how == "raised" else 7), ended.stderr
        if how == "short":
            assert "cancelled" in ended.stderr and not (tmp_path / "a").exists()
            continue
        assert (loaded(tmp_path / "a")["w"] == 1).all()
        assert ended.stdout == {"callback": "heard True\n", "closed": "ended False\n", "dropped": "ended False\n"}.get(how, "")
        said = {"failed": "nobody took its error", "raised": "the training"}.get(how, "")
        assert said in ended.stderr and (said or how == "daemon" or ended.stderr == "")


def _save_and_go(path):
    writer = tessera.CheckpointWriter(idle=False, rate=SLOW)
    writer.save({"w": numpy.ones(SIZE, "float32")}, path)
    globals()["kept"] = writer


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_the_end_of_a_process_of_multiprocessing_waits_r12(how, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = multiprocessing.get_context(how).Process(target=_save_and_go, args=(tmp_path / "a",))
        child.start()
    child.join(60)
    assert child.exitcode == 0 and (loaded(tmp_path / "a")["w"] == 1).all()


class Threads:
    """Ranks that are threads, as the group of writers."""

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size = rank, size
        self._slots, self._barrier = slots, barrier

    def all_gather(self, message):
        self._slots[self.rank] = message
        self._barrier.wait(60)
        messages = list(self._slots)
        self._barrier.wait(60)
        return messages

    def gather(self, message, root):
        messages = self.all_gather(message)
        return messages if self.rank == root else None

    def broadcast(self, message, root):
        return self.all_gather(message)[root]

    def scatter(self, messages, root):
        return self.all_gather(messages)[root][self.rank]


def test_ranks_save_together(array, tmp_path):
    slots, barrier = [None, None], threading.Barrier(2)
    writers = [tessera.CheckpointWriter(Threads(rank, 2, slots, barrier), idle=rank == 0) for rank in range(2)]
    saves = [writer.save({f"own{rank}": array, "both": 1}, tmp_path / "a") for rank, writer in enumerate(writers)]
    array[:] = -1
    assert len({save.result().files for save in saves}) == 1
    found = loaded(tmp_path / "a")
    assert set(found) == {"own0", "own1", "both"} and found["own1"][-1] == SIZE - 1
    # What one rank cannot save is the error of all, which one of them takes.
    saves = [writer.save({"w": object() if rank == 1 else array}, tmp_path / "b") for rank, writer in enumerate(writers)]
    with pytest.raises(tessera.UnsupportedError, match="object is no tensor"):
        saves[1].result()
    with pytest.raises(tessera.UnsupportedError):
        writers[0].save({"w": array}, tmp_path / "b")
    refused = writers[1].save({"w": array}, tmp_path / "b")
    assert isinstance(refused.exception(), tessera.UnsupportedError)
    saves = [writer.save({"w": array}, tmp_path / "b") for writer in writers]
    assert all(save.result().files > 0 for save in saves)
    for writer in writers:
        writer.close()


class Strange:
    """A group of two ranks that brings what no rank has sent."""

    rank, size = 0, 2

    def __init__(self, brought):
        self.brought, self.calls = brought, 0

    def all_gather(self, message):
        self.calls += 1
        if isinstance(self.brought, Exception):
            raise self.brought
        return self.brought

    def gather(self, message, root):
        return self.all_gather(message)

    def broadcast(self, message, root):
        return self.all_gather(message)

    scatter = broadcast


@pytest.mark.parametrize(
    "brought, said",
    [
        ([b"", "text"], "a str, and not the bytes"),
        ([b""], "1 messages of 2 ranks"),
        (OSError("no way"), "OSError: no way"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_group_that_brings_something_else_is_an_error(brought, said, tmp_path):
    group = Strange(brought)
    with tessera.CheckpointWriter(group, idle=False) as writer:
        for _ in range(2):
            error = writer.save({"n": 1}, tmp_path / "a").exception(60)
            assert isinstance(error, tessera.Error) and said in str(error)
            assert isinstance(error, tessera.PeerFailedError) or not isinstance(brought, Exception)
        assert group.calls == 1  # its ranks are no longer at the same message


def test_a_process_finishes_what_a_killed_program_had_copied(tmp_path):
    program = '''
        import os, signal, sys, numpy, tessera
        writer = tessera.CheckpointWriter(process=True, idle=False, rate=4 << 20)
        writer.save({"w": numpy.arange(1 << 20, dtype="float32")}, sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
    '''
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "c")], check=False)
    assert killed.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while not (tmp_path / "c/.metadata").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (loaded(tmp_path / "c")["w"] == numpy.arange(1 << 20)).all()


def test_a_process_that_cannot_be_started_is_an_error():
    with pytest.raises(tessera.NotFoundError, match="/nowhere/tessera"):
        tessera.CheckpointWriter(process=True, program="/nowhere/tessera")


def test_options_that_make_no_sense():
    tessera.CheckpointWriter(end_within=float("inf")).close()
    for options in ({"bytes": -1}, {"rate": -1}, {"threads": 0}, {"end_within": -1}, {"if_busy": "maybe"}, {"silence": 0}):
        with pytest.raises(tessera.InvalidArgumentError):
            tessera.CheckpointWriter(**options)
