"""Makes tests/golden/pickle/opcodes.txt: what CPython's pickletools says of every opcode.

A line an opcode: its byte, how its argument is written, values on the stack before and after. "mark" stands for
everything above the topmost mark, and the mark.
"""

import pathlib
import pickletools

FORMS = {
    None: "none",
    "uint1": "number1", "uint2": "number2", "int4": "number4", "uint4": "number4", "uint8": "number8",
    "float8": "number8",
    "long1": "sized1", "string1": "sized1", "bytes1": "sized1", "unicodestring1": "sized1",
    "long4": "sized4", "string4": "sized4", "bytes4": "sized4", "unicodestring4": "sized4",
    "bytes8": "sized8", "bytearray8": "sized8", "unicodestring8": "sized8",
    "decimalnl_short": "line", "decimalnl_long": "line", "floatnl": "line", "stringnl": "line",
    "stringnl_noescape": "line", "unicodestringnl": "line",
    "stringnl_noescape_pair": "two_lines",
}


def before(opcode):
    names = [thing.name for thing in opcode.stack_before]
    if "mark" not in names:
        return str(len(names))
    return f"mark+{names.index('mark')}" if names.index("mark") else "mark"


lines = [f"{ord(opcode.code):02x} {FORMS[opcode.arg and opcode.arg.name]} {before(opcode)} {len(opcode.stack_after)}\n"
         for opcode in pickletools.opcodes]
(pathlib.Path(__file__).resolve().parent.parent / "pickle" / "opcodes.txt").write_text("".join(sorted(lines)))
