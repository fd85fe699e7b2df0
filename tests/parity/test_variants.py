"""Spec F-03, F-07, P-26, P-28: PyTorch and safetensors read what `tessera convert` makes of the variants."""
import json
import os
import pathlib
import subprocess
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

TESSERA = os.environ["TESSERA_COMMAND"]
GOLDEN = pathlib.Path(os.environ["TESSERA_GOLDEN"])
VARIANTS = ["c2_multi", "c2_nocoll", "c2_st", "c2_st_obj", "c_zstd", "m2d", "old", "olmo_core"]

pytestmark = pytest.mark.filterwarnings("ignore")
warnings.simplefilter("ignore")


def convert(source, target, *options):
    subprocess.run([TESSERA, "convert", source, target, "--quiet", *options], check=True)


def load_dcp(directory):
    tree = {}
    _load_state_dict(tree, storage_reader=dcp.FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("name", VARIANTS)
def test_pytorch_reads_what_became_of_a_variant(name, tmp_path):
    convert(GOLDEN / "variants" / name, tmp_path / "dcp", "--to", "dcp")
    convert(GOLDEN / "variants" / name, tmp_path / "a.pt")
    from_dcp, from_file = load_dcp(tmp_path / "dcp"), torch.load(tmp_path / "a.pt", weights_only=True)
    assert from_dcp and same(from_dcp, from_file)
    if name not in ("c2_nocoll", "c2_st", "c2_st_obj", "c_zstd", "olmo_core"):  # which torch cannot read here
        assert same(from_dcp, load_dcp(GOLDEN / "variants" / name))


def test_pytorch_does_not_see_the_tails(tmp_path):
    tensors = {"w": torch.randn(700, 1000), "b": torch.arange(5, dtype=torch.bfloat16), "step": torch.tensor(7)}
    torch.save(tensors, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp")
    files = list((tmp_path / "dcp").glob("*.distcp"))
    assert files and all(file.read_bytes().endswith(b"TSRATAIL") for file in files)
    assert same(load_dcp(tmp_path / "dcp"), tensors)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(into, tensors)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), tensors)
    # What torch writes over it has none, and Tessera reads that.
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "c.pt")
    assert same(torch.load(tmp_path / "c.pt", weights_only=True), tensors)


def test_shards_of_ranks_become_a_set_that_everybody_reads(tmp_path):
    convert(GOLDEN / "c2_hf_dist", tmp_path / "set", "--to", "safetensors", "--max-shard-size", "64")
    text = (tmp_path / "set/model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        found = safetensors.torch.load_file(tmp_path / "set" / file)
        assert set(found) == {name for name, holder in index["weight_map"].items() if holder == file}
        tensors.update(found)
    assert index["metadata"] == {"total_size": sum(t.numel() * t.itemsize for t in tensors.values())}
    expected = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(expected, storage_reader=dcp.HuggingFaceStorageReader(GOLDEN / "c2_hf_dist"), no_dist=True)
    assert same(tensors, expected)
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(tmp_path / "set"), no_dist=True)
    assert same(again, expected)


def shard_as_huggingface(state, directory, most):
    """What `save_pretrained(safe_serialization=False)` of transformers wrote: tensors that share a storage go into one file and
    count once, a file that would become larger is followed by the next one."""
    shards, sizes, block_of, total = [{}], [0], {}, 0
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in block_of:
            shards[block_of[storage]][name] = tensor
            continue
        size = tensor.numel() * tensor.itemsize
        if sizes[-1] and sizes[-1] + size > most:
            shards.append({})
            sizes.append(0)
        block_of[storage] = len(shards) - 1
        shards[-1][name] = tensor
        sizes[-1] += size
        total += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"pytorch_model-{number:05}-of-{len(shards):05}.bin"
        torch.save(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def test_a_set_of_torch_files_is_what_pytorch_loads(tmp_path):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 8).bfloat16(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 30))
    model[3].weight = model[0].weight
    state = model.state_dict()
    hub = tmp_path / "hub"
    hub.mkdir()
    shard_as_huggingface(state, hub, 200)
    files = sorted(hub.glob("*.bin"))
    assert len(files) > 2
    loaded = {name: tensor for file in files for name, tensor in torch.load(file, weights_only=True).items()}
    assert same(loaded, dict(state))
    for place in (hub, hub / "pytorch_model.bin.index.json"):
        done = subprocess.run([TESSERA, "verify", place, "--json"], check=True, capture_output=True, text=True)
        assert json.loads(done.stdout)["findings"] == [] and done.stderr == ""
        for target in ("a.bin", "b.ckpt", "c.pt"):
            convert(place, tmp_path / target, "--overwrite")
            assert same(torch.load(tmp_path / target, weights_only=True), loaded), target
    convert(hub, tmp_path / "weights", "--to", "torch")
    again = torch.load(tmp_path / "weights", weights_only=True)
    assert same(again, loaded) and again["0.weight"].untyped_storage().data_ptr() == again["3.weight"].untyped_storage().data_ptr()
    model.load_state_dict(again)
    convert(hub, tmp_path / "tensors", "--to", "safetensors", "--keep-duplicates")
    assert same(safetensors.torch.load_file(tmp_path / "tensors"), loaded)


@pytest.mark.parametrize("numbers", [[1, 3, 3, 5, 1], [1, 1, 1, 1, 1]])
def test_ranks_save_the_set_that_pytorch_saves(numbers, tmp_path):
    """P-26: the same files with the same tensors for one map, from three ranks that hold rows. PyTorch and safetensors read
    them."""
    torch.manual_seed(5)
    tensors = {"a.weight": torch.randn(7, 5), "a.bias": torch.randn(7).bfloat16(), "b.weight": torch.randn(2, 3, 4),
               "b.ids": torch.arange(11), "step": torch.tensor(3.0)}
    files = dict(zip(tensors, numbers))
    torch.save(tensors, tmp_path / "whole.pt")
    words = [tmp_path / "whole.pt", tmp_path / "ours", "3", "0", *(f"{name}={number}" for name, number in files.items())]
    subprocess.run([os.environ["TESSERA_SAVE_SET_TOOL"], *words], check=True)
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(tmp_path / "theirs", fqn_to_index_mapping=files), no_dist=True)
    names, indices = [], []
    for directory in (tmp_path / "ours", tmp_path / "theirs"):
        names.append(sorted(file.name for file in directory.iterdir()))
        indices.append(json.loads((directory / "model.safetensors.index.json").read_text()))
    assert names[0] == names[1] and len(names[0]) == len(set(numbers)) + 1
    assert indices[0] == indices[1]
    for file in set(indices[0]["weight_map"].values()):
        assert same(*(safetensors.torch.load_file(tmp_path / of / file) for of in ("ours", "theirs"))), file
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(tmp_path / "ours"), no_dist=True)
    assert same(again, tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float8_blocks_are_pytorch_s_own(dtype, tmp_path):
    convert(GOLDEN / "checkpoints/qz", tmp_path / "a.safetensors", "--dequantize", "--dtype", {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype])
    ours = safetensors.torch.load_file(tmp_path / "a.safetensors")
    theirs = {"l.weight": torch.zeros(130, 200, dtype=getattr(torch, dtype))}
    reader = dcp.QuantizedHuggingFaceStorageReader(str(GOLDEN / "checkpoints/qz"), target_dtype=getattr(torch, dtype))
    dcp.load(theirs, storage_reader=reader, no_dist=True)
    assert same(ours["l.weight"], theirs["l.weight"])
    assert "l.weight_scale_inv" not in ours and ours["e"].shape == (2, 128, 3)


def trained(kind):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = kind(groups)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1))])
@pytest.mark.parametrize("through", [[], ["--to", "safetensors"], ["--to", "dcp"]])
def test_state_by_number_comes_back_with_its_numbers(kind, through, tmp_path):
    """DCP has no keys but strings, and an optimizer passes over the state of "0" without a word."""
    model, optimizer = trained(kind)
    tree = {"model": model.state_dict(), "state": {"0": torch.ones(2), "optim": optimizer.state_dict()}}
    dcp.save(dict(tree), checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = tmp_path / "dcp"
    if through:
        convert(source, tmp_path / "between", *through)
        source = tmp_path / "between"
    done = subprocess.run([TESSERA, "convert", source, tmp_path / "a.pt", "--json"], check=True, capture_output=True, text=True)
    notes = ["the keys of state.optim.state are numbers again, as its param_groups have them"]
    assert json.loads(done.stdout)["notes"] == ([] if through else notes)  # the first of two has said it
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert list(loaded["state"]) == ["0", "optim"] and set(loaded["state"]["optim"]["state"]) == {0, 1, 2, 3}
    fresh = kind([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    fresh.load_state_dict(loaded["state"]["optim"])
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_keys_that_are_no_numbers_of_parameters_stay_as_they_are(tmp_path):
    groups = [{"params": [0, 1]}]
    trees = {"other": {"state": {"0": {"s": torch.ones(1)}, "7": {"s": torch.ones(1)}}, "param_groups": groups},
             "named": {"state": {"0": {"s": torch.ones(1)}}, "param_groups": [{"params": ["0", "1"]}]},
             "alone": {"state": {"0": {"s": torch.ones(1)}}}}
    dcp.save(dict(trees), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert [list(loaded[name]["state"]) for name in trees] == [["0", "7"], ["0"], ["0"]]
