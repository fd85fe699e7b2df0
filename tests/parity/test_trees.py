"""Trees of PyTorch's objects through every kind of file and back: what they were is what comes out."""
import collections
import json
import os
import subprocess
import sys
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

TESSERA = os.environ["TESSERA_COMMAND"]
KINDS = ["a.safetensors", "dcp"]

pytestmark = pytest.mark.filterwarnings("ignore")
warnings.simplefilter("ignore")


def tessera(*arguments, code=0):
    done = subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def convert(source, target, *options):
    tessera("convert", source, target, "--quiet", *([] if target.suffix in (".pt", ".safetensors") else ["--to", "dcp"]), *options)


def load_dcp(directory):
    tree = {}
    _load_state_dict(tree, storage_reader=dcp.FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return tree


def cat(path, name):
    return json.loads(tessera("cat", path, name, "--json"))["values"]


def lazy_bits():
    c = torch.complex(torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3) + 1)
    return {
        "conj": c.conj(),
        "transposed": c.conj().t(),
        "neg": torch._neg_view(torch.arange(4.0)),
        "half": torch._neg_view(torch.arange(4).to(torch.bfloat16)),
        "integers": torch._neg_view(torch.arange(4)),
        "imag": c.clone().conj().imag,
        "both": torch._neg_view(c.conj()),
    }


def test_conjugate_and_negative_bits_are_resolved(tmp_path):
    tree = lazy_bits()
    expected = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in tree.items()}
    torch.save(tree, tmp_path / "x.pt")
    torch.save(expected, tmp_path / "plain.pt")
    dcp.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size == (tmp_path / "x.pt").stat().st_size
    kept = torch.load(tmp_path / "y.pt", weights_only=True)
    assert all(kept[n].is_conj() == t.is_conj() and kept[n].is_neg() == t.is_neg() for n, t in tree.items())
    for source in ["x.pt", "theirs"]:
        convert(tmp_path / source, tmp_path / f"{source}.safetensors")
        convert(tmp_path / source, tmp_path / f"{source}-dcp")
        convert(tmp_path / source, tmp_path / f"{source}-16.pt", "--dtype", "bf16")
        found = [safetensors.torch.load_file(tmp_path / f"{source}.safetensors"), load_dcp(tmp_path / f"{source}-dcp")]
        for tensors in found:
            assert all(torch.equal(tensors[name], t) and not tensors[name].is_conj() for name, t in expected.items())
        halves = torch.load(tmp_path / f"{source}-16.pt", weights_only=True)
        for name, t in expected.items():
            assert torch.equal(halves[name].resolve_conj().resolve_neg(), t.to(torch.bfloat16) if t.is_floating_point() else t), name
        for target in [f"{source}.safetensors", f"{source}-dcp", "plain.pt"]:
            tessera("diff", tmp_path / source, tmp_path / target)
        assert cat(tmp_path / source, "neg") == [-0.0, -1, -2, -3]
        assert cat(tmp_path / source, "integers") == [0, -1, -2, -3]
        assert cat(tmp_path / source, "imag") == [-1, -2, -3, -4, -5, -6]
        tessera("verify", tmp_path / source)
    tessera("diff", tmp_path / "x.pt", tmp_path / "y.pt")
    torch.save({name: t.resolve_conj().resolve_neg().conj() for name, t in tree.items()}, tmp_path / "other.pt")
    assert "conj" in tessera("diff", tmp_path / "x.pt", tmp_path / "other.pt", code=1)


def typed(value):
    """A tree with its types: what == passes over."""
    if isinstance(value, torch.nn.Parameter):
        return ("Parameter", value.requires_grad, value.dtype, value.tolist())
    if isinstance(value, torch.Tensor):
        return ("Tensor", value.requires_grad, value.dtype, value.tolist())
    if isinstance(value, dict):
        more = (value.default_factory,) if isinstance(value, collections.defaultdict) else ()
        more += (typed(vars(value)),) if getattr(value, "__dict__", None) else ()
        return (type(value), more, [(type(key), key, typed(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, set)):
        return (type(value), [typed(item) for item in value])
    return (type(value), value)


def there_and_back(source, kind):
    """Through a file of `kind` and back, without a difference."""
    middle, back = source.parent / kind, source.parent / f"{kind}-back.pt"
    convert(source, middle)
    tessera("diff", source, middle)
    tessera("verify", middle)
    convert(middle, back)
    tessera("diff", source, back)
    return back


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS + ["half.pt"])
def test_an_optimizer_takes_its_state_after_a_round_trip(kind, tmp_path):
    _, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    if kind == "half.pt":
        convert(tmp_path / "x.pt", tmp_path / "b.pt", "--dtype", "bf16")
    else:
        (there_and_back(tmp_path / "x.pt", kind)).rename(tmp_path / "b.pt")
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    _, other = trained()
    other.state.clear()
    other.load_state_dict(state)
    assert len(other.state) == 4 and all(isinstance(key, torch.nn.Parameter) for key in other.state)
    if kind == "half.pt":
        return
    assert typed(state) == typed(optimizer.state_dict())
    for a, b in zip(optimizer.state.values(), other.state.values()):
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["step"], b["step"])


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_dicts_keys_and_parameters_survive(kind, tmp_path):
    model, _ = trained()
    factory = collections.defaultdict(list, {"a": torch.ones(2)})
    tree = {
        "state dict": model.state_dict(),
        "ordered": collections.OrderedDict([("b", torch.ones(1)), ("a", 1)]),
        "default": factory,
        "keys": {0: torch.zeros(1), None: 1, 2.5: 2, (1, "a"): 3, b"x": 4, True: 5, -(2**70): 6},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "empty": {"a": {}, "b": collections.OrderedDict(), "l": [1, {}, 2, {}], "d": {"e": {}}},
    }
    torch.save(tree, tmp_path / "x.pt")
    back = torch.load(there_and_back(tmp_path / "x.pt", kind), weights_only=False)
    assert typed(back) == typed(tree)
    # PyTorch's own readers see what they know of.
    if kind == "dcp":
        theirs = {"keys": {"0": torch.ones(1)}, "parameter": torch.zeros(2)}
        dcp.load(theirs, checkpoint_id=tmp_path / kind, no_dist=True)
        assert torch.equal(theirs["keys"]["0"], torch.zeros(1)) and torch.equal(theirs["parameter"], torch.ones(2))
    else:
        assert torch.equal(safetensors.torch.load_file(tmp_path / kind)["keys.0"], torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_the_root_and_views_inside_of_values(kind, tmp_path):
    tree = {0: torch.ones(2), "a": {}, 1: (torch.ones(3, 2).t(), torch.zeros(1).expand(4))}
    torch.save(tree, tmp_path / "x.pt")
    back = torch.load(there_and_back(tmp_path / "x.pt", kind), weights_only=True)
    assert typed(back) == typed(tree)


def test_diff_compares_types_where_both_sides_have_them(tmp_path):
    torch.save({"s": {0: torch.ones(1)}, "p": torch.nn.Parameter(torch.ones(1))}, tmp_path / "a.pt")
    torch.save({"s": collections.OrderedDict({"0": torch.ones(1)}), "p": torch.ones(1)}, tmp_path / "b.pt")
    found = tessera("diff", tmp_path / "a.pt", tmp_path / "b.pt", code=1)
    assert "dict / OrderedDict" in found and "key 0 / key '0'" in found and "Parameter that requires grad / Tensor" in found
    safetensors.torch.save_file({"s.0": torch.ones(1), "p": torch.ones(1)}, tmp_path / "c.safetensors")
    tessera("diff", tmp_path / "a.pt", tmp_path / "c.safetensors")


def test_a_hole_that_pytorch_left_is_an_empty_dict(tmp_path):
    dcp.save({"l": [1, {}, torch.ones(2)], "m": [{"x": {}}, {"y": 1}]}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    convert(tmp_path / "theirs", tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert back == {"l": [1, {}, back["l"][2]], "m": [{}, {"y": 1}]} and torch.equal(back["l"][2], torch.ones(2))
    convert(tmp_path / "theirs", tmp_path / "a.safetensors")
    tessera("diff", tmp_path / "theirs", tmp_path / "a.safetensors")


@pytest.mark.parametrize("tree", [{"a.b": 0, "a": {"b": 1}}, {0: 0, "0": 1}, {"x": [{"a.b": 0, "a": {"b": 1}}]}])
def test_equal_names_are_a_conflict_of_flat_targets_only(tree, tmp_path):
    fill = lambda v: {k: fill(i) for k, i in v.items()} if isinstance(v, dict) else [fill(i) for i in v] if isinstance(v, list) else torch.full((2,), float(v))  # noqa: E731
    tree = fill(tree)
    torch.save(tree, tmp_path / "x.pt")
    rows = json.loads(tessera("ls", tmp_path / "x.pt", "--json"))
    assert len({row["name"] for row in rows}) == 2
    assert sorted(cat(tmp_path / "x.pt", row["name"] + "[0:1]") for row in rows) == [[0.0], [1.0]]
    tessera("verify", tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "y.pt")
    convert(tmp_path / "x.pt", tmp_path / "z.pt", "--dtype", "bf16")
    tessera("diff", tmp_path / "x.pt", tmp_path / "y.pt")
    assert typed(torch.load(tmp_path / "y.pt", weights_only=True)) == typed(tree)
    for target in ["a.safetensors", "dcp"]:
        refused = tessera("convert", tmp_path / "x.pt", tmp_path / target, "--quiet", *(["--to", "dcp"] if target == "dcp" else []), code=3)
        assert refused.startswith("tessera: conflict") and not (tmp_path / target).exists()


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_inside_of_values_stay_tensors(kind, tmp_path):
    shared = torch.arange(4.0)
    tree = {"t": (shared, [torch.ones(2), "a"]), "p": Pair(torch.zeros(3), shared), "s": torch.Size([1, 2])}
    torch.save(tree, tmp_path / "x.pt")
    back = torch.load(there_and_back(tmp_path / "x.pt", kind), weights_only=False)
    assert type(back["p"]) is Pair and torch.equal(back["t"][1][0], torch.ones(2)) and back["s"] == torch.Size([1, 2])
    assert torch.equal(back["t"][0], shared) and torch.equal(back["p"].y, shared)
    if kind == "dcp":
        theirs = torch.load(tmp_path / "x.pt", weights_only=False)
        ours = load_dcp(tmp_path / kind)
        assert typed(ours["t"]) == typed(theirs["t"]) and type(ours["p"]) is Pair
    else:
        assert set(safetensors.torch.load_file(tmp_path / kind)) == {"t.0", "t.1.0", "p.arguments.0"}


def test_a_whole_module_as_it_was_pickled_becomes_a_file_of_its_tensors(tmp_path):
    model, _ = trained()
    torch.save(model, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "a.safetensors", "--raw")
    convert(tmp_path / "a.safetensors", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert torch.equal(back(torch.ones(1, 3)), model(torch.ones(1, 3)))
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in back.parameters())
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert sorted(t.shape for t in found.values()) == sorted(p.shape for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_bounded_with_tensors_inside_of_values(kind, tmp_path):
    torch.save({"t": (torch.arange(25_000_000.0),)}, tmp_path / "x.pt")  # 100 MB
    target = ["--to", "dcp"] if kind == "dcp" else []
    program = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", program, TESSERA, "convert", tmp_path / "x.pt", tmp_path / kind, "--quiet", *target], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80_000  # KiB: the buffers of 64 MiB are not all used


def test_parameters_of_every_dtype_load_from_our_dcp(tmp_path):
    """torch.load fails for a tensor of these dtypes that needs a gradient; PyTorch's own items never do."""
    tree = {"half": torch.nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex32)), "float": torch.nn.Parameter(torch.ones(3))}
    torch.save(tree, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "dcp")
    found = load_dcp(tmp_path / "dcp")
    assert all(torch.equal(torch.view_as_real(found[n]) if t.is_complex() else found[n],
                           torch.view_as_real(t.detach()) if t.is_complex() else t) for n, t in tree.items())


def test_a_dcp_of_parameters_of_every_dtype_converts_to_a_file_that_loads(tmp_path):
    """torch.load fails for a plain tensor of these dtypes that needs a gradient, and their `.metadata` says so."""
    tree = {str(dtype): torch.nn.Parameter(torch.ones(2).to(dtype)) for dtype in (torch.complex32, torch.float8_e4m3fn, torch.float32)}
    dcp.save(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False)
    assert {name: (t.dtype, t.requires_grad) for name, t in found.items()} == {
        name: (t.dtype, t.dtype == torch.float32) for name, t in tree.items()}


def test_views_of_two_types_may_share_an_empty_storage(tmp_path):
    """torch.save compares types by address, and what is empty has none."""
    empty = torch.empty(0, dtype=torch.complex64)
    torch.save({"imag": empty.imag, "whole": empty}, tmp_path / "x.pt")
    for kind in [*KINDS, "y.pt"]:
        convert(tmp_path / "x.pt", tmp_path / kind)
        tessera("diff", tmp_path / "x.pt", tmp_path / kind)
    found = torch.load(tmp_path / "y.pt", weights_only=False)
    assert [(t.dtype, t.shape) for t in found.values()] == [(torch.float32, (0,)), (torch.complex64, (0,))]
