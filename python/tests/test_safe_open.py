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


def test_names_that_are_only_noted_are_not_listed(tmp_path, torch):
    """`load_model` refuses a file that lists both names of tied weights."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.emb.weight

    model, path = Tied(), tmp_path / "theirs.safetensors"
    save_model(model, path)
    tessera.save_file(model.state_dict(), tmp_path / "ours.safetensors")
    for one in (path, tmp_path / "ours.safetensors"):
        with safetensors.safe_open(one, framework="pt") as theirs, tessera.safe_open(one, framework="pt") as ours:
            assert ours.keys() == theirs.keys() == ["emb.weight"]
            assert ours.offset_keys() == theirs.offset_keys()
            assert torch.equal(ours.get_tensor("head.weight"), model.head.weight)
            save_file({name: ours.get_tensor(name) for name in ours.keys()}, tmp_path / "again.safetensors")
        assert load_model(Tied(), tmp_path / "again.safetensors") == (set(), [])
        assert sorted(tessera.load(one)) == sorted(tessera.open(one)) == ["emb.weight", "head.weight"]
    # A tensor's own name in the metadata, and a note of one that the file has.
    tensors = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(0), "d": torch.ones(0)}
    save_file(tensors, path, metadata={"a": "b", "b": "b", "c": "d", "x": "a", "y": "text"})
    with safetensors.safe_open(path, framework="pt") as theirs, tessera.safe_open(path, framework="pt") as ours:
        assert ours.keys() == theirs.keys() == sorted(load_file(path))


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
