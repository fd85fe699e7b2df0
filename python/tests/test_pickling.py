"""Open checkpoints in other processes, and copies of them."""

import copy
import multiprocessing
import os
import pickle

import numpy
import pytest

import tessera

STATE = {"model": {"w": numpy.arange(12, dtype="float32").reshape(3, 4), "b": numpy.ones(2)}, "step": 7}
PLACES = {
    "dcp": lambda state, path: tessera.save_file(state, path),
    "torch": lambda state, path: tessera.save_file(state, path + ".pt"),
    "safetensors": lambda state, path: tessera.save_file(state, path + ".safetensors"),
    "set": lambda state, path: (
        tessera.save_file(state, path + ".pt"),
        tessera.convert(path + ".pt", path, to="safetensors", max_shard_size=64, overwrite=True),
    ),
    "values": lambda state, path: tessera.save_file({"step": state["step"], "model": {"w": 1}}, path + ".pt"),
}
ENDS = {"torch": ".pt", "safetensors": ".safetensors", "values": ".pt"}


@pytest.fixture(params=PLACES)
def saved(request, tmp_path):
    """A place, and what saves there."""
    path = str(tmp_path / "a")
    PLACES[request.param](STATE, path)
    return path + ENDS.get(request.param, ""), lambda state: PLACES[request.param](state, path)


def test_a_pickle_opens_the_place_anew(saved):
    with tessera.open(saved[0], threads=3, memory=1 << 20) as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))
    assert list(again) == list(tessera.open(saved[0])) and again["step"] == 7
    assert (again.kind, again._threads, again._memory) == (tessera.open(saved[0]).kind, 3, 1 << 20)
    if "model.b" in again:
        assert again["model.w"][1:].tolist() == STATE["model"]["w"][1:].tolist()
    assert pickle.loads(pickle.dumps(again))["step"] == 7


def test_another_save_is_a_conflict(saved):
    path, save = saved
    checkpoint = tessera.open(path)
    pickled = pickle.dumps(checkpoint), pickle.dumps(checkpoint.only("model"))
    save(STATE)
    for text in pickled:
        with pytest.raises(tessera.ConflictError, match="another save is there") as raised:
            pickle.loads(text)
        assert raised.value.path == path


def test_another_save_may_lack_what_was_chosen(saved):
    path, save = saved
    pickled = pickle.dumps(tessera.open(path).only("step"))
    save({"model": {"w": numpy.zeros(3), "b": numpy.zeros(1)}, "step": 8})
    with pytest.raises(tessera.ConflictError):
        pickle.loads(pickled)


def test_what_was_replaced_before_it_is_pickled(tmp_path):
    path = tmp_path / "a.safetensors"
    tessera.save_file({"w": numpy.zeros(3)}, path)
    checkpoint = tessera.open(path)
    tessera.save_file({"w": numpy.ones(3)}, path)
    with pytest.raises(tessera.ConflictError):
        pickle.loads(pickle.dumps(checkpoint))


def test_a_place_that_is_gone(example):
    pickled = pickle.dumps(tessera.open(example))
    os.rename(example, example + "-moved")
    with pytest.raises(tessera.NoCheckpointError):
        pickle.loads(pickled)


def test_options_and_chosen_parts_go_with_it(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 3), tmp_path / "whole.pt")
    raw = pickle.loads(pickle.dumps(tessera.open(tmp_path / "whole.pt", raw=True)))
    assert len(raw) == 1 and raw.warnings == []
    tessera.save_file({**STATE, "optim": {"w": numpy.zeros(2)}}, tmp_path / "a")
    part = tessera.open(tmp_path / "a").only(["model", "optim"]).only("*.w")
    assert list(pickle.loads(pickle.dumps(part))) == list(part) == ["model.w", "optim.w"]


def test_a_relative_path_is_that_of_its_opening(example, tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(example))
    pickled = pickle.dumps(tessera.open(os.path.basename(example)))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled)["step"] == 7


def test_a_closed_one_is_neither_pickled_nor_copied(example):
    checkpoint = tessera.open(example)
    checkpoint.close()
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(tessera.InvalidArgumentError, match="closed"):
            use(checkpoint)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_shares_what_is_open_and_is_closed_for_itself(copied, example):
    checkpoint = tessera.open(example, threads=3)
    other = copied({"held": checkpoint})["held"] if copied is copy.deepcopy else copied(checkpoint)
    assert checkpoint["model.w"][0].tolist() == [0, 1, 2, 3]
    os.rename(example, example + "-moved")  # whoever opened its files anew would find none
    assert other is not checkpoint and other["model.w"][2].tolist() == [8, 9, 10, 11] and other._threads == 3
    checkpoint.close()
    assert other["step"] == 7 and list(other.only("step")) == ["step"]
    other.close()
    with pytest.raises(tessera.InvalidArgumentError, match="closed"):
        other["step"]


def test_tensors_go_with_their_checkpoint(example, tmp_path):
    tensor = tessera.open(example)["model.w"]
    again = pickle.loads(pickle.dumps(tensor))
    assert again.name == "model.w" and again[0].tolist() == tensor[0].tolist()
    assert copy.copy(tensor) is copy.deepcopy(tensor) is tensor
    tessera.save_file({"pair": (1, numpy.arange(4))}, tmp_path / "pair.pt")
    inside = tessera.open(tmp_path / "pair.pt")["pair"][1]
    with pytest.raises(tessera.UnsupportedError, match="read it first"):
        pickle.dumps(inside)
    assert copy.deepcopy(inside)[1:].tolist() == [1, 2, 3]


def test_safe_open_is_pickled(example):
    file = pickle.loads(pickle.dumps(tessera.safe_open(example, framework="np")))
    assert file.keys() == ["model.w"] and file.get_tensor("model.w").tolist() == STATE["model"]["w"].tolist()


def rows(checkpoint, tensor, queue):
    queue.put((os.getpid(), checkpoint["model.w"][1].tolist(), tensor[2].tolist()))


def test_a_process_that_is_spawned_reads_from_it(example):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tessera.open(example) as checkpoint:
        process = context.Process(target=rows, args=(checkpoint, checkpoint["model.w"], queue))
        process.start()
        pid, second, third = queue.get(timeout=60)
        process.join()
    assert pid != os.getpid() and process.exitcode == 0
    assert (second, third) == ([4, 5, 6, 7], [8, 9, 10, 11])


class Rows:
    """A dataset whose items are rows of a tensor."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.checkpoint["model.w"].torch(index)


def test_workers_of_a_dataloader(example, torch):
    loader = torch.utils.data.DataLoader(Rows(tessera.open(example)), num_workers=2, multiprocessing_context="spawn")
    assert torch.cat(list(loader)).tolist() == STATE["model"]["w"].tolist()
