#!/usr/bin/env python3
"""A bucket that keeps old versions: what is current counts (fault-rows O25).

    versions_test.py TESSERA GOLDEN_DIRECTORY

with_server.py starts the server, moto, and runs this.
"""
import os
import pathlib
import subprocess
import sys
import unittest

import boto3
from botocore.config import Config

TESSERA = GOLDEN = None
BUCKET, URL = "versions", "s3://versions/run/step1"


def tessera(*arguments):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)


class Versions(unittest.TestCase):
    def done(self, *arguments):
        run = tessera(*arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def test_o25_what_is_current_counts(self):
        s3 = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
        s3.create_bucket(Bucket=BUCKET)
        s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        files = [GOLDEN / "c2_hf_cons" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for number, file in enumerate(files):
            self.done("convert", file, URL, "--to", "dcp", "--ranks", "2", *(["--overwrite"] if number else []))
            self.done("diff", file, URL)
        # Readers may have the replaced one open, so it goes with the next save, or here.
        self.assertIn("3 left", self.done("gc", "s3://versions", "--older-than", "0s", "--delete"))
        self.assertIn("0 left", self.done("gc", "s3://versions", "--older-than", "0s"))
        self.done("diff", files[1], URL)
        marker = s3.delete_object(Bucket=BUCKET, Key="run/step1/.metadata")
        self.assertTrue(marker["DeleteMarker"])
        gone = tessera("ls", URL)
        self.assertEqual(gone.returncode, 3, gone.stdout)
        self.done("gc", "s3://versions", "--older-than", "0s", "--delete")
        self.done("convert", files[0], URL, "--to", "dcp")
        self.done("diff", files[0], URL)
        versions = s3.list_object_versions(Bucket=BUCKET, Prefix="run/step1/.metadata")
        self.assertEqual(len(versions["Versions"]), 3)


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2])
    unittest.main(argv=sys.argv[:1])
