"""Ranks of one host, as processes: a killed one is noticed by the others and leaves nothing behind.

TESSERA_SAME_HOST_LOOP names the program.
"""
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ports import free_port

NAME = "tessera-same-host"


def start(*same_host, arguments=()):
    """A rank for each value of TESSERA_SAME_HOST."""
    port = str(free_port())
    return [subprocess.Popen(
        [os.environ["TESSERA_SAME_HOST_LOOP"], *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(len(same_host)),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TESSERA_SAME_HOST": choice})
        for rank, choice in enumerate(same_host)]


def shared_memory(pid):
    """Inodes of the memory that a process shares by ours."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return {line.split()[4] for line in maps if "memfd:tessera" in line}
    except OSError:
        return set()


def all_shared_memory():
    return set().union(*(shared_memory(pid) for pid in os.listdir("/proc") if pid.isdigit()))


def names():
    """What a kill could leave behind, if ours had names."""
    return {name for name in os.listdir("/dev/shm") if "tessera" in name}


def end(ranks):
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_noticed(victim):
    before = names()
    ranks = start("1", "1", "1")
    try:
        for rank in ranks:
            assert [rank.stdout.readline().strip(), rank.stdout.readline().strip()] == [NAME, "going"]
        memory = shared_memory(ranks[0].pid)
        assert len(memory) == 1 and all(shared_memory(rank.pid) == memory for rank in ranks)
        ranks[victim].send_signal(signal.SIGKILL)
        for number, rank in enumerate(ranks):
            if number != victim:
                _, error = rank.communicate(timeout=100)
                assert rank.returncode == 3
                # Without a network libtorch logs that names do not resolve. A deadline would say another thing.
                said = [line for line in error.splitlines() if not line.startswith("[W")]
                assert said[0].startswith("peer_failed") and f"the process of rank {victim} has ended" in error
    finally:
        end(ranks)
    assert names() == before and not memory & all_shared_memory()


def test_kills_while_the_ranks_meet_leave_nothing():
    before = names()
    draw = random.Random(11)
    for _ in range(6):
        ranks = start("1", "1")
        time.sleep(draw.uniform(0.05, 0.6))
        memory = shared_memory(ranks[0].pid) | shared_memory(ranks[1].pid)
        end(ranks)
        assert names() == before and not memory & all_shared_memory()


def test_one_rank_that_switches_it_off_decides():
    ranks = start("1", "0")
    try:
        for rank in ranks:
            assert [rank.stdout.readline().strip(), rank.stdout.readline().strip()] == ["gloo", "going"]
    finally:
        end(ranks)


def test_ranks_that_torchrun_restarts_meet_again():
    """The agent's store still has what the ranks of the first attempt wrote."""
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "1", os.environ["TESSERA_SAME_HOST_LOOP"]],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_SAME_HOST": "1"})
    try:
        for attempt in range(2):
            lines = sorted(run.stdout.readline().strip() for _ in range(4))
            assert lines == ["going", "going", NAME, NAME]
            with open(f"/proc/{run.pid}/task/{run.pid}/children") as children:
                ranks = [int(pid) for pid in children.read().split() if shared_memory(pid)]
            assert len(ranks) == 2
            os.kill(ranks[0], signal.SIGKILL)
        assert run.wait(timeout=60) != 0
    finally:
        run.kill()
        run.communicate()


MESHES = 10


@pytest.mark.parametrize("same_host", ["1", "0"])
def test_a_process_makes_several_meshes_under_torchrun(same_host):
    """The agent's store keeps what meshes before have left there."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node=2", f"--master-port={free_port()}",
         os.environ["TESSERA_SAME_HOST_LOOP"], str(MESHES)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TESSERA_SAME_HOST": same_host})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"made {MESHES}") == 2


@pytest.mark.parametrize("same_host", ["1", "0"])
def test_a_process_makes_several_meshes_that_meet_at_rank_0(same_host):
    """Rank 0 serves the next mesh's store while others may still be busy with the one before."""
    ranks = start(same_host, same_host, same_host, arguments=[str(MESHES)])
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=150)
            assert rank.returncode == 0, err
            assert f"made {MESHES}" in out
    finally:
        end(ranks)
