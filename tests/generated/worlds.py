"""Distributed checkpoints as torch writes them from several ranks, without the ranks: each rank in its turn has a
process group that does nothing, plans its part with torch's planner and writes it with torch's writer, as dcp.save
does. DTensors are cut without collectives."""
import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import values


def size_of(mesh):
    count = 1
    for size in mesh:
        count *= size
    return count


@contextlib.contextmanager
def rank_of(mesh, rank):
    """Inside, `sharded` of an expression makes the part of this rank."""
    hook = sys.excepthook  # each group wraps it once more
    dist.init_process_group("fake", rank=rank, world_size=size_of(mesh), store=FakeStore())
    try:
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("x", "y")[: len(mesh)])

        def sharded(tensor, *placements):
            placements = [Replicate() if p is None else Shard(p) for p in placements]
            return distribute_tensor(tensor, device_mesh, placements, src_data_rank=None)

        values.sharded = sharded
        yield
    finally:
        values.sharded = values.not_sharded
        dist.destroy_process_group()
        sys.excepthook = hook


class Marked:
    """Stands for what is sharded."""


def marked(case):
    values.sharded = lambda tensor, *placements: Marked()
    try:
        return case.value()
    finally:
        values.sharded = values.not_sharded


def save_dcp(case, path):
    mesh = case.more["mesh"]
    ranks = size_of(mesh)
    writers = [FileSystemWriter(path) for _ in range(ranks)]
    planners = [DefaultSavePlanner() for _ in range(ranks)]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers)):
        with rank_of(mesh, rank):
            planner.set_up_planner(values.with_signs(case.value()), storage_meta=writer.storage_meta(), is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [writer.write_data(planner.finish_plan(plan), planner).wait()
               for writer, planner, plan in zip(writers, planners, plans)]
    writers[0].finish(metadata, results)


def save_rank_files(case, folder):
    folder.mkdir()
    for rank in range(size_of(case.more["mesh"])):
        with rank_of(case.more["mesh"], rank):
            torch.save(case.value(), folder / f"rank{rank}.pt")
