"""A checkpoint of DeepSpeed after one step:  make_deepspeed.py DIRECTORY STAGE LAYERS WIDTH VOCABULARY     under torchrun"""
import sys

import deepspeed
import torch
from torch import nn

out, stage, layers, width, vocabulary = sys.argv[1], *map(int, sys.argv[2:6])
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(vocabulary, width), *(nn.Linear(width, 4 * width) if i % 2 == 0 else nn.Linear(4 * width, width)
                                                         for i in range(2 * (layers // 2))))
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
          "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.randint(0, vocabulary, (1, 4))).float().sum())
engine.step()
engine.save_checkpoint(out, tag="global_step1")
