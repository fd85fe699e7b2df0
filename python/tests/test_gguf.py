"""Files of llama.cpp, as the gguf package reads them (tests/golden/make/gguf_files.py)."""

import json
import pathlib
import zlib

import pytest

import tessera

GOLDEN = pathlib.Path(__file__).parents[2] / "tests/golden/gguf"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the files are in the checkout alone")


def test_tensors_and_key_values():
    rows = json.loads((GOLDEN / "expected.json").read_text())["every.gguf"]
    with tessera.open(GOLDEN / "every.gguf") as checkpoint:
        assert checkpoint.kind == "gguf"
        for name, row in rows["tensors"].items():
            if row["type"] == "BF16":  # numpy has no such type
                continue
            array = checkpoint[name].numpy()
            assert (list(array.shape), zlib.crc32(array.tobytes())) == (row["shape"], row["crc32"])
    tree = tessera.load(GOLDEN / "every.gguf", framework="numpy", only=["gguf", "gguf_types"])
    values = {key: list(value) if isinstance(value, bytes) else value for key, value in tree["gguf"].items()}
    assert values == rows["values"]
    assert tree["gguf_types"]["k.weight"] == "Q4_K"


def test_dequantized(tmp_path):
    rows = json.loads((GOLDEN / "expected.json").read_text())["every.gguf"]["tensors"]
    tessera.convert(GOLDEN / "every.gguf", tmp_path / "a.pt", only=["blk", "gguf_types.blk"])
    tessera.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", dequantize="float32")
    with tessera.open(tmp_path / "b.safetensors") as checkpoint:
        assert list(checkpoint) == ["blk.0.weight", "blk.1.weight", "blk.2.weight"]
        for name in checkpoint:
            assert zlib.crc32(checkpoint[name].numpy().tobytes()) == rows[name]["dequantized"]["crc32"]
