"""optim_state/{nested,dummy,transformer}.pt: what FSDP1 of torch 2.13 saves of Adam's state after three steps on two ranks.

Each file holds the initial weights, the batches, the losses, and FSDP.full_optim_state_dict() without ("flat") and with
("original") use_orig_params. Where both have the same bits the file has them once. The models are those of PyTorch's
test_fsdp_optim_state.py; tests/parity/test_optim_state.py takes them from here.

    python tests/golden/make/optim_state.py
"""
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

STEPS = 3


class Bias(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return x + self.bias


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias_module0 = Bias(outputs)
        self.bias_module1 = Bias(outputs)

    def forward(self, x):
        return self.bias_module1(torch.relu(self.bias_module0(x @ self.weight)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.block0 = Block(5, 3)
        self.block1 = Block(3, 7)
        self.bias = nn.Parameter(torch.randn(5))
        self.block2 = nn.Sequential(Block(7, 9), Block(9, 9), Block(9, 5))

    def forward(self, x):
        return torch.relu(self.block2(torch.relu(self.block1(torch.relu(self.block0(x)))))) + self.bias

    def wrap(self, fsdp):
        self.block1.bias_module0 = fsdp(self.block1.bias_module0)
        self.block1 = fsdp(self.block1)
        self.block2[1].bias_module0 = fsdp(self.block2[1].bias_module0)
        self.block2[1].bias_module1 = fsdp(self.block2[1].bias_module1)
        self.block2[1] = fsdp(self.block2[1])
        self.block2[2] = fsdp(self.block2[2])
        return self

    @staticmethod
    def batch():
        return torch.randn(8, 5)

    def loss(self, model, batch):
        return model(batch).sum()


class Dummy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Linear(32, 64)
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.net4(self.net3(self.net2(self.net1(x))))

    def wrap(self, fsdp):
        return fsdp(self)

    @staticmethod
    def batch():
        return torch.rand(8, 8)

    def loss(self, model, batch):
        return model(batch).sum()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(23, 16)
        self.transformer = nn.Transformer(d_model=16, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8)
        self.output_proj = nn.Linear(16, 23)
        self.output_proj.weight = self.embed_tokens.weight
        self.bn = nn.BatchNorm1d(2)
        self.eval()

    def forward(self, batch):
        source, target = batch[:12].view(6, 2), batch[12:].view(4, 2)
        return self.output_proj(self.transformer(self.embed_tokens(source) + 1, self.bn(self.embed_tokens(target))))

    def wrap(self, fsdp):
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return fsdp(self, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}))

    @staticmethod
    def batch():
        return torch.cat([torch.arange(12), torch.arange(8)])

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch).view(-1, 23), batch[12:], reduction="sum")


MODELS = {"nested": Nested, "dummy": Dummy, "transformer": Transformer}


def make(name):
    torch.manual_seed(11)
    model = MODELS[name]()
    return model, [model.batch() for _ in range(STEPS)]


def wrapped(model, original):
    """The model as FSDP1 has it on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def fsdp(module, **options):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=original, **options)

    return model.wrap(fsdp)


def train(plain, model, optimizer, batches):
    """The loss of each step on a batch that all ranks have."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mend_original_states():
    """On the CPU FSDP with use_orig_params gives every kind of state of a parameter the same memory."""
    import torch.distributed.fsdp._optim_utils as utils

    unflatten = utils._unflatten_orig_param_states

    def with_copies(info, states, name, shard_state, *rest):
        unflatten(info, states, name, shard_state, *rest)
        for state in states.values():
            if not shard_state and name in state:
                state[name] = state[name].clone()

    utils._unflatten_orig_param_states = with_copies


def run(rank, world, store, directory):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mend_original_states()
    for name in MODELS:
        content = {}
        for kind in ("flat", "original"):
            plain, batches = make(name)
            weights = {key: value.detach().clone() for key, value in plain.named_parameters()}
            model = wrapped(plain, kind == "original")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            losses = train(plain, model, optimizer, batches)
            state = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
            content.setdefault("weights", weights)
            content.setdefault("batches", batches)
            content.setdefault("losses", losses)
            # Each a tensor of its own memory, which a state's slices of a flat tensor are not.
            content[kind] = {
                "state": {key: {item: shared(content, kind, key, item, value) for item, value in entry.items()}
                          for key, entry in state["state"].items()},
                "param_groups": state["param_groups"]}
        if rank == 0:
            torch.save(content, directory / f"{name}.pt")
    dist.destroy_process_group()


def shared(content, kind, key, item, value):
    if not torch.is_tensor(value):
        return value
    if kind == "original":
        other = content["flat"]["state"][key][item]
        if torch.equal(other, value):
            return other
    return value.clone()


if __name__ == "__main__":
    out = pathlib.Path(__file__).resolve().parents[1] / "optim_state"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        mp.spawn(run, args=(2, f"{temporary}/store", out), nprocs=2)
    sys.stdout.writelines(f"{path.name} {path.stat().st_size}\n" for path in sorted(out.iterdir()))
