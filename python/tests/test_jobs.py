"""Long calls: Ctrl-C, progress, other threads, and processes that fork afterwards."""

import functools
import http.server
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest

import tessera


@pytest.fixture(autouse=True)
def interruptible():
    """Also where whoever started the tests ignores SIGINT, as a shell does for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.pt"
    tessera.save_file({str(i): numpy.zeros(1 << 22, "float32") for i in range(8)}, path)
    return path


def calls(large, tmp_path):
    return {
        "load": lambda progress: tessera.load(large, progress=progress),
        "convert": lambda progress: tessera.convert(large, tmp_path / "c.safetensors", progress=progress),
        "save_file": lambda progress: tessera.save_file(
            {"w": numpy.zeros(1 << 25, "float32")}, tmp_path / "s.pt", progress=progress
        ),
        "verify": lambda progress: tessera.verify(large, progress=progress),
        "diff": lambda progress: tessera.diff(large, large, progress=progress),
        "seal": lambda progress: tessera.seal(large, progress=progress),
    }


NAMES = ["load", "convert", "save_file", "verify", "diff", "seal"]


@pytest.mark.parametrize("name", NAMES)
def test_progress_is_told_and_what_it_raises_ends_the_work(name, large, tmp_path):
    call = calls(large, tmp_path)[name]
    heard = []
    call(lambda done, total: heard.append((done, total)))
    assert heard and heard[-1][0] == heard[-1][1] > 0

    def refuse(done, total):
        raise ZeroDivisionError

    for left in tmp_path.iterdir():
        if left != large:
            left.unlink()
    with pytest.raises(ZeroDivisionError):
        call(refuse)
    assert list(tmp_path.iterdir()) == [large]


def require_tasks(count):
    """A thread that has been joined may stand in /proc a little longer."""
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) != count and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) == count


@pytest.mark.parametrize("name", ["load", "convert", "save_file", "verify"])
def test_ctrl_c_ends_the_work_and_leaves_no_target(name, large, tmp_path):
    heard = []

    def interrupt(done, total):
        heard.append(done < total)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # meanwhile the signal is handled

    tasks = len(os.listdir("/proc/self/task"))
    for _ in range(20):  # a call may be done before it tells of its progress for the first time
        heard.clear()
        with pytest.raises(KeyboardInterrupt):
            calls(large, tmp_path)[name](interrupt)
        require_tasks(tasks)
        if heard[0]:
            break
        for whole in set(tmp_path.iterdir()) - {large}:
            assert tessera.verify(whole).findings == []
            whole.unlink()
    assert heard[0] and list(tmp_path.iterdir()) == [large]


def test_other_threads_run_meanwhile(large):
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    tessera.verify(large)
    counted = len(ticks) - before
    done.set()
    thread.join()
    assert counted > 100


def test_threads_read_one_checkpoint_at_once(large):
    with tessera.open(large) as checkpoint:
        wrong = []

        def read(number):
            for name in checkpoint:
                if checkpoint[name][number : number + 1000].any():
                    wrong.append(name)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def _read_in_child(path, queue):
    queue.put(tessera.load(path)["step"])


def test_a_program_may_fork_afterwards(example):
    tessera.load(example)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(example, queue))
    child.start()
    assert queue.get(timeout=60) == 7
    child.join(60)
    assert child.exitcode == 0


def test_neither_torch_nor_numpy_is_imported():
    code = """
        import sys, tessera
        assert "torch" not in sys.modules and "numpy" not in sys.modules, "imported"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_end_of_the_program_is_quiet(example):
    code = f"import tessera; c = tessera.open({example!r}); t = c['model.w']"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_ctrl_c_ends_an_open_beside_a_server_that_is_silent():
    """A request may take ten minutes; nobody has to wait for that."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
            import os, signal, threading, tessera
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                tessera.open("http://127.0.0.1:{server.getsockname()[1]}/x.safetensors")
            except KeyboardInterrupt:
                print("interrupted")
        """
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")


class Slow(http.server.SimpleHTTPRequestHandler):
    """A web server that takes its time as soon as files are read."""

    read = 0

    def do_GET(self):
        if "model-" in self.path:
            Slow.read += 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # meanwhile the signal is handled
        super().do_GET()

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("name", ["open", "scan"])
def test_ctrl_c_ends_looking_around(name, tmp_path):
    """A set of many files far away: each is a request."""
    for i in range(30):
        tessera.save_file({f"w{i}": numpy.zeros(2)}, tmp_path / f"model-{i}.safetensors")
    index = {"metadata": {}, "weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(30)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Slow, directory=tmp_path))
    threading.Thread(target=server.serve_forever).start()
    Slow.read = 0
    url = f"http://127.0.0.1:{server.server_port}/"
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(tessera, name)(url)
    finally:
        server.shutdown()
        server.server_close()
    assert 0 < Slow.read < 30


class Empty(http.server.BaseHTTPRequestHandler):
    """A store that has nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"<Error><Code>NoSuchKey</Code></Error>"
        if self.command == "GET" and "list-type" in self.path:
            body = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
            self.send_response(200)
        else:
            self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


OPENS_WHILE_VARIABLES_COME_AND_GO = """
    import os, sys, threading, tessera

    wrong = []

    def look():
        for _ in range(25):
            try:
                tessera.open("s3://bucket/run/missing.safetensors")
                wrong.append("opened")
            except FileNotFoundError:
                pass
            except tessera.Error as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    number = 0
    while any(thread.is_alive() for thread in threads):
        names = [f"A_VARIABLE_{number + i}" for i in range(300)]
        number += len(names)
        for name in names:
            os.environ[name] = "x" * 50
        for name in names:
            del os.environ[name]
    assert wrong == [] and number > 300, (wrong[:3], number)
"""


@pytest.fixture
def of_an_empty_store():
    """The environment in which s3:// URLs mean it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_REGION="here")
    environment.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    yield environment
    server.shutdown()
    server.server_close()


def test_threads_open_urls_while_the_environment_changes(of_an_empty_store):
    code = textwrap.dedent(OPENS_WHILE_VARIABLES_COME_AND_GO)
    subprocess.run([sys.executable, "-c", code], check=True, env=of_an_empty_store)


# Tells which variables other threads ask the system for than the one that has the interpreter's lock.
ASKED = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    #include <unistd.h>

    static char *asked(const char *function, const char *name) {
      if (gettid() != getpid()) dprintf(STDERR_FILENO, "%s %s\\n", function, name);
      return ((char *(*)(const char *))dlsym(RTLD_NEXT, function))(name);
    }
    char *getenv(const char *name) { return asked("getenv", name); }
    char *secure_getenv(const char *name) { return asked("secure_getenv", name); }
"""


@pytest.mark.skipif(shutil.which("cc") is None or "LD_PRELOAD" in os.environ, reason="needs a compiler, and to be preloaded alone")
def test_no_job_asks_the_system_for_a_variable(of_an_empty_store, tmp_path):
    (tmp_path / "asked.c").write_text(textwrap.dedent(ASKED))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "asked.so", tmp_path / "asked.c", "-ldl"], check=True)
    code = """
        import sys, tessera
        for url in ("s3://bucket/run/missing.safetensors", "s3://bucket/run"):
            for call in (tessera.open, tessera.scan, lambda url: tessera.save_file({"n": 1}, url, overwrite=False)):
                try:
                    call(url)
                except tessera.Error:
                    pass
        tessera.save_file({"n": 1}, sys.argv[1])
        tessera.convert(sys.argv[1], sys.argv[1] + ".safetensors")
    """
    environment = {**of_an_empty_store, "LD_PRELOAD": str(tmp_path / "asked.so")}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "saved.pt")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr == ""


AT_THE_END = """
    import os, socket, sys, threading, time
    import numpy, tessera

    large, directory = sys.argv[1:3]
    begun = threading.Event()

    def heard(done, total):
        begun.set()
        [i for i in range(200)]

    def load():
        while True:
            tessera.load(large, progress=heard)

    def save():
        state = {"w": numpy.zeros(1 << 22, "float32")}
        for i in range(1 << 30):
            tessera.save_file(state, f"{directory}/{threading.get_ident()}-{i % 3}", progress=heard)

    def slices():
        with tessera.open(large) as checkpoint:
            while True:
                for size in (1 << 10, 1 << 21):
                    checkpoint["1"][:size]
                begun.set()

    def opens():
        while True:
            tessera.open(large).close()
            begun.set()

    def silence():
        server = socket.create_server(("127.0.0.1", 0))
        threading.Timer(0.2, begun.set).start()
        tessera.open(f"http://127.0.0.1:{server.getsockname()[1]}/model.safetensors")

    for _ in range(2):
        threading.Thread(target=globals()[sys.argv[3]], daemon=True).start()
    assert begun.wait(60)
    sys.exit(7)
"""


@pytest.mark.parametrize("name", ["load", "save", "slices", "opens", "silence"])
def test_the_program_ends_while_daemon_threads_are_inside(name, large, tmp_path):
    for _ in range(1 if name == "silence" else 4):
        command = [sys.executable, "-c", textwrap.dedent(AT_THE_END), large, tmp_path, name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (7, "")


WAITED_FOR = """
    import atexit, sys, threading

    done = threading.Event()
    atexit.register(lambda: done.wait(60))  # before the import, so that it is called last

    import numpy, tessera

    begun = threading.Event()

    def save():
        begun.set()
        tessera.save_file({"w": numpy.ones(1 << 24, "float32")}, sys.argv[1])
        done.set()

    threading.Thread(target=save, daemon=True).start()
    assert begun.wait(60)
"""


def test_a_daemon_that_the_program_waits_for_at_its_end_saves(tmp_path):
    path = tmp_path / "saved.pt"
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(WAITED_FOR), path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tessera.load(path)["w"].all() and tessera.verify(path).findings == []
