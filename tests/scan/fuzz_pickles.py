#!/usr/bin/env python3
"""Draws pickles opcode by opcode and lets CPython judge: whatever it imports, calls or changes, the scan names; and what
the scan finds clean does nothing but build data when CPython loads it for good.

    fuzz_pickles.py NAMES_OF GOLDEN_DIRECTORY [--count N] [--seed S]

One fault ends it with exit code 1 and the pickle. The counts of long runs: docs/soak.md.
"""
import _compat_pickle
import argparse
import collections
import copyreg
import importlib
import io
import pathlib
import pickle
import pickletools
import random
import resource
import struct
import subprocess
import sys
import time

BATCH = 500
MOST = 4000  # bytes of a pickle

TEXTS = ["a", "os", "system", "builtins", "getattr", "torch", "Size", "latin1", "numpy", "__class__", "TORCH_CHANNELS_LAST",
         "collections", "OrderedDict", "eval", "copyreg", "_reconstructor", "x" * 300, "\u00e9", "1", "posix", "", "append", "extend", "__setstate__", "as_subclass", "module", "storage"]
NAMES = [("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "list"),
         ("__builtin__", "object"), ("__builtin__", "getattr"), ("copy_reg", "_reconstructor"), ("posix", "system"),
         ("os", "system"), ("_codecs", "encode"), ("builtins", "getattr"), ("builtins", "type"), ("argparse", "Namespace"),
         ("types", "SimpleNamespace"), ("datetime", "date"), ("functools", "partial"), ("fractions", "Fraction"),
         ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), ("mine", "Class"), ("pathlib", "PurePosixPath"),
         ("collections", "Counter"), ("collections", "deque"), ("builtins", "bytearray"), ("array", "array"),
         ("uuid", "UUID"), ("copyreg", "__newobj__"), ("builtins", "int"), ("decimal", "Decimal"), ("collections", "UserDict"),
         ("collections", "UserList"), ("torch.storage", "_load_from_bytes"), ("torch._utils", "_rebuild_parameter")]
EXTENSIONS = (5, 300, 70000)  # registered: of mod.ext


class Anything:
    """Stands for whatever a name is: takes every call and every change."""
    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return Anything()

    def __setstate__(self, _):
        pass

    def append(self, _):
        pass

    def extend(self, _):
        pass

    def add(self, _):
        pass

    def __setitem__(self, key, value):
        pass


class Witness(pickle.Unpickler):
    """CPython's own machine; notes every name that it asks for."""
    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.names = []

    def find_class(self, module, name):
        self.names.append((module, name))
        return Anything

    def persistent_load(self, pid):
        return pid[1] if isinstance(pid, tuple) and len(pid) > 1 and pid[0] == "module" else None


def seen_by_python(data):
    witness = Witness(data)
    try:
        witness.load()
    except Exception:  # whatever a pickle makes of it: names are noted before
        pass
    return witness.names


def python3_name(module, name):
    mapped = _compat_pickle.NAME_MAPPING.get((module, name))
    if mapped:
        return mapped
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def is_named(module, name, names):
    if module == "mod":  # an extension's number stands for it
        return any(known.startswith("copyreg.extension ") for known in names)
    both = {f"{module}.{name}", ".".join(python3_name(module, name))}
    if both & names:
        return True
    # A getattr that gave members of classes which are known is told as these.
    return "builtins.getattr" in both and any(known.count("TORCH_") or known.endswith("ProcessGroupState") for known in names)


class Drawer:
    def __init__(self, rng, corpus):
        self.rng, self.corpus = rng, corpus

    def one(self):
        pick = self.rng.random()
        if pick < 0.4:
            return b"".join(self.mutated(self.rng.choice(self.corpus)))[:MOST]
        if pick < 0.5:
            a, b = self.rng.choice(self.corpus), self.rng.choice(self.corpus)
            return b"".join(a[:self.rng.randrange(len(a) + 1)] + b[self.rng.randrange(len(b) + 1):])[:MOST]
        return self.grown()

    def mutated(self, pieces):
        pieces = list(pieces)
        for _ in range(self.rng.choice((1, 1, 2, 3, 6))):
            at = self.rng.randrange(len(pieces) + 1)
            what = self.rng.randrange(5)
            if what == 0:
                pieces[at:at + 1] = []
            elif what == 1 and pieces:
                pieces.insert(at, pieces[self.rng.randrange(len(pieces))])
            # A number of the memo that is huge makes CPython fill memory.
            elif what == 2 and at < len(pieces) and pieces[at] and pieces[at][:1] not in b"rp":
                raw = bytearray(pieces[at])
                raw[self.rng.randrange(len(raw))] = self.rng.randrange(256)
                pieces[at] = bytes(raw)
            else:
                pieces.insert(at, self.opcode()[0])
        return pieces

    def text(self):
        value, rng = self.rng.choice(TEXTS), self.rng
        raw = value.encode()
        kind = rng.randrange(7)
        if kind == 0:
            return b"X" + struct.pack("<I", len(raw)) + raw
        if kind == 1 and len(raw) < 256:
            return b"\x8c" + bytes([len(raw)]) + raw
        if kind == 2:
            return b"V" + "".join(c if rng.random() < 0.6 and c not in "\\\n" else f"\\u{ord(c):04x}" for c in value).encode(
                "latin1") + b"\n"
        if kind == 3 and value.isascii():
            return b"S'" + "".join(c if rng.random() < 0.6 else f"\\x{ord(c):02x}" for c in value).encode() + b"'\n"
        if kind == 4:
            return b"U" + bytes([len(raw) % 256]) + raw[:len(raw) % 256]
        if kind == 5:
            return b"T" + struct.pack("<i", len(raw)) + raw
        return b"\x8d" + struct.pack("<Q", len(raw)) + raw

    def index(self):
        rng, i = self.rng, self.rng.randrange(6)
        form = rng.randrange(6)
        if form < 3:
            return bytes([i]), struct.pack("<I", i), None
        return None, None, rng.choice((f"{i}", f" {i}", f"+{i}", f"0{i}", f"{i}\0x", f"1_{i}", f"{i}x", f"-{i}")).encode() + b"\n"

    def memo(self, get):
        short, long, words = self.index()
        if words:
            return (b"g" if get else b"p") + words
        if self.rng.random() < 0.7:
            return (b"h" if get else b"q") + short
        return (b"j" if get else b"r") + long

    def opcode(self):
        """(bytes, what it takes off the stack, what it leaves); a mark counts as nothing."""
        rng, pick = self.rng, self.rng.randrange(40)
        if pick < 7:
            module, name = rng.choice(NAMES)
            if rng.random() < 0.7:
                return f"c{module}\n{name}\n".encode(), 0, 1
            return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93", 0, 1
        if pick < 11:
            return self.text(), 0, 1
        if pick < 14:
            return rng.choice((b"N", b"K\5", b"I01\n", b"\x88", b"]", b"}", b")", b"\x8f", b"J\0\0\0\x80", b"F1.5\n", b"L5L\n",
                               b"G\0\0\0\0\0\0\0\0", b"\x8a\1\5", b"C\2ab", b"I 7\n", b"\x96\1\0\0\0\0\0\0\0a")), 0, 1
        if pick < 17:
            return rng.choice((b"\x85", b"\x85", b"\x86", b"\x87")), 1, 1
        if pick < 22:
            return rng.choice((b"R", b"R", b"R", b"\x81", b"\x92")), 2, 1
        if pick < 24:
            return b"b", 2, 1
        if pick < 26:
            return rng.choice((b"a", b"s", b"2", b"0")), 1, 1
        if pick < 29:
            return self.memo(True), 0, 1
        if pick < 32:
            return rng.choice((self.memo(False), b"\x94")), 0, 0
        if pick < 34:
            return b"(", 0, 0
        if pick < 38:
            module, name = rng.choice(NAMES)
            return rng.choice((b"t", b"l", b"d", b"e", b"u", b"1", b"o", b"\x90", b"\x91", f"i{module}\n{name}\n".encode())), 1, 1
        if pick == 38:
            return rng.choice((b"\x82\5", b"\x83" + struct.pack("<H", 300), b"\x84" + struct.pack("<I", 70000), b"Q", b"Pid\n",
                               b"\x97", b"\x98")), 0, 1
        return rng.choice((b"\x80\2", b"\x80\4", b"\x80\5", b"\x80\6", b"\x95" + struct.pack("<Q", rng.randrange(20)))), 0, 0

    def grown(self):
        """Opcodes of which each finds enough on the stack, more often than not."""
        rng = self.rng
        out, height = [rng.choice((b"\x80\2", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\0", b""))], 0
        for _ in range(rng.randrange(2, 40)):
            raw, takes, leaves = self.opcode()
            if takes > height and rng.random() < 0.97:
                continue
            out.append(raw)
            height = max(0, height - takes) + leaves
        out.append(b"." if rng.random() < 0.95 else b"")
        return b"".join(out)[:MOST]


def pieces_of(data):
    """The opcodes of a golden, each as its bytes."""
    places = [place for _, _, place in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(places, places[1:] + [len(data)])]


def corpus_of(golden):
    found = []
    for file in sorted((golden / "pickle").iterdir()) + sorted((golden / "dcp_forms").iterdir()):
        data = file.read_bytes()
        try:
            if len(data) <= MOST:
                found.append(pieces_of(data))
        except Exception:  # other files that lie there
            continue
    return found


class Scanner:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, batch):
        try:
            self.process.stdin.write(b"".join(struct.pack("<I", len(data)) + data for data in batch) + bytes(4))
            self.process.stdin.flush()
            return [self.answer() for _ in batch]
        except BrokenPipeError:
            raise SystemExit(f"names_of died: {self.process.wait()}") from None

    def answer(self):
        raw = self.process.stdout.read(4)
        if len(raw) < 4:
            raise SystemExit(f"names_of died: {self.process.wait()}")
        raw = self.process.stdout.read(struct.unpack("<I", raw)[0])
        names, at = set(), 1
        while at < len(raw):
            size = raw[at] | raw[at + 1] << 8
            names.add(raw[at + 2:at + 2 + size].decode(errors="replace"))
            at += 2 + size
        return raw[0], names


class Sandbox:
    """Loads what is clean with the real classes of the standard library, and watches what that does."""
    HARMLESS = ("object.__getattr__", "object.__setattr__", "pickle.find_class", "array.__new__")

    def __init__(self):
        self.events = []
        self.active = False
        sys.addaudithook(self.heard)
        self.modules = [importlib.import_module(name) for name in
                        ("collections", "builtins", "argparse", "types", "datetime", "fractions", "pathlib", "array", "uuid",
                         "decimal", "_codecs", "copyreg")]
        for name in ("encodings.latin_1", "encodings.utf_8", "encodings.ascii"):
            importlib.import_module(name)
        self.before = self.state()

    def heard(self, event, _):
        if self.active and event not in self.HARMLESS:
            self.events.append(event)

    def state(self):
        """Every class of these modules with its attributes."""
        classes = {id(thing): (thing, dict(vars(thing))) for module in self.modules for thing in vars(module).values()
                   if isinstance(thing, type)}
        return {key: (thing, {name: id(value) for name, value in found.items()}) for key, (thing, found) in classes.items()}

    def load(self, data):
        self.events = []
        self.active = True
        try:
            pickle.loads(data)
        except Exception:  # nothing but data, and wrong
            pass
        finally:
            self.active = False
        return self.events

    def changed(self):
        return self.state() != self.before


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names_of")
    parser.add_argument("golden", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for code in EXTENSIONS:
        copyreg.add_extension("mod", f"ext{code}", code)
    # A huge number of the memo makes CPython's machine fill all memory there is.
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    rng = random.Random(options.seed)
    drawer, scanner, sandbox = Drawer(rng, corpus_of(options.golden)), Scanner(options.names_of), Sandbox()
    began, counts = time.monotonic(), collections.Counter()
    while counts["pickles"] < options.count:
        batch = [data for data in (drawer.one() for _ in range(BATCH)) if data]
        for data, (flags, names) in zip(batch, scanner(batch)):
            counts["pickles"] += 1
            asked = seen_by_python(data)
            missed = [f"{module}.{name}" for module, name in asked if not is_named(module, name, names)]
            # Behind a frame that is crossed CPython loses bytes where it reads from a file: nobody can follow.
            if missed and not flags & 8:
                raise SystemExit(f"CPython asks for {missed}, the scan names {sorted(names)}:\n{data!r}")
            counts["with names"] += bool(asked)
            if flags == 4:
                counts["clean"] += 1
                if any(name.startswith(("torch.", "numpy.")) for name in names):
                    continue
                counts["loaded"] += 1
                if events := sandbox.load(data):
                    raise SystemExit(f"a clean pickle does {events}:\n{data!r}")
        if sandbox.changed():
            raise SystemExit(f"one of the last {BATCH} clean pickles changed a class (seed {options.seed})")
    seconds = time.monotonic() - began
    print(f"{counts['pickles']} pickles, {counts['with names']} with names, {counts['clean']} clean, {counts['loaded']} of them "
          f"loaded: no fault, {seconds:.0f} s")


if __name__ == "__main__":
    main()
