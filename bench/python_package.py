"""The Python package beside torch and the command."""
import statistics

from timing import PEERS, PYTHON, ROOT, alternate, rate, run, torchrun

PEER = "torch"
MAKE = """
import sys, torch, torch.distributed.checkpoint as dcp
rows = 320 if sys.argv[2] else 32000
dcp.save({f"w{i}": torch.rand(rows, 1024) for i in range(17)}, checkpoint_id=sys.argv[1], no_dist=True)
"""
TIMED = "import sys, time\nbegin = time.perf_counter()\n{}\nprint('seconds', time.perf_counter() - begin)"
ROWS = {
    PEER: "import torch, torch.distributed.checkpoint as dcp\n"
    "state = {'w7': torch.empty(int(sys.argv[2]), 1024)}\n"
    "begin = time.perf_counter()\ndcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)\nrows = state['w7'][0:8]",
    "tessera": "import numpy, tessera\nbegin = time.perf_counter()\nrows = tessera.open(sys.argv[1])['w7'][0:8]",
}
IMPORT = (
    "import tessera\ncheckpoint = tessera.open(sys.argv[1])\n"
    "assert len(checkpoint) == 1000 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
)
THOUSAND = "import numpy, sys, tessera\ntessera.save_file({f'w{i}': numpy.zeros(8) for i in range(1000)}, sys.argv[1])"
BYTES = (
    "import numpy, sys, tessera\ntensor = tessera.open(sys.argv[1])['w7']\n"
    "report = tensor.read_into(numpy.empty((8, 1024), 'float32'), numpy.s_[0:8])\n"
    "print('bytes read for one needed:', report.bytes_read / report.bytes_needed)"
)

# Three times in a process: the first ones only warm up.
SAFE_OPEN = (
    "import numpy, {who}\nfor _ in range(3):\n    begin = time.perf_counter()\n"
    "    with {who}.safe_open(sys.argv[1], framework='np') as file:\n        assert len(file.keys()) == 50000"
)
# The whole of 800 MB in 200 tensors, of which nothing is looked at.
MAPPED = {
    "safetensors' load_file": ("safetensors", "import torch, safetensors.torch", "safetensors.torch.load_file(sys.argv[1])"),
    "torch.load(mmap=True)": ("torch", "import torch", "torch.load(sys.argv[1], mmap=True, weights_only=True)"),
    "tessera.load(mmap=True)": ("safetensors", "import torch, tessera", "tessera.load(sys.argv[1], mmap=True)"),
    "of a .pt": ("torch", "import torch, tessera", "tessera.load(sys.argv[1], mmap=True)"),
    "tessera.load": ("safetensors", "import torch, tessera", "tessera.load(sys.argv[1])"),
}
# The median of five calls in a process, behind one that warms up: wall clock, and the processor's time beside it.
MAP = (
    "import statistics, sys, time\n{}\ntimes = []\nfor _ in range(6):\n"
    "    state, begin, used = None, time.perf_counter(), time.process_time()\n    state = {}\n"
    "    times.append((time.perf_counter() - begin, time.process_time() - used))\n"
    "assert len(state) == 200 and state['w7'][0, 0] == 7\n"
    "print('seconds', *(f'{{1000 * statistics.median(one):.3f}}' for one in list(zip(*times[1:]))[{}:][:1]))"
)
WRITE_MAPPED = (
    "import numpy, sys, tessera\n"
    "state = {f'w{i}': numpy.full((1024, 16 if sys.argv[2] else 1024), i, 'float32') for i in range(200)}\n"
    "for kind in ('safetensors', 'torch'):\n    tessera.save_file(state, sys.argv[1] + '/' + kind, kind=kind)"
)
WRITE_OPENED = (
    "import numpy, safetensors.numpy, sys, tessera\n"
    "state = {f'model.layers.{i // 10}.block.{i % 10}.weight': numpy.full((4, 4), i, 'float32') for i in range(50000)}\n"
    "safetensors.numpy.save_file(state, sys.argv[1] + '/safetensors')\n"
    "tessera.save_file(state, sys.argv[1] + '/tessera', kind='safetensors')"
)


def measure(bench):
    env = {"PYTHONPATH": str(bench.build / "python"), "OMP_NUM_THREADS": "1"}
    python = ["env", *(f"{name}={value}" for name, value in env.items()), PYTHON, "-W", "ignore"]
    small = ["small"] if bench.small else []
    for what, title in (("items", "20,000 tensors of 1 KiB"), ("large", "800 MB in 200 tensors")):
        jobs(bench, python, small, what, title, 1)
        if what == "large":
            jobs(bench, python, small, what, title, 2)
    rows_of_one(bench, python)
    opens(bench, python)
    safe_opens(bench, python)
    mapped(bench, python)
    converts(bench, python)
    background(bench, python, small)
    stall(bench, python, small)
    for wheel in (ROOT / "dist").glob("*.whl"):
        print(f"\n{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")


def jobs(bench, python, small, what, title, ranks):
    programs = {"torch": "torch", "torch with our classes": "storage", "tessera.torch": "tessera"}
    for job in ("save", "load"):
        commands = {}
        for name, who in programs.items():
            path = bench.work / f"python-{who}-{what}-{ranks}"
            program = [PEERS / "dcp_python.py", who, f"{job}-{what}", path, *small]
            command = [*python, *program] if ranks == 1 else [*python[:-3], *torchrun(ranks, *program)]
            commands[name] = (command, path if job == "save" else None, None)
        rate(f"{job} {title}, {ranks} rank(s), seconds", alternate(commands, bench.rounds), PEER)


def rows_of_one(bench, python):
    path = bench.work / "python-large"
    run([*python, "-c", MAKE, path, "small" if bench.small else ""])
    rows = "320" if bench.small else "32000"
    commands = {name: ([*python, "-c", TIMED.format(code), path, rows], None, None) for name, code in ROWS.items()}
    rate("rows 0 to 8 of one tensor of 2.2 GB, seconds", alternate(commands, bench.rounds), PEER)
    print(run([*python, "-c", BYTES, path])[2])


def opens(bench, python):
    path = bench.work / "python-thousand"
    # With compiled modules, as pip installs them.
    bytecode = f"PYTHONPYCACHEPREFIX={bench.work / 'bytecode'}"
    python = ["env", "-u", "PYTHONDONTWRITEBYTECODE", bytecode, *python[1:]]
    run([*python, "-c", THOUSAND, path])
    seconds = [float(run([*python, "-c", TIMED.format(IMPORT), path])[2].split()[1]) for _ in range(2 * bench.rounds + 1)]
    print(f"\nimport tessera and open of 1,000 tensors: {1000 * statistics.median(seconds):.0f} ms")


def safe_opens(bench, python):
    folder = bench.work / "python-opened"
    folder.mkdir(exist_ok=True)
    run([*python, "-c", WRITE_OPENED, folder])
    for writer in ("safetensors", "tessera"):
        commands = {
            who: ([*python, "-c", TIMED.format(SAFE_OPEN.format(who=who)), folder / writer], None, None)
            for who in ("safetensors", "tessera")
        }
        title = f"safe_open, keys() and close of 50,000 tensors that {writer} wrote, seconds"
        rate(title, alternate(commands, bench.rounds), "safetensors")


def mapped(bench, python):
    folder = bench.work / "python-mapped"
    folder.mkdir(exist_ok=True)
    run([*python, "-c", WRITE_MAPPED, folder, "small" if bench.small else ""])
    for which, unit in enumerate(("milliseconds", "milliseconds of CPU")):
        commands = {
            name: ([*python, "-c", MAP.format(imports, call, which), folder / file], None, None)
            for name, (file, imports, call) in MAPPED.items()
        }
        rate(f"800 MB in 200 tensors as views, {unit}", alternate(commands, bench.rounds), "safetensors' load_file")


def converts(bench, python):
    source, target = bench.work / "python-large", bench.work / "python.safetensors"
    code = TIMED.format("tessera.convert(sys.argv[1], sys.argv[2])").replace("begin =", "import tessera\nbegin =", 1)
    commands = {
        "the command": ([bench.command, "convert", source, target], target, None),
        "tessera.convert": ([*python, "-c", code, source, target], target, None),
    }
    rate("convert 2.2 GB to safetensors, seconds", alternate(commands, bench.rounds), "the command")


def background(bench, python, small):
    commands = {}
    for who in ("torch", "tessera"):
        path = bench.work / f"python-async-{who}"
        commands[who] = ([*python, PEERS / "async_python.py", who, path, *small], path, None)
    rate("slow-down of training by a save in the background, seconds", alternate(commands, bench.rounds), PEER)


def stall(bench, python, small):
    names = {"a copy into warm memory": "copy", PEER: "torch", "torch, one stager kept": "kept", "tessera": "tessera"}
    commands = {}
    for name, who in names.items():
        path = bench.work / f"python-stall-{who}"
        commands[name] = ([*python, PEERS / "stall_python.py", who, path, *small], path, None)
    rate("stall of a save of 500 MB in the background, from the second on, milliseconds", alternate(commands, bench.rounds), PEER)
