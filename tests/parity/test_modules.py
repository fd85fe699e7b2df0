"""A whole module that torch.save pickled becomes what its state_dict() gives, without the code of its classes."""
import json
import os
import subprocess
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

TESSERA = os.environ["TESSERA_COMMAND"]

pytestmark = pytest.mark.filterwarnings("ignore")
warnings.simplefilter("ignore")


class Net(nn.Module):
    """One of everything that a module may hold."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.emb.weight  # tied
        self.bn = nn.BatchNorm1d(5)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)
        self.left_out = None
        self.add_module("gone", None)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16), requires_grad=False)
        self.list = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(1))])
        self.dict = nn.ModuleDict({"c": nn.Conv2d(1, 2, 2)})
        self.rnn = nn.LSTM(4, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.twice = nn.Sequential(self.dict["c"], nn.ReLU(), self.dict["c"])
        self.cache = torch.randn(7)  # no part of a state


def weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 3)))


def parametrized():
    """PyTorch pickles none, whoever takes away what refuses it does."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    nn.utils.parametrizations.orthogonal(module[0])
    nn.utils.parametrizations.spectral_norm(module[1], "weight")
    for part, name in ((module[0], "First"), (module[1], "Second")):
        kind = type(part)
        del kind.__getstate__
        kind.__qualname__ = kind.__name__ = name
        kind.__module__ = __name__
        globals()[name] = kind
    return module


def compiled_inside():
    module = Net()
    module.rnn = torch.compile(module.rnn, backend="eager", dynamic=True)
    return module


MODULES = {
    "net": Net,
    "DataParallel": lambda: nn.DataParallel(Net()),
    "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(Net()),
    "compiled": lambda: torch.compile(Net()),
    "compiled and parallel": lambda: nn.DataParallel(torch.compile(Net(), mode="reduce-overhead", fullgraph=True)),
    "compiled inside": compiled_inside,
    "weight_norm": weight_norm,
    "parametrized": parametrized,
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3))),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Net()),
    "empty": nn.ReLU,
}


@pytest.fixture(scope="module", autouse=True)
def group():
    """DistributedDataParallel has one when it is made and pickled."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def same(a, b):
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert type(tensor) is torch.Tensor and not tensor.requires_grad, name
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape and torch.equal(tensor, b[name]), name


def run(*arguments):
    done = subprocess.run([TESSERA, *map(str, arguments)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def require_unsafe(*arguments):
    done = subprocess.run([TESSERA, *map(str, arguments)], check=False, capture_output=True, text=True)
    assert done.returncode != 0 and "unsafe: the pickle calls " in done.stderr, done.stderr


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_becomes_its_state_dict(name, stream, tmp_path):
    torch.manual_seed(4)
    module = MODULES[name]()
    state = module.state_dict()
    torch.save(module, tmp_path / "whole.pt", _use_new_zipfile_serialization=not stream)
    listed = run("ls", tmp_path / "whole.pt", "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == list(state)
    made = run("convert", tmp_path / "whole.pt", tmp_path / "state.pt")
    for done in (listed, made):
        assert done.stderr.count("tessera: warning: ") == 1 and "the file is a whole module, " in done.stderr
        assert "its names are those that torch.nn.Module's state_dict() gives; --raw shows it as it was pickled" in done.stderr
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    same(read, state)
    assert module.load_state_dict(read, strict=True) is not None
    if "emb.weight" in read:  # what is tied stays so
        assert read["emb.weight"].untyped_storage().data_ptr() == read["head.weight"].untyped_storage().data_ptr()
    run("convert", tmp_path / "whole.pt", tmp_path / "state.safetensors", "--keep-duplicates")
    tensors = safetensors.torch.load_file(tmp_path / "state.safetensors")
    same({key: tensors[key] for key in state}, state)
    assert run("verify", tmp_path / "whole.pt").returncode == 0
    # The tree as it was pickled: PyTorch's file comes out as it went in.
    if "compiled" in name:  # what torch.compile leaves beside the module would run where it is unpickled
        require_unsafe("ls", tmp_path / "whole.pt", "--raw")
        return
    if not stream:
        raw = run("convert", tmp_path / "whole.pt", tmp_path / "raw/whole.pt", "--raw")
        assert raw.stderr == ""
        assert (tmp_path / "raw/whole.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()
    assert len(json.loads(run("ls", tmp_path / "whole.pt", "--raw", "--json").stdout)) == 1


def test_diff_says_that_it_compares_state_dicts(tmp_path):
    torch.manual_seed(6)
    module = Net()
    torch.save(module, tmp_path / "a.pt")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    module.cache += 1  # no part of a state
    torch.save(module, tmp_path / "b.pt")
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    leaves = len(module.state_dict())
    text = f"equal: {leaves} leaves, bit for bit"
    assert run("diff", *paths).stdout == f"{text}; of whole modules their state dicts alone, --raw compares the rest\n"
    assert json.loads(run("diff", *paths, "--json").stdout) == []
    raw = subprocess.run([TESSERA, "diff", *paths, "--raw"], check=False, capture_output=True, text=True)
    assert raw.returncode == 1 and "7 of 7 elements differ" in raw.stdout, raw.stdout + raw.stderr
    assert run("diff", paths[0], paths[0], "--raw").stdout == "equal: 1 leaf, bit for bit\n"
    assert run("diff", tmp_path / "state.pt", tmp_path / "state.pt").stdout == text + "\n"


def hostile(name):
    """Pickles that name what torch.compile leaves beside its modules, and run `exec` or a shell by it; None: a call of a call."""
    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value

    def of(module, kind):
        return b"c" + module + b"\n" + kind + b"\n"

    run_, code = of(b"__builtin__", b"exec"), text(b"raise SystemExit('ran')")
    if name == "partial":
        return of(b"functools", b"partial") + run_ + code + b"\x86R)R"
    if name == "debug":
        return of(b"torch._dynamo.repro.after_dynamo", b"WrapBackendDebug") + run_ + text(b"n") + b"\x86R" + code + b"}\x86R"
    if name == "getattr":
        wrapper = of(b"torch", b"_TorchCompileInductorWrapper") + b")\x81}" + text(b"fn") + run_ + b"sb"
        return of(b"__builtin__", b"getattr") + wrapper + text(b"fn") + b"\x86R" + code + b"\x85R"
    parts = b"".join(text(key) + b"}" for key in (b"_parameters", b"_buffers", b"_modules"))
    module = of(b"torch.nn.modules.linear", b"Identity") + b")\x81}(" + parts + text(b"__call__") + code + b"ub"
    compiled = of(b"torch._dynamo.eval_frame", b"OptimizedModule") + module + of(b"posix", b"system") + b"\x86R"
    return compiled if name == "module" else b"]" + compiled + b"a" + hostile("debug") + b"\x86"


@pytest.mark.parametrize("name", ["partial", "debug", "getattr", "beside", "module"])
def test_what_could_run_is_neither_read_nor_written(name, tmp_path):
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "hostile.pt"))
    pickled = b"\x80\x02}" + b"X\x01\x00\x00\x00x" + hostile(name) + b"s."
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    for more in ([], ["--raw"]):
        if name == "module" and not more:  # it is replaced, with all that hangs on it
            run("convert", tmp_path / "hostile.pt", tmp_path / "clean.pt")
            assert torch.load(tmp_path / "clean.pt", weights_only=True) == {"x": {}}
            continue
        require_unsafe("ls", tmp_path / "hostile.pt", *more)
        for target, kind in (("out.pt", "torch"), ("out", "dcp")):
            require_unsafe("convert", tmp_path / "hostile.pt", tmp_path / target, "--to", kind, *more)
            assert not (tmp_path / target).exists()


def test_modules_inside_of_a_tree(tmp_path):
    torch.manual_seed(5)
    model, other = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam(other.parameters())
    torch.save({"model": model, "ema": model, "parts": [other, {"x": nn.ReLU()}], "pair": (1, other), "epoch": 3,
                "optimizer": optimizer.state_dict()}, tmp_path / "whole.pt")
    done = run("convert", tmp_path / "whole.pt", tmp_path / "state.pt")
    for place in ("model", "parts.0", "parts.1.x"):
        assert done.stderr.count(f": {place} is a whole module, ") == 1, place
    assert done.stderr.count("tessera: warning: ") == 3  # each module once
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    same(read["model"], model.state_dict())
    assert read["ema"] is read["model"] and read["pair"][1] is read["parts"][0] and read["epoch"] == 3
    same(read["parts"][0], other.state_dict())
    assert read["parts"][1] == {"x": {}} and read["optimizer"] == optimizer.state_dict()


def test_names_that_only_the_class_knows_are_left(tmp_path):
    """A quantized layer has its numbers in the code of its class."""
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)))
    torch.save({"model": module}, tmp_path / "whole.pt")
    done = run("convert", tmp_path / "whole.pt", tmp_path / "again/whole.pt")
    assert "model is a whole module, torch.nn.modules.container.Sequential: left as it was pickled, because 0 is " in done.stderr
    assert (tmp_path / "again/whole.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_hooks_that_change_the_names_are_told(tmp_path):
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(torch.nn.utils.parameters_to_vector)
    torch.save(module, tmp_path / "whole.pt")
    assert "hooks that may change its state_dict() did not run" in run("ls", tmp_path / "whole.pt").stderr


def test_the_option_is_of_torch_files(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    done = subprocess.run([TESSERA, "ls", tmp_path / "a.safetensors", "--raw"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "the option --raw has no effect on a checkpoint of kind safetensors" in done.stderr
