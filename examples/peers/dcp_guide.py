"""PyTorch's side of examples/dcp_guide: the model, the AppState, and the guide's steps with its two errors
corrected: inference asks for the keys as they were saved, under "app".

    torchrun --nproc-per-node N dcp_guide.py save DIR
    torchrun --nproc-per-node N dcp_guide.py load DIR FILE     the full state, as torch.save writes it
    python dcp_guide.py infer DIR                              no process group
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranks import finish


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state, optim_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optim_state}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(torch.relu(self.net1(x)))


def app_state(seed):
    torch.manual_seed(seed)
    model = ToyModel()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return AppState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def save(directory):
    app = app_state(seed=0)
    app.model(torch.rand(8, 16)).sum().backward()
    app.optimizer.step()
    dcp.save({"app": app}, checkpoint_id=directory)


def full(value):
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def load(directory, file):
    app = app_state(seed=1)
    dcp.load({"app": app}, checkpoint_id=directory)
    state = full({"app": app.state_dict()})
    if dist.get_rank() == 0:
        torch.save(state, file)


def infer(directory):
    model = ToyModel()
    state = {"app": {"model": model.state_dict()}}
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state["app"]["model"])
    with torch.no_grad():
        print(*(f"{value:.9g}" for value in model(torch.ones(1, 16))[0].tolist()))


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    command, *paths = sys.argv[1:]
    if command == "infer":
        infer(*paths)
        return
    dist.init_process_group("gloo")
    {"save": save, "load": load}[command](*paths)
    finish()


if __name__ == "__main__":
    main()
