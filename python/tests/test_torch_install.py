"""`tessera.torch.install`: programs that make torch's classes get ours."""

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402
from tests_of_torch import run_ranks, same, trained, whole  # noqa: E402

THEIRS = (dcp.FileSystemReader, dcp.FileSystemWriter)


def is_ours(path):
    return any(name.startswith("tessera-") for name in os.listdir(path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_classes_are_in_the_places_of_torchs_until_the_end(tmp_path, monkeypatch):
    program = types.ModuleType("program")
    program.Writer = dcp.FileSystemWriter
    monkeypatch.setitem(sys.modules, "program", program)
    with tessera.torch.install():
        assert (dcp.FileSystemReader, dcp.FileSystemWriter) == (tessera.torch.FileSystemReader, tessera.torch.FileSystemWriter)
        assert program.Writer is tessera.torch.FileSystemWriter and issubclass(program.Writer, THEIRS[1])
        dcp.save({"w": torch.ones(3), "n": 1}, checkpoint_id=tmp_path / "a")
        into = {"w": torch.zeros(3), "n": 0}
        dcp.load(into, checkpoint_id=str(tmp_path / "a"))
        assert is_ours(tmp_path / "a") and into["w"].all() and into["n"] == 1
        with tessera.torch.install():
            pass
        assert dcp.FileSystemWriter is tessera.torch.FileSystemWriter
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == THEIRS and program.Writer is THEIRS[1]
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b")
    assert not is_ours(tmp_path / "b")
    installed = tessera.torch.install()
    assert dcp.FileSystemReader is tessera.torch.FileSystemReader
    installed.remove()
    assert dcp.FileSystemReader is THEIRS[0]


def derived_classes(rank, ranks, path):
    """Imported for the first time after the installation, they derive from ours, and know nothing of it."""
    with tessera.torch.install():
        from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        state, into = {"w": torch.arange(4.0), "n": 1}, {"w": torch.zeros(4), "n": 0}
        dcp.save(state, checkpoint_id="memory://somewhere/a")
        dcp.load(into, checkpoint_id="memory://somewhere/a")
        assert same(into, state)
        for place in ("memory://somewhere/b", f"{path}/fsspec"):
            into = {"w": torch.zeros(4), "n": 0}
            dcp.save(state, storage_writer=FsspecWriter(place))
            dcp.load(into, storage_reader=FsspecReader(place))
            assert same(into, state)
        into = {"w": torch.zeros(4)}
        dcp.save({"w": torch.arange(4.0)}, storage_writer=HuggingFaceStorageWriter(f"{path}/hf"))
        dcp.load(into, storage_reader=HuggingFaceStorageReader(f"{path}/hf"))
        assert into["w"].tolist() == [0, 1, 2, 3]


def test_classes_that_others_derive(tmp_path):
    pytest.importorskip("fsspec")
    pytest.importorskip("safetensors")
    run_ranks(derived_classes, 1, str(tmp_path))


def accelerates(kind):
    """accelerate's plugin, and what its functions use of an Accelerator."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState

    PartialState(cpu=True)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1 if kind == "fsdp1" else 2, state_dict_type="SHARDED_STATE_DICT")
    if kind == "fsdp1":
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig

        plugin.state_dict_config = ShardedStateDictConfig(offload_to_cpu=False)
        plugin.optim_state_dict_config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    accelerator = types.SimpleNamespace(
        num_processes=ranks, process_index=rank, is_main_process=rank == 0, is_fsdp2=kind == "fsdp2",
        wait_for_everyone=torch.distributed.barrier,
    )
    return plugin, accelerator


def by_accelerate(rank, ranks, directory):
    from accelerate.utils import fsdp_utils

    for kind in ("fsdp1", "fsdp2"):
        plugin, accelerator = accelerates(kind)
        path = f"{directory}/accelerate-{kind}"
        model, optimizer, expected = trained(kind, 2)
        other, other_optimizer, _ = trained(kind, 1)
        with tessera.torch.install():
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, path)
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
            assert is_ours(f"{path}/pytorch_model_fsdp_0") and is_ours(f"{path}/optimizer_0")
            fsdp_utils.load_fsdp_model(plugin, accelerator, other, path)
            fsdp_utils.load_fsdp_optimizer(plugin, accelerator, other_optimizer, other, path)
        assert same(whole(state_of_training(other, other_optimizer)), whole(expected)), kind


def by_lightning(rank, ranks, directory):
    from lightning.fabric.strategies import FSDPStrategy

    strategy = FSDPStrategy(state_dict_type="sharded")
    path = f"{directory}/lightning"
    model, optimizer, expected = trained("fsdp1", 2)
    other, other_optimizer, _ = trained("fsdp1", 1)
    with tessera.torch.install():
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer, "step": 2})
        assert is_ours(path)
        state = {"model": other, "optimizer": other_optimizer, "step": 0}
        strategy.load_checkpoint(path, state)
    assert state["step"] == 2
    assert same(whole(state_of_training(other, other_optimizer)), whole(expected))


def state_of_training(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state["state"]}


def test_accelerate_saves_and_loads(tmp_path):
    pytest.importorskip("accelerate")
    run_ranks(by_accelerate, 2, str(tmp_path))


def test_lightning_saves_and_loads(tmp_path):
    pytest.importorskip("lightning.fabric")
    run_ranks(by_lightning, 2, str(tmp_path))


def test_the_last_of_several_ends_it(tmp_path):
    first, second = tessera.torch.install(), tessera.torch.install(allow={"one.Class"})
    first.remove()
    first.remove()
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == (tessera.torch.FileSystemReader, tessera.torch.FileSystemWriter)
    third = tessera.torch.install()
    second.remove()
    assert dcp.FileSystemWriter is tessera.torch.FileSystemWriter
    third.remove()
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == THEIRS


class Strange(types.ModuleType):
    """Refuses what is asked of it and what it is told."""

    @property
    def __name__(self):
        raise RuntimeError("not yet")

    def __setattr__(self, name, value):
        raise TypeError("read-only")


class WithoutHash(type):
    def __eq__(self, other):
        raise RuntimeError("not comparable")


class Lazy:
    """As Django's settings: an object that is made as soon as somebody asks for its class."""

    @property
    def __class__(self):
        raise RuntimeError("not configured")


class Slots:
    __slots__ = ("__name__",)


def test_modules_of_any_kind(monkeypatch):
    strange = Strange("strange")
    strange.__dict__.update(
        Before=WithoutHash("Before", (), {}), settings=Lazy(), Writer=THEIRS[1], After=WithoutHash("After", (), {})
    )
    number = Slots()
    number.__name__ = 5
    numbered = types.SimpleNamespace(__name__=5, Reader=THEIRS[0])
    for name, module in {"strange": strange, "number": number, "numbered": numbered, "none": None, 5: strange}.items():
        monkeypatch.setitem(sys.modules, name, module)
    with tessera.torch.install():
        assert strange.Writer is tessera.torch.FileSystemWriter and numbered.Reader is tessera.torch.FileSystemReader
        assert dcp.FileSystemReader is tessera.torch.FileSystemReader
    assert strange.Writer is THEIRS[1] and numbered.Reader is THEIRS[0] and dcp.FileSystemReader is THEIRS[0]


def test_an_installation_that_fails_leaves_nothing(monkeypatch):
    from tessera.torch import _data, _install

    monkeypatch.setattr(_install, "_with_writer", None)  # the last step
    with pytest.raises(TypeError):
        tessera.torch.install()
    assert (dcp.FileSystemReader, dcp.FileSystemWriter) == THEIRS and not _data.installed
    assert THEIRS[1].__qualname__ == "FileSystemWriter" and THEIRS[1].__module__ == dcp.filesystem.__name__


def test_objects_from_before_are_pickled_and_copied(tmp_path):
    objects = [kind(tmp_path / "a") for kind in THEIRS]
    with tessera.torch.install():
        meanwhile = [pickle.dumps(thing) for thing in [*objects, *THEIRS]]
        again = [pickle.loads(content) for content in meanwhile]
        assert [type(thing) for thing in again[:2]] == list(THEIRS) and tuple(again[2:]) == THEIRS
        assert type(copy.deepcopy(objects[1])) is THEIRS[1]
        ours = pickle.dumps(dcp.FileSystemWriter(tmp_path / "b"))
    for content in meanwhile[:2]:
        assert pickle.loads(content).path == tmp_path / "a"
    assert type(pickle.loads(ours)) is tessera.torch.FileSystemWriter
    # In a process that has installed nothing.
    code = "import pickle, sys; thing = pickle.load(sys.stdin.buffer); print(type(thing).__module__, thing.path)"
    told = subprocess.run([sys.executable, "-c", code], input=meanwhile[1], capture_output=True, check=True)
    assert told.stdout.split() == [dcp.filesystem.__name__.encode(), bytes(tmp_path / "a")]


def by_a_process(rank, ranks, path):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    state = {"w": torch.arange(4.0), "n": 1}
    for number, is_installed in enumerate([True, False, True]):
        with tessera.torch.install() if is_installed else contextlib.nullcontext():
            future = dcp.async_save(
                state, checkpoint_id=f"{path}/{number}", async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )
            future.result()
        assert is_ours(f"{path}/{number}") == is_installed
        into = {"w": torch.zeros(4), "n": 0}
        dcp.load(into, checkpoint_id=f"{path}/{number}")
        assert same(into, state)
        assert not is_installed or tessera.verify(f"{path}/{number}").bytes_unchecked == 0


def test_a_save_by_a_process_in_the_background(tmp_path):
    run_ranks(by_a_process, 1, str(tmp_path))
