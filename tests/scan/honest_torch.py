"""Writes honest checkpoints with torch: hundreds, of what people save. For scan_torch_test.py and measure.py."""
import datetime
import io
import itertools
import pickle
import random

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam,
              torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax]
MODELS = [
    lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten()),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    lambda: nn.Sequential(nn.Embedding(10, 4), nn.LSTM(4, 3), nn.Dropout(0.1)),
    lambda: nn.ModuleDict({"a": nn.GRU(2, 2), "b": nn.LayerNorm(3), "c": nn.MultiheadAttention(4, 2)}),
]


def trained(model, kind):
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def values():
    """(title, what is saved)."""
    for dtype in DTYPES:
        yield f"tensor {dtype}", {"x": torch.zeros(3, 2).to(dtype), "y": [torch.ones(4).to(dtype)[1:]]}
    for number, (make, kind) in enumerate(itertools.product(MODELS, OPTIMIZERS)):
        model = make()
        optimizer = trained(model, kind)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        yield f"training {number}", {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                     "scheduler": scheduler.state_dict(), "epoch": number, "best": 0.5, "when": str(datetime.date.today())}
    for number, make in enumerate(MODELS):
        yield f"parameters {number}", list(make().parameters())
    for number, shape in enumerate([(), (0,), (1,), (2, 3, 4), (1, 0, 2), (5, 1, 1, 1)]):
        whole = torch.arange(24.0).reshape(2, 3, 4)
        yield f"shape {number}", {"x": torch.ones(shape), "shared": whole, "view": whole[:, 1:], "turned": whole.permute(2, 0, 1)}
    yield "random states", {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
    yield "numpy", {"a": numpy.arange(6).reshape(2, 3), "b": numpy.float32(1.5), "c": numpy.array(["a", "b"]),
                    "d": numpy.dtype("int64"), "e": numpy.array([1, "x", None], dtype=object)}
    yield "version", {"torch": torch.__version__, "device": torch.device("cpu"), "size": torch.Size([1, 2]), "dtype": torch.float16,
                      "dtypes": [torch.quint4x2, torch.uint3, torch.bits8]}
    yield "sparse", torch.eye(3).to_sparse()
    yield "quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    yield "storage", torch.ones(3).untyped_storage()
    yield "scripted dict", torch.ones(2).requires_grad_()


def write(directory):
    """Every value in every form; the paths, with titles."""
    torch.manual_seed(0)
    forms = {
        "zip": lambda value, file: torch.save(value, file),
        "protocol 4": lambda value, file: torch.save(value, file, pickle_protocol=4),
        "stream": lambda value, file: torch.save(value, file, _use_new_zipfile_serialization=False),
        "pickle": lambda value, file: pickle.dump(value, open(file, "wb"), 4),  # noqa: SIM115
    }
    number = 0
    for title, value in values():
        for form, save in forms.items():
            path = directory / f"{number}.{'pkl' if form == 'pickle' else 'pt'}"
            try:
                save(value, path)
            except Exception:  # not every form has everything
                path.unlink(missing_ok=True)
                continue
            number += 1
            yield f"{title} {form}", path
    for number_of, make in enumerate(MODELS):
        path = directory / f"dcp{number_of}"
        dcp.save({"model": make().state_dict(), "step": 3, "note": {"a": (1, "b")}}, checkpoint_id=path, no_dist=True)
        yield f"dcp {number_of}", path
    path = directory / "arrays.npz"
    numpy.savez(path, a=numpy.ones(3), b=numpy.zeros(2))
    yield "npz", path
    inner = io.BytesIO()
    torch.save({"a": 1}, inner)
    path = directory / "inside.pt"
    torch.save({"file": inner.getvalue()}, path)
    yield "bytes of a file", path
