"""Writes zip64.json: every byte but the data of an archive with sizes and offsets around 2^32 - 1.

PyTorch's own writer writes it through a Python object that keeps small writes and counts large ones;
the data are storages mapped from a sparse file, so this needs neither memory nor disk.
usage: zip64.py OUT.json
"""
import json
import sys
import tempfile

import torch

RECORDS = [("data.pkl", b"abc"), ("data/0", 2**32 - 2), ("data/1", 2**32 - 1), ("data/2", 16),
           ("data/3", 0), ("data/4", 5 * 2**30)]


class Recorder:
    def __init__(self):
        self.position, self.writes = 0, []

    def write(self, data):
        if len(data) < 1 << 20:
            self.writes.append([self.position, bytes(data).hex()])
        self.position += len(data)
        return len(data)


with tempfile.NamedTemporaryFile() as sparse:
    sparse.truncate(5 * 2**30)
    recorder = Recorder()
    writer = torch._C.PyTorchFileWriter(recorder)
    for name, data in RECORDS:
        if isinstance(data, int):
            data = torch.UntypedStorage.from_file(sparse.name, shared=True, nbytes=data)
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()

records = [[name, data if isinstance(data, int) else len(data)] for name, data in RECORDS]
records += [["version", 2], ["byteorder", 6], [".data/serialization_id", 40]]
with open(sys.argv[1], "w") as out:
    json.dump({"records": records, "size": recorder.position, "writes": recorder.writes}, out, indent=1)
    out.write("\n")
