"""Opens, reads and loads without end need no more memory. TESSERA_OPENS is their number; `make soak` makes 100,000."""

import os

import numpy

import tessera


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def rounds(path, count):
    for _ in range(count):
        with tessera.open(path) as checkpoint:
            checkpoint["model.w"][1:].sum()
            assert checkpoint["step"] == 7
        try:
            tessera.open(path + "/none")
        except FileNotFoundError:
            pass


def test_memory_does_not_grow(example):
    count = int(os.environ.get("TESSERA_OPENS", "2000"))
    rounds(example, 1000)
    before = resident()
    rounds(example, count)
    # Less than 4 KiB a round, the least that could leak if nothing is freed; of 100,000 less than 100 bytes.
    assert resident() - before < 8 << 20
    numpy.testing.assert_array_equal(tessera.load(example, framework="numpy")["model"]["w"][0], [0, 1, 2, 3])
