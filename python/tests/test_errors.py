"""Bad input gets one exception with code, path and key, and nothing runs."""

import datetime
import errno
import os
import pickle
import shutil
import warnings

import numpy
import pytest

import tessera


def test_exceptions_are_those_of_python_too(example, tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        tessera.open(tmp_path / "none")
    assert missing.value.filename == missing.value.path == str(tmp_path / "none")
    assert missing.value.errno == errno.ENOENT and missing.value.strerror == str(missing.value)
    with tessera.open(example) as checkpoint, pytest.raises(KeyError) as key:
        checkpoint["model.x"]
    assert key.value.key == "model.x" and key.value.code == "not_found" and "model.x" in str(key.value)
    with pytest.raises(FileExistsError):
        tessera.save_file({"a": 1}, example, overwrite=False)
    with pytest.raises(TypeError, match="no option 'thread'"):
        tessera.convert(example, tmp_path / "x.pt", thread=3)


def test_only_a_place_without_a_checkpoint_says_so(example, tmp_path):
    for place in (tmp_path / "none", tmp_path / "none.pt"):
        with pytest.raises(tessera.NoCheckpointError):
            tessera.open(place)
    with tessera.open(example) as checkpoint:
        with pytest.raises(tessera.Error) as missing:
            checkpoint["optim"]
        assert missing.value.code == "not_found" and not isinstance(missing.value, tessera.NoCheckpointError)
    (tmp_path / "left").mkdir()
    with pytest.raises(tessera.NoCheckpointError):
        tessera.load(tmp_path / "left")
    (tmp_path / "left" / "weights.bin").touch()
    with pytest.raises(tessera.NotFoundError) as part:
        tessera.load(tmp_path / "left")
    assert type(part.value) is tessera.NotFoundError


def test_errors_travel_between_processes(tmp_path):
    with pytest.raises(tessera.Error) as raised:
        tessera.open(tmp_path / "none")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert type(copy) is tessera.NoCheckpointError and str(copy) == str(raised.value) and copy.path == raised.value.path


def test_what_the_library_warns_of_is_a_warning_of_the_call(tmp_path):
    tessera.save_file({"a": numpy.arange(4.0), "b": numpy.arange(3.0)}, tmp_path / "one.safetensors")
    tessera.convert(tmp_path / "one.safetensors", tmp_path / "set", to="safetensors", max_shard_size=40)
    shutil.copy(next((tmp_path / "set").glob("*-00001-*")), tmp_path / "set" / "other.safetensors")
    with pytest.warns(UserWarning, match=r"set: other.safetensors: .*not in the index") as warned:
        tessera.open(tmp_path / "set").close()
    assert len(warned) == 1 and warned[0].filename.endswith("test_errors.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not in the index"):
            tessera.open(tmp_path / "set")
        second = next((tmp_path / "set").glob("*-00002-*"))
        second.write_bytes(second.read_bytes()[:-1])
        with pytest.raises(tessera.Error) as raised:  # it has warned, too, perhaps: the error is what counts
            tessera.open(tmp_path / "set")
        assert raised.value.code == "incomplete"
        tessera.open(tmp_path / "one.safetensors").close()


def test_an_interrupt_in_the_making_of_an_error_or_a_warning_is_raised(tmp_path, monkeypatch):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tessera._errors, "error_of", interrupted)
        tessera.open(tmp_path / "none")
    # A call that warns and fails.
    tessera.save_file({"a": numpy.arange(4.0), "b": numpy.arange(3.0)}, tmp_path / "one.safetensors")
    tessera.convert(tmp_path / "one.safetensors", tmp_path / "set", to="safetensors", max_shard_size=40)
    shutil.copy(next((tmp_path / "set").glob("*-00001-*")), tmp_path / "set" / "other.safetensors")
    next((tmp_path / "set").glob("*-00002-*")).unlink()
    with warnings.catch_warnings(), pytest.raises((KeyboardInterrupt, tessera.Error)) as raised:
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", interrupted)
        monkeypatch.setattr(warnings, "_showwarnmsg_impl", interrupted)
        tessera.open(tmp_path / "set")
    assert raised.type is KeyboardInterrupt
    # A key of a dict, whose hash is code of the package's.
    key = tessera.Opaque("a.b", (1,))
    tessera.save_file({"d": {key: 1}}, tmp_path / "keys.pt")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tessera.Opaque, "__hash__", interrupted)
        tessera.load(tmp_path / "keys.pt")


def test_every_code_has_a_class():
    codes = {kind.code for kind in tessera.Error.__subclasses__()}
    assert len(codes) == 15 and all(getattr(tessera, kind.__name__) is kind for kind in tessera.Error.__subclasses__())


def test_a_flipped_bit_is_found(example):
    (data,) = [file for file in os.listdir(example) if file.startswith("__0_1")]
    path = os.path.join(example, data)
    content = bytearray(open(path, "rb").read())
    content[content.index(numpy.float32(11).tobytes())] ^= 1
    open(path, "wb").write(content)
    with pytest.raises(tessera.CorruptError) as raised:
        tessera.load(example)
    assert raised.value.path == path
    with tessera.open(example) as checkpoint, pytest.raises(tessera.CorruptError):
        checkpoint["model.w"][:]
    assert [found.code for found in tessera.verify(example).findings] == ["corrupt"]


class Harmless:
    def __init__(self, number):
        self.number = number


class Items(list):
    pass


class Named(dict):
    pass


class Hostile:
    def __reduce__(self):
        return (os.system, ("touch " + self.path,))


def test_pickles_run_nothing(tmp_path, torch):
    hostile = Hostile()
    hostile.path = str(tmp_path / "ran")
    torch.save({"a": hostile, "w": torch.ones(2)}, tmp_path / "hostile.pt")
    with pytest.raises(tessera.UnsafeError):
        tessera.load(tmp_path / "hostile.pt")
    assert [name.name for name in tessera.scan(tmp_path / "hostile.pt").dangerous] == ["posix.system"]
    assert not (tmp_path / "ran").exists()
    torch.save({"a": Harmless(3)}, tmp_path / "harmless.pt")
    back = tessera.load(tmp_path / "harmless.pt")["a"]
    assert isinstance(back, tessera.Opaque) and back.name == f"{__name__}.Harmless" and back.state == {"number": 3}


def test_objects_of_classes_come_through(tmp_path, torch):
    kept = {"a": Harmless(3), "b": Items([1, 2]), "c": Named(x=1), "d": datetime.timedelta(3)}
    kept["a"].again = kept["a"].items = [1]
    torch.save(kept, tmp_path / "before.pt")
    tessera.save_file(tessera.load(tmp_path / "before.pt"), tmp_path / "after.pt")
    back = torch.load(tmp_path / "after.pt", weights_only=False)
    assert vars(back["a"]) == vars(kept["a"]) and back["a"].again is back["a"].items
    assert (back["b"], type(back["b"])) == (kept["b"], Items) and back["c"] == {"x": 1} and back["d"] == kept["d"]


def test_opaque_objects_are_written_back(tmp_path):
    kept = tessera.Opaque("package.Class", (1, "two"), {"state": 3})
    tessera.save_file({"kept": kept}, tmp_path / "kept.pt")
    back = tessera.load(tmp_path / "kept.pt")["kept"]
    assert (back.name, back.arguments, back.state) == ("package.Class", (1, "two"), {"state": 3})


def test_trees_that_cannot_be_saved(tmp_path):
    cycle = []
    cycle.append(cycle)
    deep = []
    for _ in range(5000):
        deep = [deep]
    cases = [(cycle, tessera.InvalidArgumentError), (deep, tessera.LimitError), ({"a": {1: object()}}, tessera.UnsupportedError)]
    # Dates, objects, and an array whose mask a checkpoint has no place for.
    arrays = [numpy.array(["2020-01-01"], "M8[D]"), numpy.array([1, "a"], object), numpy.ma.array([1, 2], mask=[0, 1])]
    cases += [({"a": array}, tessera.UnsupportedError) for array in arrays]
    for tree, kind in cases:
        with pytest.raises(kind):
            tessera.save_file(tree, tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []
    tessera.save_file(None, tmp_path / "x.pt")
    assert tessera.load(tmp_path / "x.pt") is None


def test_values_that_differ_between_ranks_are_kept_by_the_ways_that_the_error_names(tmp_path):
    equal = numpy.arange(3.0)
    for rank in range(2):
        tessera.save_file({"w": numpy.full(2, rank, "float32"), "equal": equal}, tmp_path / f"ranks/rank{rank}.pt")
    said = r"the values differ: rank 0 has float32 \[2\], rank 1 has float32 \[2\] of other values; .*--part.*--only.*key 'w'"
    with pytest.raises(tessera.MismatchError, match=said):
        tessera.open(tmp_path / "ranks")
    for rank in range(2):
        made = tmp_path / f"{rank}.pt"
        tessera.convert(tmp_path / f"ranks/rank{rank}.pt", made, part=True)
        assert tessera.load(made, framework="numpy")["w"].tolist() == [rank, rank]
    tessera.convert(tmp_path / "ranks/rank0.pt", tmp_path / "equal.safetensors", part=True, only=["equal"])
    assert list(tessera.load(tmp_path / "equal.safetensors")) == ["equal"]
