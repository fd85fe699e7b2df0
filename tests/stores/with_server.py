#!/usr/bin/env python3
"""Runs a command beside an S3 server on loopback, which has an empty bucket, and returns the command's code.

    with_server.py [--server seaweedfs|moto] [--address A] -- COMMAND...

The command finds the server by AWS's variables, and its name in TESSERA_S3_SERVER. Exits with 77 where the server is not
installed. A Python test takes `Server`:

    with Server("seaweedfs") as server:
        subprocess.run(command, env=server.environment(), check=True)

The server goes with the fixture, also when that is killed; its data only when that ends.
"""
import argparse
import ctypes
import datetime
import hashlib
import hmac
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "tests"))
from ports import free_port  # noqa: E402

PROGRAMS = CHECKOUT / ".venv" / "bin"
SKIPPED = 77
BUCKET, REGION = "tessera", "us-east-1"
KEY_ID, SECRET = "testkey", "testsecret"
PATIENCE = 60  # seconds, until the server answers
PR_SET_PDEATHSIG = 1


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def distinct_ports(count):
    ports = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def seaweedfs(directory, address):
    """The command that starts it, and its ports, that of S3 first. Every service has a port of its own, or two servers of one machine
    would meet."""
    identities = directory / "identities.json"
    identities.write_text(json.dumps({"identities": [{
        "name": "test", "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}], "actions": ["Admin"]}]}))
    names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
             "filer.port.grpc", "debug.port"]
    ports = dict(zip(names, distinct_ports(len(names))))
    data = directory / "data"
    data.mkdir()
    return [str(PROGRAMS / PROGRAM["seaweedfs"]), "-logtostderr", "server", "-s3", f"-s3.config={identities}", f"-ip={address}",
            f"-ip.bind={address}", "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-dir={data}",
            "-volume.max=100", "-master.volumeSizeLimitMB=1024", f"-filer.localSocket={directory}/filer.sock",
            f"-s3.localSocket={directory}/s3.sock", *(f"-{name}={port}" for name, port in ports.items())], list(ports.values())


def moto(directory, address):
    port = free_port()
    return [str(PROGRAMS / PROGRAM["moto"]), "-H", address, "-p", str(port)], [port]


SERVERS = {"seaweedfs": seaweedfs, "moto": moto}
PROGRAM = {"seaweedfs": "weed", "moto": "moto_server"}


def signed(method, host, path, body=b""):
    """A request, signed by SigV4."""
    now = datetime.datetime.now(datetime.timezone.utc)
    date, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    body_hash = hashlib.sha256(body).hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    canonical = f"{method}\n{path}\n\nhost:{host}\nx-amz-content-sha256:{body_hash}\nx-amz-date:{stamp}\n\n{names}\n{body_hash}"
    scope = f"{date}/{REGION}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4" + SECRET.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, to_sign.encode(), "sha256").hexdigest()
    return urllib.request.Request(f"http://{host}{path}", body, method=method, headers={
        "x-amz-date": stamp, "x-amz-content-sha256": body_hash,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY_ID}/{scope}, SignedHeaders={names}, Signature={signature}"})


class Server:
    """`address`: of another network than loopback only in a namespace of the test's own."""

    def __init__(self, name="seaweedfs", address="127.0.0.1"):
        self.name, self.address = name, address

    def __enter__(self):
        self.directory = tempfile.TemporaryDirectory(prefix="tessera-s3-")
        directory = pathlib.Path(self.directory.name)
        command, self.ports = SERVERS[self.name](directory, self.address)
        self.host = f"{self.address}:{self.ports[0]}"
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory,
                                            preexec_fn=die_with_parent, env={**os.environ, "TMPDIR": str(directory)})
        try:
            self.until_done("PUT", f"/{BUCKET}")
            # A server answers before it can store anything.
            self.until_done("PUT", f"/{BUCKET}/ready", b"x")
            self.until_done("DELETE", f"/{BUCKET}/ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure):
        self.process.kill()
        self.process.wait()
        self.directory.cleanup()
        for port in self.ports:  # SeaweedFS keeps these outside of its directory
            for socket in pathlib.Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                socket.unlink()

    def until_done(self, method, path, body=b""):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                opener.open(signed(method, self.host, path, body), timeout=PATIENCE).close()
                return
            except OSError as failure:  # an HTTP status that is an error is one, too
                if self.process.poll() is not None or time.monotonic() > give_up:
                    tail = self.log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{self.name} did not come up: {failure}\n{tail}") from failure
            time.sleep(0.1)

    def environment(self):
        """This process's, with what makes the command find the server and nothing else of AWS."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        return {**kept, "TESSERA_S3_SERVER": self.name, "AWS_ENDPOINT_URL": f"http://{self.host}",
                "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION,
                "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=sorted(SERVERS), default="seaweedfs")
    parser.add_argument("--address", default="127.0.0.1", help="where it listens")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    program = PROGRAMS / PROGRAM[options.server]
    if not program.exists():
        print(f"skipped: there is no {program}", file=sys.stderr)
        return SKIPPED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with Server(options.server, options.address) as server:
        return subprocess.run(options.command, env=server.environment(), preexec_fn=die_with_parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
