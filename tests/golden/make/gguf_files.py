"""Writes gguf/*.gguf with the gguf package (0.19.0; numpy is all that it needs for this), and what the package reads there
as expected.json.

usage: PYTHONPATH=FOLDER_OF_GGUF gguf_files.py OUT_DIRECTORY

Of each file expected.json has the key-values, and of each tensor its type, the shape as numpy has it, the CRC-32 of its
bytes and, where ours dequantizes it, the CRC-32 of the float32 values that the package makes of them.
every.gguf has each type; version2.gguf is the same file as version 2 (the two differ in nothing but the number);
aligned.gguf has an alignment of 64; vocabulary.gguf has no tensors.
"""
import json
import os
import sys
import zlib

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

DEQUANTIZED = (Type.Q8_0, Type.Q4_0, Type.Q4_1)
NESTED = [[1, 2], [3], [-4]]


def write(path, add, alignment=None):
    writer = GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_values(writer):
    for kind, value in (("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -32768), ("uint32", 2**32 - 1),
                        ("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63)), ("float32", 0.1),
                        ("float64", 0.1), ("bool", True), ("string", "größe 漢字 🙂\n")):
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_bool("test.no", False)
    writer.add_array("test.tokens", ["<s>", "", "▁the", "\x00"])
    writer.add_array("test.scores", [0.5, -1.5])
    writer.add_array("test.types", [1, 2, 3])
    writer.add_array("test.flags", [True, False])
    writer.add_key_value("test.bytes", bytes(range(256)), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT8)
    writer.add_key_value("test.nested", NESTED, GGUFValueType.ARRAY, sub_type=GGUFValueType.ARRAY)


def add_tensors(writer):
    random = np.random.default_rng(7)
    for dtype in (np.float32, np.float64, np.float16):
        writer.add_tensor(f"plain.{np.dtype(dtype).name}", random.standard_normal((3, 5)).astype(dtype))
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        info = np.iinfo(dtype)
        writer.add_tensor(f"plain.{np.dtype(dtype).name}",
                          np.array([[[info.min, -1, 0, 1, info.max]]], dtype=dtype).repeat(2, axis=0))
    values = random.standard_normal((4, 2, 3, 96)).astype(np.float32) * 3
    writer.add_tensor("plain.bfloat16", quantize(values[0, 0], Type.BF16), raw_dtype=Type.BF16)
    for i, kind in enumerate(DEQUANTIZED):
        writer.add_tensor(f"blk.{i}.weight", quantize(values[i], kind), raw_dtype=kind)
    writer.add_tensor("four.weight", quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0)
    # Every byte, so also scales that are NaN and infinite.
    every = np.arange(34 * 256, dtype=np.uint32)
    writer.add_tensor("odd.weight", (every * 2654435761 >> 13).astype(np.uint8).reshape(16, -1)[:, :34 * 16],
                      raw_dtype=Type.Q8_0)
    writer.add_tensor("k.weight", (every[:144 * 6] % 251).astype(np.uint8).reshape(3, 288), raw_dtype=Type.Q4_K)
    writer.add_tensor("one", np.array([7], dtype=np.float32))


def crc_of_values(values):
    nan = np.where(np.isnan(values), np.float32("nan"), values).astype(np.float32)
    return zlib.crc32(np.where(np.isnan(values), np.uint32(0x7FC00000), nan.view(np.uint32)).tobytes())


def read(path):
    reader = GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    if "test.nested" in values:  # the reader makes one list of it
        assert values["test.nested"] == [number for inner in NESTED for number in inner]
        values["test.nested"] = NESTED
    tensors = {}
    for tensor in reader.tensors:
        row = {"type": tensor.tensor_type.name, "shape": list(tensor.data.shape), "crc32": zlib.crc32(tensor.data.tobytes())}
        if tensor.tensor_type in DEQUANTIZED:
            plain = dequantize(tensor.data, tensor.tensor_type)
            row["dequantized"] = {"shape": list(plain.shape), "crc32": crc_of_values(plain)}
        tensors[tensor.name] = row
    return {"values": values, "tensors": tensors}


def add_all(writer):
    add_values(writer)
    add_tensors(writer)


def add_few(writer):
    for i in range(3):
        writer.add_tensor(f"t.{i}", np.arange(i + 1, dtype=np.float32))


os.makedirs(f"{sys.argv[1]}/gguf", exist_ok=True)
os.chdir(f"{sys.argv[1]}/gguf")
write("every.gguf", add_all)
write("aligned.gguf", add_few, 64)
write("vocabulary.gguf", add_values)
with open("every.gguf", "rb") as file:
    whole = bytearray(file.read())
whole[4] = 2
with open("version2.gguf", "wb") as file:
    file.write(whole)
expected = {name: read(name) for name in sorted(os.listdir()) if name.endswith(".gguf")}
with open("expected.json", "w", encoding="utf-8") as out:
    json.dump(expected, out, indent=1, sort_keys=True)
    out.write("\n")
