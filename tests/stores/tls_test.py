#!/usr/bin/env python3
"""Certificates that nobody vouches for, of another host and out of date are refused (fault-rows O20).

    tls_test.py TESSERA GOLDEN_FILE
"""
import contextlib
import datetime
import functools
import ipaddress
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import unittest
from http.server import ThreadingHTTPServer

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import urls_test

TESSERA = GOLDEN = None
DAY = datetime.timedelta(days=1)


def write_certificate(directory, address, begins):
    """Signed by itself; for two days."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(begins + 2 * DAY)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True).sign(key, hashes.SHA256()))
    path = directory / f"{address}-{begins:%d}.pem"
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                       serialization.NoEncryption()) + made.public_bytes(serialization.Encoding.PEM))
    return path


class SentOn(urls_test.Files):
    """Sends every request on but those for digests."""
    place = None

    def do_GET(self):
        if self.path.endswith(".tessera.json"):
            return self.send_error(404)
        self.send_response(307)
        self.send_header("Location", self.place)
        self.send_header("Content-Length", "0")
        return self.end_headers()

    do_HEAD = do_GET


def sent_on_to(url):
    return type("Handler", (SentOn,), {"place": url})


@contextlib.contextmanager
def https_server(directory, certificate, handler=urls_test.Files):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(directory)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # clients that leave
    with urls_test.served(server) as place:
        yield f"https://{place}"


class Tls(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.work = pathlib.Path(temporary.name)

    def ls(self, certificate, authority=None, variable="TESSERA_CA_FILE"):
        env = {**os.environ, **({variable: str(authority)} if authority else {})}
        with https_server(GOLDEN.parent, certificate) as url:
            return subprocess.run([TESSERA, "ls", f"{url}/{GOLDEN.name}"], env=env, capture_output=True, text=True, check=False)

    def test_o20_only_a_certificate_that_is_vouched_for_is_taken(self):
        now = datetime.datetime.now(datetime.timezone.utc)
        good = write_certificate(self.work, "127.0.0.1", now - DAY)
        other_host = write_certificate(self.work, "127.0.0.9", now - DAY)
        expired = write_certificate(self.work, "127.0.0.1", now - 5 * DAY)
        taken = self.ls(good, good)
        self.assertEqual(taken.returncode, 0, taken.stderr)
        for certificate, authority in ((good, None), (good, other_host), (other_host, other_host), (expired, expired)):
            refused = self.ls(certificate, authority)
            self.assertEqual(refused.returncode, 3, refused.stdout)
            self.assertRegex(refused.stderr, "^tessera: unsafe: .*certificate")

    def test_o20_what_vouches_for_buckets_does_not_for_other_addresses(self):
        """Nor does it keep these from being read."""
        good = write_certificate(self.work, "127.0.0.1", datetime.datetime.now(datetime.timezone.utc) - DAY)
        refused = self.ls(good, good, "AWS_CA_BUNDLE")
        self.assertEqual(refused.returncode, 3, refused.stdout)
        self.assertRegex(refused.stderr, "^tessera: unsafe: .*certificate")
        for authority, said in ((good, "not_found"), (None, "unsafe: .*certificate")):
            with https_server(self.work, good) as url:
                env = {**os.environ, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
                       **({"AWS_CA_BUNDLE": str(authority)} if authority else {})}
                run = subprocess.run([TESSERA, "ls", "s3://b/x.safetensors"], env=env, capture_output=True, text=True, check=False)
            self.assertRegex(run.stderr, f"^tessera: {said}")

    def test_o20_no_redirect_leads_from_https_to_http_wherever_it_stands(self):
        """The first of two leads to https, where nobody sees that the second leads back."""
        good = write_certificate(self.work, "127.0.0.1", datetime.datetime.now(datetime.timezone.utc) - DAY)
        with urls_test.web_server(GOLDEN.parent) as plain:
            for end, code in ((f"{plain}/{GOLDEN.name}", 3), (None, 0)):
                with https_server(GOLDEN.parent, good) as real:
                    with https_server(self.work, good, sent_on_to(end or f"{real}/{GOLDEN.name}")) as middle:
                        with urls_test.web_server(self.work, sent_on_to(f"{middle}/y")) as front:
                            run = subprocess.run([TESSERA, "ls", f"{front}/x.safetensors"], capture_output=True, text=True,
                                                 env={**os.environ, "TESSERA_CA_FILE": str(good)}, check=False)
                self.assertEqual(run.returncode, code, run.stderr)
                if end:
                    self.assertRegex(run.stderr, "^tessera: unsafe: .*plain http")

    def test_o20_a_file_of_authorities_that_is_not_there_is_told(self):
        good = write_certificate(self.work, "127.0.0.1", datetime.datetime.now(datetime.timezone.utc) - DAY)
        refused = self.ls(good, self.work / "absent.pem")
        self.assertEqual(refused.returncode, 3, refused.stdout)
        self.assertIn("absent.pem", refused.stderr)


if __name__ == "__main__":
    TESSERA, GOLDEN = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=sys.argv[:1])
