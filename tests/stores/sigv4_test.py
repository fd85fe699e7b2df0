#!/usr/bin/env python3
"""Our signatures are botocore's, for requests drawn from seeds.

    sigv4_test.py SIGN_PROGRAM [FIRST_SEED COUNT]

Exits with 77 where botocore is not installed.
"""
import datetime
import hashlib
import json
import random
import subprocess
import sys
import unittest.mock
import urllib.parse

try:
    import botocore.auth
    import botocore.awsrequest
    import botocore.credentials
except ImportError:
    print("skipped: there is no botocore", file=sys.stderr)
    sys.exit(77)

ALPHABET = ["a", "Z", "0", "-", ".", "_", "~", " ", "+", "%", "%41", "&", "=", "?", "#", ":", "@", "$", ",", ";", "'", '"', "*", "!", "(",
            "[", "|", "\\", "^", "<", "\t", "ü", "日", "😀"]
HEADER_VALUES = ["", "x", "bytes=0-9", " two  blanks ", "a,b", "*", "\"etag\"", "/bucket/a%20key", "tab\tin it", "a=b;c"]


def drawn_text(rng, most):
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, most)))


def encoded(text, safe=""):
    return urllib.parse.quote(text, safe=safe + "-._~")


def drawn(seed):
    rng = random.Random(seed)
    key = "/".join(drawn_text(rng, 8) for _ in range(rng.randint(1, 4)))
    query = [f"{encoded(drawn_text(rng, 4) or 'x')}" + rng.choice(["", "=", "=" + encoded(drawn_text(rng, 6))])
             for _ in range(rng.choice([0, 0, 1, 2, 5]))]
    query += rng.sample(query, k=min(len(query), rng.randint(0, 1)))  # a name twice
    rng.shuffle(query)
    scheme = rng.choice(["https", "http"])
    host = rng.choice(["bucket.s3.eu-west-1.amazonaws.com", "127.0.0.1:9000", "h:443", "h:80", "[::1]:8080"])
    names = rng.sample(["Range", "If-Match", "x-amz-meta-A", "X-Amz-Copy-Source", "content-type", "x-amz-checksum-crc32", "x-amz-acl"],
                       k=rng.randint(0, 4))
    service = rng.choice(["s3", "s3", "s3", "sts"])
    path = "/" + encoded(key, "/") if service == "s3" else "/"
    body = rng.choice([b"", b"body", rng.randbytes(100)])
    return {"method": rng.choice(["GET", "PUT", "POST", "HEAD", "DELETE"]),
            "url": f"{scheme}://{host}{path}" + ("?" + "&".join(query) if query else ""),
            "headers": [[name, rng.choice(HEADER_VALUES)] for name in names],
            "key_id": "AKIA" + str(seed), "secret": drawn_text(rng, 20) or "s", "token": rng.choice(["", "to/ken+="]),
            "region": rng.choice(["us-east-1", "auto"]), "service": service, "time": rng.randrange(2**32),
            "hash": hashlib.sha256(body).hexdigest(), "body": body}


def of_botocore(case):
    request = botocore.awsrequest.AWSRequest(case["method"], case["url"], data=case["body"])
    for name, value in case["headers"]:
        request.headers.add_header(name, value)
    credentials = botocore.credentials.Credentials(case["key_id"], case["secret"], case["token"] or None)
    kind = botocore.auth.S3SigV4Auth if case["service"] == "s3" else botocore.auth.SigV4Auth
    now = datetime.datetime.fromtimestamp(case["time"], datetime.timezone.utc)
    with unittest.mock.patch("botocore.auth.get_current_datetime", lambda *_, **__: now):
        kind(credentials, case["service"], case["region"]).add_auth(request)
    return request.headers["Authorization"]


def parts_of(authorization):
    algorithm, rest = authorization.split(" ", 1)
    return algorithm, dict(part.strip().split("=", 1) for part in rest.split(","))


def main():
    program = sys.argv[1]
    first, count = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 2 else (0, 400)
    requests = [drawn(seed) for seed in range(first, first + count)]
    lines = "".join(json.dumps({name: value for name, value in request.items() if name != "body"}) + "\n" for request in requests)
    output = subprocess.run([program], input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert len(output) == count, f"{len(output)} of {count} answers"
    wrong = 0
    for seed, (request, line) in enumerate(zip(requests, output), first):
        ours, theirs = parts_of(dict(json.loads(line))["authorization"]), parts_of(of_botocore(request))
        if ours != theirs:
            wrong += 1
            print(f"seed {seed}: {request['method']} {request['url']} {request['headers']}\n  ours   {ours}\n  theirs {theirs}", file=sys.stderr)
    print(f"{count} requests, {wrong} signed in another way than by botocore")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
