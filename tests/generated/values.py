"""What generated cases are made of. A case is text: an expression over the names of this module, so that a failing
one prints as a script. `build` makes its value; tensors get their bits from a seed, every bit pattern of the type.
"""
import collections
import copy
import random

import numpy
import torch

Point = collections.namedtuple("Point", "x y")


class Box:
    """An object that no library knows."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __eq__(self, other):
        return type(other) is Box and self.__dict__ == other.__dict__

    __hash__ = None


def dtype_of(name):
    return getattr(torch, name)


INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def t(dtype, shape=(), seed=0):
    """A dense tensor of random bits. Two calls with the same arguments are two tensors of the same bits."""
    dtype = dtype_of(dtype)
    count = 1
    for size in shape:
        count *= size
    draw = random.Random(seed)
    raw = bytearray(draw.randbytes(count * dtype.itemsize))
    for i in range(0, min(len(raw), 1000), dtype.itemsize):
        if draw.randrange(5) == 0:  # 0.0, -0.0, the smallest, -1 or NaN
            special = draw.choice([0, 1 << (8 * dtype.itemsize - 1), 1, 256**dtype.itemsize - 1])
            raw[i : i + dtype.itemsize] = special.to_bytes(dtype.itemsize, "little")
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).view(shape)


def neg(tensor):
    """Torch's lazy negative bit, as the imaginary part of a conjugate has it."""
    return torch._neg_view(tensor)


def param(tensor, requires_grad=True):
    return torch.nn.Parameter(tensor.detach(), requires_grad=requires_grad)


def not_sharded(tensor, *placements):
    """The whole of what `worlds` divides."""
    return tensor.detach()


sharded = not_sharded


def od(*pairs):
    return collections.OrderedDict(pairs)


def dd(factory, *pairs):
    return collections.defaultdict(factory, pairs)


def d(*pairs):
    """A dict whose keys come in this order."""
    return dict(pairs)


nan, inf = float("nan"), float("inf")


def build(text, pool=()):
    """The value of an expression; `P` holds what several places of it share."""
    names = dict(globals())
    names["P"] = []
    for item in pool:
        names["P"].append(eval(item, names))  # noqa: S307  (our own text)
    return eval(text, names)  # noqa: S307


# Comparing ---------------------------------------------------------------------------------------


def resolved(tensor):
    """A dense tensor of the same elements, without lazy bits; of a DTensor inside of a tuple this rank's."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg() and tensor.dtype in (torch.float16, torch.bfloat16):
        # The sign alone: torch goes through float32, which gives NaNs other bits, and others in vectors than in scalars.
        raw = torch._neg_view(tensor).contiguous().view(torch.int16) ^ -(1 << 15)
        return raw.view(tensor.dtype)
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def with_signs(tree):
    """The same without the lazy negatives that torch resolves its own way."""
    if isinstance(tree, torch.Tensor):
        lazy = tree.is_neg() and tree.dtype in (torch.float16, torch.bfloat16)
        return resolved(tree).requires_grad_(tree.requires_grad) if lazy else tree
    if isinstance(tree, dict):
        tree = copy.copy(tree)
        for key, item in tree.items():
            tree[key] = with_signs(item)
        return tree
    return [with_signs(item) for item in tree] if type(tree) is list else tree


def bits(tensor):
    """The elements as bytes, lazy bits resolved, row-major."""
    tensor = resolved(tensor)
    if tensor.numel() == 0:
        return b""
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGER_OF_SIZE[tensor.dtype.itemsize]).contiguous().numpy().tobytes()


def describe_tensor(tensor):
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def difference(want, got, where="", exact=False):
    """What the two trees have against each other, by type and bit for bit; empty: nothing. With `exact` also strides,
    lazy bits and which places share a storage."""
    found = _difference(want, got, where, exact)
    if not found and exact and sharing(want) != sharing(got):
        return f"{where}: other tensors share their storages"
    return found


def _difference(want, got, where, exact):
    if isinstance(want, torch.Tensor):
        return _tensor_difference(want, got, where, exact)
    if type(want) is not type(got):
        return f"{where}: {type(want).__name__} became {type(got).__name__}: {want!r:.80} / {got!r:.80}"
    if isinstance(want, dict):
        return _dict_difference(want, got, where, exact)
    if isinstance(want, (list, tuple)):
        if len(want) != len(got):
            return f"{where}: {len(want)} items became {len(got)}"
        for i, (a, b) in enumerate(zip(want, got)):
            if found := _difference(a, b, f"{where}[{i}]", exact):
                return found
        return ""
    if isinstance(want, Box):
        return _difference(want.__dict__, got.__dict__, f"{where}.__dict__", exact)
    if isinstance(want, (set, frozenset)):
        same = sorted(map(key_of, want)) == sorted(map(key_of, got))
    elif isinstance(want, numpy.ndarray):
        same = want.dtype == got.dtype and want.shape == got.shape and want.tobytes() == got.tobytes()
    else:
        same = key_of(want) == key_of(got)
    return "" if same else f"{where}: {want!r:.100} became {got!r:.100}"


def _tensor_difference(want, got, where, exact):
    if type(want) is not type(got):
        return f"{where}: {type(want).__name__} became {type(got).__name__}"
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{where}: {describe_tensor(want)} became {describe_tensor(got)}"
    if want.requires_grad != got.requires_grad:
        return f"{where}: requires_grad is now {got.requires_grad}"
    if exact and (want.stride(), want.storage_offset()) != (got.stride(), got.storage_offset()):
        return f"{where}: strides {want.stride()} became {got.stride()}"
    if exact and (want.is_conj(), want.is_neg()) != (got.is_conj(), got.is_neg()):
        return f"{where}: lazy bits are others"
    if want.is_quantized:
        same = want.qscheme() == got.qscheme() and bits(want.int_repr()) == bits(got.int_repr())
    else:
        same = bits(want) == bits(got)
    return "" if same else f"{where}: other elements of {describe_tensor(want)}"


def _dict_difference(want, got, where, exact):
    if [key_of(key) for key in want] != [key_of(key) for key in got]:
        return f"{where}: keys {list(want)!r:.100} became {list(got)!r:.100}"
    if getattr(want, "default_factory", None) is not getattr(got, "default_factory", None):
        return f"{where}: another default_factory"
    for (key, a), b in zip(want.items(), got.values()):
        if found := _difference(a, b, f"{where}[{key!r:.40}]", exact):
            return found
    return ""


def key_of(value):
    """Text that tells apart what == does not: 1 and True, 0.0 and -0.0."""
    if isinstance(value, numpy.generic):
        return f"{value.dtype}:{value.tobytes().hex()}"
    if isinstance(value, float):
        return "nan" if value != value else value.hex()
    if isinstance(value, complex):
        return f"complex:{key_of(value.real)},{key_of(value.imag)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(map(key_of, value))})"
    return f"{type(value).__name__}:{value!r}"


def leaves(value, path=()):
    """Every tensor with the keys that lead to it, in the order of the tree."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    elif isinstance(value, Box):
        yield from leaves(value.__dict__, path)


def sharing(tree):
    """For each tensor the number of the first one over the same storage."""
    first = {}
    return [first.setdefault(tensor.untyped_storage()._cdata, i) for i, (_, tensor) in enumerate(leaves(tree))
            if not tensor.is_quantized and tensor.untyped_storage().nbytes() > 0]
