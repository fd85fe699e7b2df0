#!/usr/bin/env python3
"""What a machine with a GPU is asked in a few minutes; tools/gpu-check packs this file with what it runs.

    python3 gpu.py 1    tests on the device, a training beside the CPU's, compute-sanitizer
    python3 gpu.py 2    training steps, saves and loads, each in turns with PyTorch

Each call ends within six minutes, each of its parts within a limit of its own; a table of all results is the last thing
it prints. Results go to $OUT too, or to --out. --device cpu runs the same on the CPU with small sizes.
"""
import argparse
import csv
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Dense bf16 products of an H100 or H200, by the datasheet.
PEAK_TFLOPS = 989
TESTS = {"fsdp_test": "Cuda*:*Device*", "torch_test": "*Device*"}
# tools/demo's model and schedule.
DEMO = ("--dim 128 --layers 4 --heads 4 --seq 128 --batch 12 --lr 3e-3 --warmup 40 --weight-decay 0.1 --clip 1 "
        "--seed 7 --threads 1").split()


@dataclasses.dataclass
class Model:
    name: str
    block: str
    shape: str  # dim,layers,heads,sequence,batch a rank,vocabulary
    goal: float  # of PyTorch's FSDP2


MODELS = [Model("6 M parameters", "gpt", "256,8,8,128,4,256", 0.7),
          Model("124 M", "gpt", "768,12,12,1024,8,50257", 1.0),
          Model("1.3 B", "gpt", "2048,24,16,1024,4,50257", 1.0),
          Model("2 blocks of Llama 8B", "llama", "4096,2,32,2048,4,256", 1.0)]
SMALL_MODELS = [Model("tiny GPT", "gpt", "64,2,4,32,2,256", 1.0), Model("tiny Llama", "llama", "64,2,4,32,2,256", 1.0)]


class LimitReached(Exception):
    pass


class Check:
    def __init__(self, folder, device, out):
        self.folder, self.device, self.out = folder, device, out
        self.small = device == "cpu"
        self.rows = []  # (part, what, result, goal, verdict)
        self.part, self.end = "", 0.0
        torch = Path(importlib.util.find_spec("torch").origin).parent
        self.libraries = f"{folder / 'lib'}:{torch / 'lib'}"

    def program(self, name):
        return self.folder / "bin" / name

    def add(self, what, result, goal="", verdict=""):
        self.rows.append((self.part, what, result, goal, verdict))
        print(f"  {what}: {result}  {verdict}", flush=True)

    def environment(self, program, extra):
        env = {**os.environ, "PYTHONWARNINGS": "ignore", **extra}
        if program != sys.executable:  # Python has libraries of its own
            env["LD_LIBRARY_PATH"] = self.libraries
        if self.small:
            env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        return env

    def run(self, command, name, ranks=0, **extra):
        """The output of `command`, or of rank 0 of `ranks` of it, which torchrun's variables tell who they are."""
        left = self.end - time.monotonic()
        if left < 1:
            raise LimitReached
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(max(ranks, 1)):
            if ranks:
                extra = {**extra, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = open(self.out / f"{name}.{rank}.log", "w+", encoding="utf-8")
            processes.append((subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT,
                                               stdin=subprocess.DEVNULL, env=self.environment(command[0], extra)), log))
        outputs, codes, late = [], [], False
        for process, log in processes:
            try:
                codes.append(process.wait(max(1, self.end - time.monotonic())))
            except subprocess.TimeoutExpired:
                late = True
                process.kill()
                codes.append(process.wait())
            log.seek(0)
            outputs.append(log.read())
            log.close()
        if late:
            raise LimitReached
        if any(codes):
            rank = next(i for i, code in enumerate(codes) if code)
            raise RuntimeError(f"exit {codes[rank]}: {(outputs[rank].strip() or '?').splitlines()[-1][:200]}")
        return outputs[0]

    def try_to(self, what, work, *arguments, **more):
        """A failure is a row, not the end."""
        try:
            return work(*arguments, **more)
        except LimitReached:
            self.add(what, "the limit of this part was reached", "", "FAILED")
        except (RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
            self.add(what, str(error), "", "FAILED")
        return None


def losses(path):
    with open(path, encoding="ascii") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def largest_difference(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def verdict(holds):
    return "met" if holds else "MISSED"


def speed(check, holds):
    """A goal of speed or memory. Small sizes on a CPU say nothing of it."""
    return "rehearsed" if check.small else verdict(holds)


# (a) ----------------------------------------------------------------------------------------------------

def device_tests(check):
    def one(program, chosen):
        output = check.run([check.program(program), f"--gtest_filter={chosen}"], program)
        passed = re.search(r"\[  PASSED  \] (\d+) test", output)
        skipped = re.search(r"\[  SKIPPED \] (\d+) test", output)
        check.add(program, f"{passed[1] if passed else 0} passed, {skipped[1] if skipped else 0} skipped", "pass", "met")

    for program, chosen in TESTS.items():
        check.try_to(program, one, program, chosen)
    steps = "5" if check.small else "20"

    def training(name, ranks, sharding, **extra):
        file = check.out / f"{name}.csv"
        check.run([check.program("train_gpt"), *DEMO, "--data", check.folder / "text", "--steps", steps, "--sharding",
                   sharding, "--metrics", file], name, ranks, **extra)
        return losses(file)

    alone = check.try_to("the same on the CPU", training, "cpu-alone", 0, "none", CUDA_VISIBLE_DEVICES="")
    for sharding in ("fsdp2", "fsdp1", "ddp"):
        for ranks, backend in ((1, "NCCL"), (2, "Gloo")):
            what = f"{sharding}, {ranks} {'ranks' if ranks > 1 else 'rank'}{'' if check.small else ' over ' + backend}"
            # Two ranks on one device: NCCL refuses that.
            extra = {"TESSERA_CUDA_BACKEND": "gloo"} if ranks > 1 else {}
            got = check.try_to(what, training, f"{sharding}-{ranks}", ranks, sharding, **extra)
            if got and alone:
                difference = largest_difference(got, alone)
                check.add(what, f"losses of {steps} steps differ by {difference:.1e}", "1e-3",
                          verdict(difference <= 1e-3))


# (b) ----------------------------------------------------------------------------------------------------

def demo_training(check):
    steps = "10" if check.small else "100"

    def training(where, device):
        file = check.out / f"demo-{where}.csv"
        begin = time.monotonic()
        check.run([check.program("train_gpt"), *DEMO, "--device", device, "--data", check.folder / "text", "--steps", steps,
                   "--metrics", file], f"demo-{where}")
        return losses(file), time.monotonic() - begin

    def both():
        ours, seconds = training("device", check.device)
        cpu, cpu_seconds = training("cpu", "cpu")
        difference = largest_difference(ours, cpu)
        check.add(f"losses of {steps} steps of the demo, beside the CPU's",
                  f"differ by {difference:.1e}; {ours[0]:.3f} to {ours[-1]:.3f}; {seconds:.0f} and {cpu_seconds:.0f} s",
                  "1e-2", verdict(difference <= 1e-2))

    check.try_to("training of the demo", both)


# (c) ----------------------------------------------------------------------------------------------------

def flops_of_step(model):
    """Of the blocks: products of forward and backward, attention by its causal half."""
    dim, layers, _, seq, batch, _ = map(int, model.shape.split(","))
    weights = (2.5 + 3 * 3.5 if model.block == "llama" else 12) * dim * dim
    return layers * batch * seq * (6 * weights + 6 * seq * dim)


def step_bench(check, model):
    windows = ["--windows", "2", "--steps", "1"] if check.small else ["--windows", "5", "--steps", "5"]
    common = ["--block", model.block, "--bf16", "--clip", "1", *windows]
    ours = [check.program("bench_step"), "--shape", model.shape, *common]
    peer = [sys.executable, check.folder / "peers/train_step.py", "fsdp2", "--device", check.device, "--fused", *common]
    jobs = {"fsdp2": [*ours, "--sharding", "fsdp2"], "flat": [*ours, "--sharding", "flat"], "torch": peer, "none": [*ours, "--sharding", "none"]}
    times, peaks, profiles = {name: [] for name in jobs}, {}, {}
    for round_ in range(2):
        for name, command in jobs.items():
            # The profile runs after the times were taken.
            output = check.run([*command, *(["--profile"] if round_ else [])], f"step-{model.name}-{name}", 1,
                               CFG=model.shape)
            times[name].append(float(re.search(r"^ms/step ([\d.]+)", output, re.M)[1]))
            peaks[name] = float(re.search(r"^peak_mb (\d+)", output, re.M)[1])
            counted = re.search(r"^launches (\d+) copies (\d+) waits (\d+) operators (\d+)", output, re.M)
            profiles[name] = counted and "{} launches, {} copies, {} waits, {} operators".format(*counted.groups())
    ms = {name: statistics.median(values) for name, values in times.items()}
    for name, layout in (("fsdp2", "rows"), ("flat", "flat")):
        ratio = ms[name] / ms["torch"]
        check.add(f"{model.name}: a step in {layout} beside FSDP2",
                  f"{ms[name]:.2f} and {ms['torch']:.2f} ms, {ratio:.2f} of it", f"{model.goal}",
                  speed(check, ratio <= model.goal))
    if not check.small:
        share = flops_of_step(model) / (ms["fsdp2"] / 1000) / 1e12 / PEAK_TFLOPS
        check.add(f"{model.name}: share of the peak, blocks alone", f"{100 * share:.0f} %")
    alone = ms["fsdp2"] / ms["none"]
    check.add(f"{model.name}: beside no sharding", f"{ms['none']:.2f} ms, {alone:.2f} of it", "1.05",
              speed(check, alone <= 1.05))
    memory = peaks["fsdp2"] / peaks["torch"]
    check.add(f"{model.name}: peak memory beside FSDP2",
              f"{peaks['fsdp2']:.0f} and {peaks['torch']:.0f} MB, {memory:.2f} of it", "1.0", speed(check, memory <= 1))
    for name, what in (("fsdp2", "ours"), ("flat", "ours, flat"), ("torch", "PyTorch")):
        check.add(f"{model.name}: one step of {what}", profiles[name] or "no profile")


def step_benches(check):
    for model in SMALL_MODELS if check.small else MODELS:
        check.try_to(model.name, step_bench, check, model)


# (d) ----------------------------------------------------------------------------------------------------

def save_and_load(check):
    shape, size = ("2,64,500", "1 MB") if check.small else ("24,1024,32000", "4 GB")
    with tempfile.TemporaryDirectory(dir=check.folder) as scratch:
        jobs = {"ours": [check.program("bench_save_load"), f"{scratch}/ours", "3"],
                "peer": [sys.executable, check.folder / "peers/dcp_save_load.py", f"{scratch}/peer", "3", check.device]}
        times = {name: [] for name in jobs}
        for _ in range(1 if check.small else 2):
            for name, command in jobs.items():
                output = check.run(command, f"save-{name}", 1, BENCH_SHAPE=shape)
                # The first round of a process touches its memory for the first time.
                found = re.findall(r"save ([\d.]+) load ([\d.]+)", output)[1:]
                times[name] += [tuple(map(float, pair)) for pair in found]
                shutil.rmtree(f"{scratch}/{name}", ignore_errors=True)
    for index, (what, goal) in enumerate((("save", 1.5), ("load", 2.0))):
        ours, peer = (statistics.median(pair[index] for pair in times[name]) for name in ("ours", "peer"))
        check.add(f"{what} of {size} beside dcp.{what}", f"{ours:.2f} and {peer:.2f} s, {peer / ours:.2f} times as fast",
                  f"{goal}", speed(check, peer / ours >= goal))


# (e) ----------------------------------------------------------------------------------------------------

def sanitizer(check):
    places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *places]))
    if tool is None:
        check.add("compute-sanitizer", "not on this machine")
        return
    training = [check.program("train_gpt"), "--data", check.folder / "text", "--dim", "32", "--layers", "2", "--heads", "2",
                "--seq", "32", "--batch", "2", "--steps", "3"]
    output = check.run([tool, "--tool", "memcheck", *training], "sanitizer", 1)
    summary = re.search(r"ERROR SUMMARY: (\d+) error", output)
    errors = summary[1] if summary else "no summary of"
    check.add("compute-sanitizer on a training", f"{errors} errors", "0", verdict(errors == "0"))


# name, what runs, seconds
CALLS = {1: [("a", device_tests, 120), ("b", demo_training, 70), ("e", sanitizer, 140)],
         2: [("c", step_benches, 230), ("d", save_and_load, 90)]}


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def require_version(wanted):
    """A program runs with the libtorch that it was built for, and with no other."""
    found = python("import torch; print(torch.__version__)")
    if found.partition("+")[0] != wanted:
        sys.exit(f"gpu.py: built for torch {wanted}, here is {found}")


def machine(device):
    versions = f"Python {sys.version.split()[0]}, torch {python('import torch; print(torch.__version__)')}"
    if device == "cpu":
        return f"CPU, {versions}"
    if shutil.which("nvidia-smi") is None:
        sys.exit("gpu.py: no nvidia-smi on this machine; --device cpu rehearses")
    nccl = python("import torch; print(*torch.cuda.nccl.version(), sep='.')")
    card = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                          text=True, check=False).stdout.strip()
    return f"{(card or 'no GPU').splitlines()[0]}, {versions}, NCCL {nccl}"


def print_table(rows, name):
    print(f"\n{time.strftime('%Y-%m-%d')}, {name}; peers: fused AdamW, no compile, foreach clipping, bf16\n")
    print("| card | part | what | result | goal | |\n|---|---|---|---|---|---|")
    card = name.split(",")[0]
    for part, what, result, goal, how in rows:
        print(f"| {card} | {part} | {what} | {result} | {goal} | {how} |")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", type=int, choices=CALLS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    name = machine(options.device)
    print(name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(HERE / "pack.tar.xz") as pack:
            # Debian's Python 3.11 knows no filters.
            pack.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        require_version((Path(folder) / "torch-version").read_text())
        logs = Path(folder) / "logs"
        logs.mkdir()
        check = Check(Path(folder), options.device, logs)
        for part, work, limit in CALLS[options.call]:
            check.part, check.end = part, time.monotonic() + limit
            print(f"({part}), {limit} s at most", flush=True)
            check.try_to(f"part {part}", work, check)
        shutil.make_archive(str(options.out / f"gpu-check-{options.call}-logs"), "gztar", logs)
    report = {"machine": name, "call": options.call, "rows": check.rows}
    (options.out / f"gpu-check-{options.call}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(check.rows, name)
    return 1 if any(row[-1] == "FAILED" for row in check.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
