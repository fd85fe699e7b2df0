#!/usr/bin/env python3
"""Compares scanners of pickles: what each one's command lets pass, and what it raises an alarm at.

    measure.py corpus DIRECTORY            writes names/, shapes/ and honest/ (a Python with torch)
    measure.py run TOOL DIRECTORY          one tool over all of it (a Python with that tool; tessera: TOOL is its path)

A file counts as caught where the command ends with another exit code than 0: that is what a script sees.
"""
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def corpus(place):
    import honest_torch
    import shapes
    lines = (HERE / "names.txt").read_text().splitlines()
    for number, (module, name) in enumerate(line.split(" ") for line in lines if not line.startswith("#")):
        file = place / "names" / f"{number}.pkl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x80\x02" + shapes.call(module, name, "x") + b".")
    for number, (_, shape) in enumerate(shapes.hidden_in("posix", "mkdir", "x")):
        file = place / "shapes" / f"{number:02}" / shape.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(shape.data)
    (place / "honest").mkdir()
    print(sum(1 for _ in honest_torch.write(place / "honest")), "honest")


def by_command(command):
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, "NO_COLOR": "1"}).returncode


def fickling(path):
    from fickling.analysis import Severity, check_safety
    from fickling.fickle import StackedPickle
    from fickling.pytorch import PyTorchModelWrapper
    try:
        if path.endswith(".pt"):
            pickles = [PyTorchModelWrapper(pathlib.Path(path), force=True).pickled]
        else:
            with open(path, "rb") as file:
                pickles = list(StackedPickle.load(file))
    except Exception:
        return 2
    return int(any(check_safety(one).severity > Severity.LIKELY_SAFE for one in pickles))


def picklescan(path):
    from picklescan.scanner import scan_file_path
    try:
        result = scan_file_path(path)
    except Exception:
        return 2
    return 2 if result.scan_err else int(result.issues_count > 0)


def modelscan(path):
    from modelscan.modelscan import ModelScan
    found = ModelScan().scan(path)
    return int(found["summary"]["total_issues"] > 0) or 2 * bool(found["errors"]) or (
        3 * (found["summary"]["scanned"]["total_scanned"] == 0))


def modelaudit(path):
    os.environ["PROMPTFOO_DISABLE_TELEMETRY"] = "1"
    from modelaudit.core import determine_exit_code, scan_model_directory_or_file
    return determine_exit_code(scan_model_directory_or_file(path))


# As their commands choose the exit code; in one process, because starting Python takes most of the time.
COMMANDS = {"picklescan": picklescan, "modelscan": modelscan, "modelaudit": modelaudit, "fickling": fickling}


def run(tool, place):
    check = COMMANDS.get(tool) or (lambda path: by_command([tool, "scan", path]))
    for part in ("names", "shapes", "honest"):
        began, caught, seen, passed = time.monotonic(), 0, 0, []
        for file in sorted((place / part).iterdir()):
            if part == "shapes":
                (file,) = file.iterdir()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = check(str(file))
            seen += 1
            caught += code != 0
            if (code == 0) != (part == "honest"):
                passed.append(f"{file.parent.name}/{file.name}")
        print(f"{pathlib.Path(tool).name:12} {part:8} {caught:4} of {seen} caught, {time.monotonic() - began:6.1f} s "
              f"{' '.join(passed[:400]) if os.environ.get('TESSERA_LIST') else ''}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "corpus":
        corpus(pathlib.Path(sys.argv[2]))
    else:
        run(sys.argv[2], pathlib.Path(sys.argv[3]))
