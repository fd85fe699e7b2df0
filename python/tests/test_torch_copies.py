"""Plain tensors that differ between ranks: one rank's are saved, and a resume would lose those of the others."""

import logging
import warnings

import pytest

import tessera

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera.torch  # noqa: E402
from tests_of_torch import run_ranks  # noqa: E402


def state_of(rank, part):
    """Moments as a sharded optimizer without DTensors has them."""
    return {
        "model": {"w": torch.ones(4)},
        part: {"state": {"w": {"mean": torch.full((4,), float(rank)), "step": torch.tensor(3.0)}}},
    }


def installed(state, path, **options):
    with tessera.torch.install(**options):
        dcp.save(state, checkpoint_id=path)


def by_writer(state, path, **options):
    dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(path, **options))


def by_planner(state, path, **options):
    tessera.torch.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner(), **options)


def ours(state, path, **options):
    tessera.torch.save(state, checkpoint_id=path, **options)


SAVES = (installed, by_writer, by_planner, ours)
KEY = "state.w.mean"


def below_an_optimizer(rank, ranks, directory):
    for save in SAVES:
        path = f"{directory}/{save.__name__}"
        save({"step": 1}, path)
        with pytest.raises(BaseException, match=rf"mismatch(?s:.)*optim\.{KEY}"):
            save(state_of(rank, "optim"), path)
        assert set(tessera.open(path)) == {"step"} and tessera.verify(path).findings == []
        with pytest.raises(BaseException, match="mismatch"):
            save(state_of(rank, "other"), path, copies="refuse")
        if save in (by_planner, ours):
            with pytest.raises(tessera.MismatchError) as caught:
                save(state_of(rank, "optim"), path)
            assert caught.value.key == f"optim.{KEY}"


def elsewhere(rank, ranks, directory):
    for save in SAVES:
        for part, options in (("ema", {}), ("optim", {"copies": "warn"})):
            path = f"{directory}/{save.__name__}-{part}"
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                save(state_of(rank, part), path, **options)
            texts = [str(warning.message) for warning in heard if f"{part}.{KEY}" in str(warning.message)]
            assert len(texts) == (1 if rank == 0 else 0), (save, texts)
            assert all("model.w" not in text and ".step" not in text for text in texts)
            assert tessera.verify(path).findings == []


def alike(rank, ranks, directory):
    large = torch.arange(40_000.0)
    state = {"optim": {"a": large, "b": large.view(200, 200).t(), "c": torch.ones(2, dtype=torch.bfloat16), "none": torch.ones(0)}}
    for save in SAVES:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="ranks hold")
            warnings.filterwarnings("error", message="rank .* holds")
            save(state, f"{directory}/{save.__name__}")
    # Strides do not count, and are those of views that state dicts have.
    wide = torch.complex(large, -large)
    views = {"column": large.view(200, 200)[:, 1], "imag": wide.imag, "conj": wide.conj(), "expanded": torch.tensor(2.0).expand(9)}
    for save in SAVES:
        save({"optim": views if rank else {key: view.clone() for key, view in views.items()}}, f"{directory}/{save.__name__}")
    # One that differs in its form, and a large one in its last element.
    other = large.clone()
    other[-1] += rank
    for different in (torch.ones(2 + rank), torch.ones(2, dtype=torch.float64 if rank else torch.float32), other):
        with pytest.raises(BaseException, match=r"optim\.a"):
            by_writer({"optim": {"a": different}}, f"{directory}/{by_writer.__name__}")


@pytest.mark.parametrize("body", [below_an_optimizer, elsewhere, alike])
def test_ranks(body, tmp_path):
    run_ranks(body, 2, str(tmp_path))


def test_another_policy_is_refused(tmp_path):
    for call in (tessera.torch.install, lambda copies: tessera.torch.FileSystemWriter(tmp_path / "a", copies=copies)):
        with pytest.raises(tessera.InvalidArgumentError, match="'ignore'"):
            call(copies="ignore")
    assert tessera.torch.FileSystemWriter(tmp_path / "a").copies is None
    with tessera.torch.install(copies="warn"), tessera.torch.install():
        assert tessera.torch.FileSystemWriter(tmp_path / "a").copies == "warn"
        assert tessera.torch.FileSystemWriter(tmp_path / "a", copies="refuse").copies == "refuse"


def by_reader(into, path):
    dcp.load(into, storage_reader=tessera.torch.FileSystemReader(path))


def by_load(into, path):
    tessera.torch.load(into, checkpoint_id=path)


@pytest.mark.parametrize("load", [by_reader, by_load])
def test_the_log_has_what_was_not_asked_for(load, tmp_path, caplog):
    saved = {"model": {"w": torch.ones(4)}, "optim": {name: torch.ones(1) for name in "abcdef"}}
    tessera.torch.save(saved, checkpoint_id=tmp_path / "a")
    caplog.set_level(logging.INFO, logger="tessera")
    load({"model": {"w": torch.zeros(4)}}, tmp_path / "a")
    text = "6 keys of the checkpoint were not asked for: optim.a, optim.b, optim.c, optim.d, optim.e, ..."
    assert [record.getMessage() for record in caplog.records] == [f"{text} [{tmp_path / 'a'}]"]
    caplog.clear()
    load({**saved, "model": {"w": torch.zeros(4)}}, tmp_path / "a")
    assert not caplog.records


def of_other_ranks(rank, ranks, path):
    for load in (by_reader, by_load):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            load({"dataloader": {f"dp_rank_{rank}": -1}}, path)
        texts = [str(warning.message) for warning in heard if "dp_rank" in str(warning.message)]
        assert len(texts) == (1 if rank == 0 else 0), texts
        assert all("dataloader.dp_rank_0 to dataloader.dp_rank_3" in text for text in texts)
        assert all("at most 2 of these" in text or ": 2 of these" in text for text in texts)


def test_state_of_ranks_that_are_no_more(tmp_path):
    state = {"dataloader": {**{f"dp_rank_{rank}": rank for rank in range(4)}, "world_size": 4}}
    tessera.torch.save(state, checkpoint_id=tmp_path / "a")
    run_ranks(of_other_ranks, 2, str(tmp_path / "a"))
    report = tessera.convert(tmp_path / "a", tmp_path / "b", to="dcp", ranks=2)
    assert any("dataloader.dp_rank_* is what 4 ranks had of their own" in note for note in report.notes)
    assert not tessera.convert(tmp_path / "a", tmp_path / "c", to="dcp", ranks=4).notes
    assert tessera.load(tmp_path / "b") == state
