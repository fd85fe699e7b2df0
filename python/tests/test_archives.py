"""Archives of libtorch, TorchScript and torch.export, which are read without torch."""

import pathlib
import zipfile

import numpy
import pytest

import tessera

GOLDEN = pathlib.Path(__file__).parents[2] / "tests/golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the archives are in the checkout alone")


def floats(path, record, shape):
    """What the archive has there, by numpy."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/" + record))
        return numpy.frombuffer(archive.read(name), "float32").reshape(shape)


@pytest.mark.parametrize("name", ["exported/net.pt2", "exported/old.pt2", "exported/older.pt2"])
def test_a_model_that_torch_exported(name):
    loaded = tessera.load(GOLDEN / name, framework="numpy")
    assert list(loaded) == ["l.weight", "l.bias", "buf", "tmp"]
    assert (loaded["l.weight"] == floats(GOLDEN / "exported/net.pt2", "data/weights/weight_0", (3, 4))).all()
    assert (loaded["buf"] == numpy.arange(5)).all() and (loaded["tmp"] == [1, 2]).all()
    with tessera.open(GOLDEN / name) as checkpoint:
        assert checkpoint.kind == "exported" and checkpoint.warnings == []
        assert (numpy.asarray(checkpoint["buf"][1:3]) == [1, 2]).all()


def test_two_models():
    loaded = tessera.load(GOLDEN / "exported/two.pt2", framework="numpy")
    assert list(loaded) == ["a", "b"] and (loaded["b"]["tmp"] == [1, 2]).all()


@pytest.mark.parametrize("name", ["net", "scripted", "traced"])
def test_modules_of_libtorch(name):
    path = GOLDEN / f"libtorch/{name}.pt"
    loaded = tessera.load(path, framework="numpy")
    assert {"l.weight", "l.bias", "buf"} <= set(loaded)
    assert (loaded["buf"] == numpy.arange(5)).all()
    with tessera.open(path) as checkpoint:
        assert checkpoint.kind == "torchscript"
        assert (checkpoint["l.weight"].numpy() == loaded["l.weight"]).all()


@pytest.mark.parametrize("name", ["exported/net.pt2", "libtorch/net.pt"])
def test_the_way_of_safe_open(name):
    with tessera.safe_open(GOLDEN / name, framework="np") as file:
        assert "l.weight" in file.keys()
        assert file.get_tensor("l.weight").shape == (3, 4)
        assert (file.get_slice("buf")[2:] == [2, 3, 4]).all()


def test_what_is_no_model_is_an_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        for record, content in {"archive_format": "pt2", "archive_version": "0", ".data/version": "6\n"}.items():
            archive.writestr("m/" + record, content)
    with pytest.raises(tessera.Error, match="without a model") as caught:
        tessera.load(tmp_path / "m.pt2")
    assert caught.value.code == "unsupported"
