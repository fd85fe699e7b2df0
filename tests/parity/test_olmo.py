"""Spec O-15, O-42, O-62, O-76, F-00, F-02, F-04..F-06: what Tessera writes as the OLMo kinds, ai2-olmo's own checkpoint
code and PyTorch read, bit for bit; what they wrote, Tessera reads.

PYTHONPATH has olmo_stubs, see there.
"""
import copy
import os
import pathlib
import shutil
import subprocess
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing._internal.distributed.fake_pg import FakeStore

# OLMo 0.6 calls torch.load as it was before 2.6 (OQ-07).
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
checkpoint = pytest.importorskip("olmo.checkpoint")
from olmo.safetensors_util import safetensors_file_to_state_dict, state_dict_to_safetensors_file  # noqa: E402

TESSERA = os.environ["TESSERA_COMMAND"]
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
CONFIG = "# of the run\nrun_name: parity\nsave_overwrite: true\nsharded_checkpointer: local\n"

pytestmark = pytest.mark.filterwarnings("ignore")


def tessera(*words):
    done = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def checkpointer(cls):
    return cls(types.SimpleNamespace(save_overwrite=True), thread_count=2)


def shapes():
    """Odd sizes, so that padding and uneven shards happen; one row, one element, more ranks than rows."""
    yield "transformer.wte.weight", (13, 6)
    for block in range(3):
        yield f"transformer.blocks.{block}.attn.weight", (7, 6)
        yield f"transformer.blocks.{block}.attn.bias", (7,)
        yield f"transformer.blocks.{block}.norm.weight", (5,)
    yield "transformer.ln_f.weight", (1, 6)
    yield "transformer.scale", (1,)


def training_state(dtype=torch.float32):
    random = torch.Generator().manual_seed(5)
    model = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes()}
    names = list(model)
    decay, rest = [n for n in names if "weight" in n], [n for n in names if "weight" not in n]
    state = {name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(t.shape, generator=random),
                    "exp_avg_sq": torch.rand(t.shape, generator=random)} for name, t in model.items()}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decayed, "fused": None, "sharded": True,
               "max_grad_norm": 1.0, "param_names": list(params), "params": list(params)}
              for params, decayed in ((decay, 0.1), (rest, 0.0))]
    train = {"epoch": 1, "global_step": 7, "checkpoints": [pathlib.PosixPath("/run/step5")],
             "rng": {"torch": torch.arange(16, dtype=torch.uint8), "python": (3, (1, 2, 3), None)}}
    return model, {"state": state, "param_groups": groups}, train


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """An unsharded checkpoint as OLMo's scripts write it."""
    directory = tmp_path_factory.mktemp("olmo") / "step7-unsharded"
    directory.mkdir()
    for name, part in zip(("model", "optim", "train"), training_state()):
        torch.save(part, directory / f"{name}.pt")
    (directory / "config.yaml").write_text(CONFIG)
    return directory


def same(a, b, where=""):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape, where
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*as_bytes), where
    elif isinstance(a, dict):
        assert set(a) == set(b), f"{where}: {set(a) ^ set(b)}"
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}/{i}")
    else:
        assert a == b and type(a) is type(b), where


def by_name(optim):
    """The form with names of an optimizer state that has numbers, by OLMo's own function (O-42)."""
    optim = copy.deepcopy(optim)
    optim["state"] = dict(optim["state"])
    names = {n.replace("_fsdp_wrapped_module.", "") for g in optim["param_groups"] for n in g["param_names"]}
    full_checkpointer = checkpointer(checkpoint.FullCheckpointer)
    return full_checkpointer._make_optim_state_dict_compatible(optim, {name: {name} for name in names})


def unsharded(directory):
    return [torch.load(directory / f"{part}.pt") for part in ("model", "optim", "train")]


@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_olmo_unshards_what_tessera_writes_as_local(full, tmp_path, ranks):
    tessera("convert", full, tmp_path / "step7", "--to", "olmo-local", "--ranks", ranks)
    names = [m["name"] for m in torch.load(tmp_path / "step7/model/rank0.pt")["modules"]]
    assert names == [""] + [f"_fsdp_wrapped_module.transformer.blocks.{i}" for i in range(3)]
    model, optim, train = checkpointer(checkpoint.LocalShardedCheckpointer).unshard_checkpoint(tmp_path / "step7")
    expected = unsharded(full)
    same(expected[0], model)
    same(expected[1], by_name(optim))
    same(expected[2], train)
    assert (tmp_path / "step7/config.yaml").read_text() == CONFIG
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step7"]


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_olmo_unshards_models_without_alignment(full, tmp_path, ranks):
    """use_orig_params=False: zeros at the end of shards. Its optimizer knows flat parameters only."""
    (tmp_path / "in").mkdir()
    shutil.copy(full / "model.pt", tmp_path / "in")
    how = ["--to", "olmo-local", "--ranks", ranks, "--no-orig-params", "--unit", r"transformer\.blocks"]
    tessera("convert", tmp_path / "in", tmp_path / "step7", *how)
    model, _, _ = checkpointer(checkpoint.LocalShardedCheckpointer).unshard_checkpoint(
        tmp_path / "step7", load_optimizer_state=False, load_trainer_state=False)
    same(unsharded(full)[0], model)
    done = subprocess.run([TESSERA, "convert", full, tmp_path / "two", *map(str, how)], capture_output=True, text=True)
    assert done.returncode == 3 and "in two groups of the optimizer" in done.stderr
    padded = [h["flat_param._shard_numel_padded"] for r in range(ranks)
              for m in torch.load(tmp_path / f"step7/model/rank{r}.pt")["modules"] for h in m["handles"]]
    assert len(padded) == 2 * ranks and max(padded) > 0


def test_olmo_unshards_a_bfloat16_model(tmp_path):
    (tmp_path / "in").mkdir()
    model = training_state(torch.bfloat16)[0]
    torch.save(model, tmp_path / "in/model.pt")
    tessera("convert", tmp_path / "in", tmp_path / "out", "--to", "olmo-local", "--ranks", 3)
    found, optim, train = checkpointer(checkpoint.LocalShardedCheckpointer).unshard_checkpoint(
        tmp_path / "out", load_optimizer_state=False, load_trainer_state=False)
    assert optim is None and train is None
    same(model, found)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_olmo_unshards_what_tessera_writes_as_legacy(full, tmp_path, ranks):
    tessera("convert", full, tmp_path / "step7", "--to", "olmo-legacy", "--ranks", ranks)
    legacy = checkpointer(checkpoint.TorchLegacyShardedCheckpointer)
    model, optim, train = legacy.unshard_checkpoint(tmp_path / "step7")
    expected = unsharded(full)
    same(expected[0], model)
    same(expected[1], optim)
    del expected[2]["rng"]  # OLMo leaves it out (O-62)
    same(expected[2], train)


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_torch_loads_the_sharded_tensors(full, tmp_path, ranks):
    """In a process group of that world size and rank, as ShardedTensor.__setstate__ demands."""
    tessera("convert", full, tmp_path / "step7", "--to", "olmo-legacy", "--ranks", ranks)
    expected = unsharded(full)[0]
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            model = torch.load(tmp_path / f"step7/rank{rank}.pt")["model"]
            for name, whole in expected.items():
                chunks = whole.chunk(ranks)
                shards = model[name].local_shards()
                assert model[name].size() == whole.size()
                assert len(model[name].metadata().shards_metadata) == len(chunks)
                assert len(shards) == (1 if rank < len(chunks) else 0)
                if shards:
                    same(chunks[rank], shards[0].tensor, name)
                    assert shards[0].metadata.placement.rank() == rank
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_dcp_loads_what_tessera_writes_as_torch_new(full, tmp_path, ranks):
    tessera("convert", full, tmp_path / "step7", "--to", "olmo-torch-new", "--ranks", ranks)
    expected = unsharded(full)
    into = {"model": {name: torch.empty_like(t) for name, t in expected[0].items()}}
    dcp.load(into, checkpoint_id=str(tmp_path / "step7/model_and_optim"))
    same(expected[0], into["model"])
    dcp_to_torch_save(str(tmp_path / "step7/model_and_optim"), tmp_path / "whole.pt")
    same({"model": expected[0], "optim": expected[1]}, torch.load(tmp_path / "whole.pt"))
    for rank in range(ranks):
        same(expected[2], torch.load(tmp_path / f"step7/train/rank{rank}.pt"))
    assert tessera("stat", tmp_path / "step7").splitlines()[0].split() == ["kind", "olmo-torch-new"]
    # The way back, which is what unshard is for.
    tessera("unshard", tmp_path / "step7", tmp_path / "back")
    for part, found in zip(expected, unsharded(tmp_path / "back")):
        same(part, found)


def test_olmo_loads_full_checkpoints(full, tmp_path):
    expected = unsharded(full)
    for name, more in (("pt", []), ("st", ["--safetensors"])):
        tessera("unshard", full, tmp_path / name, *more)
        if name == "pt":
            model, optim = checkpointer(checkpoint.FullCheckpointer).load_checkpoint(tmp_path / name)
        else:  # what it calls, without the torch.device that safetensors refuses by now
            model, optim = (checkpoint.load_state_dict(tmp_path / name, f"{part}.pt") for part in ("model", "optim"))
        same(expected[0], model)
        same(expected[1], optim)
        same(expected[2], torch.load(tmp_path / name / "train.pt"))
    assert sorted(p.name for p in (tmp_path / "st").iterdir()) == ["config.yaml", "model.safetensors",
                                                                  "optim.safetensors", "tessera-digests.json",
                                                                  "train.pt"]
    tessera("unshard", full, tmp_path / "only", "--model-only")
    assert sorted(p.name for p in (tmp_path / "only").iterdir()) == ["config.yaml", "model.pt", "tessera-digests.json"]


def test_safetensors_are_those_that_olmo_writes(full, tmp_path):
    """F-06, both ways: OLMo reads ours, we read OLMo's, and the names are the same."""
    model, optim, _ = unsharded(full)
    (tmp_path / "olmo").mkdir()
    state_dict_to_safetensors_file(model, tmp_path / "olmo/model.safetensors")
    state_dict_to_safetensors_file(optim, tmp_path / "olmo/optim.safetensors")
    (tmp_path / "olmo/config.yaml").write_text(CONFIG)
    tessera("unshard", tmp_path / "olmo", tmp_path / "ours", "--safetensors")
    same(model, safetensors_file_to_state_dict(tmp_path / "ours/model.safetensors"))
    same(optim, safetensors_file_to_state_dict(tmp_path / "ours/optim.safetensors"))
    tessera("unshard", tmp_path / "olmo", tmp_path / "pt")
    same(model, dict(torch.load(tmp_path / "pt/model.pt")))
    same(optim, torch.load(tmp_path / "pt/optim.pt"))


def test_numbers_of_an_optimizer_become_names(full, tmp_path):
    """optim.pt as OLMo's unsharding of a local checkpoint leaves it: state by number, in a defaultdict."""
    tessera("convert", full, tmp_path / "step7", "--to", "olmo-local", "--ranks", 2)
    local = checkpointer(checkpoint.LocalShardedCheckpointer)
    model, optim, _ = local.unshard_checkpoint(tmp_path / "step7")
    (tmp_path / "numbers").mkdir()
    torch.save(model, tmp_path / "numbers/model.pt")
    torch.save(optim, tmp_path / "numbers/optim.pt")
    tessera("unshard", tmp_path / "numbers", tmp_path / "names")
    same(unsharded(full)[1], torch.load(tmp_path / "names/optim.pt"))


@pytest.mark.parametrize("kind", ["olmo-local", "olmo-legacy"])
def test_resharded_checkpoints_unshard_alike(full, tmp_path, kind):
    """Five ranks -> two, units kept; OLMo's unsharding of the result and Tessera's own give the source."""
    more = ["--unit", r"transformer\.blocks\.[01]|transformer\.wte"] if kind == "olmo-local" else []
    tessera("convert", full, tmp_path / "five", "--to", kind, "--ranks", 5, *more)
    tessera("reshard", tmp_path / "five", tmp_path / "two", "--ranks", 2)
    assert tessera("stat", tmp_path / "two").splitlines()[0].split() == ["kind", kind]
    expected = unsharded(full)
    if kind == "olmo-local":
        names = [m["name"].replace("_fsdp_wrapped_module.", "") for m in torch.load(tmp_path / "two/model/rank1.pt")["modules"]]
        assert names == ["", "transformer.wte", "transformer.blocks.0", "transformer.blocks.1"]
        model, optim, _ = checkpointer(checkpoint.LocalShardedCheckpointer).unshard_checkpoint(tmp_path / "two")
        same(expected[1], by_name(optim))
    else:
        model, optim, _ = checkpointer(checkpoint.TorchLegacyShardedCheckpointer).unshard_checkpoint(tmp_path / "two")
        same(expected[1], optim)
    same(expected[0], model)
    for directory in ("five", "two"):
        tessera("unshard", tmp_path / directory, tmp_path / f"{directory}-whole")
        found = unsharded(tmp_path / f"{directory}-whole")
        for group in found[1]["param_groups"]:
            group["param_names"] = [n.replace("_fsdp_wrapped_module.", "") for n in group["param_names"]]
        for part, whole in zip(expected, found):
            same(part, dict(whole))


@pytest.mark.parametrize("golden", ["fsdp1_uop0_ws2", "fsdp1_uop1_ws2", "fsdp1_uop1_ws4"])
@pytest.mark.parametrize("kind", ["local", "legacy"])
def test_a_checkpoint_of_fsdp_through_tessera(golden, kind, tmp_path):
    """FSDP1's own DCP checkpoint -> rank files for three ranks -> OLMo -> the whole tensors that PyTorch reads in it."""
    (tmp_path / "in").mkdir()
    shutil.copytree(GOLDEN / golden / "model_and_optim", tmp_path / "in/model_and_optim")
    tessera("convert", tmp_path / "in", tmp_path / "out", "--to", f"olmo-{kind}", "--ranks", 3,
            *(["--unit", "l[0-9]+"] if kind == "local" else []))
    dcp_to_torch_save(str(tmp_path / "in/model_and_optim"), tmp_path / "whole.pt")
    expected = torch.load(tmp_path / "whole.pt")
    cls = checkpoint.LocalShardedCheckpointer if kind == "local" else checkpoint.TorchLegacyShardedCheckpointer
    more = {"load_trainer_state": False} if kind == "local" else {}
    model, optim, _ = checkpointer(cls).unshard_checkpoint(tmp_path / "out", **more)
    same(expected["model"], model)
    same(expected["optim"]["state"], by_name(optim)["state"] if kind == "local" else optim["state"])
