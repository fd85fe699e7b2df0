"""Writes tests/golden/quantized: a set of safetensors with quantized weights, and expected.json with what they
stand for (CRC-32 of the elements, every NaN made the same), computed here by torch from the definitions of the formats (PyTorch's own reader is wrong about MXFP4, OQ-12).

    python quantized.py OUT

Scales lie in another file than their weights; block rows and columns are cut short at the end. Needs transformers (5.24.0),
whose own function says which way around experts are.
"""
import json
import os
import sys
import zlib

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.manual_seed(7)
BLOCK = 128
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def every_byte(dtype, shape):
    count = shape[0] * shape[1]
    return (torch.arange(count) % 256).to(torch.uint8).view(dtype).reshape(shape)


def block_scaled(weight, scale):
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * wide


def mxfp4(blocks, scales):
    values = torch.stack([FLOAT4[(blocks & 15).long()], FLOAT4[(blocks >> 4).long()]], -1).flatten(-2)
    powers = scales.view(torch.float8_e8m0fnu).float()  # 255 is NaN
    return (values * powers[..., None]).flatten(-2)


weights, scales, plain = {}, {}, {}
for name, dtype in (("a", torch.float8_e4m3fn), ("b", torch.float8_e5m2), ("c", torch.float8_e4m3fnuz),
                    ("d", torch.float8_e5m2fnuz)):
    shape = {"a": (130, 140), "b": (1, 300), "c": (300, 1), "d": (2, 129)}[name]
    weights[f"{name}.weight"] = every_byte(dtype, shape)
    scale = torch.rand((shape[0] + BLOCK - 1) // BLOCK, (shape[1] + BLOCK - 1) // BLOCK) + 0.5
    scales[f"{name}.weight_scale_inv"] = scale.to({"a": torch.float32, "b": torch.bfloat16}.get(name, torch.float16))
    plain[f"{name}.weight"] = block_scaled(weights[f"{name}.weight"], scales[f"{name}.weight_scale_inv"])
weights["e.weight"] = every_byte(torch.float8_e4m3fn, (2, 129))
scales["e.weight_scale_inv"] = torch.tensor([[120, 140]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
plain["e.weight"] = block_scaled(weights["e.weight"], scales["e.weight_scale_inv"])
weights["experts_blocks"] = torch.randint(0, 256, (2, 3, 4, 16), dtype=torch.uint8)
scales["experts_scales"] = torch.tensor([0, 1, 100, 127, 128, 254, 255, 120] * 3, dtype=torch.uint8).reshape(2, 3, 4)
plain["experts"] = mxfp4(weights["experts_blocks"], scales["experts_scales"]).transpose(1, 2).contiguous()
# transformers takes the scale 255 for a power of two; the format's definition is NaN.
theirs = convert_moe_packed_tensors(weights["experts_blocks"], scales["experts_scales"], dtype=torch.float32)
assert torch.equal(theirs[~plain["experts"].isnan()], plain["experts"][~plain["experts"].isnan()])
weights["n"] = plain["n"] = torch.ones(3)
weights["lone.weight"] = plain["lone.weight"] = torch.ones(2, 2).to(torch.float8_e4m3fn)

os.makedirs(f"{sys.argv[1]}/quantized", exist_ok=True)
os.chdir(f"{sys.argv[1]}/quantized")
files = {"model-00001-of-00002.safetensors": weights, "model-00002-of-00002.safetensors": scales}
for file, tensors in files.items():
    save_file(tensors, file)
index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
with open("model.safetensors.index.json", "w", encoding="utf-8") as out:
    json.dump(index, out, indent=2)
expected = {}
for dtype, bits, nan in (("float32", torch.int32, 0x7FC00000), ("bfloat16", torch.int16, 0x7FC0),
                         ("float16", torch.int16, 0x7E00)):
    for name, value in plain.items():
        if name in ("n", "lone.weight"):
            continue
        value = value.to(getattr(torch, dtype))
        raw = torch.where(value.isnan(), torch.tensor(nan, dtype=bits), value.view(bits)).contiguous()
        expected.setdefault(dtype, {})[name] = {"shape": list(value.shape), "crc32": zlib.crc32(raw.numpy().tobytes())}
with open("expected.json", "w", encoding="utf-8") as out:
    json.dump(expected, out, indent=1)
    out.write("\n")
