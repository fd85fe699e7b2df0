"""The pickles inside of some ranks' files, without the archive around them: seeds for fuzzing.

    python rank_pickles.py tests/golden/checkpoints tests/golden/rank_pickles
"""
import pathlib
import sys
import zipfile

source, target = map(pathlib.Path, sys.argv[1:])
target.mkdir(exist_ok=True)
for name in ("ranks_mesh_ws4/rank1.pt", "fsdp1_uop0_ws2_legacy/rank0.pt", "fsdp1_uop1_ws2_local/model/rank0.pt",
             "fsdp1_uop0_ws2_old_local/model/rank0.pt"):
    with zipfile.ZipFile(source / name) as archive:
        pickle = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        (target / (name.split("/")[0] + ".pkl")).write_bytes(archive.read(pickle))
