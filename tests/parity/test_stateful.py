"""Objects with state_dict and load_state_dict at the top of a state: what one side saved, the other loads."""
import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

TOOL = os.environ["TESSERA_STATEFUL_TOOL"]

pytestmark = pytest.mark.filterwarnings("ignore")


class Object:
    """What torch.distributed.checkpoint.stateful.Stateful asks for."""

    def __init__(self, state):
        self.state = state
        self.taken = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.taken += 1


def tool(*words):
    done = subprocess.run([TOOL, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbered():
    return torch.arange(12, dtype=torch.float32).reshape(6, 2)


def test_pytorch_loads_into_its_objects_what_tessera_saved(tmp_path):
    tool("save", tmp_path / "c")
    model, sampler = Object({"weight": torch.zeros(6, 2)}), Object({"seed": 0, "name": ""})
    state = {"model": model, "sampler": sampler, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(model.state["weight"], numbered())
    assert sampler.state == {"seed": 7, "name": "shuffled"}
    assert (model.taken, sampler.taken, state["step"]) == (1, 1, 41)


def test_tessera_loads_into_its_objects_what_pytorch_saved(tmp_path):
    state = {"model": Object({"weight": numbered()}), "sampler": Object({"seed": 9, "name": "in order"}), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert tool("load", tmp_path / "c").splitlines() == ["0 1 2 3 4 5 9 in order 3", "6 7 8 9 10 11 9 in order 3"]


def test_pytorch_loads_what_tessera_saved_one_file_an_item(tmp_path):
    # P-21: the weight's rows of two ranks, three values.
    tool("save-items", tmp_path / "c")
    places = list(dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data.values())
    files = {place.relative_path for place in places}
    assert len(places) == len(files) == 5 and all(place.offset == 0 for place in places)
    assert files == {file.name for file in (tmp_path / "c").glob("*.distcp")}
    state = {"model": {"weight": torch.zeros(6, 2)}, "sampler": {"seed": 0, "name": ""}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(state["model"]["weight"], numbered())
    assert (state["sampler"], state["step"]) == ({"seed": 7, "name": "shuffled"}, 41)


def test_tessera_loads_what_pytorch_saved_one_file_an_item(tmp_path):
    state = {"model": {"weight": numbered()}, "sampler": {"seed": 9, "name": "in order"}, "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False), no_dist=True)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 4
    assert tool("load", tmp_path / "c").splitlines() == ["0 1 2 3 4 5 9 in order 3", "6 7 8 9 10 11 9 in order 3"]


def test_pytorch_loads_what_tessera_compressed(tmp_path):
    # P-23: with `zstandard` of tools/requirements.txt, which torch's extension looks for.
    tool("save-zstd", tmp_path / "c")
    places = list(dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data.values())
    assert len(places) == 6 and all(place.transform_descriptors == ["stream.zstd/1"] for place in places)
    for place in places:
        data = (tmp_path / "c" / place.relative_path).read_bytes()[place.offset:place.offset + place.length]
        assert data[:4] == bytes.fromhex("28b52ffd")  # a frame
    state = {"model": {"weight": torch.zeros(6, 2)}, "large": torch.zeros(1000, 700), "sampler": {"seed": 0, "name": ""},
             "step": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(state["model"]["weight"], numbered())
    assert torch.equal(state["large"], torch.arange(700000, dtype=torch.float32).reshape(1000, 700))
    assert (state["sampler"], state["step"]) == ({"seed": 7, "name": "shuffled"}, 41)


def test_tessera_loads_what_pytorch_compressed(tmp_path):
    state = {"model": {"weight": numbered()}, "sampler": {"seed": 9, "name": "in order"}, "step": 3}
    writer = dcp.FileSystemWriter(tmp_path / "c", _extensions=[ZStandard()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert tool("load", tmp_path / "c").splitlines() == ["0 1 2 3 4 5 9 in order 3", "6 7 8 9 10 11 9 in order 3"]


def test_pytorch_loads_what_tessera_saved_with_hooks(tmp_path):
    # P-20: other names, another dtype, and the second rank writes what both hold.
    tool("save-hooks", tmp_path / "c")
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert set(metadata.state_dict_metadata) == {"net.weight", "large", "sampler.seed", "sampler.name", "step"}
    writers = {index.fqn: place.relative_path[:4] for index, place in metadata.storage_data.items()}
    assert (writers["large"], writers["step"]) == ("__1_", "__0_")
    state = {"net": {"weight": torch.zeros(6, 2, dtype=torch.bfloat16)}, "large": torch.zeros(1000, 700),
             "sampler": {"seed": 0, "name": ""}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(state["net"]["weight"], numbered().to(torch.bfloat16))
    assert metadata.state_dict_metadata["net.weight"].properties.dtype == torch.bfloat16
    assert torch.equal(state["large"], torch.arange(700000, dtype=torch.float32).reshape(1000, 700))
    assert (state["sampler"], state["step"]) == ({"seed": 7, "name": "shuffled"}, 41)


def test_pytorch_loads_what_tessera_kept_of_each_rank(tmp_path):
    # OQ-09: each rank had a scale and a seed of its own.
    tool("save-unlike", tmp_path / "c")
    state = {"scale": torch.zeros(3), "scale.rank1": torch.zeros(3), "seed": 0, "seed.rank1": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(state["scale"], torch.full((3,), 1.0))
    assert torch.equal(state["scale.rank1"], torch.full((3,), 2.0))
    assert (state["seed"], state["seed.rank1"]) == (1, 2)
    assert len(dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata) == 4


def test_pytorch_loads_parts_that_tessera_saved_without_collectives(tmp_path):
    # P-04: PyTorch's reader gives a rank what is in the rank's own part.
    tool("save-parts", tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()
    for rank in range(2):
        if rank > 0:
            shutil.copy(tmp_path / "c" / f"__{rank}.metadata", tmp_path / "c" / "__0.metadata")
        state = {"model": {"weight": torch.full((6, 2), -1.0)}, "sampler": {"seed": 0, "name": ""}, "step": 0}
        dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
        expected = torch.full((6, 2), -1.0)
        expected[3 * rank:3 * rank + 3] = numbered()[3 * rank:3 * rank + 3]
        assert torch.equal(state["model"]["weight"], expected)
        assert (state["sampler"], state["step"]) == ({"seed": 7, "name": "shuffled"}, 41)


def test_tessera_loads_its_parts(tmp_path):
    tool("save-parts", tmp_path / "c")
    assert tool("load", tmp_path / "c").splitlines() == ["0 1 2 3 4 5 7 shuffled 41", "6 7 8 9 10 11 7 shuffled 41"]
