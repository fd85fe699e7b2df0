#!/usr/bin/env python3
"""The tessera command on hf:// places, beside a Hub of the tests (hub_server.py).

    hub_test.py TESSERA
"""
import contextlib
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

from hub_server import Hub, Repo

TESSERA = None
COUNT = 400_000  # elements of a tensor: files have 1.6 MB


def safetensors_of(**values):
    """A file whose tensors have one value each."""
    header, data = {}, b""
    for name, value in values.items():
        content = struct.pack("<f", value) * COUNT
        header[name] = {"dtype": "F32", "shape": [COUNT], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def set_of(first, second):
    """A model as transformers saves a large one."""
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 2 * 4 * COUNT}, "weight_map": names}
    return {names["a"]: safetensors_of(a=first), names["b"]: safetensors_of(b=second),
            "model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}", "README.md": b"# A model"}


SET = set_of(1, 2)
SINGLE = {"model.safetensors": safetensors_of(w=7), "config.json": b"{}"}


class HubTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.directory = pathlib.Path(self.temporary.name)

    @contextlib.contextmanager
    def hub(self, **repos):
        hub = Hub(**repos)
        with hub.serving() as self.endpoint:
            yield hub
        self.assertEqual(hub.leaks, [], "the token was sent to another server")

    def tessera(self, *arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_"))}
        environment |= {"HOME": str(self.directory), "HF_ENDPOINT": self.endpoint, **variables}
        return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100,
                              env=environment, cwd=self.directory)

    def done(self, *arguments, **variables):
        run = self.tessera(*arguments, **variables)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def fails(self, code, *arguments, **variables):
        """The one line that it tells."""
        run = self.tessera(*arguments, **variables)
        self.assertEqual(run.returncode, 2 if code == "invalid_argument" else 3, run.stdout)
        self.assertIn(f"tessera: {code}:", run.stderr)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        for token in ("hf_good", "hf_other", "hf_none"):
            self.assertNotIn(token, run.stderr + run.stdout)
        return run.stderr

    def value(self, place, tensor="w", *options, **variables):
        return self.done("cat", place, f"{tensor}[0:1]", *options, **variables).strip()

    def names(self, place, **variables):
        return [tensor["name"] for tensor in json.loads(self.done("ls", place, "--json", **variables))]

    def test_a_list_reads_headers_only(self):
        with self.hub(m=Repo(SET)) as hub:
            self.assertEqual(self.names("hf://org/m"), ["a", "b"])
            self.assertLess(sum(hub.sent.values()), 20_000)
            self.assertLess(len(hub.requests), 12)

    def test_every_command_that_reads(self):
        with self.hub(m=Repo(SET)) as hub:
            self.assertEqual(self.value("hf://org/m", "b"), "2")
            self.assertEqual(self.value("hf://org/m/model.safetensors.index.json", "b"), "2")
            self.assertEqual(self.value("hf://org/m/model-00001-of-00002.safetensors", "a"), "1")
            self.assertIn("safetensors", self.done("stat", "hf://org/m"))
            self.done("verify", "hf://org/m")
            self.done("convert", "hf://org/m", "model.safetensors")
            self.done("diff", "hf://org/m", "model.safetensors")
            self.done("scan", "hf://org/m")
            self.done("copy", "hf://org/m", "copied")
            self.done("copy", "hf://org/m/config.json", "config.json")
            for name, data in SET.items():
                if (self.directory / "copied" / name).exists():
                    self.assertEqual((self.directory / "copied" / name).read_bytes(), data)
            self.assertEqual(sorted(path.name for path in (self.directory / "copied").iterdir()), sorted(SET))
            self.assertEqual((self.directory / "config.json").read_bytes(), b"{}")
            self.assertTrue({method for method, _ in hub.requests} <= {"GET", "HEAD"})

    def test_every_kind(self):
        with self.hub(single=Repo(SINGLE)) as hub:
            self.done("convert", "hf://org/single", "pytorch_model.bin", "--to", "torch")
            self.done("convert", "hf://org/single", "dcp", "--to", "dcp")
            dcp = {f"runs/step 1/{path.name}": path.read_bytes() for path in (self.directory / "dcp").iterdir()}
            torch = {"pytorch_model.bin": (self.directory / "pytorch_model.bin").read_bytes(), "vocab.json": b"{}"}
            parts = {"pytorch_model.bin.index.json": json.dumps({"weight_map": {"w": "part.bin"}}).encode(),
                     "part.bin": torch["pytorch_model.bin"]}
            hub.repos |= {"models/org/dcp": Repo(dcp), "models/org/torch": Repo(torch), "models/org/parts": Repo(parts),
                          "datasets/org/d": Repo(dcp)}
            for place in ("single", "dcp/runs/step 1", "dcp/runs/step 1/", "torch", "torch/pytorch_model.bin", "parts"):
                self.assertEqual(self.value(f"hf://org/{place}"), "7", place)
            self.assertEqual(self.value("hf://datasets/org/d/runs/step 1"), "7")
            self.assertIn("no checkpoint", self.fails("not_found", "ls", "hf://org/dcp"))
            self.fails("not_found", "ls", "hf://org/single/none")
            self.fails("not_found", "ls", "hf://org/single/none.safetensors")

    def test_long_trees_come_in_pages(self):
        files = {**SET, **{f"samples/{i:03}.txt": b"x" for i in range(40)}, **{f"{i:03}.md": b"x" for i in range(9)}}
        with self.hub(m=Repo(files)) as hub:
            hub.page = 4
            hub.links_at = "https://hub.example"
            self.assertEqual(self.names("hf://org/m"), ["a", "b"])
            self.assertFalse([path for _, path in hub.requests if path.endswith("/samples")])
            self.done("copy", "hf://org/m", "copied")
            self.assertEqual(len(list((self.directory / "copied/samples").iterdir())), 40)

    def test_lists_are_whole_or_an_error(self):
        files = {**SINGLE, **{f"{i}.md": b"x" for i in range(4)}}
        with self.hub(m=Repo(files)) as hub:
            hub.page = 2
            forms = ("<{}>; rel=next", '<{}>; Rel="Next"', '<{}>; title="a, b"; rel="last next"', "</a>; rel=preload, <{}>; rel=next")
            for i, hub.link in enumerate(forms):
                self.done("copy", "hf://org/m", f"copied{i}")
                self.assertEqual(len(list((self.directory / f"copied{i}").iterdir())), 6, hub.link)
            for i, hub.link in enumerate(("<{}; rel=next", '<{}>; rel="next', "<{}#top>; rel=next", "<{} x>; rel=next")):
                self.assertIn("hf://org/m", self.fails("corrupt", "copy", "hf://org/m", f"none{i}"))
                self.assertFalse((self.directory / f"none{i}").exists())

    def test_names_that_no_file_can_have_are_an_error(self):
        with self.hub(m=Repo({**SINGLE, "../x": b"x"})):
            self.assertIn("hf://org/m", self.fails("corrupt", "copy", "hf://org/m", "copied"))

    def test_tokens_are_found_and_never_told(self):
        with self.hub(private=Repo(SINGLE, readers={"hf_good"})) as hub:
            place = "hf://org/private"
            self.assertIn("set HF_TOKEN", self.fails("not_found", "ls", place))
            self.assertIn("token of HF_TOKEN may not read it", self.fails("not_found", "ls", place, HF_TOKEN="hf_other"))
            self.assertIn("refuses the token of HF_TOKEN", self.fails("io", "ls", place, HF_TOKEN="hf_none"))
            self.fails("not_found", "ls", place, HF_TOKEN="hf_good", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
            self.assertEqual(self.value(place, HF_TOKEN="hf_good"), "7")
            file = self.directory / ".cache/huggingface/token"
            file.parent.mkdir(parents=True)
            file.write_text("hf_good\n")
            self.assertEqual(self.value(place), "7")
            file.write_text("hf_none\n")
            self.assertIn(str(file), self.fails("io", "ls", place))
            home = self.directory / "home"
            home.mkdir()
            (home / "token").write_text("hf_good")
            self.assertEqual(self.value(place, HF_HOME=str(home)), "7")
            self.assertEqual(self.value(place, HF_TOKEN_PATH=str(home / "token")), "7")
            before = len(hub.requests)
            self.fails("unsupported", "ls", place, HF_HUB_OFFLINE="1")
            self.assertEqual(len(hub.requests), before)

    def test_gated_models_name_the_page(self):
        with self.hub(gated=Repo(SINGLE, readers={"hf_good"}, is_gated=True)):
            page = f"{self.endpoint}/org/gated"
            for variables in ({}, {"HF_TOKEN": "hf_other"}):
                told = self.fails("io", "ls", "hf://org/gated", **variables)
                self.assertIn("is gated", told)
                self.assertIn(page, told)
            self.assertEqual(self.value("hf://org/gated", HF_TOKEN="hf_good"), "7")

    def test_what_the_hub_forbids(self):
        with self.hub(m=Repo(SINGLE)) as hub:
            hub.refusal = 403, "Access to this resource is disabled."
            self.assertIn("has disabled the model", self.fails("io", "ls", "hf://org/m"))
            hub.refusal = 403, "Forbidden: this token lacks a scope"
            self.assertIn("set HF_TOKEN", self.fails("io", "ls", "hf://org/m"))
            self.assertIn("token of HF_TOKEN lacks the permission", self.fails("io", "ls", "hf://org/m", HF_TOKEN="hf_good"))

    def test_revisions(self):
        repo = Repo({"model.safetensors": safetensors_of(w=1)})
        first = repo.refs["main"]
        repo.push({"model.safetensors": safetensors_of(w=2)}, "v2.0")
        repo.push({"model.safetensors": safetensors_of(w=3)}, "refs/pr/1")
        with self.hub(m=repo):
            for revision, value in {"": 1, "@main": 1, f"@{first}": 1, "@v2.0": 2, "@refs%2Fpr%2F1": 3, "@refs/pr/1": 3}.items():
                self.assertEqual(self.value(f"hf://org/m{revision}"), str(value), revision)
                self.assertEqual(self.value(f"hf://org/m{revision}/model.safetensors"), str(value), revision)
            self.assertIn("no revision 'v3'", self.fails("not_found", "ls", "hf://org/m@v3"))

    def test_a_push_during_a_read_is_not_seen(self):
        repo = Repo(SET)
        with self.hub(m=repo) as hub:
            hub.before_tree = lambda: repo.push(set_of(8, 9))
            self.done("convert", "hf://org/m", "old.safetensors")
            hub.before_tree = lambda: None
            self.done("convert", "hf://org/m", "new.safetensors")
        for file, values in {"old": "12", "new": "89"}.items():
            self.assertEqual(self.value(f"{file}.safetensors", "a") + self.value(f"{file}.safetensors", "b"), values)

    def test_signed_addresses_are_kept_until_they_are_refused(self):
        with self.hub(m=Repo(SET)) as hub:
            self.done("convert", "hf://org/m", "long.safetensors")
            asked = [path for method, path in hub.requests if method == "HEAD" and path.endswith("01-of-00002.safetensors")]
            self.assertEqual(len(asked), 1)
            hub.signature_lives = 1
            self.done("convert", "hf://org/m", "short.safetensors")
            hub.signature_lives = 0
            self.assertIn("refuses the address", self.fails("io", "ls", "hf://org/m/model-00001-of-00002.safetensors"))
        self.assertEqual((self.directory / "long.safetensors").read_bytes(), (self.directory / "short.safetensors").read_bytes())

    def test_a_busy_hub_is_waited_for(self):
        with self.hub(m=Repo(SINGLE)) as hub:
            hub.busy = 2
            self.assertEqual(self.value("hf://org/m"), "7")
            self.assertEqual([path for _, path in hub.requests].count(hub.requests[0][1]), 3)
            hub.busy = 10**9
            self.assertIn("429: it has had too many requests", self.fails("io", "ls", "hf://org/m", TESSERA_HTTP_DEADLINE="3"))

    def test_names_are_what_they_are(self):
        names = ["a b.safetensors", "50%.safetensors", "c#1.safetensors", "d?e=f.safetensors", "g%20h.safetensors",
                 "i@j/k&l+m.safetensors", "\u00fc.safetensors"]
        with self.hub(m=Repo({name: safetensors_of(w=i) for i, name in enumerate(names)})):
            for i, name in enumerate(names):
                self.assertEqual(self.value(f"hf://org/m/{name}"), str(i), name)

    def test_nothing_is_written(self):
        with self.hub(m=Repo(SINGLE)) as hub:
            self.done("convert", "hf://org/m", "model.safetensors")
            before = len(hub.requests)
            for target in ("hf://org/m/new.safetensors", "hf://org/m/new", "hf://org/m", "hf://org/m/new/"):
                self.assertIn("read only", self.fails("unsupported", "convert", "model.safetensors", target, "--to", "safetensors"))
                self.assertIn("read only", self.fails("unsupported", "copy", "model.safetensors", target))
            self.done("convert", "model.safetensors", "dcp", "--to", "dcp")
            for target in ("hf://org/m/new", "hf://org/m"):
                self.assertIn("read only", self.fails("unsupported", "copy", "dcp", target))
                self.assertIn("read only", self.fails("unsupported", "convert", "dcp", target, "--to", "dcp"))
            for options in ((), ("--delete",), ("--uploads",)):
                self.fails("unsupported", "gc", "hf://org/m", *options)
                self.fails("unsupported", "gc", f"{self.endpoint}/org/m/", *options)
            self.assertEqual(len(hub.requests), before)

    def test_other_places_are_refused(self):
        with self.hub() as hub:
            for place in ("hf://gpt2", "hf://", "hf://org/m@"):
                self.assertIn("hf://ORG/MODEL", self.fails("invalid_argument", "ls", place))
            self.assertEqual(hub.requests, [])
            self.assertIn("set HF_TOKEN", self.fails("not_found", "ls", "hf://org/none"))

    def test_a_local_cache_knows_the_bytes(self):
        repo = Repo(SINGLE)
        weights = hashlib.sha256(SINGLE["model.safetensors"]).hexdigest()
        cache = ("--local-cache", "cache")
        with self.hub(m=repo) as hub:
            self.assertEqual(self.value("hf://org/m", "w", *cache), "7")
            before = hub.sent[weights]
            self.assertEqual(self.value("hf://org/m", "w", *cache), "7")
            repo.push({**SINGLE, "README.md": b"# New"})
            self.assertEqual(self.value("hf://org/m", "w", *cache), "7")
            self.assertEqual(hub.sent[weights], before)
            repo.push({**SINGLE, "model.safetensors": safetensors_of(w=8)})
            self.assertEqual(self.value("hf://org/m", "w", *cache), "8")


if __name__ == "__main__":
    TESSERA = os.path.abspath(sys.argv.pop(1))
    unittest.main()
