"""How long a training needs to go on when its ranks have died: from memory, from the disk, and PyTorch's."""
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import threading
import time

from timing import PEERS, PYTHON, ROOT, fresh, run, table

TENSORS = 1_100_000_000  # bytes of each rank
MODEL = {"dim": 1024, "layers": 14, "heads": 8, "seq": 32, "batch": 2}  # 1.1 GB of each of 2 ranks, with AdamW's state
SMALL = {"dim": 64, "layers": 2, "heads": 4, "seq": 32, "batch": 2}
EVERY = 10  # steps from one save to the next: each is on the disk long before the next
LIMIT = 600  # seconds that anything may take


def measure(bench):
    for ranks in (2, 3):
        loads(bench, ranks)
    trainings(bench)


def loads(bench, onto):
    """State of 2 ranks onto so many: the library alone."""
    work = bench.work / "restart"
    fresh(work)
    _, _, output = run([bench.build / "bench/bench_restart", "--dir", work, "--command", bench.command, "--onto", onto,
                        "--bytes", 8_000_000 if bench.small else TENSORS, "--rounds", bench.rounds])
    fresh(work)
    line = json.loads(output)
    names = {"arena": "memory", "cold": "disk, cold page cache", "warm": "disk, warm page cache"}
    rows = {}
    for way, name in names.items():
        both = [found + loaded for found, loaded in zip(line[way]["find_s"], line[way]["load_s"])]
        rows[name] = (both, line[way]["peak_mib"])
    table(f"seconds to find and load the latest checkpoint, 2 ranks onto {onto}, {line['bytes'] / 1e9:.3f} GB (peak of a rank)", rows,
          "disk, warm page cache")
    print("of these to find it, ms: " + "; ".join(f"{name} {1000 * statistics.median(line[way]['find_s']):.1f}" for way, name in names.items()))
    print(f"read from the device: {line['cold']['read'] / 1e9:.3f} GB with a cold page cache, {line['warm']['read'] / 1e9:.3f} GB with a "
          f"warm one, {line['arena']['read'] / 1e9:.3f} GB from memory")


@dataclasses.dataclass
class Way:
    name: str
    in_memory: bool = False
    is_cold: bool = False
    is_torch: bool = False


WAYS = (Way("tessera, memory", in_memory=True), Way("tessera, disk"), Way("tessera, cold disk", is_cold=True),
        Way("torch fsdp2 and dcp, disk", is_torch=True), Way("torch, cold disk", is_cold=True, is_torch=True))
PHASES = ("new processes", "state loaded", "next step", "all")


def trainings(bench):
    """From the kill of all ranks to the next step that is finished, under torchrun."""
    rows = {way.name: ({phase: [] for phase in PHASES}, [0]) for way in WAYS}
    size = 0
    for round_ in range(bench.rounds + 1):
        for way in WAYS:
            work = bench.work / "restart"
            fresh(work)
            work.mkdir()
            with Job(bench, way, work) as job:
                phases, peak = job.killed_once()
                size = job.bytes_saved
            fresh(work)
            if round_ > 0:
                for phase, seconds in phases.items():
                    rows[way.name][0][phase].append(seconds)
                rows[way.name][1][0] = max(rows[way.name][1][0], peak)
    base = statistics.median(rows["torch fsdp2 and dcp, disk"][0]["all"])
    print(f"\nseconds from the kill of 2 ranks to the next finished step under torchrun, {size / 1e9:.3f} GB, medians\n"
          f"{'':26}" + "".join(f" {phase:>14}" for phase in PHASES) + f" {'ratio':>7} {'peak MB':>8}")
    for name, (phases, peak) in rows.items():
        medians = [statistics.median(phases[phase]) for phase in PHASES]
        print(f"{name:26}" + "".join(f" {median:14.2f}" for median in medians) + f" {medians[-1] / base:7.2f} {peak[0]:8}", flush=True)


class Job:
    """A training of two ranks that torchrun starts again. What it starts ends with it."""

    def __init__(self, bench, way, work):
        self.way, self.work, self.run = way, work, work / "run"
        self.metrics = work / "metrics.csv"
        self.lines = []  # (when, what) that its ranks have said
        self.bytes_saved = 0
        text = work / "text"
        text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 2000)
        flags = [word for key, value in (SMALL if bench.small else MODEL).items() for word in (f"--{key}", str(value))]
        launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
        if way.is_torch:
            command = [*launcher, PEERS / "restart.py", text, self.run, self.metrics, str(EVERY), *flags]
        else:
            command = [*launcher, "--no-python", bench.build / "examples/train_gpt/train_gpt", "--data", text, "--save", self.run,
                       "--resume", "latest", "--save-every", str(EVERY), "--steps", "1000000", "--metrics", self.metrics,
                       "--async", "process", *flags, *(["--keep-in-memory", "600"] if way.in_memory else [])]
        self.arenas = work / "arenas"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TESSERA_COMMAND": str(bench.command),
                            "TESSERA_ARENA_DIR": str(self.arenas)}
        if way.is_torch:  # else its new ranks find addresses of the dead ones in the launcher's store, and hang at times
            self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.command = list(map(str, command))

    def __enter__(self):
        self.launcher = subprocess.Popen(self.command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                         cwd=ROOT, start_new_session=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def __exit__(self, *_):
        """Nothing is to be saved any more."""
        ranks = self.ranks()
        self.launcher.kill()
        self.launcher.wait()
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while writers_of(self.arenas) and time.monotonic() < deadline:  # who sees no notice any more ends
            for notice in self.arenas.glob("*"):
                notice.unlink(missing_ok=True)
            time.sleep(0.05)

    def _read(self):
        for line in self.launcher.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def ranks(self):
        """The processes that torchrun has started."""
        found = []
        for task in pathlib.Path(f"/proc/{self.launcher.pid}/task").glob("*/children"):
            for child in map(int, text_of(task).split()):
                line = text_of(f"/proc/{child}/cmdline")
                if "train_gpt" in line or "restart.py" in line:
                    found.append(child)
        return found

    def steps(self):
        """The last step that is finished."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        whole = [line for line in lines if re.match(r"\d+,", line)]
        return int(whole[-1].partition(",")[0]) if whole else 0

    def until(self, what, is_so):
        deadline = time.monotonic() + LIMIT
        while not (found := is_so()):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.way.name}: waited for {what}\n" + "\n".join(line for _, line in self.lines[-40:]))
            time.sleep(0.002)
        return found

    def resumed(self):
        return next(((when, line) for when, line in self.lines if line.startswith("resumed from ")), None)

    def killed_once(self):
        """The seconds of each phase, and the largest peak of a rank's memory, MB."""
        place = self.run / f"step{EVERY}"
        self.until("a checkpoint", (place / ".metadata").exists)
        self.bytes_saved = sum(file.stat().st_size for file in place.iterdir())
        if self.way.is_cold:
            drop_from_page_cache(place)
        dead = self.ranks()
        killed = time.monotonic()
        for process in dead:
            os.kill(process, signal.SIGKILL)
        self.metrics.unlink()  # which has steps behind the save
        self.until("new processes", lambda: len(set(self.ranks()) - set(dead)) == len(dead))
        started = time.monotonic()
        loaded, line = self.until("a resume", self.resumed)
        is_in_memory = "arena://" in line
        if not re.search(rf"/step{EVERY}[ #]", line) or is_in_memory != self.way.in_memory:
            raise SystemExit(f"{self.way.name}: {line}")
        self.until("the next step", lambda: self.steps() > EVERY)
        ended = time.monotonic()
        peak = max(peak_of(process) for process in self.ranks())
        return dict(zip(PHASES, (started - killed, loaded - started, ended - loaded, ended - killed))), peak


def drop_from_page_cache(place):
    for file in place.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def text_of(file):
    """Of a process that may have ended: then nothing."""
    try:
        return pathlib.Path(file).read_text()
    except OSError:
        return ""


def peak_of(process):
    found = re.search(r"VmHWM:\s+(\d+) kB", text_of(f"/proc/{process}/status"))
    return int(found[1]) // 1024 if found else 0


def writers_of(arenas):
    """The processes `tessera writer` that say there what they keep."""
    processes = (process for process in pathlib.Path("/proc").glob("[0-9]*") if "\0writer\0" in text_of(process / "cmdline"))
    return [process for process in processes if str(arenas) in text_of(process / "environ")]
