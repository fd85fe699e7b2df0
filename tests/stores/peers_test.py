#!/usr/bin/env python3
"""PyTorch by fsspec and s3fs, and ai2-olmo by boto3, read from an S3 server what tessera wrote there, and the reverse, bit
for bit.

    peers_test.py TESSERA

with_server.py starts the server and runs this; its variables say where it is. PYTHONPATH has tests/parity/olmo_stubs, and
without ai2-olmo its tests are skipped.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # OLMo calls torch.load as it was before 2.6 (OQ-07)
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: E402

try:
    from olmo import checkpoint as olmo_checkpoint
    from olmo import util as olmo_util
except ImportError:
    olmo_checkpoint = olmo_util = None

TESSERA = None
BUCKET = "s3://tessera/peers"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
          torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
          torch.complex64]
warnings.filterwarnings("ignore")


def state():
    """Every bit of each type, odd shapes, a scalar, one without elements, values, and one tensor of several windows."""
    draw = torch.Generator().manual_seed(9)
    tensors = {}
    for dtype in DTYPES:
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(0, 256, (13 * 7 * size,), dtype=torch.uint8, generator=draw)
        tensors[str(dtype).removeprefix("torch.")] = (raw % 2 == 0)[:91].reshape(13, 7) if dtype == torch.bool \
            else raw.view(dtype).reshape(13, 7)
    tensors["large"] = torch.randn(3_000_001, generator=draw)
    return {"model": tensors, "scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "step": 12, "name": "übung"}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def zeros(tree):
    if isinstance(tree, dict):
        return {key: zeros(value) for key, value in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else type(tree)()


def olmo_reader(url, cache, work):
    """OLMo's, with the two methods that StorageReader declares since torch 2.3, and without `cached_path`, for which OLMo's
    own functions download `.metadata`."""
    def resource_path(folder, name, local_cache=None, **_):
        if local_cache is not None and (local_cache / name).is_file():
            return local_cache / name
        copy = work / "downloaded"
        copy.write_bytes(olmo_util.get_bytes_range(f"{folder}/{name}", 0, olmo_util.file_size(f"{folder}/{name}")))
        return copy

    olmo_checkpoint.resource_path = resource_path

    class Reader(olmo_checkpoint.RemoteFileSystemReader):
        def reset(self, checkpoint_id=None):
            pass

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    return Reader(url, local_cache=cache)


def tessera(*arguments):
    done = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Peers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.work = pathlib.Path(cls.temporary.name)
        cls.state = state()
        torch.save(cls.state, cls.work / "state.pt")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def same(self, found, expected):
        self.assertEqual(type(found), type(expected))
        if isinstance(expected, dict):
            self.assertEqual(set(found), set(expected))
            for key, value in expected.items():
                with self.subTest(key):
                    self.same(found[key], value)
        elif isinstance(expected, torch.Tensor):
            self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape))
            self.assertTrue(torch.equal(bits(found), bits(expected)))
        else:
            self.assertEqual(found, expected)

    def read_by_us(self, url, name):
        tessera("convert", url, self.work / f"{name}.pt")
        self.same(torch.load(self.work / f"{name}.pt", weights_only=False), self.state)

    def written_by_us(self, name, *options):
        url = f"{BUCKET}/{name}"
        tessera("convert", self.work / "state.pt", url, "--to", "dcp", *options)
        return url

    def test_p05_p25_pytorch_reads_what_we_saved(self):
        url = self.written_by_us("ours", "--ranks", "3")
        found = zeros(self.state)
        dcp.load(found, storage_reader=FsspecReader(url), no_dist=True)
        self.same(found, self.state)

    def test_p05_p25_we_read_what_pytorch_saved(self):
        for threads in (1, 3):
            url = f"{BUCKET}/torch-{threads}"
            dcp.save(self.state, storage_writer=FsspecWriter(url, thread_count=threads, single_file_per_rank=threads == 1),
                     no_dist=True)
            self.read_by_us(url, f"torch-{threads}")
            self.assertIn("float32", tessera("ls", url))
            tessera("copy", url, f"{BUCKET}/copied-{threads}")
            found = zeros(self.state)
            dcp.load(found, storage_reader=FsspecReader(f"{BUCKET}/copied-{threads}"), no_dist=True)
            self.same(found, self.state)

    def test_p05_we_replace_what_pytorch_saved(self):
        url = f"{BUCKET}/replaced"
        dcp.save({"model": {"a": torch.ones(4)}}, storage_writer=FsspecWriter(url), no_dist=True)
        tessera("convert", self.work / "state.pt", url, "--to", "dcp", "--overwrite")
        found = zeros(self.state)
        dcp.load(found, storage_reader=FsspecReader(url), no_dist=True)
        self.same(found, self.state)

    @unittest.skipUnless(olmo_checkpoint, "ai2-olmo is not installed")
    def test_o06_o20_olmos_reader_reads_what_we_saved(self):
        url = self.written_by_us("for-olmo", "--ranks", "2")
        tessera("copy", url, self.work / "cache")
        for cache in (None, self.work / "cache"):
            found = zeros(self.state)
            dcp.load(found, storage_reader=olmo_reader(url, cache, self.work), no_dist=True)
            self.same(found, self.state)

    @unittest.skipUnless(olmo_checkpoint, "ai2-olmo is not installed")
    def test_o17_o18_we_read_what_olmos_writer_uploaded(self):
        url = f"{BUCKET}/by-olmo"
        writer = olmo_checkpoint.RemoteFileSystemWriter(self.work / "by-olmo", upload_to=url)
        dcp.save(self.state, storage_writer=writer, no_dist=True)
        self.read_by_us(url, "by-olmo-read")

    @unittest.skipUnless(olmo_util, "ai2-olmo is not installed")
    def test_o07_o08_o10_olmos_functions_and_ours_see_the_same(self):
        tessera("convert", self.work / "state.pt", f"{BUCKET}/run/one.pt")
        whole = olmo_util.get_bytes_range(f"{BUCKET}/run/one.pt", 0, olmo_util.file_size(f"{BUCKET}/run/one.pt"))
        (self.work / "one.pt").write_bytes(whole)
        self.same(torch.load(self.work / "one.pt", weights_only=False), self.state)
        olmo_util.upload(self.work / "state.pt", f"{BUCKET}/run/uploaded.pt")
        self.read_by_us(f"{BUCKET}/run/uploaded.pt", "uploaded")
        # A checkpoint of its own kinds has a config.yaml.
        torch.save({"model": self.state["model"]}, self.work / "model.pt")
        (self.work / "config.yaml").write_text("run_name: peers\n")
        for step in (20, 100):
            tessera("convert", self.work / "model.pt", f"{BUCKET}/run/step{step}", "--to", "olmo-full", "--config",
                    self.work / "config.yaml")
        self.assertEqual(olmo_util.find_latest_checkpoint(f"{BUCKET}/run"), f"{BUCKET}/run/step100")


if __name__ == "__main__":
    TESSERA = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[:1])
