"""`tessera.safe_open` beside safetensors' own."""

import numpy
import pytest

import tessera

safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def file(tmp_path):
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(1)
    tensors = {f"layers.{i}.w": random.standard_normal((i + 1, 4)).astype("float32") for i in range(12)}
    tensors["ids"] = numpy.arange(5)
    tensors["one"] = numpy.array(1.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np", "by": "a test"})
    return tmp_path / "model.safetensors"


def test_it_answers_like_the_original(file):
    with safetensors.safe_open(file, framework="np") as theirs, tessera.safe_open(file, framework="np") as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():
            assert (ours.get_tensor(name) == theirs.get_tensor(name)).all()
            mine, other = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_shape(), mine.get_dtype()) == (other.get_shape(), other.get_dtype())
            if other.get_shape() and len(other.get_shape()) == 2:
                assert (mine[:, 1:3] == other[:, 1:3]).all() and (mine[0] == other[0]).all()
                assert (mine[..., 1] == other[..., 1]).all()


def test_torch_gets_tensors(file, torch):
    with safetensors.safe_open(file, framework="pt") as theirs, tessera.safe_open(file, framework="pt") as ours:
        for name in theirs.keys():
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))


def test_every_kind_is_opened(example):
    with tessera.safe_open(example, framework="numpy") as file:
        assert file.keys() == ["model.w"] and file.metadata() is None
        assert file.get_tensor("model.w")[2].tolist() == [8, 9, 10, 11]
        with pytest.raises(KeyError):
            file.get_tensor("model.x")
        with pytest.raises(tessera.MismatchError):
            file.get_tensor("step")
    with pytest.raises(tessera.InvalidArgumentError, match="framework"):
        tessera.safe_open(example, framework="jax")
