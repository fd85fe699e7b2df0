"""ai2-olmo 0.6.0 itself on CPU ranks: its model, optimizer, schedule, data order and four checkpointers in FSDP1.

    torchrun --nproc-per-node N olmo_fsdp.py JOBS.json

JOBS.json is a list of trainings that run one after another, each in a new model:

    {"config": FILE, "steps": N, "losses": FILE.csv,
     "load": [KIND, DIRECTORY], "local_world_size": N,
     "saves": {STEP: [[KIND, DIRECTORY], ...]}}

Only `config` and `steps` have to be there. `local_world_size` is what OLMo takes for the ranks of this host while it restores,
all of them otherwise. `saves` are made when that step has been done, or restored. KIND is full, torch_new, torch_legacy or local. The configuration is a TrainConfig
of OLMo's whose data are files of token numbers; `write_config` makes one. OLMo's Trainer needs CUDA, since its state asks for
CUDA's random numbers: `train` is its loop without evaluation and logging. `adapted` has what had to be changed for torch 2.13
on CPU. olmo_stubs has to be on PYTHONPATH.
"""
import csv
import json
import os
import pathlib
import random
import sys

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # OLMo calls torch.load as it was before 2.6 (OQ-07)
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from olmo import checkpoint  # noqa: E402
from olmo.config import TrainConfig  # noqa: E402
from olmo.data.iterable_dataset import IterableDataset  # noqa: E402
from olmo.data.memmap_dataset import MemMapDataset  # noqa: E402
from olmo.model import OLMo  # noqa: E402
from olmo.optim import build_optimizer, build_scheduler  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: E402
from torch.distributed.fsdp import ShardingStrategy  # noqa: E402

KINDS = {"full": checkpoint.FullCheckpointer, "torch_new": checkpoint.TorchNewStyleShardedCheckpointer,
         "torch_legacy": checkpoint.TorchLegacyShardedCheckpointer, "local": checkpoint.LocalShardedCheckpointer}
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
COUNTS = ("epoch", "global_step", "global_train_examples_seen_this_epoch", "global_train_tokens_seen")

CONFIG = """\
run_name: parity
seed: 7
save_overwrite: true
sharded_checkpointer: local
max_duration: 100
global_train_batch_size: 4
max_grad_norm: 1.0
precision: fp32
model:
  d_model: {width}
  n_heads: 4
  n_layers: {layers}
  mlp_ratio: 4
  weight_tying: false
  vocab_size: {vocabulary}
  embedding_size: {vocabulary}
  max_sequence_length: 32
  attention_dropout: {dropout}
  residual_dropout: {dropout}
  embedding_dropout: {dropout}
  include_bias: false
  layer_norm_with_affine: true
  init_device: cpu
  init_fn: normal
  init_std: 0.02
  eos_token_id: 0
  pad_token_id: 1
optimizer:
  name: adamw
  learning_rate: 1.0e-3
  weight_decay: 0.1
  betas: [0.9, 0.95]
scheduler:
  name: cosine_with_warmup
  t_warmup: 2
data:
  paths: [{tokens}]
  memmap_dtype: uint16
fsdp:
  wrapping_strategy: by_block
  sharding_strategy: {strategy}
  hybrid_sharding_num_model_replicas: {replicas}
  use_orig_params: true
  precision: pure
"""


def write_config(path, width=64, layers=2, vocabulary=256, dropout=0.0, hybrid=False):
    """A run of a small model, and its tokens beside it. Returns the configuration's path.

    OLMo 0.6.0 makes no optimizer of a model without original parameters: it finds no group for flat ones.
    """
    path = pathlib.Path(path)
    tokens = path.with_suffix(".tokens")
    np.random.default_rng(3).integers(2, vocabulary, size=32 * 400).astype(np.uint16).tofile(tokens)
    path.write_text(CONFIG.format(
        width=width, layers=layers, vocabulary=vocabulary, dropout=dropout, tokens=tokens, replicas=2 if hybrid else "null",
        strategy="HYBRID_SHARD" if hybrid else "FULL_SHARD"), encoding="utf-8")
    return path


def adapted():
    """Makes OLMo's checkpointers work on torch 2.13 and CPU: three places and no more."""
    # FULL_STATE_DICT with offload_to_cpu is a segmentation fault where tensors are on the CPU already.
    for name in ("FullStateDictConfig", "FullOptimStateDictConfig"):
        real = getattr(checkpoint, name)
        setattr(checkpoint, name, lambda real=real, **options: real(**{**options, "offload_to_cpu": False}))

    # It lacks two methods that StorageReader declares since torch 2.3.
    class Reader(checkpoint.RemoteFileSystemReader):
        def reset(self, checkpoint_id=None):
            pass

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    checkpoint.RemoteFileSystemReader = Reader
    # It refuses torch 2.3 and later, which still has the attribute that it wants.
    checkpoint.LocalShardedCheckpointer._fsdp_handles = lambda self, module: [h for h in [getattr(module, "_handle", None)] if h]


def checkpointer(kind, config):
    return KINDS[kind](config, thread_count=2)


def build(config, seed):
    torch.manual_seed(seed)
    model = OLMo(config.model)
    more = {}
    if config.fsdp.sharding_strategy in HYBRID:
        copies = config.fsdp.hybrid_sharding_num_model_replicas  # without names of dimensions, as OLMo's train.py makes it
        more["device_mesh"] = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))
    fsdp = FSDP(model, auto_wrap_policy=model.get_fsdp_wrap_policy(config.fsdp.wrapping_strategy), device_id=torch.device("cpu"),
                sharding_strategy=config.fsdp.sharding_strategy, mixed_precision=config.fsdp_precision,
                use_orig_params=config.fsdp.use_orig_params, **more)
    return fsdp, build_optimizer(config, fsdp)


def random_states():
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.random.get_rng_state(),
            "cuda": torch.empty(0, dtype=torch.uint8)}


class Training:
    """OLMo's loop: what is trained, and how far it is."""

    def __init__(self, job):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.config = config = TrainConfig.load(job["config"])
        # What is restored must not be there before.
        self.fsdp, self.optim = build(config, config.seed + (1000 if "load" in job else 0))
        self.state = {**dict.fromkeys(COUNTS, 0), "world_size": world,
                      "checkpoints": [], "unsharded_checkpoints": [], "ephemeral_checkpoints": []}
        torch.manual_seed(config.seed + rank)
        if "load" in job:
            os.environ["LOCAL_WORLD_SIZE"] = str(job.get("local_world_size", world))
            self.restore(*job["load"])
        self.scheduler = build_scheduler(config)
        self.own = config.global_train_batch_size // world
        data = MemMapDataset(*config.data.paths, chunk_size=config.model.max_sequence_length,
                             memmap_dtype=config.data.effective_memmap_dtype)
        self.order = iter(IterableDataset(
            data, config.global_train_batch_size, seed=config.seed, epoch=self.state["epoch"], drop_last=True, num_threads=0,
            start_index=self.state["global_train_examples_seen_this_epoch"], rank=rank, world_size=world))
        self.fsdp.train()

    def restore(self, kind, directory):
        found = checkpointer(kind, self.config).restore_checkpoint(pathlib.Path(directory), self.fsdp, self.optim)
        self.state.update({key: found[key] for key in COUNTS})
        if found["world_size"] == self.state["world_size"] and "rng" in found:
            torch.set_rng_state(found["rng"]["torch"])

    def save(self, kind, directory):
        self.optim.zero_grad(set_to_none=True)
        if kind != "full":
            self.config.sharded_checkpointer = kind  # as the configuration of such a run says
        checkpointer(kind, self.config).save_checkpoint(pathlib.Path(directory), self.fsdp, self.optim,
                                                        {**self.state, "rng": random_states()})

    def step(self):
        """One row of the file of losses."""
        tokens = torch.stack([next(self.order)["input_ids"] for _ in range(self.own)])
        world = self.state["world_size"]
        self.state["global_step"] += 1
        self.state["global_train_examples_seen_this_epoch"] += self.own * world
        self.state["global_train_tokens_seen"] += tokens.numel() * world
        self.optim.zero_grad(set_to_none=True)
        logits = self.fsdp(input_ids=tokens).logits[..., :-1, :].contiguous()
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), tokens[..., 1:].reshape(-1), reduction="sum")
        loss = loss / tokens.numel()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        done = self.state["global_step"]
        norms = self.optim.clip_grads_and_collect_metrics(done, collect_param_metrics=False, process_group=self.fsdp.process_group)
        for group in self.optim.param_groups:
            group["lr"] = self.scheduler.get_lr(self.config.optimizer.learning_rate, done, int(self.config.max_duration))
        self.optim.step()
        return [done, float(mean) / world, self.optim.param_groups[0]["lr"], float(norms["total_grad_norm"])]


def train(job):
    training, rows = Training(job), []
    while True:
        for kind, directory in job.get("saves", {}).get(str(training.state["global_step"]), []):
            training.save(kind, directory)
        if training.state["global_step"] >= job["steps"]:
            break
        rows.append(training.step())
    if dist.get_rank() == 0 and "losses" in job:
        with open(job["losses"], "w", encoding="ascii", newline="") as file:
            csv.writer(file).writerows([["step", "loss", "lr", "grad_norm"], *rows])
    dist.barrier()


def main():
    torch.set_num_threads(1)
    adapted()
    dist.init_process_group("gloo")
    for job in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")):
        train(job)
    dist.destroy_process_group()
    # Ending as usual sometimes aborts: a thread of the process group is still there when its object goes.
    os._exit(0)


if __name__ == "__main__":
    main()
