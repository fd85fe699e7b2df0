"""Copies a directory to or from a bucket by pyarrow's S3FileSystem, files and their parts in threads.

    arrow_store.py put|get DIRECTORY BUCKET/PREFIX

Prints "seconds N" without imports. The server is that of AWS_ENDPOINT_URL.
"""
import os
import pathlib
import sys
import time

import pyarrow.fs

what, directory, prefix = sys.argv[1:]
scheme, host = os.environ["AWS_ENDPOINT_URL"].split("://")
remote = pyarrow.fs.S3FileSystem(endpoint_override=host, scheme=scheme, region=os.environ["AWS_REGION"], background_writes=True)
local = pyarrow.fs.LocalFileSystem()
begin = time.perf_counter()
if what == "put":
    pyarrow.fs.copy_files(directory, prefix, source_filesystem=local, destination_filesystem=remote, chunk_size=8 << 20, use_threads=True)
else:
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    pyarrow.fs.copy_files(prefix, directory, source_filesystem=remote, destination_filesystem=local, chunk_size=8 << 20, use_threads=True)
print("seconds", time.perf_counter() - begin)
