"""What tests of the command share: running it, and files made by hand."""
import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest


class Case(unittest.TestCase):
    """Has a directory of its own with a DCP checkpoint in it."""

    command = golden = None  # set by the program, before any test runs

    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-cli-"))
        self.dcp = self.work / "dcp"
        shutil.copytree(self.golden / "checkpoints/g4_ws2", self.dcp)

    def tearDown(self):
        shutil.rmtree(self.work)

    def refused(self, code, *arguments, exit_code=3):
        """The command fails with one line that begins with the error code, behind warnings of what it had opened."""
        done = tessera(*arguments)
        self.assertEqual(done.returncode, exit_code, done.stderr)
        self.assertEqual(done.stdout, "")
        lines = [line for line in done.stderr.splitlines() if not line.startswith("tessera: warning: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertTrue(lines[0].startswith(f"tessera: {code}: "), done.stderr)


def tessera(*arguments, **extra):
    return subprocess.run([Case.command, *map(str, arguments)], capture_output=True, text=True, check=False, **extra)


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype, shape, bytes). Returns the path."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for key, (dtype, shape, content) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
