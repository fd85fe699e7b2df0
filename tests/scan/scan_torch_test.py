#!/usr/bin/env python3
"""Scans beside torch: hundreds of honest checkpoints are clean, and hostile files that torch.load runs are not.

    scan_torch_test.py TESSERA
"""
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch

import honest_torch
import shapes

TESSERA = None


def scan(path, *options):
    return subprocess.run([TESSERA, "scan", str(path), *options], capture_output=True, text=True, check=False)


class Torch(unittest.TestCase):
    def test_honest_checkpoints_are_clean(self):
        with tempfile.TemporaryDirectory() as place:
            count = 0
            for title, path in honest_torch.write(pathlib.Path(place)):
                with self.subTest(title):
                    done = scan(path)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    count += 1
            self.assertGreaterEqual(count, 300)

    def test_whole_modules_run_their_classes(self):
        """Their classes look at their own attributes for what to call: whoever trusts them says so."""
        with tempfile.TemporaryDirectory() as place:
            for number, value in enumerate([torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.optim.SGD([torch.ones(2)], 0.1)]):
                path = pathlib.Path(place) / f"{number}.pt"
                torch.save(value, path)
                self.assertEqual(scan(path).returncode, 1)
                self.assertEqual(scan(path, "--allow", "torch.nn.modules.*", "--allow", "torch.optim.*").returncode, 0)

    def test_what_torch_runs_is_never_clean(self):
        with tempfile.TemporaryDirectory() as place:
            ran = pathlib.Path(place) / "ran"
            for title, shape in shapes.hidden_in("posix", "mkdir", str(ran)):
                if shape.loads != "torch":
                    continue
                with self.subTest(title):
                    file = pathlib.Path(place) / shape.name
                    file.write_bytes(shape.data)
                    try:
                        torch.load(file, weights_only=False)
                    except Exception:  # behind the call, whatever it is
                        pass
                    self.assertTrue(ran.is_dir(), "torch does not run it: the case proves nothing")
                    ran.rmdir()
                    self.assertIn(scan(file).returncode, (1, 3))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    TESSERA = sys.argv.pop(1)
    unittest.main()
