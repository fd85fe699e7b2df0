"""`tessera stats` beside numpy in float64, for every dtype that torch has."""
import json
import math
import os
import subprocess

import numpy
import pytest
import safetensors.torch
import torch

TESSERA = os.environ["TESSERA_COMMAND"]
REALS = ["float64", "float32", "float16", "bfloat16"]
SMALL = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
COMPLEX = ["complex32", "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def stats(path, *options, code=0):
    done = subprocess.run([TESSERA, "stats", str(path), "--json", *options], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def bits(dtype, count, seed):
    """All patterns of bits are numbers of some kind."""
    size = getattr(torch, dtype).itemsize
    raw = numpy.random.default_rng(seed).integers(0, 256, count * size, dtype=numpy.uint8)
    if dtype == "bool":
        raw &= 1
    return torch.from_numpy(raw).view(getattr(torch, dtype))


def weights(dtype, count, seed):
    numbers = numpy.random.default_rng(seed).normal(0.3, 2, count)
    if dtype in INTEGERS:
        numbers = numpy.abs(numbers) * 10
    made = torch.from_numpy(numbers)
    if dtype in COMPLEX:
        real = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}[dtype]
        return torch.view_as_complex(made.to(real).reshape(-1, 2).contiguous())
    return made.to(torch.float32).to(getattr(torch, dtype)) if dtype in SMALL else made.to(getattr(torch, dtype))


def as_float64(tensor):
    """Exactly, but for integers of 64 bits, in numpy."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        both = tensor.view(torch.uint8).numpy().reshape(-1)
        return numpy.array(FLOAT4)[numpy.stack([both & 15, both >> 4], 1).reshape(-1)]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.reshape(-1)
    return (tensor.float() if name in SMALL else tensor).to(torch.float64).numpy()


def check(row, tensor):
    numbers = as_float64(tensor)
    finite = numbers[numpy.isfinite(numbers)]
    assert (row["elements"], row["numbers"], row["shape"]) == (tensor.numel(), numbers.size, list(tensor.shape))
    assert row["nan"] == numpy.isnan(numbers).sum()
    assert row["positive_infinity"] == numpy.isposinf(numbers).sum()
    assert row["negative_infinity"] == numpy.isneginf(numbers).sum()
    assert row["zeros"] == (numbers == 0).sum()
    if finite.size < numbers.size:
        at = int(numpy.flatnonzero(~numpy.isfinite(numbers))[0]) // (numbers.size // tensor.numel())
        assert row["first_not_finite"] == [int(i) for i in numpy.unravel_index(at, tensor.shape)]
    else:
        assert "first_not_finite" not in row
    assert float(row["smallest"]) == finite.min() and float(row["largest"]) == finite.max()
    nonzero = numpy.abs(finite[finite != 0])
    exponents = numpy.frexp(nonzero)[1] - 1
    assert row["exponents"] == numpy.bincount(numpy.clip(exponents, -47, 16) + 47, minlength=64).tolist()
    assert row["median_exponent"] == numpy.sort(exponents)[(nonzero.size - 1) // 2]
    scale = 2.0 ** (int(numpy.frexp(numpy.abs(finite).max())[1]) - 1)  # so that squares stay inside of float64
    scaled = finite / scale
    close = {"rel_tol": 1e-12, "abs_tol": 1e-12 * scale}
    mean = math.fsum(scaled) / scaled.size
    assert math.isclose(row["mean"], mean * scale, **close)
    assert math.isclose(row["std"], math.sqrt(math.fsum((scaled - mean) ** 2) / scaled.size) * scale, **close)
    assert math.isclose(float(row["norm"]), math.sqrt(math.fsum(scaled ** 2)) * scale, **close)


@pytest.mark.parametrize("count", [100, 300_000])
def test_every_dtype(tmp_path, count):
    tree = {}
    for seed, dtype in enumerate(REALS + SMALL + COMPLEX + INTEGERS):
        tree[f"{dtype}.bits"] = bits(dtype, count, seed)
        tree[f"{dtype}.weights"] = weights(dtype, count, seed)
    tree["float4_e2m1fn_x2.bits"] = bits("uint8", count, 99).view(torch.float4_e2m1fn_x2)
    tree["strided.bits"] = bits("float32", count, 98).reshape(10, -1).t()
    tree["expanded.weights"] = weights("bfloat16", 100, 97).expand(count // 100, 100)
    torch.save(tree, tmp_path / "a.pt")
    rows = {row["name"]: row for row in stats(tmp_path / "a.pt")}
    assert list(rows) == list(tree)
    for name, tensor in tree.items():
        check(rows[name], tensor)
    flat = {name: tensor.contiguous() for name, tensor in tree.items() if "float4" not in name and "complex32" not in name
            and "complex128" not in name and "fnuz" not in name}
    safetensors.torch.save_file(flat, tmp_path / "a.safetensors")
    again = {row["name"]: row for row in stats(tmp_path / "a.safetensors", "--threads", "3")}
    assert again == {name: rows[name] for name in flat}


@pytest.mark.parametrize("dtype", REALS + SMALL + COMPLEX)
def test_one_odd_number_is_found(tmp_path, dtype):
    for odd in (math.nan, math.inf, -math.inf):
        tensor = weights(dtype, 70_000, 5).reshape(100, -1)
        if dtype == "float8_e8m0fnu":
            tensor = tensor.view(torch.uint8).clamp(max=254).view(tensor.dtype)
        torch.save({"w": tensor}, tmp_path / "finite.pt")
        assert stats(tmp_path / "finite.pt", "--finite") == []
        plain = tensor.view(torch.uint8) if dtype in SMALL else tensor
        value = torch.tensor([odd]).to(tensor.dtype)
        if dtype not in COMPLEX and torch.isfinite(value.float()).all():
            continue  # the dtype has no such number
        plain[42, 17] = value.view(torch.uint8)[0] if dtype in SMALL else value[0]
        torch.save({"w": tensor}, tmp_path / "odd.pt")
        (row,) = stats(tmp_path / "odd.pt", "--finite", code=1)
        assert row["first_not_finite"] == [42, 17]
        check(row, tensor)
