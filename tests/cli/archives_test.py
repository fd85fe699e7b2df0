#!/usr/bin/env python3
"""Archives of TorchScript and torch.export that are damaged or hostile, as the tessera command takes them.

    archives_test.py TESSERA GOLDEN_DIRECTORY
"""
import json
import os
import pathlib
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile

TESSERA = GOLDEN = None
MEMORY = 2 << 30  # bytes of addresses that a refusal may take
GIGABYTE = 1 << 30


def tessera(*arguments):
    return subprocess.run([TESSERA, *map(str, arguments)], capture_output=True, text=True, check=False)


# Opcodes of pickle protocol 2, as TorchScript writes it.

def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def tensor(key="0", size=2, storage="FloatStorage"):
    return (b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu")
            + b"K\x02tQK\x00K" + bytes([size]) + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR")


def module(attributes, name="Module", place="__torch__", after=b""):
    """NEWOBJ of the class, and its attributes as pairs of opcodes; `after` stands behind the object and before its state."""
    return (f"c{place}\n{name}\n".encode() + b")\x81" + after + b"}("
            + b"".join((text(key) if isinstance(key, str) else key) + value for key, value in attributes) + b"ub")


def pickled(value):
    return b"\x80\x02" + value + b"."


class HostileArchives(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="tessera-archives-"))

    def tearDown(self):
        shutil.rmtree(self.work)

    def archive(self, records, name="m.pt"):
        path = self.work / name
        with zipfile.ZipFile(path, "w") as out:
            for record, content in records.items():
                if isinstance(content, pathlib.Path):
                    out.write(content, f"m/{record}", zipfile.ZIP_DEFLATED)
                else:
                    out.writestr(f"m/{record}", content)
        return path

    def file(self, content, size=None):
        """What becomes a deflated record; with a size it has zeros at its end."""
        path = self.work / "record"
        path.write_bytes(content)
        os.truncate(path, len(content) if size is None else size)
        return path

    def script(self, data, others=None):
        """An archive with this module; two floats are its storage 0."""
        records = {"data.pkl": pickled(data), "data/0": b"\0\0\x80?\0\0\0@", "constants.pkl": pickled(b")"), "version": b"6\n"}
        return self.archive(records | (others or {}))

    def refused(self, code, path, *said):
        for verb in ("ls", "verify", "convert"):
            target = [self.work / "out.safetensors"] if verb == "convert" else []
            done = subprocess.run([TESSERA, verb, path, *target], capture_output=True, text=True, check=False,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)))
            self.assertEqual(done.returncode, 1 if verb == "verify" else 3, (verb, done.stdout, done.stderr))
            self.assertTrue(done.stderr.startswith(f"tessera: {code}: "), done.stderr)
            self.assertIn(path.name, done.stderr)
            for part in said:
                self.assertIn(part, done.stderr)
            self.assertEqual(list(self.work.glob("out*")), [])

    def names(self, path):
        done = tessera("ls", path, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return [row["name"] for row in json.loads(done.stdout)]

    def test_a01_a_module_that_is_an_attribute_of_itself(self):
        self.refused("unsupported", self.script(module([("me", b"h\x01")], after=b"q\x01")), "itself")
        inner = module([("outer", b"h\x01")])
        self.refused("unsupported", self.script(module([("inner", inner)], after=b"q\x01")), "itself")

    def test_a02_two_attributes_of_one_name(self):
        self.refused("conflict", self.script(module([("a.b", tensor()), ("a", module([("b", tensor())]))])), "a.b")
        self.refused("corrupt", self.script(module([("w", b"K\x07"), ("w", tensor())])), "a key twice")

    def test_a03_modules_inside_one_another_without_end(self):
        deep = tensor()
        for _ in range(1500):
            deep = module([("m", deep)])
        self.refused("limit", self.script(deep))
        # In the pickle, not in the modules.
        self.refused("limit", self.script(module([("w", b"]" * 100_000 + b"a" * 99_999)])))

    def test_a04_a_module_in_very_many_places(self):
        wide = module([("w", tensor())], after=b"q\x00")
        for level in range(1, 40):
            wide = module([("a", wide), ("b", b"h" + bytes([level - 1]))], after=b"q" + bytes([level]))
        self.refused("limit", self.script(wide), "names")

    def test_a05_code_that_is_a_gigabyte_when_it_is_inflated(self):
        path = self.script(module([("w", tensor())]), {"code/__torch__.py": self.file(b"class Module(Module):\n", GIGABYTE)})
        self.assertLess(path.stat().st_size, GIGABYTE // 500)
        self.refused("limit", path, "code/__torch__.py")

    def test_a06_pickles_that_are_a_gigabyte_when_they_are_inflated(self):
        self.refused("limit", self.script(b"N", {"constants.pkl": self.file(b"\x80\x02", GIGABYTE + 1)}), "constants.pkl")

    def test_a07_classes_without_code_and_code_without_classes(self):
        for code in (b"", b"class Modul", b"class Other(Module):\n  __parameters__ = []\n  __buffers__ = []\n",
                     b"class Module(Module):\n  __parameters__ = [\"w", b"\xff\xfe\0class", b"class Module(Module):\n" * 1000):
            self.assertEqual(self.names(self.script(module([("w", tensor())]), {"code/__torch__.py": code})), ["w"])

    def test_a08_constants_that_are_no_tuple_or_missing(self):
        for constants in (b"N", b"}", b"K\x07", b"]"):
            self.assertEqual(self.names(self.script(module([("w", tensor())]), {"constants.pkl": pickled(constants)})), ["w"])
        for constants in (b"", b"\x80", b"\x80\x02", b"junk", b"\x80\x02)"):
            self.refused("incomplete", self.script(module([("w", tensor())]), {"constants.pkl": constants}), "constants.pkl")
        self.refused("corrupt", self.script(module([("w", tensor())]), {"constants.pkl": pickled(b")") + b"x"}), "constants.pkl")

    def test_a09_storages_that_are_missing_deflated_or_too_short(self):
        whole = module([("w", tensor())])
        self.refused("corrupt", self.script(module([("w", tensor("1"))])), "storage '1'")
        self.refused("corrupt", self.script(whole, {"constants.pkl": pickled(b"(" + tensor("0") + b"t")}), "storage '0'")
        self.refused("unsupported", self.script(whole, {"data/0": self.file(bytes(8))}), "deflated")
        for size in (0, 4, 7, 12):
            self.refused("corrupt", self.script(whole, {"data/0": bytes(size)}), "storage '0'")
        self.refused("corrupt", self.script(module([("w", tensor(size=3))])), "storage of 2")

    def test_a10_storage_classes_that_no_torch_has(self):
        self.refused("unsupported", self.script(module([("w", tensor(storage="EvilStorage"))])), "EvilStorage")
        self.refused("corrupt", self.script(module([("w", tensor()), ("v", tensor(storage="IntStorage"))])), "two ways")

    def test_a11_objects_that_are_no_modules(self):
        for odd in (module([(b"K\x01", tensor())]), b"c__torch__\nQ\n)\x81(" + tensor() + b"tb", b"c__torch__\nQ\n)\x81Nb"):
            self.assertEqual(self.names(self.script(module([("m", odd)]))), ["m"])
        # A class whose name is that of a function which runs code.
        run = b"cposix\nsystem\n" + text("true") + b"\x85R"
        self.refused("unsafe", self.script(module([("w", run)])), "posix.system")
        self.refused("unsafe", self.script(b"N", {"constants.pkl": pickled(run)}), "posix.system")

    def test_a12_names_of_attributes_as_nobody_gives_them(self):
        for name in ("", ".", "..", "a/b", "a\n\x1b[31m", "é" * 300, "CONSTANTS.c0", "training."):
            self.assertEqual(self.names(self.script(module([(name, tensor())]))), [name])
        listed = tessera("ls", self.script(module([("\x1b[31mred", tensor())])))
        self.assertNotIn("\x1b", listed.stdout + listed.stderr)
        self.refused("conflict", self.script(module([("CONSTANTS.c0", tensor())]), {"constants.pkl": pickled(b"(K\x07t")}), "CONSTANTS.c0")

    def export(self, models, name="m.pt2"):
        """Models by name, each with one weight of two floats by its name."""
        records = {"archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "data/weights/weight_0": bytes(8)}
        meta = {"dtype": 7, "sizes": [{"as_int": 2}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}
        for model, weight in models.items():
            entry = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
            records |= {f"models/{model}.json": b"{}", f"data/constants/{model}_constants_config.json": b'{"config": {}}',
                        f"data/weights/{model}_weights_config.json": json.dumps({"config": {weight: entry}})}
        return self.archive(records, name)

    def test_a29_models_whose_names_collide(self):
        self.assertEqual(self.names(self.export({"a": "b.w", "a.c": "w"})), ["a.b.w", "a.c.w"])
        self.assertEqual(self.names(self.export({"a": "b.w", "a.b": "w"})), ["['a']['b.w']", "['a.b']['w']"])
        self.assertEqual(self.names(self.export({"..": "w", "a/b": "w"})), ["...w", "a/b.w"])

    def test_a05_tables_that_are_a_gigabyte_when_they_are_inflated(self):
        with zipfile.ZipFile(self.export({"m": "w"}), "a") as out:
            out.writestr("m/models/n.json", b"{}")
            out.writestr("m/data/constants/n_constants_config.json", b"{}")
            out.write(self.file(b"{}", GIGABYTE), "m/data/weights/n_weights_config.json", zipfile.ZIP_DEFLATED)
        self.refused("limit", self.work / "m.pt2", "n_weights_config.json")

    def test_scan_unpickles_nothing_and_finds_what_would_run(self):
        run = pickled(b"cposix\nsystem\n" + text(f"touch {self.work}/ran") + b"\x85R")
        for record in ("data/constants/opaque_obj_0", "data/weights/weight_1", "data/sample_inputs/m.pt", "extra/notes"):
            path = self.export({"m": "w"})
            with zipfile.ZipFile(path, "a") as out:
                out.writestr(f"m/{record}", run)
            done = tessera("scan", path)
            self.assertEqual(done.returncode, 1, (record, done.stdout, done.stderr))
            self.assertIn("posix.system", done.stdout)
            self.assertIn("models/m.json, which torch.export.load evaluates", done.stderr)
        # A record of another kind hides nothing.
        path = self.export({"m": "w"})
        with zipfile.ZipFile(path, "a") as out:
            out.writestr("m/data/constants/opaque_obj_0", run)
            out.writestr("m/constants.pkl", pickled(b")"))
        done = tessera("scan", path)
        self.assertEqual(done.returncode, 1, (done.stdout, done.stderr))
        self.assertIn("posix.system", done.stdout)
        path = self.script(module([("w", tensor())]), {"code/__torch__.py": b"class Module(Module):\n"})
        done = tessera("scan", path)
        self.assertIn("code/__torch__.py, which torch.jit.load compiles", done.stderr)
        self.assertFalse((self.work / "ran").exists())


if __name__ == "__main__":
    TESSERA, GOLDEN = sys.argv[1], pathlib.Path(sys.argv[2])
    unittest.main(argv=sys.argv[:1])
