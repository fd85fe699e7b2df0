"""Checkpoints of DeepSpeed's ZeRO 0 to 3 with small models, and what DeepSpeed itself reads from them.

    deepspeed_zero.py DIRECTORY        needs deepspeed 0.19.8 (DS_BUILD_OPS=0) and torch 2.13; runs on CPUs

Each directory has `global_step2` and `latest`; beside it NAME.safetensors has the fp32 values by zero_to_fp32, and Adam's state by the same
functions with the state in the place of the values.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# name: stage, ranks, 16-bit kind, options of the model
CASES = {
    "zero0": (0, 2, "none", ""),
    "zero1": (1, 2, "bf16", "frozen"),  # ZeRO 2 writes the same
    "zero2_groups": (2, 3, "bf16", "tied groups"),  # two groups, ranks of unequal length
    "zero2_tiny": (2, 4, "bf16", "tiny"),  # ranks that are padding
    "zero3": (3, 2, "bf16", "frozen"),
    "zero3_groups": (3, 3, "bf16", "tied groups"),
}
UNIVERSAL = ("zero1", "zero3")  # as ds_to_universal makes it of them, too


def train(stage, kind, options, out):
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            if "tiny" in options:
                self.head = nn.Linear(1, 3, bias=False)
                return
            self.emb = nn.Embedding(17, 8)
            self.l1 = nn.Linear(8, 13)
            self.ln = nn.LayerNorm(13)
            self.l2 = nn.Linear(13, 8)
            self.head = nn.Linear(8, 17, bias=False)
            if "tied" in options:
                self.head.weight = self.emb.weight
            if "frozen" in options:
                self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
            self.register_buffer("buf", torch.arange(4.0))

        def forward(self, x):
            if "tiny" in options:
                return self.head(x).float().sum()
            return self.head(self.l2(self.ln(self.l1(self.emb(x))))).float().square().mean()

    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 1,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.1}},
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    if kind != "none":
        config[kind] = {"enabled": True}
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = trained
    if "groups" in options:
        groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        if "tiny" in options:
            batch = torch.randn(2, 1, generator=generator).to(torch.bfloat16)
        else:
            batch = torch.randint(0, 17, (2, 4), generator=generator)
        engine.backward(engine(batch))
        engine.step()
    engine.save_checkpoint(out, tag="global_step2", client_state={"note": "x"})
    dist.destroy_process_group()


def expected(directory, out):
    import torch
    from deepspeed.utils import zero_to_fp32
    from safetensors.torch import save_file

    step = pathlib.Path(directory) / "global_step2"

    def read(where, exclude_frozen):
        return zero_to_fp32.to_torch_tensor(zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint(where, exclude_frozen))

    found = {f"model.{name}": value for name, value in read(str(step), False).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        with tempfile.TemporaryDirectory() as copy:
            for file in step.iterdir():
                state = torch.load(file, weights_only=False)
                own = state.get("optimizer_state_dict", {})
                base = own.get("base_optimizer_state", own.get("optimizer_state_dict"))
                flat = "fp32_flat_groups" if "fp32_flat_groups" in own else "single_partition_of_fp32_groups"
                if base is not None:
                    own[flat] = [base["state"][i][key] for i in range(len(own[flat]))]
                torch.save(state, os.path.join(copy, file.name))
            trained = [name for shapes in torch.load(next(step.glob("*model_states.pt")), weights_only=False)["param_shapes"] for name in shapes]
            states = read(copy, True)
            found |= {f"optim.state.{name}.{key}": states[name] for name in trained}
    save_file({name: value.clone().contiguous() for name, value in found.items()}, out)


def main():
    if sys.argv[1] == "--train":
        stage, kind, options, out = sys.argv[2:6]
        return train(int(stage), kind, options, out)
    for name, (stage, ranks, kind, options) in CASES.items():
        out = pathlib.Path(sys.argv[1]) / name
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__, "--train",
                        str(stage), kind, options, str(out)], check=True)
        for script in out.glob("zero_to_*.py"):
            script.unlink()
        if stage > 0:
            expected(out, f"{out}.safetensors")
        if name in UNIVERSAL:
            step = "global_step2"
            subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder",
                            str(out / step), "--output_folder", f"{out}_universal/{step}"], check=True)


main()
