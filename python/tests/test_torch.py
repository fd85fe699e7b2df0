"""What torch saves we load, what we save torch loads: bit for bit."""

import collections
import warnings

import numpy
import pytest

import tessera

torch = pytest.importorskip("torch")
import tessera.torch  # noqa: E402


def dtypes():
    return [getattr(torch, name) for name, *_ in tessera._core.DTYPES if hasattr(torch, name)]


def tensor_of(dtype):
    raw = torch.from_numpy(numpy.random.default_rng(0).integers(0, 255, 24 * 16, dtype="uint8"))
    if dtype is torch.bool:
        return (raw[:24] > 100).reshape(4, 6)
    return raw[: 24 * torch.empty(0, dtype=dtype).element_size()].view(dtype).reshape(4, 6)


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_dtype_in_both_directions(dtype, tmp_path):
    tensor = tensor_of(dtype)
    torch.save({"w": tensor}, tmp_path / "torch.pt")
    tessera.save_file({"w": tensor}, tmp_path / "ours.pt")
    assert same_bits(torch.load(tmp_path / "ours.pt")["w"], tensor)
    assert same_bits(tessera.load(tmp_path / "torch.pt", framework="torch")["w"], tensor)
    with tessera.open(tmp_path / "torch.pt") as checkpoint:
        assert same_bits(checkpoint["w"].torch(), tensor)
        assert same_bits(checkpoint["w"].torch((slice(1, 3), slice(2, 5))), tensor[1:3, 2:5])


def views():
    base = torch.arange(24.0).reshape(4, 6)
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    others = numbers.clone()
    return {
        "transposed": base.t(),
        "columns": base[:, 1::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "conjugate": numbers.conj(),
        "negative": others.conj().imag,
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.0),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "gradient": torch.ones(2, requires_grad=True),
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("file", ["x.pt", "x.safetensors", "directory"])
def test_views_are_saved_as_what_they_show(name, file, tmp_path):
    view = views()[name]
    tessera.save_file({"w": view}, tmp_path / file)
    back = tessera.load(tmp_path / file, framework="torch")["w"]
    assert torch.equal(back.detach(), view.detach()) and back.dtype == view.dtype
    assert type(back) is type(view) and back.requires_grad == view.requires_grad


def test_lazy_bits_of_a_file_of_torchs(tmp_path):
    lazy = {name: view for name, view in views().items() if name in ("conjugate", "negative", "transposed")}
    torch.save(lazy, tmp_path / "lazy.pt")
    back = tessera.load(tmp_path / "lazy.pt", framework="torch")
    arrays = tessera.load(tmp_path / "lazy.pt", framework="numpy")
    for name, view in lazy.items():
        assert torch.equal(back[name], view)
        assert (arrays[name] == view.resolve_conj().resolve_neg().numpy()).all()


def test_tied_weights_stay_tied(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    tessera.save_file({"a": weight, "b": weight, "part": weight.detach()[1:]}, tmp_path / "tied.pt")
    theirs = torch.load(tmp_path / "tied.pt", weights_only=False)
    ours = tessera.load(tmp_path / "tied.pt", framework="torch")
    for back in (theirs, ours):
        assert back["a"] is back["b"] and torch.equal(back["part"], weight[1:])
    assert theirs["part"].data_ptr() == theirs["a"].data_ptr() + 4  # they share one storage in the file


def test_state_dicts_of_modules_keep_their_metadata(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save(module.state_dict(), tmp_path / "module.pt")
    back = tessera.load(tmp_path / "module.pt", framework="torch")
    assert back._metadata == module.state_dict()._metadata
    module.load_state_dict(back)
    tessera.save_file(back, tmp_path / "again.pt")
    assert torch.load(tmp_path / "again.pt")._metadata == module.state_dict()._metadata


def test_dcp_directories_of_torchs(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    back = tessera.load(tmp_path / "torch", framework="torch")
    assert torch.equal(back["model"]["w"], state["model"]["w"]) and back["step"] == 3
    tessera.save_file(state, tmp_path / "ours")
    into = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "ours")
    assert torch.equal(into["model"]["w"], state["model"]["w"]) and into["step"] == 3


def bits(tensor):
    """Of what it shows."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def require_same(back, tree, name=""):
    """Bit for bit, with the containers and the keys."""
    if isinstance(tree, torch.Tensor):
        assert (back.dtype, back.shape) == (tree.dtype, tree.shape) and torch.equal(bits(back), bits(tree)), name
    elif isinstance(tree, (dict, list, tuple)):
        assert type(back) is type(tree) and len(back) == len(tree), name
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            require_same(back[key], item, f"{name}.{key}")
    else:
        assert type(back) is type(tree) and back == tree, name


def model_state():
    tied = torch.arange(12.0).reshape(3, 4)
    state = {str(dtype): tensor_of(dtype).clone() for dtype in dtypes()}
    state |= {name: view.detach() for name, view in views().items()}
    return state | {"tied": tied, "head": tied, "rows": tied[1:], "large": torch.arange(300_000, dtype=torch.int32)}


def training():
    moments = {7: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5)}, 0: {"step": torch.tensor(2.0)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [7, 0]}]
    return {"model": model_state(), "optim": {"state": moments, "param_groups": groups}, "step": 7, "text": "ü"}


def changed(tree):
    """What a training does after the call."""
    for value in tree.values():
        if isinstance(value, dict):
            changed(value)
        elif isinstance(value, torch.Tensor):
            torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).fill_(255)


def emptied(tree):
    if isinstance(tree, torch.Tensor):
        return torch.ones(tree.shape, dtype=tree.dtype)
    if isinstance(tree, dict):
        return type(tree)((key, emptied(item)) for key, item in tree.items())
    return [emptied(item) for item in tree] if isinstance(tree, list) else None


def read_by_dcp(path, tree):
    import torch.distributed.checkpoint as dcp

    into = emptied(tree)
    dcp.load(into, checkpoint_id=path)
    return into


def read_by_torch(path, tree):
    back = torch.load(path, weights_only=False)
    ours, theirs = back["model"], tree["model"]
    assert ours["head"].data_ptr() == ours["tied"].data_ptr() == ours["rows"].data_ptr() - 16
    for name, tensor in theirs.items():
        assert tensor.is_conj() or tensor.is_neg() or ours[name].stride() == tensor.stride(), name
    return back


def read_by_safetensors(path, tree):
    from safetensors.torch import load_file

    return load_file(path)


def read_olmos_full(path, tree):
    return {part: torch.load(path / f"{part}.pt") for part in tree}


def read_olmos_new(path, tree):
    state = {part: value for part, value in tree.items() if part != "train"}
    return read_by_dcp(path / "model_and_optim", state) | {"train": torch.load(path / "train/rank0.pt")}


def read_olmos_legacy(path, tree):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        back = whole(torch.load(path / "rank0.pt", weights_only=False))
        return {part: back.pop(part) for part in ("model", "optim")} | {"train": back}
    finally:
        torch.distributed.destroy_process_group()


def whole(tree):
    """With tensors in the place of those that one rank has sharded."""
    if isinstance(tree, dict):
        return type(tree)((key, whole(item)) for key, item in tree.items())
    if not hasattr(tree, "local_shards"):
        return tree
    (shard,) = tree.local_shards()
    assert list(tree.size()) == shard.metadata.shard_sizes
    return shard.tensor


def without_dtypes(tree, dtypes):
    tree["model"] = {name: value for name, value in tree["model"].items() if value.dtype not in dtypes}
    return tree


def state_for(kind):
    if kind.startswith("olmo"):
        names = ["a.w", "b"]
        states = {name: {"step": torch.tensor(2.0), "exp_avg": torch.full((2, 3), 0.5)} for name in names}
        model = collections.OrderedDict({name: torch.arange(6.0).reshape(2, 3) for name in names})
        groups = [{"lr": 0.1, "params": names, "param_names": names}]
        return {"model": model, "optim": {"state": states, "param_groups": groups}, "train": {"global_step": 7}}
    if kind == "torch":
        return training()
    # dcp.load cannot copy what has four bits, and safetensors has no name for it.
    few = {getattr(torch, "float4_e2m1fn_x2", None)}
    if kind == "dcp":
        return without_dtypes(training(), few)
    few |= {torch.complex32, torch.complex128}
    return without_dtypes(training(), few)["model"]


READS = {
    "dcp": read_by_dcp,
    "torch": read_by_torch,
    "safetensors": read_by_safetensors,
    "olmo-full": read_olmos_full,
    "olmo-torch-new": read_olmos_new,
    "olmo-legacy": read_olmos_legacy,
}


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("kind", READS)
@pytest.mark.filterwarnings("ignore")
def test_torch_loads_what_every_way_in_the_background_writes(kind, process, tmp_path):
    """checkpoint-rows P-31, P-32: of the call, whatever becomes of the tensors and values afterwards."""
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch")
    with tessera.CheckpointWriter(process=process, idle=False) as writer:
        for number in range(2):  # into new memory, and into what the first save had
            tree, path = state_for(kind), tmp_path / f"{number}"
            pending = writer.save(tree, path, kind=kind, keep_duplicates=kind == "safetensors")
            changed(tree)
            tree.clear()
            pending.result()
            require_same(READS[kind](path, state_for(kind)), state_for(kind))


def test_what_has_no_plain_elements_is_refused_by_its_key(tmp_path):
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(3, device="meta")
    for tensor in (sparse, meta, object()):
        with pytest.raises(tessera.UnsupportedError) as raised:
            tessera.save_file({"a": [{"b": tensor}]}, tmp_path / "x.pt")
        assert raised.value.key == "a.0.b" and "'a.0.b'" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_have_no_elements_to_give(tmp_path):
    module = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    tensors = [*module.state_dict(keep_vars=True).values(), nested, torch._efficientzerotensor((3,))]
    tensors = [tensor for tensor in tensors if tensor is not module[1].num_batches_tracked]

    def require_refused(tensor):
        for save in (tessera.save_file, tessera.torch.save):
            with pytest.raises(tessera.UnsupportedError) as raised:
                save({"a": {"b": tensor}}, **{"path" if save is tessera.save_file else "checkpoint_id": tmp_path / "x"})
            assert raised.value.key == "a.b"
        return tensor

    for tensor in tensors:
        require_refused(tensor)
    torch.vmap(require_refused)(torch.ones(2, 3))
    assert len(tensors) > 4 and list(tmp_path.iterdir()) == []
    with tessera.open(tessera_file(tmp_path)) as checkpoint, pytest.raises(tessera.UnsupportedError):
        checkpoint["w"].read_into(module[0].weight)


def tessera_file(tmp_path):
    tessera.save_file({"w": numpy.zeros(3)}, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def test_memory_of_torchs_is_filled(tmp_path):
    tessera.save_file({"w": numpy.arange(12.0).reshape(3, 4)}, tmp_path / "w.pt")
    with tessera.open(tmp_path / "w.pt") as checkpoint:
        target = torch.zeros(4, 3, dtype=torch.float64).t()
        checkpoint["w"].read_into(target)
        assert torch.equal(target, torch.arange(12.0, dtype=torch.float64).reshape(3, 4))
        with pytest.raises(tessera.Error):
            checkpoint["w"].read_into(torch.zeros(1, dtype=torch.float64).expand(3, 4))
        subclass = torch.zeros(3, 4).as_subclass(type("Other", (torch.Tensor,), {}))
        for refused in (torch.zeros(3, 4, dtype=torch.complex128).conj(), subclass, torch.eye(3).to_sparse()):
            with pytest.raises(tessera.UnsupportedError):
                checkpoint["w"].read_into(refused)


def test_other_versions_of_torch(torch, monkeypatch):
    from tessera.torch import _version
    from torch.distributed.checkpoint import filesystem

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _version.check()
        for version in ("2.11.0", "2.13.1+cpu"):
            monkeypatch.setattr(torch, "__version__", version)
            _version.check()
    for version in ("2.10.0", "2.14.0.dev20261101", "3.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.warns(UserWarning, match=version):
            _version.check()
    monkeypatch.delattr(filesystem, "_split_by_size_and_type")
    with pytest.raises(ImportError, match="filesystem._split_by_size_and_type"):
        _version.check()
