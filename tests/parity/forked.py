"""Python programs as processes of their own that have imported PyTorch when they begin: a server imports it once a session.

Whoever starts some has to be importable, as for Python's multiprocessing: `if __name__ == "__main__"` guards its main program.
"""
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

# What the server imports. Those that it cannot, it leaves to the programs.
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo"]


def _become(words, environment, outputs):
    for descriptor, path in zip((1, 2), outputs):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


class Forked:
    """The part of subprocess.Popen that is needed here. Without warnings, and with one thread for each operation."""

    def __init__(self, words, environment):
        self._outputs = [tempfile.NamedTemporaryFile() for _ in range(2)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        arguments = (words, environment, [file.name for file in self._outputs])
        self._process = context.Process(target=_become, args=arguments)
        # Libraries look at this one while they are imported, by the server.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def communicate(self, timeout):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return tuple(Path(file.name).read_text(encoding="utf-8", errors="replace") for file in self._outputs)

    def kill(self):
        self._process.kill()
        self._process.join()
