"""`python -m tessera` is the command `tessera` that was installed with this package."""

import importlib.metadata
import os
import shutil
import sys


def command() -> str:
    """Its path. Raises FileNotFoundError where there is none."""
    try:
        files = importlib.metadata.files("tessera-ckpt") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "tessera" and "bin" in file.parts:
            return os.path.realpath(file.locate())
    found = shutil.which("tessera")
    if found is None:
        raise FileNotFoundError("the command tessera was not installed with this package and is not in PATH")
    return found


if __name__ == "__main__":
    os.execv(command(), ["tessera", *sys.argv[1:]])
