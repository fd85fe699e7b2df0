#!/usr/bin/env python3
"""The tessera command on URLs, beside an S3 server and a web server on loopback.

    urls_test.py TESSERA GOLDEN_DIRECTORY

with_server.py starts the S3 server and runs this; its variables say where it is.
"""
import contextlib
import functools
import http.server
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.parse
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from faulty_proxy import FaultyProxy  # noqa: E402
from made import write_safetensors  # noqa: E402
from with_server import signed  # noqa: E402

TESSERA = GOLDEN = None
BUCKET = "s3://tessera"


def tessera(*arguments, **environment):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment})


class Files(http.server.SimpleHTTPRequestHandler):
    """A web server that knows ranges, as most do and Python's own does not."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = pathlib.Path(self.translate_path(self.path))
        if not path.is_file() or "Range" not in self.headers:
            return super().do_GET()
        data = path.read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(data[first:last + 1])
        return None


class SignedFiles(Files):
    """Gives what is asked for by one address, whose signature covers all of it; anything else is 403."""
    address = None

    def do_GET(self):
        return super().do_GET() if self.path == self.address else self.send_error(403)

    def do_HEAD(self):
        return self.send_error(403)  # it is signed for GET


def heed_interrupts():
    """Also where whoever started the tests ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def served(server):
    """Answers in a thread of its own; gives the host and the port."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def web_server(directory, handler=Files):
    """Its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(directory)))
    with served(server) as place:
        yield f"http://{place}"


class Urls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.directory = pathlib.Path(cls.temporary.name)
        cls.dcp = cls.directory / "dcp"
        cls.file = GOLDEN / "c2_hf_cons" / "model-00001-of-00002.safetensors"
        done = tessera("convert", cls.file, cls.dcp, "--to", "dcp", "--ranks", "2")
        assert done.returncode == 0, done.stderr

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def done(self, *arguments, **environment):
        run = tessera(*arguments, **environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def fails(self, code, *arguments, **environment):
        run = tessera(*arguments, **environment)
        self.assertNotEqual(run.returncode, 0, run.stdout)
        self.assertIn(f"tessera: {code}:", run.stderr)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        return run.stderr

    def same(self, first, second):
        self.done("diff", first, second)

    def test_p05_any_kind_goes_there_and_back(self):
        """checkpoint-rows P-05, P-25, O-07, O-08"""
        single, dcp = f"{BUCKET}/kinds/model.safetensors", f"{BUCKET}/kinds/step 1"
        self.done("convert", self.file, single)
        self.done("convert", single, dcp, "--to", "dcp", "--ranks", "3")
        self.done("convert", dcp, f"{BUCKET}/kinds/model.pt")
        back = self.directory / "back.safetensors"
        self.done("convert", f"{BUCKET}/kinds/model.pt", back)
        self.same(self.file, back)
        for url in (single, dcp, f"{BUCKET}/kinds/model.pt"):
            self.same(url, self.file)
            self.assertEqual(self.done("ls", url, "--json").count('"name"'), self.done("ls", self.file, "--json").count('"name"'))
            self.done("verify", url)
            self.done("stat", url)
            self.done("map", url)
        self.done("scan", dcp)
        self.done("scan", f"{BUCKET}/kinds/model.pt")

    def test_o08_what_is_there_stays_unless_it_is_overwritten(self):
        """checkpoint-rows O-08; fault-rows O11"""
        url, dcp = f"{BUCKET}/kept/model.safetensors", f"{BUCKET}/kept/dcp"
        self.done("convert", self.file, url)
        self.done("convert", self.file, dcp, "--to", "dcp")
        for arguments in ((self.file, url), (self.file, dcp, "--to", "dcp")):
            self.fails("already_exists", "convert", *arguments)
            self.done("convert", *arguments, "--overwrite")
        self.same(url, dcp)

    def test_a_file_is_the_object_that_was_named(self):
        for kind, inside in (("torch", "model.pt"), ("safetensors", "model.safetensors")):
            place = f"{BUCKET}/named {kind}"
            self.done("convert", self.file, f"{place}/weights", "--to", kind)
            self.same(f"{place}/weights", self.file)
            self.fails("already_exists", "convert", self.file, f"{place}/weights", "--to", kind)
            for directory in (f"{place}/new/", place):  # by its slash, and by what lies in it
                self.done("convert", self.file, directory, "--to", kind)
                self.same(f"{directory.rstrip('/')}/{inside}", self.file)
        for name in ("a.bin", "a.ckpt"):
            self.done("convert", self.file, f"{BUCKET}/named/{name}")
            self.same(f"{BUCKET}/named/{name}", self.file)

    def test_an_absent_checkpoint_is_not_found(self):
        for url in (f"{BUCKET}/none", f"{BUCKET}/none.safetensors", "s3://no-such-bucket/x"):
            error = self.fails("not_found", "ls", url)
            self.assertIn(url.rsplit("/", 1)[0], error)

    def test_secrets_are_in_no_error(self):
        """fault-rows O30"""
        error = self.fails("io", "ls", f"{BUCKET}/x", AWS_SECRET_ACCESS_KEY="wrong-secret")
        self.assertNotIn("wrong-secret", error)
        self.assertIn("403", error)
        self.fails("not_found", "ls", f"{BUCKET}/x", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="",
                   AWS_EC2_METADATA_DISABLED="true")
        self.fails("invalid_argument", "ls", "s3://user:password@bucket/x")

    def test_olmos_schemes_have_variables_of_their_own(self):
        """checkpoint-rows O-07"""
        self.done("convert", self.file, f"{BUCKET}/schemes/model.safetensors")
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        for scheme, variable in (("r2", "R2_ENDPOINT_URL"), ("weka", "WEKA_ENDPOINT_URL")):
            url = f"{scheme}://tessera/schemes/model.safetensors"
            self.done("ls", url, **{variable: endpoint})
            self.assertIn(variable, self.fails("invalid_argument", "ls", url))

    def test_credentials_of_a_profile_and_of_a_process(self):
        self.done("convert", self.file, f"{BUCKET}/profiles/model.safetensors")
        keys = {"AccessKeyId": os.environ["AWS_ACCESS_KEY_ID"], "SecretAccessKey": os.environ["AWS_SECRET_ACCESS_KEY"]}
        answer = self.directory / "answer.json"
        answer.write_text(json.dumps({"Version": 1, **keys, "Expiration": "2099-01-01T00:00:00Z"}))
        config = self.directory / "config"
        config.write_text(f"[profile process]\ncredential_process = cat '{answer}'\n"
                          "[profile fails]\ncredential_process = false\n")
        secrets = self.directory / "credentials"
        secrets.write_text(f"[plain]\naws_access_key_id={keys['AccessKeyId']}\naws_secret_access_key = {keys['SecretAccessKey']}\n")
        names = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(secrets),
                 "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
        url = f"{BUCKET}/profiles/model.safetensors"
        for profile in ("process", "plain"):
            self.done("ls", url, AWS_PROFILE=profile, **names)
        self.fails("io", "ls", url, AWS_PROFILE="fails", **names)
        self.fails("not_found", "ls", url, AWS_PROFILE="absent", **names)

    def test_o06_o28_what_was_read_is_kept_beside(self):
        """checkpoint-rows O-06, fault-rows O28"""
        url, cache = f"{BUCKET}/kept", self.directory / "cache"
        self.done("convert", self.file, url, "--to", "dcp", "--ranks", "2")
        requests = []
        for name in ("first", "second"):
            told = json.loads(self.done("convert", url, self.directory / f"{name}.safetensors", "--local-cache", cache, "--json"))
            requests.append(told["requests"])
            self.same(self.directory / f"{name}.safetensors", self.file)
        self.assertLess(requests[1], requests[0])
        self.done("diff", url, self.file, "--local-cache", cache, "--cache-size", "1GB")
        block = next(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1000)
        block.write_bytes(block.read_bytes()[:-500] + bytes(500))
        self.done("diff", url, self.file, "--local-cache", cache)
        other = GOLDEN / "c2_hf_cons" / "model-00002-of-00002.safetensors"
        self.done("convert", other, url, "--to", "dcp", "--ranks", "2", "--overwrite")
        self.done("diff", url, other, "--local-cache", cache)

    def test_plain_http_stays_on_this_machine(self):
        """fault-rows O20"""
        self.fails("unsafe", "ls", f"{BUCKET}/x", AWS_ENDPOINT_URL="http://192.0.2.1:8333")

    def test_files_of_a_web_server(self):
        """checkpoint-rows O-07"""
        with web_server(self.file.parent) as url:
            self.same(f"{url}/{self.file.name}", self.file)
            self.done("verify", f"{url}/{self.file.name}")
            self.fails("unsupported", "convert", self.file, f"{url}/x.safetensors")
            self.fails("not_found", "ls", f"{url}/none.safetensors")

    def test_addresses_of_the_web_are_asked_for_as_they_are_written(self):
        directory = self.directory / "written"
        directory.mkdir()
        for name in ("a b.safetensors", "a+b(1).safetensors", "a?b#c.safetensors", "100%.safetensors"):
            shutil.copy(self.file, directory / name)
        with web_server(directory) as url:
            for written in ("a%20b.safetensors", "a+b(1).safetensors", "a%2Bb%281%29.safetensors", "a%3Fb%23c.safetensors",
                            "a%20b.safetensors?download=true", "a%20b.safetensors?path=/x/y.pt&x=a%2Fb", "100%.safetensors"):
                self.same(f"{url}/{written}", self.file)
                self.done("verify", f"{url}/{written}")
            self.done("copy", f"{url}/a%20b.safetensors?download=true", self.directory / "copied.safetensors")
        with web_server(self.directory) as url:
            self.same(f"{url}/dcp?token=5ecret", self.file)

    def test_signed_addresses_work_and_their_signature_is_in_no_error(self):
        """fault-rows O30"""
        shutil.copy(self.file, self.directory / "a+b (1).safetensors")
        (self.directory / "damaged.safetensors").write_bytes(self.file.read_bytes()[:-7])
        signature = "?X-Amz-Signature=5ecret&X-Amz-Expires=60"
        for written in ("/a+b%20(1).safetensors", "/a%2Bb%20%281%29.safetensors", "/damaged.safetensors"):
            with web_server(self.directory, type("Handler", (SignedFiles,), {"address": written + signature})) as url:
                if "damaged" not in written:
                    self.same(f"{url}{written}{signature}", self.file)
                errors = [self.fails("io", "ls", f"{url}{written}?X-Amz-Signature=5ecret2")]
                if "damaged" in written:
                    for command in ("ls", "verify"):
                        run = tessera(command, f"{url}{written}{signature}")
                        self.assertNotEqual(run.returncode, 0)
                        errors.append(run.stdout + run.stderr)
                    errors.append(tessera("convert", f"{url}{written}{signature}", self.directory / "none.pt").stderr)
                    errors.append(tessera("copy", f"{url}{written}{signature}", self.directory / "none.pt", "--json").stdout)
                for error in errors:
                    self.assertNotIn("5ecret", error)
        self.assertNotIn("5ecret", self.fails("unsupported", "ls", "az://account/x?sig=5ecret"))
        self.assertNotIn("5ecret", self.fails("unsupported", "convert", self.file, "http://127.0.0.1:1/x.pt?sig=5ecret",
                                                  "--to", "torch"))

    def test_keys_of_a_bucket_are_as_they_are_written(self):
        for name in ("a#b", "a?b", "a%23b", "a%20b", "a b", "?", "#"):
            for key in (f"{name}/model.safetensors", f"keys/model {name}.safetensors"):
                url = f"{BUCKET}/{key}"
                self.done("copy", self.file, url)
                with urllib.request.urlopen(signed("GET", os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"),
                                                   "/tessera/" + urllib.parse.quote(key))) as answer:
                    self.assertEqual(answer.read(), self.file.read_bytes(), key)
                self.same(url, self.file)
            self.done("convert", self.file, f"{BUCKET}/{name}/step", "--to", "dcp")
            self.same(f"{BUCKET}/{name}/step", self.file)

    def test_ctrl_c_ends_a_command_whose_server_says_nothing(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.safetensors"
            for command in (["copy", url, self.directory / "silent.safetensors"], ["convert", url, self.directory / "silent.pt"],
                            ["convert", "s3://b/silent.safetensors", self.directory / "silent.pt"]):
                process = subprocess.Popen([TESSERA, *command], stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts,
                                           env={**os.environ, "AWS_ENDPOINT_URL": url.rsplit("/", 1)[0]})
                connection, _ = silent.accept()
                with connection:
                    connection.recv(1)
                    process.send_signal(signal.SIGINT)
                    _, error = process.communicate(timeout=60)  # an operation has 600 s
                left = "files that are whole at the target stay; run again, the copy goes on with them"
                left = left if command[0] == "copy" else "nothing is left behind"
                self.assertEqual((process.returncode, error), (-signal.SIGINT, f"tessera: interrupted by SIGINT: {left}\n"))

    def test_a_server_may_work_for_long_before_it_has_put_parts_together(self):
        """fault-rows O19"""
        large = self.directory / "large.safetensors"
        write_safetensors(large, {"w": ("U8", [9 << 20], random.Random(1).randbytes(9 << 20))})
        with FaultyProxy(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")) as proxy:
            proxy.arm("works", 0)
            self.done("copy", large, f"{BUCKET}/works.safetensors", AWS_ENDPOINT_URL=f"http://{proxy.host}", TESSERA_HTTP_STALL="2")
            self.assertTrue(proxy.was_done)
            self.assertEqual(proxy.completes, 1)
        self.same(f"{BUCKET}/works.safetensors", large)

    def test_directories_of_a_web_server(self):
        """It lists nothing: `.metadata` or an index says which files there are."""
        with web_server(self.directory) as url:
            self.same(f"{url}/dcp", self.file)
            self.same(f"{url}/dcp/", self.file)
            self.done("verify", f"{url}/dcp")
            (self.directory / "run.ckpt").symlink_to("dcp")
            self.same(f"{url}/run.ckpt/", self.file)
            self.done("convert", self.file, self.directory / "set/pytorch_model-00001-of-00001.bin")
            names = [row["name"] for row in json.loads(self.done("ls", self.file, "--json"))]
            index = {"weight_map": dict.fromkeys(names, "pytorch_model-00001-of-00001.bin")}
            (self.directory / "set/pytorch_model.bin.index.json").write_text(json.dumps(index))
            for name in ("set", "set/pytorch_model.bin.index.json"):
                self.same(f"{url}/{name}", self.file)
            self.done("convert", f"{url}/dcp", self.directory / "from-web.pt")
            self.same(self.directory / "from-web.pt", self.file)
            self.fails("not_found", "ls", f"{url}/none")
        with web_server(GOLDEN) as url:
            for name in ("c2_hf_cons", "c2_hf_cons/model.safetensors.index.json"):
                self.same(f"{url}/{name}", GOLDEN / "c2_hf_cons")
                self.done("verify", f"{url}/{name}")

    def test_file_urls_are_paths(self):
        self.same(f"file://{self.file}", self.file)
        target = self.directory / "by-url.safetensors"
        self.done("convert", f"file://{self.dcp}", f"file://{target}")
        self.same(target, self.file)
        self.fails("invalid_argument", "ls", "file://elsewhere/x")


if __name__ == "__main__":
    TESSERA, GOLDEN = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
