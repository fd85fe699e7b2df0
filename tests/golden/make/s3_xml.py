"""What S3 servers say in XML, for src/storage/s3/xml_test.cpp and fuzz/s3_xml.cpp: SeaweedFS and moto answer boto3.

    .venv/bin/python tests/golden/make/s3_xml.py

Dates, tokens and ids of uploads differ from run to run.
"""
import pathlib
import sys

import boto3
import botocore.config
import botocore.exceptions

HERE = pathlib.Path(__file__).resolve()
OUT = HERE.parents[1] / "s3_xml"
sys.path.insert(0, str(HERE.parents[2] / "stores"))
from with_server import BUCKET, KEY_ID, REGION, SECRET, Server  # noqa: E402

NAMES = ["a b", "a+b", "dir/one", "dir/two", "odd%25&<'\">", "ü/日本", "z"]


def record(server):
    client = boto3.client("s3", endpoint_url=f"http://{server.host}", aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET,
                          region_name=REGION, config=botocore.config.Config(s3={"addressing_style": "path"}))
    seen = {}
    client.meta.events.register("before-parse.s3", lambda response_dict, **_: seen.update(body=response_dict["body"]))

    def keep(name, call, **arguments):
        try:
            answer = call(Bucket=BUCKET, **arguments)
        except botocore.exceptions.ClientError:
            answer = None
        (OUT / f"{server.name}-{name}.xml").write_bytes(seen["body"])
        return answer

    for name in NAMES:
        client.put_object(Bucket=BUCKET, Key=name, Body=name.encode())
    keep("listing", client.list_objects_v2, EncodingType="url")
    keep("page", client.list_objects_v2, EncodingType="url", MaxKeys=3)
    keep("level", client.list_objects_v2, EncodingType="url", Delimiter="/")
    keep("empty", client.list_objects_v2, EncodingType="url", Prefix="none/")
    upload = keep("upload", client.create_multipart_upload, Key="copy of it")["UploadId"]
    source = {"Bucket": BUCKET, "Key": "z"}
    keep("copied_part", client.upload_part_copy, Key="copy of it", UploadId=upload, PartNumber=1, CopySource=source)
    client.upload_part(Bucket=BUCKET, Key="copy of it", UploadId=upload, PartNumber=10000, Body=b"mark")
    keep("parts", client.list_parts, Key="copy of it", UploadId=upload)
    keep("parts_page", client.list_parts, Key="copy of it", UploadId=upload, MaxParts=1)
    client.create_multipart_upload(Bucket=BUCKET, Key="copy of it")
    keep("uploads", client.list_multipart_uploads)
    keep("uploads_page", client.list_multipart_uploads, MaxUploads=1)
    keep("copied", client.copy_object, Key="copied", CopySource=source)
    keep("no_key", client.get_object, Key="none")
    keep("no_upload", client.abort_multipart_upload, Key="none", UploadId="0" * 32)


def main():
    OUT.mkdir(exist_ok=True)
    for name in ("seaweedfs", "moto"):
        with Server(name) as server:
            record(server)


if __name__ == "__main__":
    main()
