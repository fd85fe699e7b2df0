#!/usr/bin/env python3
"""What the directory of --local-cache may touch, and whose blocks it takes.

    cache_test.py TESSERA

The web server is one of this file: its versions, tags and contents are what a test says.
"""
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

from urls_test import served

TESSERA = None
TIME = "Tue, 14 Nov 2023 22:13:20 GMT"
OTHER = 65534  # a user


def safetensors_of(value, count=1_500_000):
    """A file of 6 MB, two blocks, whose tensor `w` is of one value."""
    data = struct.pack("<f", value) * count
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


class Site:
    """`content(path, query)` is the bytes of a URL, or None; `etag(data)` its tag, or None."""

    def __init__(self, content, etag=lambda data: f'"{hashlib.md5(data).hexdigest()}"'):
        self.content, self.etag, self.bytes_sent = content, etag, 0

    @contextlib.contextmanager
    def serving(self):
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer(True)

            def do_HEAD(self):
                self.answer(False)

            def answer(self, has_body):
                url = urllib.parse.urlsplit(self.path)
                data = site.content(urllib.parse.unquote(url.path), dict(urllib.parse.parse_qsl(url.query)))
                if data is None:
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                sent, asked = data, re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                self.send_response(206 if asked else 200)
                if asked:
                    first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                    sent = data[first:last + 1]
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                if site.etag(data):
                    self.send_header("ETag", site.etag(data))
                self.send_header("Last-Modified", TIME)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                if has_body:
                    site.bytes_sent += len(sent)
                    self.wfile.write(sent)

        with served(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as place:
            yield f"http://{place}"


ONE, TWO = safetensors_of(1), safetensors_of(2)


def one_file(data=ONE):
    return lambda path, query: data if path.endswith("/x.safetensors") else None


def set_of_revisions(path, query):
    """?rev=1 and ?rev=2 of a set whose files have the same names, sizes and times."""
    name = path.rsplit("/", 1)[-1]
    if name.startswith("model-"):
        return {"1": ONE, "2": TWO}.get(query.get("rev"))
    if name.endswith(".index.json") or name == "set":
        index = {"metadata": {"total_size": len(ONE)}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
        return json.dumps(index).encode() if name.endswith(".index.json") else None
    return None


class Cache(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.directory = pathlib.Path(self.temporary.name)
        self.cache = self.directory / "cache"

    def run_tessera(self, *arguments, user=None):
        program = TESSERA
        if user is not None:  # who may not enter the directory of the build
            os.chmod(self.directory, 0o755)
            program = self.directory / "tessera"
            if not program.exists():
                shutil.copy(TESSERA, program)
        drop = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100,
                              cwd=self.directory, **drop)

    def value(self, url, *options, user=None):
        """The first value of `w` there, as the command tells it."""
        done = self.run_tessera("cat", url, "w[0:1]", *options, user=user)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def cached(self, url, **others):
        return self.value(url, "--local-cache", self.cache, **others)

    def files(self):
        return sorted(path for path in self.cache.rglob("*") if path.is_file())

    def blocks(self):
        return [path for path in self.files() if path.stat().st_size > 1000 and path.name.isdigit()]

    def test_what_was_read_is_not_asked_for_again(self):
        site = Site(one_file())
        with site.serving() as url:
            self.assertEqual(self.cached(f"{url}/x.safetensors"), "1")
            before = site.bytes_sent
            self.assertEqual(self.cached(f"{url}/x.safetensors"), "1")
        self.assertGreater(before, 1_000_000)
        self.assertEqual(site.bytes_sent, before)

    def test_what_others_have_there_stays(self):
        """Old, large, with names as blocks have them, and more than the cache may grow to."""
        name = hashlib.sha256(b"").hexdigest()
        names = ["run1/model.safetensors", "photos/cat.jpg", "top.txt", f"{name}/0", ".0123456789ab.tmp"]
        for at in names:
            path = self.cache / at
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(5_000_000))
            os.utime(path, (1_500_000_000, 1_500_000_000))
        with Site(one_file()).serving() as url:
            self.cached(f"{url}/x.safetensors")
            first = set(self.files())
            self.value(f"{url}/x.safetensors", "--local-cache", self.cache, "--cache-size", "5MB")
            own = {path.parent for path in self.blocks()} - {(self.cache / at).parent for at in names}
            self.assertEqual(len(own), 1)
            # In the cache's own directory, too: of another name, another form, or without a seal.
            block = own.pop()
            within = [block / "notes.txt", block / "7", block.parent / "model" / "0", block.parent / "x.tmp",
                      block.parent / ".0123456789ab.tmp.gz", block.parent / name / "0"]
            for path in within:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(bytes(5_000_000))
                os.utime(path, (1_500_000_000, 1_500_000_000))
            for other in range(4):
                site = Site(one_file(), etag=lambda _, other=other: f'"{other}"')
                with site.serving() as another:
                    self.value(f"{another}/x.safetensors", "--local-cache", self.cache, "--cache-size", "5MB")
        for path in [self.cache / at for at in names] + within:
            self.assertEqual(path.read_bytes(), bytes(5_000_000), path)
        self.assertTrue(first)
        kept = sum(path.stat().st_size for path in set(self.blocks()) - {self.cache / at for at in names} - set(within))
        self.assertLess(kept, 5_000_000)
        self.assertGreater(kept, 0)

    def test_a_query_is_part_of_the_address(self):
        for etag in (None, '"same"', 'W/"same"'):
            with self.subTest(etag=etag), Site(set_of_revisions, etag=lambda _, etag=etag: etag).serving() as url:
                for revision in ("1", "2", "1"):
                    self.assertEqual(self.cached(f"{url}/set?rev={revision}"), revision)

    def test_without_a_strong_tag_nothing_is_kept(self):
        """A file may be replaced within the second that its time tells."""
        for etag in (None, 'W/"same"'):
            with self.subTest(etag=etag):
                data = [ONE]
                site = Site(lambda path, query, data=data: data[0] if path == "/x.safetensors" else None,
                            etag=lambda _, etag=etag: etag)
                with site.serving() as url:
                    self.assertEqual(self.cached(f"{url}/x.safetensors"), "1")
                    data[0] = TWO
                    self.assertEqual(self.cached(f"{url}/x.safetensors"), "2")
                self.assertEqual(self.blocks(), [])

    def test_no_secret_of_an_address_is_written_down(self):
        with Site(set_of_revisions).serving() as url:
            self.cached(f"{url}/set?rev=1&X-Amz-Signature=5ec2e7")
        self.assertTrue(self.blocks())
        for path in self.cache.rglob("*"):
            self.assertNotIn("5ec2e7", str(path))
            if path.is_file():
                self.assertNotIn(b"5ec2e7", path.read_bytes())

    def test_a_directory_that_is_no_cache_of_ours_is_refused(self):
        with Site(one_file()).serving() as url:
            self.cached(f"{url}/x.safetensors")
            own = self.blocks()[0].parent.parent
            marker = own / "CACHEDIR.TAG"
            text = marker.read_bytes()
            self.assertTrue(text.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n"))
            before = self.files()
            for code, other in (("unsupported", text.replace(b"Version 1", b"Version 2")), ("unsafe", text[:44]),
                                ("unsafe", b""), ("unsafe", None)):
                with self.subTest(code=code, other=other):
                    if other is None:
                        marker.unlink()
                        before.remove(marker)
                    else:
                        marker.write_bytes(other)
                    done = self.run_tessera("cat", f"{url}/x.safetensors", "w[0:1]", "--local-cache", self.cache, "--json")
                    self.assertEqual(done.returncode, 3, done.stderr)
                    self.assertEqual(json.loads(done.stdout)["error"]["code"], code)
                    self.assertEqual(self.files(), before)
            shutil.rmtree(own)
            elsewhere = self.directory / "elsewhere"
            elsewhere.mkdir()
            own.symlink_to(elsewhere)
            done = self.run_tessera("cat", f"{url}/x.safetensors", "w[0:1]", "--local-cache", self.cache, "--json")
            self.assertEqual(json.loads(done.stdout)["error"]["code"], "unsafe")
            self.assertEqual(list(elsewhere.iterdir()), [])

    @unittest.skipIf(os.geteuid() != 0, "only root becomes another user")
    def test_users_who_share_a_directory_have_blocks_of_their_own(self):
        """The same tag, other bytes: whoever took another one's block would read these."""
        self.cache.mkdir()
        os.chmod(self.cache, 0o1777)
        data = [ONE]
        site = Site(lambda path, query: data[0] if path == "/x.safetensors" else None, etag=lambda _: '"same"')
        with site.serving() as url:
            self.assertEqual(self.cached(f"{url}/x.safetensors", user=OTHER), "1")
            theirs = self.blocks()
            self.assertTrue(theirs)
            data[0] = TWO
            self.assertEqual(self.cached(f"{url}/x.safetensors"), "2")
            self.assertEqual(self.cached(f"{url}/x.safetensors", user=OTHER - 1), "2")
            self.assertEqual(self.cached(f"{url}/x.safetensors", user=OTHER), "1")
        self.assertTrue(set(theirs) < set(self.blocks()))

    @unittest.skipIf(os.geteuid() != 0, "only root gives files away")
    def test_what_belongs_to_another_user_is_not_used(self):
        data = [ONE]
        site = Site(lambda path, query: data[0] if path == "/x.safetensors" else None, etag=lambda _: '"same"')
        with site.serving() as url:
            self.cached(f"{url}/x.safetensors")
            data[0] = TWO
            blocks = self.blocks()
            of_key = blocks[0].parent
            for given in (blocks, [of_key]):
                for path in given:
                    os.chown(path, OTHER, OTHER)
                self.assertEqual(self.value(f"{url}/x.safetensors", "--local-cache", self.cache, "--cache-size", "7MB"), "2")
                self.assertEqual(self.blocks(), blocks)
                for path in given:
                    os.chown(path, 0, 0)
            os.chmod(of_key, 0o777)
            self.assertEqual(self.cached(f"{url}/x.safetensors"), "2")
            os.chmod(of_key, 0o700)
            self.assertEqual(self.cached(f"{url}/x.safetensors"), "1")
            os.chown(of_key.parent, OTHER, OTHER)
            done = self.run_tessera("cat", f"{url}/x.safetensors", "w[0:1]", "--local-cache", self.cache, "--json")
            self.assertEqual(json.loads(done.stdout)["error"]["code"], "unsafe")
            self.assertEqual(self.blocks(), blocks)


if __name__ == "__main__":
    TESSERA = os.path.abspath(sys.argv.pop(1))
    unittest.main()
