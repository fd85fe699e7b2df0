#!/usr/bin/env python3
"""Cuts the code samples out of public headers and documents, so that a build compiles them.

  extract.py core|torch OUTPUT [FILE...]   writes OUTPUT, a C++ file with every sample of the FILEs
  extract.py list FILE...                  prints the samples
  extract.py one TEXT OUTPUT FILE          writes OUTPUT, the statements of the sample of FILE that contains TEXT

A sample of a document is a block fenced as ```cpp. A sample of a header is a block of comment lines that are
indented by three blanks or more and of which one ends like a statement; lists and tables of codes are none. Each
sample becomes a namespace of its own: declarations stand in it as they are, statements in a function. Lines of dots
alone are left out. given_core.h and given_torch.h declare what samples take for granted (a model, an optimizer).
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATEMENT = re.compile(r"[;{}]\s*(//.*)?$")
ELLIPSIS = re.compile(r"^\s*\.\.\.\s*(//.*)?$")
# What cannot stand inside of a function.
DECLARATION = re.compile(r"^(struct|class|template|TESSERA_MODULE|namespace|using namespace|int main|void \w+\(|enum)")


def fenced(text):
    """(line, sample) of every ```cpp block."""
    for match in re.finditer(r"^```cpp\n(.*?)^```", text, re.S | re.M):
        yield text.count("\n", 0, match.start()) + 2, match.group(1)


def commented(text):
    """(line, sample) of every indented block of code in comments."""
    block, first = [], 0
    for number, line in enumerate(text.splitlines() + [""], 1):
        match = re.match(r"^\s*//( {3,}\S.*)$", line)
        blank = re.match(r"^\s*//\s*$", line)
        if match or (blank and block):
            if not block:
                first = number
            block.append(match.group(1) if match else "")
            continue
        if any(STATEMENT.search(one) for one in block) and block[0].lstrip()[0] not in "`-":
            indent = min(len(one) - len(one.lstrip()) for one in block if one)
            yield first, "\n".join(one[indent:] for one in block).rstrip() + "\n"
        block = []


def samples(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for line, code in fenced(text) if name.endswith(".md") else commented(text):
        yield name, line, code


def parts(code):
    """The includes, declarations and statements of a sample, each a list of lines."""
    includes, declarations, statements = [], [], []
    into, depth = statements, 0
    for line in code.splitlines():
        if ELLIPSIS.match(line):
            continue
        if line.startswith("#include"):
            includes.append(line)
            continue
        if depth == 0:
            into = declarations if DECLARATION.match(line) else statements
        into.append(line)
        bare = re.sub(r"//.*|\"[^\"]*\"", "", line)
        depth += bare.count("{") + bare.count("(") - bare.count("}") - bare.count(")")
    return includes, declarations, statements


def generate(kind, names):
    out = ["// Made by tests/samples/extract.py.", f'#include "samples/given_{kind}.h"', "using namespace given;", ""]
    bodies = []
    for number, (name, line, code) in enumerate(found for name in names for found in samples(name)):
        includes, declarations, statements = parts(code)
        out += includes
        where = f'#line {line} "{name}"'
        # A specialization belongs to the namespace of what it specializes.
        outside = declarations if declarations and declarations[0].startswith("template <>") else []
        inside = [] if outside else declarations
        bodies += [where, *outside, f"namespace sample_{number} {{", where, *inside,
                   "[[maybe_unused]] void run() {", where, *statements, "}", "}", ""]
    return "\n".join(out + [""] + bodies)


def one(text, name):
    """For a test that includes it in a function."""
    (line, code), = ((line, code) for _, line, code in samples(name) if text in code)
    includes, _, statements = parts(code)
    return "\n".join([f'#line {line + len(includes)} "{name}"', *statements, ""])


def main():
    kind, *arguments = sys.argv[1:]
    if kind == "one":
        text, output, name = arguments
        pathlib.Path(output).write_text(one(text, name), encoding="utf-8")
        return
    if kind == "list":
        for name in arguments:
            for found, line, code in samples(name):
                print(f"== {found}:{line}\n{code}")
        return
    output, *names = arguments
    pathlib.Path(output).write_text(generate(kind, names), encoding="utf-8")


if __name__ == "__main__":
    main()
