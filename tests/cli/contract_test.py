#!/usr/bin/env python3
"""What programs may rely on (docs/versions.md): compares it with the record in contract.json.

    contract_test.py TESSERA GOLDEN_DIRECTORY [--record]

Recorded is what the command answers with --json (each field as "stat.tensors[].name"), its exit codes, the codes of errors
and the fields of a side file. What is recorded has to be there. What is new has to be recorded: run with --record, and
tell it in CHANGELOG.md. docs/commands.md, what each command says with --help, is compared and written likewise.
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from values_test import ARRAYS, write_value

RECORD = pathlib.Path(__file__).with_name("contract.json")
ERRORS = pathlib.Path(__file__).resolve().parents[2] / "include/tessera/error.h"
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/commands.md"
TESSERA = GOLDEN = None

HEAD = """# The commands

What each of them says with `--help`. `tests/cli/contract_test.py` compares this page with the command, and writes it when it is
called with `--record`; manual pages and completion come from the same table of options. [JSON](formats/json.md) has what they
answer with `--json`.
"""


def page():
    """Help is wrapped by the command itself, whatever the terminal."""
    def help_of(*command):
        told = subprocess.run([TESSERA, *command, "--help"], capture_output=True, text=True, check=True).stdout
        return "\n".join(line.rstrip() for line in told.strip().splitlines())

    every = help_of()
    commands = re.findall(r"^  (\w+) ", every.split("Subcommands:")[1].split("\n\n")[0], re.M)
    parts = [("tessera", every)] + [(f"tessera {name}", help_of(name)) for name in commands]
    return HEAD + "".join(f"\n## {name}\n\n```\n{text}\n```\n" for name, text in parts)


def answers(work):
    """name -> (arguments, exit code). Each is called in a folder of its own copies."""
    dcp, other = work / "dcp", work / "other"
    shutil.copytree(GOLDEN / "checkpoints/c2", dcp)
    shutil.copytree(GOLDEN / "checkpoints/c2", other)
    damaged = work / "damaged.safetensors"
    damaged.write_bytes((GOLDEN / "dtypes.safetensors").read_bytes()[:-1])
    changed = work / "changed.safetensors"
    changed.write_bytes((GOLDEN / "dtypes.safetensors").read_bytes()[:-1] + b"\x55")
    olmo = work / "olmo"
    shutil.copytree(GOLDEN / "checkpoints/fsdp1_uop0_ws2_legacy", olmo)
    return {
        "ls": ["ls", dcp],
        "ls of values": ["ls", write_value(work / "values.pt", ARRAYS)],
        "stat": ["stat", dcp],
        "map": ["map", dcp],
        "verify": ["verify", dcp],
        "stats": ["stats", GOLDEN / "dtypes.safetensors"],
        "stats of what is not finite": ["stats", GOLDEN / "dtypes.safetensors", "--finite"],
        "scan": ["scan", dcp],
        "diff": ["diff", dcp, GOLDEN / "dtypes.safetensors"],
        "diff of values": ["diff", changed, GOLDEN / "dtypes.safetensors"],
        "diff of equals": ["diff", dcp, other],
        "convert": ["convert", dcp, work / "converted.pt"],
        "seal": ["seal", dcp],
        "verify of sealed": ["verify", dcp],
        "copy": ["copy", dcp, work / "copied"],
        "gc": ["gc", dcp],
        "reshard": ["reshard", dcp, work / "resharded", "--ranks", "3"],
        "unshard": ["unshard", olmo, work / "unsharded"],
        "cat": ["cat", GOLDEN / "dtypes.safetensors", "float32"],
        "not there": ["ls", work / "none"],
        "damaged": ["verify", damaged],
        "no such option": ["ls", dcp, "--no-such-option"],
    }


def fields(value, path):
    """Each as "path: type". What is under a name of the checkpoint, and values of it, count as any."""
    if path in ("ls[].value", "cat.values[]"):
        yield f"{path}: any"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from fields(item, f"{path}.{'*' if path == 'side file.files' else key}")
    elif isinstance(value, list):
        yield f"{path}: list"
        for item in value:
            yield from fields(item, f"{path}[]")
    else:
        yield f"{path}: {type(value).__name__ if value is not None else 'null'}"


def found():
    work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-contract-"))
    try:
        exits, json_fields = {}, set()
        for name, arguments in answers(work).items():
            done = subprocess.run([TESSERA, *map(str, arguments), "--json"], capture_output=True, text=True, check=False)
            exits[name] = done.returncode
            json_fields |= set(fields(json.loads(done.stdout), arguments[0] if done.returncode < 2 else "failure"))
        (side_file,) = (work / "dcp").glob("tessera-*.json")
        side = set(fields(json.loads(side_file.read_text()), "side file"))
    finally:
        shutil.rmtree(work)
    codes = re.findall(r"^  (\w+), +//", ERRORS.read_text(), re.M)
    return {"exit codes": exits, "error codes": codes, "json": sorted(json_fields), "side file": sorted(side)}


class Contract(unittest.TestCase):
    maxDiff = None

    def test_what_is_recorded_is_there_and_nothing_else(self):
        recorded, now = json.loads(RECORD.read_text()), found()
        self.assertEqual(recorded.keys(), now.keys())
        for part in recorded:
            self.assertEqual(recorded[part], now[part], f"{part}: see docs/versions.md")


    def test_the_page_of_commands_is_what_they_say(self):
        self.assertEqual(PAGE.read_text(), page(), "run with --record")


if __name__ == "__main__":
    TESSERA, GOLDEN = sys.argv[1], pathlib.Path(sys.argv[2])
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(found(), indent=1) + "\n")
        PAGE.write_text(page())
    else:
        unittest.main(argv=sys.argv[:1])
