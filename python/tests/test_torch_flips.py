"""Bits that flip in a save by torch with our writer: every one is found by a load.

TESSERA_FLIPS is their number, TESSERA_SEED the seed. `make soak` makes 10,000 of them.
"""

import os
import random

import pytest

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
import tessera  # noqa: E402
import tessera.torch  # noqa: E402


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_flipped_bit_is_found(tmp_path):
    rng = random.Random(int(os.environ.get("TESSERA_SEED", "1")))
    state = {f"w{i}": torch.rand(3, 50 * i) for i in range(6)} | {"step": 7, "text": "abc", "half": torch.ones(9).bfloat16()}
    dcp.save(state, storage_writer=tessera.torch.FileSystemWriter(tmp_path, thread_count=2))
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    into = {key: torch.empty_like(value) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
    codes = {}
    for _ in range(int(os.environ.get("TESSERA_FLIPS", "300"))):
        file = rng.choice(files)
        whole = file.read_bytes()
        at = rng.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(tessera.Error) as raised:
            tessera.torch.load(into, checkpoint_id=tmp_path)
        codes.setdefault(file.name, set()).add(raised.value.code)
        if file.suffix == ".distcp":
            assert raised.value.code == "corrupt" and raised.value.path == str(file), (at, str(raised.value))
        file.write_bytes(whole)
    tessera.torch.load(into, checkpoint_id=tmp_path)
    assert len(codes) == 4 and codes[".metadata"] <= {"corrupt", "incomplete", "unsafe", "unsupported", "limit"}, codes
