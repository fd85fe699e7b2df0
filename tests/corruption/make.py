#!/usr/bin/env python3
"""Checkpoints of PyTorch for the long count, larger than the goldens: make.py DIRECTORY"""
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp

torch.manual_seed(0)
state = {f"layers.{i}.weight": torch.randn(48 + i, 64) for i in range(12)}
state["embedding"] = torch.randn(300, 64).bfloat16()
state["ids"] = torch.arange(5000)
state["view"] = state["embedding"][10:20, ::2]
out = pathlib.Path(sys.argv[1])
torch.save(state, out / "model.pt")
dcp.save(state, checkpoint_id=out / "dcp", no_dist=True)
