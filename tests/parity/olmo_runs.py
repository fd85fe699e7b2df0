"""What the tests of OLMo's checkpointers share: trainings of the peer, olmo_fsdp.py, and what OLMo's code makes of files."""
import collections
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import PRELOADED
from programs import run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytest.importorskip("olmo.checkpoint")
import olmo_fsdp as peer  # noqa: E402
from olmo.checkpoint import load_model_state  # noqa: E402

PRELOADED.append(peer.__name__)
peer.adapted()
TESSERA = os.environ["TESSERA_COMMAND"]
KINDS = {"full": "olmo-full", "torch_new": "olmo-torch-new", "torch_legacy": "olmo-legacy", "local": "olmo-local"}
SAVED, LAST = 4, 8  # the step that is saved, and where trainings end
LATER = 12  # where trainings end that Tessera continues first

# A run of OLMo's without a break, which saved each kind at step SAVED. losses: the rows after it, up to LAST; later: those
# after LAST.
Run = collections.namedtuple("Run", "directory config ranks losses later")


def rows_after(file):
    return [line for line in file.read_text(encoding="ascii").splitlines()[1:] if int(line.split(",")[0]) > SAVED]


def train(jobs, ranks, directory, program=peer.__file__):
    """Trainings one after another, in one start of the processes."""
    file = directory / "jobs.json"
    file.write_text(json.dumps(jobs, default=str), encoding="utf-8")
    run([program, file], ranks, timeout=240)


def start(factory, name, ranks, last=LAST, **more):
    directory = factory.mktemp(name)
    config = peer.write_config(directory / "config.yaml", **more)
    saves = {str(SAVED): [[kind, directory / kind] for kind in KINDS]}
    train([{"config": config, "steps": last, "losses": directory / "losses.csv", "saves": saves}], ranks, directory)
    rows = rows_after(directory / "losses.csv")
    return Run(directory, config, ranks, rows[:LAST - SAVED], rows[LAST - SAVED:])


def go_on(run_, sources, into, **more):
    """What OLMo's losses are after it restored each of `sources`, (kind, directory)."""
    jobs = [{"config": run_.config, "steps": LAST, "load": source, "losses": into / f"{i}.csv", **more}
            for i, source in enumerate(sources)]
    train(jobs, run_.ranks, into)
    return [rows_after(job["losses"]) for job in jobs]


def write_batches(config, steps, file):
    """The tokens of each step, in the order in which OLMo deals them out to ranks: int64, [step][sequence][time]."""
    cfg = peer.TrainConfig.load(config)
    data = peer.MemMapDataset(*cfg.data.paths, chunk_size=cfg.model.max_sequence_length,
                              memmap_dtype=cfg.data.effective_memmap_dtype)
    order = iter(peer.IterableDataset(data, cfg.global_train_batch_size, seed=cfg.seed, epoch=0, drop_last=True, num_threads=0,
                                      start_index=0, rank=0, world_size=1))
    count = steps * cfg.global_train_batch_size
    np.stack([next(order)["input_ids"].numpy().astype(np.int64) for _ in range(count)]).tofile(file)
    return file


def tessera(*words, code=0):
    done = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr  # without warnings


def clean(value):
    """Without FSDP's wrappers in names, and dicts of any type as plain ones."""
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value.replace("_fsdp_wrapped_module.", "") if isinstance(value, str) else value


def same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            same(*pair, f"{where}/{i}")
    elif type(a).__module__ == "numpy":
        assert (a == b).all(), where
    else:
        assert a == b, where


def loaded(directory):
    """{"model": ..., "optim": ..., "train": ...} of an unsharded checkpoint."""
    return {part: clean(torch.load(directory / f"{part}.pt")) for part in ("model", "optim", "train")}


def by_name(optim):
    """OLMo unshards a local checkpoint's optimizer by numbers: the names are in the groups."""
    names = {number: name for group in optim["param_groups"] for number, name in zip(group["params"], group["param_names"])}
    return {"state": {names[number]: state for number, state in optim["state"].items()},
            "param_groups": [{**group, "params": group["param_names"]} for group in optim["param_groups"]]}


def unsharded_by_olmo(kind, directory, work):
    """What OLMo's and PyTorch's own code makes of a checkpoint."""
    if kind == "full":
        return loaded(directory)
    if kind == "torch_new":
        model = peer.OLMo(peer.TrainConfig.load(directory / "config.yaml").model)
        load_model_state(directory, model)
        dcp_to_torch_save(directory / "model_and_optim", work / "whole.pt")
        whole = torch.load(work / "whole.pt")
        same(dict(model.state_dict()), clean(whole["model"]))
        return {"model": dict(model.state_dict()), "optim": clean(whole["optim"]), "train": torch.load(directory / "train/rank0.pt")}
    model, optim, trainer = peer.checkpointer(kind, None).unshard_checkpoint(directory)
    optim = clean(optim)
    return {"model": clean(model), "optim": by_name(optim) if kind == "local" else optim, "train": trainer}
