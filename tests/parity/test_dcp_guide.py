"""examples/dcp_guide and the same guide in Python: each loads what the other saves (spec G-02 to G-06)."""

import pytest
import torch

from programs import DCP_GUIDE, PEERS, TESSERA, run

GUIDE = PEERS / "dcp_guide.py"


def numbers(result):
    return [float(word) for word in result.out[0].split()]


def same_state(a, b):
    if isinstance(a, dict):  # ours keep the types of dicts, which PyTorch's loader does not
        assert isinstance(b, dict)
        assert sorted(a) == sorted(b)
        for key in a:
            same_state(a[key], b[key])
        return
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same_state(x, y)
    else:
        assert a == b


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ours") / "checkpoint"
    run([DCP_GUIDE, "save", directory], 2)
    return directory


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("theirs") / "checkpoint"
    run([GUIDE, "save", directory], 2)
    return directory


def test_one_data_file_per_rank(ours):  # G-03
    assert len(list(ours.glob("*.distcp"))) == 2 and (ours / ".metadata").exists()


def test_python_infers_from_our_checkpoint_without_a_process_group(ours):  # G-05
    in_cpp, in_python = numbers(run([DCP_GUIDE, "infer", ours])), numbers(run([GUIDE, "infer", ours]))
    assert len(in_cpp) == 8 and in_cpp == pytest.approx(in_python, rel=1e-6)


def test_we_infer_from_a_python_checkpoint(theirs):
    in_cpp, in_python = numbers(run([DCP_GUIDE, "infer", theirs])), numbers(run([GUIDE, "infer", theirs]))
    assert len(in_cpp) == 8 and in_cpp == pytest.approx(in_python, rel=1e-6)


@pytest.mark.parametrize("source", ["ours", "theirs"])
def test_load_and_save_again_on_other_ranks_changes_nothing(request, source, tmp_path):  # G-02, G-04
    source = request.getfixturevalue(source)
    run([DCP_GUIDE, "load", source, tmp_path / "again"], 3)
    run([GUIDE, "load", source, tmp_path / "a.pt"], 2)
    run([GUIDE, "load", tmp_path / "again", tmp_path / "b.pt"], 1)
    same_state(torch.load(tmp_path / "a.pt", weights_only=False), torch.load(tmp_path / "b.pt", weights_only=False))


@pytest.mark.parametrize("source", ["ours", "theirs"])
def test_conversions_through_the_api(request, source, tmp_path):  # G-06
    source = request.getfixturevalue(source)
    run([DCP_GUIDE, "convert", source, tmp_path / "whole.pt", tmp_path / "back"])
    run([TESSERA, "diff", source, tmp_path / "back"])
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    run([GUIDE, "load", tmp_path / "back", tmp_path / "back.pt"], 1)
    same_state(whole, torch.load(tmp_path / "back.pt", weights_only=False))
