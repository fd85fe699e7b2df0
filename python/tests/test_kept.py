"""What processes of `tessera.CheckpointWriter` keep in memory for who starts again on this host."""

import signal
import subprocess
import sys
import textwrap

import pytest

import tessera


def loaded(path):
    return tessera.load(path, framework="numpy")


def test_a_process_keeps_what_a_killed_program_had_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_ARENA_DIR", str(tmp_path / "arenas"))
    program = """
        import os, signal, sys, numpy, tessera
        writer = tessera.CheckpointWriter(process=True, idle=False, keep=float(sys.argv[2]))
        for step in (1, 2):
            state = {"w": numpy.full(1 << 20, step, dtype="float32"), "step": step}
            writer.save(state, f"{sys.argv[1]}/step{step}").result()
        os.kill(os.getpid(), signal.SIGKILL)
    """

    def train_and_die(keep):
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run"), str(keep)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL

    train_and_die(60)
    place = f"arena://{tmp_path}/run/step2"
    with tessera.open(place) as kept:
        assert kept.kind == "arena" and (kept["w"].numpy() == 2).all()
    state = loaded(place)
    assert state["step"] == 2 and (state["w"] == 2).all()
    assert tessera.diff(place, tmp_path / "run/step2") == []
    with pytest.raises(tessera.NotFoundError):
        tessera.open(f"arena://{tmp_path}/run/step1")
    train_and_die(0)  # its first save ends what the one before has kept
    with pytest.raises(tessera.NotFoundError):
        tessera.open(place)


@pytest.mark.parametrize(("begin", "end", "is_kept"), [
    ("writer = {}", "raise ValueError", True),
    ("with {} as writer", "raise ValueError", True),
    ("writer = {}", "pass", False),
    ("with {} as writer", "pass", False),
])
def test_a_process_keeps_what_a_program_had_saved_that_ends_by_an_exception(begin, end, is_kept, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_ARENA_DIR", str(tmp_path / "arenas"))
    made = begin.format("tessera.CheckpointWriter(process=True, idle=False, keep=60)")
    program = f"import sys, numpy, tessera\n{made if 'with' in begin else 'if True'}:\n"
    program += "" if "with" in begin else f"    {made}\n"
    program += '    writer.save({"w": numpy.ones(9), "step": 1}, sys.argv[1]).result()\n    ' + end
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "step1")], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == (1 if is_kept else 0)
    place = f"arena://{tmp_path}/step1"
    if is_kept:
        assert loaded(place)["step"] == 1
    else:
        with pytest.raises(tessera.NotFoundError):
            tessera.open(place)


def test_only_a_process_keeps():
    for options in ({"keep": 5.0}, {"keep": float("inf")}, {"keep": -1.0, "process": True}):
        with pytest.raises(ValueError, match="invalid_argument: keep is"):
            tessera.CheckpointWriter(**options)
