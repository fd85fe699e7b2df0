"""Starts programs on ranks, as plain processes with the variables of torchrun, and collects what they say."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from forked import Forked

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("TESSERA_BUILD", ROOT / "build/release"))
TRAIN_GPT = BUILD / "examples/train_gpt/train_gpt"
DCP_GUIDE = BUILD / "examples/dcp_guide/dcp_guide"
TESSERA = BUILD / "src/cli/tessera"
PEERS = ROOT / "examples/peers"


class Result:
    def __init__(self, processes, timeout):
        ends = []
        try:
            ends = [process.communicate(timeout=timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        self.out = [out for out, _ in ends]
        self.err = [err for _, err in ends]
        self.codes = [process.returncode for process in processes]

    def __str__(self):
        return "\n".join(f"rank {r}: exit code {code}\n{out}{err}" for r, (code, out, err) in
                         enumerate(zip(self.codes, self.out, self.err)))


def launch(command, ranks=1, timeout=120):
    """Runs to the end on `ranks` ranks."""
    return Result(started(command, ranks), timeout)


def started(command, ranks=1):
    """Its processes. A Python file runs in processes of this interpreter; alone means without variables
    for a program, and as a group of one for a Python file."""
    is_python = Path(command[0]).suffix == ".py"
    words = [str(word) for word in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
    processes = []
    port = free_port()
    for rank in range(ranks):
        if ranks > 1 or is_python:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if is_python:
            processes.append(Forked(words, dict(environment)))
        else:
            processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                              env=dict(environment)))
    return processes


def run(command, ranks=1, timeout=120):
    """The same, and all ranks have to succeed."""
    result = launch(command, ranks, timeout)
    assert result.codes == [0] * ranks, str(result)
    return result


def losses(path):
    with open(path, encoding="ascii") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def largest_difference(a, b):
    """Relative, over the steps of `a`, all of which `b` has."""
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in a)
