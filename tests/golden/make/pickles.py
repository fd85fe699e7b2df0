"""Makes tests/golden/pickle: plain pickles, and the data.pkl of files that torch.save wrote.

    python pickles.py OUT_DIR [ROOT_OF_TORCH_SAVE_FILES]
"""
import collections
import datetime
import pathlib
import pickle
import sys
import zipfile


class Point:
    """An object with a state, as pickle writes most classes."""

    def __init__(self):
        self.x = 1


def values():
    shared = "shared text"
    inner = ["shared list"]
    yield "scalars", [None, True, False, 0.0, -0.0, 1.5, 1e300, float("inf"), 1j, complex(2, -0.0)]
    yield "integers", [
        sign * (2**power + near)
        for power in (0, 7, 8, 15, 16, 31, 32, 63, 64, 70, 2000, 2100)
        for near in (-1, 0, 1)
        for sign in (1, -1)
    ]
    yield "text", ["", "a", "a", "\xe9", "\xe9", "\u20ac", "\U0001f600", "x" * 300, shared, shared, "\n\\'"]
    yield "blobs", [b"", b"a", b"a", "a", b"\xff\x00", b"y" * 300, bytearray(), bytearray(b"\x80z"), bytearray(b"k")]
    yield "shared", {"a": inner, "b": inner, "c": (inner, inner), "d": [shared], "e": {shared: shared}}
    yield "tuples", [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),), ((1,), (1,))]
    yield "lists", [[], [1], [1, 2], list(range(1000)), list(range(1001)), list(range(2500))]
    yield "dicts", [
        {}, {1: 2}, {1: 2, (3, "x"): None, False: b"k"},
        {i: i for i in range(999)}, {i: i for i in range(1000)}, {i: i for i in range(1001)},
        {str(i): [i] for i in range(2000)},
    ]
    ordered = collections.OrderedDict((str(i), i) for i in range(1001))
    named = collections.OrderedDict(a=1)
    named._metadata = collections.OrderedDict({"": {"version": 1}})
    yield "ordered", [collections.OrderedDict(), named, ordered, collections.OrderedDict((i, i) for i in range(1000))]
    yield "defaults", [
        collections.defaultdict(dict, {1: {}}), collections.defaultdict(None, a=1), collections.defaultdict(int),
        collections.defaultdict(list, {i: [i] for i in range(3)}),
    ]
    yield "sets", [set(), {1}, frozenset(), frozenset([2]), frozenset(["a", (1, 2)]), set(range(1000)), set(range(1001))]
    yield "objects", [
        datetime.date(2024, 1, 2), collections.Counter("aab"), collections.deque([1, 2, 3], 5), slice(1, 2),
        pathlib.PurePosixPath("/x/y"), Point(), int, str, range(3), collections.OrderedDict, len, type(None), Ellipsis,
    ]
    yield "large", [b"z" * 65536, "w" * 65536, [str(1000 + i) * 8 for i in range(2000)], b"tail"]


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, value in values():
        for protocol in (4,) if name == "large" else (2, 4):
            (out / f"{name}.p{protocol}").write_bytes(pickle.dumps(value, protocol))
        for protocol in (0, 1, 3, 5):
            if name in ("scalars", "integers", "text", "blobs", "tuples", "shared"):
                (out / f"{name}.p{protocol}").write_bytes(pickle.dumps(value, protocol))
    for root in sys.argv[2:]:
        for path in sorted(pathlib.Path(root).rglob("*.pt")):
            if not zipfile.is_zipfile(path):
                continue
            with zipfile.ZipFile(path) as archive:
                member = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                name = "_".join(path.relative_to(root).with_suffix("").parts)
                (out / f"torch_{name}.p2").write_bytes(archive.read(member))


main()
