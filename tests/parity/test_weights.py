"""examples/weights on checkpoints that PyTorch and safetensors wrote: the rows that torch has."""

import os
import subprocess

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

WEIGHTS = os.environ["TESSERA_WEIGHTS"]


def state():
    generator = torch.Generator().manual_seed(0)
    return {"model.embed": torch.randn(11, 6, generator=generator),
            "model.norm": torch.randn(6, generator=generator, dtype=torch.float64),
            "model.half": torch.randn(4, 3, 2, generator=generator).to(torch.float16),
            "model.turned": torch.randn(5, 9, generator=generator).t(),
            "optim.embed": torch.zeros(2)}


def written(kind, folder):
    path = folder / kind
    if kind == "dcp":
        dcp.save(state(), checkpoint_id=str(path), no_dist=True)
    elif kind == "a.pt":
        torch.save(state(), path)
    else:
        safetensors.torch.save_file({key: value.contiguous() for key, value in state().items()}, path)
    return path


@pytest.mark.parametrize("kind", ["dcp", "a.pt", "a.safetensors"])
@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 3), (2, 3)])
def test_rows_of_one_rank(kind, rank, ranks, tmp_path):
    path = written(kind, tmp_path)
    done = subprocess.run([WEIGHTS, path, "model.", str(rank), str(ranks)], check=True,
                          capture_output=True, text=True)
    lines = done.stdout.splitlines()
    expected = {name: tensor for name, tensor in sorted(state().items()) if name.startswith("model.")}
    assert [line.split()[0] for line in lines] == list(expected)
    for line, tensor in zip(lines, expected.values()):
        if tensor.dim() > 1:
            rows = tensor.shape[0]
            tensor = tensor[rows * rank // ranks:rows * (rank + 1) // ranks]
        shape = line[line.index("["):line.index("]") + 1]
        assert shape == str(list(tensor.shape))
        total = float(line.split()[-1])
        assert total == pytest.approx(tensor.to(torch.bfloat16).double().sum().item(), rel=1e-7)
