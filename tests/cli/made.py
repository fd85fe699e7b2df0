"""Files made by hand for tests of the command."""
import json


def write_safetensors(path, tensors, metadata=None):
    """`tensors`: name -> (dtype, shape, bytes). Returns the path."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for key, (dtype, shape, content) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path
