"""`mmap=True`: arrays and tensors that are views of mapped files, and when they are none."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import numpy
import pytest

import tessera

NUMPY = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]


def maps_of(path):
    """The mappings of this process that are of the file, or of files in the directory."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    found = []
    for line in lines:
        place = line.split(maxsplit=5)
        if len(place) == 6 and place[5].removesuffix(" (deleted)").startswith(str(path)):
            found.append(tuple(int(end, 16) for end in place[0].split("-")))
    return found


def is_mapped(made, path):
    address = made.data_ptr() if hasattr(made, "data_ptr") else made.ctypes.data
    return any(begin <= address < end for begin, end in maps_of(path))


def bits(made):
    return bytes(numpy.ascontiguousarray(made).tobytes())


@pytest.fixture
def state():
    return {"a": numpy.arange(12, dtype="float32").reshape(3, 4), "b": numpy.arange(5), "step": 3}


# Of DCP, the first item of a file is aligned; the others lie end to end, wherever that is.
PLACES = {"safetensors": "model.safetensors", "torch": "model.pt", "dcp": "step400"}


@pytest.fixture(params=PLACES)
def path(request, tmp_path, state):
    place = str(tmp_path / PLACES[request.param])
    kept = {name: made for name, made in state.items() if request.param != "safetensors" or name != "step"}
    tessera.save_file(kept, place, kind=request.param)
    return place


def test_every_kind_gives_views_of_its_file(path, state):
    loaded = tessera.load(path, framework="numpy", mmap=True)
    assert is_mapped(loaded["a"], path) and (is_mapped(loaded["b"], path) or os.path.isdir(path))
    for name in ("a", "b"):
        assert loaded[name].flags.writeable and loaded[name].flags.aligned
        assert loaded[name].dtype == state[name].dtype and (loaded[name] == state[name]).all()
    assert loaded.get("step", 3) == 3
    assert not is_mapped(tessera.load(path, framework="numpy")["a"], path)


def test_tensors_of_torch_are_views_too(path, state, torch):
    loaded = tessera.load(path, framework="torch", mmap=True)
    for name in ("a", "b"):
        assert is_mapped(loaded[name], path) or (name, os.path.isdir(path)) == ("b", True)
        assert torch.equal(loaded[name], torch.from_numpy(state[name]))


def test_what_is_written_stays_here(path, state):
    files = [path] if os.path.isfile(path) else list(pathlib.Path(path).iterdir())
    before = [pathlib.Path(file).read_bytes() for file in files]
    loaded = tessera.load(path, framework="numpy", mmap=True)
    loaded["a"][...] = -1
    assert (loaded["a"] == -1).all()
    assert before == [pathlib.Path(file).read_bytes() for file in files]
    assert (tessera.load(path, framework="numpy", mmap=True)["a"] == state["a"]).all()  # a mapping of its own
    assert tessera.verify(path).findings == []


def test_a_file_that_is_removed_stays_for_who_has_it(path, state):
    loaded = tessera.load(path, framework="numpy", mmap=True)
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    assert (loaded["a"] == state["a"]).all() and (loaded["b"] == state["b"]).all()


def test_a_save_over_it_leaves_the_views(path, state):
    loaded = tessera.load(path, framework="numpy", mmap=True)
    kind = tessera.open(path).kind
    tessera.save_file({"a": numpy.full((3, 4), 9, "float32"), "b": numpy.zeros(5, "int64")}, path, kind=kind)
    assert (loaded["a"] == state["a"]).all() and (loaded["b"] == state["b"]).all()
    assert (tessera.load(path, framework="numpy", mmap=True)["a"] == 9).all()
    tessera.save_file({"a": loaded["a"], "b": loaded["b"]}, path, kind=kind)  # what is mapped of the file itself
    assert (tessera.load(path, framework="numpy")["a"] == state["a"]).all()


def test_a_child_writes_for_itself(path, state):
    loaded = tessera.load(path, framework="numpy", mmap=True)
    child = os.fork()
    if child == 0:
        fine = (loaded["a"] == state["a"]).all()
        loaded["a"][...] = 5
        os._exit(0 if fine and (tessera.load(path, framework="numpy", mmap=True)["a"] == state["a"]).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (loaded["a"] == state["a"]).all()


def test_damage_is_not_noticed_but_by_verify(tmp_path):
    path = tmp_path / "model.pt"
    tessera.save_file({"w": numpy.ones(1 << 20, "float32")}, path)
    with open(path, "r+b") as file:
        file.seek(2 << 20)  # in a block of its own: what lies beside the pickle is looked at
        file.write(struct.pack("<f", 2.0) * 4)
    assert tessera.load(path, framework="numpy", mmap=True)["w"].sum() == (1 << 20) + 4
    with pytest.raises(tessera.CorruptError):
        tessera.load(path, framework="numpy")
    assert tessera.verify(path).findings


def test_a_truncated_file_is_refused_when_it_is_opened(path):
    file = path if os.path.isfile(path) else next(str(one) for one in pathlib.Path(path).glob("*.distcp"))
    os.truncate(file, os.path.getsize(file) - 1)
    with pytest.raises((tessera.CorruptError, tessera.IncompleteError)):
        tessera.load(path, framework="numpy", mmap=True)


def test_a_file_that_has_changed_since_it_was_opened_is_not_mapped(tmp_path):
    path = tmp_path / "model.safetensors"
    tessera.save_file({"w": numpy.ones(1000, "float32")}, path)
    with tessera.open(path) as checkpoint:
        checkpoint["w"].numpy()
        os.truncate(path, os.path.getsize(path) - 1)
        with pytest.raises(tessera.ConflictError):
            checkpoint["w"].numpy(mmap=True)


@pytest.mark.parametrize("kind", PLACES)
def test_every_dtype_of_numpy(tmp_path, kind):
    state = {name: numpy.arange(7).astype(name) for name in NUMPY}
    state |= {f"{name}_one": numpy.array(1, name) for name in NUMPY}
    state |= {f"{name}_none": numpy.zeros((2, 0, 3), name) for name in NUMPY}
    if kind == "safetensors":
        state = {name: made for name, made in state.items() if not name.startswith("complex128")}
    path = tmp_path / PLACES[kind]
    tessera.save_file(state, path, kind=kind)
    loaded = tessera.load(path, framework="numpy", mmap=True)
    for name, made in state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (made.dtype, made.shape)
        assert bits(loaded[name]) == bits(made)
        assert loaded[name].size == 0 or loaded[name].flags.aligned
        assert is_mapped(loaded[name], path) or made.size == 0 or kind == "dcp"


def test_every_dtype_of_torch(tmp_path, torch):
    names = [name for name in tessera._memory.SIZES if hasattr(torch, name)]
    state = {name: torch.arange(16, dtype=torch.uint8).view(getattr(torch, name)) for name in names if name != "bool"}
    state["bool"] = torch.tensor([True, False])
    torch.save(state, tmp_path / "model.pt")
    loaded = tessera.load(tmp_path / "model.pt", framework="torch", mmap=True)
    for name, made in state.items():
        assert loaded[name].dtype == made.dtype and is_mapped(loaded[name], tmp_path)
        assert torch.equal(loaded[name].view(torch.uint8), made.view(torch.uint8))


def test_an_index_set_maps_each_file_once(tmp_path):
    for number in (1, 2):
        tensors = {f"w{number}.{i}": numpy.full(4, 10 * number + i, "float32") for i in range(20)}
        tessera.save_file(tensors, tmp_path / f"model-0000{number}-of-00002.safetensors")
    names = {f"w{number}.{i}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2) for i in range(20)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    loaded = tessera.load(tmp_path, framework="numpy", mmap=True)
    assert len(loaded) == 40 and all(is_mapped(made, tmp_path) for made in loaded.values())
    assert (loaded["w2.7"] == 27).all() and len(maps_of(tmp_path)) == 2


def test_many_small_tensors_share_one_mapping(tmp_path):
    path = tmp_path / "model.safetensors"
    tessera.save_file({f"w{i}": numpy.array([i]) for i in range(100_000)}, path)
    loaded = tessera.load(path, framework="numpy", mmap=True)
    assert len(maps_of(path)) == 1 and loaded["w99999"][0] == 99999
    with tessera.safe_open(path, framework="np", mmap=True) as file:
        assert [file.get_tensor(f"w{i}")[0] for i in range(0, 100_000, 100)] == list(range(0, 100_000, 100))
        assert len(maps_of(path)) == 2
    del file
    assert len(maps_of(path)) == 1
    del loaded
    assert maps_of(path) == []


@pytest.mark.parametrize("pad", range(8))
def test_what_is_not_aligned_is_read(tmp_path, pad):
    tensors = {"d": ("F64", 8), "f": ("F32", 4), "h": ("F16", 2), "u": ("U8", 1)}
    header, at = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [3], "data_offsets": [at, at + 3 * size]}
        at += 3 * size
    text = json.dumps(header)
    text += " " * (-len(text) % 8 + pad)
    data = b"".join(numpy.arange(3, dtype=f"{'u' if size == 1 else 'f'}{size}").tobytes() for _, size in tensors.values())
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    loaded = tessera.load(path, framework="numpy", mmap=True)
    for name, (_, size) in tensors.items():
        assert loaded[name].tolist() == [0, 1, 2] and loaded[name].flags.aligned
        assert is_mapped(loaded[name], path) == (pad % size == 0)


def test_a_tensor_of_several_pieces_is_read(tmp_path, state):
    tessera.save_file(state, tmp_path / "model.pt")
    tessera.convert(tmp_path / "model.pt", tmp_path / "step", to="dcp", ranks=2)
    with tessera.open(tmp_path / "step") as checkpoint:
        assert len(checkpoint["a"].pieces) > 1
    loaded = tessera.load(tmp_path / "step", framework="numpy", mmap=True)
    assert not is_mapped(loaded["a"], tmp_path) and (loaded["a"] == state["a"]).all()


def test_what_is_converted_is_read(path, state):
    loaded = tessera.load(path, framework="numpy", dtype="float64", mmap=True)
    assert loaded["a"].dtype == "float64" and not is_mapped(loaded["a"], path)
    with tessera.open(path) as checkpoint:
        assert not is_mapped(checkpoint["a"].numpy(dtype="float64", mmap=True), path)
        assert is_mapped(checkpoint["a"].numpy(dtype="float32", mmap=True), path)


def test_parts_are_views(path, state):
    assert list(tessera.load(path, only=["a"], framework="numpy", mmap=True)) == ["a"]
    with tessera.open(path) as checkpoint:
        part = checkpoint["a"].numpy((slice(1, 3), slice(None, None, -2)), mmap=True)
        again = checkpoint.only(["a"])["a"].numpy(mmap=True)
    assert is_mapped(part, path) and (part == state["a"][1:3, ::-2]).all()  # the checkpoint is closed
    part[...] = 70
    assert (again[1:3, ::-2] == 70).all()
    with pytest.raises(tessera.InvalidArgumentError):
        checkpoint.load(mmap=True)


def test_safe_open_gives_views(path, state):
    with tessera.safe_open(path, framework="np", mmap=True) as file:
        assert is_mapped(file.get_tensor("a"), path) and (file.get_tensor("a") == state["a"]).all()
        assert is_mapped(file.get_slice("a")[1:], path) and (file.get_slice("a")[1:, 2] == state["a"][1:, 2]).all()
    with tessera.safe_open(path, framework="np") as file:
        assert not is_mapped(file.get_tensor("a"), path)


def test_safe_open_gives_views_of_torch(path, state, torch):
    with tessera.safe_open(path, framework="pt", device="cpu", mmap=True) as file:
        made = file.get_tensor("a")
        assert is_mapped(made, path) and torch.equal(made, torch.from_numpy(state["a"]))
        assert torch.equal(file.get_slice("a")[1:, ::2], made[1:, ::2])


def test_views_and_tied_weights_share_what_they_shared(tmp_path, torch):
    base = torch.arange(24.0)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    state = {"base": base, "tail": base[12:], "turned": base.view(4, 6).t(), "emb": weight, "head": weight}
    state |= {"conj": torch.tensor([1 + 2j]).conj()}
    torch.save(state, tmp_path / "model.pt")
    loaded = tessera.load(tmp_path / "model.pt", framework="torch", mmap=True)
    for name, made in state.items():
        assert is_mapped(loaded[name], tmp_path) and torch.equal(loaded[name], made), name
    assert loaded["emb"] is loaded["head"] and loaded["emb"].requires_grad
    loaded["base"][23] = -1
    assert loaded["tail"][11] == -1 and loaded["turned"][5, 3] == -1
    arrays = tessera.load(tmp_path / "model.pt", framework="numpy", mmap=True)
    assert arrays["conj"][0] == 1 - 2j and (arrays["turned"] == state["turned"].numpy()).all()
    arrays["base"][23] = -1
    assert arrays["tail"][11] == -1
    with tessera.open(tmp_path / "model.pt") as checkpoint:
        assert checkpoint["emb"].torch(mmap=True).requires_grad is False


def test_elements_that_share_a_place_are_read(tmp_path, torch):
    base = torch.arange(3.0)
    state = {"wide": base.expand(4, 3), "windows": torch.arange(6.0).unfold(0, 3, 1), "one": torch.ones(1).expand(5)}
    torch.save({**state, "base": base}, tmp_path / "model.pt")
    for framework in ("numpy", "torch"):
        loaded = tessera.load(tmp_path / "model.pt", framework=framework, mmap=True)
        assert is_mapped(loaded["base"], tmp_path)
        with tessera.open(tmp_path / "model.pt") as checkpoint:
            for name, made in state.items():
                for found in (loaded[name], getattr(checkpoint[name], framework)(mmap=True)):
                    found += 1
                    found[0] = 9
                    assert (found[1:] == made.numpy()[1:] + 1).all(), (framework, name)
        assert loaded["base"].tolist() == [0, 1, 2]


def test_tied_weights_of_safetensors_are_one(tmp_path):
    weight = numpy.ones((3, 2), "float32")
    tessera.save_file({"emb": weight, "head": weight}, tmp_path / "model.safetensors")
    loaded = tessera.load(tmp_path / "model.safetensors", framework="numpy", mmap=True)
    loaded["emb"][0, 0] = 5
    assert loaded["head"][0, 0] == 5


def test_files_of_torchs_own(tmp_path, torch):
    state = {f"w{i}": torch.arange(i, dtype=torch.float32) for i in range(1, 9)}
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"plain": state, "list": [state["w3"], {"x": state["w4"]}]}, tmp_path / "nested.pt")
    legacy = tessera.load(tmp_path / "legacy.pt", framework="torch", mmap=True)
    assert all(torch.equal(legacy[name], made) for name, made in state.items())
    nested = tessera.load(tmp_path / "nested.pt", framework="torch", mmap=True)
    assert all(is_mapped(made, tmp_path) for made in nested["plain"].values())
    assert is_mapped(nested["list"][0], tmp_path) and torch.equal(nested["list"][1]["x"], state["w4"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_of_torchs_own(tmp_path, torch):
    import torch.distributed.checkpoint as dcp

    state = {f"w{i}": torch.arange(i, dtype=torch.float32) for i in range(1, 9)}
    dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    loaded = tessera.load(tmp_path / "step", framework="torch", mmap=True)
    assert all(torch.equal(loaded[name], made) for name, made in state.items())


COLD = """
import sys, numpy, tessera
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
tessera.load(sys.argv[1], only=["small"], framework="numpy", mmap=True)
before = resident()
loaded = tessera.load(sys.argv[1], framework="numpy", mmap=True)
after = resident()
assert after - before < 4 << 20, after - before
loaded["large"].sum()
assert resident() - before > 60 << 20
"""


def test_nothing_is_in_memory_before_somebody_looks(tmp_path):
    path = tmp_path / "model.safetensors"
    tessera.save_file({"large": numpy.ones(16 << 20, "float32"), "small": numpy.ones(2)}, path)
    subprocess.run([sys.executable, "-c", COLD, path], check=True)
