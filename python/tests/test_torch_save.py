"""`tessera.torch.save`, `async_save` and `load`: planned by the library, the same checkpoints as torch's."""

import collections
import pickle
import threading
import warnings

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tessera

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera.torch  # noqa: E402
from tests_of_torch import run_ranks, same, state_of  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def loaded(into, path):
    """By torch and by us, which has to be the same."""
    again = pickle.loads(pickle.dumps(into))
    dcp.load(into, checkpoint_id=path)
    tessera.torch.load(again, checkpoint_id=path, allow={"builtins.set", "numpy.core.multiarray.scalar"})
    assert same(again, into)
    return into


def test_torch_loads_it(tmp_path):
    report = tessera.torch.save(state_of(True), checkpoint_id=tmp_path)
    assert report.files == 2 + len(list(tmp_path.glob("*.distcp"))) and report.total_bytes > 0
    assert same(loaded(state_of(False), tmp_path), state_of(True))
    assert tessera.verify(tmp_path).findings == []


KEYS = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=3)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), KEYS, st.binary(max_size=3), st.just(torch.float16),
        st.just(torch.Size([2])), st.just((1, (2, "x"))), st.just({1, 2}), st.complex_numbers(allow_nan=False),
        st.builds(lambda n: torch.arange(float(n)), st.integers(0, 5)),
        st.builds(lambda n: torch.arange(float(4 * n)).reshape(2, 2 * n).t(), st.integers(1, 3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.dictionaries(KEYS, inner, min_size=1, max_size=2).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return None


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_drawn_states_are_what_torch_would_save(state, tmp_path):
    theirs, ours = emptied(state), emptied(state)
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    tessera.torch.save(state, checkpoint_id=tmp_path / "ours")
    dcp.load(theirs, checkpoint_id=tmp_path / "torch")
    dcp.load(ours, checkpoint_id=tmp_path / "ours")
    assert equal(ours, theirs)
    for path in ("torch", "ours"):
        into = emptied(state)
        tessera.torch.load(into, checkpoint_id=tmp_path / path)
        assert equal(into, theirs)


class Settings:
    def __init__(self, lr):
        self.lr = lr

    def __eq__(self, other):
        return self.lr == other.lr


class Counter:
    """A Stateful."""

    def __init__(self, count):
        self.count = torch.tensor(float(count))
        self.calls = 0

    def state_dict(self):
        return {"count": self.count, "calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"] + 1


def test_values_that_only_pickle_knows(tmp_path):
    state = {
        "w": torch.ones(2),
        "array": numpy.arange(3.0),
        "scalar": numpy.float64(2.5),
        "settings": [1, Settings(0.1)],
        "class": Settings,
        "counter": Counter(3),
    }
    tessera.torch.save(state, checkpoint_id=tmp_path)
    into = dict.fromkeys(state) | {"w": torch.zeros(2), "counter": Counter(0)}
    dcp.load(into, checkpoint_id=tmp_path)
    assert into["array"].tolist() == [0.0, 1.0, 2.0] and type(into["scalar"]) is numpy.float64
    assert into["settings"] == state["settings"] and into["class"] is Settings
    assert into["counter"].count == 3 and into["counter"].calls == 1
    with pytest.raises(tessera.UnsafeError, match="Settings"):
        tessera.torch.load({"settings": None}, checkpoint_id=tmp_path)
    ours = {"settings": None, "counter": Counter(0)}
    tessera.torch.load(ours, checkpoint_id=tmp_path, allow={f"{__name__}.Settings"})
    assert ours["settings"] == state["settings"] and ours["counter"].calls == 1 and ours["counter"].count == 3


def test_what_is_left_to_torch(tmp_path):
    state = {"w": torch.arange(4.0), "q": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)}
    made = tessera.torch.save(state, checkpoint_id=tmp_path / "a")
    assert isinstance(made, dcp.Metadata) and (tmp_path / "a" / f"tessera-{made.storage_meta.save_id}.json").exists()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    tessera.torch.save({"m": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "b", planner=planner)
    assert list(tessera.open(tmp_path / "b")) == ["m"]

    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            raise tessera.LimitError("limit: no more")

    with pytest.raises(tessera.LimitError):
        tessera.torch.save(state, checkpoint_id=tmp_path / "c", planner=Failing())


def test_all_that_is_missing_or_unlike_is_named_and_nothing_changes(tmp_path):
    tessera.torch.save({"a": torch.ones(2), "b": torch.ones(3), "n": 1}, checkpoint_id=tmp_path)
    into = {"a": torch.zeros(2), "b": torch.zeros(4), "n": 0, "c": torch.zeros(1), "d": {"e": 0}}
    with pytest.raises(KeyError, match="'c', 'd.e'") as missing:
        tessera.torch.load(into, checkpoint_id=tmp_path)
    assert missing.value.key == "c" and missing.value.path == str(tmp_path)
    into = {"a": torch.zeros(2, 2), "b": torch.zeros(4), "n": 0}
    with pytest.raises(tessera.MismatchError, match=r"'a' is \(2,\).*'b' is \(3,\)"):
        tessera.torch.load(into, checkpoint_id=tmp_path)
    with pytest.raises(tessera.MismatchError, match="'a' is a tensor"):
        tessera.torch.load({"a": 5, "b": into["b"]}, checkpoint_id=tmp_path)
    assert not into["b"].any() and into["n"] == 0


def test_states_of_torch_before_2_4(tmp_path):
    """Lists without tensors were values then, and a dict without tensors, too."""
    from torch.distributed.checkpoint import _version

    state = {"w": torch.ones(2), "groups": [{"lr": 0.1}, {"lr": 0.2}], "config": {"a": {"b": 3}}}
    _version._derived_version = "2_3"
    try:
        dcp.save(state, checkpoint_id=tmp_path)
    finally:
        _version._derived_version = None
    assert "groups.0.lr" not in tessera.open(tmp_path)
    into = {"w": torch.zeros(2), "groups": [{"lr": 0.0}, {"lr": 0.0}], "config": {"a": {"b": 0}}}
    tessera.torch.load(into, checkpoint_id=tmp_path)
    assert same(into, state)


def test_a_save_in_the_background(tmp_path):
    state = {"w": torch.arange(4.0), "n": 1}
    future = tessera.torch.async_save(state, checkpoint_id=tmp_path / "a")
    state["w"].zero_()
    assert future.result().files == 4
    assert loaded({"w": torch.zeros(4), "n": 0}, tmp_path / "a")["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(tessera.Error):
        (tmp_path / "file").write_text("")
        tessera.torch.async_save(state, checkpoint_id=tmp_path / "file").result()
    assert threading.active_count() < 10


def of_ranks(rank, ranks, path):
    tessera.torch.save({"w": torch.ones(4), "rank": rank}, checkpoint_id=path)  # a warning
    into = {"w": torch.zeros(4), "rank": -1}
    tessera.torch.load(into, checkpoint_id=path)
    assert into["rank"] == 0
    with pytest.raises(tessera.MismatchError, match="rank"):
        tessera.torch.save({"w": torch.ones(4), "rank": rank}, checkpoint_id=path, values="refuse")
    tessera.torch.save({"w": torch.full((4,), float(rank)), "n": rank}, checkpoint_id=path, values="keep", copies="keep")
    assert set(tessera.open(path)) == {"w", "n", "w.rank1", "n.rank1"}
    # An error of one rank is everybody's.
    state = {"w": torch.ones(4), f"own{rank}": threading.Lock() if rank == 1 else 1}
    with pytest.raises(tessera.Error, match="pickle"):
        tessera.torch.save(state, checkpoint_id=path)
    into = {"w": torch.zeros(4), "absent": 0} if rank == 1 else {"w": torch.zeros(4)}
    with pytest.raises(KeyError, match="absent"):
        tessera.torch.load(into, checkpoint_id=path)
    assert not into["w"].any()
    class Broken(Counter):
        def state_dict(self):
            raise ValueError("no state")

    for call in (tessera.torch.save, tessera.torch.load):
        with pytest.raises(tessera.Error, match="no state"):
            call({"w": torch.ones(4), "z": Broken(1) if rank == 1 else 1}, checkpoint_id=path)
    # Those that are left to torch on one rank are left to it on all.
    special = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8) if rank == 1 else torch.ones(4)
    tessera.torch.save({f"w{rank}": special}, checkpoint_id=path)
    with pytest.raises(tessera.UnsupportedError, match="qint8"):
        tessera.open(path)
    # What cannot be read here can be replaced.
    future = tessera.torch.async_save({"w": torch.full((4,), 3.0)}, checkpoint_id=path)
    assert future.result().files == 3
    assert tessera.verify(path).findings == []


def of_some_ranks(rank, ranks, path):
    some = torch.distributed.new_group([0])
    state = {"w": torch.ones(4)}
    own = {"planner": dcp.DefaultSavePlanner()}
    calls = [
        lambda: tessera.torch.save(state, checkpoint_id=path, process_group=some),
        lambda: tessera.torch.save(state, checkpoint_id=path, process_group=some, **own),
        lambda: tessera.torch.async_save(state, checkpoint_id=path, process_group=some).result(),
        lambda: tessera.torch.load(state, checkpoint_id=path, process_group=some),
    ]
    for call in calls:
        if rank == 0:
            call()
        else:
            with pytest.raises(tessera.InvalidArgumentError, match="rank 1 is not in `process_group`"):
                call()
    torch.distributed.barrier()
    assert tessera.verify(path).findings == []


def test_ranks_outside_of_the_group(tmp_path):
    run_ranks(of_some_ranks, 2, str(tmp_path))


def test_ranks_that_differ(tmp_path):
    run_ranks(of_ranks, 2, str(tmp_path / "a"))


def of_a_process(rank, ranks, path):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    for step in range(2):
        state = {"w": torch.full((4,), float(step)), "n": step}
        writer = tessera.torch.FileSystemWriter(f"{path}/{step}")
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        into = {"w": torch.zeros(4), "n": -1}
        tessera.torch.load(into, checkpoint_id=f"{path}/{step}")
        assert same(into, state) and tessera.verify(f"{path}/{step}").bytes_unchecked == 0


def test_a_save_by_a_process_in_the_background(tmp_path):
    run_ranks(of_a_process, 1, str(tmp_path))


def test_counters_are_what_torch_makes_of_them(tmp_path):
    counter = collections.Counter({"a": 2, "b": 1})
    state = {
        "w": torch.ones(1), "counter": counter, "numbers": collections.Counter({1: 1}), "in a list": [collections.Counter(a=1)],
        "in a tuple": (collections.Counter({1: 1, "1": 2}), [collections.Counter(b=1)]),
    }  # fmt: skip
    for name, save in {"torch": dcp.save, "ours": tessera.torch.save}.items():
        save(state, checkpoint_id=tmp_path / name)
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
    expected, found = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("torch", "ours"))
    for key, value in expected.items():
        assert repr(found[key]) == repr(value), key
    assert type(found["counter"]) is dict and type(found["in a tuple"][0]) is collections.Counter
    into = {"w": torch.zeros(1), "counter": collections.Counter(a=0, b=0)}
    assert loaded(into, tmp_path / "ours")["counter"] == counter


def test_keys_of_a_counter_that_have_one_text(tmp_path):
    state = {"counter": collections.Counter({1: 1, "1": 2})}
    with pytest.raises(BaseException, match="duplicated flatten key"):
        dcp.save(state, checkpoint_id=tmp_path / "torch")
    with pytest.raises(tessera.ConflictError, match="counter.1"):
        tessera.torch.save(state, checkpoint_id=tmp_path / "ours")
