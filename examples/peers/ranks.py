"""The end of a program on several ranks."""

import os
import sys

import torch.distributed as dist


def finish():
    """Leaves together and without teardown: at times PyTorch's Gloo threads abort a Python process that exits
    by the ordinary way."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
