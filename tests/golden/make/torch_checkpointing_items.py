"""Files of one rank each and of one item each, as torch_checkpointing writes them: trainers/torch_checkpointing.

    torchrun --nproc-per-node 2 torch_checkpointing_items.py tests/golden/trainers/torch_checkpointing

Made with torch_checkpointing 0.1.1 and torch 2.13 on the CPU.
"""
import sys

import torch
import torch.distributed as dist

# It puts everything on a GPU, which is not there.
torch.cuda.current_device = lambda: 0
torch.cuda.synchronize = lambda *_: None
torch.cuda.set_device = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self


def is_gpu(device):
    return str(device).startswith("cuda") or (isinstance(device, int) and not isinstance(device, bool))


def on_cpu(make):
    def made(*arguments, **named):
        if "device" in named and is_gpu(named["device"]):
            named["device"] = "cpu"
        return make(*arguments, **named)

    return made


def stay(move):
    return lambda self, *arguments, **named: self if arguments and is_gpu(arguments[0]) else move(self, *arguments, **named)


torch.tensor, torch.empty, torch.zeros = on_cpu(torch.tensor), on_cpu(torch.empty), on_cpu(torch.zeros)
torch.Tensor.to = stay(torch.Tensor.to)


def main():
    from torch.distributed.fsdp import fully_shard
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    manager = CheckpointManager(CheckpointManager.Config(
        items={"model": ItemSpec(resharder=DefaultResharder())}, save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False)))
    saved = manager.save(sys.argv[1], {"model": model.state_dict(), "step": 7})
    if saved is not None:
        saved.result()
    dist.barrier()


if __name__ == "__main__":
    main()
