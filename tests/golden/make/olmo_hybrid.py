"""What OLMo itself saves in a hybrid mesh, two copies on two ranks each: OUT/{full,torch_legacy,local}, of one step.

Run with tests/parity/olmo_stubs on PYTHONPATH. Files that say nothing of shards are left out.
"""
import json
import pathlib
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "parity"))
import olmo_fsdp  # noqa: E402
from programs import run  # noqa: E402

KINDS = ("full", "torch_legacy", "local")


def main():
    out = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        config = olmo_fsdp.write_config(scratch / "config.yaml", width=8, layers=1, vocabulary=16, hybrid=True)
        jobs = [{"config": str(config), "steps": 1, "saves": {"1": [[kind, str(scratch / kind)] for kind in KINDS]}}]
        (scratch / "jobs.json").write_text(json.dumps(jobs), encoding="ascii")
        run([olmo_fsdp.__file__, scratch / "jobs.json"], 4)
        for kind in KINDS:
            shutil.copytree(scratch / kind, out / kind, ignore=shutil.ignore_patterns("config.yaml", "train*"))


if __name__ == "__main__":
    main()
