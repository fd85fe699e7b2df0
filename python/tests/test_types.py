"""mypy accepts a program that uses every public name, and knows what is wrong with another."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import tessera

pytest.importorskip("mypy")
if os.environ.get("TESSERA_WITHOUT_TORCH"):
    pytest.skip("nothing here depends on torch", allow_module_level=True)
PROGRAM = pathlib.Path(__file__).parent / "typed_names.py"
PACKAGES = str(pathlib.Path(tessera.__file__).parent.parent)


def mypy(path, tmp_path):
    # torch's own annotations take ten times as long as all of the rest, and what is called of it is not in question.
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", f"--config-file={settings}", f"--cache-dir={tmp_path}/cache", str(path)]
    environment = {"PATH": "/usr/bin"}
    if not PACKAGES.endswith("site-packages"):  # which mypy looks into by itself
        environment["MYPYPATH"] = PACKAGES
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "Found" in ended.stdout or "Success" in ended.stdout, ended.stdout
    return [line for line in ended.stdout.splitlines() if line.startswith((str(path), path.name))], ended.stdout


def test_every_public_name_is_in_the_program():
    used = set(re.findall(r"tessera\.(\w+)", PROGRAM.read_text()))
    assert set(tessera.__all__) <= used


def test_names_for_torch_are_typed(tmp_path, torch):
    import tessera.torch

    program = PROGRAM.with_name("typed_names_torch.py")
    assert all(f"tessera.torch.{name}(" in program.read_text() for name in tessera.torch.__all__)
    found, output = mypy(program, tmp_path)
    assert found == [], output


def test_the_program_is_accepted_and_a_wrong_one_is_not(tmp_path):
    found, output = mypy(PROGRAM, tmp_path)
    assert found == [], output
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import tessera\n\nwith tessera.open(5) as checkpoint:\n    kind: int = checkpoint.kind\n")
    found, output = mypy(wrong, tmp_path)
    assert len(found) == 2, output
