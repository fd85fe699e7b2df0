#!/usr/bin/env python3
"""Directories as people have them, drawn from seeds; the programs that read them are the judges.

    directories.py TESSERA [COUNT SEED]

draws COUNT directories (500) with seeds from SEED (1) on. Each is read as its peer reads it (safetensors, torch,
torch's DCP, transformers' index), bit for bit, or refused with a reason; where
docs/guide/what-is-in-a-directory.md has an option, the refusal names it, and with it the directory is read. Exit 1 when
any was not. One alone (COUNT 1) is left where its path says. With the package on PYTHONPATH `tessera.load` is asked,
too.
"""
import collections
import logging
import random
import shutil
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.ERROR)

import beside  # noqa: E402
import checks  # noqa: E402
import judge  # noqa: E402
import mishaps  # noqa: E402
import places  # noqa: E402


def draw(seed, root, drawn):
    case = places.Case(random.Random(seed), root, root / "run", drawn=drawn)
    rng = case.rng
    case.folder.mkdir()
    make = rng.choice(places.KINDS)
    kind = make.__name__
    case.kind = kind
    case.did(kind)
    make(case)
    for change in rng.sample(mishaps.BEFORE, rng.choice((0, 1, 1, 2))):
        if not (change in (mishaps.stray, mishaps.stale_index) and case.meant) and change(case, kind) is not False:
            case.did(change.__name__)
    for thing in rng.sample(beside.BESIDE, rng.choice((0, 1, 2, 3))):
        if not ("stale_index" in case.drawn and thing is beside.beside_variant) and thing(case, kind) is not False:
            case.did(thing.__name__)
    case.want = case.read(case.folder, None)
    for change in rng.sample(mishaps.AFTER, rng.choice((0, 0, 1, 1, 2))):
        # What has bytes behind its end is not cut to less.
        if not case.fatal and not {change.__name__, "trailing"} & set(case.drawn) and change(case, kind) is not False:
            case.did(change.__name__)
    if kind not in ("dcp", "vllm") and rng.random() < 0.3:
        mishaps.in_hub_cache(case)
        is_whole = not (case.needs or case.fatal or case.extra or "trailing" in case.drawn)
        if is_whole and rng.random() < 0.4:
            mishaps.flip(case)
            case.want = case.read(case.folder, None)
    case.place = case.folder
    if not case.needs and rng.random() < 0.2:
        mishaps.open_by_name(case)
    return case


def one(seed, tools):
    """What came of it; a failure is printed with what was drawn."""
    drawn = []
    try:
        case = draw(seed, tools.fresh(), drawn)
        return judge.judge(case, tools)
    except (Exception, checks.CheckpointException) as error:  # noqa: BLE001
        said = str(error) if isinstance(error, checks.Failure) else f"the check raises {error!r}"
        print(f"seed {seed}: {', '.join(drawn)}\n    {said[:1500]}", flush=True)
        return f"WRONG {said.split(':')[0]}"


def main(command, count=500, first=1):
    tools = checks.Tools(command)
    outcomes = collections.Counter()
    started = time.monotonic()
    try:
        for seed in range(first, first + count):
            outcomes[one(seed, tools)] += 1
        if count == 1:
            kept = tools.home.with_name(f"directory-{first}")
            shutil.copytree(tools.root, kept, symlinks=True, dirs_exist_ok=True)
            print(f"it is in {kept}")
    finally:
        tools.close()
    by = "the command and the package" if judge.tessera else "the command"
    print(f"{count} directories, seeds {first} to {first + count - 1}, {by}, {time.monotonic() - started:.0f} s")
    for name, times in sorted(outcomes.items()):
        print(f"{times:7} {name}")
    return 1 if any(name.startswith("WRONG") for name in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
